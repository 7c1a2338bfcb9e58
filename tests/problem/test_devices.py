"""No tensor is made on the wrong device: the default set on a device that is not the CPU, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("device_worker.py")


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict:
    """What a process saw in which the device is registered; there is no way back from that."""
    place = tmp_path_factory.mktemp("device") / "seen.json"
    subprocess.run(
        [sys.executable, str(WORKER), str(place)], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=600
    )
    return json.loads(place.read_text())


@pytest.mark.slow
def test_every_operation_has_its_tensors_on_one_device(seen) -> None:
    assert seen["mixed"] == []
    assert seen["operations"] > 1000


@pytest.mark.slow
def test_only_small_things_come_to_the_cpu(seen) -> None:
    """The matrices of small networks and the coefficients of Krylov vectors at every step; labels, the slopes of the samples and
    how far they reach, once in each of two measurements."""
    assert set(seen["copied"]) == {"lanczos.py", "whole.py", "batches.py", "survey.py"}
    assert seen["copied"]["batches.py"] + seen["copied"]["survey.py"] == 2 * 4


@pytest.mark.slow
def test_a_device_without_double_precision_leaves_it_to_the_cpu(seen) -> None:
    assert seen["single"] == pytest.approx({name: seen["here"][name] for name in seen["single"]}, rel=1e-9)
    said = "measured on the CPU: sums are taken in double precision, which elsewhere:0 does not have"
    assert seen["notes"].count(said) == 1
    assert seen["at"] == seen["balanced at"] == "elsewhere:0"  # the caller's model, and its twins, stay where they are
    assert seen["balanced"]
    assert seen["audit"] == "invariant"


@pytest.mark.slow
def test_the_device_has_the_same_draws_and_values(seen) -> None:
    assert len(seen["here"]) > 10
    assert seen["there"] == pytest.approx(seen["here"], rel=1e-9)
