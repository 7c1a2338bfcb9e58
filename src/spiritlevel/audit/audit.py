"""The audit: rescale a network without changing its function, and say of each measure whether it survives.

Every measure is taken of the network and of its twins at growing strengths. A verdict compares the change with the
values' own errors, and the measure's claim with the verdict.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spiritlevel.audit.findings import Audit, Finding, Trial
from spiritlevel.errors import SpiritLevelError
from spiritlevel.measuring.order import LEVEL, margin, order, rounding_of
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.registry import resolve_measures
from spiritlevel.measuring.report import Report
from spiritlevel.measuring.run import measure
from spiritlevel.measuring.value import Value
from spiritlevel.problem.batches import Batch, Data
from spiritlevel.problem.checks import check_whole_number
from spiritlevel.problem.devices import doubled_copy
from spiritlevel.problem.losses import Loss, logits_of, resolve_loss
from spiritlevel.problem.wrappers import refuse_shards
from spiritlevel.symmetry import Rescaling, Symmetries, affine, find_symmetries
from spiritlevel.symmetry.layerwise import LayerScales

OF_INPUTS = ("input map", "input shift")
KINDS = ("layer", "neuron", "batch-norm", "linear", "rotation", "output scale", *OF_INPUTS)
MATRICES = ("linear", "rotation")

# An error bar wider than this share of the value cannot show that nothing moved.
WIDEST_BAR = 0.05
LOWER_BOUNDS = "the values are lower bounds found by ascent, which cannot say whether the maximum moved"


def audit(
    model: nn.Module,
    data: Any,
    loss: str | Callable[..., Any] | Loss = "cross_entropy",
    *,
    measures: str | Iterable[str | Measure] | None = None,
    kinds: Sequence[str] | None = None,
    strengths: Sequence[float] = (0.5, 1.0, 1.5),
    seeds: Sequence[int] = (0,),
    groups: bool = False,
    tolerance: float = 1e-3,
    progress: bool | Callable[[str, float], None] = False,
) -> Audit:
    """Whether each measure means something on this network: does it survive what leaves the function alone?

    Args:
        model, data, loss, measures, tolerance, progress: As for `measure`. The audit works in double precision.
        kinds: Which changes: "layer" (one factor a layer), "neuron" (one a channel), "batch-norm" (one a channel,
            absorbed by running statistics), "linear" (an invertible matrix between two linear maps, as in the heads of
            attention), "rotation" (of a residual stream that is normalized wherever it is read), "output scale" (the
            outputs times a constant), "input map" (the data times an invertible matrix, absorbed in the first layer),
            "input shift" (a constant added to the data, absorbed in its bias). All that this network has by default.
        strengths: Standard deviations of the log-factors, ascending; for matrices exp(strength·G/√n), those of G.
        seeds: One twin for every strength and seed.
        groups: Also audit every discovered group of factors by itself, as kind "group: NAME".

    >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
    >>> _ = nn.init.constant_(model[0].weight, 2.0), nn.init.constant_(model[2].weight, 2.0)
    >>> data = torch.ones(2, 1), torch.full((2, 1), 4.0)
    >>> found = audit(model, data, "mse", measures=["hessian_trace", "kappa_trace_sum"], kinds=["layer"], strengths=[1.0])
    >>> found.verdict("hessian_trace", "layer"), found.verdict("kappa_trace_sum", "layer")
    ('moves', 'invariant')
    """
    chosen, strengths = resolve_measures(measures), _ascending(strengths)
    seeds = [check_whole_number("a seed", seed) for seed in seeds]
    kinds = [kinds] if isinstance(kinds, str) else kinds
    unknown = set(kinds or ()) - set(KINDS)
    if unknown:
        raise SpiritLevelError(f"unknown kinds {sorted(unknown)}; known are {', '.join(KINDS)}")
    fixed = resolve_loss(loss)
    refuse_shards(model)
    original_model, source = doubled_copy(model), Data(data)
    twins = Twins(original_model, source)

    def take(twin: nn.Module, twin_data: Any) -> Report:
        report = measure(
            twin, twin_data, fixed, measures=chosen, tolerance=tolerance, progress=progress, dtype=torch.float64
        )
        return report.without_witnesses()  # maximisers would make the audit as large as its models

    original = take(original_model, source)
    available, skipped = twins.available(kinds or KINDS, groups=groups)
    trials = []
    for kind in available:
        for strength in strengths:
            for seed in seeds:
                twin, twin_data = twins.make(kind, strength, seed)
                trials.append(Trial(kind, strength, seed, take(twin, twin_data)))
    # The more pairs are looked at, the surer each order must be for all of them to be as sure as one.
    level = 1 - (1 - LEVEL) / max(1, len(trials) * len(chosen))
    findings = [
        _judge(each, kind, original, trials, tolerance, claimed=_claims(each, kind, fixed), level=level)
        for kind in available
        for each in chosen
    ]
    return Audit(tuple(findings), original, tuple(trials), skipped)


# --- twins -------------------------------------------------------------------------------------------------------


class Twins:
    """Makes equivalent networks of every kind, each a pure function of (kind, strength, seed)."""

    def __init__(self, model: nn.Module, data: Data) -> None:
        self._model, self._data = model, data
        self._example = Batch(data.first.inputs, None).map(_double).inputs
        self._symmetries: Symmetries = find_symmetries(model, self._example)
        self._groups = {f"group: {group.name}": group for group in self._symmetries.scale_groups}

    def available(self, kinds: Sequence[str], *, groups: bool) -> tuple[list[str], dict[str, str]]:
        """The kinds this network has, and for the others why not."""
        found, skipped = [], {}
        for kind in kinds:
            reason = self._missing(kind)
            if reason:
                skipped[kind] = reason
            else:
                found.append(kind)
        if groups:
            found += self._groups
        return found, skipped

    def _missing(self, kind: str) -> str:
        present = {group.kind for group in self._symmetries.scale_groups}
        if kind == "layer" and not LayerScales(self._symmetries).spread.shape[1]:
            return "no layer of this network can be rescaled as a whole"
        if kind in ("neuron", "batch-norm") and kind not in present:
            return f"the network has no rescaling symmetry of this kind ({kind})"
        if kind in MATRICES and not any(frame.kind == kind for frame in self._symmetries.linear.frames):
            return f"no change of basis of this kind ({kind}) leaves the function of this network alone"
        try:
            if kind in ("output scale", *OF_INPUTS):
                self.make(kind, 0.5, 0)
        except SpiritLevelError as error:
            return str(error)
        return ""

    def make(self, kind: str, strength: float, seed: int) -> tuple[nn.Module, Any]:
        generator = torch.Generator().manual_seed(seed)
        if kind == "output scale":
            return self._scaled_outputs(strength), self._data
        if kind in OF_INPUTS:
            return self._mapped_inputs(strength, generator, shifted=kind == "input shift")
        if kind in MATRICES:
            return self._symmetries.sample(strength, seed, kinds=[kind]).apply(self._model), self._data
        return self._rescaling(kind, strength, generator).apply(self._model), self._data

    def _rescaling(self, kind: str, strength: float, generator: torch.Generator) -> Rescaling:
        symmetries = self._symmetries
        if kind == "layer":
            spread = torch.from_numpy(LayerScales(symmetries).spread)
            logs = spread @ (strength * torch.randn(spread.shape[1], generator=generator, dtype=torch.float64))
            return Rescaling(symmetries, logs)
        logs = strength * torch.randn(symmetries.dimension, generator=generator, dtype=torch.float64)
        if kind in self._groups:
            chosen = torch.zeros(symmetries.dimension, dtype=torch.bool)
            chosen[list(self._groups[kind].factors)] = True
        else:
            chosen = symmetries.of_kind(kind)
        return Rescaling(symmetries, torch.where(chosen, logs, 0.0))

    def _scaled_outputs(self, strength: float) -> nn.Module:
        """The network whose last layer is e^strength times larger: all outputs times a constant."""
        whole = _Scaled(copy.deepcopy(self._model))
        symmetries = find_symmetries(whole, self._example)
        for factor in range(symmetries.dimension):
            logs = torch.zeros(symmetries.dimension, dtype=torch.float64)
            logs[factor] = 1.0
            change = symmetries.log_scales(logs).get("scale")
            if change is not None and float(change) != 0:
                rescaled = Rescaling(symmetries, -strength * logs / float(change)).apply(whole)
                assert isinstance(rescaled, _Scaled)
                return rescaled.inner
        raise SpiritLevelError("the outputs of this network cannot be scaled by its own parameters")

    def _mapped_inputs(self, strength: float, generator: torch.Generator, *, shifted: bool) -> tuple[nn.Module, Any]:
        """The network that reads u = x − c, or u = diag(e^s) Q x with Q a random rotation, absorbed in its first layer."""
        if not isinstance(self._example, Tensor) or not self._example.is_floating_point():
            raise SpiritLevelError("a change of the inputs needs one tensor of real numbers as input")
        first = self._example
        for size in _input_sizes(first):
            matrix, shift = torch.eye(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
            if shifted:
                shift = strength * torch.randn(size, generator=generator, dtype=torch.float64)
            else:
                matrix = _random_matrix(size, strength, generator)
            try:
                mapped = affine(self._model, first, matrix, shift)
            except (SpiritLevelError, RuntimeError):
                continue
            if size == 1 and not shifted:
                break  # one factor for all inputs is a rescaling, not a change of what is near to what
            return mapped.model, _Mapped(self._data, partial(_map_inputs, self._model, matrix, shift))
        change = "shift" if shifted else "change"
        raise SpiritLevelError(f"the first layer of this network cannot absorb a {change} of its input")


class _Scaled(nn.Module):
    """scale · model(x), so that discovery sees the outputs as one more thing that can be rescaled."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return logits_of(self.inner(*args, **kwargs)) * self.scale


class _Mapped:
    """Batches with their inputs mapped, made anew at every pass."""

    def __init__(self, data: Data, change: Callable[[Tensor], Tensor]) -> None:
        self._data, self._change = data, change

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        for batch in self._data:
            yield self._change(batch.inputs.double()), batch.targets


def _ascending(strengths: Any) -> list[float]:
    try:
        found = sorted(set(map(float, strengths)))
    except (TypeError, ValueError):
        found = []
    if not found or not all(0 < strength < math.inf for strength in found):
        raise SpiritLevelError(f"strengths must be positive numbers, as (0.5, 1.0); got {strengths!r}")
    return found


def _map_inputs(model: nn.Module, matrix: Tensor, shift: Tensor, inputs: Tensor) -> Tensor:
    return affine(model, inputs, matrix, shift).inputs


def _input_sizes(example: Tensor) -> list[int]:
    """What the first layer may mix: all features of a flat sample or the channels of an image."""
    sizes = [example[0].numel(), example.shape[-1], example.shape[1] if example.dim() > 1 else 1]
    return list(dict.fromkeys(sizes))


def _random_matrix(size: int, strength: float, generator: torch.Generator) -> Tensor:
    rotation, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    stretch = (strength * torch.randn(size, generator=generator, dtype=torch.float64)).exp()
    matrix: Tensor = stretch.unsqueeze(1) * rotation
    return matrix


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


# --- verdicts ----------------------------------------------------------------------------------------------------


def _claims(each: Measure, kind: str, loss: Loss) -> bool:
    """What the measure's record claims, for this kind of change and this loss."""
    if kind == "output scale":
        return loss.name == "normalized_cross_entropy" and "layer" in each.invariant_under and each.of_function
    if kind in (*MATRICES, *OF_INPUTS):
        return kind in each.invariant_under
    return ("layer" if kind == "layer" else "neuron") in each.invariant_under


def _judge(
    each: Measure,
    kind: str,
    original: Report,
    trials: Sequence[Trial],
    tolerance: float,
    *,
    claimed: bool,
    level: float = LEVEL,
) -> Finding:
    base = original[each.name]
    twins = [trial for trial in trials if trial.kind == kind]
    values = [trial.report[each.name] for trial in twins]
    if not base.available:
        return Finding(each.name, kind, "undecided", 1.0, None, claimed, "; ".join(base.notes))
    missing = next((value for value in values if not value.available), None)
    if missing is not None:
        reason = f"not available on a twin: {'; '.join(missing.notes)}"
        return Finding(each.name, kind, "undecided", 1.0, None, claimed, reason)
    factor = max((_ratio(base.value, value.value) for value in values), default=1.0)
    rounding = rounding_of(original, *(trial.report for trial in twins))
    moved = [
        trial.strength
        for trial, value in zip(twins, values, strict=True)
        if order(base, value, level=level, rounding=rounding)
    ]
    if moved:
        return Finding(each.name, kind, "moves", factor, min(moved), claimed)
    margins = [margin(base, value, level=level, rounding=rounding) for value in values]
    reason = _too_wide(base, margins, tolerance)
    return Finding(each.name, kind, "undecided" if reason else "invariant", factor, None, claimed, reason)


def _too_wide(base: Value, margins: Sequence[float], tolerance: float) -> str:
    """Why values that no error tells apart may differ all the same; empty where they cannot differ by much."""
    if base.lower_bound:
        return LOWER_BOUNDS
    widest, wanted = max(margins, default=0.0), WIDEST_BAR * abs(base.value)
    if not math.isfinite(base.value) or all(each <= wanted for each in margins):
        return ""
    return f"the error bars are too wide to tell; a tolerance of {tolerance * wanted / widest:.1g} would decide"


def _ratio(first: float, second: float) -> float:
    """How many times the larger is the smaller; infinite where no factor leads from one to the other, as between signs."""
    if first == second:
        return 1.0
    if not (math.isfinite(first) and math.isfinite(second)) or min(first, second) <= 0 <= max(first, second):
        return math.inf
    return max(abs(first / second), abs(second / first))
