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

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study import compiling
from spiritlevel.study.compiling import address

# Backward, the compiled code has vectors of up to sixteen numbers and reads, or adds zeros to, as many as fill the last one.
ROOM = 16


class Pooled(Protocol):
    """One step for several networks: `backward` belongs to the last `forward`, whose result the next one overwrites.

    What it makes, and the gradient of that, lie in a border of zeros, for a convolution behind it.
    """

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor: ...

    def backward(
        self, gradient: Tensor, weight_gradient: Tensor, bias_gradient: Tensor, *, of_inputs: bool
    ) -> Tensor | None:
        """Write the gradients of weights and biases; that of the inputs, if asked for."""


def pooled_convolution(networks: int, *, relu: bool, pool: int = 2, border: int = 0) -> Pooled:
    """The step for so many networks, with windows of 2×2 or 3×3, as fast as can be had here."""
    library = compiling.library()
    return (
        _ByTorch(networks, relu, pool, border) if library is None else _Compiled(library, networks, relu, pool, border)
    )


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

    def __init__(self, networks: int, relu: bool, pool: int, border: int) -> None:
        self.networks, self.relu, self.pool, self.border = networks, relu, pool, border

    @torch.enable_grad()
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        self.of = tuple(tensor.detach().requires_grad_() for tensor in (x, weight, bias))
        images, kernels, biases = self.of
        of_each = images.expand(self.networks, *x.shape[1:]), *(part.chunk(self.networks) for part in (kernels, biases))
        maps = [F.conv2d(each.permute(0, 3, 1, 2), *of) for each, *of in zip(*of_each, strict=True)]
        made = [F.max_pool2d(each, self.pool, stride=2, padding=self.pool - 2) for each in maps]
        pooled = torch.stack(made).permute(0, 1, 3, 4, 2)
        self.out = F.pad(torch.relu(pooled) if self.relu else pooled, (0, 0, *(self.border,) * 4))
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
        (name, ctypes.c_int)
        for name in ("samples", "height", "width", "channels", "outputs", "kernel", "pool", "relu", "margin")
    )


class _Compiled:
    """The step by compiled code, on one thread."""

    def __init__(self, library: ctypes.CDLL, networks: int, relu: bool, pool: int, border: int) -> None:
        self.library, self.networks, self.relu, self.pool, self.border = library, networks, relu, pool, border
        self.out = self.which = self.inputs = torch.empty(0)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        _, samples, height, width, channels = x.shape
        outputs, kernel = len(weight) // self.networks, weight.shape[-1]
        if weight.shape[1] != channels:  # compiled code would read beyond the weights
            raise SpiritLevelError(f"images have {channels} channels, and the network takes {weight.shape[1]}")
        self.x, self.weight = x, weight
        self.shape = _Shape(samples, height, width, channels, outputs, kernel, self.pool, self.relu, self.border)
        self.shared = len(x) < self.networks
        rows, columns = ((side - kernel + self.pool - 1) // 2 + 2 * self.border for side in (height, width))
        if self.out.shape != (shape := (self.networks, samples, rows, columns, outputs)):
            self.out, self.which = roomy(*shape).zero_(), torch.empty(shape, dtype=torch.uint8)
        self.library.pooled_forward(
            self.networks, self.shared, self.shape, address(x), address(weight), address(bias), address(self.out),
            address(self.which),
        )  # fmt: skip
        return self.out

    def backward(
        self, gradient: Tensor, weight_gradient: Tensor, bias_gradient: Tensor, *, of_inputs: bool
    ) -> Tensor | None:
        assert not (of_inputs and self.shared), "the gradients of images that networks share would be a sum"
        if of_inputs and self.inputs.shape != self.x.shape:
            self.inputs = roomy(*self.x.shape)
        inputs = self.inputs if of_inputs else None
        gradient = gradient.contiguous()
        self.library.pooled_backward(
            self.networks, self.shared, self.shape, address(self.x), address(self.weight), address(gradient), address(self.which),
            address(weight_gradient), address(bias_gradient), None if inputs is None else address(inputs),
        )  # fmt: skip
        return inputs
