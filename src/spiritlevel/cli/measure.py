"""`spiritlevel measure`: a trained network in, a table, JSON or a page out."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from spiritlevel.cli.options import (
    Budget,
    Dtype,
    Measures,
    NetworkOptions,
    OwnTolerance,
    PartOptions,
    Seed,
    Split,
    Subject,
    read_dtype,
    read_measures,
)
from spiritlevel.cli.output import OutputOptions
from spiritlevel.measuring import run
from spiritlevel.measuring.report import Report
from spiritlevel.problem.ranks import launched
from spiritlevel.show.tables import report_table

INTERRUPTED = 130

RandomSamples = Annotated[
    int | None,
    typer.Option(metavar="N", help="Only N samples, chosen at random; their sampling error is in the bars."),
]


def measure(
    *,
    network: NetworkOptions,
    measures: Measures = None,
    tolerance: OwnTolerance = None,
    budget: Budget = None,
    seed: Seed = 0,
    dtype: Dtype = None,
    samples: RandomSamples = None,
    split: Split = "train",
    output: OutputOptions,
) -> None:
    """Measure a trained network.

    Prints every value with its error, how sure it is and which rescalings of the weights it survives. Ctrl-C prints what
    is finished. Started by torchrun, the processes share the data.
    """
    chosen, precision = read_measures(measures), read_dtype(dtype)
    subject = network.read(PartOptions(split=split))
    with launched() as rank:
        report = run.measure(
            *subject.parts,
            measures=chosen,
            samples=samples,
            progress=rank == 0 and not output.quiet,
            tolerance=tolerance,
            budget=budget,
            seed=seed,
            dtype=precision,
        )
    if rank == 0:
        subject.warn_of(report.loss)
        report = _told_of(report, subject)
        output.write(report.without_witnesses(), report_table(report))
        if report.interrupted:
            raise typer.Exit(INTERRUPTED)


def _told_of(report: Report, subject: Subject) -> Report:
    """The report with what it is a report of, and what is doubtful about that."""
    doubt = subject.doubt(report.loss)
    notes = (*((doubt,) if doubt else ()), *report.notes)
    return replace(report, problem={**report.problem, "source": dict(subject.facts)}, notes=notes)
