"""What can be measured by name: data sets, networks, checkpoints."""
