"""Tables of results grow over days and machines: what several runs of one study left is joined, every network once."""

from __future__ import annotations

import csv
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study.results import GAPS
from study_samples import fabricate, followed

MAKE = runpy.run_path(str(Path(__file__).resolve().parents[1] / "docs" / "results" / "make.py"))


def one_run(folder: Path, name: str, cells: slice, seed: int = 0) -> Path:
    """A run of some networks of one study, as one machine leaves it."""
    whole = followed(fabricate(folder / name, "petzka-mnist", excluded=0, failed=0, unfinished=0, seed=seed))
    plain = json.loads((whole / "study.json").read_text())
    plain["config"]["data"] = {"name": "mnist", "folder": f"/{name}"}
    plain["config"] = {**plain["config"], "seeds": [0, 1, 2, 3, 4, 5], "training": {"epochs": 100}}
    plain["cells"] = plain["cells"][cells]
    (whole / "study.json").write_text(json.dumps(plain))
    return whole


def table(results: Path, name: str = "results.csv", study: str = "petzka-mnist") -> dict[str, dict[str, str]]:
    rows = csv.DictReader((results / study / name).read_text(encoding="utf-8").splitlines())
    return {f"{row['hash']} {row.get('level', '')}": row for row in rows}


def test_runs_of_several_machines_add_up(tmp_path: Path) -> None:
    one, other = one_run(tmp_path, "one", slice(0, 8)), one_run(tmp_path, "other", slice(4, 14), seed=1)
    cells = [entry["hash"] for entry in json.loads((one / "study.json").read_text())["cells"]]
    finished, unfinished = one / "cells" / cells[0] / "result.json", one / "cells" / cells[5] / "result.json"
    unfinished.unlink()
    (other / "cells" / cells[6] / "result.json").unlink()
    MAKE["gather"](one, tmp_path / "apart")
    first, levels = table(tmp_path / "apart"), table(tmp_path / "apart", "levels.csv")
    MAKE["gather"](one, tmp_path / "results")
    MAKE["gather"](other, tmp_path / "results")
    rows = table(tmp_path / "results")
    assert len(rows) == 14
    assert {row["status"] for row in rows.values()} == {"measured"}  # what one of them finished is finished
    for kept in (cells[0], cells[6]):  # not in the other run, or not finished there
        before = first[f"{kept} "]
        # A gap is a difference of two columns and follows their six digits.
        stays = [name for name in before if name not in GAPS]
        assert [rows[f"{kept} "][name] for name in stays] == [before[name] for name in stays]
    again = table(tmp_path / "results", "levels.csv")
    assert len(again) == 28
    assert again[f"{cells[0]} 1.0"]["rho_sum"] == levels[f"{cells[0]} 1.0"]["rho_sum"]
    # Networks of before stay when a run is gathered again, and gathering twice changes nothing.
    text = (tmp_path / "results" / "petzka-mnist" / "results.csv").read_text()
    finished.unlink()
    MAKE["gather"](one, tmp_path / "results")
    MAKE["gather"](other, tmp_path / "results")
    assert (tmp_path / "results" / "petzka-mnist" / "results.csv").read_text() == text


def test_networks_that_were_made_differently_are_not_joined(tmp_path: Path) -> None:
    one, other = one_run(tmp_path, "one", slice(0, 8)), one_run(tmp_path, "other", slice(8, 14))
    plain = json.loads((other / "study.json").read_text())
    plain["config"]["training"] = {"epochs": 5}
    (other / "study.json").write_text(json.dumps(plain))
    MAKE["gather"](one, tmp_path / "results")
    with pytest.raises(
        SpiritLevelError, match=r"made differently: training\.epochs is 100 there and 5 here\. Run the study"
    ):
        MAKE["gather"](other, tmp_path / "results")
    assert len(table(tmp_path / "results")) == 8


def test_networks_that_may_train_longer_at_a_constant_rate_are_joined(tmp_path: Path) -> None:
    for name, cells, epochs in (("one", slice(0, 8), 300), ("other", slice(8, 14), 200)):
        folder = one_run(tmp_path, name, cells)
        plain = json.loads((folder / "study.json").read_text())
        plain["config"]["training"] = {"epochs": epochs, "schedule": "constant"}
        (folder / "study.json").write_text(json.dumps(plain))
        MAKE["gather"](folder, tmp_path / "results")
    assert len(table(tmp_path / "results")) == 14
    described = json.loads((tmp_path / "results" / "petzka-mnist" / "study.json").read_text())
    assert described["config"]["training"]["epochs"] == 300


def one_network(folder: Path, number: int, name: str, model: str, **settings: Any) -> tuple[Path, dict[str, Any]]:
    """A fabricated run of one network, whose cells are not those of other runs, and its description without the network."""
    fabricate(folder, "rangamani-mnist", excluded=0, failed=0, unfinished=0, cells=10)
    plain = json.loads((folder / "study.json").read_text())
    plain["name"] = name
    plain["factors"].pop("model.name")
    plain["config"] = {"model": {"name": model, **settings}, "training": {"learning_rate": 0.1}, "seeds": [*range(5)]}
    for entry in plain["cells"]:
        del entry["factors"]["model.name"]
        renamed = f"{number}{entry['hash'][1:]}"
        moved = (folder / "cells" / entry["hash"]).rename(folder / "cells" / renamed) / "result.json"
        moved.write_text(json.dumps({**json.loads(moved.read_text()), "hash": renamed}))
        entry["hash"] = renamed
    (folder / "study.json").write_text(json.dumps(plain))
    return folder, plain


def test_a_run_of_one_network_joins_those_of_others(tmp_path: Path) -> None:
    """A factor of the built-in study that a run sets to one value is a factor of the tables."""
    for number, model in enumerate(("mnist-fc", "lenet")):
        MAKE["gather"](one_network(tmp_path / model, number, "rangamani-mnist", model)[0], tmp_path / "results")
    study = MAKE["read_tables"](tmp_path / "results" / "rangamani-mnist")
    assert {name: len(part.measured) for name, part in study.parts.items()} == {"mnist-fc": 10, "lenet": 10}
    assert study.factors["model.name"] == ["mnist-fc", "lenet"]


def test_a_run_that_ties_two_settings_joins_one_that_fixes_them(tmp_path: Path) -> None:
    """The built-in study ties the width to the network: so do the tables, whichever of both a run did."""
    folder, _ = one_network(tmp_path / "fixed", 0, "rangamani-cifar10", "alexnet", width=0.25)
    MAKE["gather"](folder, tmp_path / "results")
    folder, plain = one_network(tmp_path / "tied", 1, "rangamani-cifar10", "vgg16")
    network = {"model.name": "vgg16", "model.width": 0.125}
    plain["tied"] = [list(network), *plain["tied"]]
    plain["factors"] = {**{name: [value] for name, value in network.items()}, **plain["factors"]}
    for entry in plain["cells"]:
        entry["factors"] = {**network, **entry["factors"]}
    (folder / "study.json").write_text(json.dumps(plain))
    MAKE["gather"](folder, tmp_path / "results")
    described = json.loads((tmp_path / "results" / "rangamani-cifar10" / "study.json").read_text())
    assert described["tied"][0] == ["model.name", "model.width"]
    assert described["factors"]["model.name"] == ["alexnet", "vgg16"]
    assert described["factors"]["model.width"] == [0.25, 0.125]
    assert len(table(tmp_path / "results", study="rangamani-cifar10")) == 20
