"""Whether an eigenvector hides beside the one that a search has ended with.

A residual proves that an eigenvalue is near, not that it is the last one. A search from one vector may end with a mixture of two
eigenvectors whose eigenvalues lie close together, or with the second alone where the start held next to nothing of the first.
What part of the data said of leading eigenvectors is therefore held against the basis of the search: what lies outside of
it, and curves nearly as much on other samples, must be started from as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spiritlevel.curvature.lanczos import End, Lanczos
from spiritlevel.curvature.vectors import length, unit
from spiritlevel.problem.shards import Shards

# So many eigenvectors of the part are held against a search, with eigenvalues of at least this share of the first.
MOST_RIVALS, LEAST_RIVAL = 2, 0.5
# A rival of which less than this share lies outside of the basis is accounted for.
ACCOUNTED = 0.05
# A vector outside of the basis hides an eigenvector if it curves this much of what was found: the part's vectors are noisy.
DOUBT = 0.55


def rivals_from(search: Lanczos) -> Tensor:
    """The leading Ritz vectors of a search on part of the data, (k, n)."""
    values, vectors = search.leading(MOST_RIVALS)
    near = values.abs() >= LEAST_RIVAL * values[0].abs()
    return vectors[near.to(vectors.device)]


def unaccounted(search: Lanczos, rivals: Tensor) -> list[Tensor]:
    """What lies outside of the basis of rivals that are not inside of it, each of length one."""
    found = []
    for rival in rivals:
        rest = search.outside(rival)
        if length(rest, search.shards) ** 2 > ACCOUNTED * length(rival, search.shards) ** 2:
            found.append(unit(rest, search.shards))
    return found


def doubtful(vector: Tensor, image: Tensor, value: float, end: End, shards: Shards) -> bool:
    """Whether a vector curves so much that an eigenvalue beyond `value` may belong to it."""
    form = shards.total(float((vector * image).sum(dtype=torch.float64)))
    share = form / value if value else 0.0
    return (abs(share) if end == "magnitude" else share) >= DOUBT
