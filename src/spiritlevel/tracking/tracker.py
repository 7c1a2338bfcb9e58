"""Follow flatness while a network trains, at a cost that is said in advance, without changing the training."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spiritlevel.curvature.statistics import GROUPS
from spiritlevel.errors import SpiritLevelError, listed
from spiritlevel.measuring.evidence import Evidence
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.report import Report
from spiritlevel.measuring.run import measure
from spiritlevel.measuring.starts import Starts
from spiritlevel.measuring.value import Cost, Value
from spiritlevel.problem.checks import check_tolerance, check_whole_number
from spiritlevel.problem.losses import LossLike, resolve_loss
from spiritlevel.problem.problem import Problem
from spiritlevel.tracking.history import History, Point
from spiritlevel.tracking.live import Live
from spiritlevel.tracking.optimizers import check_optimizer, has_state, unwrapped_optimizer
from spiritlevel.tracking.probe import choose_probe
from spiritlevel.tracking.quantities import resolve
from spiritlevel.tracking.schedule import Budget, Clock, Levels, check_overhead, grouped, kind_of
from spiritlevel.tracking.thresholds import thresholds

OVERHEAD = 0.05
# A quarter of what `measure` takes: bars twice as wide, on a curve of four times as many points.
PROBES = 16

Logger = Callable[[Mapping[str, float], int], None]
Watch = Callable[[str, float], None]

# What may go wrong in the middle of a training without ending it: the point says so.
_FAILURES = (SpiritLevelError, ArithmeticError, MemoryError, torch.OutOfMemoryError, torch.linalg.LinAlgError)  # type: ignore[attr-defined]


class Tracker:
    """Follows measures of flatness while a model trains. Call `step` after every step of the optimizer.

    It measures on a probe set, samples that are chosen once; values and errors are those that `measure` gives on it, in eval
    mode. The training is not changed: weights and random numbers are the same, bit for bit, with and without a tracker.

    When it measures: by default such that measuring takes at most `overhead` of the training time, by its own measured
    costs; costly measures come seldom. `every` and `at_loss` are the other ways to say when.

    Args:
        model: The model that is trained.
        data: Anything that `measure` takes; a loader may shuffle.
        loss: As for `measure`.
        measures: Names of measures of the library, configured measures, or what only a training has: "gradient_norm",
            "riemannian_gradient_norm", "riemannian_nodewise_gradient_norm", "hessian_largest_eigenvalue",
            "critical_sharpness" and "preconditioned_largest_eigenvalue" (both need `optimizer`),
            "critical_sharpness_gradient", "critical_sharpness_invariant".
        optimizer: The optimizer in use: for its update, and for the lines of stability that belong to it.
        overhead: The share of the training time that measuring may add, 0.05 where no other way says when.
        every: Measure everything every so many steps, whatever it costs.
        at_loss: Measure everything where the loss passed to `step` is first at or below each of these levels.
        samples: The size of the probe set; None for all data.
        seed: For the choice of the probe set and everything random.
        tolerance: Relative accuracy asked of what is not exact.
        most_probes: The most random probes for a block that is not exact, at least 8. `measure` has 64: for a curve many
            points with wider bars tell more.
        parameters: Names or patterns of the parameters to measure.
        dtype: Measure in this precision instead of the model's own.
        loggers: Functions of (flat names with numbers, step), called for every point; `spiritlevel.integrations.loggers`
            has some.
        live: Show the last point while the training runs: a line of the terminal, or the cell of a notebook.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> data = torch.eye(2), torch.zeros(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> tracker = Tracker(model, data, "mse", measures=["hessian_trace"], optimizer=optimizer, every=2)
    >>> for step in range(5):
    ...     optimizer.zero_grad()
    ...     nn.functional.mse_loss(model(data[0]), data[1]).backward()
    ...     optimizer.step()
    ...     point = tracker.step(step)
    >>> [point["step"] for point in tracker.history], print(tracker.history[-1]["hessian_trace"])
    2
    ([0, 2, 4], None)
    >>> tracker.step(4, force=True) is tracker.history[-1]  # measured already
    True
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        loss: LossLike = "cross_entropy",
        *,
        measures: str | Iterable[str | Measure] | None = None,
        optimizer: Any = None,
        overhead: float | None = None,
        every: int | None = None,
        at_loss: float | Sequence[float] | None = None,
        samples: int | None = 256,
        seed: int = 0,
        tolerance: float = 1e-2,
        most_probes: int = PROBES,
        parameters: list[str] | None = None,
        dtype: torch.dtype | None = None,
        loggers: Iterable[Logger] = (),
        live: bool = False,
    ) -> None:
        entered = time.perf_counter()
        self.model, self.loss = model, resolve_loss(loss)
        self.optimizer = None if optimizer is None else unwrapped_optimizer(optimizer)
        self.history = History()
        self.loggers = [*loggers]
        self._measures = {each.name: each for each in resolve(measures, self.optimizer)}
        self._options: dict[str, Any] = {
            "tolerance": check_tolerance(tolerance),
            "most_probes": check_whole_number("most_probes", most_probes, at_least=GROUPS),
            "seed": check_whole_number("seed", seed),
            "parameters": parameters,
            "dtype": dtype,
            "distributed": False,
        }
        self._when(overhead, every, at_loss)
        if samples is not None:
            check_whole_number("samples", samples, at_least=2)
        self.probe = choose_probe(model, data, samples, int(seed), whole=self.loss.whole_batch)
        self._probe_was = self.probe.fingerprints()
        pass_seconds = self._checked(parameters, dtype)
        self._groups = grouped(self._measures.values(), pass_seconds)
        self._starts = Starts()
        self._live = Live() if live else None
        self._last_step: int | None = None
        self._weights_were: tuple[int, list[float]] | None = None
        self.history.about |= self._about(samples, int(seed))
        self.clock = Clock()
        self.clock.spent = time.perf_counter() - entered

    def _when(self, overhead: float | None, every: int | None, at_loss: float | Sequence[float] | None) -> None:
        if overhead is not None and every is not None:
            raise SpiritLevelError(
                "say when to measure by overhead or by every, not by both: `every` measures at any cost"
            )
        if overhead is None and every is None and at_loss is None:
            overhead = OVERHEAD
        self._budget = None if overhead is None else Budget(check_overhead(overhead))
        self._every = None if every is None else check_whole_number("every", every, at_least=1)
        self._levels = None if at_loss is None else Levels.of(at_loss)
        self._next = -math.inf

    def _checked(self, parameters: list[str] | None, dtype: torch.dtype | None) -> float:
        """Refuse now what would be refused at every point; the seconds of a forward pass over the probe set."""
        problem = Problem(self.model, self.loss, self.probe, parameters=parameters, dtype=dtype)
        if self.optimizer is not None:
            check_optimizer(self.optimizer, problem.callers_parameters())
        self._inner = problem.model  # what a wrapper holds
        self._shapes = {name: value.shape for name, value in problem.parameters.items()}
        self._owned = {name: id(value) for name, value in problem.callers_parameters().items()}
        return min(_seconds(problem.loss) for _ in range(3))  # the first is slow, and others use the machine too

    def _about(self, samples: int | None, seed: int) -> dict[str, str]:
        """What is measured, for the page and the file."""
        chosen = "all" if samples is None else f"the probe set, chosen by seed {seed}"
        told = {
            "network": type(self._inner).__name__,
            "loss": self.loss.name,
            "parameters": f"{sum(shape.numel() for shape in self._shapes.values()):,}",
            "samples": f"{self.probe.samples:,} ({chosen})",
        }
        return told if self.optimizer is None else {**told, "optimizer": type(self.optimizer).__name__}

    # --- a step ------------------------------------------------------------------------------------------------------

    def step(self, step: int, *, loss: Any = None, epoch: float | None = None, force: bool = False) -> Point | None:
        """Say that a step of the training is done; the point that was measured, None where none was due.

        step: Grows from call to call, over the whole run; the last one may come again with `force`.
        loss: The training loss of this step, a number or a tensor; `at_loss` needs it, curves can be drawn against it.
        force: Measure everything now, whatever it costs: for the last step of a run.
        """
        entered = time.perf_counter()
        self.clock.enter(entered)
        try:
            self._check_step(step, force)
            names, reason, levels = self._due(step, loss, force)
            if not names:
                return None
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # what the training still has under way is not ours
            known = None if not self.history or self.history[-1].step != step else self.history[-1]
            names = [name for name in names if known is None or name not in known]
            return known if not names else self._point(step, names, reason, levels, loss, epoch)
        except _TooLongError as late:
            self._groups[late.kind].gave_up(time.perf_counter() - entered)
            self._weights_were = None  # not of a point
            return None
        finally:
            self.clock.leave(entered, time.perf_counter())

    def finish(self, step: int, *, epoch: float | None = None) -> Point | None:
        """Measure everything at the last step of a run, `step` with force, also where a loss is asked for at every step.

        >>> tracker = Tracker(nn.Linear(1, 1), (torch.ones(2, 1), torch.ones(2, 1)), "mse", measures=["hessian_trace"])
        >>> tracker.finish(10)["step"], tracker.last_step
        (10, 10)
        """
        self._levels = None
        return self.step(step, epoch=epoch, force=True)

    @property
    def last_step(self) -> int | None:
        """The step that `step` was called with last."""
        return self._last_step

    def _check_step(self, step: Any, force: bool) -> None:
        last = self._last_step
        if type(step) is not int:
            step = check_whole_number("step", step)
        if last is not None and (step < last or (step == last and not force)):
            raise SpiritLevelError(
                f"step must grow from call to call: {step} came after {last}. Pass a counter over the whole run, not one that "
                "starts again with every epoch; for another run make another tracker"
            )
        self._last_step = step

    def _due(self, step: int, loss: Any, force: bool) -> tuple[list[str], str, tuple[float, ...]]:
        """The measures to take now, why, and the levels that the loss has reached."""
        every_name = list(self._measures)
        levels: tuple[float, ...] = ()
        if self._levels is not None:
            if loss is None and not force:
                raise SpiritLevelError("at_loss needs the training loss of every step: tracker.step(step, loss=loss)")
            levels = self._levels.crossed(_number(loss)) if self._levels.left and loss is not None else ()
        if force or levels:
            return every_name, "forced" if force else "at_loss", levels
        if self._every is not None and step >= self._next:
            self._next = (step // self._every + 1) * self._every
            return every_name, "every", ()
        if self._budget is None:
            return [], "", ()
        due = self._budget.due(self.clock, self._groups)
        return [name for kind in due for name in self._groups[kind].names], "budget", ()

    def _point(
        self, step: int, names: list[str], reason: str, levels: tuple[float, ...], loss: Any, epoch: float | None
    ) -> Point:
        started = time.perf_counter()
        seconds: dict[str, float] = {}
        lines, notes = thresholds(self.optimizer)
        point = Point(step, math.nan, {}, epoch, _number(loss), lines, Cost(), reason, levels, notes)
        interrupted = False
        try:
            self._check_probe_and_model()
            notes += self._unchanged(step)
            ready, waiting = self._ready(names)
            report = self._measured(ready, seconds, self._deadline(reason, ready)) if ready else None
            point = replace(point, notes=(*notes, *waiting, *(report.notes if report is not None else ())))
            if report is not None:
                interrupted = report.interrupted
                values = report.without_witnesses().values
                point = replace(point, loss=report.loss, values=values, cost=report.cost)
        except _FAILURES as error:
            if isinstance(error, _Refusal):
                raise
            self._starts.forget()
            point = replace(point, notes=(*notes, f"step {step} could not be measured: {error}"))
        spent = time.perf_counter() - started
        point = replace(point, cost=replace(point.cost, seconds=spent))
        self._pay(names, seconds, spent)
        point = self.history.add(point)
        self._tell(point)
        if interrupted:
            raise KeyboardInterrupt
        return point

    def _ready(self, names: list[str]) -> tuple[list[Measure], tuple[str, ...]]:
        """The measures that can be taken, and a note of those that cannot yet."""
        waiting = ["preconditioned_largest_eigenvalue"] if not has_state(self.optimizer) else []
        ready = [self._measures[name] for name in names if name not in waiting]
        missing = [name for name in names if name in waiting]
        return ready, tuple(f"{name} comes after the optimizer's first step" for name in missing)

    def _measured(self, measures: list[Measure], seconds: dict[str, float], watch: Watch | bool) -> Report:
        timed = [replace(each, compute=partial(_timed, each.compute, seconds)) for each in measures]
        options = {**self._options, "starts": self._starts, "progress": watch}
        return measure(self.model, self.probe, self.loss, measures=timed, **options)

    def _deadline(self, reason: str, measures: list[Measure]) -> Watch | bool:
        """What ends a measurement of the budget whose cost was only guessed, when the budget is used up."""
        kind = kind_of(measures[0]) if measures else ""
        if self._budget is None or reason != "budget" or self._groups[kind].timed:
            return False
        late = time.perf_counter() + self._budget.left(self.clock)

        def watch(_stage: str, _passes: float) -> None:
            if time.perf_counter() > late:
                raise _TooLongError(kind)

        return watch

    def _pay(self, names: list[str], seconds: Mapping[str, float], spent: float) -> None:
        """Charge every group of measures what it took, and its share of what all of them needed."""
        kinds: dict[str, float] = {}
        for name in names:
            kind = kind_of(self._measures[name])
            kinds[kind] = kinds.get(kind, 0.0) + seconds.get(name, 0.0)
        shared = max(0.0, spent - sum(kinds.values())) / max(1, len(kinds))
        for kind, own in kinds.items():
            self._groups[kind].paid(own + shared)

    def _tell(self, point: Point) -> None:
        numbers = point.scalars() if self.loggers else {}
        for logger in self.loggers:
            logger(numbers, point.step)
        if self._live is not None:
            self._live.show(self.history, self.overhead)

    # --- what must not change ----------------------------------------------------------------------------------------

    def _check_probe_and_model(self) -> None:
        if self.probe.fingerprints() != self._probe_was:
            raise _Refusal(
                "the probe set has changed since the tracker was made, so that its points cannot be compared: leave "
                "tracker.probe as it is, or make another tracker"
            )
        now = {name: value for name, value in self._inner.named_parameters() if name in self._shapes}
        other = [name for name, shape in self._shapes.items() if name not in now or now[name].shape != shape]
        if other:
            raise _Refusal(
                f"the model is not the one that the tracker was made for: {listed(other)} has another shape or is gone. Make "
                "another tracker for another model"
            )

    def _unchanged(self, step: int) -> tuple[str, ...]:
        """A note where weights stand still or were replaced: the training may go on in another model."""
        named = dict(self._inner.named_parameters())
        sums = [float(named[name].detach().double().sum()) for name in self._shapes]
        before, self._weights_were = self._weights_were, (step, sums)
        notes = []
        replaced = [name for name, owner in self._owned.items() if id(named[name]) != owner]
        if replaced:
            self._owned = {name: id(named[name]) for name in self._shapes}
            self._starts.forget()
            notes.append(f"parameters were replaced by others of the same shape: {listed(replaced)}")
        if before is not None and before[0] < step and before[1] == sums and all(map(math.isfinite, sums)):
            notes.append(f"the weights are those of step {before[0]}: is this the model that is trained?")
        return tuple(notes)

    # --- what is known -----------------------------------------------------------------------------------------------

    @property
    def overhead(self) -> float:
        """Seconds spent by the tracker over seconds of training, so far."""
        return self.clock.spent / self.clock.trained if self.clock.trained > 0 else math.inf

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained page: the curves, the lines of stability, the table.

        >>> import tempfile
        >>> tracker = Tracker(nn.Linear(1, 1), (torch.ones(2, 1), torch.ones(2, 1)), "mse", measures=["hessian_trace"])
        >>> point = tracker.step(0, force=True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tracker.to_html(f"{folder}/history.html")
        """
        self.history.to_html(path)


class _Refusal(SpiritLevelError):
    """What a tracker does not go on with."""


class _TooLongError(Exception):
    """A measurement takes longer than the budget allows."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def _timed(
    compute: Callable[[Measure, Evidence], Value], seconds: dict[str, float], measure: Measure, evidence: Evidence
) -> Value:
    started = time.perf_counter()
    try:
        return compute(measure, evidence)
    finally:
        seconds[measure.name] = seconds.get(measure.name, 0.0) + time.perf_counter() - started


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _number(loss: Any) -> float:
    """A loss as a number; nan for none."""
    if loss is None:
        return math.nan
    return float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
