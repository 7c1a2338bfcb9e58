"""A history as table, file, page and picture, and as it is shown while the training runs."""

import csv
import io
import json
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import spiritlevel as sl
from small_training import Training
from spiritlevel.tracking.history import Point
from spiritlevel.tracking.live import Live
from spiritlevel.tracking.show import history_page

NAMES = ["rho_sum", "hessian_largest_eigenvalue", "gradient_norm"]


@pytest.fixture(scope="module")
def tracker() -> sl.Tracker:
    training = Training()
    tracker = sl.Tracker(
        training.model, training.data, optimizer=training.optimizer, measures=NAMES, every=4, samples=40
    )
    training.run(9, lambda step, loss: tracker.step(step, loss=loss, epoch=step / 4))
    tracker._point(9, ["gradient_norm"], "budget", (), None, None)  # a point where not all measures were due
    return tracker


def test_the_table_has_every_point_and_measure(tracker, monkeypatch) -> None:
    for width in ("60", "120"):
        monkeypatch.setenv("COLUMNS", width)
        text = str(tracker.history)
        assert all(line.isascii() is not None and len(line) <= int(width) for line in text.splitlines())
        for step in ("0", "4", "8", "9"):
            assert any(line.split()[:1] == [step] for line in text.splitlines())
        assert {"hessian_largest_", "eigenvalue"} <= set(text.split())  # broken between words
    value = tracker.history[0]["rho_sum"].value
    assert f"{value:.4f}"[:5] in text
    assert str(sl.History()) == "nothing has been measured yet"


def test_comma_separated_values_hold_every_number(tracker, tmp_path) -> None:
    text = tracker.history.to_csv(tmp_path / "history.csv")
    assert (tmp_path / "history.csv").read_text() == text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["step"] for row in rows] == ["0", "4", "8", "9"]
    for row, point in zip(rows[:3], tracker.history, strict=False):
        for name in NAMES:
            assert float(row[name]) == point[name].value
            assert float(row[f"{name}_error"]) == point[name].error
        assert float(row["train_loss"]) == point["train_loss"]
    assert rows[3]["rho_sum"] == rows[3]["train_loss"] == ""


def test_json_comes_back_as_it_was(tracker, tmp_path) -> None:
    tracker.history.save(tmp_path / "history.json")
    again = sl.History.load(tmp_path / "history.json")
    assert json.loads(tracker.history.to_json()) == json.loads((tmp_path / "history.json").read_text())
    assert again.to_dict() == tracker.history.to_dict()
    assert again[1]["rho_sum"].layers == tracker.history[1]["rho_sum"].layers
    assert again[1].thresholds == tracker.history[1].thresholds
    assert math.isnan(again[3].train_loss)
    (tmp_path / "other.json").write_text('{"format": "something"}')
    with pytest.raises(ValueError, match="not a saved history"):
        sl.History.load(tmp_path / "other.json")


def test_a_data_frame_where_pandas_is_there(tracker, monkeypatch) -> None:
    made = {}

    def from_records(records, index):
        made.update(records=records, index=index)
        return "frame"

    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=SimpleNamespace(from_records=from_records)))
    assert tracker.history.to_dataframe() == "frame"
    assert made["index"] == "step"
    assert [row["step"] for row in made["records"]] == [0, 4, 8, 9]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(sl.SpiritLevelError, match="to_dataframe needs pandas"):
        tracker.history.to_dataframe()


def test_flat_names_for_loggers(tracker) -> None:
    point = tracker.history[0]
    found = point.scalars()
    assert found["flatness/rho_sum"] == point["rho_sum"].value
    assert found["flatness/rho_sum/layer/0.weight"] == point["rho_sum"].layers["0.weight"]
    assert found["flatness/hessian_largest_eigenvalue/threshold"] == pytest.approx(38.0)
    assert found["flatness/loss"] == point["loss"]
    assert "flatness/rho_sum/layer/0.weight" not in point.scalars(layers=False)
    assert all(math.isfinite(number) for number in found.values())


def test_every_point_reaches_every_logger() -> None:
    training = Training()
    told: list[tuple[int, set[str]]] = []
    logger = [lambda numbers, step: told.append((step, set(numbers)))]
    tracker = sl.Tracker(training.model, training.data, measures=["gradient_norm"], every=2, loggers=logger)
    training.run(3, lambda step, loss: tracker.step(step))
    assert [step for step, _ in told] == [0, 2]
    assert told[0][1] == {"flatness/loss", "flatness/gradient_norm", "flatness/gradient_norm/error"}


def test_an_unknown_name_is_refused_with_what_there_is(tracker) -> None:
    with pytest.raises(KeyError, match="step 0 has no 'rho'; it has step, epoch, loss, train_loss, cost and rho_sum"):
        tracker.history[0]["rho"]
    with pytest.raises(sl.SpiritLevelError, match="the history has no 'rho_sums'; did you mean 'rho_sum'"):
        tracker.history.series("rho_sums")
    assert tracker.history[1:].measures == tuple(NAMES)


# --- pictures --------------------------------------------------------------------------------------------------------


def test_a_picture_draws_the_numbers_with_their_lines(tracker) -> None:
    drawn = sl.plot.history(tracker, "hessian_largest_eigenvalue")
    steps, values, errors = tracker.history.series("hessian_largest_eigenvalue")
    assert [row[1:4] for row in drawn.table.rows] == list(zip(steps, values, errors, strict=True))
    axes = drawn.figure.axes[0]
    curve, line = axes.lines
    assert list(curve.get_ydata()) == values
    assert list(line.get_ydata()) == pytest.approx([38.0] * 3)
    band = axes.collections[0].get_paths()[0].vertices
    assert float(band[:, 1].max()) == pytest.approx(max(v + e for v, e in zip(values, errors, strict=True)))


def test_against_the_loss_and_by_layer(tracker) -> None:
    drawn = sl.plot.history(tracker.history, "rho_sum", against="loss")
    axes = drawn.figure.axes[0]
    assert axes.xaxis_inverted()
    losses = [point["train_loss"] for point in tracker.history[:3]]
    assert sorted(axes.lines[0].get_xdata()) == sorted(losses)
    layered = sl.plot.history({"run": tracker}, "rho_sum", layers=True)
    assert len(layered.figure.axes[0].lines) == 3
    with pytest.raises(sl.SpiritLevelError, match='against must be "step" or "loss"'):
        sl.plot.history(tracker, against="time")
    with pytest.raises(sl.SpiritLevelError, match="there is nothing to draw"):
        sl.plot.history(sl.History())
    with pytest.raises(sl.SpiritLevelError, match="a tracker or its history can be drawn, got int"):
        sl.plot.history(3)


def history_of(layers: int, train_loss: float) -> sl.History:
    value = sl.Value("rho_sum", 1.0, 1e-17, True, True, "by hand", layers={f"{k}.weight": 1.0 for k in range(layers)})
    return sl.History([Point(step, 0.5 / (step + 1), {"rho_sum": value}, train_loss=train_loss) for step in range(2)])


def test_a_loss_that_was_not_told_is_not_called_that_of_the_training() -> None:
    """Without it, curves are drawn against the loss of the probe set, which is another one."""
    for train_loss, words in ((0.25, "training loss"), (math.nan, "loss of the probe set")):
        history = history_of(2, train_loss)
        drawn = sl.plot.history(history, against="loss")
        assert (drawn.figure.axes[0].get_xlabel(), drawn.table.columns[1]) == (words, words)
        assert f"rho_sum against {words}" in history_page(history)
    both = sl.History([*history_of(2, 0.25), *(replace(p, step=p.step + 2) for p in history_of(2, math.nan))])
    assert sl.plot.history(both, against="loss").table.columns[1] == (
        "training loss, or that of the probe set where it was not told"
    )


def test_layers_that_do_not_fit_into_a_picture_are_counted() -> None:
    assert "rho_sum of every layer" in history_page(history_of(12, 0.25))
    page = history_page(history_of(30, 0.25))
    assert "rho_sum of every layer" not in page
    assert "rho_sum of the first 12 of 30 layers" in page
    assert sl.plot.history(history_of(30, 0.25), layers=True).description.endswith("The first 12 of 30 layers.")


def test_the_page_says_what_was_measured(tracker, tmp_path) -> None:
    tracker.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "4 points from step 0 to 9" in page
    for words in ("rho_sum against step", "rho_sum against training loss", "rho_sum of every layer", "Every point"):
        assert words in page
    for words in ("What was measured", "40 (the probe set, chosen by seed 0)", "cross_entropy", "page written"):
        assert words in page
    again = sl.History.from_dict(tracker.history.to_dict())
    assert again.about == tracker.history[:2].about == tracker.history.about
    assert "<script" not in tracker.history._repr_html_()
    assert "gradient_norm against step" in tracker.history._repr_html_()


# --- while it runs ---------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_of_the_terminal_redraws(tracker, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    stream = Terminal()
    live = Live(stream)
    live.show(tracker.history[:1], 0.031)
    live.show(tracker.history, 0.031)
    first, second = stream.getvalue().split("\r")[1:]
    assert first.startswith("step 0  epoch 0  loss ")
    assert second.startswith("step 9  loss ")
    assert len(first) == len(second) == 69
    plain = io.StringIO()
    Live(plain).show(tracker.history, 0.0)
    assert plain.getvalue() == ""


def test_a_cell_of_a_notebook_is_updated(tracker, monkeypatch) -> None:
    shown: list[tuple[str, str]] = []

    class Cell:
        def update(self, content: str) -> None:
            shown.append(("update", content))

    def display(content: str, display_id: bool) -> Cell:
        shown.append(("display", content))
        return Cell()

    shell = type("ZMQInteractiveShell", (), {})()
    notebook = SimpleNamespace(get_ipython=lambda: shell, display=SimpleNamespace(HTML=str, display=display))
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    live = Live()
    live.show(tracker.history, 0.0)
    live.show(tracker.history, 0.0)
    assert [how for how, _ in shown] == ["display", "update"]
    assert "rho_sum against step" in shown[1][1]


def test_live_is_asked_for(monkeypatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    training = Training()
    tracker = sl.Tracker(training.model, training.data, measures=["gradient_norm"], live=True)
    tracker.step(0, force=True)
    assert "gradient_norm" in stream.getvalue()
    assert torch.is_grad_enabled()
