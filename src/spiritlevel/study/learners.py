"""One step of training, for a single network or for several of one kind as one.

Several seeds of a cell can be trained as one vectorized network (`torch.func.stack_module_state`, `vmap`), which is
faster where a step is so small that its time is overhead. LeNets and AlexNets have a learner of their own
(`pooled_networks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study.settings import TrainingSection

# Channels of a convolution up to which it gains from kernels with channels last.
THIN = 128
# Samples of a batch that a network with convolutions takes at a time: the maps of more do not stay near the processor.
PART = 256
# Layers that know of no other sample, so that the gradients of parts of a batch add up to that of the whole.
SAMPLEWISE = (nn.Conv2d, nn.Linear, nn.ReLU, nn.MaxPool2d, nn.AvgPool2d, nn.Flatten, nn.Identity)
# Of Adam, as torch and the papers have them.
BETAS, EPSILON = (0.9, 0.999), 1e-8


class Learned(Protocol):
    """A network on its way, with the samples it is trained on."""

    model: nn.Module
    x: Tensor
    y: Tensor


class Learner(Protocol):
    """Trains one network, or several together."""

    optimizer: Optimizer

    def set_learning_rate(self, rate: float) -> None: ...

    def step(self, batch: Tensor) -> Tensor:
        """One step on the samples of `batch`, a row of positions for each network; the losses before it."""

    def keep(self, positions: list[int]) -> None:
        """Go on with these networks only."""


class Optimizer:
    """SGD and Adam as torch.optim has them, on all weights as one tensor: a handful of operations for any network.

    (Importing torch.optim's own takes longer than training many a cell.)
    """

    def __init__(self, weights: Tensor, training: TrainingSection) -> None:
        self.weights, self.training = weights, training
        self.rate = training.learning_rate
        self.steps = 0
        self.first = torch.zeros_like(weights) if training.momentum or training.optimizer == "adam" else None
        self.second = torch.zeros_like(weights) if training.optimizer == "adam" else None
        self.count = torch.zeros(())  # of steps, as the fused kernel wants it

    def step(self, gradient: Tensor) -> None:
        """One step; `gradient` may be overwritten."""
        self.steps += 1
        if self.training.weight_decay:
            gradient.add_(self.weights, alpha=self.training.weight_decay)
        if self.first is None:
            self.weights.add_(gradient, alpha=-self.rate)
        elif self.second is None:
            self.first.mul_(self.training.momentum).add_(gradient)
            self.weights.add_(self.first, alpha=-self.rate)
        else:
            self._step_of_adam(gradient, self.first, self.second)

    def _step_of_adam(self, gradient: Tensor, first: Tensor, second: Tensor) -> None:
        """One pass over the memory instead of seven: measured 4 to 5 times as fast, a fifth of a step of wide layers."""
        torch._fused_adam_(
            [self.weights], [gradient], [first], [second], [], [self.count.fill_(self.steps)],
            lr=self.rate, beta1=BETAS[0], beta2=BETAS[1], weight_decay=0.0, eps=EPSILON, amsgrad=False, maximize=False,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Its moments and how many steps it made; the weights are those of the networks."""
        return {"steps": self.steps, "first": self.first, "second": self.second}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as one that had come so far with the same weights."""
        self.steps, self.first, self.second = state["steps"], state["first"], state["second"]

    def kept(self, positions: list[int] | Tensor) -> Optimizer:
        """The optimizer of these rows, or entries, of the weights only."""
        made = Optimizer(self.weights[positions], self.training)
        made.rate, made.steps = self.rate, self.steps
        made.first = None if self.first is None else self.first[positions]
        made.second = None if self.second is None else self.second[positions]
        return made


class Alone:
    """A single network: its parameters, and their gradients, are views of one vector."""

    def __init__(self, run: Learned, training: TrainingSection) -> None:
        self.run = run
        learned = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
        weights, self.gradient = in_one_vector(learned, thin=_has_thin_convolutions(run.model))
        self.optimizer = Optimizer(weights, training)
        self.most = PART if _takes_parts(run.model) else training.batch_size
        self.images = run.x.new_empty(min(self.most, len(run.x)), *run.x.shape[1:])

    def set_learning_rate(self, rate: float) -> None:
        self.optimizer.rate = rate

    def step(self, batch: Tensor) -> Tensor:
        self.gradient.zero_()
        parts = torch.split(batch[0], self.most)
        loss = torch.stack([self._add(part, len(part) / batch.shape[1]) for part in parts]).sum(0, keepdim=True)
        self.optimizer.step(self.gradient)
        return loss

    def _add(self, chosen: Tensor, share: float) -> Tensor:
        """Add what these samples, a share of a batch, give to its loss and gradient."""
        # Into one buffer: fresh memory for every batch costs a tenth of a step.
        x = torch.index_select(self.run.x, 0, chosen, out=self.images[: len(chosen)])
        loss = F.cross_entropy(self.run.model(x), self.run.y[chosen]) * share
        torch.autograd.backward(loss)
        return loss.detach()

    def keep(self, _positions: list[int]) -> None:
        raise AssertionError("a single network is kept or its training ends")


def in_one_vector(parameters: Sequence[Tensor], *, thin: bool, room: int = 0) -> tuple[Tensor, Tensor]:
    """Let parameters, and their gradients, be views of one vector each; kernels channels last if they are `thin`.

    Behind the vector of parameters lie `room` zeros, for code that reads a little beyond it.
    """
    sizes = [parameter.numel() for parameter in parameters]
    weights = torch.zeros(sum(sizes) + room)[: sum(sizes)]
    gradients = torch.zeros_like(weights)
    parts = zip(torch.split(weights, sizes), torch.split(gradients, sizes), strict=True)
    for parameter, (value, gradient) in zip(parameters, parts, strict=True):
        before = parameter.detach()
        parameter.data, parameter.grad = (_shaped(part, before.shape, thin) for part in (value, gradient))
        parameter.data.copy_(before)
    return weights, gradients


def _has_thin_convolutions(model: nn.Module) -> bool:
    """Whether kernels are better laid out with channels last: measured 1.1 to 1.4 times as fast, more for LeNet on MNIST."""
    channels = [module.out_channels for module in model.modules() if isinstance(module, nn.Conv2d)]
    return 0 < max(channels, default=0) <= THIN


def _takes_parts(model: nn.Module) -> bool:
    """Whether large batches are better taken in parts, and are known to give the same then: layers in a row, convolutions among them."""
    rows = [module for module in model.modules() if isinstance(module, nn.Sequential)]
    layers = [module for module in model.modules() if not isinstance(module, nn.Sequential)]
    known = all(type(row).forward is nn.Sequential.forward for row in rows) and all(
        type(layer) in SAMPLEWISE for layer in layers
    )
    return model in rows and known and any(isinstance(layer, nn.Conv2d) for layer in layers)


def _shaped(part: Tensor, shape: torch.Size, channels_last: bool) -> Tensor:
    """A view of this shape, in which the entries of kernels follow each other channels last if asked for."""
    if len(shape) != 4 or not channels_last:
        return part.view(shape)
    outputs, inputs, height, width = shape
    return part.view(outputs, height, width, inputs).permute(0, 3, 1, 2)


class Together:
    """Several networks of one kind as one: all weights in one matrix with one row per network, one product for all.

    The modules of the runs see their row: their parameters are views of it.
    """

    def __init__(self, runs: Sequence[Learned], training: TrainingSection) -> None:
        _refuse_unstackable(runs[0].model)
        self.runs = list(runs)
        self.labels = torch.stack([run.y for run in runs])
        stacked, _ = stack_module_state([run.model for run in runs])
        self.shapes = {name: tensor.shape[1:] for name, tensor in stacked.items()}
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        self.loss_of_each = vmap(self._loss, randomness="different")
        rows = [tensor.detach().reshape(len(runs), -1) for tensor in stacked.values()]
        self._show(Optimizer(torch.cat(rows, dim=1), training))

    def _show(self, optimizer: Optimizer) -> None:
        """Let the modules of the runs see the rows of the weights."""
        self.optimizer = optimizer
        for row, run in zip(optimizer.weights, self.runs, strict=True):
            for name, part in self._parts(row).items():
                run.model.get_parameter(name).data = part

    def _parts(self, weights: Tensor) -> dict[str, Tensor]:
        """The parameters by name: views of a row, or of all rows at once."""
        parts = zip(self.shapes.items(), torch.split(weights, self.sizes, dim=-1), strict=True)
        return {name: part.view(*weights.shape[:-1], *shape) for (name, shape), part in parts}

    def _loss(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(self.runs[0].model, parameters, (x,)), y)

    def set_learning_rate(self, rate: float) -> None:
        self.optimizer.rate = rate

    def step(self, batch: Tensor) -> Tensor:
        x, y = self.runs[0].x[batch], self.labels.gather(1, batch)
        weights = self.optimizer.weights.detach().requires_grad_()
        losses = self.loss_of_each(self._parts(weights), x, y)
        (gradient,) = torch.autograd.grad(losses.sum(), weights)
        self.optimizer.step(gradient)
        return losses.detach()

    def keep(self, positions: list[int]) -> None:
        for position, run in enumerate(self.runs):
            if position not in positions:  # its weights must outlive the matrix
                for parameter in run.model.parameters():
                    parameter.data = parameter.data.clone()
        self.runs = [self.runs[position] for position in positions]
        self.labels = self.labels[positions]
        self._show(self.optimizer.kept(positions))


def _refuse_unstackable(model: nn.Module) -> None:
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    buffers = [name for name, _ in model.named_buffers()]
    if frozen or buffers:
        raise SpiritLevelError(
            f"seeds of this network cannot be trained together, because it has buffers or frozen parameters "
            f"({', '.join((*buffers, *frozen)[:3])}); leave training.ensemble out"
        )
