"""The benchmark itself: a quick run, and tables and pictures out of made-up results."""

import json
import re

import pytest
import torch

from benchmarks import clock, environment, peers, subjects
from benchmarks.__main__ import main
from benchmarks.pictures import accuracy, growth
from benchmarks.run import CONTESTS, Contest, Settings, _libraries, run
from benchmarks.tables import at_accuracy, cell, digits, factor, read_results, targets, write_readme
from benchmarks.tasks import TASKS, distance, number
from benchmarks.worker import OURS
from spiritlevel.errors import SpiritLevelError


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A run of this library alone on the tiny network, in processes of their own."""
    folder = tmp_path_factory.mktemp("bench")
    lines = []
    run(Settings(folder, quick=True, say=lines.append))
    main(["table", str(folder)])
    return folder, lines


@pytest.mark.slow
def test_a_quick_run_measures_every_task(quick):
    folder, lines = quick
    found = json.loads((folder / "results" / "tiny.json").read_text(encoding="utf-8"))
    assert {record["task"] for record in found["measurements"]} == set(TASKS)
    for record in found["measurements"]:
        assert record["status"] == "measured", record
        assert record["library"] == OURS
        assert record["cost"] > 0
        if record["error"] is not None:
            assert record["error"] <= TASKS[record["task"]].accuracy
    assert found["environment"]["threads"] == 1
    assert found["reference"]["diagonal entries"] < 1e-9
    assert any("training" in line for line in lines)


@pytest.mark.slow
def test_tables_and_pictures_are_the_same_bytes_again(quick):
    folder, _ = quick
    made = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert set(made) == {"README.md", "accuracy.svg"}
    main(["table", str(folder)])
    assert {name: (folder / name).read_bytes() for name in made} == made


def test_ticks_of_growth_are_numbers_as_people_write_them():
    records = [
        {
            "subject": "mlp",
            "task": "sweep",
            "varied": varied,
            "value": value,
            "parameters": value,
            "status": "measured",
            "cost": value / 50,
        }
        for varied in ("samples", "width", "classes")
        for value in (100, 1000, 10000)
    ]
    figure = growth(records)
    figure.draw_without_rendering()
    for axes in figure.axes:
        texts = [label.get_text() for label in axes.get_xticklabels()]
        assert len(texts) >= 3
        assert not any("$" in text for text in texts)
        assert axes.get_xscale() == axes.get_yscale() == "log"


@pytest.mark.slow
def test_ticks_of_accuracy_are_numbers_as_people_write_them(quick):
    figure = accuracy(read_results(quick[0] / "results"))
    figure.draw_without_rendering()
    for axes in figure.axes:
        assert axes.get_xscale() == axes.get_yscale() == "log"
        assert not any("$" in label.get_text() for label in (*axes.get_xticklabels(), *axes.get_yticklabels()))


@pytest.mark.slow
def test_results_hold_no_paths(quick):
    folder, _ = quick
    text = (folder / "results" / "tiny.json").read_text(encoding="utf-8")
    assert str(folder) not in text
    assert not re.search(r"/(home|root|tmp|usr)/", text)


def _measured(library, task, cost, error=None, standard_error=None):
    return {
        "library": library,
        "task": task,
        "status": "measured",
        "asked": "something",
        "cost": cost,
        "error": error,
        "standard_error": standard_error,
    }


@pytest.fixture
def results(tmp_path):
    """Results of two libraries on one subject, written as a run writes them."""
    subject = {"name": "conv", "title": "conv", "parameters": 1, "samples": 5, "data": "synthetic"}
    measurements = [
        _measured(OURS, "trace", 2.0, 1e-7),
        _measured("PyHessian", "trace", 50.0, 0.03, 0.04),
        _measured("BackPACK", "trace", 9.0, 1e-7),
        _measured(OURS, "lambda_1e-4", 10.0, 1e-6),
        _measured(OURS, "operators", 24.0),
        {"library": "curvlinops", "task": "lambda_1e-4", "status": "over budget", "cost": 200.0},
        {"library": "BackPACK", "task": "diagonal", "status": "failed", "reason": "no"},
        _measured(OURS, "everything", 61.0),
    ]
    content = {"environment": {"threads": 1}, "subject": subject, "reference": {}, "measurements": measurements}
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "conv.json").write_text(json.dumps(content), encoding="utf-8")
    return tmp_path


def test_an_estimator_is_charged_what_the_accuracy_asked_would_cost():
    record = _measured("PyHessian", "trace", 50.0, 0.03, 0.04)
    assert at_accuracy(TASKS["trace"], record) == (pytest.approx(50 * 16), True)
    assert at_accuracy(TASKS["trace"], {**record, "standard_error": 0.009}) == (50.0, False)


def test_an_answer_that_misses_its_accuracy_does_not_count():
    assert at_accuracy(TASKS["lambda_1e-4"], _measured("PyHessian", "lambda_1e-4", 5.0, 1e-2)) is None
    assert at_accuracy(TASKS["lambda_1e-4"], {"status": "failed"}) is None
    assert at_accuracy(TASKS["lambda_1e-4"], {"status": "over budget", "cost": 3.0}) is None


def test_the_best_peer_sets_the_factor(results):
    found = read_results(results / "results")
    assert factor(found, "conv", TASKS["trace"]) == (pytest.approx(4.5), "BackPACK", False)
    assert factor(found, "conv", TASKS["trace"], ["PyHessian"]) == (pytest.approx(400), "PyHessian", True)
    assert factor(found, "conv", TASKS["rho"]) is None


def test_targets_say_what_is_missed(results):
    lines = targets(read_results(results / "results"))
    assert next(line for line in lines if "default set" in line).endswith("| ≤ 60 | 61 | **missed** |")
    assert next(line for line in lines if "λ_max(H) to 1e-4" in line).endswith("| ≤ 15 | 10 | met |")
    assert next(line for line in lines if "further operator" in line).endswith("| ≤ 0.5 | 0.70 | **missed** |")


def test_the_readme_keeps_what_is_written_by_hand(results):
    path = write_readme(results)
    text = path.read_text(encoding="utf-8")
    path.write_text(f"By hand.\n\n{text}\nAlso by hand.\n", encoding="utf-8")
    write_readme(results)
    again = path.read_text(encoding="utf-8")
    assert again.startswith("By hand.")
    assert again.endswith("Also by hand.\n")
    assert "| 2 (1e-07) |" in again
    assert "BackPACK fails on small conv: no" in again


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (None, "–"),
        ({"status": "over budget", "cost": 123.4}, "> 123"),
        ({"status": "failed"}, "fails"),
        (_measured("x", "trace", 2.345, 1e-6), "2.3 (1e-06)"),
        (_measured("x", "trace", 89.07, 0.04, 0.043), "89.1 (±4.3 %)"),
        (_measured("x", "everything", 12.0), "12"),
    ],
)
def test_cells(record, text):
    assert cell(record) == text


def test_digits():
    assert [digits(value) for value in (0.123, 9.94, 9.96, 99.4, 1234.5)] == ["0.12", "9.9", "9.96", "99.4", "1234"]


def test_distance_of_numbers_is_the_worst_and_of_arrays_the_norm():
    assert distance(TASKS["trace"], number(1.1), number(1.0)) == pytest.approx(0.1)
    truth = {"a": torch.tensor([3.0, 4.0]).double()}
    assert distance(TASKS["diagonal"], {"a": torch.tensor([3.0, 5.0])}, truth) == pytest.approx(0.2)


def test_the_clock_stops_what_takes_too_long():
    def forever():
        while True:
            pass

    limit = clock.Limit()
    with pytest.raises(clock.OutOfTime), clock.limited(0.05, limit):
        forever()
    assert limit.reached


def test_every_contest_asks_what_exists_and_batches_are_equal():
    for contest in CONTESTS:
        recipe = subjects.RECIPES[contest.recipe]
        assert recipe.samples % recipe.batch == 0
        assert set(contest.ours) | set(contest.theirs) <= set(TASKS)
        assert set(_libraries(contest)) <= {OURS, *peers.LIBRARIES}


def test_peers_are_asked_only_what_they_can_do():
    assert _libraries(Contest("conv", ("rho",), ("rho",), 1, 1, 1)) == {OURS: ("rho",)}


def test_the_gradient_is_that_of_the_mean_loss(tmp_path):
    recipe = subjects.RECIPES["tiny"]
    subjects.prepare(recipe, tmp_path / "tiny.pt", None, None)
    subject = subjects.load(tmp_path / "tiny.pt")
    loss = torch.nn.functional.cross_entropy(subject.model(subject.x), subject.y)
    expected = torch.autograd.grad(loss, list(subject.model.parameters()))
    for found, truth in zip(subject.gradient(), expected, strict=True):
        torch.testing.assert_close(found, truth)


def test_an_unknown_subject_is_refused(tmp_path):
    with pytest.raises(SpiritLevelError, match="unknown subject 'lenet'; known: mlp, conv"):
        run(Settings(tmp_path, subjects=("lenet",)))


def test_an_environment_that_cannot_be_made_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(environment.sys, "executable", "false")
    with pytest.raises(SpiritLevelError, match="bench --quick"):
        environment.build(tmp_path / "venv")
