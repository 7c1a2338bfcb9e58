"""One seed for a cell, and seeds of their own for its random parts."""

import hashlib


def seed_for(seed: int, purpose: str) -> int:
    """A seed of its own for each random part, so that none repeats the draws of another.

    >>> seed_for(0, "labels") == seed_for(0, "labels"), seed_for(0, "labels") == seed_for(0, "batches")
    (True, False)
    """
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:7])
