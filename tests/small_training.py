"""A small training that tests of the tracker and of its integrations follow."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def mlp(activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), activation(), nn.Linear(8, 8), activation(), nn.Linear(8, 3))


class Training:
    """A classifier of random data, trained by `run`, which calls `after(step, loss)` after every step."""

    def __init__(self, network: Callable[[], nn.Module] = mlp, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(120, 6, generator=generator).to(dtype)
        self.y = (self.x @ torch.randn(6, 3, generator=generator).to(dtype)).argmax(1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = network().to(dtype)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self._rows = generator

    @property
    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x, self.y

    def run(self, steps: int, after: Callable[[int, Any], Any] = lambda step, loss: None, first: int = 0) -> None:
        for step in range(first, first + steps):
            rows = torch.randint(0, len(self.x), (32,), generator=self._rows)
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(self.x[rows]), self.y[rows])
            loss.backward()
            self.optimizer.step()
            after(step, loss)
