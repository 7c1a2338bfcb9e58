"""A network that ends its own process: at a chosen forward pass it sends itself a signal. Counts its passes in a file."""

import os
import signal
from pathlib import Path

import torch
from torch import Tensor, nn

PASS, SIGNAL, COUNT = "FUZZ_PASS", "FUZZ_SIGNAL", "FUZZ_COUNT"


class Victim(nn.Sequential):
    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        Victim.passes += 1
        if Victim.passes == int(os.environ.get(PASS, 0)):
            os.kill(os.getpid(), getattr(signal, os.environ[SIGNAL]))
        Path(os.environ[COUNT]).write_text(str(Victim.passes))
        return super().forward(x)


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Victim(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
