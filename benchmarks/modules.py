"""The same networks written in modules only, which is the form BackPACK can read; weights are shared."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spiritlevel.subjects.networks.convolutional import LeNet
from spiritlevel.subjects.networks.residual import BasicBlock, ResNet


def in_modules(model: nn.Module) -> nn.Module:
    """An equal network without functional calls; parameters in the same order."""
    if isinstance(model, LeNet):
        convolutions = [part for conv in (model.conv1, model.conv2) for part in (conv, nn.ReLU(), nn.MaxPool2d(2))]
        dense = [nn.Flatten(), model.fc1, nn.ReLU(), model.fc2, nn.ReLU(), model.fc3]
        return nn.Sequential(*convolutions, *dense)
    return _Residual(model) if isinstance(model, ResNet) else model


class _Block(nn.Module):
    """A residual block whose subsampling and padding with zero channels is a frozen 1×1 convolution: the same map."""

    def __init__(self, block: BasicBlock) -> None:
        super().__init__()
        self.conv1, self.bn1, self.conv2, self.bn2 = block.conv1, block.bn1, block.conv2, block.bn2
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if block.new_channels or block.stride > 1:
            self.shortcut = _subsampling(block)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        return self.relu2(out + self.shortcut(x))  # type: ignore[no-any-return]


def _subsampling(block: BasicBlock) -> nn.Conv2d:
    inputs, outputs = block.conv1.in_channels, block.conv1.out_channels
    conv = nn.Conv2d(inputs, outputs, 1, stride=block.stride, bias=False).requires_grad_(False)
    before = block.new_channels // 2
    conv.weight.zero_()[before : before + inputs, :, 0, 0] = torch.eye(inputs)
    return conv


class _Residual(nn.Module):
    def __init__(self, model: ResNet) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = model.conv1, model.bn1, nn.ReLU()
        stages = (model.layer1, model.layer2, model.layer3)
        self.blocks = nn.Sequential(*(_Block(block) for stage in stages for block in stage))  # type: ignore[arg-type]
        self.pool, self.flatten, self.linear = nn.AdaptiveAvgPool2d(1), nn.Flatten(), model.linear

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.relu(self.bn1(self.conv1(x))))
        out: Tensor = self.linear(self.flatten(self.pool(x)))
        return out
