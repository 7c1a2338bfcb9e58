"""`spiritlevel sharpen`: an equivalent network that is as sharp as asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spiritlevel.attack import attack
from spiritlevel.cli.options import NetworkOptions, PartOptions, check_writable
from spiritlevel.cli.output import say_written
from spiritlevel.subjects.checkpoint import save_checkpoint

Target = Annotated[float, typer.Option(metavar="M", help="The Hessian norm to reach.")]
Eigenvalues = Annotated[int, typer.Option(metavar="N", help="How many eigenvalues shall exceed the target.")]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the twin's weights (.safetensors).")]


def sharpen(
    *,
    network: NetworkOptions,
    target: Target,
    eigenvalues: Eigenvalues = 1,
    part: PartOptions,
    out: Out = None,
) -> None:
    """Build an equivalent network with a Hessian as large as asked for (Dinh et al. 2017, Theorems 4 and 5)."""
    check_writable("--out", out)
    found = attack.sharpen(*network.read(part).parts, target=target, eigenvalues=eigenvalues)
    print(found)
    for name, factor in found.factors.items():
        print(f"  {name} × {factor:.6g}")
    if out is not None:
        save_checkpoint(found.model, out)
        say_written(out, quiet=False)
