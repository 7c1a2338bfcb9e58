"""One call: which measures are chosen, what it costs, and that the same call gives the same numbers."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cases
import spiritlevel as sl
from refusals import refused


def make(name="mlp"):
    case = cases.by_name(name)
    model, x, y = case.make()
    return model, (x, y)


def test_the_default_set_is_all_that_needs_no_search():
    default = [each.name for each in sl.list_measures() if not each.costly]
    assert list(sl.measure(*make(), tolerance=0.1)) == default
    assert list(sl.measure(*make(), measures="rho_sum")) == ["rho_sum"]


@pytest.mark.parametrize("name", ["mlp", "GELU"])
def test_the_same_call_gives_the_same_bits(name):
    model, data = make(name)
    first = sl.measure(model, data, measures="all", tolerance=0.1, most_probes=16)
    torch.manual_seed(123)
    second = sl.measure(model, data, measures="all", tolerance=0.1, most_probes=16)
    # Some processors' kernels sum in another order where memory lies otherwise: the last digit may differ, nothing else.
    values = [{each: report[each].value for each in report} for report in (first, second)]
    assert values[0] == pytest.approx(values[1], rel=4e-15, abs=0, nan_ok=True)


@pytest.mark.parametrize(
    "name", ["rho_sum", "hessian_spectral_norm", "kappa_sum", "fisher_rao_norm", "keskar_sharpness"]
)
def test_a_number_does_not_depend_on_what_else_was_asked(name):
    model, data = make()
    alone = sl.measure(model, data, measures=[name], tolerance=0.1)[name].value
    among = sl.measure(model, data, measures="all", tolerance=0.1)[name].value
    assert alone == pytest.approx(among, rel=1e-12)


def test_another_seed_moves_only_what_is_estimated():
    model, data = make("GELU")
    first, second = (sl.measure(model, data, measures=["kappa_trace_sum"], seed=seed, most_probes=8) for seed in (0, 1))
    name = "kappa_trace_sum"
    assert first[name].value != second[name].value
    assert first[name].layers["4.weight"] == second[name].layers["4.weight"]


def test_unknown_measures_and_options():
    model, data = make()
    with refused(
        "unknown measure 'kapa_sum'; did you mean 'kappa_sum'? `list_measures()` and `spiritlevel measures` name them all"
    ):
        sl.measure(model, data, measures=["kapa_sum"])
    with refused("unknown measure 'qqq'. `list_measures()` and `spiritlevel measures` name them all"):
        sl.get_measure("qqq")
    with refused("no measures were asked for: pass names, or leave `measures` out for the default set"):
        sl.measure(model, data, measures=[])
    with refused("epsilon_sharpness has no option 'eps'; its options are: epsilon=0.001"):
        sl.get_measure("epsilon_sharpness", eps=1)
    with refused("hessian_trace has no option 'eps'; its options are: none"):
        sl.get_measure("hessian_trace", eps=1)
    for bad in (-1.0, 0, float("nan"), float("inf"), True, "1"):
        with refused(f"epsilon_sharpness: epsilon must be a positive number, got {bad!r}"):
            sl.get_measure("epsilon_sharpness", epsilon=bad)
    for bad in (0, 2.5, float("inf"), True):
        with refused(f"keskar_subspace_sharpness: dimension must be a whole number of at least 1, got {bad!r}"):
            sl.get_measure("keskar_subspace_sharpness", dimension=bad)
    with refused('riemannian_spectral_norm: method must be "lanczos" or "power", got \'qr\''):
        sl.measure(model, data, measures=[sl.get_measure("riemannian_spectral_norm", method="qr")])


@pytest.mark.parametrize("tolerance", [-1e-3, 0, 1, 2.5, float("nan"), float("inf"), "1e-3"])
def test_tolerances_that_mean_nothing(tolerance):
    model, data = make()
    with refused(f"tolerance must be a number between 0 and 1, got {tolerance!r}"):
        sl.measure(model, data, tolerance=tolerance)


@pytest.mark.parametrize("most_probes", [0, -5, 7, float("nan"), 8.0, True, None])
def test_numbers_of_probes_that_mean_nothing(most_probes):
    with refused(f"most_probes must be a whole number of at least 8, got {most_probes!r}"):
        sl.measure(*make(), most_probes=most_probes)


@pytest.mark.parametrize("seed", [0.5, "1", None, True, float("nan")])
def test_seeds_that_mean_nothing(seed):
    with refused(f"seed must be a whole number, got {seed!r}"):
        sl.measure(*make(), seed=seed)


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor])
def test_whole_numbers_of_other_libraries_are_numbers(kind):
    names = ["hessian_spectral_norm", "hessian_trace"]
    wanted = sl.measure(*make("GELU"), measures=names, seed=3, most_probes=16, samples=20)
    found = sl.measure(*make("GELU"), measures=names, seed=kind(3), most_probes=kind(16), samples=kind(20))
    assert [found[name].value for name in names] == [wanted[name].value for name in names]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, "float32"])
def test_precisions_that_cannot_carry_second_derivatives(dtype):
    half = dtype in (torch.float16, torch.bfloat16)
    with refused(
        f"dtype must be torch.float32 or torch.float64, got {dtype!r}"
        + (": half precision cannot carry second derivatives" if half else "")
    ):
        sl.measure(*make(), dtype=dtype)


@pytest.mark.parametrize("tolerance", [1e-300, 1e-12, 1e-9])
def test_what_rounding_does_not_allow_has_not_converged(tolerance):
    model, (x, y) = make()
    report = sl.measure(model.float(), (x.float(), y), tolerance=tolerance, measures="all", dtype=torch.float32)
    for value in report.values.values():
        assert value.exact or not value.converged or value.error <= 1.001 * tolerance * abs(value.value), value
    assert not report["hessian_spectral_norm"].converged


@pytest.mark.parametrize("name", ["epsilon_sharpness", "keskar_sharpness", "riemannian_sharpness"])
def test_a_region_in_which_the_loss_overflows(name):
    with pytest.raises(sl.SpiritLevelError, match="ask for a smaller epsilon"):
        sl.measure(*make(), measures=[sl.get_measure(name, epsilon=1e300)])


def test_the_power_method_agrees_with_lanczos_and_shows_its_history():
    model, data = make()
    power = sl.get_measure("riemannian_spectral_norm", method="power")
    by_power = sl.measure(model, data, measures=[power], tolerance=1e-7)["riemannian_spectral_norm"]
    by_lanczos = sl.measure(model, data, measures=["riemannian_spectral_norm"], tolerance=1e-10)[
        "riemannian_spectral_norm"
    ]
    assert by_power.value == pytest.approx(by_lanczos.value, rel=1e-8)
    assert len(by_power.details["history"]) == by_power.products > by_lanczos.products


def test_blocks_of_norm_zero_drop_out_and_are_named():
    value = sl.measure(*make("zero biases"), measures=["riemannian_spectral_norm"])["riemannian_spectral_norm"]
    assert value.notes == ("blocks of norm zero drop out: 0.bias, 2.bias, 4.bias",)


def test_a_measure_twice_with_other_options():
    model, data = make()
    wide = sl.get_measure("epsilon_sharpness", epsilon=1e-2)
    report = sl.measure(model, data, measures=["epsilon_sharpness", wide], tolerance=0.1)
    assert list(report) == ["epsilon_sharpness", "epsilon_sharpness(epsilon=0.01)"]


def test_second_order_values_stand_beside_the_maxima():
    model, data = make()
    names = ["epsilon_sharpness", "riemannian_sharpness", "hessian_spectral_norm", "riemannian_spectral_norm"]
    report = sl.measure(model, data, measures=names, tolerance=1e-8)
    for sharpness, norm in (("epsilon_sharpness", names[2]), ("riemannian_sharpness", names[3])):
        wanted = report[norm].value * 1e-6 / (2 * (1 + report.loss))
        assert report[sharpness].details["second_order"] == pytest.approx(wanted, rel=1e-6)


def test_progress_is_told():
    told = []
    model, data = make()
    sl.measure(model, data, measures=["hessian_trace"], progress=lambda stage, passes: told.append((stage, passes)))
    assert told[-1][0] == "hessian_trace"
    assert told[-1][1] >= 1


# --- what it costs: upper bounds, in passes over the data ---------------------------------------------------------------


def test_statistics_take_a_survey_and_one_sweep_and_no_product():
    model, data = make()
    names = ["hessian_trace", "kappa_trace_sum", "rho_sum", "rho_row_sum", "normalized_sharpness", "fisher_rao_norm"]
    cost = sl.measure(model, data, measures=names).cost
    assert (cost.passes, cost.products, cost.gradients) == (2, 0, 0)


@pytest.mark.parametrize(
    ("names", "passes", "products"),
    [
        (["hessian_spectral_norm"], 15, 14),
        (["riemannian_spectral_norm"], 15, 14),
        (["kappa_sum"], 16, 14),
        (["hessian_spectral_norm", "riemannian_spectral_norm", "riemannian_nodewise_spectral_norm"], 15, 42),
        (None, 30, 56),
    ],
    ids=["one", "riemannian", "layers", "three", "default"],
)
@pytest.mark.usefixtures("own_precision")
def test_eigenvalues_take_few_products_and_share_their_passes(names, passes, products):
    model, data = make()
    cost = sl.measure(model, data, measures=names, tolerance=1e-3).cost
    assert cost.passes <= passes
    assert cost.products <= products


def test_the_search_for_a_maximum_is_bounded():
    model, data = make()
    for name in ("epsilon_sharpness", "riemannian_sharpness", "keskar_sharpness"):
        assert sl.measure(model, data, measures=[name], tolerance=1e-3).cost.gradients <= 120


def test_estimates_have_a_tolerance_of_their_own():
    model, data = smooth(), (torch.randn(20, 6), torch.arange(20) % 3)
    report = sl.measure(model, data, measures=["hessian_trace", "hessian_spectral_norm"])
    trace, norm = report["hessian_trace"], report["hessian_spectral_norm"]
    assert trace.error_kind == "standard error"
    assert trace.converged
    assert 1e-3 * abs(trace.value) < trace.error <= 5e-2 * abs(trace.value)
    assert norm.error <= 1e-3 * norm.value
    assert not sl.measure(model, data, measures=["hessian_trace"], tolerance=1e-3)["hessian_trace"].converged


def smooth():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))


def test_a_budget_buys_accuracy(monkeypatch):
    """By a clock that is a second later whenever it is looked at: a step takes one second, and the next about three."""
    seconds = itertools.count()
    monkeypatch.setattr("spiritlevel.measuring.budget.time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    model, data = smooth(), (torch.randn(20, 6), torch.arange(20) % 3)
    little, some, more = (sl.measure(model, data, measures=["hessian_trace"], budget=each) for each in (1e-6, 8, 12))
    assert more["hessian_trace"].error < little["hessian_trace"].error
    assert [report.notes[-1].removeprefix("accuracy bought with ") for report in (little, some, more)] == [
        "5 of 1e-06 seconds: a tolerance of 0.1",
        "9 of 8 seconds: a tolerance of 0.03",
        "11 of 12 seconds: a tolerance of 0.01",  # where all is exact, so that no more is looked for
    ]
    assert more.cost.seconds == 11.0
    with refused("budget and tolerance exclude each other: a budget buys as much accuracy as it can"):
        sl.measure(model, data, budget=1.0, tolerance=1e-2)
    with refused("budget must be a positive number of seconds, got 0"):
        sl.measure(model, data, budget=0)


def test_a_tiny_model_is_formed_whole():
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    found = sl.measure(model, (torch.randn(8, 2), torch.arange(8) % 2), measures=["hessian_trace", "kappa_trace_sum"])
    assert all(value.exact for value in found.values.values())


def test_the_slope_that_is_left_and_what_is_no_minimum():
    torch.manual_seed(0)
    x, y = torch.randn(30, 2).double(), torch.randn(30, 1).double()
    model = nn.Linear(2, 1, bias=False).double()
    names = ["riemannian_spectral_norm", "hessian_trace"]
    report = sl.measure(model, (x, y), "mse", measures=names)
    _, gradient = sl.Problem(model, "mse", (x, y)).gradient()
    wanted = float(gradient["weight"].norm())
    assert report.problem["gradient_norm"] == pytest.approx(wanted, rel=1e-12)
    assert report.problem["gradient_metric_norm"] == pytest.approx(
        wanted * float(model.weight.detach().norm()), rel=1e-12
    )
    assert report.notes[0].startswith("not a minimum: the gradient is large")
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
    at_minimum = sl.measure(model, (x, y), "mse", measures=names)
    assert at_minimum.problem["gradient_norm"] < 1e-12
    assert not at_minimum.notes
    downhill = sl.measure(model, (x, y), lambda outputs, targets: -F.mse_loss(outputs, targets), measures=names)
    assert any(note.startswith("not a minimum: the trace of the Hessian is negative") for note in downhill.notes)
