"""A study's page: the answer is the numbers', nothing is dropped in silence, and it reads in a browser."""

from __future__ import annotations

import csv
import errno
import json
import os
import re
import shutil
from dataclasses import replace
from html import unescape
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from pages import HOSTILE, Outline, requests, started_browser, visit  # noqa: F401
from spiritlevel.errors import SpiritLevelError
from spiritlevel.study.correlate import answers
from spiritlevel.study.plan import read_plan
from spiritlevel.study.results import read_study
from spiritlevel.study.show import page as report_module
from spiritlevel.study.show.answer import study_answer
from spiritlevel.study.show.figures import ByLevel, boxes, gap_scatter, lines, ranking
from spiritlevel.study.show.page import study_page, study_title, write_study_report
from spiritlevel.study.statistics import Estimate
from study_samples import GRIDS, fabricate

MEASURES = ("hessian_trace", "riemannian_spectral_norm", "normalized_sharpness", "kappa_max")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every kind of study with its page written."""
    root = tmp_path_factory.mktemp("studies")
    whole = {"excluded": 0, "failed": 0, "unfinished": 0}
    for kind in GRIDS:
        options: dict[str, Any] = whole if kind == "dinh-attack" else {}
        write_study_report(fabricate(root / kind, kind, measures=MEASURES, **options))
    return {kind: root / kind for kind in GRIDS}


@pytest.fixture(scope="module")
def _written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = fabricate(tmp_path_factory.mktemp("small"), cells=6, measures=MEASURES[:1])
    assert write_study_report(folder) == folder / "report.html"
    return folder


@pytest.fixture
def small(_written: Path, tmp_path: Path) -> Path:
    """A small study of the test's own, with its page written."""
    return shutil.copytree(_written, tmp_path / "small")


def page(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


def sections(html: str) -> list[str]:
    return re.findall(r'<section id="([^"]+)"', html)


def section(html: str, key: str) -> str:
    found = re.search(rf'<section id="{key}".*?</section>', html, re.DOTALL)
    assert found is not None, key
    return unescape(re.sub(r"<[^>]+>", " ", found[0].replace("<wbr>", "")))


def test_three_files_are_written_and_the_path_is_the_pages(small: Path) -> None:
    assert {path.name for path in small.iterdir()} == {
        "cells", "study.json", "results.csv", "correlations.csv", "report.html",
    }  # fmt: skip
    before = page(small)
    assert write_study_report(small) == small / "report.html"
    assert page(small) == before


@pytest.mark.slow  # the first to have the pages written
def test_the_first_sentence_is_the_winner_of_the_table(folders: dict[str, Path]) -> None:
    folder = folders["petzka-mnist"]
    with (folder / "correlations.csv").open(encoding="utf-8") as stream:
        best = next(row for row in csv.DictReader(stream) if row["best"] == "true" and row["variant"] == "trained")
    first = re.search(r'<p class="sl-answer">(.*?)</p>', page(folder))
    assert first is not None
    tau, low, high = (float(best[key]) for key in ("kendall", "kendall_low", "kendall_high"))
    assert unescape(first[1]) == (
        f"{best['measure']} ranks the 45 networks best: Kendall τ {tau:.2f}, 95 % interval {low:.2f} to {high:.2f}."
    )


def test_every_network_that_was_left_out_is_listed_with_its_reason(folders: dict[str, Path]) -> None:
    html = page(folders["petzka-mnist"])
    assert "45 of 48 networks are measured, 1 excluded, 1 failed, 1 unfinished, each listed below." in html
    left = section(html, "left-out")
    cells = [cell for cell in read_study(folders["petzka-mnist"]).cells if cell.status != "measured"]
    assert len(cells) == 3
    for cell in cells:
        assert cell.hash in left
        assert f"{cell.status}: {cell.reason}" in left
    assert "batch_size 8000, learning_rate 1.6, initialization uniform, seed 5" in left


def test_nothing_left_out_is_said_too(folders: dict[str, Path]) -> None:
    html = page(folders["dinh-attack"])
    assert "3 of 3 networks are measured; none is left out." in html
    assert "left-out" not in sections(html)


def test_the_sections_are_those_of_the_paper(folders: dict[str, Path]) -> None:
    shared = ["left-out", "correlations", "training", "made", "cite"]
    assert sections(page(folders["petzka-mnist"])) == ["ranking", "scatter", "rescaling", "layers", "factors", *shared]
    assert sections(page(folders["tsuzuku-mnist"])) == ["ranking", "scatter", "layers", "factors", *shared]
    parts = [f"{key}-{name}" for name in ("fully-connected", "lenet") for key in ("ranking", "scatter", "layers")]
    assert sections(page(folders["rangamani-mnist"])) == [*parts, "ranking-all-together", "factors", *shared]
    assert sections(page(folders["dinh-attack"])) == [
        "attack", "ranking", "scatter", "layers", "correlations", "training", "made", "cite",
    ]  # fmt: skip


def test_batch_sizes_are_boxes_and_label_noise_is_a_line(folders: dict[str, Path]) -> None:
    boxed, lined = (section(page(folders[kind]), "factors") for kind in ("rangamani-mnist", "tsuzuku-mnist"))
    assert "riemannian_spectral_norm by batch_size" in boxed
    assert "How many times larger at batch_size 5000 than at 256, lenet" in boxed
    assert "normalized_sharpness by label_noise" in lined


def test_rescaling_is_told(folders: dict[str, Path]) -> None:
    html = page(folders["petzka-mnist"])
    assert (
        "After a random rescaling that changes no function, 3 of 4 measures rank as before; hessian_trace falls" in html
    )
    assert "hessian_trace before and after" in html


def test_the_attack_is_told_first(folders: dict[str, Path]) -> None:
    first = re.search(r'<p class="sl-answer">(.*?)</p>', page(folders["dinh-attack"]))
    assert first is not None
    assert first[1] == (
        "An attack that leaves the outputs alone (largest change 1.0×10⁻¹⁵) makes hessian_trace up to 10⁶ times larger; "
        "3 of 4 measures stay where they were."
    )
    assert "3 measured networks are too few to say which measure ranks them" in page(folders["dinh-attack"])


def test_what_differs_from_the_built_in_study_is_listed(folders: dict[str, Path]) -> None:
    made = section(page(folders["petzka-mnist"]), "made")
    assert "Different from the built-in study of this name" in made
    assert "factors.training.learning_rate" in made


def test_a_study_of_ones_own_has_nothing_to_differ_from(small: Path) -> None:
    assert "built-in study" in page(small)
    rename(small, "mine")
    write_study_report(small)
    assert "built-in study" not in page(small)


def rename(folder: Path, name: str, **fields: Any) -> None:
    plain = json.loads((folder / "study.json").read_text(encoding="utf-8"))
    (folder / "study.json").write_text(json.dumps({**plain, "name": name, **fields}), encoding="utf-8")


@pytest.mark.parametrize(("cells", "excluded"), [(0, 0), (1, 0), (2, 0), (3, 3), (4, 0)])
def test_a_study_that_has_hardly_begun_has_a_page(tmp_path: Path, cells: int, excluded: int) -> None:
    folder = fabricate(tmp_path, cells=cells, excluded=excluded, failed=0, unfinished=0, measures=MEASURES[:1])
    html = write_study_report(folder).read_text(encoding="utf-8")
    assert f"{cells - excluded} measured networks are too few to say which measure ranks them; 6 allow" in html
    assert f"{cells - excluded} of {cells} networks are measured" in html


def test_measures_that_say_nothing_do_not_win(tmp_path: Path) -> None:
    folder = fabricate(tmp_path, "tsuzuku-mnist", cells=24, measures=MEASURES[:2])
    for path in folder.glob("cells/*/result.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result["measures"] is not None:
            for i, value in enumerate(result["measures"]["values"].values()):
                value["value"] = int(path.parent.name[-4:], 16) * 7919 % 97 + i
            path.write_text(json.dumps(result), encoding="utf-8")
    study = read_study(folder)
    assert study_answer(study, answers(study, draws=300))[0].startswith(
        "No measure ranks the 21 networks better than chance"
    )


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    folder = fabricate(tmp_path, cells=12, excluded=0, failed=0, unfinished=0, measures=MEASURES[:3])
    plain = json.loads((folder / "study.json").read_text(encoding="utf-8"))
    for i, cell in enumerate(plain["cells"]):
        cell["factors"] = {HOSTILE[0]: HOSTILE[i % 3], HOSTILE[4]: i % 2}
        path = folder / "cells" / cell["hash"] / "result.json"
        result = json.loads(path.read_text(encoding="utf-8"))
        values = result["measures"]["values"]
        result["measures"]["values"] = {HOSTILE[j]: value for j, value in enumerate(values.values())}
        result["environment"] = {HOSTILE[1]: HOSTILE[2]}
        path.write_text(json.dumps(result), encoding="utf-8")
    hostile = {"title": HOSTILE[1], "config": {HOSTILE[3]: HOSTILE[5]}, "tied": [], "factors": {}}
    plain |= {"name": HOSTILE[0], **hostile}
    (folder / "study.json").write_text(json.dumps(plain), encoding="utf-8")
    html = write_study_report(folder).read_text(encoding="utf-8")
    outline = Outline(html)
    assert len(outline.all("script")) == 1
    assert not outline.all("img")
    assert not [a for _, a in outline.elements if any(key.startswith("on") for key in a)]


def test_pictures_hold_the_numbers_given() -> None:
    ranked = ranking(
        {"before": {"a": Estimate(0.2, 0.1, 0.3), "b": Estimate(0.9)}, "after": {"a": Estimate(0.1)}},
        title="t",
        label="τ",
    )
    assert ranked.table.rows == (("b", "0.90", "none"), ("a", "0.20 [0.10, 0.30]", "0.10"))
    levels = ByLevel(["1", "2"], {"x": {0: [1.0, 2.0, 3.0], 1: [float("nan"), 5.0]}})
    expected = (("1", "x", 3, 1.0, 1.5, 2.0, 2.5, 3.0), ("2", "x", 1, 5.0, 5.0, 5.0, 5.0, 5.0))
    assert boxes(levels, title="t", label="y", factor="f").table.rows == expected
    assert lines(levels, title="t", label="y", factor="f", places=[1.0, 2.0]).table.rows == expected


def test_the_same_study_gives_the_same_page(folders: dict[str, Path]) -> None:
    study = read_study(folders["dinh-attack"])
    assert study_page(study, answers(study)) == page(folders["dinh-attack"])


@pytest.mark.parametrize("name", ["results.csv", "correlations.csv", "report.html"])
def test_a_full_disk_is_said_and_leaves_what_stood_there(
    small: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = (small / name).read_bytes()
    write = report_module.write_whole

    def full(path: Path, text: str) -> None:
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, text)

    monkeypatch.setattr(report_module, "write_whole", full)
    told = f"{small / name} cannot be written: No space left on device; what stood there before is unchanged"
    with pytest.raises(SpiritLevelError, match=re.escape(told)):
        write_study_report(small)
    assert (small / name).read_bytes() == before


def test_a_folder_that_was_deleted_is_said_and_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fabricate(tmp_path / "study", cells=6, measures=MEASURES[:1])

    def deleting(study: Any) -> Any:
        shutil.rmtree(folder)
        return answers(study)

    monkeypatch.setattr(report_module, "answers", deleting)
    with pytest.raises(SpiritLevelError, match=r"study is gone, so that results\.csv cannot be written"):
        write_study_report(folder)
    assert not folder.exists()
    with pytest.raises(SpiritLevelError, match=r"study holds no study"):
        write_study_report(folder)


def test_the_title_names_the_data_that_were_used(small: Path) -> None:
    study = read_study(small)
    assert study_title(study) == "Study petzka-mnist: Layer measures at batch sizes from 1000 to 8000"
    answered = answers(study)
    full = read_plan("petzka-mnist", data_folder="/data")
    quick = read_plan("petzka-mnist", quick=True)
    for described, title in (
        (full, full.title),
        (quick, f"quick version, trained on digits, of “{full.title}”"),
        # A folder from before quick versions said so.
        (replace(quick, title=full.title), f"trained on digits instead; {full.title}"),
    ):
        plain = described.to_dict()
        seen = replace(study, title=plain["title"], config=plain["config"], factors=plain["factors"])
        assert study_title(seen) == f"Study petzka-mnist: {title}"
        assert unescape(study_page(seen, answered)).count(f"<h1>Study petzka-mnist: {title}") == 1


@pytest.mark.parametrize(
    "label", ["plain spectral norm of the Hessian", "a" * 60, "normalized_sharpness(loss=normalized_cross_entropy)"]
)
@pytest.mark.parametrize("names", [["x"], ["x", "y", "z"]])
def test_the_label_of_an_axis_is_within_its_picture(label: str, names: list[str]) -> None:
    levels = ByLevel(["1", "2"], {name: {0: [1.0, 2.0], 1: [4.0, 5.0]} for name in names})
    drawn = [
        boxes(levels, title="t", label=label, factor="batch size"),
        lines(levels, title="t", label=label, factor="batch size", places=[1.0, 2.0]),
        gap_scatter([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], (names * 3)[:3], title="t", label="x", gap=label, said="τ 1"),
    ]
    for drawing in drawn:
        figure = drawing.figure
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        label_box = figure.axes[0].yaxis.label.get_window_extent()
        assert label_box.y0 >= 0
        assert label_box.x0 >= 0
        assert label_box.y1 <= figure.bbox.y1


# --- in a browser ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(GRIDS))
def test_in_a_browser_it_is_quiet_and_fits(browser: Any, folders: dict[str, Path], kind: str) -> None:
    for width in (375, 1280):
        visit(browser, (folders[kind] / "report.html").as_uri(), width)
        browser.execute_script("document.querySelectorAll('details').forEach(details => { details.open = true })")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        sizes = "return [...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height)"
        assert min(browser.execute_script(sizes)) >= 8
    cut = "return [...document.querySelectorAll('.sl-tables .sl-scroll')].filter(t => t.scrollWidth > t.clientWidth).length"
    assert browser.execute_script(cut) == 0
    assert browser.get_log("browser") == []
    assert requests(browser) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "width", "scheme"),
    [("petzka-mnist", 375, "light"), ("rangamani-mnist", 1280, "dark"), ("dinh-attack", 1280, "light")],
)
def test_axe_finds_nothing(browser: Any, tmp_path: Path, kind: str, width: int, scheme: str) -> None:
    """On small studies: axe compares every element with those behind it, and a study's tables have thousands."""
    folder = fabricate(tmp_path, kind, cells=12, measures=MEASURES[:2], unfinished=kind != "dinh-attack", failed=0)
    visit(browser, write_study_report(folder).as_uri(), width, scheme)
    browser.execute_script("document.querySelectorAll('details').forEach(details => { details.open = true })")
    browser.execute_script((resources.files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8"))
    found = browser.execute_async_script("axe.run(document).then(arguments[arguments.length - 1])")
    assert [(entry["id"], [node["html"][:200] for node in entry["nodes"][:3]]) for entry in found["violations"]] == []
