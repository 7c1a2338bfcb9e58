"""Where people train and log: callbacks for trainers, and loggers. Each needs its own package, imported with it."""
