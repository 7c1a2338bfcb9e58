"""Where results of a command go: the terminal, a JSON file or standard output, a page."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console, RenderableType

from spiritlevel.cli.options import Quiet, check_writable
from spiritlevel.errors import SpiritLevelError

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - prints it.")]
HtmlFile = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the result as one page.")]


class Result(Protocol):
    """What every result can do."""

    def to_dict(self) -> dict[str, Any]: ...

    def save(self, path: Path) -> None: ...


class ResultWithPage(Result, Protocol):
    """A result that can also be written as a page."""

    def to_html(self, path: Path) -> None: ...


@dataclass(frozen=True)
class OutputOptions:
    """Where the result goes; a place that cannot be written to is refused before any work is done."""

    json_file: JsonFile = None
    html_file: HtmlFile = None
    quiet: Quiet = False

    def __post_init__(self) -> None:
        check_files("--html", self.json_file, self.html_file, self.quiet)

    def write(self, result: ResultWithPage, table: RenderableType) -> None:
        write_result(result, table, self.json_file, self.html_file, result.to_html, self.quiet)


def check_files(option: str, json_file: Path | None, other_file: Path | None, quiet: bool) -> None:
    """Refuse files that cannot be written, and a quiet command that writes none; `option` names the other file."""
    if quiet and json_file is None and other_file is None:
        raise SpiritLevelError(
            f"--quiet prints no result, so nothing would be left of the work: add --json or {option}"
        )
    check_writable("--json", json_file)
    check_writable(option, other_file)


def write_result(
    result: Result,
    shown: RenderableType,
    json_file: Path | None,
    other_file: Path | None,
    write_other: Callable[[Path], object],
    quiet: bool,
) -> None:
    """Write the files, then print what is `shown` unless JSON is printed or `quiet` is asked for, and say what was written.

    Files come first: whoever reads the output may have gone, and what was computed would be lost with it.
    """
    to_stdout = str(json_file) == "-"
    files = [(None if to_stdout else json_file, result.save), (other_file, write_other)]
    written = []
    for path, write in files:
        if path is not None:
            write(path)
            written.append(path)
    if to_stdout:
        print(json.dumps(result.to_dict(), indent=1, allow_nan=False))
    elif not quiet:
        print(shown) if isinstance(shown, str) else Console().print(shown)
    for path in written:
        say_written(path, quiet)


def say_written(path: Path, quiet: bool) -> None:
    if not quiet:
        print(f"wrote {path}", file=sys.stderr)
