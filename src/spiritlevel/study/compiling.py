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
from pathlib import Path

import torch
from torch import Tensor

from spiritlevel.saved import user_cache

HERE = Path(__file__).resolve().parent
SOURCES, HEADERS = ("pooled_convolution.cpp", "dense_layers.cpp"), ("vectors.h",)
# Numbers that neighbouring places of an image share are loaded again: kept from one step of a loop to the next, they fill the registers.
FLAGS = ("-O3", "-fno-predictive-commoning", "-ffp-contract=fast", "-std=c++17", "-shared", "-fPIC")
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
    return "by torch" if library() is None else f"by compiled code {_path().stem}"


def address(tensor: Tensor) -> ctypes.c_void_p:
    """Where the numbers of a tensor lie, for the compiled code."""
    return ctypes.c_void_p(tensor.data_ptr())


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """The compiled code, from the cache or compiled now; None where that is not possible."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or COMPILERS[0], *COMPILERS))), None)
    instructions = _instructions()
    if instructions is None:
        return None
    try:
        path = _path()
        if not path.is_file():
            if compiler is None:
                return None
            _compile([compiler, *FLAGS, *instructions, *(os.fspath(HERE / name) for name in SOURCES)], path)
        return ctypes.CDLL(os.fspath(path))
    except (OSError, subprocess.SubprocessError):
        return None


def _path() -> Path:
    """Where the compiled code is kept: named by all that it is made of."""
    texts = [(HERE / name).read_text(encoding="utf-8") for name in (*SOURCES, *HEADERS)]
    kind = (sys.platform, platform.machine(), *platform.libc_ver(), *FLAGS, *(_instructions() or ()))
    digest = hashlib.sha256("\n".join((*texts, *kind)).encode()).hexdigest()
    return user_cache() / "compiled" / f"{digest[:16]}.so"


def _compile(command: list[str], path: Path) -> None:
    """Into a file of its own first: several workers may start at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(f".{os.getpid()}")
    try:
        subprocess.run([*command, "-o", half], check=True, capture_output=True, timeout=LONGEST)
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)


def _instructions() -> tuple[str, ...] | None:
    """What to ask of the compiler, the same for all processors that can use it; None where it is not known to gain."""
    if platform.machine() in ("x86_64", "AMD64"):
        return X86.get(torch.backends.cpu.get_cpu_capability())
    return () if platform.machine() in ("arm64", "aarch64") else None
