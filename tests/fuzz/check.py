"""One input in, one outcome out: right, refused, not judged, or wrong.

A number is wrong where it lies further from the definition than what its report states:

- exact: error + rounding
- certified by a residual: 3 · error + rounding
- estimated: 5 · error + rounding, and two of five other seeds as well, or the mean of all six (their error being
  that of a mean)

rounding = `ROUNDING` of the precision that was computed in, times the sum of the absolute values of the terms the number is made of, and ten times
what the definition moves by when the weights move by 2⁻⁵⁰ of their size: below that it is not known itself.
"""

import math
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import spiritlevel as sl
from fuzz.oracle import Quantities, Truth, quantities, truths
from fuzz.subjects import Built, Options, Subject, build
from measure_names import DEFINED
from spiritlevel.curvature import whole
from spiritlevel.problem import problem

# 64 units of the last place in float32; in float64 the definitions themselves are not known more closely.
ROUNDING = {"float32": 64 * 2.0**-23, "float64": 1e-11}
OWN_ROUNDING = 10.0
# Gradients that are not the loss's are noticed by differences of losses, which do not show less than this.
UNNOTICED = 1e-6
WIDTH = {"exact": 1.0, "certified": 3.0, "estimated": 5.0}
OTHER_SEEDS = 5
# Where the report must say that gradients are not those of the loss, any note that speaks of them will do.
DECLARED = re.compile(r"gradient[^:]*\b(not|disagree)", re.IGNORECASE)


@dataclass(frozen=True)
class Judged:
    """One number beside its definition. excess: the distance in units of what is allowed; above one it is wrong."""

    measure: str
    kind: str
    value: float
    error: float
    truth: float
    excess: float
    within_error: bool


@dataclass(frozen=True)
class Outcome:
    """What became of an input. verdict: "right", "refused", "out of range", "wrong", "crashed", "changed"."""

    verdict: str
    judged: tuple[Judged, ...] = ()
    reason: str = ""
    unavailable: tuple[str, ...] = ()

    @property
    def fine(self) -> bool:
        return self.verdict in ("right", "refused", "out of range")

    @property
    def worst(self) -> Judged | None:
        return max(self.judged, key=lambda each: each.excess, default=None)

    def __str__(self) -> str:
        if self.worst is None:
            return f"{self.verdict}: {self.reason}"
        w = self.worst
        return (
            f"{self.verdict}: {w.measure} = {w.value:.8g} ± {w.error:.2g} ({w.kind}) for {w.truth:.8g}, "
            f"{w.excess:.3g} times what is allowed"
        )


def reason(message: str) -> str:
    """A refusal without its particulars: what is quoted, counted or named differs from input to input."""
    general = re.sub(r"'[^']*'|\[[^\]]*\]|\([^)]*\)", "…", message)
    general = re.sub(r"-?\d[\d.e+-]*", "#", general)
    return general[:100]


def check(subject: Subject) -> Outcome:
    """Measure a subject and hold every number against its definition."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = build(subject)
        try:
            with unchanged(built.model), computed_as(subject.options):
                report = sl.measure(built.model, built.data, built.loss, **built.arguments)
        except sl.SpiritLevelError as error:
            return Outcome("refused", reason=str(error))
        except Changed as change:
            return Outcome("changed", reason=str(change))
        except Exception as error:
            return Outcome("crashed", reason=f"{type(error).__name__}: {error}")
        with np.errstate(all="ignore"):
            return _judge(subject, built, report)


@contextmanager
def computed_as(options: Options) -> Iterator[None]:
    """Data in chunks of so many samples and eigenvalues by searches, as those of large networks, where the options say so."""
    before = problem.LARGEST_CHUNK, whole.WORTH
    problem.LARGEST_CHUNK = options.chunk or problem.LARGEST_CHUNK
    whole.WORTH = 0 if options.searched else whole.WORTH
    try:
        yield
    finally:
        problem.LARGEST_CHUNK, whole.WORTH = before


def _judge(subject: Subject, built: Built, report: sl.Report) -> Outcome:
    q = quantities(built, subject.options.parameters)
    if not np.isfinite(q.hessian).all():
        return Outcome("out of range", reason="the Hessian is not finite in float64")
    expected = truths(q, subject.options.measures or DEFINED)
    if not all(math.isfinite(t.value) and math.isfinite(t.scale) for t in expected.values()):
        return Outcome("out of range", reason="a measure is not finite in float64")
    if _declared(subject, report):
        return Outcome("refused", reason="a note says that gradients are not those of the loss")
    unavailable = [f"{name}: {report[name].notes[0]}" for name in expected if _unavailable(report[name])]
    expected = {name: truth for name, truth in expected.items() if not _unavailable(report[name])}
    if not _has_fisher(built):
        expected.pop("fisher_rao_norm", None)
    unit = ROUNDING[report.problem["dtype"]]
    if subject.network.activation == "reversal":
        unit = max(unit, UNNOTICED)
    judged = [_judged(report[name], truth, unit) for name, truth in expected.items()]
    if any(each.excess > 1 for each in judged):
        expected = _with_own_rounding(subject, expected)
        judged = [_judged(report[name], truth, unit) for name, truth in expected.items()]
    judged = [*_after_other_seeds(subject, judged, expected, unit), _judged_loss(built, report, q, unit)]
    wrong = any(each.excess > 1 for each in judged)
    return Outcome("wrong" if wrong else "right", tuple(judged), unavailable=tuple(unavailable))


def _unavailable(value: sl.Value) -> bool:
    return not value.available and bool(value.notes)


def _with_own_rounding(subject: Subject, expected: Mapping[str, Truth]) -> dict[str, Truth]:
    """The definitions have rounding of their own: what they move by when the weights move in their last places."""
    built = build(subject)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in built.honest.parameters():
            signs = (torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1).to(parameter)
            parameter.mul_(1 + signs * 2.0**-50)  # in double precision: in single precision this would be 1
    moved = truths(quantities(built, subject.options.parameters), expected)
    return {
        name: replace(truth, own=truth.own + OWN_ROUNDING * abs(moved[name].value - truth.value))
        for name, truth in expected.items()
    }


def _declared(subject: Subject, report: sl.Report) -> bool:
    notes = (*report.notes, *(note for value in report.values.values() for note in value.notes))
    return subject.network.activation == "reversal" and any(DECLARED.search(note) for note in notes)


def _has_fisher(built: Built) -> bool:
    """With weights, penalties or pairs it is a matter of definition what the loss of one sample is."""
    return not built.terms.penalty and not built.terms.coupled and bool((built.terms.weights(built.targets) == 1).all())


def _judged(value: sl.Value, truth: Truth, unit: float) -> Judged:
    kind = "exact" if value.exact else "certified" if value.certified else "estimated"
    return _compared(value.name, kind, value, truth, allowance(value.name, truth, unit))


def allowance(measure: str, truth: Truth, unit: float) -> float:
    """What rounding may do to a number; a square root of something that cancels magnifies it."""
    plain = unit * truth.scale + truth.own
    if not measure.endswith("normalized_sharpness"):
        return plain
    near_zero = unit**0.5 * truth.scale
    return truth.own + (min(near_zero, unit * truth.scale**2 / truth.value) if truth.value > 0 else near_zero)


def distance(value: sl.Value, truth: Truth) -> float:
    """How far a number is from its definition, beyond what that is known to."""
    return max(0.0, abs(value.value - truth.value) - allowance(value.name, truth, ROUNDING["float64"]))


def _compared(name: str, kind: str, value: Any, truth: Truth, rounding: float) -> Judged:
    off = abs(value.value - truth.value)
    allowed = WIDTH[kind] * value.error + rounding
    within = off <= value.error + rounding
    excess = 0.0 if off == 0 else off / allowed if allowed > 0 else math.inf
    return Judged(name, kind, value.value, value.error, truth.value, math.inf if math.isnan(excess) else excess, within)


def _after_other_seeds(
    subject: Subject, judged: list[Judged], expected: Mapping[str, Truth], unit: float
) -> list[Judged]:
    """An estimate five errors off is an accident once in a while; it is wrong where other seeds say so too."""
    doubted = [each for each in judged if each.kind == "estimated" and 1 < each.excess < math.inf]
    if not doubted:
        return judged
    names = tuple(each.measure for each in doubted)
    reports = []
    for seed in range(100, 100 + OTHER_SEEDS):
        built = build(replace(subject, options=replace(subject.options, measures=names, seed=seed)))
        with computed_as(subject.options):
            reports.append(sl.measure(built.model, built.data, built.loss, **built.arguments))
    return [
        replace(each, excess=1.0)
        if each in doubted and not _repeated(each, [report[each.measure] for report in reports], expected, unit)
        else each
        for each in judged
    ]


def _repeated(first: Judged, others: list[sl.Value], expected: Mapping[str, Truth], unit: float) -> bool:
    truth = expected[first.measure]
    rounding = allowance(first.measure, truth, unit)
    values = np.array([first.value, *(each.value for each in others)])
    errors = np.array([first.error, *(each.error for each in others)])
    outside = np.abs(values - truth.value) > WIDTH["estimated"] * errors + rounding
    pooled = WIDTH["estimated"] * float(np.sqrt((errors**2).sum())) / len(errors) + rounding
    return bool(outside[1:].sum() >= 2 or abs(values.mean() - truth.value) > pooled)


def _judged_loss(built: Built, report: sl.Report, q: Quantities, unit: float) -> Judged:
    """The loss carries no error: rounding of the outputs is what it may be off by."""
    with torch.no_grad():
        size = float(built.honest(built.inputs).abs().max())
        if built.targets.is_floating_point():
            size = max(size, float(built.targets.abs().max()))
    scale = max(abs(q.loss), size, size**2 if built.terms.labels in ("numbers", "scalars") else 0.0)
    value = replace(next(iter(report.values.values())), value=report.loss, error=0.0)
    return _compared("loss", "exact", value, Truth(q.loss, scale), unit * scale)


# --- the caller's model ----------------------------------------------------------------------------------------------


class Changed(AssertionError):
    """The caller's model did not come back as it was."""


def state(model: nn.Module) -> tuple[list[Tensor], list[Any]]:
    """Copies of all tensors, and everything else that must be the same object or flag afterwards."""
    named = [*model.named_parameters(), *model.named_buffers()]
    kinds = [(name, id(t), type(t).__name__, t.requires_grad, t.dtype, id(t.grad)) for name, t in named]
    modes = [(module.training, sorted(vars(module))) for module in model.modules()]
    return [tensor.detach().clone() for _, tensor in named], [*kinds, *modes]


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Bits, identities, modes and the random state are after the block what they were before, however it ends."""
    random, (tensors, rest) = torch.get_rng_state(), state(model)
    try:
        yield
    finally:
        after, others = state(model)
        if others != rest:
            raise Changed("a parameter, buffer or mode of the model is not what it was")
        if not all(map(torch.equal, after, tensors)):
            raise Changed("numbers of the model are not what they were")
        if not torch.equal(torch.get_rng_state(), random):
            raise Changed("the random state is not what it was")
