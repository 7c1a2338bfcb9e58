"""Where results of a command go: the terminal, a JSON file or standard output, a page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console, RenderableType

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - prints it.")]
HtmlFile = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the result as one page.")]


class Result(Protocol):
    """What every result can do."""

    def to_dict(self) -> dict[str, Any]: ...

    def save(self, path: Path) -> None: ...

    def to_html(self, path: Path) -> None: ...


def write_result(
    result: Result, table: RenderableType, json_file: Path | None, html_file: Path | None, quiet: bool
) -> None:
    """Print the table unless JSON is printed or `quiet` is asked for; write the files and say so."""
    to_stdout = str(json_file) == "-"
    if to_stdout:
        print(json.dumps(result.to_dict(), indent=1, allow_nan=False))
    elif not quiet:
        Console().print(table)
    if json_file is not None and not to_stdout:
        result.save(json_file)
        say_written(json_file, quiet)
    if html_file is not None:
        result.to_html(html_file)
        say_written(html_file, quiet)


def say_written(path: Path, quiet: bool) -> None:
    if not quiet:
        print(f"wrote {path}", file=sys.stderr)
