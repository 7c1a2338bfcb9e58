"""`spiritlevel audit`: which measures survive what leaves this network's function alone."""

from __future__ import annotations

from typing import Annotated

import typer

from spiritlevel.audit.audit import audit as audit_network
from spiritlevel.audit.show import audit_table
from spiritlevel.cli.options import Measures, NetworkOptions, PartOptions, Tolerance, read_measures
from spiritlevel.cli.output import OutputOptions
from spiritlevel.errors import SpiritLevelError
from spiritlevel.measuring.progress import passes_bar
from spiritlevel.problem.ranks import launched

Strengths = Annotated[
    str, typer.Option(metavar="A,B,…", help="Standard deviations of the logarithms of the random factors.")
]
Seeds = Annotated[int, typer.Option(metavar="N", help="How many twins for every kind and strength.")]
Groups = Annotated[bool, typer.Option("--groups", help="Also audit every discovered group of factors by itself.")]


def audit(
    *,
    network: NetworkOptions,
    measures: Measures = None,
    strengths: Strengths = "0.5,1,1.5",
    seeds: Seeds = 1,
    groups: Groups = False,
    tolerance: Tolerance = 1e-3,
    part: PartOptions,
    output: OutputOptions,
) -> None:
    """Rescale a trained network without changing its function, and see which measures notice.

    Prints a verdict for every measure and kind of change, with the largest factor seen. Started by torchrun, the processes
    share the data.
    """
    if seeds < 1:
        raise SpiritLevelError(f"--seeds must be at least 1, got {seeds}")
    chosen, grown = read_measures(measures), _read_strengths(strengths)
    subject = network.read(part)
    with launched() as rank, passes_bar(shown=rank == 0 and not output.quiet) as listen:
        found = audit_network(
            *subject.parts,
            measures=chosen,
            strengths=grown,
            seeds=range(seeds),
            groups=groups,
            tolerance=tolerance,
            progress=listen,
        )
    if rank == 0:
        subject.warn_of(found.original.loss)
        output.write(found, audit_table(found))


def _read_strengths(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise SpiritLevelError(f"--strengths must be numbers separated by commas, got {text!r}") from None
