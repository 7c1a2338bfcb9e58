"""A progress bar on standard error: what is computed, the passes over the data so far, the time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column


@contextlib.contextmanager
def passes_bar(shown: bool = True) -> Iterator[Callable[[str, float], None]]:
    """A listener for `measure(progress=…)`; it draws nothing unless `shown` and standard error is a terminal."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
        TextColumn("{task.fields[passes]}", table_column=Column(no_wrap=True)),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
    )
    hidden = not (shown and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=hidden, expand=True) as bar:
        task = bar.add_task("", total=None, passes="")

        def listen(stage: str, passes: float) -> None:
            bar.update(task, description=stage, passes=f"{passes:.0f} passes over the data" if passes else "")

        yield listen
