"""A small transformer for images: patches as tokens, RMS normalization, heads of attention and ReLU."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEADS = 4


class Block(nn.Module):
    """x + attention(norm(x)), then x + down(relu(up(norm(x))))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(2, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.relu(self.up(self.norm2(x))))
        return out


class Transformer(nn.Module):
    """Square patches of an image as tokens, `blocks` blocks, and the mean over tokens for the classes."""

    def __init__(self, shape: tuple[int, ...], classes: int, blocks: int, width: int) -> None:
        super().__init__()
        channels, height, breadth = shape
        self.side = max(2, min(height, breadth) // 4)  # about sixteen patches
        tokens = (height // self.side) * (breadth // self.side)
        self.embed = nn.Linear(channels * self.side**2, width)
        self.position = nn.Parameter(0.1 * torch.randn(tokens, width))
        self.blocks = nn.ModuleList(Block(width, 2 * width) for _ in range(blocks))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-6), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(F.unfold(x, self.side, stride=self.side).mT) + self.position
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x).mean(1))
        return scores
