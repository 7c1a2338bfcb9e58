"""Data sets by name: every byte arrives, and every damaged or hostile file is refused with its name."""

import gzip
import pickle
import re
import struct
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from spiritlevel.errors import SpiritLevelError
from spiritlevel.subjects import archives, images
from spiritlevel.subjects.data import fingerprint, list_data, load_data

rng = np.random.default_rng(0)
IMAGES = rng.integers(0, 256, (7, 28, 28), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 9, 4, 5, 9], dtype=np.uint8)
PIXELS = rng.integers(0, 256, (4, 3072), dtype=np.uint8)
CLASSES = [3, 0, 9, 1]


def idx(array, magic=None):
    head = magic or bytes([0, 0, 8, array.ndim])
    return head + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(folder, images=None, labels=None, prefix="train", opener=open, ending=""):
    folder.mkdir(parents=True, exist_ok=True)
    for kind, content in (("images-idx3", images or idx(IMAGES)), ("labels-idx1", labels or idx(LABELS))):
        with opener(folder / f"{prefix}-{kind}-ubyte{ending}", "wb") as stream:
            stream.write(content)


def write_cifar_binary(folder, pixels=PIXELS, labels=CLASSES):
    folder.mkdir(parents=True, exist_ok=True)
    records = np.concatenate([np.array(labels, dtype=np.uint8)[:, None], pixels], axis=1)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        (folder / f"{name}.bin").write_bytes(records.tobytes())


def refused(spec, match, **options):
    with pytest.raises(SpiritLevelError, match=match) as caught:
        load_data(spec, **options)
    return str(caught.value)


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
        ("digit", "unknown data set 'digit'; did you mean 'digits'\\?; known: digits, mnist:FOLDER"),
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


# --- idx --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["", "mnist", "MNIST/raw"])
@pytest.mark.parametrize(("opener", "ending"), [(open, ""), (gzip.open, ".gz")])
def test_mnist_is_found_plain_or_packed_in_the_usual_places(tmp_path, place, opener, ending):
    write_mnist(tmp_path / place, opener=opener, ending=ending)
    data = load_data(f"mnist:{tmp_path}")
    assert data.x.dtype == torch.float32
    np.testing.assert_array_equal((data.x[:, 0] * 255).round().numpy(), IMAGES)
    np.testing.assert_array_equal(data.y.numpy(), LABELS)
    assert (data.classes, data.normalisation, data.y.dtype) == (10, "x / 255", torch.int64)


def test_fashion_mnist_has_its_own_folder_and_its_own_test_files(tmp_path):
    write_mnist(tmp_path / "mnist", prefix="t10k")
    write_mnist(tmp_path / "fashion-mnist", images=idx(255 - IMAGES), prefix="t10k")
    clothes, digits = (load_data(f"{name}:{tmp_path}", split="test") for name in ("fashion-mnist", "mnist"))
    torch.testing.assert_close(clothes.x + digits.x, torch.ones(7, 1, 28, 28))
    refused(f"fashion-mnist:{tmp_path}", "no file train-images-idx3-ubyte .* in .*fashion-mnist")


@pytest.mark.parametrize(
    ("images", "match"),
    [
        (idx(IMAGES, magic=bytes([0, 0, 13, 3])), "must start with the idx magic 00 00 08 03, found 00 00 0d 03"),
        (b"<html>not found</html>", "must start with the idx magic 00 00 08 03, found 3c 68 74 6d"),
        (idx(IMAGES)[:-5], "says 7×28×28 = 5488 bytes in its header, but 5483 follow; fetch it again"),
        (idx(IMAGES) + b"x", "says 7×28×28 = 5488 bytes in its header, but more follow"),
        (idx(IMAGES)[:9], "is truncated: its header has 9 of 16 bytes"),
        (bytes([0, 0, 8, 3]) + b"\xff" * 12, "says 4294967295×4294967295×4294967295 = .* but 0 follow"),
        (
            idx(IMAGES[:6]),
            "holds 6 images but .*train-labels-idx1-ubyte 7 labels; the two files do not belong together",
        ),
    ],
)
def test_damaged_images_are_refused_by_file(tmp_path, images, match):
    write_mnist(tmp_path, images=images)
    assert "train-images-idx3-ubyte" in refused(f"mnist:{tmp_path}", match)


def test_damaged_labels_are_refused_by_file(tmp_path):
    write_mnist(tmp_path, labels=idx(np.array([0, 1, 10, 3, 4, 11, 6], dtype=np.uint8)))
    match = r"train-labels-idx1-ubyte: labels must be 0 to 9, found 10 at sample 2 \(2 of 7 out of range\)"
    refused(f"mnist:{tmp_path}", match)


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b"nothing packed", lambda b: b[:30] + b"?" * 40]
)
def test_damaged_gzip_is_refused_by_file(tmp_path, damage):
    write_mnist(tmp_path, opener=gzip.open, ending=".gz")
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    refused(f"mnist:{tmp_path}", r"train-images-idx3-ubyte\.gz is not a whole gzip file")


def test_an_empty_data_set_is_refused(tmp_path):
    write_mnist(tmp_path, images=idx(IMAGES[:0]), labels=idx(LABELS[:0]))
    refused(f"mnist:{tmp_path}", "has no samples in its train split")


# --- CIFAR-10 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["", "cifar-10-batches-bin"])
def test_cifar10_binary_is_read_in_order(tmp_path, place):
    write_cifar_binary(tmp_path / place)
    train, test = load_data(f"cifar10:{tmp_path}"), load_data(f"cifar10:{tmp_path}", split="test")
    assert train.x.shape == (20, 3, 32, 32)
    np.testing.assert_array_equal((test.x * 255).round().numpy(), PIXELS.reshape(4, 3, 32, 32))
    assert train.y.tolist() == CLASSES * 5


def test_cifar10_damaged_binary_is_refused_by_file(tmp_path):
    write_cifar_binary(tmp_path)
    path = tmp_path / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    found = r"data_batch_3\.bin must hold records of 3073 bytes .* found 12291 bytes = 3 records and 3072 bytes"
    refused(f"cifar10:{tmp_path}", found)
    path.unlink()
    refused(f"cifar10:{tmp_path}", r"CIFAR-10 needs 5 files for train; missing: .*data_batch_3\.bin")


def test_cifar10_label_out_of_range_is_refused_by_file(tmp_path):
    write_cifar_binary(tmp_path, labels=[3, 0, 17, 1])
    refused(f"cifar10:{tmp_path}", r"data_batch_1\.bin: labels must be 0 to 9, found 17 at sample 2 \(1 of 4")


def test_cifar10_in_an_empty_folder_says_where_it_looked(tmp_path):
    said = refused(f"cifar10:{tmp_path}", r"no data_batch_1\.bin in ")
    assert said == f"no data_batch_1.bin in {tmp_path / 'cifar-10-batches-bin'} or {tmp_path}; say where the data are"


@pytest.mark.parametrize("place", ["", "cifar-10-batches-py"])
def test_cifar10_in_its_python_version_names_the_download_to_use(tmp_path, place):
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "test_batch").write_bytes(b"never opened")
    for split in ("train", "test"):
        said = refused(f"cifar10:{tmp_path}", "its python version is there, whose files are pickles", split=split)
        assert "cifar-10-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html" in said


# --- npz --------------------------------------------------------------------------------------------------------------


def test_npz_with_both_splits_agrees_on_the_number_of_classes(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, x_train=IMAGES, y_train=LABELS, x_test=IMAGES[:2], y_test=LABELS[:2])
    train, test = load_data(str(path)), load_data(str(path), split="test")
    assert (train.classes, test.classes, len(test)) == (10, 10, 2)
    assert train.normalisation == "x / 255"


def test_npz_of_real_numbers_is_left_alone_and_becomes_float32(tmp_path):
    path = tmp_path / "mine.npz"
    x = rng.normal(size=(5, 3)) * 100
    np.savez(path, x=x, y=np.array([0, 2, 1, 0, 1]))
    data = load_data(str(path))
    assert (data.classes, data.normalisation, data.x.dtype) == (3, "none", torch.float32)
    np.testing.assert_array_equal(data.x.numpy(), x.astype(np.float32))
    refused(str(path), r"mine\.npz must hold arrays x_test and y_test for the test split, found x, y", split="test")


def test_npz_of_tokens_and_of_real_targets(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, x=np.array([[1, 2], [500, 4]]), y=np.array([[0.5, 1.0, 2.0], [1.5, 0.0, 1.0]]))
    data = load_data(str(path))
    assert data.x.tolist() == [[1, 2], [500, 4]]
    assert data.x.dtype == torch.int64
    assert (data.y.shape, data.y.dtype, data.classes) == ((2, 3), torch.float32, 3)


@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        ({"a": IMAGES}, "must hold arrays x and y, or x_train and y_train for the train split, found a"),
        ({"x": IMAGES, "y": LABELS[:3]}, "has 7 samples but 3 targets"),
        ({"x": IMAGES, "y": LABELS.astype(float)}, r"dtype torch.float64 and shape \(7,\); labels must be integers"),
        (
            {"x": IMAGES, "y": LABELS[:, None]},
            r"dtype torch.uint8 and shape \(7, 1\); labels must be integers of shape",
        ),
        ({"x": IMAGES, "y": np.array([0, 1, -1, 0, 1, 0, 1])}, "labels must be 0 to 1, found -1 at sample 2"),
        ({"x": np.array([[1.0], [np.nan], [np.inf]]), "y": LABELS[:3]}, "in 2 samples, first in sample 1; remove or"),
        ({"x": np.ones((3, 2)), "y": np.full((3, 1), np.nan)}, "y of .*npz contains NaN or infinity"),
        ({"x": np.ones((3, 2), complex), "y": LABELS[:3]}, "is complex"),
        ({"x": np.array(["a", "b"]), "y": LABELS[:2]}, "holds an array of <U1; numbers are needed"),
        ({"x": np.array(1.0), "y": np.array(1)}, "holds a single number where an array of samples is needed"),
        ({"x": np.array([{}, {}]), "y": LABELS[:2]}, r"cannot be read \(Object arrays cannot be loaded"),
        ({"x": IMAGES[:0], "y": LABELS[:0]}, "has no samples in its train split"),
    ],
)
def test_npz_that_cannot_be_used_says_what_was_found(tmp_path, arrays, match):
    path = tmp_path / "mine.npz"
    np.savez(path, **arrays)
    assert "mine.npz" in refused(str(path), match)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (pickle.dumps(1), r"cannot be read \(.*allow_pickle"),
        (b"PK\x03\x04 half a file", r"cannot be read \(File is not a zip file"),
        (b"", r"cannot be read \(No data left in file"),
    ],
)
def test_npz_that_is_none_is_refused(tmp_path, content, match):
    path = tmp_path / "mine.npz"
    path.write_bytes(content)
    refused(str(path), match)


def test_npz_that_is_a_single_array_or_missing_is_refused(tmp_path):
    path = tmp_path / "mine.npz"
    refused(str(path), r"no file .*mine\.npz; a data set of your own is an .npz with arrays x and y")
    with path.open("wb") as stream:
        np.save(stream, IMAGES)
    refused(str(path), r"is a single array; an archive is needed: np.savez\('mine.npz', x=x, y=y\)")


def archive(path, name="x", header=None, content=b"", method=zipfile.ZIP_DEFLATED):
    """An `.npz` with a labels array that is whole and an array of `content` under a header of one's choice."""
    with zipfile.ZipFile(path, "w", method) as made:
        for member, head, body in (
            (name, header, content),
            ("y", {"descr": "|u1", "fortran_order": False, "shape": (7,)}, LABELS.tobytes()),
        ):
            with made.open(f"{member}.npy", "w") as stream:
                np.lib.format.write_array_header_1_0(stream, head)
                for start in range(0, len(body), 1 << 20):
                    stream.write(body[start : start + (1 << 20)])


@pytest.fixture
def little_memory():
    """No more than two gigabytes beyond what is in use: what is allocated on the word of a header fails."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(
    ("shape", "descr", "told"),
    [
        ((10**12,), "|u1", "promises 1000000000000 entries of uint8, 1,000,000,000,000 bytes, but 5 follow"),
        ((2**62, 4), "<f8", "bytes, but 5 follow"),
        ((2,), "|u1", "promises 2 entries of uint8, 2 bytes, but 5 follow"),
        ((-5,), "|u1", "an array has the shape"),
        ((5,), "|O", "Object arrays cannot be loaded"),
    ],
)
def test_an_npz_whose_header_lies_is_refused_before_anything_is_allocated(tmp_path, little_memory, shape, descr, told):
    path = tmp_path / "mine.npz"
    archive(path, header={"descr": descr, "fortran_order": False, "shape": shape}, content=b"12345")
    refused(str(path), re.escape(told))


def test_an_npz_that_unpacks_to_a_thousand_times_its_size_is_refused(tmp_path, little_memory, monkeypatch):
    path, size = tmp_path / "mine.npz", 2**20
    archive(path, header={"descr": "|u1", "fortran_order": False, "shape": (size,)}, content=bytes(size))
    with pytest.raises(SpiritLevelError, match="has 1048576 samples but 7 targets"):  # a small one does no harm
        load_data(str(path))
    monkeypatch.setattr(archives, "HARMLESS", 1000)
    told = r"mine\.npz is refused: its 1,\d\d\d bytes would unpack to 1,048,\d\d\d, more than 100 times as many"
    refused(str(path), told)
    # Real numbers are as they were, packed or not.
    for save in (np.savez, np.savez_compressed):
        save(path, x=np.asfortranarray(IMAGES), y=LABELS)
        np.testing.assert_array_equal((load_data(str(path)).x * 255).round().numpy(), IMAGES)


def test_an_npz_with_a_directory_that_lies_is_refused(tmp_path, little_memory):
    path = tmp_path / "mine.npz"
    archive(path, header={"descr": "|u1", "fortran_order": False, "shape": (5,)}, content=b"12345")
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as made:
        true = made.getinfo("x.npy").file_size
    entry = whole.index(b"PK\x01\x02")
    for size in (2**32 - 2, true - 1, true + 1):
        path.write_bytes(whole[: entry + 24] + struct.pack("<I", size) + whole[entry + 28 :])
        refused(str(path), r"mine\.npz")


def test_an_npz_with_a_password_is_refused(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, x=IMAGES, y=LABELS)
    whole = bytearray(path.read_bytes())
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        start = -1
        while (start := whole.find(mark, start + 1)) >= 0:
            whole[start + place] |= 1
    path.write_bytes(bytes(whole))
    refused(str(path), r"cannot be read \(.*(password|encrypted)")


def test_an_idx_file_that_unpacks_to_a_thousand_times_its_size_is_refused(tmp_path, little_memory, monkeypatch):
    blank = np.zeros((2000, 28, 28), dtype=np.uint8)
    write_mnist(tmp_path, images=idx(blank), opener=gzip.open, ending=".gz")
    refused(f"mnist:{tmp_path}", "holds 2000 images but .* 7 labels")
    monkeypatch.setattr(archives, "HARMLESS", 1000)
    told = r"train-images-idx3-ubyte\.gz is refused: its \d,\d\d\d bytes would unpack to 1,568,000, more than 100 times"
    refused(f"mnist:{tmp_path}", told)


def test_an_idx_file_whose_header_lies_reads_no_more_than_its_size_can_hold(tmp_path, little_memory, monkeypatch):
    monkeypatch.setattr(images, "HARMLESS", 1000)
    asked = []
    read = images.read_at_most
    monkeypatch.setattr(images, "read_at_most", lambda stream, count: asked.append(count) or read(stream, count))
    lying = bytes([0, 0, 8, 3]) + b"\xff" * 12 + bytes(2**20)
    write_mnist(tmp_path, images=lying, opener=gzip.open, ending=".gz")
    refused(f"mnist:{tmp_path}", "says 4294967295×4294967295×4294967295 = .* follow; fetch it again")
    assert max(asked) <= 100 * (tmp_path / "train-images-idx3-ubyte.gz").stat().st_size


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
