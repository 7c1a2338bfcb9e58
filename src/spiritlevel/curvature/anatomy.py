"""Which parameters the exact sweep covers: decided from what runs on all of the data, confirmed on a few samples.

A network may take another branch for some samples, or leave an expert unused for most of them. So every chunk of the data
is traced once: what any of them bends counts as bent, and a use that some of them lack is not swept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from spiritlevel.curvature.metrics import Metrics
from spiritlevel.curvature.taps import SampleAxis
from spiritlevel.errors import SpiritLevelError
from spiritlevel.network.layers import Layer
from spiritlevel.problem.batches import Batch
from spiritlevel.problem.problem import Problem
from spiritlevel.problem.survey import Seen, seen_on

Axes = Mapping[str, list[SampleAxis | None]]


@dataclass(frozen=True)
class Anatomy:
    """What is known of a network's parameters.

    Attributes:
        layers: Weight's parameter name → layer, in the order of the forward pass.
        axes: Parameter name → sample axis of each of its uses, for the parameters whose per-sample gradients the
            sweep can read off.
        bent: Parameter name → why its block of the Hessian is more than its Gauss–Newton block.
        outputs: Numbers the network gives for a sample.
        spread: Entries a sample has in the results of all layers with several positions.
        work: Multiplications for a sample in all layers, about: what pulling one column back takes.
        paths: The sequences of operations that all this was read from.
        metrics: Statistic → layer → the metric that it is taken in.
    """

    layers: Mapping[str, Layer]
    axes: Axes
    bent: Mapping[str, str]
    outputs: int = 0
    spread: int = 0
    work: int = 0
    paths: set[int] = field(default_factory=set)
    metrics: Metrics = field(default_factory=dict)

    @property
    def swept(self) -> list[str]:
        """The parameters whose Gauss–Newton blocks the sweep computes."""
        return list(self.axes)

    def exact(self, name: str) -> bool:
        """Whether the block of this parameter equals its Gauss–Newton block, which the sweep has exactly."""
        return name in self.axes and name not in self.bent

    def check_path(self, problem: Problem, batch: Batch, path: Iterable[str]) -> None:
        """Refuse a batch that runs through other operations than those looked at, if that makes any of this untrue."""
        if hash(tuple(path)) in self.paths:
            return
        found = joined(self, [seen_on(problem, batch)])
        changed = [name for name in self.axes if self.exact(name) and not found.exact(name)]
        if changed:
            raise SpiritLevelError(
                f"the network computes something else for some batches of the same samples, so {changed[0]!r} cannot be "
                "measured exactly: a branch of its forward depends on which samples come together. Pass a loss of the form "
                "(model, batch) -> (mean, count), which keeps your batches as they are"
            )
        self.paths.add(hash(tuple(path)))


def joined(anatomy: Anatomy, chunks: Iterable[Seen]) -> Anatomy:
    """What holds on all of these chunks as well."""
    layers, axes, bent = dict(anatomy.layers), dict(anatomy.axes), dict(anatomy.bent)
    paths = set(anatomy.paths)
    for seen in chunks:
        paths.add(seen.path)
        bent = dict(seen.bent) | bent
        for name, layer in seen.layers.items():
            known = layers.setdefault(name, layer)
            if known != layer or name in seen.mixed:
                layers[name] = replace(known, followed=known.followed and layer.followed)
                axes.pop(name, None)
                bent.setdefault(name, "used in more than one form, such as a matrix and its transpose")
        for name in [name for name, found in axes.items() if not _fits(seen, name, found)]:
            del axes[name]
            bent.setdefault(name, "used for some samples in another way than for others")
    return replace(anatomy, layers=layers, axes=axes, bent=bent, paths=paths)


def _fits(seen: Seen, name: str, axes: list[SampleAxis | None]) -> bool:
    """Whether a parameter's uses have their samples where `axes` says, or it is not used here at all."""
    shapes = seen.shapes.get(name, ())
    return not shapes or (
        len(shapes) == len(axes)
        and all(
            axis is not None and axis.axis < len(shape) and shape[axis.axis] == seen.samples * axis.repeat
            for shape, axis in zip(shapes, axes, strict=True)
        )
    )
