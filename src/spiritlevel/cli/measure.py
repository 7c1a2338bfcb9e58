"""`spiritlevel measure`: a trained network in, a table, JSON or a page out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

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
    read_measures,
    read_subject,
)
from spiritlevel.cli.progress import passes_bar
from spiritlevel.errors import SpiritLevelError
from spiritlevel.measures import run
from spiritlevel.report.tables import report_table
from spiritlevel.result import Report

Measures = Annotated[
    str | None,
    typer.Option(metavar="A,B,…|all", help="Names, each with options if any: epsilon_sharpness:epsilon=5e-4."),
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON; - prints it.")]
HtmlFile = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the report as one page.")]


def measure(
    model: ModelName,
    data: DataName,
    checkpoint: Checkpoint = None,
    loss: LossName = "cross_entropy",
    measures: Measures = None,
    tolerance: Tolerance = 1e-3,
    seed: Seed = 0,
    dtype: Dtype = None,
    samples: Samples = None,
    split: Split = "train",
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    quiet: Quiet = False,
) -> None:
    """Measure a trained network.

    Prints every value with its error, how sure it is and which rescalings of the weights it survives.
    """
    if quiet and json_file is None and html_file is None:
        raise SpiritLevelError(
            "--quiet prints no table, so nothing would be left of the measurement: add --json or --html"
        )
    check_writable("--json", json_file)
    check_writable("--html", html_file)
    chosen, precision = read_measures(measures), read_dtype(dtype)
    subject = read_subject(model, checkpoint, data, loss, split, samples)
    with passes_bar(shown=not quiet) as listen:
        report = run.measure(
            subject.model,
            subject.pair,
            subject.loss,
            measures=chosen,
            tolerance=tolerance,
            seed=seed,
            dtype=precision,
            progress=listen,
        )
    _write(report, json_file, html_file, quiet)


def _write(report: Report, json_file: Path | None, html_file: Path | None, quiet: bool) -> None:
    to_stdout = str(json_file) == "-"
    if to_stdout:
        print(json.dumps(report.to_dict(), indent=1, allow_nan=False))
    elif not quiet:
        Console().print(report_table(report))
    if json_file is not None and not to_stdout:
        report.save(json_file)
        _say(json_file, quiet)
    if html_file is not None:
        report.to_html(html_file)
        _say(html_file, quiet)


def _say(path: Path, quiet: bool) -> None:
    if not quiet:
        print(f"wrote {path}", file=sys.stderr)
