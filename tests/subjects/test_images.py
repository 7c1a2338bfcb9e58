"""MNIST and CIFAR-10 from their files: every byte arrives, and every damaged or hostile file is refused with its name."""

import gzip

import numpy as np
import pytest
import torch
from data_files import CLASSES, IMAGES, LABELS, PIXELS, idx, refused, write_cifar_binary, write_mnist

from spiritlevel.subjects import archives, images
from spiritlevel.subjects.data import load_data

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
