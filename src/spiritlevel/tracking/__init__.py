"""Following flatness while a network trains: when to measure, on what, and what came of it."""
