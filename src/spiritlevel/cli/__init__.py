"""The command line. A command is a function in a file and a line in `COMMANDS`.

Exit codes: 0 done, 1 something failed that should not have, 2 wrong use or input that cannot be measured, 130 interrupted
by Ctrl-C, 143 by SIGTERM. Both keep what is finished.
"""

from __future__ import annotations

import importlib
import io
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console

from spiritlevel._version import __version__
from spiritlevel.cli.groups import with_single_options
from spiritlevel.cli.listing import ListedCommands
from spiritlevel.errors import SpiritLevelError, suggest
from spiritlevel.presenting import set_facts
from spiritlevel.problem.ranks import launched_processes

# In the order in which `spiritlevel --help` lists them, each with its module. A module is imported when its command is asked
# for: a typing error is answered without waiting for matplotlib.
COMMANDS: dict[str, str] = {
    "demo": "demo",
    "measure": "measure",
    "measures": "measures",
    "audit": "audit",
    "sharpen": "sharpen",
    "landscape": "landscape",
    "spectrum": "spectrum",
    "bench": "bench",
    "bound": "guarantees",
    "robustness": "guarantees",
    "compare": "guarantees",
    "study": "study",
}
INTERRUPTED = 130  # as cli/measure.py leaves with it


def command(name: str) -> Any:
    """The function of a command, or for `study` the application with its own commands."""
    return getattr(importlib.import_module(f"spiritlevel.cli.{COMMANDS[name]}"), name)


class _Commands(ListedCommands):
    """The commands by name, each read when it is asked for."""

    def list_commands(self, _context: Any) -> list[str]:
        return list(COMMANDS)

    def resolve_command(self, context: Any, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            context.fail(f"No such command {args[0]!r}{suggest(args[0], COMMANDS)}")
        return super().resolve_command(context, args)

    def get_command(self, _context: Any, name: str) -> Any:
        if name not in COMMANDS:
            return None
        found = command(name)
        if isinstance(found, typer.Typer):
            return typer.main.get_group(found)
        alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        alone.command(name, context_settings=_SETTINGS)(with_single_options(found))
        return typer.main.get_command(alone)


_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

# Those whose processes, started by torchrun, share the work. Of any other command one process does it all.
SHARED = frozenset({"measure", "audit", "compare", "spectrum"})

FAILED, WRONG_USE, TERMINATED = 1, 2, 128 + signal.SIGTERM

app = typer.Typer(
    help="How flat is the minimum of a trained network, in numbers that no rescaling of its weights can fool.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=_SETTINGS,
    cls=_Commands,
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"spiritlevel {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    _debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options of every command."""
    _leave_to_one(context.invoked_subcommand or "")


def _leave_to_one(command: str) -> None:
    """Where torchrun started several processes and the command cannot share its work: end all of them but the first."""
    rank, size = launched_processes()
    if size < 2 or command in SHARED:
        return
    if rank > 0:
        raise typer.Exit
    shared = ", ".join(sorted(SHARED))
    print(
        f"{command} runs in one process: of the {size} that torchrun started, the others have ended ({shared} share theirs)",
        file=sys.stderr,
    )


def _replace_what_cannot_be_printed() -> None:
    """A terminal whose encoding has no κ gets a question mark: no command fails because of it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code; an error is a plain sentence unless `--debug` is given."""
    _replace_what_cannot_be_printed()
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given  # wherever it stands, also behind the command
    given = [argument for argument in given if argument != "--debug"]
    set_facts({"command": " ".join(["spiritlevel", *given]), "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")})
    try:
        with _terminated_like_interrupted():
            app(given, prog_name="spiritlevel")
    except SpiritLevelError as error:
        if debug:
            raise
        _leave(f"error: {error}", WRONG_USE)
    except OSError as error:
        if debug:
            raise
        _leave(f"failed: {error.filename}: {error.strerror}" if error.filename else f"failed: {error}", FAILED)
    except Exception as error:
        if debug:
            raise
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        _leave(f"failed: {said}\nRun the same command with --debug to see where.", FAILED)
    finally:
        set_facts({})


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM, as a scheduler sends it when time is up, does what Ctrl-C does; only the exit code is another."""
    alone = threading.current_thread() is threading.main_thread()
    if not alone or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    came: list[int] = []

    def interrupt(number: int, _frame: Any) -> None:
        came.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as end:
        if came and (isinstance(end, KeyboardInterrupt) or end.code == INTERRUPTED):
            raise SystemExit(TERMINATED) from end
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave(message: str, code: int) -> None:
    console = Console(stderr=True)
    console.print(message, markup=False, highlight=False, soft_wrap=not console.is_terminal)
    sys.exit(code)
