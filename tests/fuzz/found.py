"""Inputs whose numbers were once wrong, each reduced to what matters, by what it shows."""

from fuzz.subjects import Subject

FOUND: dict[str, Subject] = {}
