"""Loss landscapes: the loss along lines and over planes through a minimum."""

from spiritlevel.landscape.landscape import Line, Surface, line, load, surface

__all__ = ["Line", "Surface", "line", "load", "surface"]
