"""A study that takes a moment: random data, tiny networks, cheap measures."""

from pathlib import Path

import pytest

TINY = """\
title = "tiny"
seeds = 2

[data]
name = "random:60,6,3,0"

[model]
name = "mlp:8"

[training]
optimizer = "sgd"
learning_rate = 0.2
batch_size = 16
epochs = 3

[factors]
training.batch_size = [16, 30]

[measure]
measures = ["hessian_trace", "kappa_trace_sum"]
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """The file of the tiny study: two batch sizes, two seeds."""
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return str(path)
