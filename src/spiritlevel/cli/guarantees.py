"""`spiritlevel bound`, `robustness` and `compare`: what a flatness number buys, and who is flatter."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console, RenderableType

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
    Subject,
    Tolerance,
    check_writable,
    read_dtype,
    read_measures,
    read_subject,
)
from spiritlevel.compare.compare import compare as compare_networks
from spiritlevel.compare.show import ranking_table
from spiritlevel.errors import SpiritLevelError
from spiritlevel.guarantees.pac_bayes import pac_bayes
from spiritlevel.guarantees.robustness import feature_robustness
from spiritlevel.guarantees.show import certificate_table, robustness_table
from spiritlevel.measuring.progress import passes_bar
from spiritlevel.problem.ranks import launched
from spiritlevel.subjects.data import load_data

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - prints it.")]
HtmlFile = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the result as one page.")]
Measures = Annotated[str | None, typer.Option(metavar="A,B,…|all", help="Names, as for `spiritlevel measure`.")]


class _Result(Protocol):
    def to_dict(self) -> dict[str, Any]: ...
    def save(self, path: Path) -> None: ...
    def to_html(self, path: Path) -> None: ...


def bound(
    model: ModelName,
    data: DataName,
    checkpoint: Checkpoint = None,
    loss: LossName = "cross_entropy",
    method: Annotated[str, typer.Option(metavar="matrix|rows|optimized", help="How the noise is chosen.")] = "matrix",
    vectors: Annotated[
        str, typer.Option(metavar="noise|float32|bfloat16", help="Biases and the like: noisy, or described by bits.")
    ] = "noise",
    delta: Annotated[float, typer.Option(metavar="P", help="The probability that the bound may be wrong.")] = 0.05,
    draws: Annotated[int, typer.Option(metavar="N", help="Networks drawn to estimate the noisy training error.")] = 200,
    prior: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Weights that were fixed without this data, to centre the prior."),
    ] = None,
    test: Annotated[bool, typer.Option("--test", help="Also show the errors on the test split of the data.")] = False,
    seed: Seed = 0,
    dtype: Dtype = None,
    samples: Samples = None,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    quiet: Quiet = False,
) -> None:
    """Bound the test error of a network with noise on its weights, from its training data.

    Prints the PAC-Bayes bound term by term. It is a certificate, also where it is vacuous.
    """
    _check_outputs(json_file, html_file, quiet)
    subject = read_subject(model, checkpoint, data, loss, samples=samples)
    centre = None if prior is None else read_subject(model, prior, data, loss, samples=samples).model
    held_out = load_data(data, split="test") if test else None
    found = pac_bayes(
        subject.model,
        subject.pair,
        subject.loss,
        test_data=None if held_out is None else (held_out.x, held_out.y),
        method=method,  # type: ignore[arg-type]
        vectors=vectors,  # type: ignore[arg-type]
        delta=delta,
        draws=draws,
        prior=centre,
        seed=seed,
        dtype=read_dtype(dtype),
    )
    _write(found, certificate_table(found), json_file, html_file, quiet)


def robustness(
    model: ModelName,
    data: DataName,
    layer: Annotated[str, typer.Option(metavar="NAME", help="The layer: a weight's name or its module's.")],
    delta: Annotated[float, typer.Option(metavar="D", help="The share by which its features move.")] = 0.1,
    checkpoint: Checkpoint = None,
    loss: LossName = "cross_entropy",
    matrices: Annotated[
        str, typer.Option(metavar="orthogonal|gaussian", help="Which random matrices mix the features.")
    ] = "orthogonal",
    num_matrices: Annotated[int, typer.Option("--matrix-count", metavar="N", help="How many of them.")] = 8,
    tolerance: Tolerance = 1e-3,
    seed: Seed = 0,
    dtype: Dtype = None,
    samples: Samples = None,
    split: Split = "train",
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    quiet: Quiet = False,
) -> None:
    """How much the loss rises when the features of a layer move.

    Prints the mean rise, the worst one found, what curvature says it should be, and the bound by κ.
    """
    _check_outputs(json_file, html_file, quiet)
    subject = read_subject(model, checkpoint, data, loss, split, samples)
    found = feature_robustness(
        subject.model,
        subject.pair,
        layer,
        delta,
        subject.loss,
        matrices=matrices,  # type: ignore[arg-type]
        num_matrices=num_matrices,
        tolerance=tolerance,
        seed=seed,
        dtype=read_dtype(dtype),
    )
    _write(found, robustness_table(found), json_file, html_file, quiet)


def compare(
    networks: Annotated[
        list[str],
        typer.Argument(metavar="NAME=MODEL@FILE…", help="Two or more, such as small=mlp:64-32@small.safetensors."),
    ],
    data: DataName,
    loss: LossName = "cross_entropy",
    measures: Measures = None,
    confidence: Annotated[float, typer.Option(metavar="P", help="From which probability on an order counts.")] = 0.95,
    these_data: Annotated[
        bool, typer.Option("--these-data", help="Orders on these data only: no sampling error, half the cost.")
    ] = False,
    tolerance: Tolerance = 1e-3,
    seed: Seed = 0,
    dtype: Dtype = None,
    samples: Samples = None,
    split: Split = "train",
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    quiet: Quiet = False,
) -> None:
    """Rank several trained networks by every measure.

    Prints who is flatter by which measure, how sure every order is, and what is not decided. Every network is measured again
    on ten parts of the data, so that the order holds for more data of the same kind too. Started by torchrun, the processes
    share the data.
    """
    _check_outputs(json_file, html_file, quiet)
    chosen, precision = read_measures(measures), read_dtype(dtype)
    subjects = _read_networks(networks, data, loss, split, samples)
    first = next(iter(subjects.values()))
    with launched() as rank, passes_bar(shown=rank == 0 and not quiet) as listen:
        found = compare_networks(
            {name: subject.model for name, subject in subjects.items()},
            first.pair,
            first.loss,
            measures=chosen,
            confidence=confidence,
            tolerance=tolerance,
            seed=seed,
            dtype=precision,
            progress=listen,
            sampling=not these_data,
        )
    if rank == 0:
        _write(found, ranking_table(found), json_file, html_file, quiet)


def _read_networks(networks: list[str], data: str, loss: str, split: str, samples: int | None) -> dict[str, Subject]:
    """`NAME=MODEL@FILE`, `MODEL@FILE` or `package.module:factory`, each by its name."""
    subjects: dict[str, Subject] = {}
    for text in networks:
        label, equals, rest = text.partition("=")
        spec = rest if equals else text
        model, at, file = spec.rpartition("@")
        name = label if equals else Path(file).stem if at else spec
        if name in subjects:
            raise SpiritLevelError(f"two networks are called {name!r}: give each a name, as in NAME=MODEL@FILE")
        subjects[name] = read_subject(model if at else spec, Path(file) if at else None, data, loss, split, samples)
    return subjects


def _check_outputs(json_file: Path | None, html_file: Path | None, quiet: bool) -> None:
    if quiet and json_file is None and html_file is None:
        raise SpiritLevelError("--quiet prints no table, so nothing would be left of the result: add --json or --html")
    check_writable("--json", json_file)
    check_writable("--html", html_file)


def _write(found: _Result, table: RenderableType, json_file: Path | None, html_file: Path | None, quiet: bool) -> None:
    to_stdout = str(json_file) == "-"
    if to_stdout:
        print(json.dumps(found.to_dict(), indent=1, allow_nan=False))
    elif not quiet:
        Console().print(table)
    for path, write in ((json_file if not to_stdout else None, found.save), (html_file, found.to_html)):
        if path is not None:
            write(path)
            if not quiet:
                print(f"wrote {path}", file=sys.stderr)
