"""The last weights of a training, to go back to the step where it came to a level: looks at a network come too seldom to see it.

Copies are cheap where passes over data are not: some hundreds over a whole training, kept only from one look to the next.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Steps from one copy to the next, as a share of the steps before; and the memory that copies may take, in bytes: beyond it every
# second one is dropped.
SPACING, MOST_BYTES = 1 / 100, 128_000_000
# A few samples say about what the loss is: a place counts as across a level where they say that it is so far below. And passes
# over the training set that may be made to find the first one.
BELOW, PASSES = 0.93, 3

# Loss and accuracy over all training samples.
Outcome = tuple[float, float]


@dataclass(frozen=True, eq=False)
class Place:
    """A network as it was after a step."""

    step: int
    weights: dict[str, Tensor]


class Trail:
    """Where one network was lately, the present included."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.places: list[Place] = []
        self.spacing = SPACING

    def state_dict(self) -> dict[str, Any]:
        """Where the network was lately, as plain numbers and tensors."""
        return {"places": [(place.step, place.weights) for place in self.places], "spacing": self.spacing}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember where another one had been."""
        self.places = [Place(step, weights) for step, weights in state["places"]]
        self.spacing = state["spacing"]

    def follow(self, step: int) -> None:
        """Keep a copy of the weights after this step, if the last one is old enough."""
        last = self.places[-1].step if self.places else 0
        if step >= last + max(1, self.spacing * step):
            self.places.append(self.present(step))
            if len(self.places) * _bytes(self.places[-1]) > MOST_BYTES:
                self.places, self.spacing = self.places[1::2], 2 * self.spacing

    def forget(self, step: int) -> None:
        """Begin anew after this step: the network has not come to a level before it."""
        self.places = [place for place in self.places if place.step > step]
        self.spacing = SPACING

    def present(self, step: int) -> Place:
        """A copy of the weights as they are, after this step."""
        return Place(step, {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()})

    @contextmanager
    def at(self, place: Place) -> Iterator[nn.Module]:
        """The network as it was; afterwards it is as it is, bit for bit."""
        now = self.present(place.step)
        self._set(place)
        try:
            yield self.model
        finally:
            self._set(now)

    @torch.no_grad()
    def _set(self, place: Place) -> None:
        for name, tensor in self.model.state_dict().items():
            tensor.copy_(place.weights[name])


def first_crossing(
    places: Sequence[Place], level: float, about: Callable[[Place], float], whole: Callable[[Place], Outcome]
) -> tuple[Place, Outcome] | None:
    """The first of these places whose loss over the `whole` training set is at or below a level; None if none was found to be.

    `about` is the loss that a few samples have there. It is believed to fall from place to place; `whole` decides, few times.

    >>> places = [Place(step, {}) for step in range(1, 100)]
    >>> place, outcome = first_crossing(places, 0.1, lambda place: 0.98 / place.step, lambda place: (1 / place.step, 1.0))
    >>> place.step, outcome
    (11, (0.09090909090909091, 1.0))
    """
    earliest = 0
    for _ in range(PASSES):
        if earliest >= len(places):
            break
        chosen = bisect.bisect_left(places, True, earliest, len(places) - 1, key=lambda p: about(p) <= BELOW * level)
        outcome = whole(places[chosen])
        if outcome[0] <= level:
            return places[chosen], outcome
        earliest = chosen + 1
    return None


def _bytes(place: Place) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in place.weights.values())
