"""The benchmark itself: a quick run, and tables and pictures out of made-up results."""

import json
import re
import sys
from typing import Any

import pytest
import torch

from benchmarks import clock, environment, peers, phases, revisions, subjects
from benchmarks.__main__ import main
from benchmarks.pictures import MOST_SHOWN, accuracy, growth, losses, trained_along
from benchmarks.readme import write_readme
from benchmarks.run import (
    CONTESTS,
    LEVELS,
    Contest,
    Settings,
    _chosen,
    _libraries,
    _with_others,
    run,
    with_earlier,
    write_results,
)
from benchmarks.tables import at_accuracy, cell, digits, factor, read_results
from benchmarks.targets import UNWEIGHED, targets
from benchmarks.tasks import TASKS, distance, number
from benchmarks.worker import OURS, memory_now, memory_peak
from spiritlevel.errors import SpiritLevelError


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A run of this library alone on the tiny network, in processes of their own."""
    folder = tmp_path_factory.mktemp("bench")
    lines = []
    run(Settings(folder, quick=True, say=lines.append))
    main(["table", str(folder)])
    return folder, lines


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
def test_ticks_of_accuracy_are_numbers_as_people_write_them(quick):
    figure = accuracy(read_results(quick[0] / "results"))
    figure.draw_without_rendering()
    for axes in figure.axes:
        assert axes.get_xscale() == axes.get_yscale() == "log"
        assert not any("$" in label.get_text() for label in (*axes.get_xticklabels(), *axes.get_yticklabels()))


@pytest.mark.long
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


MEASUREMENTS = [
    _measured(OURS, "trace", 2.0, 1e-7),
    _measured("PyHessian", "trace", 50.0, 0.03, 0.04),
    _measured("BackPACK", "trace", 9.0, 1e-7),
    _measured(OURS, "layer_traces", 2.0, 1e-7),
    _measured("BackPACK", "layer_traces", 9.0, 1e-7),
    _measured("curvlinops", "layer_traces", 40.0, 0.1, 0.1),
    _measured(OURS, "lambda_1e-4", 5.0, 1e-6),
    _measured(OURS, "operators", 24.0),
    {"library": "curvlinops", "task": "lambda_1e-4", "status": "over budget", "cost": 200.0},
    {"library": "BackPACK", "task": "diagonal", "status": "failed", "reason": "no"},
    _measured(OURS, "everything", 61.0),
]


@pytest.fixture
def results(tmp_path):
    """Results of some libraries on one network at two train losses, written as a run writes them."""
    (tmp_path / "results").mkdir()
    for level in (1.0, 0.001):
        subject = {"name": "conv", "title": "conv", "parameters": 1, "samples": 5, "data": "synthetic"}
        subject |= {"level": level, "loss": 0.9 * level}
        content = {"environment": {"threads": 1, "date": "today"}, "subject": subject, "reference": {}}
        content["measurements"] = MEASUREMENTS
        (tmp_path / "results" / f"conv-{level:g}.json").write_text(json.dumps(content), encoding="utf-8")
    ratios = [("sweep", 0.9, 1.01), ("everything", 0.9, 1.2), ("everything", 0.01, 3.0)]
    records = [
        {"revision": UNWEIGHED, "subject": "conv", "level": 1.0, "loss": loss, "task": task, "ratio": ratio}
        | {"before": [10.0, 12.0], "now": [10.0 * ratio, 12.0 * ratio]}
        for task, loss, ratio in ratios
    ]
    (tmp_path / "results" / "revisions.json").write_text(json.dumps(records), encoding="utf-8")
    return tmp_path


def test_an_estimator_is_charged_what_the_accuracy_asked_would_cost():
    record = _measured("PyHessian", "trace", 50.0, 0.03, 0.04)
    assert at_accuracy(TASKS["trace"], record) == (pytest.approx(50 * 1600), True)
    assert at_accuracy(TASKS["trace"], {**record, "standard_error": 0.0009}) == (50.0, False)


def test_an_answer_that_misses_its_accuracy_does_not_count():
    assert at_accuracy(TASKS["lambda_1e-4"], _measured("PyHessian", "lambda_1e-4", 5.0, 1e-2)) is None
    assert at_accuracy(TASKS["lambda_1e-4"], {"status": "failed"}) is None
    assert at_accuracy(TASKS["lambda_1e-4"], {"status": "over budget", "cost": 3.0}) is None


def test_the_best_peer_sets_the_factor(results):
    found = read_results(results / "results")
    assert factor(found, "conv-0.001", TASKS["trace"]) == (pytest.approx(4.5), "BackPACK", False)
    assert factor(found, "conv-0.001", TASKS["trace"], ["PyHessian"]) == (pytest.approx(40_000), "PyHessian", True)
    assert factor(found, "conv-0.001", TASKS["rho"]) is None


def test_targets_say_what_is_missed(results):
    lines = targets(read_results(results / "results"))

    def verdict(*words):
        (line,) = (line for line in lines if all(word in line for word in words))
        return [part.strip() for part in line.split("|")[-4:-1]]

    assert verdict("default set", "at train loss 0.001") == ["≤ 20", "61", "**missed**"]
    assert verdict("λ_max(H) to 1e-4", "≤") == ["≤ 6", "5", "met"]
    assert verdict("best peer") == ["≥ 3×", "2 of 2 tasks; least 4.5× (total trace, BackPACK)", "met"]
    assert verdict("before samples were weighed") == ["≤ 1.05", "1.01 to 1.20 (the default set)", "**missed**"]


def test_targets_of_memory(results):
    record = {"subject": "conv", "samples": 2000, "task": "everything", "level": 0.001, "peak": 299 << 20}
    record |= {"parameters": 1 << 20, "chunk": 1 << 20, "krylov": 1 << 20}
    content = {
        "environment": {"threads": 1},
        "growth": [],
        "memory": [record, {**record, "level": None, "peak": 301 << 20}],
    }
    (results / "results" / "growth.json").write_text(json.dumps(content), encoding="utf-8")
    lines = [line for line in targets(read_results(results / "results")) if "N = 2,000" in line]
    assert [line.split("|")[-2].strip() for line in lines] == ["met", "**missed**"]
    assert "at train loss 0.001" in lines[0]


def test_costs_against_the_number_of_samples(results):
    record = {
        "subject": "mlp",
        "varied": "samples",
        "level": 0.001,
        "parameters": 9,
        "status": "measured",
        "task": "sweep",
    }
    records = [
        {**record, "value": 500, "cost": 8.0, "loss": 9.6e-4},
        {**record, "value": 60000, "cost": 2.5, "loss": 8e-4},
        {**record, "varied": "width"},
        {**record, "subject": "resnet20", "value": 2000, "cost": 4.0, "level": None},
    ]
    content = {"environment": {"threads": 1}, "growth": records, "memory": []}
    (results / "results" / "growth.json").write_text(json.dumps(content), encoding="utf-8")
    text = write_readme(results).read_text(encoding="utf-8")
    assert "### 784-300-100-10, train loss 0.001\n\n| task | N = 500 | N = 60,000 |" in text
    assert "normalized sharpness | 8 | 2.5 |" in text
    assert "| train loss | 0.00096 | 0.0008 |" in text
    assert "normalized sharpness | 784-300-100-10 at train loss 0.001, N = 60,000 | ≤ 2.2 | 2.5 | **missed** |" in text
    assert "### ResNet-20\n\n| task | N = 2,000 |" in text
    assert "normalized sharpness | ResNet-20, N = 2,000 | ≤ 5 | 4 | met |" in text


def test_how_costs_grow_is_kept_part_by_part(tmp_path):
    path = tmp_path / "growth.json"

    def write(date: str, growth: list[dict[str, Any]], **further: Any) -> dict[str, Any]:
        found = {"environment": {"date": date}, "growth": growth, **further}
        write_results(path, with_earlier(found, path))
        return json.loads(path.read_text(encoding="utf-8"))

    conv, mlp = ({"subject": name, "varied": "samples", "value": 500, "cost": 8.0} for name in ("conv", "mlp"))
    write("one", [conv])
    write("two", [mlp], memory=[{"peak": 1}])
    found = write("three", [{**conv, "cost": 7.0}])
    assert [(each["subject"], each["cost"], each["date"]) for each in found["growth"]] == [
        ("mlp", 8.0, "two"),
        ("conv", 7.0, "three"),
    ]
    assert found["memory"] == [{"peak": 1, "date": "two"}]


def test_costs_against_the_train_loss(results):
    text = write_readme(results).read_text(encoding="utf-8")
    assert "| task | loss 0.9 | loss 0.0009 |" in text
    assert "| total trace | 2 (BackPACK 9) | 2 (BackPACK 9) |" in text
    assert "| the default set | 61 | 61 |" in text
    assert "| a07d5b1 | small conv, loss 0.9 | the default set | 11 | 13.2 | 1.20 |" in text


def test_the_picture_of_train_losses_draws_every_library_and_what_lies_beyond(results):
    found = read_results(results / "results")
    figure = losses(found, trained_along(found))
    figure.draw_without_rendering()
    first = figure.axes[0]
    drawn = {line.get_label(): list(line.get_ydata()) for line in first.get_lines() if len(line.get_ydata())}
    assert drawn[OURS] == [2.0, 2.0]
    assert drawn["BackPACK"] == [9.0, 9.0]
    assert len(drawn) == 3
    assert all(
        MOST_SHOWN / 2 < cost <= MOST_SHOWN for cost in max(drawn.values())
    )  # 40 gradients for 10 % are 400,000 here
    assert first.get_xlim()[0] > first.get_xlim()[1]  # training goes to the right
    assert not any("$" in label.get_text() for label in first.get_xticklabels())


def test_the_readme_keeps_what_is_written_by_hand(results):
    path = write_readme(results)
    text = path.read_text(encoding="utf-8")
    path.write_text(f"By hand.\n\n{text}\nAlso by hand.\n", encoding="utf-8")
    write_readme(results)
    again = path.read_text(encoding="utf-8")
    assert again.startswith("By hand.")
    assert again.endswith("Also by hand.\n")
    assert "| 2 (1e-07) |" in again
    assert "BackPACK fails on small conv at train loss 0.001: no" in again


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


def test_an_unknown_subject_or_library_is_refused(tmp_path):
    with pytest.raises(
        SpiritLevelError, match=r"unknown subject 'lenet'; known: mlp, conv, .*one train loss: mlp-0.001"
    ):
        run(Settings(tmp_path, subjects=("lenet",)))
    with pytest.raises(SpiritLevelError, match="unknown library 'pyhessian'; known: spiritlevel, PyHessian"):
        run(Settings(tmp_path, libraries=("pyhessian",)))


def test_a_network_is_asked_at_all_train_losses_or_at_one():
    assert [contest.level for contest in _chosen(["conv"])] == list(LEVELS)
    assert [contest.key for contest in _chosen(["conv-0.01", "resnet20"])] == ["conv-0.01", "resnet20"]


def test_training_ends_where_the_loss_first_lies_below_the_level(tmp_path):
    losses = []
    for level in (1.0, 0.1):
        subjects.prepare(subjects.RECIPES["tiny"].at(level), tmp_path / "tiny.pt", None, None)
        found = subjects.load(tmp_path / "tiny.pt")
        losses.append(float(torch.nn.functional.cross_entropy(found.model(found.x), found.y).detach()))
        assert subjects.origin(tmp_path / "tiny.pt")["loss"] == pytest.approx(losses[-1], rel=1e-3)
        assert 0.6 * level < losses[-1] < level
    with pytest.raises(SpiritLevelError, match=r"the train loss is still 2.* after 1 epochs, not 1e-09"):
        subjects.train(found.model.apply(_forget), found.x, found.y, 1, 1e-9)


def _forget(module):
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def test_answers_of_libraries_that_are_not_asked_again_stay(results):
    path = results / "results" / "conv-1.json"
    before = json.loads(path.read_text(encoding="utf-8"))
    again = {**before, "measurements": [_measured(OURS, "trace", 1.0, 1e-7)]}
    found = _with_others(again, path)
    assert [record["cost"] for record in found["measurements"] if record["library"] == OURS] == [1.0]
    assert {record["library"] for record in found["measurements"]} == {record["library"] for record in MEASUREMENTS}
    assert found["kept_from"] == "today"
    with pytest.raises(SpiritLevelError, match="other weights or data"):
        _with_others({**again, "subject": {**before["subject"], "loss": 0.5}}, path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "tiny.pt"
    subjects.prepare(subjects.RECIPES["tiny"], path, None, None)
    return path


def test_phases_add_up_to_the_call_and_name_what_exists(tiny):
    found = phases.phases_of(subjects.load(tiny), TASKS["everything"])
    named = set(phases.PHASES.values())
    assert found.calls["survey"] == 1
    assert (
        {"sweep", "H·v on all data", "check of the gradient", "layers: products on all data"}
        <= set(found.calls)
        <= named
    )
    assert all(seconds >= 0 for seconds in found.seconds.values())
    assert next(iter(found.seconds)) == phases.REST


def test_time_inside_a_phase_is_not_counted_twice(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(phases.time, "process_time", lambda: float(next(ticks)))
    found = phases.Phases()  # at 0
    with found.of("outer"), found.of("inner"):  # at 1 and 2, back at 3 and 4
        pass
    found.stop()  # at 5
    assert found.seconds == {phases.REST: 2.0, "outer": 2.0, "inner": 1.0}


@pytest.mark.long
def test_a_revision_beside_itself_finds_the_same_number(tiny):
    (found,) = revisions.compared(tiny, revisions.CLONE / "src", ["trace"], 1)
    assert found["apart"] == 0
    assert len(found["before"]) == len(found["now"]) == 1
    assert found["ratio"] > 0


def test_the_ratio_of_revisions_is_a_median_over_rounds():
    answers = {"before": [10.0, 10.0, 20.0], "now": [11.0, 9.0, 24.0]}
    found = revisions._summary(
        "sweep", {key: [{"cost": c, "value": 2.0} for c in costs] for key, costs in answers.items()}
    )
    assert (found["ratio"], found["apart"]) == (1.1, 0.0)


def test_an_environment_that_cannot_be_made_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(environment.sys, "executable", "false")
    with pytest.raises(SpiritLevelError, match="bench --quick"):
        environment.build(tmp_path / "venv")


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of Linux's C library")
def test_memory_that_was_freed_before_does_not_hide_what_a_call_takes():
    """As a warm-up leaves it: freed blocks below one that is still held, which stay with the process."""
    blocks = [bytearray(100_000) for _ in range(400)]
    held = bytearray(100_000)
    del blocks
    before = memory_now()
    blocks = [bytearray(100_000) for _ in range(400)]
    assert memory_peak() - before > 30_000_000
    del blocks, held
