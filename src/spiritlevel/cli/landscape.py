"""`spiritlevel landscape`: the loss around a minimum, as a picture and as numbers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from spiritlevel.cli.options import (
    Dtype,
    NetworkOptions,
    PartOptions,
    Quiet,
    Seed,
    check_folder,
    check_writable,
    read_dtype,
)
from spiritlevel.cli.output import HtmlFile, say_written
from spiritlevel.errors import SpiritLevelError
from spiritlevel.landscape import landscape as landscapes
from spiritlevel.saved import write_whole

Directions = Annotated[
    str, typer.Option(metavar="random|eigen|between", help="Random, top eigenvectors, or towards --other.")
]
Normalization = Annotated[
    str | None, typer.Option(metavar="NAME", help=f"{', '.join(landscapes.NORMALIZATIONS)}; layer by default.")
]
Other = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Weights of a second network of the same architecture.")
]
AsSurface = Annotated[bool, typer.Option("--surface", help="Two directions at once instead of lines.")]
Points = Annotated[int | None, typer.Option(metavar="N", help="Points a line (41) or a side of the surface (21).")]
Seeds = Annotated[int, typer.Option(metavar="N", help="How many random directions or eigenvectors.")]
Span = Annotated[str | None, typer.Option(metavar="A,B", help="The range of steps; -1,1 by default.")]
ThreeD = Annotated[bool, typer.Option("--three-d", help="Draw a surface in three dimensions.")]
Out = Annotated[Path, typer.Option(metavar="FOLDER", help="Where pictures, numbers and unfinished grids go.")]


def landscape(
    *,
    network: NetworkOptions,
    directions: Directions = "random",
    normalization: Normalization = None,
    other: Other = None,
    surface: AsSurface = False,
    points: Points = None,
    seeds: Seeds = 5,
    seed: Seed = 0,
    span: Span = None,
    three_d: ThreeD = False,
    dtype: Dtype = None,
    part: PartOptions,
    out: Out = Path("landscape"),
    html_file: HtmlFile = None,
    quiet: Quiet = False,
) -> None:
    """Draw the loss along lines or over a plane through a trained network's minimum.

    Writes PNG, SVG and JSON. What is done is kept in the folder: the same command continues where it was interrupted.
    """
    check_folder("--out", out)
    check_writable("--html", html_file)
    _check(directions, other, surface, three_d)
    subject = network.read(part)
    toward: Any = directions
    if directions == "between":
        toward = replace(network, checkpoint=other).read(part).model
    chosen = normalization or ("none" if directions == "between" else "layer")
    stem = f"{'surface' if surface else 'line'}-{directions}-{chosen.replace(' ', '-')}"
    options: dict[str, Any] = {
        "directions": toward,
        "normalization": normalization,
        "seed": seed,
        "span": _read_span(span),
        "dtype": read_dtype(dtype),
        "file": out / f"{stem}.grid.json",
    }
    if points is not None:
        options["points"] = points
    if not surface:
        options["count"] = seeds
    compute: Callable[..., Any] = landscapes.surface if surface else landscapes.line
    with _interrupted_gently(out), _points_bar(shown=not quiet) as listen:
        found = compute(*subject.parts, progress=listen, **options)
    drawing = _write(found, out / stem, three_d, quiet)
    if html_file is not None:
        _write_page(drawing, found.notes, html_file, quiet)


def _check(directions: str, other: Path | None, surface: bool, three_d: bool) -> None:
    if directions not in ("random", "eigen", "between"):
        raise SpiritLevelError(f"--directions must be random, eigen or between, got {directions!r}")
    if (directions == "between") != (other is not None):
        raise SpiritLevelError("--directions between and --other FILE belong together: the line leads to that network")
    if directions == "between" and surface:
        raise SpiritLevelError(
            "--surface needs two directions, and --directions between has one; leave one of them out"
        )
    if three_d and not surface:
        raise SpiritLevelError("--three-d draws a surface: add --surface")


def _read_span(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise SpiritLevelError(f"--span must be two numbers separated by a comma, got {text!r}") from None
    return low, high


@contextlib.contextmanager
def _interrupted_gently(out: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print(f"interrupted; what is done is kept in {out}: the same command continues there", file=sys.stderr)
        raise


@contextlib.contextmanager
def _points_bar(shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A listener for the points of a grid; it draws nothing unless `shown` and standard error is a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("points", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _write(found: Any, stem: Path, three_d: bool, quiet: bool) -> Any:
    # Only here: matplotlib is slow to load, and a wrong argument should be answered at once.
    from spiritlevel import plot

    drawing = plot.line(found) if isinstance(found, landscapes.Line) else plot.surface(found, three_d=three_d)
    found.save(stem.with_suffix(".json"))
    drawing.save(stem.with_suffix(".png"))
    drawing.save(stem.with_suffix(".svg"))
    if not quiet:
        for line in (drawing.description, *(f"• {note}" for note in found.notes)):
            Console().print(line, markup=False, highlight=False)
    for suffix in (".json", ".png", ".svg"):
        say_written(stem.with_suffix(suffix), quiet)
    return drawing


def _write_page(drawing: Any, notes: Sequence[str], path: Path, quiet: bool) -> None:
    # Only here, as above.
    from spiritlevel.show.page import render_page
    from spiritlevel.show.sections import Section

    section = Section("landscape", "Landscape", tuple(notes), (drawing,))
    write_whole(path, render_page(title=drawing.title, answer=[drawing.description], sections=[section]))
    say_written(path, quiet)
