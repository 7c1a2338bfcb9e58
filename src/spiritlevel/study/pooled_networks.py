"""One step of training for LeNets and AlexNets, one or several on the same batches, with the derivatives written out.

Networks that see the same batches, because they differ in their starting weights only, share their images and the calls of every step.
Gradients are written where the optimizer reads them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study.dense_layers import ROOM, dense_layers
from spiritlevel.study.learners import Learned, Optimizer, in_one_vector
from spiritlevel.study.pooled import Pooled, gather, pooled_convolution, roomy, with_border
from spiritlevel.study.settings import TrainingSection
from spiritlevel.subjects.networks.convolutional import AlexNet, CaffeLeNet, LeNet

# Networks of two convolutions, each followed by max pooling and, but for Caffe's LeNet, by ReLU, and of dense layers with ReLU
# between them; with the side of the windows of pooling.
WINDOWS: dict[type[nn.Module], int] = {LeNet: 2, CaffeLeNet: 2, AlexNet: 3}


# Samples of a batch that are taken at a time: what is known of more does not stay near the processor.
PART = 128


def is_pooled_network(model: nn.Module) -> bool:
    """Whether it is known what the network computes: of subclasses it is not."""
    return type(model) in WINDOWS


def _stages(model: nn.Module, networks: int) -> list[tuple[Pooled, nn.Conv2d]]:
    """The steps of so many such networks, and the convolutions of the one at hand."""
    assert isinstance(model, LeNet | CaffeLeNet | AlexNet)
    relu, pool = not isinstance(model, CaffeLeNet), WINDOWS[type(model)]
    borders = int(model.conv2.padding[0]), 0
    made = [pooled_convolution(networks, relu=relu, pool=pool, border=border) for border in borders]
    return list(zip(made, (model.conv1, model.conv2), strict=True))


def outputs(model: nn.Module, x: Tensor) -> Tensor:
    """What such a network says of images, without derivatives, as fast as it is trained."""
    stages = _stages(model, 1)
    h = with_border(x.permute(0, 2, 3, 1)[None], int(stages[0][1].padding[0]))
    for stage, convolution in stages:
        weight = convolution.weight.detach().contiguous(memory_format=torch.channels_last)
        assert convolution.bias is not None
        h = stage.forward(h, weight, convolution.bias.detach())
    h = h[0].permute(0, 3, 1, 2).flatten(1)
    *hidden, last = (module for module in model.children() if isinstance(module, nn.Linear))
    for layer in hidden:
        h = F.relu(layer(h))
    said: Tensor = last(h)
    return said


class PooledNetworks:
    """Such networks on the same batches as one.

    Every tensor holds the networks one after the other along its first axis, and the modules of the runs see their part of it.
    """

    def __init__(self, runs: Sequence[Learned], training: TrainingSection) -> None:
        self.runs, self.x = list(runs), runs[0].x.contiguous()
        if self.x.dtype != torch.float32:
            raise SpiritLevelError(
                f"images are {self.x.dtype}, and networks are trained on float32: convert them with .float()"
            )
        self._join()
        self.optimizer = Optimizer(self.weights, training)

    def _join(self) -> None:
        """Make one tensor of every parameter of the runs, and let the modules of the runs see their part of it."""
        model, count = self.runs[0].model, len(self.runs)
        of_all = list(zip(*(run.model.parameters() for run in self.runs), strict=True))
        convolutions, dense = of_all[:4], of_all[4:]
        self.leaves = [torch.cat([each.detach() for each in parameters]) for parameters in convolutions]
        self.leaves += [torch.stack([_as_matrix(each.detach()) for each in parameters]) for parameters in dense]
        self.weights, gradient = in_one_vector(self.leaves, thin=True, room=ROOM)
        self.gradient, self.gradients = gradient, [_gradient(leaf) for leaf in self.leaves]
        for parameters, leaf in zip(of_all, self.leaves, strict=True):
            for parameter, part in zip(parameters, torch.chunk(leaf, count), strict=True):
                parameter.data = part.view(parameter.shape)
        self.labels = torch.stack([run.y for run in self.runs])
        stages = _stages(model, count)
        self.stages = [stage for stage, _ in stages]
        self.border = int(stages[0][1].padding[0])
        self.dense = dense_layers()
        self.images = torch.empty(0)

    def set_learning_rate(self, rate: float) -> None:
        self.optimizer.rate = rate

    @torch.no_grad()
    def step(self, batch: Tensor) -> Tensor:
        parts = batch[0].tensor_split(-(-batch.shape[1] // PART))
        losses = self._gradients(parts[0])
        if len(parts) > 1:
            losses = self._sum_over(parts[1:], losses, len(parts[0]) / batch.shape[1], batch.shape[1])
        self.optimizer.step(self.gradient)
        return losses

    def _sum_over(self, parts: Sequence[Tensor], losses: Tensor, share: float, samples: int) -> Tensor:
        """Add what further parts of a batch give to the losses and gradients of the first, a share of it; a mean over all."""
        total = self.gradient * share
        losses = losses * share
        for part in parts:
            share = len(part) / samples
            losses += self._gradients(part) * share
            total.add_(self.gradient, alpha=share)
        self.gradient.copy_(total)
        return losses

    def _gradients(self, chosen: Tensor) -> Tensor:
        """The losses on these samples; their gradients are written where the optimizer reads them."""
        pairs, of_pairs = (list(zip(of[4::2], of[5::2], strict=True)) for of in (self.leaves, self.gradients))
        first, first_bias, second, second_bias = self.leaves[:4]
        inside = self.stages[0].forward(self._images(chosen), first, first_bias)
        features = self.stages[1].forward(inside, second, second_bias)
        losses, of_features = self.dense(features, self.labels[:, chosen], pairs, of_pairs)
        of_inside = self.stages[1].backward(of_features, *self.gradients[2:4], of_inputs=True)
        assert of_inside is not None
        self.stages[0].backward(of_inside, *self.gradients[:2], of_inputs=False)
        return losses

    def _images(self, chosen: Tensor) -> Tensor:
        """The chosen images, channels last, inside the border of the first convolution: in one buffer for all batches of a size."""
        border, (_, channels, height, width) = self.border, self.x.shape
        if self.images.dim() == 1 or self.images.shape[1] != len(chosen):
            self.images = roomy(1, len(chosen), height + 2 * border, width + 2 * border, channels).zero_()
        gather(self.x, chosen, border, self.images)
        return self.images

    def keep(self, positions: list[int]) -> None:
        kept = [torch.arange(leaf.numel()).view(len(self.runs), -1)[positions].flatten() for leaf in self.leaves]
        starts = itertools.accumulate([leaf.numel() for leaf in self.leaves], initial=0)
        entries = torch.cat([each + start for each, start in zip(kept, starts, strict=False)])
        for position, run in enumerate(self.runs):
            if position not in positions:  # its weights must outlive those of the others
                for parameter in run.model.parameters():
                    parameter.data = parameter.data.clone()
        self.runs = [self.runs[position] for position in positions]
        self._join()
        optimizer = self.optimizer.kept(entries)
        optimizer.weights = self.weights
        self.optimizer = optimizer


def _as_matrix(parameter: Tensor) -> Tensor:
    """A weight as it is, a bias as one row: what a batched product takes."""
    return parameter if parameter.dim() == 2 else parameter.unsqueeze(0)


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad
