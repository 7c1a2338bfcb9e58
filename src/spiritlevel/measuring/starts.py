"""Where searches for eigenvectors ended, for the next call at nearby weights to start from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from spiritlevel.curvature.lanczos import Eigenpair
from spiritlevel.measuring.needs import Operator


class Starts:
    """The Ritz vectors of the last call by operator or by a layer's name, (k, n): first the one that was searched for.

    A search that starts from them is certified as any other: it ends when its residual says so. `numbers` is for searches of
    other kinds, by their names.
    """

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}
        self._vectors: dict[Operator | str, Tensor] = {}

    def of(self, key: Operator | str, size: int) -> Tensor | None:
        """Where the last search ended, if it was one in a network of this size."""
        vectors = self._vectors.get(key)
        return vectors if vectors is not None and vectors.shape[1] == size and bool(vectors.isfinite().all()) else None

    def of_blocks(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """The same for blocks of layers: for all of these, or for none."""
        found = {name: self.of(name, size) for name, size in sizes.items()}
        known = {name: vectors for name, vectors in found.items() if vectors is not None}
        return known if len(known) == len(found) else {}

    def keep(self, pairs: Iterable[tuple[Operator | str, Eigenpair]]) -> None:
        """Remember where these searches ended."""
        for key, pair in pairs:
            self._vectors[key] = torch.cat([pair.vector.unsqueeze(0), pair.others])

    def forget(self) -> None:
        """Forget them: the next searches start from random vectors."""
        self._vectors.clear()
        self.numbers.clear()
