"""`spiritlevel demo`: train, measure, rescale, measure again, and look at it."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from spiritlevel.cli import demonstration as showcase
from spiritlevel.cli.options import Seed, check_folder
from spiritlevel.measuring.progress import passes_bar
from spiritlevel.show.tables import comparison_table

Out = Annotated[Path, typer.Option(metavar="FOLDER", help="Where the page, the picture and the weights go.")]


def demo(out: Out = Path("out/demo"), seed: Seed = 0) -> None:
    """Two small networks and a twin, in a minute.

    Trains one network on small batches of handwritten digits and one on large batches, measures both, and builds a twin
    of the flatter one that computes the same function and looks a million times sharper to the plain Hessian norm.
    """
    check_folder("--out", out)
    with passes_bar() as listen:
        found = showcase.run_demo(showcase.Settings(seed=seed), listen)
    page = showcase.write_demo(found, out)
    console = Console()
    console.print(comparison_table(found.reports))
    for words in (showcase.training_words, showcase.verdict_words, showcase.twin_words):
        console.print()
        _paragraph(console, words(found))
    console.print()
    _paragraph(console, f"The page: {page}")


def _paragraph(console: Console, text: str) -> None:
    """Plain text wrapped between words; a path longer than the line stays whole, so that it can be copied."""
    wrapped = textwrap.fill(text, console.width, break_long_words=False, break_on_hyphens=False)
    console.print(wrapped, markup=False, highlight=False, soft_wrap=True)
