"""The compiled part of a training's step: C++ for one thread, compiled once, where there is a compiler, and kept in the user's cache.

Where there is none, or where torch has several threads, torch computes the same.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from spiritlevel.saved import sha256_of, user_cache, write_whole

HERE = Path(__file__).resolve().parent
SOURCES, HEADERS = ("pooled_convolution.cpp", "dense_layers.cpp"), ("vectors.h",)
FLAGS = ("-O3", "-ffp-contract=fast", "-std=c++17", "-shared", "-fPIC")
# Of gcc: numbers that neighbouring places of an image share are loaded again; kept from one step of a loop to the next, they fill the
# registers. Other compilers do not know it.
OF_GCC = ("-fno-predictive-commoning",)
LONGEST = 300.0  # seconds that a compiler may take
COMPILERS = ("c++", "g++", "clang++")
# What a compiler may use of a processor of x86, by what torch calls it.
AVX2 = ("-mavx2", "-mfma")
X86 = {
    "AVX2": AVX2,
    "AVX512": (*AVX2, "-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mprefer-vector-width=512"),
}


def library() -> ctypes.CDLL | None:
    """The compiled code, where it is of use: it has one thread."""
    return compiled() if torch.get_num_threads() == 1 else None


def how() -> str:
    """What computes the step here, in words, with which code: another one may round in another way."""
    loaded = library()
    return "by torch" if loaded is None else f"by compiled code {Path(loaded._name).stem.partition('-')[0]}"


def address(tensor: Tensor) -> ctypes.c_void_p:
    """Where the numbers of a tensor lie, for the compiled code."""
    return ctypes.c_void_p(tensor.data_ptr())


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """The compiled code, from the cache or compiled now; None where that is not possible."""
    instructions = _instructions()
    if instructions is None:
        return None
    try:
        texts = {name: (HERE / name).read_text(encoding="utf-8") for name in (*SOURCES, *HEADERS)}
        kind = (sys.platform, platform.machine(), *platform.libc_ver(), *FLAGS, *OF_GCC, *instructions)
        key = hashlib.sha256("\n".join((*texts.values(), *kind)).encode()).hexdigest()[:16]
        folder = user_cache() / "compiled"
        path = _kept(folder, key) or _compile(folder, key, texts, instructions)
        return None if path is None else ctypes.CDLL(os.fspath(path))
    except (OSError, RuntimeError, subprocess.SubprocessError):  # RuntimeError: a user without a home
        return None


def _kept(folder: Path, key: str) -> Path | None:
    """The code in the cache, if it is whole, as its name says: one that was cut off would end the process."""
    for path in sorted(folder.glob(f"{key}-*.so")):
        if path.stem.partition("-")[2] == sha256_of(path)[:16]:
            return path
        path.unlink(missing_ok=True)
    return None


def _compile(folder: Path, key: str, texts: Mapping[str, str], instructions: tuple[str, ...]) -> Path | None:
    """The code of these texts in the cache, named by what it is made of and by what it is."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or COMPILERS[0], *COMPILERS))), None)
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as place:
        for name, text in texts.items():
            (Path(place) / name).write_text(text, encoding="utf-8")
        command = [compiler, *FLAGS, *instructions, *SOURCES, "-o", "code.so"]
        if subprocess.run([*command, *OF_GCC], cwd=place, capture_output=True, timeout=LONGEST).returncode:
            subprocess.run(command, cwd=place, check=True, capture_output=True, timeout=LONGEST)
        code = (Path(place) / "code.so").read_bytes()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{key}-{hashlib.sha256(code).hexdigest()[:16]}.so"
    write_whole(path, code)
    return path


def _instructions() -> tuple[str, ...] | None:
    """What to ask of the compiler, the same for all processors that can use it; None where it is not known to gain."""
    if platform.machine() in ("x86_64", "AMD64"):
        return X86.get(torch.backends.cpu.get_cpu_capability())
    return () if platform.machine() in ("arm64", "aarch64") else None
