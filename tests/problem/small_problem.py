"""A small network with data, for the tests of problems."""

import torch
from torch import nn

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(1))


def network(*layers):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), *(layers or (nn.ReLU(),)), nn.Linear(6, 3)).double()
