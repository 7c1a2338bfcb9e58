"""Eigenpairs that start from part of the data: the right ones, with few products, also when the part misleads."""

import weakref
from typing import Any

import pytest
import torch
from torch import nn

import spiritlevel as sl
from dense_oracle import dense
from spiritlevel.curvature import krylov
from spiritlevel.curvature.hessian import HessianProducts, spread_tenth
from spiritlevel.curvature.lanczos import Lanczos
from spiritlevel.problem import Problem

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

    assert [chunk.index for chunk in spread_tenth([Chunk(i) for i in range(100)], 1.0)] == list(range(5, 100, 10))
    assert len(spread_tenth([Chunk(i) for i in range(3)], 1.0)) == 3
    assert spread_tenth([], 1.0) == []


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

    krylov.block_eigenpairs(within, within, shapes, blocks, 1e-3)
    assert max(most) == 1
