"""One thread for every test: more of them than cores slow each other down, and sums keep their order."""

import pytest
import torch

from spiritlevel.curvature import estimate


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def only_probes(monkeypatch):
    """No block is formed by products with unit vectors, which small networks take instead of probes."""
    monkeypatch.setattr(estimate, "blocks_worth_forming", lambda products, open_kinds, left: [])
