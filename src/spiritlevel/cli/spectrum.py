"""`spiritlevel spectrum`: the eigenvalues of a minimum, as a picture and as numbers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from spiritlevel.cli.options import AccuracyOptions, NetworkOptions, PartOptions, Quiet, check_writable
from spiritlevel.cli.output import HtmlFile, JsonFile, check_files, say_written, write_result
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
    *,
    network: NetworkOptions,
    operator: OperatorName = "hessian",
    probes: Probes = 8,
    steps: Steps = 60,
    ends: Ends = 5,
    accuracy: AccuracyOptions,
    part: PartOptions,
    picture: Picture = None,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    quiet: Quiet = False,
) -> None:
    """Find the density of the Hessian's eigenvalues with its error, and the largest and smallest of them.

    Started by torchrun, the processes share the data.
    """
    check_files("--picture", json_file, picture or html_file, quiet)
    check_writable("--html", html_file)
    if picture is not None and picture.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise SpiritLevelError(f"--picture must end in .png, .svg or .pdf, got {picture.name!r}")
    subject = network.read(part)
    with launched() as rank, passes_bar(shown=rank == 0 and not quiet) as listen:
        found = compute_spectrum(
            *subject.parts,
            operator=operator,
            probes=probes,
            steps=steps,
            ends=ends,
            progress=listen,
            **accuracy.arguments,
        )
    if rank == 0:
        subject.warn_of(found.loss)
        write_result(found, str(found), json_file, picture, partial(_draw, found), quiet)
        if html_file is not None:
            found.to_html(html_file)
            say_written(html_file, quiet)


def _draw(found: Spectrum, picture: Path) -> None:
    # Only here: matplotlib is slow to load, and a wrong argument should be answered at once.
    from spiritlevel import plot

    plot.spectrum(found).save(picture)
