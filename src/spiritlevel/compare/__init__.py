"""Several trained networks side by side: who is flatter, and how sure that is."""

from spiritlevel.compare.compare import Comparison, compare

__all__ = ["Comparison", "compare"]
