"""From a problem to values with errors: needs, evidence, the run, and the report as data."""
