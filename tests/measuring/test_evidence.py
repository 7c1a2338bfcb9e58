"""Evidence: every part of a statistic counts once, and what was found stays as it was."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cases
import dense_oracle
import spiritlevel as sl
from spiritlevel.curvature.anatomy import Anatomy
from spiritlevel.curvature.estimate import Estimates, Probed
from spiritlevel.curvature.statistics import COLUMNS, DIAGONAL, FISHER, ROWS, Sweep
from spiritlevel.measuring.evidence import Evidence
from spiritlevel.measuring.needs import Needs
from spiritlevel.measuring.registry import get_measure
from spiritlevel.measuring.statistics import Sources, combined, sources_of


class OnceTanh(torch.autograd.Function):
    """tanh with a gradient that cannot be differentiated."""

    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, slope):
        (y,) = ctx.saved_tensors
        return slope * (1 - y.square())


class Once(nn.Module):
    def __init__(self, plain):
        super().__init__()
        self.first, self.last, self.plain = nn.Linear(4, 6), nn.Linear(6, 3), plain

    def forward(self, x):
        z = self.first(x)
        return self.last(torch.tanh(z) if self.plain else OnceTanh.apply(z))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_without_double_backward_the_gauss_newton_part_counts_once():
    case = cases.Case("once", lambda: Once(False), cases.X4, {})
    model, x, y = case.make()
    oracle = Once(True).double()
    oracle.load_state_dict(model.state_dict())
    wanted = float(dense_oracle.dense(oracle, F.cross_entropy, x, y).trace())
    value = sl.measure(model, (x, y), measures=["hessian_trace"], tolerance=1e-9, most_probes=256)["hessian_trace"]
    assert value.method == "random probes of the Hessian"
    assert 0 < value.error < 0.05 * wanted
    assert abs(value.value - wanted) < 3 * value.error


def test_exact_arrays_are_the_sweeps_own_and_stay_as_they_are():
    model, x, y = cases.by_name("mlp").make()
    needs = Needs(statistics=frozenset([DIAGONAL, FISHER, ROWS, COLUMNS]))
    problem = sl.Problem(model, "cross_entropy", (x, y))
    evidence = Evidence(problem, needs, tolerance=1e-3, seed=0, most_probes=8)
    swept = {
        kind: {name: draws[0] for name, draws in evidence.swept.found[kind].items()} for kind in (DIAGONAL, FISHER)
    }
    before = {kind: {name: array.clone() for name, array in arrays.items()} for kind, arrays in swept.items()}
    for kind, arrays in swept.items():
        assert all(
            getattr(evidence.statistics, kind)[name] is array for name, array in arrays.items()
        )  # no copy of the model
    for measure in ("normalized_sharpness", "fisher_rao_norm", "rho_sum"):
        get_measure(measure).compute(get_measure(measure), evidence)
    for kind, arrays in swept.items():
        assert all(torch.equal(array, before[kind][name]) for name, array in arrays.items())


def test_sources_are_decided_from_the_anatomy_and_the_products():
    anatomy = Anatomy({}, {"swept": [], "bent": []}, {"bent": "tanh", "unread": "unknown"})
    names = ["swept", "bent", "unread"]
    assert sources_of(names, anatomy, lambda: True) == Sources(frozenset(["swept", "bent"]), ("bent",), ("unread",))
    assert sources_of(names, anatomy, lambda: False) == Sources(frozenset(["swept"]), (), ("bent", "unread"))


def test_what_is_probed_whole_leaves_the_sweep_out():
    swept = Sweep({DIAGONAL: {"bent": (torch.ones(2),), "exact": (torch.ones(2),)}}, 0.0, 1, False, 1.0)
    probed = Estimates({DIAGONAL: {"bent": Probed(torch.full((8, 2), 3.0))}})
    kinds = frozenset([DIAGONAL])
    whole = combined(kinds, Sources(frozenset(["exact"]), (), ("bent",)), swept, probed, range(8))[DIAGONAL]
    added = combined(kinds, Sources(frozenset(["exact", "bent"]), ("bent",)), swept, probed, range(8))[DIAGONAL]
    assert (whole["bent"].tolist(), added["bent"].tolist(), added["exact"].tolist()) == ([3, 3], [4, 4], [1, 1])
    assert swept.found[DIAGONAL]["bent"][0].tolist() == [1, 1]


def test_a_sweep_is_for_reading_only():
    model, x, y = cases.by_name("mlp").make()
    problem = sl.Problem(model, "cross_entropy", (x, y))
    needs = Needs(statistics=frozenset([DIAGONAL]))
    evidence = Evidence(problem, needs, tolerance=1e-3, seed=0, most_probes=8)
    with pytest.raises(TypeError):
        evidence.swept.found[DIAGONAL]["another"] = ()
    with pytest.raises(TypeError):
        evidence.swept.found["another"] = {}


def test_purposes_with_the_same_letters_have_streams_of_their_own():
    model, x, y = cases.by_name("mlp").make()
    evidence = Evidence(sl.Problem(model, "cross_entropy", (x, y)), Needs(), tolerance=1e-3, seed=0, most_probes=8)
    first, second, again = (torch.rand(4, generator=evidence.generator(each)) for each in ("start", "tarts", "start"))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
