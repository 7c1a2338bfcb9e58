"""The problem: a trained network, its loss and its data as a pure function of a dictionary of parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from spiritlevel.errors import SpiritLevelError
from spiritlevel.network.rewrites import PlainDerivatives
from spiritlevel.problem import checks
from spiritlevel.problem.batches import Batch, Data, is_small, normal
from spiritlevel.problem.contract import Parameters
from spiritlevel.problem.derivatives import check_derivatives
from spiritlevel.problem.kept import bytes_kept
from spiritlevel.problem.labelled import recognized, settled
from spiritlevel.problem.losses import Loss, in_double, logits_of, resolve_loss
from spiritlevel.problem.quiet import undisturbed
from spiritlevel.problem.ranks import Ranks, current_ranks
from spiritlevel.problem.replica import Slots, stand_in, unwrapped
from spiritlevel.problem.survey import Survey, survey
from spiritlevel.problem.tensors import as_precision, collect, in_last_places
from spiritlevel.problem.weighted import weighted_by
from spiritlevel.problem.wrappers import in_shards, reshard, shards_of

# Activations of one chunk: large enough to keep matrix products efficient, small enough for the caches.
CHUNK_BYTES = 32 << 20
LARGEST_CHUNK = 1024


@dataclass
class Work:
    """What has been spent on a problem so far, in units of one pass over all its data."""

    passes: float = 0.0
    products: float = 0.0
    gradients: float = 0.0
    on_change: list[Callable[[Work], None]] = field(default_factory=list)

    def add(self, *, passes: float = 0.0, products: float = 0.0, gradients: float = 0.0) -> None:
        self.passes += passes
        self.products += products
        self.gradients += gradients
        for listener in self.on_change:
            listener(self)


class Problem:
    """L(θ) = mean over the samples of ℓ(f_θ(x), y), for any θ, with the caller's model left as it is.

    A stand-in of the same structure runs in eval mode on copies of the measured parameters; nothing is written into the
    model, and the random state comes back bit for bit. Parameters with `requires_grad=False` are left out; tied ones count once.

    Args:
        model: Any module.
        loss: A name, a callable `(outputs, targets) -> mean`, or `(model, batch) -> (mean, count)`.
        data: A pair `(x, y)`, a loader, a dataset or a re-iterable of batches.
        parameters: Names or patterns (`"features.*"`) of the parameters to measure; all trainable ones by default.
        dtype: Measure in this precision instead of the model's own.
        fix_data: Keep the first pass over a loader that shuffles or augments, and use it for all.
        distributed: In an initialized torch.distributed group, read this process's part of the data only and sum over
            all processes; each of them must do the same.
        shards: Take a model in parts over the processes of that group, too; then `parameters` are this process's parts.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> x, y = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.zeros(2, 1)
    >>> problem = Problem(model, "mse", (x, y))
    >>> problem.loss({"weight": torch.tensor([[1.0, 1.0]])})  # (3² + 7²) / 2
    29.0
    >>> problem.placed(problem.data.first).inputs.device
    device(type='cpu')
    """

    def __init__(
        self,
        model: nn.Module,
        loss: str | Callable[..., Any] | Loss,
        data: Any,
        *,
        parameters: Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
        fix_data: bool = False,
        distributed: bool = False,
        shards: bool = False,
    ) -> None:
        self.notes: list[str] = []
        model = unwrapped(model, self.notes, shards=shards)
        self.work = Work()
        self.model = model
        self.data = read_data(model, data, fix_data=fix_data)
        self.loss_function, self.data = recognized(model, settled(resolve_loss(loss), self.data), self.data)
        with undisturbed(model):  # a loader draws a seed at every pass
            self.loss_function = weighted_by(self.loss_function, self.data)
        if not self.loss_function.whole_batch:
            self.loss_function = in_double(self.loss_function)
        checks.check_arguments(model, parameters, dtype)
        reshard(model)
        self.shards = shards_of(model, distributed)
        with torch.inference_mode(False):  # tensors made inside it cannot record gradients
            collected = collect(model, parameters, dtype, self.shards)
        self.parameters, self.fixed, self._cast_inputs = collected.parameters, collected.fixed, collected.converted
        self.notes += collected.notes
        self._matrices = frozenset(name for name, value in model.named_parameters() if value.dim() > 1)
        self._run_in(stand_in(model, self.shards, self.notes))
        reference = next(iter(self.parameters.values()))
        self.dtype, self.device = reference.dtype, reference.device
        # The processes that hold the parts of a model divide every chunk among themselves, none of the data.
        self.ranks = Ranks() if self.shards.divided else current_ranks(distributed)
        self.buffers_change = self.inputs_change = self._derivatives_checked = False
        self.surveyed: Survey | None = None
        self.survey_takes_gradient = True  # not where products with H will bring it anyway
        self.chunk_size = 1
        self._plain: contextlib.AbstractContextManager[Any] = PlainDerivatives()
        self._settle()
        self.samples = self.data.samples
        counted = sum(self._counts)
        self.total_count = checks.check_total(counted if not self.whole else self.ranks.total(counted))

    def _run_in(self, module: nn.Module) -> None:
        """Compute in this module: a stand-in for the caller's, or the caller's own where that cannot stand in."""
        self.module, self._slots = module, Slots(module)

    def _settle(self) -> None:
        """Run the checks, and choose the size of chunks. Where a helper object or a global name leads the network past
        the stand-in to the caller's own module, compute in that one; a network that reads past it too is refused."""
        notes = list(self.notes)
        try:
            self._checked()
        except checks.ReachesPastTheStandIn as past:
            if in_shards(self.model):
                raise SpiritLevelError(
                    f"the network reads {str(past)!r} past its module, and the model is in shards"
                ) from None
            self._run_in(self.model)
            self.notes[:] = notes
            try:
                self._checked()
            except checks.ReachesPastTheStandIn as past:
                raise SpiritLevelError(
                    f"the network reads your model's {str(past)!r} past the module it belongs to (through a tensor that was "
                    "taken out of it), so it cannot be computed with other weights: read it from the module in forward, or "
                    "in a loss of the form (model, batch) from the model that is passed in"
                ) from None

    def _checked(self) -> None:
        with self.undisturbed():
            self.shards.check_same("the data", self.data.fingerprint())  # every call after this divides the data
            checks.check_model(self)
            self._settle_rewrites()
            self.chunk_size = self._choose_chunk_size()
            checks.check_gradient(self)
            if self.ranks.size > 1:
                self._check_ranks()
            self._counts = self._batch_counts()

    def callers_parameters(self) -> Parameters:
        """The caller's own tensors behind those that are measured."""
        named = dict(self.model.named_parameters())
        return {name: named[name] for name in self.parameters}

    # --- the function --------------------------------------------------------------------------------------------

    def loss(self, parameters: Mapping[str, Tensor] | None = None) -> float:
        """L(θ), streamed over the data."""
        total = 0.0
        with self.undisturbed(), torch.no_grad():
            for chunk, weight in self.chunks():
                total += weight * float(self.chunk_loss(parameters or self.parameters, chunk))
        self.work.add(passes=1)
        return self.ranks.total(total)

    def gradient(self, parameters: Mapping[str, Tensor] | None = None) -> tuple[float, Parameters]:
        """L(θ) and ∇L(θ), streamed over the data."""
        self.check_derivatives()
        leaves = self.leaves(parameters)
        sums = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        total = 0.0
        with self.undisturbed(), torch.enable_grad():
            for chunk, weight in self.chunks():
                value = self.chunk_loss(leaves, chunk)
                total += weight * float(value.detach())
                for name, part in zip(leaves, gradients_of(value, list(leaves.values())), strict=True):
                    sums[name].add_(part, alpha=weight)
        self.work.add(passes=1, gradients=1)
        self.ranks.sum_(list(sums.values()))
        return self.ranks.total(total), sums

    def outputs(self, parameters: Mapping[str, Tensor], batch: Batch) -> Any:
        """What the network computes from the inputs of a batch."""
        if self.whole:
            raise SpiritLevelError("this problem's loss calls the model itself; there are no outputs to look at")
        if self.inputs_change:
            batch = batch.map(Tensor.clone)
        args, kwargs = _arguments(self.shards.rows(batch).inputs)
        with self._plain:
            outputs = self._slots.call(self._tensors(parameters), lambda: self.module(*args, **kwargs))
        outputs = normal(outputs) if isinstance(outputs, Tensor) else outputs
        of_outputs = self.loss_function.of_outputs
        if of_outputs is not None:
            outputs = of_outputs(outputs)
        elif self.loss_function.check is not None:
            outputs = logits_of(outputs)
        return self.shards.joined(outputs, len(batch))

    def chunk_outputs(self, parameters: Mapping[str, Tensor], batch: Batch) -> Any:
        """The outputs, or the loss where that calls the model itself: whatever runs the network once."""
        return self.outputs(parameters, batch) if not self.whole else self.chunk_loss(parameters, batch)

    def chunk_loss(self, parameters: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """The mean loss over one chunk, differentiable in `parameters`."""
        if self.whole:
            return self.whole_loss(parameters, batch)[0]
        value: Tensor = self.loss_function.mean(self.outputs(parameters, batch), batch.targets)
        return value

    def chunks(self, size: int | None = None) -> Iterator[tuple[Batch, float]]:
        """One pass over this process's data: chunks on the model's device, each with its weight in the mean over all."""
        for index, chunk in enumerate(self._own(size or self.chunk_size)):
            count = self._count(chunk) if not self.whole else self._counts[index]
            yield self.placed(chunk), count / self.total_count

    def weight_of(self, batch: Batch) -> float:
        """The weight of a batch in the mean over all data."""
        count = self._count(batch) if not self.whole else self.whole_loss(self.parameters, batch)[1]
        return count / self.total_count

    def _own(self, size: int) -> Iterator[Batch]:
        """The chunks of this process's part of the data."""
        return self.data.chunks(size, divide=not self.whole, part=(self.ranks.rank, self.ranks.size))

    @property
    def small(self) -> bool:
        """Whether the problem is so small that ten times the arithmetic would hardly be noticed."""
        return is_small(sum(map(self.count, self.parameters)), self.samples)

    @property
    def alone(self) -> bool:
        """Whether no other process takes part."""
        return self.ranks.size == 1 and not self.shards.divided

    def count(self, name: str) -> int:
        """How many entries a parameter has, in all processes together."""
        return self.shards.count(name, self.parameters[name])

    def is_matrix(self, name: str) -> bool:
        """Whether a parameter has rows and columns, which a part of one does not show."""
        return name in self._matrices

    def parameters_like(self) -> Tensor:
        """A tensor of the measurement's precision and device, to convert others with `.to`."""
        return next(iter(self.parameters.values()))

    def part_chunk_size(self) -> int:
        """A tenth of the data, or enough to keep matrix products efficient; all of a small network's, with which many follow."""
        return self.chunk_size if self.small else max(1, min(self.chunk_size, max(64, -(-self.samples // 10))))

    def first_chunk(self) -> Batch:
        """The first batch of the data, on the model's device."""
        return self.placed(self.data.first)

    def few_samples(self, count: int) -> Batch:
        """A batch of exactly `count` samples, repeated where there are fewer; the first batch as it is if whole."""
        first = self.first_chunk()
        if self.whole:
            return first
        return first[torch.arange(count, device=self.device) % min(len(first), count)]

    def telling_samples(self, count: int) -> Batch:
        """A batch of exactly `count` samples, those whose losses slope the most; the batch with the largest loss if whole.

        The first samples may be blank or of one class, and where the loss does not slope there is nothing to check.
        Repeated where there are fewer.
        """
        samples = self.survey.heavy.batch
        assert samples is not None
        if self.whole:
            return samples
        return samples[torch.arange(count, device=self.device) % min(len(samples), count)]

    @property
    def survey(self) -> Survey:
        """What one pass over all of the data shows: what runs, and which samples matter."""
        if self.surveyed is None:
            self.surveyed = survey(self, with_gradient=self.survey_takes_gradient)
        return self.surveyed

    def slopes(self, outputs: Tensor, batch: Batch) -> tuple[float, Tensor]:
        """The mean loss of a batch, and ∂ℓ_n/∂f_n for each of its samples."""
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            loss = self.loss_function.mean(leaf, batch.targets)
            (slope,) = torch.autograd.grad(loss, leaf)
        return float(loss.detach()), slope * len(batch)

    def picked(self, rows: Tensor) -> Batch:
        """These samples, of data that are in memory.

        >>> problem = Problem(nn.Linear(2, 1), "mse", (torch.eye(2), torch.zeros(2, 1)))
        >>> problem.picked(torch.tensor([1])).inputs
        tensor([[0., 1.]])
        """
        assert self.data.resident is not None
        return self.placed(self.data.resident.map(lambda leaf: leaf[rows.to(leaf.device)]))

    def spread_samples(self, count: int) -> list[Batch]:
        """About `count` samples spread over all data and one of every further label, in as few batches as shapes allow."""
        return [self.placed(batch) for batch in self.data.spread(count)]

    def check_derivatives(self) -> None:
        """Refuse, once, where the gradient is not that of the loss. Whatever differentiates asks for this first."""
        if not self._derivatives_checked:
            check_derivatives(self)
            self._derivatives_checked = True

    @contextlib.contextmanager
    def in_precision(self, dtype: torch.dtype, *, nudged: int = 0) -> Iterator[Callable[[Batch], Batch]]:
        """All tensors in this precision inside; parameters moved in their last places by a draw, if any. Yields what fits a batch."""
        kept = self.parameters, self.fixed, self.dtype
        parameters, self.fixed = (
            {name: as_precision(tensor, dtype) for name, tensor in tensors.items()} for tensors in kept[:2]
        )
        self.parameters = in_last_places(parameters, nudged) if nudged else parameters
        self.dtype = dtype
        try:
            yield lambda batch: batch.map(lambda leaf: as_precision(leaf, dtype))
        finally:
            self.parameters, self.fixed, self.dtype = kept

    def leaves(self, parameters: Mapping[str, Tensor] | None = None) -> Parameters:
        """Handles on the parameters that record gradients; the data behind them is shared, `.grad` is not."""
        return {name: tensor.detach().requires_grad_() for name, tensor in (parameters or self.parameters).items()}

    @property
    def whole(self) -> bool:
        """Whether the loss calls the model itself, batch by batch."""
        return self.loss_function.whole_batch

    def undisturbed(self) -> contextlib.AbstractContextManager[None]:
        """Eval mode inside; the caller's mode and random state back on the way out, whatever happens."""
        if not self.shards.divided:
            return undisturbed(self.module)
        return self._undisturbed_in_shards()

    @contextlib.contextmanager
    def _undisturbed_in_shards(self) -> Iterator[None]:
        with undisturbed(self.module), self.shards.forgetting():
            yield

    def bytes_kept(self, run: Callable[[], Any]) -> int:
        """What autograd keeps of what `run` returns, beyond the tensors of the model; largest over processes."""
        with torch.enable_grad():
            return int(self.shards.largest(bytes_kept(self.shards, run, self.known_storages())))

    def _tensors(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Any]:
        fixed = self.fixed
        if self.buffers_change:
            fixed = {name: tensor.clone() for name, tensor in fixed.items()}
        return self.shards.placed({**fixed, **parameters})

    def placed(self, batch: Batch) -> Batch:
        """The batch on the model's device, in the precision of the measurement where inputs follow that."""

        def place(leaf: Tensor) -> Tensor:
            leaf = leaf.to(self.device, non_blocking=True)
            return leaf.to(self.dtype) if self._cast_inputs and leaf.is_floating_point() else leaf

        return batch.map(place)

    def _settle_rewrites(self) -> None:
        """Say what was rewritten; where nothing was, the network runs without looking for it from now on."""
        assert isinstance(self._plain, PlainDerivatives)
        if self._plain.used:
            names = ", ".join(sorted(self._plain.used))
            self.notes.append(f"rewritten with plain operations, whose second derivative is right: {names}")
        if not self._plain.needed:
            self._plain = contextlib.nullcontext()

    def whole_loss(self, parameters: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, float]:
        """The mean loss of a batch that stays whole, and its weight, as the caller's loss says them."""
        with self._plain:
            result = self._slots.call(
                self._tensors(parameters), lambda: self.loss_function.mean(self.module, batch.content)
            )
        if not isinstance(result, tuple) or len(result) != 2:
            raise SpiritLevelError(
                f"a loss of the form (model, batch) must return (mean loss, count), got {type(result).__name__}: return "
                f"for example `{'out.loss' if hasattr(result, 'loss') else 'loss'}, {batch.count_example}`"
            )
        return self.shards.held(result[0]), checks.check_count(result[1])

    def _count(self, batch: Batch) -> float:
        return float(self.loss_function.count(batch.targets))

    def _batch_counts(self) -> list[float]:
        """The weight of every batch; a loss that calls the model says it itself, once."""
        if not self.whole:
            return [self._count(batch) for batch in self.data]
        with self.undisturbed(), torch.no_grad():
            return [self.whole_loss(self.parameters, self.placed(batch))[1] for batch in self._own(1)]

    def _check_ranks(self) -> None:
        """Every process must hold the same weights and see the same data, with something to do for each."""
        sums = [float(value.double().sum()) for value in self.parameters.values()]
        self.ranks.check_same("the model's weights", sums)
        self.ranks.check_same("the data", self.data.fingerprint())
        pieces = self.data.pieces(divide=not self.whole)
        if pieces < self.ranks.size:
            what = "batches" if self.whole else "samples"
            raise SpiritLevelError(f"{pieces} {what} cannot be divided among {self.ranks.size} processes: use fewer")

    def _choose_chunk_size(self) -> int:
        """As many samples as keep one chunk's activations within `CHUNK_BYTES`."""
        if self.whole:
            return self.data.samples
        batch = self.first_chunk()[:4]
        kept = self.bytes_kept(lambda: self.chunk_loss(self.leaves(), batch))
        return max(1, min(LARGEST_CHUNK, CHUNK_BYTES // max(1, kept // len(batch))))

    def known_storages(self) -> set[int]:
        """Where the tensors of the model lie, which a pass does not have to keep."""
        return {tensor.untyped_storage().data_ptr() for tensor in (*self.parameters.values(), *self.fixed.values())}


# --- what the methods above lean on --------------------------------------------------------------------------------


def read_data(model: nn.Module, data: Any, *, fix_data: bool = False) -> Data:
    """The data as a checked stream. A loader draws a seed from the global generator at every pass; that is undone."""
    if isinstance(data, Data):
        return data
    with undisturbed(model):
        return Data(data, fix=fix_data)


def gradients_of(value: Tensor, leaves: list[Tensor], *, create_graph: bool = False) -> list[Tensor]:
    """∂value/∂leaf for every leaf; zeros where the value does not depend on it."""
    if not value.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    parts = torch.autograd.grad(value, leaves, create_graph=create_graph, allow_unused=True)
    return [torch.zeros_like(leaf) if part is None else part for leaf, part in zip(leaves, parts, strict=True)]


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})
