"""Residual networks with batch normalization for small images."""

from torch import Tensor, nn
from torch.nn import functional as F


def _conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)


class BasicBlock(nn.Module):
    """relu(x' + bn(conv(relu(bn(conv(x)))))), where x' is x, subsampled and padded with zero channels (option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(inputs, outputs, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = _conv3x3(outputs, outputs)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.new_channels = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.new_channels or self.stride > 1:
            before = self.new_channels // 2
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.new_channels - before))
        return F.relu(out + x)


class ResNet(nn.Module):
    """The CIFAR ResNet of He et al. 2016 with 6n + 2 layers: three stages of n blocks, channels doubled at each."""

    def __init__(self, channels: int, classes: int, blocks: int, width: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(channels, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = self._stage(width, width, blocks, stride=1)
        self.layer2 = self._stage(width, 2 * width, blocks, stride=2)
        self.layer3 = self._stage(2 * width, 4 * width, blocks, stride=2)
        self.linear = nn.Linear(4 * width, classes)

    @staticmethod
    def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
        first = BasicBlock(inputs, outputs, stride)
        return nn.Sequential(first, *(BasicBlock(outputs, outputs, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        out: Tensor = self.linear(x.mean((2, 3)))
        return out


class WideBlock(nn.Module):
    """x' + conv(relu(bn(conv(relu(bn(x)))))), where x' is x, or a 1×1 convolution of relu(bn(x)) to a new shape."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = _conv3x3(inputs, outputs, stride)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = _conv3x3(outputs, outputs)
        reshapes = inputs != outputs or stride > 1
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False) if reshapes else None

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(x))
        skip = x if self.shortcut is None else self.shortcut(h)
        out: Tensor = skip + self.conv2(F.relu(self.bn2(self.conv1(h))))
        return out


class WideResNet(nn.Module):
    """WRN of Zagoruyko & Komodakis 2016 with 6n + 4 layers: three stages of n blocks of 16k, 32k and 64k channels."""

    def __init__(self, channels: int, classes: int, blocks: int, first: int, widths: tuple[int, int, int]) -> None:
        super().__init__()
        self.conv1 = _conv3x3(channels, first)
        self.layer1 = self._stage(first, widths[0], blocks, stride=1)
        self.layer2 = self._stage(widths[0], widths[1], blocks, stride=2)
        self.layer3 = self._stage(widths[1], widths[2], blocks, stride=2)
        self.bn = nn.BatchNorm2d(widths[2])
        self.linear = nn.Linear(widths[2], classes)

    @staticmethod
    def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
        first = WideBlock(inputs, outputs, stride)
        return nn.Sequential(first, *(WideBlock(outputs, outputs, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.conv1(x))))
        out: Tensor = self.linear(F.relu(self.bn(x)).mean((2, 3)))
        return out
