"""The sweep: every way of adding up squares gives the same sums, and none pulls a column back twice."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import cases
import spiritlevel as sl
from spiritlevel.curvature import kernels, statistics
from spiritlevel.curvature.estimate import mean_of
from spiritlevel.curvature.examine import examine
from spiritlevel.curvature.statistics import COLUMNS, DIAGONAL, ROWS, TRACE, TappedChunk, sweep

NAMES = [
    "mlp",
    "mlp, own loss",
    "siamese",
    "convolution, max pooling",
    "convolution, normalized loss",
    "convolution with stride and dilation",
    "depthwise convolution",
    "3-d convolution",
    "grouped transposed convolution",
    "batch normalization",
    "GPT-2 layers over sequences",
    "embedding looked up twice",
    "samples inside a merged dimension",
    "sequence first",
    "an output for every position",
]


def swept(name, *kinds):
    case = cases.by_name(name)
    model, x, y = case.make()
    problem = sl.Problem(model, case.loss, (x, y))
    found = sweep(problem, examine(problem), frozenset(kinds), torch.Generator().manual_seed(0)).found
    return SimpleNamespace(**{kind: {key: exact for key, (exact,) in arrays.items()} for kind, arrays in found.items()})


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for key, array in wanted.items():
        torch.testing.assert_close(found[key], array, rtol=1e-9, atol=1e-12 * float(array.abs().max()))


@pytest.mark.parametrize("gram", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_trace_is_the_sum_of_the_diagonal(name, gram, monkeypatch):
    wanted = {key: array.sum() for key, array in swept(name, DIAGONAL).diagonal.items()}
    monkeypatch.setattr(kernels.Gradients, "short_positions", lambda self, columns: gram)
    found = swept(name, TRACE)
    assert_same(found.trace, wanted)
    assert found.diagonal == {}


@pytest.mark.parametrize("name", NAMES)
def test_pairs_of_positions_give_the_diagonal(name, monkeypatch):
    monkeypatch.setattr(kernels.Gradients, "few_positions", lambda self, columns: False)
    wanted = swept(name, DIAGONAL).diagonal
    monkeypatch.setattr(kernels.Gradients, "few_positions", lambda self, columns: True)
    assert_same(swept(name, DIAGONAL).diagonal, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_and_columns_side_by_side_change_nothing(name, monkeypatch):
    wanted = swept(name, DIAGONAL, ROWS, COLUMNS)
    monkeypatch.setattr(kernels, "BLOCK_BYTES", 1)
    monkeypatch.setattr(statistics, "SIDE_BY_SIDE", 2)
    monkeypatch.setattr(statistics, "WAITING_BYTES", 1)
    found = swept(name, DIAGONAL, ROWS, COLUMNS)
    for kind in (DIAGONAL, ROWS, COLUMNS):
        assert_same(getattr(found, kind), getattr(wanted, kind))


def test_waiting_columns_bound_the_chunk():
    model, x, y = cases.by_name("convolution, max pooling").make()
    problem = sl.Problem(model, "cross_entropy", (x, y))
    anatomy = examine(problem)
    entry = anatomy.spread * anatomy.outputs * x.element_size()
    assert anatomy.spread > 0
    problem.chunk_size = 10**9
    assert statistics.chunk_size(problem, anatomy) == statistics.WAITING_BYTES // entry
    for spread, samples in ((15_000, 128), (10**6, statistics.WAITING_BYTES * 2 // (10**6 * anatomy.outputs * 8))):
        assert statistics.chunk_size(problem, replace(anatomy, spread=spread)) == samples
    assert statistics.chunk_size(problem, replace(anatomy, spread=10**12)) == 1


@pytest.mark.parametrize("kinds", [{TRACE}, {DIAGONAL}, {DIAGONAL, ROWS, COLUMNS}])
def test_one_pull_for_every_column(kinds, monkeypatch):
    model, x, y = cases.by_name("mlp").make()
    problem = sl.Problem(model, "cross_entropy", (x, y))
    anatomy, pulls = examine(problem), []
    pull = TappedChunk.pull
    monkeypatch.setattr(TappedChunk, "pull", lambda self, vector: pulls.append(1) or pull(self, vector))
    found = sweep(problem, anatomy, frozenset(kinds), torch.Generator())
    assert len(pulls) == found.num_columns == model(x).shape[1] - 1


def test_the_trace_of_a_sum_of_measures_comes_with_the_diagonal():
    model, x, y = cases.by_name("mlp").make()
    alone = sl.measure(model, (x, y), measures=["hessian_trace"])["hessian_trace"].value
    together = sl.measure(model, (x, y), measures=["hessian_trace", "normalized_sharpness"])["hessian_trace"].value
    assert alone == pytest.approx(together, rel=1e-12)


def test_means_lie_in_memory_as_a_tensor_of_their_shape_does() -> None:
    """What a sweep adds up may be a transpose; whoever reads a diagonal may flatten it."""
    draws = [torch.randn(4, 3).T for _ in range(3)]
    for found in (mean_of(draws), mean_of(draws[:1])):
        assert found.is_contiguous()
        assert found.dtype == torch.float64
    torch.testing.assert_close(mean_of(draws), torch.stack(draws).double().mean(0))
    assert mean_of(draws[:1]).data_ptr() != draws[0].data_ptr()


@pytest.mark.parametrize("size", [4, 20])
def test_traces_keep_the_digits_of_single_precision(size: int) -> None:
    """Over hundreds of thousands of terms of one sign, whichever way a layer's trace is added up."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, size, 3),
        torch.nn.ReLU(),
        torch.nn.Conv2d(size, size, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
    )
    model = torch.nn.Sequential(model, torch.nn.Linear(size * 16 * 16, 3))
    data = (torch.rand(64, 1, 20, 20), torch.randint(0, 3, (64,)))
    single = sl.measure(model, data, measures=["kappa_trace_sum"])["kappa_trace_sum"].layers
    double = sl.measure(model, data, measures=["kappa_trace_sum"], dtype=torch.float64)["kappa_trace_sum"].layers
    for name, value in double.items():
        assert single[name] == pytest.approx(value, rel=1e-6)
