"""Commands that torchrun starts: several processes share the work, give the numbers of one, and one of them prints."""

import json
import os
import subprocess
import sys

import pytest

from spiritlevel import cli
from spiritlevel.subjects.checkpoint import save_checkpoint
from spiritlevel.subjects.networks import build_model


@pytest.mark.long
def test_several_processes_give_the_numbers_of_one(tmp_path, monkeypatch, capsys):
    """Three, of torchrun itself; two that are started in its way, by every command: tests/problem/test_ranks.py."""
    monkeypatch.chdir(tmp_path)
    save_checkpoint(build_model("mlp:4", input_shape=(5,), classes=3, seed=1), "net.safetensors")
    command = ["measure", "mlp:4", "--checkpoint", "net.safetensors", "--data", "random:40,5,3,0"]
    command += ["--measures", "hessian_trace,kappa_trace_sum", "--json", "-"]
    with pytest.raises(SystemExit):
        cli.main(command)
    alone = json.loads(capsys.readouterr().out)["values"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run(
        [*launcher, "-m", "spiritlevel", *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    together = json.loads(done.stdout)["values"]  # printed once
    assert {name: value["value"] for name, value in together.items()} == pytest.approx(
        {name: value["value"] for name, value in alone.items()}, rel=1e-5
    )
