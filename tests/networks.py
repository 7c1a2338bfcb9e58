"""Small networks of every kind the discovery must be right on, with their number of factors in closed form."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(*widths: int, bias: bool = True, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out, bias=bias), activation()]
    return nn.Sequential(*layers[:-1])


class LeNet(nn.Module):
    """Convolutions and linear layers written in functional style."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 2, 5), nn.Conv2d(2, 3, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(3 * 16, 6), nn.Linear(6, 5), nn.Linear(5, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv1(x).relu(), 2)
        x = F.avg_pool2d(F.relu(self.conv2(x)), 2)
        x = x.view(x.size(0), -1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


def vgg(batch_norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out, pool in ((3, 4, True), (4, 6, False), (6, 6, True)):
        layers.append(nn.Conv2d(fan_in, fan_out, 3, padding=1))
        layers += [nn.BatchNorm2d(fan_out)] if batch_norm else []
        layers.append(nn.ReLU(inplace=True))
        layers += [nn.MaxPool2d(2)] if pool else []
    head = [nn.Dropout(), nn.Linear(6 * 4, 8), nn.ReLU(True), nn.Dropout(), nn.Linear(8, 5)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), *head)


def alexnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=2, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, padding=1),
        nn.Conv2d(8, 12, 3, padding=1, groups=2, dilation=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(12, 6, 3, padding=2, dilation=2),
        nn.LeakyReLU(0.1),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 7),
        nn.ReLU(),
        nn.Linear(7, 4),
    )


class BasicBlock(nn.Module):
    """The block of CIFAR ResNets; option A subsamples and pads channels with zeros, B projects."""

    def __init__(self, fan_in: int, fan_out: int, stride: int, option: str, norm: bool = True) -> None:
        super().__init__()
        make: Callable[[int], nn.Module] = nn.BatchNorm2d if norm else lambda _: nn.Identity()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = make(fan_out), make(fan_out)
        self.option, self.extra = option, fan_out - fan_in
        self.project = nn.Conv2d(fan_in, fan_out, 1, stride, bias=False) if option == "B" and stride > 1 else None
        self.bn3 = make(fan_out) if self.project is not None else None

    def shortcut(self, x: Tensor) -> Tensor:
        if self.project is not None and self.bn3 is not None:
            return self.bn3(self.project(x))
        if self.extra:
            return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.extra // 2, self.extra // 2))
        return x

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class ResNet(nn.Module):
    """A CIFAR ResNet with stages of 4 and 8 channels, `depth` blocks each."""

    def __init__(self, option: str = "A", depth: int = 2, norm: bool = True, widths: tuple[int, ...] = (4, 8)) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(widths[0]) if norm else nn.Identity()
        blocks, fan_in = [], widths[0]
        for width in widths:
            for k in range(depth):
                stride = 2 if k == 0 and width != fan_in else 1
                blocks.append(BasicBlock(fan_in, width, stride, option, norm))
                fan_in = width
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(widths[-1], 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.bn(self.conv(x))))
        return self.fc(F.avg_pool2d(x, x.size()[3]).flatten(1))


class PreActivation(nn.Module):
    """Two pre-activation blocks: normalization and ReLU before each convolution."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(5))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(4))
        self.fc = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        for k in (0, 2):
            inner = self.convs[k](self.norms[k](x).relu())
            x = x + self.convs[k + 1](self.norms[k + 1](inner).relu())
        return self.fc(self.norms[4](x).relu().mean(dim=(2, 3)))


class DenseBlock(nn.Module):
    """Each layer reads the concatenation of all before it."""

    def __init__(self, growth: int = 3, norm: bool = False) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(2 + k * growth, growth, 3, padding=1) for k in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(2 + k * growth) if norm else nn.Identity() for k in range(3))
        self.fc = nn.Linear(2 + 3 * growth, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for conv, norm in zip(self.convs, self.norms, strict=True):
            features.append(torch.relu(conv(norm(torch.cat(features, 1)))))
        return self.fc(torch.cat(features, dim=1).mean((-2, -1)))


class InvertedResidual(nn.Module):
    """MobileNet: expand, depthwise, project, each normalized, with a skip; activation ReLU (ReLU6 is not homogeneous)."""

    def __init__(self, activation: Callable[[], nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), activation())
        self.block = nn.Sequential(
            nn.Conv2d(4, 8, 1, bias=False), nn.BatchNorm2d(8), activation(),
            nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), activation(),
            nn.Conv2d(8, 4, 1, bias=False), nn.BatchNorm2d(4),
        )  # fmt: skip
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.fc((x + self.block(x)).mean([2, 3]))


class Depthwise(nn.Module):
    """Separable convolutions without normalization, depthwise with a multiplier."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.depthwise = nn.Conv2d(4, 8, 3, padding=1, groups=4)
        self.pointwise = nn.Conv2d(8, 5, 1)
        self.fc = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.pointwise(F.relu(self.depthwise(F.relu(self.first(x))))))
        return self.fc(F.adaptive_avg_pool2d(x, 1).squeeze(-1).squeeze(-1))


class UNet(nn.Module):
    """Down, up with a transposed convolution, and a skip by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 5, 3, padding=1)
        self.up = nn.ConvTranspose2d(5, 4, 2, stride=2)
        self.merge, self.out = nn.Conv2d(7, 3, 3, padding=1), nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.down1(x))
        deep = F.relu(self.down2(F.max_pool2d(skip, 2)))
        return self.out(F.relu(self.merge(torch.cat([skip, F.relu(self.up(deep))], dim=1))))


class UsedTwice(nn.Module):
    """The same layer applied twice in a row: its inputs and outputs must have the same scale."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        return self.last(F.relu(self.twice(F.relu(self.twice(x)))))


class UsedOnTwoBranches(nn.Module):
    """One layer without bias on two branches that are only concatenated: the branches share their ratio of scales."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 5), nn.Linear(4, 5)
        self.shared, self.last = nn.Linear(5, 3, bias=False), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        branches = [F.relu(self.shared(F.relu(side(x)))) for side in (self.left, self.right)]
        return self.last(torch.cat(branches, -1))


class TiedAutoencoder(nn.Module):
    """One matrix as encoder and, transposed, as decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 3), nn.Linear(6, 3, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.encoder(x)) @ self.decoder.weight


class TiedModules(nn.Module):
    """A parameter shared by two modules with layers between them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.between, self.two = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.two.weight = self.one.weight
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.one(F.relu(self.first(x))))
        return self.last(F.relu(self.two(F.relu(self.between(x)))))


class Attention(nn.Module):
    """One pre-normalized attention block with a ReLU network, all residual."""

    def __init__(self, activation: Callable[[], nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.inner = nn.Sequential(nn.Linear(8, 6), activation(), nn.Linear(6, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return self.head(x + self.inner(self.norm2(x))).mean(1)


class PlainAttention(nn.Module):
    """Attention with separate projections and no normalization, on heads made by view and transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(4, 6) for _ in range(4))
        self.o = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = (p(x).view(n, length, 2, 3).transpose(1, 2) for p in (self.q, self.k, self.v))
        weights = (q @ k.transpose(-2, -1) / 3**0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).reshape(n, length, 6))


class Gated(nn.Module):
    """A product of two activations (a gated linear unit): log-scales add."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * F.relu(self.gate(x)))


class Shuffled(nn.Module):
    """Chunks, indexing, flips, stacking, writing into a buffer of zeros, parameters by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, 8, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(8, 4))
        self.shift = nn.Parameter(torch.randn(4, 1))
        self.slope = nn.PReLU(8)
        self.last = nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.slope(self.first(x))
        left, right = x.chunk(2, dim=1)
        x = torch.stack([right.flip(1), left], dim=1).flatten(1, 2)[:, [0, 2, 1, 3, 5, 4, 6, 7]]
        x = torch.einsum("ncl,co->nol", x, self.weight) + self.shift
        padded = torch.zeros(x.shape[0], 4, x.shape[2] + 2, dtype=x.dtype)
        padded[:, :, 1:-1] = x.clamp(min=0)
        return self.last(padded.sum(-1))


class LowRank(nn.Module):
    """A matrix plus a product of two thin ones, merged before use."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.last = nn.Linear(4, 5), nn.Linear(5, 2)
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.linear(x, self.base.weight + self.up @ self.down, self.base.bias).relu())


class Masked(nn.Module):
    """A pruned matrix and a matrix with rows of length one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 2)
        self.register_buffer("mask", (torch.arange(20).view(5, 4) % 3 > 0).double())

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.first.weight * self.mask, self.first.bias).relu()
        rows = self.middle.weight / self.middle.weight.norm(dim=1, keepdim=True)
        return self.last(F.linear(x, rows).relu())


class SqueezeExcite(nn.Module):
    """Channels multiplied by a sigmoid of their means."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 2, 1)
        self.squeeze, self.excite = nn.Linear(4, 2), nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu()
        gate = torch.sigmoid(self.excite(self.squeeze(x.mean((2, 3))).relu()))
        return self.out(x * gate[:, :, None, None]).mean((2, 3))


class LayerScale(nn.Module):
    """A learned token, a learned factor per feature."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 2)
        self.token, self.scale = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.last((self.first(x) * self.scale).relu())[:, 0] + self.last(self.first(x) * self.scale).mean(1)


@dataclass(frozen=True)
class Case:
    """A network, the shape of its input and its number of independent factors."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dimension: int


IMAGE = (2, 3, 8, 8)
CASES: dict[str, Case] = {
    "mlp": Case(lambda: mlp(6, 7, 5, 3), (4, 6), 7 + 5),
    "mlp without bias": Case(lambda: mlp(6, 7, 5, 4, 3, bias=False), (4, 6), 7 + 5 + 4),
    "one hidden unit": Case(lambda: mlp(3, 1, 1, 1), (4, 3), 2),
    "leaky": Case(lambda: mlp(4, 5, 2, activation=lambda: nn.LeakyReLU(0.2)), (4, 4), 5),
    "prelu": Case(lambda: mlp(4, 5, 2, activation=nn.PReLU), (4, 4), 5),
    "linear": Case(lambda: mlp(4, 5, 2, activation=nn.Identity), (4, 4), 5),
    "gelu": Case(lambda: mlp(4, 5, 2, activation=nn.GELU), (4, 4), 0),
    "softmax": Case(lambda: mlp(4, 5, 2, activation=lambda: nn.Softmax(-1)), (4, 4), 0),
    "layer norm": Case(lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 2)), (4, 4), 5),
    "lenet": Case(LeNet, (2, 1, 28, 28), 2 + 3 + 6 + 5),
    "vgg": Case(lambda: vgg(False), IMAGE, 4 + 6 + 6 + 8),
    "vgg with batch norm": Case(lambda: vgg(True), IMAGE, 2 * (4 + 6 + 6) + 8),
    "alexnet": Case(alexnet, (2, 3, 16, 16), 8 + 12 + 6 + 7),
    # Before each normalization one per channel; after it one per channel of the two streams and inside four blocks.
    # With option A channels 2..5 of the second stream continue those of the first.
    "resnet A": Case(lambda: ResNet("A"), IMAGE, (4 + 4 * 4 + 4 * 8) + (4 + 8 - 4) + 2 * 4 + 2 * 8),
    "resnet B": Case(lambda: ResNet("B"), IMAGE, (4 + 4 * 4 + 4 * 8 + 8) + (4 + 8) + 2 * 4 + 2 * 8),
    "resnet without norm": Case(lambda: ResNet("B", norm=False), IMAGE, 4 + 8 + 2 * 4 + 2 * 8),
    "pre-activation": Case(PreActivation, IMAGE, 4 + 5 * 4 + 2 * 4),
    "dense": Case(DenseBlock, (2, 2, 6, 6), 3 * 3),
    "mobilenet": Case(InvertedResidual, IMAGE, 4 + 4 + 8 + 8 + 8 + 8 + 4),
    "mobilenet relu6": Case(lambda: InvertedResidual(nn.ReLU6), IMAGE, 4 + 8 + 8 + 4),
    "depthwise": Case(Depthwise, (2, 2, 8, 8), 4 + 8 + 5),
    "unet": Case(UNet, (2, 1, 4, 4), 3 + 5 + 4 + 3),
    "used twice": Case(UsedTwice, (4, 4), 5),
    "used on two branches": Case(UsedOnTwoBranches, (4, 4), 5 + 3 + 1),
    "tied autoencoder": Case(TiedAutoencoder, (4, 6), 0),
    "tied modules": Case(TiedModules, (4, 3), 5 + 5 + 1),
    "attention": Case(Attention, (2, 5, 8), 8 + 8 + 6 + 8 + 8),
    "attention gelu": Case(lambda: Attention(nn.GELU), (2, 5, 8), 8 + 8 + 8 + 8),
    "plain attention": Case(PlainAttention, (2, 5, 4), 6 + 6),
    "gated": Case(Gated, (4, 4), 5 + 5),
    "low rank": Case(LowRank, (4, 4), 5 + 2),
    # Each row of the second matrix has a free length; what it reads must share one scale, to keep its direction.
    "masked and normalized": Case(Masked, (4, 4), 1 + 3),
    "squeeze and excite": Case(SqueezeExcite, (3, 1, 6, 6), 4 + 2),
    "layer scale": Case(LayerScale, (2, 3, 4), 5 + 5),
    "encoder": Case(lambda: nn.TransformerEncoderLayer(4, 2, 5, batch_first=True), (2, 3, 4), 4 + 4 + 5),
    "shuffled": Case(Shuffled, (2, 2, 6), 8 + 4),
}


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in float64 and eval mode with random normalization statistics, so that nothing hides at 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 1.0 if parameter.dim() < 2 else parameter[0].numel() ** -0.5
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * spread + (0.3 if parameter.dim() < 2 else 0.0))
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                noise = torch.rand(buffer.shape, generator=generator, dtype=torch.float64)
                buffer.copy_(noise + 0.5 if name.endswith("var") else noise - 0.5)
    return model


def example(case: Case, seed: int = 1) -> Tensor:
    return torch.randn(case.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def built(name: str) -> tuple[Any, Tensor]:
    """A randomized network and an input for it."""
    torch.manual_seed(0)
    case = CASES[name]
    return randomized(case.build()), example(case)
