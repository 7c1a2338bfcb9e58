"""`spiritlevel spectrum`: the eigenvalues of a minimum, as a picture and as numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from spiritlevel.cli.options import (
    Checkpoint,
    DataName,
    Dtype,
    LossName,
    ModelName,
    Quiet,
    Samples,
    Seed,
    Split,
    Tolerance,
    check_writable,
    read_dtype,
    read_subject,
)
from spiritlevel.cli.output import JsonFile, say_written
from spiritlevel.errors import SpiritLevelError
from spiritlevel.measuring.progress import passes_bar
from spiritlevel.problem.ranks import launched
from spiritlevel.spectrum.spectrum import Spectrum
from spiritlevel.spectrum.spectrum import spectrum as compute_spectrum

OperatorName = Annotated[
    str, typer.Option(metavar="hessian|riemannian|nodewise|WEIGHT", help="H, DHD, |θ|H|θ|, or one weight's block of H.")
]
Probes = Annotated[int, typer.Option(metavar="N", help="Random vectors, over which the error band is.")]
Steps = Annotated[int, typer.Option(metavar="N", help="Products for each.")]
Ends = Annotated[int, typer.Option(metavar="N", help="Eigenvalues to find at each end.")]
Picture = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the density (.png, .svg, .pdf).")]


def spectrum(
    model: ModelName,
    data: DataName,
    checkpoint: Checkpoint = None,
    loss: LossName = "cross_entropy",
    operator: OperatorName = "hessian",
    probes: Probes = 8,
    steps: Steps = 60,
    ends: Ends = 5,
    tolerance: Tolerance = 1e-3,
    seed: Seed = 0,
    dtype: Dtype = None,
    samples: Samples = None,
    split: Split = "train",
    picture: Picture = None,
    json_file: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Find the density of the Hessian's eigenvalues with its error, and the largest and smallest of them.

    Started by torchrun, the processes share the data.
    """
    if quiet and json_file is None and picture is None:
        raise SpiritLevelError("--quiet prints nothing, so nothing would be left: add --json or --picture")
    check_writable("--json", json_file)
    check_writable("--picture", picture)
    if picture is not None and picture.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise SpiritLevelError(f"--picture must end in .png, .svg or .pdf, got {picture.name!r}")
    precision = read_dtype(dtype)
    subject = read_subject(model, checkpoint, data, loss, split, samples)
    with launched() as rank, passes_bar(shown=rank == 0 and not quiet) as listen:
        found = compute_spectrum(
            subject.model,
            subject.pair,
            subject.loss,
            operator=operator,
            probes=probes,
            steps=steps,
            ends=ends,
            tolerance=tolerance,
            seed=seed,
            dtype=precision,
            progress=listen,
        )
    if rank == 0:
        _write(found, json_file, picture, quiet)


def _write(found: Spectrum, json_file: Path | None, picture: Path | None, quiet: bool) -> None:
    if str(json_file) == "-":
        print(json.dumps(found.to_dict(), allow_nan=False))
    elif not quiet:
        print(found)
        for note in found.notes:
            print(f"• {note}")
    if json_file is not None and str(json_file) != "-":
        found.save(json_file)
        say_written(json_file, quiet)
    if picture is not None:
        # Only here: matplotlib is slow to load, and a wrong argument should be answered at once.
        from spiritlevel import plot

        plot.spectrum(found).save(picture)
        say_written(picture, quiet)
