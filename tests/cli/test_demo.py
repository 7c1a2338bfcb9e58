"""The demo at a smaller size: what it finds, what it says, what it writes."""

import re

import pytest
import torch

from spiritlevel.cli import demonstration as showcase
from spiritlevel.cli.demonstration import LARGE, SMALL, TWIN, Demo, Settings
from spiritlevel.measuring.registry import list_measures

pytest.importorskip("sklearn")

QUICK = Settings(target=0.3, tolerance=1e-4, steps_along=1)


@pytest.fixture(scope="module")
def found() -> Demo:
    stages: list[str] = []
    demo = showcase.run_demo(QUICK, lambda stage, _passes: stages.append(stage))
    assert any(stage.startswith(f"training, {LARGE}: loss") for stage in stages)
    return demo


@pytest.mark.slow  # the first to have the demo run
def test_both_networks_reach_the_same_loss_from_the_same_start(found: Demo) -> None:
    small, large = found.trained[SMALL], found.trained[LARGE]
    assert small.loss < QUICK.target
    assert large.loss < QUICK.target
    assert small.batch == 16
    assert large.batch == 1442
    assert min(small.test_accuracy, large.test_accuracy) > 0.85
    for name, trained in found.trained.items():
        assert found.reports[name].loss == pytest.approx(trained.loss, rel=1e-5)


def test_the_twin_computes_the_same_function(found: Demo) -> None:
    x = torch.rand(5, 1, 8, 8, dtype=torch.float64)
    original = found.trained[found.flatter].model.double()
    torch.testing.assert_close(found.attack.model(x), original(x), rtol=1e-12, atol=1e-12)
    assert found.attack.output_change < 1e-13


def test_plain_measures_see_a_million_and_invariant_ones_nothing(found: Demo) -> None:
    assert set(found.growth) == {m.name for m in list_measures() if not m.costly and not m.invariant_under}
    assert set(found.changes) == {m.name for m in list_measures() if not m.costly and m.invariant_under}
    assert found.growth["hessian_spectral_norm"] == pytest.approx(1e6, rel=0.06)
    assert found.growth["hessian_trace"] > 1e5
    assert max(found.changes.values()) < 1e-9


def test_the_way_to_the_twin_is_level_for_invariant_measures(found: Demo) -> None:
    factors = list(found.path)
    assert len(factors) == 3
    assert factors == sorted(factors)
    norms = [report["hessian_spectral_norm"].value for report in found.path.values()]
    assert norms == sorted(norms)
    for name in found.changes:
        values = [report[name].value for report in found.path.values()]
        assert max(values) == pytest.approx(min(values), rel=1e-9), name


def test_the_words_state_the_numbers(found: Demo) -> None:
    small = found.trained[SMALL]
    assert f"16 images a step ({small.steps:,} steps)" in showcase.training_words(found)
    assert f"{100 * small.test_accuracy:.1f} %" in showcase.training_words(found)
    said = showcase.twin_words(found)
    assert f"{found.growth['hessian_spectral_norm']:,.0f} times larger" in said
    assert f"none of the {len(found.changes)} invariant measures" in said
    assert re.search(r"fc\d\.weight multiplied by \d+ and fc\d\.weight divided by \d+", said)
    assert found.flatter in showcase.verdict_words(found)


def test_equal_accuracies_are_said_once(found: Demo) -> None:
    same = Demo(
        {SMALL: found.trained[SMALL], LARGE: found.trained[SMALL]},
        found.reports,
        found.flatter,
        found.attack,
        found.path,
        found.test_samples,
    )
    assert re.search(r"on test images: \d+\.\d %, the same\.$", showcase.training_words(same))


def test_the_page_the_picture_and_the_weights_are_written(found: Demo, tmp_path) -> None:
    page = showcase.write_demo(found, tmp_path / "new" / "demo")
    assert sorted(path.name for path in page.parent.iterdir()) == [
        "large-batch.safetensors",
        "picture.png",
        "report.html",
        "small-batch.safetensors",
        "twin.safetensors",
    ]
    html = page.read_text(encoding="utf-8")
    assert "The same function, a million times sharper" in html
    assert showcase.picture(found).title in html
    for name in (SMALL, LARGE, TWIN):
        assert name in html
    assert len(html) < 2_000_000
    assert (page.parent / "picture.png").stat().st_size < 100_000


def test_the_command_ends_with_the_path_of_the_page(found: Demo, run, tmp_path, monkeypatch) -> None:
    asked = []

    def shown(settings: Settings, listen: showcase.Listen) -> Demo:
        asked.append(settings)
        listen("training", 0)
        listen("hessian_trace", 3)
        return found

    monkeypatch.setattr(showcase, "run_demo", shown)
    monkeypatch.setattr(showcase, "write_demo", lambda demo, folder: folder / "report.html")
    monkeypatch.setenv("COLUMNS", "60")
    code, out, err = run("demo", "--out", tmp_path / "demo", "--seed", 4)
    assert (code, err) == (0, "")
    assert asked == [Settings(seed=4)]
    *lines, last = out.splitlines()
    assert last.endswith(str(tmp_path / "demo" / "report.html"))
    assert max(map(len, lines)) <= 60
    for name in (SMALL, LARGE, TWIN):
        assert name in out


def test_the_number_of_threads_comes_back() -> None:
    before = torch.get_num_threads()
    with showcase.one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
