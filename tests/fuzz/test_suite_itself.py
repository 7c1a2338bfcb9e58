"""The fuzz suite can fail: numbers that are off are called wrong, and its definitions agree with independent ones."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dense_oracle
import spiritlevel as sl
from fuzz import bias, left_out, rates
from fuzz import check as checking
from fuzz.campaign import Figures
from fuzz.check import check, reason, unchanged
from fuzz.found import FOUND
from fuzz.losses import binary, cross_entropies, hinges
from fuzz.networks import Network, matrices
from fuzz.oracle import Truth, quantities, truths
from fuzz.page import joined, tables, updated
from fuzz.reduce import reduced
from fuzz.subjects import Options, Samples, Subject, build
from measure_names import DEFINED

PLAIN = Subject(precision="float64", options=Options(measures=()))


@pytest.mark.parametrize("family", ["mlp", "convolution", "words", "attention", "spelled", "recurrent"])
def test_definitions_agree_with_the_other_oracle(family: str) -> None:
    built = build(replace(PLAIN, network=Network(family, depth=2)))
    expected = dense_oracle.expected(built.honest, F.cross_entropy, built.inputs, built.targets, matrices(built.honest))
    found = truths(quantities(built, None), DEFINED)
    assert set(found) == set(DEFINED)
    for name, truth in found.items():
        assert truth.value == pytest.approx(expected.values[name], rel=1e-8), name
        assert truth.scale >= abs(truth.value) * (1 - 1e-9)


def test_the_loss_keeps_its_digits_where_the_network_is_certain() -> None:
    # Weight 16·I on the three unit vectors: 1 − p is 2e-16/(1 + 2e-16) with e^-16 = 1.1e-7.
    f = (16 * torch.eye(3, dtype=torch.float64)).requires_grad_()
    (gradient,) = torch.autograd.grad(cross_entropies(f, torch.arange(3)).sum(), f, create_graph=True)
    q = math.exp(-16) / (1 + 2 * math.exp(-16))
    assert float(gradient[0, 0].detach()) == pytest.approx(-2 * q, rel=1e-14)
    (row,) = torch.autograd.grad(gradient[0, 0], f)
    assert row[0].tolist() == pytest.approx([2 * q * (1 - 2 * q), -q * (1 - 2 * q), -q * (1 - 2 * q)], rel=1e-14)


def test_losses_are_those_of_torch() -> None:
    f, y = torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3, torch.arange(9) % 3
    torch.testing.assert_close(cross_entropies(f, y), F.cross_entropy(f, y, reduction="none"))
    soft = f.softmax(1).flip(0)
    torch.testing.assert_close(cross_entropies(f, soft), F.cross_entropy(f, soft, reduction="none"))
    torch.testing.assert_close(hinges(f, y), F.multi_margin_loss(f, y, p=2, reduction="none"))
    hot = F.one_hot(y, 3).double()
    torch.testing.assert_close(binary(f, hot), F.binary_cross_entropy_with_logits(f, hot, reduction="none").mean(1))


@pytest.mark.parametrize("factor", [1 + 1e-4, 0.5, -1.0, math.nan, math.inf])
def test_a_number_that_is_off_is_wrong(monkeypatch, factor: float) -> None:
    measure = sl.measure

    def off(*args, **kwargs) -> sl.Report:
        report = measure(*args, **kwargs)
        return replace(report, values={n: replace(v, value=v.value * factor) for n, v in report.values.items()})

    assert check(PLAIN).verdict == "right"
    monkeypatch.setattr(sl, "measure", off)
    assert check(PLAIN).verdict == "wrong"


def test_an_exception_that_is_no_refusal_is_a_crash(monkeypatch) -> None:
    def broken(*args, **kwargs):
        raise KeyError("x")

    monkeypatch.setattr(sl, "measure", broken)
    assert check(PLAIN).verdict == "crashed"


def test_a_model_that_was_touched_is_seen() -> None:
    model = nn.Linear(2, 2)

    def swap() -> None:
        del model._parameters["weight"]
        model.weight = torch.zeros(2, 2)

    for touch in (lambda: model.weight.data.add_(1e-7), model.eval, swap):
        with pytest.raises(checking.Changed), unchanged(model):
            touch()


def test_wide_errors_are_counted_and_rounding_is_allowed() -> None:
    truth = Truth(1.0, 10.0)
    assert checking.allowance("hessian_trace", truth, 1e-6) == pytest.approx(1e-5)
    assert checking.allowance("normalized_sharpness", truth, 1e-6) == pytest.approx(1e-4)
    assert checking.allowance("normalized_sharpness", Truth(0.0, 10.0), 1e-6) == pytest.approx(1e-2)


def test_a_definition_that_rounding_decides_is_not_held_against_anyone() -> None:
    subject = FOUND["terms that cancel in double precision"]
    expected = truths(quantities(build(subject), subject.options.parameters), ["kappa_sum"])
    assert expected["kappa_sum"].own == 0
    assert checking._with_own_rounding(subject, expected)["kappa_sum"].own > 1e-4 * expected["kappa_sum"].value


def test_refusals_are_counted_by_what_they_say() -> None:
    assert reason("label 7 of sample 12 is out of range") == reason("label 3 of sample 1 is out of range")


def test_the_page_has_the_figures() -> None:
    figures = Figures(seconds=60.0)
    figures.count(PLAIN, check(PLAIN))
    text = updated("a\n<!-- figures of make fuzz -->\nold\n<!-- end of figures -->\nz\n", vars(figures))
    assert "old" not in text
    assert text.startswith("a\n")
    assert text.endswith("\nz\n")
    assert "| inputs tried | 1 |" in text
    assert "| wrong | 0 |" in tables(vars(figures))


def test_findings_are_made_smaller(monkeypatch) -> None:
    def broken(model, data, loss, *, tolerance, **options):
        raise KeyError("x") if tolerance < 1e-3 else sl.SpiritLevelError("x")

    monkeypatch.setattr(sl, "measure", broken)
    large = Subject(Network("residual", "gelu", 2, 4), "mse", Samples("late", 24), options=Options(tolerance=1e-6))
    small, outcome = reduced(large)
    assert outcome.verdict == "crashed"
    assert small == Subject(samples=Samples(count=1), options=Options(tolerance=1e-6))


def test_subjects_print_as_code() -> None:
    subject = replace(PLAIN, samples=Samples("late", 9), stretch=25.0)
    assert eval(repr(subject)) == subject


def test_bias_is_measured_against_the_definition(monkeypatch) -> None:
    monkeypatch.setattr("spiritlevel.problem.batches.SMALL", 0)
    (gelu,) = (case for case in bias.CASES if case.title == "GELU")
    found = {name: (exact, z) for name, exact, z in bias.readings(gelu, 2)}
    assert tuple(found) == bias.MEASURES
    assert found.pop("rho_row_max")[0]  # lies in a layer that no probe touches
    for exact, z in found.values():
        assert not exact
        assert (abs(z) < 5).all()
        assert z[0] != z[1]


def test_samples_that_are_left_out_are_held_against_the_definition(capsys, monkeypatch) -> None:
    monkeypatch.setattr(left_out, "STEPS", 20)
    case = next(case for case in left_out.cases() if case.state == "loss of 1e-5" and case.network == "linear")
    built, figures = left_out.built(replace(case, seed=1)), Counter()
    assert F.cross_entropy(built.model(built.inputs), built.targets).item() == pytest.approx(1e-5, rel=1e-6)
    value = sl.Value("hessian_trace", 1.1, 0.06, exact=False, converged=True, method="random probes")
    left_out._count(figures, case, "float64", value, Truth(1.0, 1.0), 1e-3)
    assert figures == {("probes", "count"): 1, ("probes", "outside 1"): 1, ("probes", "outside 2"): 0}
    assert len([*left_out.cases()]) == 80
    assert not capsys.readouterr().err


def test_searches_are_held_against_the_definition(capsys, own_precision) -> None:
    figures = Counter()
    rates.judged(3, figures)
    assert figures[1e-4, "count"] == len(rates.MEASURES)
    assert not any(figures[tolerance, "outside"] for tolerance in rates.TOLERANCES)
    value = sl.Value("hessian_spectral_norm", 1.1, 0.06, exact=False, converged=True, method="Lanczos")
    assert rates.distance(value, Truth(1.0, 1.0)) == pytest.approx(0.1)
    assert len({repr(rates.subject(number)) for number in range(rates.NETWORKS)}) == rates.NETWORKS
    assert not capsys.readouterr().err


def test_runs_on_several_cores_add_up():
    one = {"torch": "2", "seed": 7, "inputs": 3, "verdicts": {"right": 2, "refused": 1}, "findings": []}
    other = {"torch": "2", "seed": 8, "inputs": 5, "verdicts": {"right": 5}, "findings": ["x"]}
    assert joined([one, other]) == {
        "torch": "2", "seed": "7, 8", "inputs": 8, "verdicts": {"right": 7, "refused": 1}, "findings": ["x"],
    }  # fmt: skip
