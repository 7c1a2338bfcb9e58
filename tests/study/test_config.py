import re
import time
from pathlib import Path

import pytest

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study.plan import list_studies, read_override, read_plan
from spiritlevel.subjects.networks import build_model

BUILT_IN = (
    "dinh-attack",
    "petzka-cifar10",
    "petzka-mnist",
    "rangamani-cifar10",
    "rangamani-mnist",
    "transformers",
    "tsuzuku-cifar10",
    "tsuzuku-mnist",
)


def refusal(path: str, **options: object) -> str:
    with pytest.raises(SpiritLevelError) as caught:
        read_plan(path, **options)  # type: ignore[arg-type]
    return str(caught.value)


def test_cells_are_all_combinations_with_every_seed(tiny):
    cells = read_plan(tiny).cells
    assert [(cell.factors, cell.seed) for cell in cells] == [
        ({"training.batch_size": 16}, 0),
        ({"training.batch_size": 16}, 1),
        ({"training.batch_size": 30}, 0),
        ({"training.batch_size": 30}, 1),
    ]
    assert [cell.config.training.batch_size for cell in cells] == [16, 16, 30, 30]
    assert {cell.config.training.learning_rate for cell in cells} == {0.2}


def test_tied_factors_move_together_and_cross_with_others(tiny):
    factors = (
        "factors={batch=[{training.batch_size=4, training.learning_rate=0.1}, "
        "{training.batch_size=8, training.learning_rate=0.2}], model.width=[1.0, 2.0]}"
    )
    study = read_plan(tiny, overrides=["training.batch_size=16", factors, "seeds=1"])
    assert [tuple(cell.factors.values()) for cell in study.cells] == [
        (4, 0.1, 1.0),
        (4, 0.1, 2.0),
        (8, 0.2, 1.0),
        (8, 0.2, 2.0),
    ]
    described = study.to_dict()
    assert described["tied"] == [["training.batch_size", "training.learning_rate"]]
    assert described["factors"] == {
        "training.batch_size": [4, 8],
        "training.learning_rate": [0.1, 0.2],
        "model.width": [1.0, 2.0],
    }


def test_quoted_and_nested_names_of_factors_are_the_same(tiny):
    text = Path(tiny).read_text()
    Path(tiny).write_text(text.replace("training.batch_size = [16", '"training.batch_size" = [16'))
    assert len(read_plan(tiny).cells) == 4


def test_seeds_are_a_number_or_a_list(tiny):
    assert read_plan(tiny, overrides=["seeds=3"]).seeds == (0, 1, 2)
    assert read_plan(tiny, overrides=["seeds=[7, 5]"]).seeds == (7, 5)
    assert (
        refusal(tiny, overrides=["seeds=[7, 7]"])
        == "--set seeds=[7, 7]: seeds: must differ from each other, got [7, 7]"
    )


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("learning_rate", "lerning_rate", 12, "training.lerning_rate: unknown key; did you mean 'learning_rate'?"),
        ("epochs = 3", "epochs = 0", 14, "training.epochs: input should be greater than or equal to 1, got 0"),
        ("epochs = 3", 'epochs = "3"', 14, "training.epochs: input should be a valid integer, got '3'"),
        ("epochs = 3", "epochs = 1.5", 14, "training.epochs: input should be a valid integer, got 1.5"),
        ("epochs = 3", "", 10, "training.epochs: is missing; add it"),
        ('"sgd"', '"sdg"', 11, "training.optimizer: input should be 'sgd' or 'adam', got 'sdg'"),
        ('"hessian_trace"', '"hessian_tarce"', 20, "did you mean 'hessian_trace'?"),
        ("training.batch_size = [", "training.batchsize = [", 17, "did you mean 'training.batch_size'?"),
        ("[16, 30]", "16", 17, "factors.training.batch_size: must be a list of values to cross, got 16"),
        ("[16, 30]", "[16, 16]", 17, "factors.training.batch_size: values must differ from each other, got [16, 16]"),
        ("[16, 30]", "[16, -30]", 17, "factors.training.batch_size: input should be greater than or equal to 1, got -30"),
        ("training.batch_size = [16, 30]", "seed = [1]", 17, "seeds are crossed by themselves"),
        ("training.batch_size = [16, 30]", "training.stop = [{train_loss = 1}]", 17, "a table cannot be crossed; cross the settings inside"),
        ("training.batch_size = [16, 30]", "a = [{model.width = 1}, {}]", 17, "the same keys in every table"),
        ("epochs = 3", "epochs = 3\nstop = {}", 15, "training.stop: needs at least one of train_accuracy"),
        ("epochs = 3", "epochs = 3\nstop = {train_loss = 1, loss = 1}", 15, "training.stop.loss: unknown key"),
        ('"sgd"', '"adam"\nmomentum = 0.5', 10, "momentum belongs to optimizer = 'sgd'; leave it out for 'adam'"),
        ('"random:60,6,3,0"', '"digits"\nfolder = "x"', 4, "'digits' is not read from a folder; leave `folder` out"),
        ('title = "tiny"', 'titel = "tiny"', 1, "titel: unknown key; did you mean 'title'?"),
        ("[measure]", "[measures]", 19, "measures: unknown key; did you mean 'measure'?"),
        ("[measure]", '[measure]\nloss = "mes"', 20, "did you mean 'mse'?"),
        ("[measure]", "[measure]\nrescale = [25, 5]", 20, "low must not exceed high"),
    ],
)  # fmt: skip
def test_errors_name_the_line_and_the_remedy(tiny, old, new, line, says):
    text = Path(tiny).read_text()
    assert old in text
    Path(tiny).write_text(text.replace(old, new, 1))
    message = refusal(tiny)
    assert message.startswith(f"{tiny}, line {line}: "), message
    assert says in message


def test_a_key_in_an_array_of_tables_has_its_own_line(tiny):
    text = Path(tiny).read_text() + '\n[[measure.also]]\nloss = "mse"\n\n[[measure.also]]\nlos = "mse"\n'
    Path(tiny).write_text(text)
    line = text.splitlines().index('los = "mse"') + 1
    assert refusal(tiny).startswith(f"{tiny}, line {line}: measure.also.1.los: unknown key; did you mean 'loss'?")


def test_what_is_no_toml_is_refused_with_its_place(tiny):
    Path(tiny).write_text("seeds = \n")
    assert re.search(r"tiny.toml: not valid TOML: .*line 1", refusal(tiny))


def test_a_file_as_an_editor_of_windows_saves_it_is_the_same_study(tiny):
    """With a mark before the text and other line ends."""
    plain = read_plan(tiny)
    Path(tiny).write_bytes(b"\xef\xbb\xbf" + Path(tiny).read_bytes().replace(b"\n", b"\r\n"))
    assert read_plan(tiny).cells == plain.cells


def test_a_missing_file_and_an_unknown_name_are_refused(tmp_path):
    assert refusal(str(tmp_path / "none.toml")) == f"{tmp_path / 'none.toml'} cannot be read: No such file or directory"
    assert "no built-in study 'petzka-mnits'; did you mean 'petzka-mnist'?" in refusal("petzka-mnits")


def test_overrides_change_settings_and_take_factors_out(tiny):
    study = read_plan(tiny, overrides=["training.epochs=7", "training.batch_size=5", "model.name=mlp:4"])
    assert study.factors == ()
    assert {(c.config.training.epochs, c.config.training.batch_size, c.config.model.name) for c in study.cells} == {
        (7, 5, "mlp:4")
    }
    crossed = read_plan(tiny, overrides=["factors.training.batch_size=[8]", "factors.data.label_noise=[0.0, 0.5]"])
    assert [factor.values for factor in crossed.factors] == [((8,),), ((0.0,), (0.5,))]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("training.epoch=5", "--set training.epoch=5: training.epoch: unknown key; did you mean 'epochs'?"),
        ("training.epochs", "--set takes key=value, got 'training.epochs'"),
        ("training.epochs.more=5", "'epochs' is a value, not a section"),
        ("factors.model.initialization=[none]", "must be a list of values to cross, got '[none]'"),
        ('measure.also=[{loss="mes"}]', '--set measure.also=[{loss="mes"}]: measure.also.0.loss: unknown loss'),
    ],
)
def test_overrides_that_do_not_fit_are_refused(tiny, override, says):
    assert says in refusal(tiny, overrides=[override])


def test_a_tied_setting_is_not_overridden_alone(tiny):
    tied = "factors.both=[{training.learning_rate=0.1, model.width=1.0}]"
    message = refusal(tiny, overrides=[tied, "model.width=2.0"])
    assert "is tied to other settings; set them together: --set 'factors.both=[{...}]'" in message
    crossed_twice = refusal(tiny, overrides=[tied, "factors.model.width=[1.0]"])
    assert "is crossed twice" in crossed_twice


def test_override_values_are_toml_or_words():
    assert read_override("a.b=[1, 2]", "--set") == ("a.b", [1, 2])
    assert read_override("a=1e-3", "--set") == ("a", 1e-3)
    assert read_override("a = mlp:3-4", "--set") == ("a", "mlp:3-4")


def test_quick_lays_its_settings_over_the_study(tiny):
    quick = '[quick]\nseeds = 1\n[quick.model]\nname = "mlp:4"\n[quick.training]\nepochs = 1\n'
    quick += "[quick.factors]\nmodel.width = [1.0, 2.0, 3.0]\n"
    Path(tiny).write_text(Path(tiny).read_text() + quick)
    assert len(read_plan(tiny).cells) == 4
    cells = read_plan(tiny, quick=True).cells
    assert [cell.factors for cell in cells] == [{"model.width": 1.0}, {"model.width": 2.0}, {"model.width": 3.0}]
    assert {(c.config.training.epochs, c.config.training.batch_size, c.config.model.name) for c in cells} == {
        (1, 16, "mlp:4")
    }
    Path(tiny).write_text(Path(tiny).read_text().replace("epochs = 1", "epohcs = 1"))
    line = Path(tiny).read_text().splitlines().index("epohcs = 1") + 1
    assert refusal(tiny, quick=True).startswith(f"{tiny}, line {line}: training.epohcs: unknown key")


def test_quick_needs_something_to_do(tiny):
    assert "has no section [quick]" in refusal(tiny, quick=True)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_studies_are_whole(name):
    assert list_studies().keys() == set(BUILT_IN)
    folder = None if name == "transformers" else "/somewhere"
    full, quick = read_plan(name, data_folder=folder), read_plan(name, quick=True)
    papers = {"dinh-attack": "dinh2017", "transformers": "spiritlevel2026"}
    assert full.paper == quick.paper == papers.get(name, f"{name.split('-')[0]}2019")
    assert len(quick.cells) <= len(full.cells)
    assert {cell.config.data.name for cell in quick.cells} == {"digits"}
    allowed = {"digits"} if name == "transformers" else {"mnist:/somewhere", "cifar10:/somewhere"}
    assert {cell.config.data.spec for cell in full.cells} <= allowed
    for name in {cell.config.model.name for cell in quick.cells}:
        build_model(name, input_shape=(1, 8, 8), classes=10, width=0.25)


def test_the_papers_sizes():
    assert len(read_plan("petzka-cifar10").cells) == 4 * 4 * 9
    assert len(read_plan("tsuzuku-mnist").cells) == 3 * 11 * 10  # the paper's LeNet is one of two
    assert len(read_plan("rangamani-cifar10").cells) == 2 * 2 * 5


# --- how large, and on which data -------------------------------------------------------------------------------------


def test_a_grid_that_is_too_large_is_refused_with_its_size_before_it_is_made(tiny):
    started = time.process_time()
    said = refusal(tiny, overrides=["seeds=100000000"])
    assert time.process_time() - started < 1
    assert said == (
        "--set seeds=100000000: seeds: the study has 2 × 100,000,000 = 200,000,000 networks, more than most_cells = 10,000; "
        "cross less or take fewer seeds, or, if that many are meant, --set most_cells=200000000"
    )
    wide = [f"factors.{name}={list(range(1, 51))}" for name in ("training.epochs", "training.evaluate_every")]
    assert "2 × 50 × 50 × 3 = 15,000 networks" in refusal(tiny, overrides=[*wide, "seeds=3"])
    assert len(read_plan(tiny, overrides=[*wide, "seeds=3", "most_cells=15000"]).cells) == 15000
    assert "4 networks, more than most_cells = 3" in refusal(tiny, overrides=["most_cells=3"])


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_quick_version_is_titled_by_what_it_trains_on(name):
    folder = None if name == "transformers" else "/somewhere"
    full, quick = read_plan(name, data_folder=folder), read_plan(name, quick=True)
    assert quick.title == f"quick version, trained on digits, of “{full.title}”"
    assert str(quick) == f"{name}: {quick.title}; {len(quick.cells)} networks"
    assert (full.to_dict()["quick"], quick.to_dict()["quick"]) == (False, True)


def test_other_data_are_named_before_a_title_that_names_data(tiny):
    assert read_plan(tiny).title == "tiny"
    assert read_plan(tiny, overrides=["data.name=digits"]).title == "trained on digits instead; tiny"
    crossed = 'factors.which=[{data.name="digits"}, {data.name="random:60,6,3,1"}]'
    assert read_plan(tiny, overrides=[crossed]).title == "trained on digits and random:60,6,3,1 instead; tiny"
    assert read_plan(tiny, overrides=["data.name=digits", "title=mine"]).title == "mine"
    assert str(read_plan(tiny, overrides=["title=''", "seeds=1", "training.batch_size=3"])) == (
        "tiny: trained on random:60,6,3,0; 1 network"
    )


def test_values_nested_deeper_than_python_follows_are_refused(tiny):
    deep = "[" * 100_000
    assert read_override(f"a={deep}", "--set") == ("a", deep)
    Path(tiny).write_text(f"title = {deep}\n")
    assert "not valid TOML" in refusal(tiny)


def test_a_network_has_one_twin(tiny):
    both = ["measure.orbit=0.5", "measure.rescale=[1, 2]"]
    assert "every network has one twin: leave out orbit or rescale" in refusal(tiny, overrides=both)
