"""Attacks: the same function with a sharper or flatter minimum."""

from spiritlevel.attack.attack import Attack, flattest, sharpen, sharpen_ball

__all__ = ["Attack", "flattest", "sharpen", "sharpen_ball"]
