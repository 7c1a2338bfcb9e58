"""What the tests of data sets share."""

from pathlib import Path

import pytest


@pytest.fixture
def little_memory():
    """No more than two gigabytes beyond what is in use: what is allocated on the word of a header fails."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
