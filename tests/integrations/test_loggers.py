"""Loggers, with the real packages: what was logged is read back by their own readers."""

import csv
import json
import struct
import sys
import time
from pathlib import Path

import pytest

import spiritlevel as sl
from small_training import Training
from spiritlevel.integrations import loggers

NAMES = ["flatness/rho_sum", "flatness/rho_sum/layer/0.weight", "flatness/loss"]


def followed(logger) -> sl.History:
    training = Training()
    tracker = sl.Tracker(training.model, training.data, measures=["rho_sum"], every=2, samples=20, loggers=[logger])
    training.run(3, lambda step, loss: tracker.step(step))
    return tracker.history


def expected(history: sl.History, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.scalars()[name]) for point in history]


def test_comma_separated_values(tmp_path) -> None:
    history = followed(loggers.CSVLogger(tmp_path / "deep" / "log.csv"))
    loggers.CSVLogger(tmp_path / "deep" / "log.csv")({"later": 1.0}, 9)  # a run that goes on
    rows = list(csv.DictReader((tmp_path / "deep" / "log.csv").read_text().splitlines()))
    for name in NAMES:
        assert [(int(row["step"]), float(row["value"])) for row in rows if row["name"] == name] == expected(
            history, name
        )
    assert rows[-1] == {"step": "9", "name": "later", "value": "1.0"}


def test_json_lines(tmp_path) -> None:
    history = followed(loggers.JSONLinesLogger(tmp_path / "log.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line.pop("step") for line in lines] == [0, 2]
    assert lines == [point.scalars() for point in history]


def test_tensorboard(tmp_path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    history = followed(loggers.TensorBoardLogger(tmp_path))
    events = reader.EventAccumulator(str(tmp_path))
    events.Reload()
    for name in NAMES:
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected(history, name)]
    writer = loggers.TensorBoardLogger(tmp_path / "other").writer
    assert loggers.TensorBoardLogger(writer).writer is writer


@pytest.mark.long
def test_weights_and_biases_offline(tmp_path) -> None:
    wandb = pytest.importorskip("wandb")
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
    logger = loggers.WandbLogger(mode="offline", dir=str(tmp_path), project="flatness", settings=settings)
    logger.run.log({"mine": 1.0})
    history = followed(logger)
    logger.run.finish()
    path, rows = next(tmp_path.glob("wandb/offline-run-*/*.wandb")), []
    for _ in range(200):  # a process of the package's own writes it
        rows = wandb_rows(path)
        if len(rows) == 3:
            break
        time.sleep(0.1)
    for name in NAMES:
        found = [(row["flatness/step"], row[name]) for row in rows if name in row]
        assert found == expected(history, name)


def wandb_rows(path: Path) -> list[dict]:
    """The history that an offline run wrote: protocol buffers in the log format of LevelDB, after a header."""
    from wandb.proto import wandb_internal_pb2

    rows, whole = [], b""
    data, place = path.read_bytes(), 7
    while place < len(data):
        if (left := 32768 - place % 32768) < 7:  # the rest of a block is padding
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole = (whole if kind in (3, 4) else b"") + data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record.FromString(whole)
            if record.WhichOneof("record_type") == "history":
                rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
    return rows


def test_mlflow_in_a_local_folder(tmp_path, monkeypatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = loggers.MLflowLogger(tracking_uri=tmp_path.as_uri(), experiment="trainings")
    history = followed(logger)
    for name in NAMES:
        key = name.replace("/layer/", ".layer.")
        found = [(each.step, each.value) for each in logger.client.get_metric_history(logger.run_id, key)]
        assert found == expected(history, name)
    again = loggers.MLflowLogger(logger.run_id, tracking_uri=tmp_path.as_uri())
    again({"flatness/epsilon_sharpness(epsilon=0.1)": 2.0}, 5)
    (metric,) = logger.client.get_metric_history(logger.run_id, "flatness/epsilon_sharpness_epsilon_0.1_")
    assert (metric.step, metric.value) == (5, 2.0)
    second = loggers.MLflowLogger(tracking_uri=tmp_path.as_uri(), experiment="trainings")
    assert second.run_id != logger.run_id


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(sl.SpiritLevelError, match=r"wandb is not installed .*: pip install spiritlevel\[wandb\]"):
        loggers.WandbLogger()


def test_report_scalars_are_the_same_names() -> None:
    training = Training()
    report = sl.measure(training.model, training.data, measures=["rho_sum", "hessian_trace"])
    found = report.scalars("flat", layers=False)
    assert found == {
        "flat/loss": report.loss,
        "flat/rho_sum": report["rho_sum"].value,
        "flat/rho_sum/error": report["rho_sum"].error,
        "flat/hessian_trace": report["hessian_trace"].value,
        "flat/hessian_trace/error": report["hessian_trace"].error,
    }
    assert report.scalars()["flatness/hessian_trace/layer/0.bias"] == report["hessian_trace"].layers["0.bias"]
