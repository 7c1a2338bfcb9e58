"""A study as a page: its answer, its sections, its tables and pictures."""
