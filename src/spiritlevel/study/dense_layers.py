"""Dense layers with ReLU between them and cross entropy behind them as one step of a training: losses and gradients.

Of several networks at once, whose tensors lie one after the other along a first axis. For batches of four samples a dozen calls of torch
take longer than what they compute; compiled code takes one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from spiritlevel.study import compiling
from spiritlevel.study.compiling import address

# Weights, (networks, outputs, inputs), and biases, (networks, 1, outputs), of every layer.
Layers = Sequence[tuple[Tensor, Tensor]]
# Weights are read in vectors of up to sixteen numbers: there must be so many behind them that may be read.
ROOM = 16
# Samples up to which the compiled code was measured to be faster; of 128, torch's products take half its time in wide layers.
FEW = 64


class DenseLayers(Protocol):
    """The step of several networks."""

    def __call__(self, images: Tensor, labels: Tensor, layers: Layers, gradients: Layers) -> tuple[Tensor, Tensor]:
        """Write the gradients of all layers; the losses, and the gradients of the images.

        Args:
            images: (networks, samples, height, width, channels); channels come first to the layers.
            labels: (networks, samples).
            layers: What is trained.
            gradients: Where to write.
        """


def dense_layers() -> DenseLayers:
    """The step, as fast as can be had here."""
    library = compiling.library()
    return _by_torch if library is None else _Compiled(library)


def _by_torch(images: Tensor, labels: Tensor, layers: Layers, gradients: Layers) -> tuple[Tensor, Tensor]:
    inputs = [images.permute(0, 1, 4, 2, 3).flatten(2)]
    for weight, bias in layers[:-1]:
        inputs.append(torch.baddbmm(bias, inputs[-1], weight.mT).relu_())
    weight, bias = layers[-1]
    logs = F.log_softmax(torch.baddbmm(bias, inputs[-1], weight.mT), dim=-1)
    losses = -logs.gather(2, labels[..., None]).squeeze(2).mean(1)
    gradient = logs.exp_()
    gradient.scatter_add_(2, labels[..., None], gradient.new_full((*labels.shape, 1), -1.0)).div_(labels.shape[1])
    for position in reversed(range(len(layers))):
        of_weights, of_biases = gradients[position]
        torch.bmm(gradient.mT, inputs[position], out=of_weights)
        torch.sum(gradient, 1, keepdim=True, out=of_biases)
        gradient = torch.bmm(gradient, layers[position][0])
        if position:
            gradient.mul_(inputs[position] > 0)
    *first, height, width, channels = images.shape
    return losses, gradient.view(*first, channels, height, width).permute(0, 1, 3, 4, 2)


class _Compiled:
    """The step by compiled code, on one thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def __call__(self, images: Tensor, labels: Tensor, layers: Layers, gradients: Layers) -> tuple[Tensor, Tensor]:
        networks, samples, height, width, channels = images.shape
        if samples > FEW:
            return _by_torch(images, labels, layers, gradients)
        sizes = [weight.shape[2] for weight, _ in layers] + [layers[-1][0].shape[1]]
        losses, of_images = torch.empty(networks), torch.empty_like(images, memory_format=torch.contiguous_format)
        images, labels = images.contiguous(), labels.contiguous()
        pointers = [_addresses(column) for pairs in (layers, gradients) for column in zip(*pairs, strict=True)]
        self.library.dense_step(
            networks, samples, height * width, channels, len(layers), (ctypes.c_int * len(sizes))(*sizes),
            address(images), address(labels), *pointers, address(of_images), address(losses),
        )  # fmt: skip
        return losses, of_images


def _addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
