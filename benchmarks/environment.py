"""The peers' own environment, and what a result says about the machine it came from."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import spiritlevel
from spiritlevel.errors import SpiritLevelError

# One build of torch for everybody; what this library needs; the peers without what they pull in (torchvision is not
# needed by anything that is measured); the small packages the peers do need.
TORCH = "torch==2.13.0"
OWN = ("numpy", "scipy", "safetensors", "typer", "rich", "pydantic", "jinja2", "matplotlib")
PEERS = (
    "pyhessian==0.1",
    "curvlinops-for-pytorch==3.0.1",
    "backpack-for-pytorch==1.7.1",
    "hessian-eigenthings==1.0.0a5",
)
SMALL = ("einops", "einconv", "unfoldNd", "linear_operator", "opt-einsum", "tqdm", "packaging")


def build(folder: Path) -> Path:
    """The python of an environment in `folder` that holds this library and its peers, made where it is missing."""
    python, done = folder / "bin" / "python", folder / "installed.json"
    wanted = json.dumps([TORCH, OWN, PEERS, SMALL, _self()])
    if done.is_file() and done.read_text(encoding="utf-8") == wanted:
        return python
    _call(sys.executable, "-m", "venv", str(folder))
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    _call(*pip, TORCH, *OWN)
    _call(*pip, "--no-deps", *PEERS, *SMALL)
    _call(*pip, "--no-deps", *_self())
    done.write_text(wanted, encoding="utf-8")
    return python


def _self() -> tuple[str, ...]:
    """This library as pip takes it: the checkout it runs from, or the same version."""
    root = Path(spiritlevel.__file__).parents[2]
    return ("-e", str(root)) if (root / "pyproject.toml").is_file() else (f"spiritlevel=={spiritlevel.__version__}",)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SpiritLevelError(
            f"the benchmark's environment could not be made: {last}. It needs an index of packages; "
            "`spiritlevel bench --quick` measures this library alone and needs none"
        )


def describe(python: Path) -> dict[str, object]:
    """Processor, versions, threads and date: no names and no paths."""
    names = ["torch", "numpy", "scipy", *(peer.partition("==")[0] for peer in PEERS)]
    code = (
        "import importlib.metadata as m, json, sys\n"
        "def v(n):\n try: return m.version(n)\n except m.PackageNotFoundError: return None\n"
        "print(json.dumps({n: v(n) for n in sys.argv[1:]}))"
    )
    out = subprocess.run([str(python), "-c", code, *names], capture_output=True, text=True, check=True).stdout
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": 1,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "spiritlevel": importlib.metadata.version("spiritlevel"),
        **{name: version for name, version in json.loads(out).items() if version is not None},
        "date": datetime.now(UTC).date().isoformat(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
