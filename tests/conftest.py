"""One thread for every test: more of them than cores slow each other down, and sums keep their order."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)
