"""What the error of a value is: data, set where the value is made, and never read off a sentence."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import cases
import spiritlevel as sl
from spiritlevel.measuring.value import Value

SEARCHED = (
    "epsilon_sharpness",
    "keskar_sharpness",
    "keskar_subspace_sharpness",
    "riemannian_sharpness",
    "adaptive_sharpness",
    "geodesic_sharpness",
)
BOUNDED = (
    "hessian_spectral_norm",
    "kappa_max",
    "kappa_sum",
    "riemannian_spectral_norm",
    "riemannian_nodewise_spectral_norm",
    "whitened_flatness_max",
)
DRAWN = ("adaptive_sharpness_average",)


def network(activation: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), activation, nn.Linear(5, 3)).double()


@pytest.fixture(scope="module")
def data():
    return cases.X4(torch.Generator().manual_seed(0)), torch.arange(12) % 3


@pytest.fixture(scope="module")
def report(data):
    return sl.measure(network(nn.ReLU()), data, measures="all", tolerance=0.1)


def test_every_measure_says_what_its_error_is(report):
    for name, value in report.values.items():
        expected = "lower bound" if name in SEARCHED else "bound" if name in BOUNDED else "exact"
        expected = "standard error" if name in DRAWN else expected
        assert value.error_kind == expected, name
        assert (value.exact, value.certified, value.lower_bound) == tuple(
            expected == kind for kind in ("exact", "bound", "lower bound")
        )


def test_probes_leave_a_standard_error():
    x, y = torch.randn(20, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.arange(20) % 3
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 40), nn.GELU(), nn.Linear(40, 3)).double()
    value = sl.measure(model, (x, y), measures=["hessian_trace"], most_probes=8)["hessian_trace"]
    assert (value.error_kind, value.exact) == ("standard error", False)


def test_an_estimate_has_the_error_of_its_exact_part_too():
    """The largest layer is exact, the first is estimated and far below: rounding remains, and the little that a tail may hold."""
    x, y = torch.randn(20, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.arange(20) % 3
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 40), nn.GELU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 3)).double()
        model[0].weight.data /= 10
        model[4].weight.data *= 10
    value = sl.measure(model, (x, y), measures=["kappa_trace_max"], most_probes=8)["kappa_trace_max"]
    assert value.error_kind == "standard error"
    assert max(value.layers, key=lambda name: value.layers[name]) != "0.weight"
    largest = max(value.layer_errors[name] for name in value.layers if name != "0.weight")
    assert largest <= value.error < 1e-5 * value.value
    assert all(value.layer_errors[name] > 0 for name in value.layers)


def test_words_decide_nothing(report):
    """Sentences are for people: with others, the same value is judged alike."""
    for value in report.values.values():
        said = replace(
            value, method="Lanczos, certified; random probes, sampled; a lower bound", notes=("interrupted",)
        )
        assert (said.certified, said.lower_bound, said.error_kind) == (
            value.certified,
            value.lower_bound,
            value.error_kind,
        )
    assert not replace(report, notes=("interrupted: says a note",)).interrupted


def test_a_subset_s_lower_bound_stays_one(data):
    names = ["riemannian_sharpness", "rho_sum", "kappa_sum"]
    report = sl.measure(network(nn.ReLU()), data, measures=names, samples=8, tolerance=0.1)
    assert [report[name].error_kind for name in names] == ["lower bound", "sampling", "sampling"]


def test_an_infinite_volume_is_exact_on_a_subset_too(data):
    value = sl.measure(network(nn.ReLU()), data, measures=["volume_flatness"], samples=8)["volume_flatness"]
    assert (value.value, value.error, value.error_kind) == (float("inf"), 0.0, "exact")


def test_without_a_kind_it_is_what_exact_says():
    assert Value("m", 1.0, 0.0, True, True, "by hand").error_kind == "exact"
    assert Value("m", 1.0, 0.1, False, True, "by hand").error_kind == "standard error"


@pytest.mark.parametrize("change", [{"exact": False}, {"error_kind": "bound"}, {"error_kind": "guess"}])
def test_contradictions_are_refused(change):
    value = Value("m", 1.0, 0.0, True, True, "by hand")
    with pytest.raises(
        ValueError, match=r"error_kind must be one of 'exact', 'bound', .* and 'exact' where exact=True"
    ):
        replace(value, **change)


def earlier(report):
    """The report as versions wrote it that knew no kinds, and searched for every eigenvalue."""
    plain = json.loads(json.dumps(report.to_dict()))
    plain.pop("interrupted")
    for value in plain["values"].values():
        value.pop("error_kind")
        value["method"] = value["method"].replace("whole block of every layer", "Lanczos on every layer's block")
    return plain


def test_kinds_survive_the_disk_and_are_derived_for_earlier_files(report, data, tmp_path):
    linear = sl.measure(nn.Linear(4, 3).double(), data, measures=["volume_flatness", "rho_sum"])
    assert linear["volume_flatness"].error_kind == "none"
    part = sl.measure(network(nn.ReLU()), data, measures=["kappa_sum", "epsilon_sharpness"], samples=8, tolerance=0.1)
    for each in (report, linear, part):
        each.save(tmp_path / "report.json")
        kinds = {name: value.error_kind for name, value in each.values.items()}
        for again in (sl.Report.load(tmp_path / "report.json"), sl.Report.from_dict(earlier(each))):
            assert {name: value.error_kind for name, value in again.values.items()} == kinds


def test_that_it_was_interrupted_survives_the_disk_and_is_derived_for_earlier_files(report):
    note = "interrupted: rho_sum was not finished"
    stopped = replace(report, notes=(note, *report.notes), interrupted=True)
    assert sl.Report.from_dict(stopped.to_dict()).interrupted
    assert sl.Report.from_dict(earlier(stopped)).interrupted
    assert not sl.Report.from_dict(earlier(report)).interrupted
