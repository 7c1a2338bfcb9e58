"""Small files of images and labels as data sets come in, for the tests of their readers."""

import struct

import numpy as np
import pytest

from spiritlevel.errors import SpiritLevelError
from spiritlevel.subjects.data import load_data

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
