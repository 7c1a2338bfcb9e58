"""For every test: one thread (more of them than cores slow each other down, and sums keep their order), and fixtures."""

import gc
import os

import pytest
import torch

import reached
import skips

if reached.asked_for():
    reached.watch()  # before anything of the library is loaded

from spiritlevel import cli
from spiritlevel.curvature import estimate

# Ray reads this once, when it is imported, which any test of a process may be the first to do; see study/test_engines.py.
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="a token of the tests that nobody guesses")


def pytest_configure(config):
    """A test that is skipped for a reason that is not on the list fails; how much is reached is told where it is asked for."""
    config.pluginmanager.register(skips, "skips")
    if reached.asked_for():
        config.pluginmanager.register(reached, "reached")


def pytest_collection_modifyitems(items):
    """Files with slow tests first: a worker of xdist takes whole files (their fixtures are made once), the short ones last."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish():
    """The half million objects that every module's import left are not looked through again and again for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_draws():
    """Weights that a test does not seed are the same in every order of tests: now and then all neurons of a small layer are dead."""
    torch.manual_seed(0)


@pytest.fixture
def only_probes(monkeypatch):
    """No block is formed by products with unit vectors, which small networks take instead of probes."""
    monkeypatch.setattr(estimate, "blocks_worth_forming", lambda products, open_kinds, left: [])


@pytest.fixture
def own_precision(monkeypatch):
    """Small networks too are measured as large ones are: in the precision that they are in, with no more products than needed."""
    monkeypatch.setattr("spiritlevel.problem.batches.SMALL", 0)


@pytest.fixture
def by_searches(monkeypatch):
    """Eigenvalues of small networks too are searched for, not read off the whole Hessian."""
    monkeypatch.setattr("spiritlevel.curvature.whole.WORTH", 0)


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a command line; gives (exit code, standard output, standard error)."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return call
