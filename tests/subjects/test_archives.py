"""Data sets in `.npz` files: every number arrives, and every damaged or hostile file is refused with its name."""

import pickle
import re
import struct
import zipfile

import numpy as np
import pytest
import torch
from data_files import IMAGES, LABELS, refused, rng

from spiritlevel.errors import SpiritLevelError
from spiritlevel.subjects import archives
from spiritlevel.subjects.data import load_data


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
