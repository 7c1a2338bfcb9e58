"""Data sets by name: built in, random, from a factory of one's own and from torchvision."""

import sys
import types

import numpy as np
import pytest
import torch
from data_files import CLASSES, PIXELS, refused
from torch.utils.data import TensorDataset

from spiritlevel.errors import SpiritLevelError
from spiritlevel.subjects.data import fingerprint, list_data, load_data

# --- digits and random ------------------------------------------------------------------------------------------------


def test_digits_are_split_once_and_for_all_with_every_class_in_equal_share():
    train, test = load_data("digits"), load_data("digits", split="test")
    assert (train.input_shape, train.classes, train.normalisation) == ((1, 8, 8), 10, "x / 16")
    assert (len(train), len(test)) == (1442, 355)
    assert train.x.min() == 0
    assert train.x.max() == 1
    share = torch.bincount(test.y) / (torch.bincount(test.y) + torch.bincount(train.y))
    assert (share - 0.2).abs().max() < 0.01
    # A different split or scaling would silently make every stored result incomparable.
    assert train.fingerprint.startswith("5b621d74d6b1e97f")
    assert test.fingerprint.startswith("c0a4c23d8e85c297")


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    refused("digits", r'needs scikit-learn, which is not installed: pip install "spiritlevel\[digits\]"')


def test_random_data_follow_their_seed_and_leave_the_global_generator_alone():
    state = torch.get_rng_state()
    first, again, other = (load_data(f"random:500,784,10,{seed}") for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert first.x.shape == (500, 784)
    assert first.y.unique().numel() == 10
    assert abs(first.x.std().item() - 1) < 0.01
    unseen = load_data("random:500,784,10,0", split="test")
    assert not torch.equal(unseen.x, first.x)


def test_random_images_hold_the_same_numbers_as_the_flat_vectors():
    flat, images = load_data("random:5,784,10,3"), load_data("random:5,1x28x28,10,3")
    assert images.input_shape == (1, 28, 28)
    assert torch.equal(images.x.flatten(1), flat.x)


@pytest.mark.parametrize("argument", ["500", "500,784,10", "a,b,c,d", "500,784,10,-1", "500,28×28,10,0"])
def test_random_data_written_wrongly_show_the_form(argument):
    refused(f"random:{argument}", "must be written 'random:N,SHAPE,CLASSES,SEED', for instance 'random:500,784,10,0'")


def test_random_data_refuse_zero_sizes():
    refused("random:0,784,10,0", "must be positive and SEED below")


# --- the first samples, the fingerprint -------------------------------------------------------------------------------


def test_samples_takes_the_first_and_keeps_the_number_of_classes():
    few, all_of_it = load_data("digits", samples=3), load_data("digits")
    assert torch.equal(few.x, all_of_it.x[:3])
    assert few.classes == 10
    assert few.fingerprint != all_of_it.fingerprint


@pytest.mark.parametrize("samples", [0, -1, 356, 2.0, True])
def test_samples_out_of_range_are_refused(samples):
    refused("digits", "samples must be a whole number from 1 to 355, all of digits, got", split="test", samples=samples)


def test_fingerprint_sees_values_shapes_dtypes_and_targets():
    x, y = torch.arange(6.0), torch.arange(6)
    same = fingerprint(x, y)
    assert same == fingerprint(x.clone(), y.clone())
    seen = [(x.view(2, 3), y), (x.double(), y), (x, y.flip(0)), (x, y.int()), (x + 1e-7, y)]
    assert len({same, *(fingerprint(*pair) for pair in seen)}) == 6


def test_unknown_split_is_refused():
    refused("digits", "split must be 'train' or 'test', got 'validation'", split="validation")


def test_standardized_shifts_and_scales_each_channel():
    data = load_data("random:6,3x4x4,2,0")
    moved = data.standardized((1.0, 2.0, 3.0), (0.5, 1.0, 2.0))
    expected = torch.stack([(data.x[:, 0] - 1) / 0.5, data.x[:, 1] - 2, (data.x[:, 2] - 3) / 2], 1)
    torch.testing.assert_close(moved.x, expected)
    assert moved.fingerprint == fingerprint(moved.x, moved.y)
    assert moved.normalisation == "none, then (x - (1.0, 2.0, 3.0)) / (0.5, 1.0, 2.0)"
    with pytest.raises(SpiritLevelError, match="has 3 channels; `standardized` needs as many means and positive"):
        data.standardized((0.0,), (1.0,))


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("digit", "unknown data set 'digit'; did you mean 'digits'\\? Known: digits, mnist:FOLDER"),
        ("mnst:/some/where", "unknown data set 'mnst:/some/where'; did you mean 'mnist'"),
        ("mnst:folder", "no module named 'mnst', needed for 'mnst:folder'.*did you mean 'mnist'"),
        ("mnist", "data set 'mnist' must be written 'mnist:FOLDER', got 'mnist'"),
        ("digits:here", "data set 'digits' must be written 'digits', got 'digits:here'"),
    ],
)
def test_a_name_that_is_not_one_is_answered_with_the_nearest(spec, match):
    refused(spec, match)


def test_every_source_is_listed_with_its_form():
    assert {"digits", "mnist:FOLDER", "cifar10:FOLDER", "path/to/file.npz", "package.module:factory"} <= set(
        list_data()
    )


# --- factories --------------------------------------------------------------------------------------------------------


@pytest.fixture
def factory(monkeypatch):
    """Makes `mydata:make` return what the test wants."""

    def returning(made):
        module = types.ModuleType("mydata")
        module.make = lambda: made
        monkeypatch.setitem(sys.modules, "mydata", module)
        return "mydata:make"

    return returning


X, Y = torch.arange(12.0).view(4, 3), torch.tensor([0, 1, 2, 1])


@pytest.mark.parametrize(
    "made",
    [(X, Y), (X.numpy(), Y.numpy()), [X, Y], TensorDataset(X, Y), [(x, int(y)) for x, y in zip(X, Y, strict=True)]],
    ids=["tensors", "arrays", "list", "TensorDataset", "rows"],
)
def test_a_factory_may_return_a_pair_or_a_data_set(factory, made):
    data = load_data(factory(made))
    assert torch.equal(data.x, X)
    assert torch.equal(data.y, Y)
    assert data.classes == 3
    refused("mydata:make", "returned one data set; for testing return {'train': ..., 'test': ...}", split="test")


def test_a_factory_may_return_both_splits(factory):
    spec = factory({"train": (X, Y), "test": TensorDataset(X[:2] + 1, Y[:2])})
    test = load_data(spec, split="test")
    assert torch.equal(test.x, X[:2] + 1)
    assert test.classes == 3
    assert load_data(factory({"train": load_data(spec)})).fingerprint == fingerprint(X, Y)
    refused("mydata:make", "returned a dictionary without 'test', found train", split="test")


def test_the_data_are_copies(factory):
    data = load_data(factory((X, Y)))
    assert data.x.data_ptr() != X.data_ptr()
    assert data.y.data_ptr() != Y.data_ptr()


def test_a_factory_that_returns_something_else_says_what_is_needed(factory):
    refused(factory(3), r"mydata:make returned int; needed are \(x, y\), a data set of \(tensor, target\) pairs")


def test_a_factory_is_found_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "found_here.py").write_text(
        "import torch\ndef make():\n    return torch.ones(2, 3), torch.tensor([0, 1])\n"
    )
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert load_data("found_here:make").x.shape == (2, 3)
    assert sys.path == before
    refused("found_here:mak", "must name a function of 'found_here', but 'mak' does not exist; did you mean 'make'")
    monkeypatch.delitem(sys.modules, "found_here")


def test_a_factory_that_is_not_callable_is_refused():
    refused("math:pi", "'math:pi' must name a function of 'math', but 'pi' is not callable")


def test_an_import_that_fails_inside_the_users_module_keeps_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "broken_here.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        load_data("broken_here:make")


# --- torchvision ------------------------------------------------------------------------------------------------------


def test_torchvision_data_have_channels_first(monkeypatch):
    class CIFAR10:
        classes = tuple("0123456789")

        def __init__(self, folder, train, download):
            assert (folder, train, download) == ("here", False, True)
            self.data = PIXELS.reshape(4, 3, 32, 32).transpose(0, 2, 3, 1)
            self.targets = CLASSES

    datasets = types.SimpleNamespace(CIFAR10=CIFAR10)
    monkeypatch.setitem(sys.modules, "torchvision", types.SimpleNamespace(datasets=datasets))
    data = load_data("torchvision:CIFAR10:here", split="test")
    np.testing.assert_array_equal((data.x * 255).round().numpy(), PIXELS.reshape(4, 3, 32, 32))
    assert (data.classes, data.y.tolist()) == (10, CLASSES)
    refused("torchvision:CIFAR:here", "write 'torchvision:NAME:FOLDER' with NAME one of .* did you mean 'CIFAR10'")
    refused("torchvision:CIFAR10", "write 'torchvision:NAME:FOLDER'")


def test_torchvision_that_is_not_installed_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    refused("torchvision:MNIST:here", "needs torchvision, which is not installed: pip install torchvision")
