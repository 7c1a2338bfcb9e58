"""The page of results can be made again: from folders of studies to tables, and from tables to figures and the page."""

from __future__ import annotations

import csv
import json
import math
import re
import runpy
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spiritlevel.errors import SpiritLevelError
from spiritlevel.landscape import Line, load
from spiritlevel.study.along import Mark
from spiritlevel.study.correlate import Answers
from spiritlevel.study.plan import read_plan
from spiritlevel.study.results import Cell, Passed, Quantity, described_study
from spiritlevel.study.run import prepare
from spiritlevel.study.statistics import Estimate
from spiritlevel.study.store import StudyFolder
from spiritlevel.study.worker import DONE, compute
from study_samples import fabricate, followed
from subjects.data_files import write_cifar_binary, write_mnist
from tiny_study import TINY

ROOT = Path(__file__).resolve().parents[1]
MAKE = runpy.run_path(str(ROOT / "docs" / "results" / "make.py"))
EQUAL_LOSS = runpy.run_path(str(ROOT / "docs" / "results" / "equal_loss.py"))
LINES = runpy.run_path(str(ROOT / "docs" / "results" / "lines.py"))
MEASURES = (
    "kappa_trace_sum", "kappa_trace_max", "rho_sum", "rho_max", "hessian_trace", "hessian_spectral_norm",
    "riemannian_spectral_norm", "normalized_sharpness",
)  # fmt: skip
TEMPLATE = """# Results

| here | networks | verdict |
|---|---|---|
| {{verdict petzka-mnist}} |
| {{verdict rangamani-mnist}} |
| {{verdict petzka-cifar10}} |

{{petzka-mnist}}

{{rangamani-mnist}}

{{measures}}
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of two studies, in a folder of its own."""
    folder = tmp_path_factory.mktemp("page")
    results = folder / "results"
    results.mkdir()
    (results / "template.txt").write_text(TEMPLATE, encoding="utf-8")
    MAKE["gather"](followed(fabricate(folder / "one", "petzka-mnist", cells=14, measures=MEASURES)), results)
    MAKE["gather"](followed(fabricate(folder / "two", "rangamani-mnist", cells=20, measures=MEASURES)), results)
    (results / "petzka-mnist" / "notes.md").write_text("Written by hand.\n", encoding="utf-8")
    MAKE["write_page"](results, folder / "results.md", draws=100)
    return folder / "results.md"


def test_studies_fill_their_places_on_the_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "{{" not in text
    assert "**14 networks: 11 measured, 1 excluded, 1 failed, 1 unfinished.**" in text
    assert "| not run at this size yet | 0 of 144 | open |" in text
    assert "Written by hand." in text
    pictures = re.findall(r"\]\(([^)\s]+\.png)\)", text)
    assert len(pictures) == 4 + 4 + 1
    assert all((page.parent / picture).stat().st_size for picture in pictures)
    for link in re.findall(r"\]\((results/[^)\s]+\.csv)\)", text):
        assert (page.parent / link).stat().st_size


def test_few_networks_stand_one_by_one(tmp_path: Path) -> None:
    """Fewer than six have no coefficient; what they measure says something all the same."""
    ran = fabricate(tmp_path / "ran", "petzka-mnist", cells=4, measures=MEASURES, excluded=0, failed=0)
    place = MAKE["gather"](ran, tmp_path / "results")
    told = MAKE["told_of"](place, 100)
    text = MAKE["section"](told)
    assert "Too few networks for coefficients and figures; one by one:" in text
    rows = [line for line in text.splitlines() if re.search(r"^\| .*seed \d+ \|", line)]
    assert len(rows) == len(told.study.measured) == 3
    first = told.study.measured[0]
    assert f"| {first.trained('train_accuracy'):.2%} |" in rows[0]
    assert "**Verdict: open: too few networks so far** (networks: 3 of 48 so far). Here: 3 networks measured." in text


def test_numbers_on_the_page_are_those_of_the_tables(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    folder = page.parent / "results" / "petzka-mnist"
    rows = list(csv.DictReader((folder / "results.csv").read_text(encoding="utf-8").splitlines()))
    assert len(rows) == 14
    found = csv.DictReader((folder / "correlations.csv").read_text(encoding="utf-8").splitlines())
    wanted = {"measure": "rho_sum", "layer": "", "variant": "trained", "gap": "gap_loss"}
    own = {row["at"]: row for row in found if wanted.items() <= row.items()}
    lines = [line for line in text.splitlines() if line.startswith("| ρ, sum over neurons")]
    assert f"**{float(own['end']['pearson']):.2f}**".replace("-", "−") in lines[0]
    assert f"| {float(own['loss-0.1']['pearson']):.2f}".replace("-", "−") in lines[1]


def test_ratios_of_batches_stand_at_every_level(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "**lenet**: how many times larger at the large batch" in text
    assert "| measure | train loss 1 | train loss 0.1 | the end |" in text
    # Made of the same reports, so that every level has the same ratio.
    after = text.partition("**lenet**")[2].splitlines()
    line = next(line for line in after if line.startswith("| Riemannian spectral norm |"))
    _, _, one, other, _, _ = line.split("|")
    assert one == other
    assert "errs least: a mean sign error of" in text


def test_the_place_of_the_data_stays_out(page: Path) -> None:
    plain = json.loads((page.parent / "results" / "petzka-mnist" / "study.json").read_text())
    config = {"data": {"name": "mnist", "folder": "/somewhere"}}
    study = MAKE["read_study"](page.parent / "one")
    assert MAKE["described"]({**plain, "config": config}, study)["config"]["data"] == {"name": "mnist", "folder": None}


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("rangamani-mnist", "rangamani-cifar10", "Verdict: agrees so far"),  # at factors that would be small on MNIST
        ("petzka-mnist", "petzka-cifar10", "At equal train loss, r with the gap at that level"),
    ],
)
def test_networks_on_cifar10_are_told_as_those_on_mnist_are(tmp_path: Path, kind: str, name: str, said: str) -> None:
    folder = followed(fabricate(tmp_path / "out", kind, cells=20, measures=MEASURES))
    plain = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps({**plain, "name": name}))
    place = MAKE["gather"](folder, tmp_path / "results")
    text = MAKE["section"](MAKE["told_of"](place, draws=100))
    assert said in text
    assert f"18 of {len(read_plan(name).cells)} so far" in text


def test_lines_around_small_and_large_batches(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    folder = StudyFolder(tmp_path / "out")
    for group in prepare(read_plan(str(tmp_path / "tiny.toml")), folder):
        assert compute([cell.cell for cell in group]) == DONE
    LINES["main"](str(folder.path), "30", tmp_path)
    found = {path.stem: load(path) for path in sorted((tmp_path / "tiny").glob("*.json"))}
    assert list(found) == ["line-mlp:8-batch-16", "line-mlp:8-batch-30"]
    lines = found["line-mlp:8-batch-16"]
    assert isinstance(lines, Line)
    assert lines.losses.shape == (2 * 3, 21)  # three directions of each of two seeds
    # At t = 0 every direction has the loss of its network.
    middle = lines.losses[:, 10]
    assert middle[0] == middle[1] == middle[2] != middle[3] == middle[4] == middle[5]
    assert len(set(lines.losses[:, 0].tolist())) == 6
    # Another time the same networks replace theirs; networks of other seeds would join them.
    LINES["main"](str(folder.path), "30", tmp_path)
    again = load(tmp_path / "tiny" / "line-mlp:8-batch-16.json")
    assert isinstance(again, Line)
    assert (again.labels, again.losses.tolist()) == (lines.labels, lines.losses.tolist())
    others = replace(lines, labels=tuple(f"{label}0" for label in lines.labels))
    assert LINES["joined"]([lines, others]).losses.shape == (12, 21)


def test_networks_that_start_in_other_ways_have_lines_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)

    def run(*overrides: str) -> Path:
        plan = read_plan(str(tmp_path / "tiny.toml"), overrides=["seeds=1", *overrides])
        folder = StudyFolder(tmp_path / f"out-{len(plan.cells)}")
        for group in prepare(plan, folder):
            assert compute([cell.cell for cell in group]) == DONE
        return folder.path

    LINES["main"](str(run('factors.model.initialization=["xavier_normal", "uniform"]')), "30", tmp_path)
    lines = load(tmp_path / "tiny" / "line-mlp:8-batch-16.json")
    assert isinstance(lines, Line)
    assert lines.losses.shape == (2 * 3, 21)
    with pytest.raises(SpiritLevelError, match="differ in more than seed and initialization"):
        LINES["main"](str(run("factors.training.momentum=[0.0, 0.5, 0.9]")), "30", tmp_path)


def network(batch: int, seed: int, fall: float, factor: float) -> Cell:
    """A network whose norm is 100 √loss times a factor, and whose train loss after epoch t is exp(−fall t)."""

    def norm(loss: float) -> dict[str, Quantity]:
        return {"riemannian_spectral_norm": Quantity(factor * 100 * math.sqrt(loss), 0.0, True)}

    def passed(mark: Mark, epoch: float) -> Passed:
        loss = math.exp(-fall * epoch)
        return Passed(mark, round(1000 * epoch), epoch, {"train_loss": loss}, norm(loss))

    levels = [passed(Mark("loss", level), -math.log(level) / fall) for level in (1.0, 0.1, 0.001, 0.0001)]
    epochs = [passed(Mark("epoch", epoch), epoch) for epoch in (1, 2)]
    end = 10 / fall
    training = {"train_loss": math.exp(-10), "steps": round(1000 * end), "epochs": end}
    factors = {"training.batch_size": batch}
    return Cell(f"{batch}{seed}", factors, seed, "measured", "", training=training, measures=norm(math.exp(-10)), along=(*levels, *epochs))  # fmt: skip


def test_what_the_train_loss_makes_of_a_ratio_at_equal_epochs_is_told_from_the_batch() -> None:
    """At epoch t losses are e⁻³ᵗ and e⁻ᵗ: √ of their ratio is e^t; twice the norm at every loss is left."""
    cells = [network(256, seed, 3.0, 1.0) for seed in (0, 1)] + [network(5000, seed, 1.0, 2.0) for seed in (0, 1)]
    study = described_study(ROOT, {"name": "rangamani-mnist", "gap": "accuracy"}, tuple(cells), 0)
    first, second, end = EQUAL_LOSS["parted"](study, "riemannian_spectral_norm")
    for epoch, found in ((1, first), (2, second)):
        assert found.mark == Mark("epoch", epoch)
        assert found.losses == pytest.approx((math.exp(-3 * epoch), math.exp(-epoch)))
        assert found.ratio == pytest.approx(2 * math.exp(epoch))
        assert found.by_loss == pytest.approx(math.exp(epoch))
        assert found.left == pytest.approx(2)
    assert (end.mark, end.ratio, end.by_loss) == (None, pytest.approx(2), pytest.approx(1))
    told = MAKE["Told"](study, Answers((), {}, (), 100), ROOT)
    assert EQUAL_LOSS["parted_table"](told)[3] == "| epoch 2 | 0.0025 | 0.14 | 15 | 7.4 | 2.0 |"
    assert EQUAL_LOSS["parted_sentence"](told) == (
        "At epoch 2 the large batch has 15 times the norm and 55 times the train loss; small batches at that train loss have "
        "7.4 times. Over 2 epochs compared, 2.0 to 2.0 times are left for the batch itself."
    )


def test_csv_files_are_shortened_and_nothing_else() -> None:
    text = "hash,x,y\n12e45678,0.1234567890123,125\nab,-1.23456789e-05,0.05\n"
    assert MAKE["short"](text) == "hash,x,y\n12e45678,0.123457,125\nab,-1.23457e-05,0.05\n"


def test_the_committed_page_is_filled_and_says_nothing_of_places_on_a_machine() -> None:
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert "{{" not in text
    template = (ROOT / "docs" / "results" / "template.txt").read_text(encoding="utf-8")
    for name in MAKE["TELLERS"]:
        assert f"{{{{{name}}}}}" in template
        assert f"{{{{verdict {name}}}}}" in template
        path = ROOT / "docs" / "results" / name / "study.json"
        assert not path.exists() or json.loads(path.read_text())["config"]["data"]["folder"] is None
    for picture in re.findall(r"\]\((results/[^)\s]+\.(?:png|csv))\)", text):
        assert (ROOT / "docs" / picture).is_file()


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.6, 0.95, "agrees"),
        (0.6, 0.8, "agrees in kind; the interval ends below the paper's 0.91"),
        (0.2, 0.95, "agrees within a wide interval"),
        (0.2, 0.8, "same sign, smaller"),
        (-0.7, 0.96, "open so far, the interval holds zero and the paper's 0.91"),
        (-0.6, 0.5, "disagrees"),
        (math.nan, math.nan, "open: too few networks so far"),
    ],
)
def test_an_interval_that_holds_zero_and_the_papers_coefficient_decides_nothing(
    low: float, high: float, said: str
) -> None:
    beside = sys.modules["tellers"]._beside
    assert beside(Estimate((low + high) / 2, low, high), 0.91) == said


def test_weights_that_are_shipped_are_measured_by_the_command_beside_them(run: Any, tmp_path: Path) -> None:
    write_mnist(tmp_path)
    write_cifar_binary(tmp_path)
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    commands = re.findall(r"^spiritlevel (measure .* --checkpoint .*)$", text, re.MULTILINE)
    named = {command.rpartition(" ")[2] for command in commands}
    places = [ROOT / "docs" / "results" / name for name in MAKE["TELLERS"]]
    shipped = {str(path.relative_to(ROOT)) for place in places for path in place.glob("*.safetensors")}
    assert named == shipped
    assert len(named) >= 2
    for command in commands:
        words = command.replace("DATA", str(tmp_path)).replace("docs/results/", f"{ROOT}/docs/results/").split()
        code, out, err = run(*words, "--measures", "kappa_trace_sum", "--json", "-")
        assert code == 0, err
        assert json.loads(out)["values"]["kappa_trace_sum"]["value"] > 0


def test_networks_that_were_left_out_are_told_together_with_the_range_of_their_numbers(page: Path) -> None:
    study = MAKE["read_study"](page.parent / "one")
    cell = next(cell for cell in study.cells if cell.status == "excluded")
    first, second = (
        replace(cell, reason=f"ended early: train loss {loss}, after 300 epochs") for loss in ("0.123456", "8.5e-2")
    )
    place = ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in cell.factors.items())
    reasons = sys.modules["telling"].reasons
    assert reasons([first]) == [f"1 × {place}: ended early: train loss 0.123, after 300 epochs"]
    assert reasons([first, second]) == [f"2 × {place}: ended early: train loss 0.0850 to 0.123, after 300 epochs"]


def test_an_interval_below_zero_disagrees_on_random_labels(page):
    below, other = Estimate(-0.5, -0.8, -0.1), Estimate(0.1)
    assert sys.modules["tellers"]._of_labels(below, other, other, other) == "disagrees"


@pytest.mark.parametrize(
    ("ours", "plain", "orders", "said"),
    [
        ((0.9, 0.8), 0.7, (0.5, 0.9), "agrees"),
        ((0.88, 0.7), 0.93, (1.0, 0.93), "random labels are told in better order than by the trace (τ 1.00 and 0.93), with a smaller r"),
        ((0.86, 0.8), 0.99, (0.88, 0.92), "random labels are told, but no better than by the trace"),
        ((0.5, -0.1), 0.1, (1.0, 0.0), "open, the interval holds zero"),
    ],
)  # fmt: skip
def test_random_labels_are_judged_by_the_papers_coefficient_and_by_the_order(ours, plain, orders, said):
    of_labels = sys.modules["tellers"]._of_labels
    value, low = ours
    assert of_labels(Estimate(value, low, 1.0), Estimate(plain), *map(Estimate, orders)) == said


def beside(page: Path, folder: Path, further: str) -> Any:
    """The tables of a study twice, the second as those of a further one; what tells of further ones."""
    for name in ("rangamani-mnist", further):
        shutil.copytree(page.parent / "results" / "rangamani-mnist", folder / name)
    return sys.modules["onward"]


def test_trainings_by_the_script_of_the_authors_are_told_batch_by_batch(
    page: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    onward = beside(page, tmp_path, "rangamani-script")
    parts = MAKE["told_of"](tmp_path / "rangamani-mnist", draws=100).parts
    monkeypatch.setattr(onward, "TABLE_4", {part.model: (("256", "98 %", f"of {part.model}"),) for part in parts})
    for part in parts:
        whole, table = onward.trained_on(part, onward.SCRIPT), onward.script_table(part)
        assert {cell.factors["model.name"] for cell in whole.cells} == {part.model}
        passed = [mark for mark in whole.marks if mark.kind == "epoch"]
        rows = sum(len(whole.at(mark).measured) for mark in passed) + len(whole.measured)
        assert len(table) == 4 + rows + 1
        assert f"of {part.model}" in table[-1]
        batches = [row.split("|")[1].strip() for row in table[4:-1]]
        assert batches == sorted(batches, key=int)
        assert set(batches) == {"256", "5000"}
        for cell in whole.measured:
            norm = sys.modules["telling"].significant(cell.measures[onward.NORM].value, 3)
            assert any(row.split("|")[5].strip() == norm for row in table[4:])
        of_seed = {}
        for cell in whole.measured:
            of_seed.setdefault(cell.seed, {})[cell.factors["training.batch_size"]] = cell
        pairs = [(of[256], of[5000]) for of in of_seed.values() if len(of) == 2]
        script = onward.by_script(part)
        factors = [large.measures[onward.NORM].value / small.measures[onward.NORM].value for small, large in pairs]
        assert script.times == pytest.approx(factors)
        assert script.mean == pytest.approx(math.prod(factors) ** (1 / len(factors)))
        losses = [
            math.prod(cell.trained("train_loss") for cell in side) ** (1 / len(pairs))
            for side in zip(*pairs, strict=True)
        ]
        assert script.losses == pytest.approx(losses)
        added = onward.with_those_trained_on(part).cells[len(part.study.cells) :]
        assert [cell.hash for cell in added] == [cell.hash for cell in whole.cells]
        assert all(cell.factors in [own.factors for own in part.study.cells] for cell in added)
    told = MAKE["told_of"](tmp_path / "rangamani-mnist", draws=100)
    monkeypatch.setattr(sys.modules["tellers"], "FACTORS", {"rangamani-mnist": ("67,000", 100.0)})
    monkeypatch.setattr(onward.ByScript, "__str__", lambda _: "THE END")
    monkeypatch.setattr(sys.modules["tellers"], "by_script", lambda part: onward.ByScript((2e5, 1e3), (1e-9, 1e-5)))
    found = sys.modules["tellers"].rangamani_verdict(told)
    assert ", THE END" in found.here
    assert found.verdict.startswith(
        "agrees in kind, with another reason: by the authors' script the factor is 1,000 to 200,000 for "
    )
    shutil.rmtree(tmp_path / "rangamani-script")
    assert onward.script_table(parts[0]) == []
    assert onward.by_script(parts[0]) is None


def test_large_batches_that_never_came_to_the_end_leave_it_open(page: Path, monkeypatch: Any) -> None:
    told = MAKE["told_of"](page.parent / "results" / "rangamani-mnist", draws=100)
    tellers = sys.modules["tellers"]
    ratios = tellers._ratios
    assert "no large batch has come to the end" not in tellers.rangamani_verdict(told).verdict
    monkeypatch.setattr(
        tellers, "_ratios", lambda part: {name: {at: each for at, each in found.items() if at is not None} for name, found in ratios(part).items()}
    )  # fmt: skip
    verdict = tellers.rangamani_verdict(told).verdict
    assert verdict.startswith("open")
    assert "no large batch has come to the end; down to a train loss of " in verdict


def test_a_training_that_went_on_is_told_and_drawn_with_the_small_batches(
    page: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    onward = beside(page, tmp_path, "rangamani-onward")
    monkeypatch.setattr(onward, "NETWORK", "fully_connected")
    part, other = MAKE["told_of"](tmp_path / "rangamani-mnist", draws=100).parts
    assert {cell.factors["model.name"] for cell in onward.trained_on(other).cells} == {other.model}
    whole = onward.trained_on(part)
    monkeypatch.setattr(onward, "read_tables", lambda _: whole)  # of one network
    table = onward.onward_table(part)
    assert len(table) == 4 + 3 * len(whole.measured) + 1  # two marks and the end of each
    ends = [cell.measures["riemannian_spectral_norm"].value for cell in whole.measured]
    assert sys.modules["telling"].significant(ends[-1], 3) in table[-2]
    drawn = onward.with_those_trained_on(part)
    added = drawn.cells[len(part.study.cells) :]
    assert len(added) == len(whole.cells)
    assert {cell.factors["training.batch_size"] for cell in added} == {256}
    assert "; trained to a train loss of " in onward.said_of_those_trained_on(part)
    assert onward.onward_table(other) == []  # of another network nothing was trained on
    assert onward.with_those_trained_on(other) is other.study
    assert onward.said_of_those_trained_on(other) == ""
