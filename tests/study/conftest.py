"""The tiny study as a file."""

from pathlib import Path

import pytest

from tiny_study import TINY


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """The file of the tiny study: two batch sizes, two seeds."""
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return str(path)
