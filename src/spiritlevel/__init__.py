"""How flat is the minimum of a trained network, in numbers that no rescaling of its weights can fool."""

from spiritlevel._version import __version__

__all__ = ["__version__"]
