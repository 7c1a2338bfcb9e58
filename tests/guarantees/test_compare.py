"""Comparing networks: rankings, how sure they are, agreement of measures, and what is said about it."""

import json
from dataclasses import replace

import pytest
import torch
from scipy.stats import kendalltau
from torch import Tensor, nn

import spiritlevel as sl
from refusals import refused
from spiritlevel.guarantees.compare import Comparison, compare, probability_below
from spiritlevel.result import Value

MEASURES = ["kappa_trace_sum", "kappa_sum", "rho_sum", "normalized_sharpness", "hessian_trace", "hessian_spectral_norm"]


def value(
    number: float, error: float = 0.0, method: str = "random probes of the Hessian", exact: bool = False
) -> Value:
    return Value("m", number, error, exact, True, method)


def networks(count: int) -> dict[str, nn.Module]:
    made: dict[str, nn.Module] = {}
    for seed in range(count):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            made[f"net {seed}"] = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3))
            for parameter in made[f"net {seed}"].parameters():
                parameter.data *= 1 + seed / 3
    return made


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(50, 3, generator=generator), torch.randint(3, (50,), generator=generator)


@pytest.fixture(scope="module")
def three(data) -> Comparison:
    return compare(networks(3), data, measures=MEASURES)


# --- how sure --------------------------------------------------------------------------------------------------------


def test_standard_errors_are_normal_and_bounds_uniform() -> None:
    def normal(z: float) -> float:
        return float(torch.special.ndtr(torch.tensor(z, dtype=torch.float64)))

    assert probability_below(value(1.0, 0.3), value(2.0, 0.4)) == pytest.approx(normal(2.0))
    assert probability_below(value(2.0, 0.3), value(1.0, 0.4)) == pytest.approx(1 - normal(2.0))
    bound = [value(number, 1.0, "Lanczos, products by kept graph") for number in (0.0, 1.0)]
    # u2 − u1 + 1 > 0 with u uniform on [−1, 1]: all but a triangle of area 1/2 out of 4
    assert probability_below(*bound) == pytest.approx(7 / 8, abs=0.02)
    apart = [value(0.0, 1.0, "Lanczos"), value(2.01, 1.0, "Lanczos")]
    assert probability_below(*apart) == 1.0
    assert probability_below(apart[1], apart[0]) == 0.0


def test_a_tie_is_a_coin_flip_and_rounding_makes_ties() -> None:
    first, second = value(1.0, exact=True, method="exact sweep"), value(1.0 + 1e-6, exact=True, method="exact sweep")
    assert probability_below(first, first) == 0.5
    assert probability_below(first, second) == 1.0
    assert probability_below(first, second, rounding=1e-4) == pytest.approx(0.5, abs=0.03)


def test_probabilities_of_the_two_directions_add_up(three: Comparison) -> None:
    for name in MEASURES:
        there, back = three.probability(name, "net 0", "net 2"), three.probability(name, "net 2", "net 0")
        assert there + back == pytest.approx(1.0)


def test_wider_errors_decide_less(three: Comparison) -> None:
    def blurred(report: sl.Report) -> sl.Report:
        values = {
            name: replace(v, error=10 * abs(v.value), exact=False, method="random probes")
            for name, v in report.values.items()
        }
        return replace(report, values=values)

    wide = Comparison({name: blurred(report) for name, report in three.reports.items()})
    assert three.verdict("kappa_trace_sum", "net 0", "net 2") == 1
    assert all(wide.verdict(name, a, b) == 0 for name in MEASURES for a in wide.names for b in wide.names if a != b)
    assert wide.statements()[0] == "“net 0” and “net 1”: not decided by any of the 4 invariant measures."


# --- rankings and agreement ------------------------------------------------------------------------------------------


def test_the_ranking_is_by_value_and_larger_volumes_are_flatter(three: Comparison) -> None:
    values = {name: report["rho_sum"].value for name, report in three.reports.items()}
    assert three.ranking("rho_sum") == sorted(values, key=lambda name: values[name])
    volumes = {
        name: replace(
            report, values={"volume_flatness": replace(report["rho_sum"], name="volume_flatness", exact=True)}
        )
        for name, report in three.reports.items()
    }
    other = Comparison(volumes)
    assert other.ranking("volume_flatness") == three.ranking("rho_sum")[::-1]
    flattest, second, _ = other.ranking("volume_flatness")
    assert other.probability("volume_flatness", flattest, second) == 1.0


def test_agreement_is_kendall_s_tau_where_all_is_decided(data) -> None:
    found = compare(networks(5), data, measures=MEASURES, dtype=torch.float64)
    tau = found.agreement()
    for name in MEASURES:
        assert tau[name][name] == 1.0
        for other in MEASURES:
            columns = [[found.reports[model][m].value for model in found.names] for m in (name, other)]
            assert tau[name][other] == pytest.approx(kendalltau(*columns).statistic)
    assert found.statements()[0].startswith("Of 10 pairs of networks ")


def test_a_measure_that_decides_nothing_agrees_with_none(data) -> None:
    model = networks(1)["net 0"]
    found = compare({"a": model, "b": model}, data, measures=["rho_sum", "hessian_trace"])
    assert str(found.agreement()["rho_sum"]["hessian_trace"]) == "nan"
    assert found.to_dict()["agreement"]["rho_sum"]["hessian_trace"] is None


# --- what is said ----------------------------------------------------------------------------------------------------


def test_a_twin_is_not_decided_and_the_plain_measures_do_not_count(data) -> None:
    model = networks(1)["net 0"]
    twin = sl.rescale_layers(model, {"0.weight": 10.0, "2.weight": 0.1}, data[0][:2])
    found = compare({"model": model, "twin": twin}, data, measures=MEASURES)
    assert found.statements() == ["“model” and “twin”: not decided by any of the 4 invariant measures."]
    assert found.verdict("hessian_trace", "model", "twin") != 0


def test_it_says_what_is_decided_who_disagrees_and_that_losses_differ(data) -> None:
    larger = networks(2)["net 1"]
    larger[2].weight.data *= 40.0
    model = sl.rescale_layers(networks(2)["net 1"], {"0.weight": 0.001, "2.weight": 1000.0}, data[0][:2])
    found = compare({"small": model, "large": larger}, data, measures=["kappa_trace_sum", "rho_sum", "hessian_trace"])
    decided, opposite, losses = found.statements()
    assert decided == "“small” is flatter than “large” by all 2 invariant measures."
    assert opposite == (
        "The opposite order comes out by measures that a rescaling of the weights can move at will: hessian_trace "
        "(“small”, “large”)."
    )
    assert losses.startswith("The losses differ: ")


def test_plain_measures_alone_say_nothing(data) -> None:
    found = compare(networks(2), data, measures=["hessian_trace"])
    assert found.statements()[0] == (
        "No measure here survives a rescaling of the weights, so nothing below says which minimum is flatter."
    )


def test_a_disagreement_names_both_sides(three: Comparison) -> None:
    def swapped(first: sl.Report, second: sl.Report) -> sl.Report:
        return replace(first, values={**first.values, "rho_sum": second["rho_sum"]})

    a, b = three.reports["net 0"], three.reports["net 2"]
    found = Comparison({"a": swapped(a, b), "b": swapped(b, a)})
    assert found.statements()[0] == (
        "“a” and “b”: the measures disagree. Flatter is “a” by kappa_trace_sum, kappa_sum, normalized_sharpness; "
        "“b” by rho_sum."
    )


# --- printing, saving, refusing --------------------------------------------------------------------------------------


def test_it_prints_saves_and_makes_a_page(three: Comparison, tmp_path) -> None:
    text = str(three)
    assert "net 0" in text
    assert "kappa_trace_sum" in text
    three.save(tmp_path / "c.json")
    plain = json.loads((tmp_path / "c.json").read_text())
    assert plain["rankings"]["rho_sum"] == three.ranking("rho_sum")
    again = Comparison.from_dict(plain)
    assert again.statements() == three.statements()
    assert again.agreement() == three.agreement()
    three.to_html(tmp_path / "c.html")
    page = (tmp_path / "c.html").read_text()
    assert "Who is flatter, and how sure that is" in page
    assert "Kendall" in page
    with refused("not a saved comparison: its format is None, needed is 'spiritlevel-comparison-1'", ValueError):
        Comparison.from_dict({})


def test_the_same_data_is_fixed_once_for_all(data) -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=10, shuffle=True)
    model = networks(1)["net 0"]
    state = torch.get_rng_state()
    found = compare({"a": model, "b": model}, loader, measures=["hessian_trace"], fix_data=True)
    assert found.reports["a"]["hessian_trace"].value == found.reports["b"]["hessian_trace"].value
    assert torch.equal(state, torch.get_rng_state())


def test_wrong_input_is_refused(data) -> None:
    with refused("compare needs at least two networks as a dict of name → model, got 1"):
        compare(networks(1), data)
    with refused("compare needs at least two networks as a dict of name → model, got list"):
        compare(list(networks(2).values()), data)
    with refused("confidence must be a number between 0.5 and 1, got 0.3"):
        compare(networks(2), data, confidence=0.3)
