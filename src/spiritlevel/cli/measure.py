"""`spiritlevel measure`: a trained network in, a table, JSON or a page out."""

from __future__ import annotations

from typing import Annotated

import typer

from spiritlevel.cli.options import (
    Checkpoint,
    DataName,
    Dtype,
    LossName,
    Measures,
    ModelName,
    Quiet,
    Seed,
    Split,
    Tolerance,
    check_writable,
    read_dtype,
    read_measures,
    read_subject,
)
from spiritlevel.cli.output import HtmlFile, JsonFile, write_result
from spiritlevel.errors import SpiritLevelError
from spiritlevel.measuring import run
from spiritlevel.problem.ranks import launched
from spiritlevel.show.tables import report_table

INTERRUPTED = 130

RandomSamples = Annotated[
    int | None,
    typer.Option(metavar="N", help="Only N samples, chosen at random; their sampling error is in the bars."),
]


def measure(
    model: ModelName,
    data: DataName,
    checkpoint: Checkpoint = None,
    loss: LossName = "cross_entropy",
    measures: Measures = None,
    tolerance: Tolerance = 1e-3,
    seed: Seed = 0,
    dtype: Dtype = None,
    samples: RandomSamples = None,
    split: Split = "train",
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    quiet: Quiet = False,
) -> None:
    """Measure a trained network.

    Prints every value with its error, how sure it is and which rescalings of the weights it survives. Ctrl-C prints what
    is finished. Started by torchrun, the processes share the data.
    """
    if quiet and json_file is None and html_file is None:
        raise SpiritLevelError(
            "--quiet prints no table, so nothing would be left of the measurement: add --json or --html"
        )
    check_writable("--json", json_file)
    check_writable("--html", html_file)
    chosen, precision = read_measures(measures), read_dtype(dtype)
    subject = read_subject(model, checkpoint, data, loss, split)
    with launched() as rank:
        report = run.measure(
            subject.model,
            subject.pair,
            subject.loss,
            measures=chosen,
            tolerance=tolerance,
            seed=seed,
            dtype=precision,
            samples=samples,
            progress=rank == 0 and not quiet,
        )
    if rank == 0:
        write_result(report.without_witnesses(), report_table(report), json_file, html_file, quiet)
        if report.interrupted:
            raise typer.Exit(INTERRUPTED)
