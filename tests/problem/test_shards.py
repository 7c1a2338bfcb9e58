"""A model that no process holds whole: the numbers of one process within their errors, or a refusal that says what to do."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import spiritlevel as sl
from spiritlevel.problem.sharded import _Exchange
from spiritlevel.problem.shards import WHOLE
from spiritlevel.problem.wrappers import in_shards

sys.path.insert(0, str(Path(__file__).parent))
from shards_worker import NAMES, batch_loss, recurrent, smallest, subject

WORKER = Path(__file__).with_name("shards_worker.py")


def test_a_map_and_its_adjoint_are_each_others_derivatives() -> None:
    A = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def cube(x: torch.Tensor) -> torch.Tensor:
        return _Exchange.apply(x, lambda v: A @ v, lambda v: A.T @ v) ** 3

    x = torch.tensor([0.5, -2.0], dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(cube(x), (A @ x) ** 3)
    assert torch.autograd.gradcheck(cube, x)
    assert torch.autograd.gradgradcheck(cube, x)


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> list[dict]:
    """What each of two processes saw."""
    place = tmp_path_factory.mktemp("shards") / "seen"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, str(WORKER), str(rank), "2", str(place)], env=environment)
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=600) for process in processes] == [0, 0]
    finally:  # none is left behind, to be blamed on another test
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads(Path(f"{place}.{rank}").read_text()) for rank in range(2)]


@pytest.mark.long
def test_both_processes_report_the_same(seen) -> None:
    for key in ("sharded", "whole", "tensors"):
        for name, (value, error) in seen[0][key].items():
            assert seen[1][key][name][0] == pytest.approx(value, rel=1e-12, nan_ok=True)
            assert seen[1][key][name][1] == pytest.approx(error, rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES[:-1])
def test_a_sharded_model_has_the_numbers_of_one_process(seen, name: str) -> None:
    model, data = subject()
    alone = sl.measure(model, data, measures=[name], tolerance=1e-9, most_probes=4096)[name]
    value, error = seen[0]["sharded"][name]
    assert alone.error < 1e-6 * abs(alone.value) + 1e-12
    spread = 4 if name in ("hessian_trace", "normalized_sharpness", "rho_sum", "rho_row_sum") else 1
    assert value == pytest.approx(alone.value, abs=spread * error + 1e-9 * abs(alone.value))
    assert error < 0.6 * abs(value)


@pytest.mark.long
def test_the_loss_the_slope_and_the_size_are_those_of_the_whole_model(seen) -> None:
    model, (x, y) = subject()
    loss = nn.functional.cross_entropy(model(x), y).item()
    assert seen[0]["sharded"]["loss"][0] == pytest.approx(loss, rel=1e-12)
    assert seen[0]["sharded"]["parameters"][0] == sum(parameter.numel() for parameter in model.parameters())
    assert seen[1]["reported slope"] == pytest.approx(seen[1]["slope"], rel=1e-9)


@pytest.mark.long
def test_a_sharded_model_comes_back_as_it_was(seen) -> None:
    assert seen[0]["same"]
    assert seen[1]["same"]


@pytest.mark.long
def test_what_is_missing_is_told(seen) -> None:
    assert math.isnan(seen[0]["sharded"]["volume_flatness"][0])
    assert "the model is in shards" in seen[0]["missing"][0]
    assert any("in shards over 2 processes" in note for note in seen[0]["notes"])
    assert seen[0]["witness"]  # no process has the direction whole


@pytest.mark.long
def test_a_loss_that_reads_the_model_itself(seen) -> None:
    model, (x, y) = subject()
    batches = [[x[:6], y[:6]], [x[6:], y[6:]]]
    alone = sl.measure(model, batches, batch_loss, measures=[NAMES[1]])[NAMES[1]]
    value, error = seen[0]["whole"][NAMES[1]]
    assert value == pytest.approx(alone.value, abs=error + alone.error)


@pytest.mark.long
def test_a_module_that_keeps_its_weights_in_a_list(seen) -> None:
    model, data = recurrent()
    alone = sl.measure(model, data, measures=[NAMES[1]])[NAMES[1]]
    value, error = seen[0]["recurrent"][NAMES[1]]
    assert value == pytest.approx(alone.value, abs=error + alone.error)


@pytest.mark.long
def test_tensors_divided_in_any_way(seen) -> None:
    model, data = subject()
    alone = sl.measure(model, data, measures=NAMES[1:3])
    for name in NAMES[1:3]:
        value, error = seen[0]["tensors"][name]
        assert value == pytest.approx(alone[name].value, abs=error + alone[name].error)
    assert seen[0]["held"] + seen[1]["held"] == sum(parameter.numel() for parameter in model.parameters())
    assert seen[0]["gathered"]


@pytest.mark.long
def test_fewer_samples_and_entries_than_processes(seen) -> None:
    model, data = smallest()
    alone = sl.measure(model, data, "mse", measures=NAMES[1:3])
    assert [each["entries"] for each in seen] == [1, 0]
    for each in seen:
        for name in NAMES[1:3]:
            value, error = each["few"][name]
            assert value == pytest.approx(alone[name].value, abs=error + alone[name].error)


@pytest.mark.long
def test_processes_with_the_whole_model_divide_the_krylov_vectors(seen) -> None:
    model, data = subject()
    alone = sl.measure(model, data, measures=[NAMES[1]])[NAMES[1]]
    assert [max(each["basis"]) for each in seen] == [14, 13]  # of 27 parameters
    for each in seen:
        value, error = each["plain"][NAMES[1]]
        assert value == pytest.approx(alone.value, abs=error + alone.error)
        assert each["direction"] == 27  # the maximiser is whole again


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("alone", "in shards over 2 processes, and distributed=False"),
        ("audit", "only `measure` takes one"),
        ("spectrum", "only `measure` takes one"),
        ("data", "differ in the data"),
        ("flat", "wrapped by FullyShardedDataParallel"),
        ("parallel", "as tensor parallelism does: divide the model by torch.distributed.fsdp.fully_shard alone"),
        ("nan", "'2.bias' contains NaN or infinity (1 entries)"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_every_process(seen, case: str, told: str) -> None:
    assert told in seen[0][case]
    assert told in seen[1][case]


# --- one process -----------------------------------------------------------------------------------------------------


class Quantized(torch.Tensor):
    """A tensor whose numbers are somewhere else."""

    @staticmethod
    def __new__(cls, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, function, kinds, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return Quantized(args[0].shape)
        raise NotImplementedError


def test_a_parameter_whose_numbers_cannot_be_read_is_refused() -> None:
    model = nn.Linear(2, 1)
    model.weight = nn.Parameter(Quantized((1, 2)), requires_grad=False)
    with pytest.raises(sl.SpiritLevelError, match=r"'weight' is a Quantized, .* plain tensors as parameters"):
        sl.measure(model, (torch.randn(3, 2), torch.randn(3, 1)), "mse")


def test_deepspeeds_parts_are_refused() -> None:
    model = nn.Linear(2, 1)
    model.weight.ds_id = 0
    with pytest.raises(sl.SpiritLevelError, match="DeepSpeed's ZeRO stage 3"):
        sl.measure(model, (torch.randn(3, 2), torch.randn(3, 1)), "mse")


def test_a_plain_model_is_whole() -> None:
    model = nn.Linear(2, 1)
    assert not in_shards(model)
    assert WHOLE.whole("weight", model.weight) is model.weight
    assert WHOLE.first("weight") == 0
    assert WHOLE.shape("weight", model.weight) == (1, 2)
