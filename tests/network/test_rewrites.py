"""Second derivatives that torch lacks or gets wrong, and wrappers that must not stand in the way."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import spiritlevel as sl
from spiritlevel.curvature.hessian import HessianProducts
from spiritlevel.network.rewrites import PlainDerivatives

torch.manual_seed(0)
X, Y = torch.randn(9, 6, dtype=torch.float64), torch.randint(0, 3, (9,))


class OldWeightNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.first = nn.utils.weight_norm(nn.Linear(6, 5), dim=dim)
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))

    def forward(self, x):
        return self.last(self.first(x).tanh())


class HardSigmoid(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(F.hardsigmoid(self.first(x)))


def central_difference(problem, direction, step=1e-6):
    sides = []
    for sign in (1, -1):
        moved = {name: value + sign * step * direction[name] for name, value in problem.parameters.items()}
        sides.append(problem.gradient(moved)[1])
    return {name: (sides[0][name] - sides[1][name]) / (2 * step) for name in direction}


@pytest.mark.parametrize(
    ("model", "rewritten"),
    [
        (lambda: OldWeightNorm(0), "weight_norm"),
        (lambda: OldWeightNorm(None), "weight_norm"),
        (HardSigmoid, "hardsigmoid"),
    ],
    ids=["weight norm by row", "weight norm of the whole", "hard sigmoid"],
)
def test_products_are_right_where_torch_is_not(model, rewritten):
    torch.manual_seed(1)
    problem = sl.Problem(model().double(), "cross_entropy", (X, Y))
    products = HessianProducts(problem)
    assert products.method == "kept graph"
    direction = {name: torch.randn_like(value) for name, value in problem.parameters.items()}
    found = products.flat.to_dict(products([products.flat.join(list(direction.values()))])[0])
    for name, expected in central_difference(problem, direction).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-7)
    assert problem.notes == [f"rewritten with plain operations, whose second derivative is right: {rewritten}"]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2])
def test_embedding_bags_compute_what_they_did(mode, padding):
    weight = torch.randn(7, 4, dtype=torch.float64)
    bags = torch.tensor([[0, 1, 2], [2, 2, 2], [3, 3, 6]])
    flat, offsets = torch.tensor([0, 1, 2, 4, 5]), torch.tensor([0, 2])
    for given, starts in ((bags, None), (flat, offsets)):
        expected = F.embedding_bag(given, weight, starts, mode=mode, padding_idx=padding)
        with PlainDerivatives() as plain:
            found = F.embedding_bag(given, weight, starts, mode=mode, padding_idx=padding)
        torch.testing.assert_close(found, expected)
        assert plain.used == {"embedding_bag"}


def test_an_embedding_bag_is_an_exact_layer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(8, 5, mode="sum"), nn.ReLU(), nn.Linear(5, 3)).double()
    data = torch.randint(0, 8, (10, 4)), torch.randint(0, 3, (10,))
    report = sl.measure(model, data, measures=["kappa_trace_sum", "rho_sum"])
    assert set(report["rho_sum"].layers) == {"0.weight", "2.weight"}
    assert report["kappa_trace_sum"].exact


def test_a_network_without_rewritten_operations_runs_without_looking_for_them():
    problem = sl.Problem(nn.Linear(6, 3).double(), "cross_entropy", (X, Y))
    assert problem.notes == []
    assert not isinstance(problem._plain, PlainDerivatives)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_weights_are_layers(kind, only_probes):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.last = kind(3, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x):
            return self.last(self.cell(x)[0][:, -1])

    torch.manual_seed(0)
    data = torch.randn(8, 5, 3, dtype=torch.float64), torch.randint(0, 3, (8,))
    report = sl.measure(Recurrent().double(), data, measures=["kappa_trace_sum"], tolerance=0.2)
    assert set(report["kappa_trace_sum"].layers) == {"cell.weight_ih_l0", "cell.weight_hh_l0", "last.weight"}
    assert not report["kappa_trace_sum"].exact
    assert report["kappa_trace_sum"].error > 0


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it loads its compiler
@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (torch.compile, "torch.compile"),
        (nn.DataParallel, "DataParallel"),
        (
            lambda model: torch.export.export(model, (X,), dynamic_shapes=({0: torch.export.Dim.AUTO},)),
            "the exported program",
        ),
    ],
    ids=["compiled", "data parallel", "exported"],
)
def test_wrappers_are_taken_off_and_it_is_said(wrap, said):
    expected = sl.measure(plain(), (X, Y), measures=["hessian_trace"])
    found = sl.measure(wrap(plain()), (X, Y), measures=["hessian_trace"])
    assert found["hessian_trace"].value == pytest.approx(expected["hessian_trace"].value, rel=1e-12)
    assert f"measured the module beneath {said}" in found.notes


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_activations_are_kept_instead(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last, self.recompute = nn.Linear(6, 5), nn.Linear(5, 3), True

        def block(self, z):
            return self.first(z).tanh()

        def forward(self, x):
            return self.last(checkpoint(self.block, x, use_reentrant=reentrant) if self.recompute else self.block(x))

    torch.manual_seed(0)
    model = Checkpointed().double()
    names = ["hessian_spectral_norm", "kappa_sum", "hessian_trace"]
    found = sl.measure(model, (X, Y), measures=names)
    model.recompute = False
    expected = sl.measure(model, (X, Y), measures=names)
    for name in names:
        assert found[name].value == pytest.approx(expected[name].value, rel=1e-12)


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
@pytest.mark.parametrize("old", [{"size_average": False}, {"reduce": False}, {"size_average": True}])
@pytest.mark.parametrize("name", ["multi_margin_loss", "multilabel_margin_loss"])
def test_margin_losses_know_the_two_arguments_of_old(name, old):
    """What a rewritten loss ignored was the sum: its value was the mean, and so was its curvature."""
    loss, targets = getattr(F, name), Y if name == "multi_margin_loss" else torch.randint(0, 6, (9, 6))
    wanted = loss(X, targets, **old)
    with PlainDerivatives():
        torch.testing.assert_close(loss(X, targets, **old), wanted)
