"""A convolution, max pooling and ReLU as one step of a training, forward and backward.

Windows of pooling lie two apart: 2×2, or 3×3 with a border of one. A gradient passes pooling at one of four places, and ReLU at some
of those; a general convolution multiplies all the zeros. Compiled code that leaves them out takes a half to a third of the time of
torch's.

Images have their channels last, (networks, samples, height, width, channels); one network's images may be for all. Kernels are those
of all networks, one after the other, with channels last in memory.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from spiritlevel.study import compiling
from spiritlevel.study.compiling import address

# Backward, the compiled code has vectors of eight numbers and reads, or adds zeros to, as many as fill the last one.
ROOM = 8


class Pooled(Protocol):
    """One step for several networks: `backward` belongs to the last `forward`."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor: ...

    def backward(
        self, gradient: Tensor, weight_gradient: Tensor, bias_gradient: Tensor, *, of_inputs: bool
    ) -> Tensor | None:
        """Write the gradients of weights and biases; that of the inputs, if asked for."""


def pooled_convolution(networks: int, *, relu: bool, pool: int = 2) -> Pooled:
    """The step for so many networks, with windows of 2×2 or 3×3, as fast as can be had here."""
    library = compiling.library()
    return _ByTorch(networks, relu, pool) if library is None else _Compiled(library, networks, relu, pool)


def roomy(*shape: int) -> Tensor:
    """Room for a tensor of images, with whatever is there, and for what the compiled code reads behind them."""
    count = torch.Size(shape).numel()
    return torch.empty(count + ROOM)[:count].view(shape)


def with_border(x: Tensor, border: int) -> Tensor:
    """Images inside a border of zeros, in room of their own."""
    networks, samples, height, width, channels = x.shape
    end = (x.storage_offset() + x.numel() + ROOM) * x.element_size()
    if border == 0 and x.is_contiguous() and end <= x.untyped_storage().nbytes():
        return x
    made = roomy(networks, samples, height + 2 * border, width + 2 * border, channels).zero_()
    inside = slice(border, -border or None)
    made[:, :, inside, inside] = x
    return made


def gather(images: Tensor, chosen: Tensor, border: int, out: Tensor) -> None:
    """Chosen images (samples, channels, height, width), channels last, into the middle of `out`."""
    library = compiling.compiled()
    if library is None:
        inside = slice(border, -border or None)
        out[0, : len(chosen), inside, inside] = images[chosen].permute(0, 2, 3, 1)
    else:
        library.gather(address(images), address(chosen), len(chosen), *images.shape[1:], border, address(out))


# --- by torch ---------------------------------------------------------------------------------------------------------


class _ByTorch:
    """The step by torch's own functions."""

    def __init__(self, networks: int, relu: bool, pool: int) -> None:
        self.networks, self.relu, self.pool = networks, relu, pool

    @torch.enable_grad()
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        self.of = tuple(tensor.detach().requires_grad_() for tensor in (x, weight, bias))
        images, kernels, biases = self.of
        of_each = images.expand(self.networks, *x.shape[1:]), *(part.chunk(self.networks) for part in (kernels, biases))
        maps = [F.conv2d(each.permute(0, 3, 1, 2), *of) for each, *of in zip(*of_each, strict=True)]
        made = [F.max_pool2d(each, self.pool, stride=2, padding=self.pool - 2) for each in maps]
        pooled = torch.stack(made).permute(0, 1, 3, 4, 2)
        self.out = torch.relu(pooled) if self.relu else pooled
        return self.out.detach()

    def backward(
        self, gradient: Tensor, weight_gradient: Tensor, bias_gradient: Tensor, *, of_inputs: bool
    ) -> Tensor | None:
        images, *weights = self.of
        wanted = [*weights, images] if of_inputs else weights
        kernels, biases, *inputs = torch.autograd.grad(self.out, wanted, gradient)
        weight_gradient.copy_(kernels)
        bias_gradient.copy_(biases)
        return inputs[0] if of_inputs else None


# --- by compiled code -------------------------------------------------------------------------------------------------


class _Shape(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int) for name in ("samples", "height", "width", "channels", "outputs", "kernel", "pool", "relu")
    )


class _Compiled:
    """The step by compiled code, on one thread."""

    def __init__(self, library: ctypes.CDLL, networks: int, relu: bool, pool: int) -> None:
        self.library, self.networks, self.relu, self.pool = library, networks, relu, pool

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        _, samples, height, width, channels = x.shape
        outputs, kernel = len(weight) // self.networks, weight.shape[-1]
        self.x, self.weight = x, weight
        self.shape = _Shape(samples, height, width, channels, outputs, kernel, self.pool, self.relu)
        self.shared = len(x) < self.networks
        rows, columns = ((side - kernel + self.pool - 1) // 2 for side in (height, width))
        out = roomy(self.networks, samples, rows, columns, outputs)
        self.which = torch.empty(out.shape, dtype=torch.uint8)
        self.library.pooled_forward(
            self.networks,
            self.shared,
            self.shape,
            address(x),
            address(weight),
            address(bias),
            address(out),
            address(self.which),
        )
        return out

    def backward(
        self, gradient: Tensor, weight_gradient: Tensor, bias_gradient: Tensor, *, of_inputs: bool
    ) -> Tensor | None:
        inputs = roomy(*self.x.shape) if of_inputs else None
        gradient = gradient.contiguous()
        self.library.pooled_backward(
            self.networks, self.shared, self.shape, address(self.x), address(self.weight), address(gradient), address(self.which),
            address(weight_gradient), address(bias_gradient), None if inputs is None else address(inputs),
        )  # fmt: skip
        return inputs
