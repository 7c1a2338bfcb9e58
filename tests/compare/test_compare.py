"""Comparing networks: rankings, how sure they are, agreement of measures, and what is said about it."""

import json
import math
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from scipy.stats import kendalltau
from torch import Tensor, nn

import spiritlevel as sl
from refusals import refused
from report_samples import sample_report
from spiritlevel.compare.compare import Comparison, compare, probability_below
from spiritlevel.compare.show import _percent, value_error
from spiritlevel.guarantees.parts import sampling_error
from spiritlevel.measuring.value import ErrorKind, Value
from spiritlevel.show.numbers import significant, value_and_error

MEASURES = ["kappa_trace_sum", "kappa_sum", "rho_sum", "normalized_sharpness", "hessian_trace", "hessian_spectral_norm"]


def value(number: float, error: float = 0.0, kind: ErrorKind = "standard error") -> Value:
    return Value("m", number, error, kind == "exact", True, "by hand", error_kind=kind)


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
    bound = [value(number, 1.0, "bound") for number in (0.0, 1.0)]
    # u2 − u1 + 1 > 0 with u uniform on [−1, 1]: all but a triangle of area 1/2 out of 4
    assert probability_below(*bound) == pytest.approx(7 / 8, abs=0.02)
    apart = [value(0.0, 1.0, "bound"), value(2.01, 1.0, "bound")]
    assert probability_below(*apart) == 1.0
    assert probability_below(apart[1], apart[0]) == 0.0


def test_a_tie_is_a_coin_flip_and_rounding_makes_ties() -> None:
    first, second = value(1.0, kind="exact"), value(1.0 + 1e-6, kind="exact")
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
            name: replace(v, error=10 * abs(v.value), exact=False, error_kind="standard error")
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
    found = compare(networks(5), data, measures=MEASURES, dtype=torch.float64, sampling=False)
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
    losses, decided, opposite = found.statements()
    assert decided == "“small” has smaller values than “large” by all 2 invariant measures."
    assert opposite == (
        "The opposite order comes out by measures that a rescaling of the weights can move at will: hessian_trace "
        "(“small”, “large”)."
    )
    assert losses.startswith("Not comparable: the losses differ (")
    given = {name: replace(r, problem={**r.problem, "at_loss": 0.1}) for name, r in found.reports.items()}
    assert (
        replace(found, reports=given).statements()[0] == "“small” is flatter than “large” by all 2 invariant measures."
    )


def test_that_losses_differ_stands_beside_the_verdict_on_the_page_and_in_the_terminal(data, tmp_path) -> None:
    larger = networks(2)["net 1"]
    larger[2].weight.data *= 40.0
    found = compare({"Small": networks(2)["net 1"], "large": larger}, data, measures=["kappa_trace_sum", "rho_sum"])
    printed = str(found)
    assert printed.index("Not comparable") < printed.index("has smaller values") < printed.index("kappa_trace_sum")
    small = found.reports["Small"]
    assert f"loss: Small {significant(small.loss, 4)}" in printed
    value = small["kappa_trace_sum"].value
    parts = torch.tensor(found.parts["Small"]["kappa_trace_sum"], dtype=torch.float64)
    error = value_error(found, "kappa_trace_sum", "Small")
    assert error == pytest.approx(float(parts.std() / len(parts) ** 0.5), rel=1e-3)
    number, shown = value_and_error(value, error, digits=4)
    assert f"Small {number} ± {shown}" in " ".join(printed.split())
    assert "is flatter" not in printed
    assert "smaller values first" in " ".join(printed.split())
    found.to_html(tmp_path / "c.html")
    page = (tmp_path / "c.html").read_text()
    losses, verdict = page.index("Not comparable: the losses"), page.index("has smaller values than")
    assert page.rindex('<p class="sl-answer">', 0, verdict) < losses < verdict < page.index("<table")
    assert "</p>" in page[losses : page.index("Curvature often shrinks")]  # the headline is one sentence
    assert "Loss: Small" in page
    assert "flattest first" not in page.lower()


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


# --- what a finite sample leaves open --------------------------------------------------------------------------------

CENTRES = 1.2 * torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def drawn(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=generator)
    return (CENTRES[labels] + torch.randn(count, 4, generator=generator)).double(), labels


def trained(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    (x, y), optimizer = drawn(300, seed + 50), torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60 + 10 * seed):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def claims(names: list[str], found: list[Comparison], truth: Comparison) -> tuple[int, int]:
    """Orders claimed at 95 %, and how many of them are wrong."""
    claimed = wrong = 0
    for each in found:
        for name in names:
            for a, b in combinations(each.names, 2):
                verdict, right = each.verdict(name, a, b), truth.verdict(name, a, b)
                claimed, wrong = claimed + (verdict != 0), wrong + (verdict == -right)
    return claimed, wrong


@pytest.mark.long
def test_orders_claimed_at_95_percent_are_right_that_often() -> None:
    """The truth comes from 200 times as many samples."""
    names, models = ["rho_sum", "hessian_trace"], {f"net {seed}": trained(seed) for seed in range(3)}
    truth = compare(models, drawn(200 * 80, 999), measures=names, sampling=False)
    found = [compare(models, drawn(80, seed), measures=names) for seed in range(6)]
    claimed, wrong = claims(names, found, truth)
    assert claimed >= 10  # of 36: an error that is far too large would claim nothing
    assert wrong <= 0.05 * claimed, (wrong, claimed)
    without = [compare(models, drawn(80, seed), measures=names, sampling=False) for seed in range(6)]
    claimed, wrong = claims(names, without, truth)
    assert claimed == 36
    assert wrong >= 4  # the same data without the sampling error: what it is for


def trace(z: Tensor) -> float:
    return float(z.square().sum(1).mean())


def largest_eigenvalue(z: Tensor) -> float:
    return float(torch.linalg.eigvalsh(z.T @ z / len(z))[-1])


@pytest.mark.parametrize("measure", [trace, largest_eigenvalue])
@pytest.mark.parametrize("heavy", [False, True])
def test_claims_are_right_for_means_and_eigenvalues_with_and_without_rare_large_samples(measure, heavy: bool) -> None:
    """Two matrices measured on the same samples, hundreds of times: exact values, so only the sample can mislead."""
    generator = torch.Generator().manual_seed(0)
    claimed = wrong = 0
    for _ in range(40):
        first, second = (torch.randn(4, 4, generator=generator, dtype=torch.float64) for _ in range(2))
        second = first + 0.4 * second
        true = [measure(torch.linalg.cholesky(each.T @ each).T * 2) for each in (first, second)]  # E zzᵀ, four rows
        for _ in range(10):
            x = torch.randn(60, 4, generator=generator, dtype=torch.float64)
            if heavy:  # of mean square one
                x = x * (torch.randn(60, 1, generator=generator, dtype=torch.float64) - 0.5).exp().div(math.exp(0.5))
            both = [x @ each.T for each in (first, second)]
            parts = [measure(both[1][k::10]) - measure(both[0][k::10]) for k in range(10)]
            a, b = (value(measure(z), kind="exact") for z in both)
            probability = probability_below(a, b, sampling=sampling_error(b.value - a.value, parts))
            if max(probability, 1 - probability) >= 0.95:
                claimed, wrong = claimed + 1, wrong + ((probability > 0.5) != (true[1] > true[0]))
    assert claimed >= 80
    assert wrong <= 0.05 * claimed, (wrong, claimed)


def test_without_the_sampling_error_orders_are_about_these_data_only(data) -> None:
    both = networks(2)
    found = compare(both, data, measures=["rho_sum"], sampling=False)
    assert found.parts == {}
    assert found.statements()[1] == (
        "These orders are about these data only: the error of a finite sample is not included (it was not asked for), and "
        "more data may reverse them."
    )
    assert "probabilities are about these data only" in str(found)
    assert "random parts of these" in str(compare(both, data, measures=["rho_sum"]))


def test_data_that_cannot_be_divided_say_so(data) -> None:
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"]), len(batch["y"])

    batches = [{"x": data[0][i : i + 10], "y": data[1][i : i + 10]} for i in range(0, 50, 10)]
    found = compare(networks(2), batches, loss, measures=["hessian_spectral_norm"])
    assert len(found.parts["net 0"]["hessian_spectral_norm"]) == 5
    whole = compare(networks(2), [{"x": data[0], "y": data[1]}], loss, measures=["hessian_spectral_norm"])
    assert whole.no_sampling_error == "the data cannot be divided into parts"


def test_lower_bounds_found_by_ascent_decide_nothing(data) -> None:
    names = ["epsilon_sharpness", "keskar_sharpness", "riemannian_sharpness"]
    found = compare(networks(2), data, measures=[*names, "rho_sum"])
    for name in names:
        assert found.undecidable(name)
        assert found.verdict(name, "net 0", "net 1") == 0
        assert str(found.probability(name, "net 0", "net 1")) == "nan"
        assert name not in found.parts["net 0"]  # nor are they ascended again on every part
    assert found.statements()[-1] == (
        "Undecided, because the values are lower bounds found by ascent: epsilon_sharpness, keskar_sharpness, "
        "riemannian_sharpness."
    )
    assert str(found).count("undecided (lower bounds)") == 3
    assert found.to_dict()["probabilities"]["riemannian_sharpness"][0]["first_is_flatter"] is None
    alone = compare(networks(2), data, measures=["riemannian_sharpness"])
    assert alone.statements()[0] == "No measure here decides which minimum is flatter."


def test_a_measure_that_some_part_has_no_value_of_decides_nothing(three: Comparison) -> None:
    parts = {model: {**each, "rho_sum": (float("nan"),) * 10} for model, each in three.parts.items()}
    broken = replace(three, parts=parts)
    assert broken.probability("rho_sum", "net 0", "net 2") == 0.5
    assert Comparison.from_dict(broken.to_dict()).probability("rho_sum", "net 0", "net 2") == 0.5


def test_no_probability_is_rounded_up() -> None:
    assert [_percent(p) for p in (0.5, 0.949, 0.9949, 0.9989, 0.99901)] == [
        "50 %", "94 %", "99.4 %", "99.8 %", "≥ 99.9 %",
    ]  # fmt: skip


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
    assert again.probability("rho_sum", "net 0", "net 1") == three.probability("rho_sum", "net 0", "net 1")
    assert again.parts == three.parts
    three.to_html(tmp_path / "c.html")
    page = (tmp_path / "c.html").read_text()
    assert "Who is flatter, and how sure that is" in page
    assert "Kendall" not in page  # three networks are three pairs
    four = compare(
        networks(4), (torch.randn(12, 3), torch.arange(12) % 3), measures=["kappa_trace_sum"], sampling=False
    )
    four.to_html(tmp_path / "four.html")
    assert "Kendall" in (tmp_path / "four.html").read_text()
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


def test_networks_that_are_not_at_a_minimum_are_named_beside_the_verdict():
    calm = sample_report()
    steep = replace(calm, problem={**calm.problem, "gradient_metric_norm": 1e6})
    told = "“b” is not at a minimum, and flatness is about curvature alone: the notes of its report say more."
    assert told in Comparison({"a": calm, "b": steep}).statements()
    assert not any("not at a minimum" in line for line in Comparison({"a": calm, "b": calm}).statements())
