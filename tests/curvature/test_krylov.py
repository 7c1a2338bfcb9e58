"""Eigenpairs that start from part of the data: the right ones, with few products, also when the part misleads."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import spiritlevel as sl
from dense_oracle import dense
from spiritlevel.curvature import krylov
from spiritlevel.curvature.blocks import GaussNewtonBlocks
from spiritlevel.curvature.examine import examine
from spiritlevel.curvature.hessian import HessianProducts, spread_part
from spiritlevel.curvature.lanczos import Lanczos
from spiritlevel.problem.problem import Problem

pytestmark = pytest.mark.usefixtures("by_searches")

OPERATORS = ["hessian_spectral_norm", "riemannian_spectral_norm", "riemannian_nodewise_spectral_norm"]


def sorted_by_class(samples: int = 1500):
    """Data whose first tenth holds a single class, and a network with its curvature in the last."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(samples) * 10 // samples
    x = torch.randn(samples, 12, generator=generator, dtype=torch.float64) * (0.3 + 0.2 * y[:, None])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 10)).double()
    return model, (x, y)


def test_data_sorted_by_class_do_not_mislead_the_start() -> None:
    model, (x, y) = sorted_by_class()
    hessian = dense(model, nn.functional.cross_entropy, x, y)
    report = sl.measure(model, (x, y), measures=OPERATORS, tolerance=1e-6)
    assert report["hessian_spectral_norm"].value == pytest.approx(
        float(torch.linalg.eigvalsh(hessian).abs().max()), rel=1e-6
    )
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).abs()
    scaled = torch.linalg.eigvalsh(flat[:, None] * hessian * flat)
    assert report["riemannian_nodewise_spectral_norm"].value == pytest.approx(float(scaled[-1]), rel=1e-6)


def test_further_operators_share_the_passes() -> None:
    """The parts of the data are a few passes together, and all operators advance in the same ones."""
    model, data = sorted_by_class()
    first, all_three = (sl.measure(model, data, measures=OPERATORS[:n], tolerance=1e-4) for n in (1, 3))
    assert all_three.cost.passes <= first.cost.passes + 10
    assert all_three.cost.products <= 3 * first.cost.products + 6


def test_a_part_is_spread_over_the_data() -> None:
    class Chunk:
        def __init__(self, index: int) -> None:
            self.index, self.weight = index, 0.01

    chunks = [Chunk(i) for i in range(100)]
    assert [chunk.index for chunk in spread_part(chunks, 1.0, 10_000)] == list(range(5, 100, 10))
    assert len(spread_part(chunks[:3], 1.0, 10_000)) == 3
    assert spread_part([], 1.0, 10_000) == []


def test_of_few_samples_a_part_is_up_to_a_fifth() -> None:
    class Chunk:
        weight = 0.01

    chunks = [Chunk() for _ in range(100)]
    assert [len(spread_part(chunks, 1.0, samples)) for samples in (100, 1000, 1600, 2000)] == [20, 20, 13, 10]


def test_processes_take_turns_where_their_bases_do_not_fit(monkeypatch) -> None:
    model, data = sorted_by_class(300)
    names = [*OPERATORS, "kappa_sum"]
    together = sl.measure(model, data, measures=names, tolerance=1e-6)
    size = sum(parameter.numel() * 8 for parameter in model.parameters())
    monkeypatch.setattr(krylov, "BASIS_BUDGET", 11 * size)
    in_turns = sl.measure(model, data, measures=names, tolerance=1e-6)
    for name in names:
        assert in_turns[name].value == pytest.approx(together[name].value, rel=1e-5)
    assert in_turns.cost.passes > together.cost.passes
    assert krylov._turns([10, 10, 10]) == [[0, 1, 2]]
    monkeypatch.setattr(krylov, "BASIS_BUDGET", krylov.FEWEST_VECTORS * 25)
    assert krylov._turns([10, 10, 10, 30, 5]) == [[0, 1], [2], [3], [4]]


def test_the_bases_of_one_turn_are_gone_in_the_next(monkeypatch) -> None:
    model, (x, y) = sorted_by_class(300)
    products = HessianProducts(Problem(model, "cross_entropy", (x, y)))
    size = products.flat.size
    monkeypatch.setattr(krylov, "BASIS_BUDGET", 11 * 8 * size)
    alive: weakref.WeakSet[Lanczos] = weakref.WeakSet()
    most = []

    class Watched(Lanczos):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            alive.add(self)
            most.append(len(alive))

    monkeypatch.setattr(krylov, "Lanczos", Watched)
    start = torch.randn(size, dtype=torch.float64)
    krylov.scaled_eigenpairs(products, [(lambda: torch.ones(size).double(), "largest")] * 3, start, 1e-3)
    blocks = {name: torch.randn_like(value).reshape(-1) for name, value in products.problem.parameters.items()}
    shapes = {name: value.shape for name, value in products.problem.parameters.items()}
    monkeypatch.setattr(krylov, "BASIS_BUDGET", 1)

    def within(vectors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: products.within([{name: vector}])[0][name] for name, vector in vectors.items()}

    krylov.block_eigenpairs(within, within, shapes, blocks, 1e-3, cheap=False)
    assert max(most) == 1


def samples_with_near_eigenvalues(seed: int) -> torch.Tensor:
    """Rows whose second moments have near largest eigenvalues, in another order in a fifth of the rows than in all."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.linalg.qr(torch.randn(60, 60, generator=generator, dtype=torch.float64))[0]
    sizes = torch.cat([torch.linspace(1, 0.6, 8), torch.full((52,), 0.03)]).double()
    rows = torch.randn(200, 60, generator=generator, dtype=torch.float64)
    return (rows * (1 + rows.square())) * sizes @ directions / 200**0.5


@pytest.mark.parametrize("tolerance", [1e-1, 1e-2, 1e-4])
def test_the_error_holds_where_the_part_misleads(tolerance: float) -> None:
    rows = {str(seed): samples_with_near_eigenvalues(seed) for seed in range(150)}
    part = {name: each[::5] * 5**0.5 for name, each in rows.items()}
    start = {name: torch.ones(60, dtype=torch.float64) for name in rows}
    found = krylov.block_eigenpairs(
        lambda vectors: {name: rows[name].mT @ (rows[name] @ vector) for name, vector in vectors.items()},
        lambda vectors: {name: part[name].mT @ (part[name] @ vector) for name, vector in vectors.items()},
        {name: torch.Size([60]) for name in rows},
        start,
        tolerance,
        cheap=False,
    )
    off = {name: abs(pair.value - float(torch.linalg.matrix_norm(rows[name], 2)) ** 2) for name, pair in found.items()}
    # That a value is the largest cannot be proved from a few products; one in 150 of these, made to mislead, is not.
    assert sum(off[name] > pair.error for name, pair in found.items()) <= 1
    assert sum(pair.products for pair in found.values()) < 7 * len(found)


@pytest.mark.parametrize(("samples", "worth"), [(100, False), (300, True), (400, True), (500, True), (1000, True)])
def test_a_part_is_taken_where_it_is_small_enough(samples: int, worth: bool, own_precision: None) -> None:
    model, data = sorted_by_class(samples)
    problem = Problem(model, "cross_entropy", data)
    assert HessianProducts(problem).has_part() == worth
    assert GaussNewtonBlocks(problem, examine(problem), ["0.weight"]).has_part() == worth


def test_a_small_network_is_one_chunk_and_has_no_part() -> None:
    """Sixty-four products follow with all of it anyway, and one graph takes less time than ten."""
    model, data = sorted_by_class(1000)
    problem = Problem(model, "cross_entropy", data)
    products = HessianProducts(problem)
    assert problem.small
    assert not products.has_part()
    assert len(products._kept) == 1


def disjoint_sets_of_features(seed: int, gap: float = 3e-3, samples: int = 2000) -> torch.Tensor:
    """Samples that have either the first twelve features or the others; the largest eigenvalues of both lie this close together."""
    generator = torch.Generator().manual_seed(seed)
    rows = 0.5 + torch.randn(samples, 24, generator=generator, dtype=torch.float64) * torch.rand(
        24, generator=generator
    )
    first = torch.rand(samples, generator=generator) < 0.5
    rows[first, 12:] = rows[~first, :12] = 0
    ratio = torch.linalg.matrix_norm(rows[first], 2) / torch.linalg.matrix_norm(rows[~first], 2)
    rows[first] *= (1 - gap) ** 0.5 / ratio
    return rows / samples**0.5


@pytest.mark.parametrize("tolerance", [1e-2, 1e-3, 1e-4])
def test_near_eigenvalues_whose_vectors_never_meet_are_told_apart(tolerance: float) -> None:
    rows = {str(seed): disjoint_sets_of_features(seed) for seed in range(40)}

    def over(step: slice, scale: float) -> krylov.Products:
        part = {name: each[step] * scale**0.5 for name, each in rows.items()}
        return lambda vectors: {name: part[name].mT @ (part[name] @ vector) for name, vector in vectors.items()}

    generator = torch.Generator().manual_seed(0)
    start = {name: torch.randn(24, generator=generator, dtype=torch.float64) for name in rows}
    found = krylov.block_eigenpairs(
        over(slice(None), 1.0),
        over(slice(5, None, 10), 10.0),
        {name: torch.Size([24]) for name in rows},
        start,
        tolerance,
        cheap=False,
        other_part=over(slice(0, None, 10), 10.0),
    )
    off = {name: abs(pair.value - float(torch.linalg.matrix_norm(rows[name], 2)) ** 2) for name, pair in found.items()}
    # No proof, but two of forty at most are outside their error, and none by more than what was asked for (before: twelve).
    assert sum(off[name] > pair.error for name, pair in found.items()) <= 2
    assert all(pair.converged and off[name] <= tolerance * pair.value for name, pair in found.items())


@pytest.mark.parametrize("seed", range(3))
def test_near_eigenvalues_of_a_network_are_told_apart(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and in its layer, from part of the data."""
    monkeypatch.setattr("spiritlevel.problem.batches.SMALL", 0)
    rows = disjoint_sets_of_features(seed) * 2000**0.5
    generator = torch.Generator().manual_seed(seed)
    model = nn.Linear(24, 1, bias=False).double()
    targets = torch.randn(2000, 1, generator=generator, dtype=torch.float64)
    truth = 2 * float(torch.linalg.matrix_norm(rows, 2)) ** 2 / 2000
    report = sl.measure(model, (rows, targets), "mse", measures=["hessian_spectral_norm", "kappa_max"])
    size = float(model.weight.detach().square().sum())
    for name, expected in {"hessian_spectral_norm": truth, "kappa_max": truth * size}.items():
        assert abs(report[name].value - expected) <= report[name].error <= 1e-3 * expected, name


def test_kept_layers_hold_neither_the_graph_of_the_network_nor_its_results() -> None:
    """They took more memory than what is kept of them on purpose."""
    model, data = sorted_by_class(1500)
    problem = Problem(model, "cross_entropy", data)
    anatomy = examine(problem)
    blocks = GaussNewtonBlocks(problem, anatomy, list(anatomy.layers))
    before = _floats()
    blocks({name: torch.randn_like(problem.parameters[name]) for name in blocks.names})
    kept = sum(pulled.bytes for chunk in blocks._kept for uses in chunk.layers.values() for pulled in uses)
    shares = sum(4 * chunk.shares.numel() for chunk in blocks._kept)
    weights = sum(4 * parameter.numel() for parameter in problem.parameters.values())
    assert kept > 100_000
    assert _floats() - before <= kept + shares + 4 * weights
    node = blocks._kept[0].layers[blocks.names[-1]][0].edge.node
    reached = [node]
    for each in reached:
        reached += [following for following, _ in each.next_functions if following is not None]
    assert sum(hasattr(each, "variable") for each in reached) == 1


def _floats() -> int:
    """Bytes of all tensors of real numbers that are alive, each storage once."""
    gc.collect()
    alive = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.is_floating_point()]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in alive}.values())
