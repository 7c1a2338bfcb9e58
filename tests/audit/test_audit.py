"""The audit's verdicts: every claim of every measure, seen to hold or to fail on several architectures."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import spiritlevel as sl
from spiritlevel.audit.audit import _judge
from spiritlevel.audit.findings import Audit, Finding, Trial
from spiritlevel.audit.show import audit_answer, audit_drawing

FEATURES, CLASSES = 6, 3


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(FEATURES, 5), nn.Linear(5, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        h = nn.functional.leaky_relu(self.first(x), 0.1)
        return self.last(h + nn.functional.leaky_relu(self.inner(h), 0.1))


class Concatenated(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.last = nn.Linear(FEATURES, 4), nn.Linear(FEATURES, 3), nn.Linear(7, CLASSES)

    def forward(self, x):
        return self.last(torch.cat([self.a(x).relu(), self.b(x).relu()], 1))


def plain():
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, CLASSES))


def unbiased():
    return nn.Sequential(nn.Linear(FEATURES, 7, bias=False), nn.ReLU(), nn.Linear(7, CLASSES, bias=False))


def convolutional():
    return nn.Sequential(
        nn.Unflatten(1, (1, FEATURES)),
        nn.Conv1d(1, 4, 3),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )


def bottleneck():
    return nn.Sequential(nn.Linear(FEATURES, 3), nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, CLASSES))


def rotated():
    """What lies between the two linear maps may be rotated; the gains show that a rotation is not one of the weights."""
    model = nn.Sequential(nn.Linear(FEATURES, 4, bias=False), nn.RMSNorm(4), nn.Linear(4, CLASSES))
    nn.init.uniform_(model[1].weight, 0.5, 3.0)
    return model


def normalized():
    model = nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, CLASSES))
    model(3 * torch.randn(64, FEATURES) + 1)
    return model


ARCHITECTURES = {f.__name__: f for f in (plain, unbiased, convolutional, normalized, Residual, Concatenated)}


def problem(name, samples=40):
    torch.manual_seed(3)
    model = {**ARCHITECTURES, "bottleneck": bottleneck, "rotated": rotated}[name]().double()
    x, y = torch.randn(samples, FEATURES, dtype=torch.float64), torch.randint(0, CLASSES, (samples,))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval(), (x, y)


@pytest.mark.parametrize("loss", ["cross_entropy", "normalized_cross_entropy"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_claim_holds_and_what_claims_nothing_moves(name, loss):
    model, data = problem(name)
    audit = sl.audit(model, data, loss, strengths=(1.0,), kinds=("layer", "neuron", "batch-norm", "output scale"))
    assert audit.kinds
    for finding in audit.findings:
        expected = "invariant" if finding.claimed else "moves"
        # A maximum over layers may sit in a layer that a change does not reach; nothing else may stay by luck.
        lucky = finding.measure.endswith("_max") and finding.verdict == "invariant"
        assert finding.verdict == expected or (lucky and not finding.claimed), finding
    assert audit.failed_claims == ()


@pytest.mark.parametrize("name", ["plain", "unbiased", "Residual"])
@pytest.mark.parametrize("kind", ["input map", "input shift"])
def test_a_change_of_the_input_moves_what_does_not_whiten(name, kind):
    model, data = problem(name)
    whitened = ["whitened_flatness", "whitened_flatness_max"]
    audit = sl.audit(model, data, measures=["kappa_sum", "rho_sum", "normalized_sharpness", "fisher_rao_norm", *whitened],
                     kinds=(kind,), strengths=(1.0,))  # fmt: skip
    if kind == "input shift" and name == "unbiased":
        assert audit.skipped == {kind: "the first layer of this network cannot absorb a shift of its input"}
        return
    still = whitened if kind == "input map" else []
    assert {f.measure: f.verdict for f in audit.findings} == {
        f.measure: "invariant" if f.measure in still else "moves" for f in audit.findings
    }
    assert [f.measure for f in audit.findings if f.claimed] == still


def test_every_claim_holds_for_matrices_and_what_claims_nothing_moves():
    """Two linear maps in a row, before a ReLU: all exact, so that nothing is left undecided."""
    audit = sl.audit(*problem("bottleneck"), kinds=("linear",), strengths=(1.0,))
    assert audit.kinds == ("linear",)
    for finding in audit.findings:
        lucky = finding.measure.endswith("_max") and finding.verdict == "invariant"
        expected = "invariant" if finding.claimed else "moves"
        assert finding.verdict == expected or (lucky and not finding.claimed), finding
    assert audit.failed_claims == ()


def test_a_rotation_moves_plain_curvature_and_what_survives_neurons():
    names = ["hessian_trace", "normalized_sharpness", "rho_sum", "volume_flatness"]
    audit = sl.audit(*problem("rotated"), measures=names, kinds=("rotation",), strengths=(1.0,))
    assert [audit.verdict(name, "rotation") for name in names] == ["moves", "moves", "moves", "invariant"]
    assert [audit.finding(name, "rotation").claimed for name in names] == [False, False, False, True]


def test_an_audit_of_matrices_survives_the_disk_and_is_shown(tmp_path):
    audit = sl.audit(*problem("bottleneck"), measures=["hessian_trace"], kinds=("linear", "rotation"), strengths=(1.0,))
    audit.save(tmp_path / "audit.json")
    again = Audit.load(tmp_path / "audit.json")
    assert (again.findings, str(again)) == (audit.findings, str(audit))
    audit.to_html(tmp_path / "audit.html")
    assert "Measures under linear changes" in (tmp_path / "audit.html").read_text()
    mlp, data = problem("plain")
    skipped = sl.audit(mlp, data, measures=["hessian_trace"], kinds=("linear", "rotation"), strengths=(1.0,)).skipped
    assert skipped["linear"] == "no change of basis of this kind (linear) leaves the function of this network alone"


def test_a_false_claim_is_found_out(monkeypatch):
    from spiritlevel.measuring import registry as measures

    honest = measures.ALL["hessian_trace"]
    liar = replace(honest, invariant_under=frozenset({"layer", "neuron"}))
    monkeypatch.setitem(measures.ALL, "hessian_trace", liar)
    model, data = problem("plain")
    audit = sl.audit(model, data, measures=["hessian_trace"], strengths=(0.5, 1.0), kinds=("layer", "neuron"))
    assert {finding.kind for finding in audit.failed_claims} == {"layer", "neuron"}
    assert audit.verdict("hessian_trace", "layer") == "moves"
    assert audit.factor("hessian_trace", "layer") > 1.5
    assert audit.finding("hessian_trace", "layer").strength == 0.5
    assert "Claims that fail here: hessian_trace under layer" in " ".join(str(audit).split())


def test_wide_error_bars_leave_it_undecided_and_say_what_would_decide():
    report = sl.measure(*problem("plain"), measures=["kappa_sum"])
    wide = replace(report, values={"kappa_sum": replace(report["kappa_sum"], error=report["kappa_sum"].value)})
    finding = _judge(sl.get_measure("kappa_sum"), "layer", wide, [Trial("layer", 1.0, 0, wide)], 1e-3, claimed=True)
    assert finding.verdict == "undecided"
    assert finding.reason == "the error bars are too wide to tell; a tolerance of 2e-05 would decide"


def test_every_group_can_be_audited_by_itself():
    model, data = problem("normalized")
    audit = sl.audit(model, data, measures=["rho_sum", "hessian_trace"], kinds=(), strengths=(1.0,), groups=True)
    groups = [kind for kind in audit.kinds if kind.startswith("group: ")]
    assert len(groups) == len(sl.find_symmetries(model, data[0][:1]).scale_groups) >= 2
    assert all(audit.verdict("rho_sum", kind) == "invariant" for kind in groups)
    assert all(audit.verdict("hessian_trace", kind) == "moves" for kind in groups)


def test_a_network_without_symmetry_says_why_nothing_was_audited():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.GELU(), nn.Linear(4, CLASSES)).double()
    data = torch.randn(10, FEATURES, dtype=torch.float64), torch.randint(0, CLASSES, (10,))
    audit = sl.audit(model, data, measures=["hessian_spectral_norm"], kinds=("layer", "neuron"), strengths=(1.0,))
    assert audit.findings == ()
    assert audit.skipped["layer"] == "no layer of this network can be rescaled as a whole"
    with pytest.raises(KeyError, match="was not audited: no layer of this network can be rescaled as a whole"):
        audit.verdict("hessian_spectral_norm", "layer")


def test_an_audit_survives_the_disk(tmp_path):
    model, data = problem("plain")
    audit = sl.audit(model, data, measures=["hessian_trace", "rho_sum"], strengths=(1.0,), kinds=("layer",))
    audit.save(tmp_path / "audit.json")
    again = Audit.load(tmp_path / "audit.json")
    assert again.findings == audit.findings
    assert str(again) == str(audit)
    audit.to_html(tmp_path / "audit.html")
    page = (tmp_path / "audit.html").read_text()
    assert "hessian_trace" in page
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_the_model_comes_back_as_it_was():
    model, data = problem("normalized")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    sl.audit(model, data, measures=["hessian_trace"], strengths=(1.0,))
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_wrong_use_is_refused_in_words():
    model, data = problem("plain")
    with pytest.raises(
        sl.SpiritLevelError, match=r"strengths must be positive numbers, as \(0.5, 1.0\); got \(-1.0,\)"
    ):
        sl.audit(model, data, strengths=(-1.0,))
    with pytest.raises(sl.SpiritLevelError, match=r"unknown kinds \['nearon'\]; known are layer, neuron"):
        sl.audit(model, data, kinds=("nearon",))


def test_records_claim_what_the_table_of_the_papers_says():
    claims = {measure.name: set(measure.invariant_under) for measure in sl.list_measures()}
    plain = (
        "hessian_trace",
        "hessian_spectral_norm",
        "epsilon_sharpness",
        "keskar_sharpness",
        "keskar_subspace_sharpness",
    )
    for name in claims:
        if name.startswith("rho") or name in (
            "normalized_sharpness",
            "fisher_rao_norm",
            "riemannian_nodewise_spectral_norm",
        ):
            assert claims[name] == {"layer", "neuron"}
        elif name.startswith(("kappa", "riemannian", "matrix")):
            assert claims[name] == {"layer"}
        elif name in plain:
            assert claims[name] == set()


# --- what moves without bound ----------------------------------------------------------------------------------------


def moved(*factors: float) -> Audit:
    """An audit in which measures that were 1 became the factors."""
    report = sl.measure(*problem("plain"), measures=["rho_sum"])
    names = [f"measure {index}" for index in range(len(factors))]

    def with_values(numbers: tuple[float, ...]) -> sl.Report:
        values = {n: replace(report["rho_sum"], name=n, value=x) for n, x in zip(names, numbers, strict=True)}
        return replace(report, values=values)

    original = with_values((1.0,) * len(factors))
    trials = (Trial("layer", 1.0, 0, with_values(factors)),)
    records = [replace(sl.get_measure("rho_sum"), name=name) for name in names]
    findings = tuple(_judge(each, "layer", original, trials, 1e-3, claimed=False) for each in records)
    return Audit(findings, original, trials)


def test_an_infinite_factor_is_valid_json_in_print_and_file(tmp_path):
    audit = moved(math.inf, 2.0, 0.0)
    text = json.dumps(audit.to_dict(), allow_nan=False)
    assert json.loads(text)["findings"][0]["factor"] == "inf"
    audit.save(tmp_path / "a.json")
    for again in (Audit.from_dict(json.loads(text)), Audit.load(tmp_path / "a.json")):
        assert again.factor("measure 0", "layer") == math.inf
        assert again.findings == audit.findings


def test_the_chart_leaves_out_no_measure_that_moves():
    factors = (math.inf, 1e3, 0.01, 0.0, -4.0, 8.0, 7.0, 1.5, 1.0)
    audit = moved(*factors)
    drawing = audit_drawing(audit, "layer")
    assert drawing.description.startswith(
        "8 measures move under layer changes and 1 stays. measure 0 moves furthest, beyond any factor."
    )
    (axes,) = drawing.figure.axes
    assert len(axes.lines) == 9  # eight that move, one for all that stay
    low, high = axes.get_ylim()
    for line in axes.lines:
        heights = line.get_ydata()
        assert all(low <= height <= high for height in heights)
        assert heights[-1] != 1.0 or line is axes.lines[-1]
    assert {f"measure {i}" for i in range(8)} < {line.get_label() for line in axes.lines}


def test_a_measure_that_a_twin_does_not_have_is_undecided():
    audit = moved(math.nan)
    assert audit.verdict("measure 0", "layer") == "undecided"
    assert audit.findings[0].reason.startswith("not available on a twin")
    assert audit_drawing(audit, "layer").description.startswith("0 measures move")


def test_data_in_single_precision_do_not_stop_measures_that_look_for_symmetries():
    """The audit measures copies of the model in double precision; the data stay as they are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    data = torch.randn(12, 4, dtype=torch.float32), torch.arange(12) % 3
    audit = sl.audit(model.float(), data, measures=["volume_flatness"], kinds=["layer"], strengths=[1.0])
    assert audit.verdict("volume_flatness", "layer") in ("invariant", "undecided")


# --- what the sentences say ------------------------------------------------------------------------------------------


def test_kinds_that_were_not_tried_are_not_survived():
    """κ survives layer changes and no others: the answer must not say that it survives all."""
    chosen = sl.audit(
        *problem("plain"), measures=["kappa_trace_sum", "hessian_trace"], kinds=["layer"], strengths=(1.0,)
    )
    assert audit_answer(chosen)[:2] == [
        "1 of 2 measures survives the layer changes of weights, which leave this network's function alone; no others were "
        "tried.",
        "It is kappa_trace_sum.",
    ]
    every = sl.audit(*problem("plain"), measures=["kappa_trace_sum", "hessian_trace"], strengths=(1.0,))
    assert audit_answer(every)[0] == (
        "0 of 2 measures survive every change of weights that leaves this network's function alone."
    )


@pytest.mark.parametrize(
    ("verdicts", "claimed", "said"),
    [
        (("invariant", "invariant"), True, "Every measure that claims to survive does."),
        (
            ("invariant", "undecided"),
            True,
            "No claim to survive fails here, but some are undecided: rho_sum under neuron.",
        ),
        (("undecided",), True, "No claim to survive is decided here: rho_sum under layer."),
        (("moves", "undecided"), True, "Claims that fail here: rho_sum under layer."),
        (("moves", "moves"), False, "No measure here claims to survive what was tried."),
    ],
)
def test_claims_are_told_as_far_as_they_are_decided(verdicts, claimed, said):
    report = sl.measure(*problem("plain"), measures=["rho_sum"])
    kinds = zip(("layer", "neuron"), verdicts, strict=False)
    findings = tuple(Finding("rho_sum", kind, verdict, 2.0, None, claimed) for kind, verdict in kinds)
    assert audit_answer(Audit(findings, report, ()))[-1] == said


def test_an_audit_of_nothing_says_so():
    report = sl.measure(*problem("plain"), measures=["rho_sum"])
    assert audit_answer(Audit((), report, (), {"layer": "no layer can be rescaled"})) == [
        "Nothing was audited: this network has no change of the kinds that were asked for."
    ]


def test_the_furthest_is_one_that_moves():
    """A measure that moves under one kind may be undecided under another, with any factor between two wide bars."""
    report = sl.measure(*problem("plain"), measures=["rho_sum"])
    findings = (
        Finding("rho_sum", "layer", "moves", 2.0, 1.0, False),
        Finding("rho_sum", "neuron", "undecided", 50.0, None, False),
    )
    assert (
        "the furthest, rho_sum, by a factor of 2.00 under layer changes."
        in audit_answer(Audit(findings, report, ()))[1]
    )


def test_no_factor_leads_from_one_sign_to_the_other():
    audit = moved(-1.0)
    assert audit.verdict("measure 0", "layer") == "moves"
    assert audit.factor("measure 0", "layer") == math.inf
    assert "the furthest, measure 0, beyond any factor under layer changes." in audit_answer(audit)[1]
