"""Reports: what they hold, how they print, and that they come back from a file as they were."""

import json
import math
from dataclasses import replace

import pytest
import torch

import cases
import spiritlevel as sl
from refusals import refused
from spiritlevel.saved import write_whole


@pytest.fixture(scope="module")
def report():
    model, x, y = cases.by_name("GELU").make()
    names = ["hessian_trace", "kappa_sum", "rho_sum", "normalized_sharpness", "volume_flatness"]
    power = sl.get_measure("riemannian_spectral_norm", method="power", most_products=5)
    return sl.measure(model, (x, y), measures=[*names, power, "epsilon_sharpness"], tolerance=0.1, most_probes=8)


@pytest.fixture(scope="module")
def infinite():
    model, x, y = cases.by_name("mlp").make()
    return sl.measure(model, (x, y), measures=["volume_flatness", "rho_sum", "epsilon_sharpness"], tolerance=0.1)


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first.double(), torch.as_tensor(second).double())
    if isinstance(first, float) and math.isnan(first):
        return math.isnan(second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


def assert_same_report(first, second):
    assert list(first) == list(second)
    for name in first:
        for field, entry in vars(first[name]).items():
            assert same(entry, getattr(second[name], field)), (name, field)
    assert same(first.loss, second.loss)
    assert first.cost == second.cost
    assert same(dict(first.problem), dict(second.problem))
    assert dict(first.environment) == dict(second.environment)
    assert first.notes == second.notes


def test_a_report_is_a_mapping_of_names(report):
    assert next(iter(report)) == "hessian_trace"
    assert len(report) == 7
    assert "kappa_sum" in report
    assert "kappa_max" not in report
    assert report["rho_sum"].name == "rho_sum"
    with pytest.raises(KeyError, match="this report has no 'kappa_max'; it has hessian_trace, kappa_sum, rho_sum"):
        report["kappa_max"]


def test_reports_and_values_are_frozen(report):
    with pytest.raises(AttributeError):
        report.loss = 0.0
    with pytest.raises(AttributeError):
        report["kappa_sum"].value = 0.0


def test_a_saved_report_loads_back_as_it_was(report, infinite, tmp_path):
    for number, each in enumerate((report, infinite)):
        path = tmp_path / f"{number}.json"
        each.save(path, witnesses=True)
        assert_same_report(each, sl.Report.load(path))
        assert_same_report(each, sl.Report.from_dict(each.to_dict()))


def test_what_is_not_finite_survives_json(infinite, tmp_path):
    assert infinite["volume_flatness"].value == float("inf")
    path = tmp_path / "report.json"
    infinite.save(path)
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert sl.Report.load(path)["volume_flatness"].value == float("inf")


def test_a_measure_that_is_not_available_says_why():
    """A network without a rescaling symmetry: one linear layer."""
    x, y = cases.X4(torch.Generator().manual_seed(0)), torch.arange(12) % 3
    value = sl.measure(torch.nn.Linear(4, 3).double(), (x, y), measures=["volume_flatness"])["volume_flatness"]
    assert not value.available
    assert math.isnan(value.value)
    assert str(value) == "not available"
    assert value.notes == ("the network has no rescaling symmetry, so the volume may be finite",)


def test_no_layers_means_not_available():
    model = cases.Function(lambda m, x: x * m.scale, scale=(3,)).double()
    x, y = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
    report = sl.measure(model, (x, y))
    assert report["hessian_trace"].value > 0
    for name in ("kappa_max", "kappa_sum", "kappa_trace_sum", "rho_sum", "normalized_sharpness"):
        assert not report[name].available
        assert report[name].notes == (
            "no trainable parameter serves as the matrix of a linear map, so there are no layers to measure",
        )


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"format": "something"}')
    with refused("not a saved report: its format is 'something', needed is 'spiritlevel-report-1'", ValueError):
        sl.Report.load(path)


def test_a_value_prints_with_its_error(report):
    value = report["hessian_trace"]
    assert float(value) == value.value
    assert str(value) == f"{value.value:.6g} ± {value.error:.1g}"
    exact = sl.Value("rho_sum", 1.25, 0.0, exact=True, converged=True, method="exact sweep")
    assert str(exact) == "1.25"


def test_a_report_prints_every_name_and_value(report, infinite):
    text = str(report)
    assert all(name in text for name in report)
    assert "∞" in str(infinite) or "inf" in str(infinite)


def test_a_page_is_written(infinite, tmp_path):
    infinite.to_html(tmp_path / "deep" / "report.html")
    assert "rho_sum" in (tmp_path / "deep" / "report.html").read_text(encoding="utf-8")
    assert "rho_sum" in infinite._repr_html_()


def test_a_file_is_whole_or_untouched(tmp_path):
    path = tmp_path / "kept.txt"
    path.write_text("before")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "lone surrogate \ud800")
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept.txt"]


def test_the_witness_is_the_maximiser(infinite):
    model, x, y = cases.by_name("mlp").make()
    value = infinite["epsilon_sharpness"]
    problem = sl.Problem(model, "cross_entropy", (x, y))
    moved = {name: tensor + value.witness[name] for name, tensor in problem.parameters.items()}
    rise = (problem.loss(moved) - problem.loss()) / (1 + problem.loss())
    assert value.value == pytest.approx(rise, rel=1e-9)
    size = sum(float(part.square().sum()) for part in value.witness.values()) ** 0.5
    assert size <= 1e-3 * (1 + 1e-9)


def test_witnesses_can_be_left_out_of_a_file(infinite, tmp_path):
    bare = infinite.without_witnesses()
    assert bare["epsilon_sharpness"].witness is None
    assert bare["epsilon_sharpness"].value == infinite["epsilon_sharpness"].value
    for name, each in (("whole", infinite), ("bare", bare)):
        each.save(tmp_path / name, witnesses=True)
    infinite.save(tmp_path / "by default")
    assert (tmp_path / "by default").read_text() == (tmp_path / "bare").read_text()
    assert (tmp_path / "bare").stat().st_size < (tmp_path / "whole").stat().st_size


def test_numbers_that_are_not_finite_survive_json_in_every_saver() -> None:
    torch.manual_seed(0)
    model, data = torch.nn.Linear(3, 2), (torch.randn(12, 3), torch.arange(12) % 2)
    certificate = replace(sl.pac_bayes(model, data, draws=2), bound=math.inf, noisy_test_error=math.nan)
    text = json.dumps(certificate.to_dict(), allow_nan=False)
    again = type(certificate).from_dict(json.loads(text))
    assert again.bound == math.inf
    assert math.isnan(again.noisy_test_error)
    spectrum = sl.spectrum(model, data, steps=4, ends=1)
    broken = replace(spectrum, loss=math.inf, top=(replace(spectrum.top[0], residual=math.inf),))
    reread = type(spectrum).from_dict(json.loads(json.dumps(broken.to_dict(), allow_nan=False)))
    assert (reread.loss, reread.top[0].residual) == (math.inf, math.inf)
    assert torch.equal(reread.probes[0].nodes, spectrum.probes[0].nodes)
    moved = sl.feature_robustness(model, data, "weight", 0.1, num_matrices=1, ascend=False)
    assert json.loads(json.dumps(replace(moved, values=(math.inf,)).to_dict(), allow_nan=False))["values"] == [None]
