"""`spiritlevel study`: train many networks, measure each minimum, see what goes with generalization."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from spiritlevel.cli.listing import ListedCommands
from spiritlevel.cli.options import Quiet, check_folder

if TYPE_CHECKING:
    from spiritlevel.show.numbers import Numbers
    from spiritlevel.study.store import StudyFolder

# Columns of a terminal that the table of all measures needs.
WIDE = 150

study = typer.Typer(
    name="study",
    help="Train many networks, measure each minimum, find what ranks them.",
    no_args_is_help=True,
    rich_markup_mode=None,
    cls=ListedCommands,
)

NameOrFile = Annotated[str, typer.Argument(metavar="NAME|FILE.toml", help="A built-in study or a file.")]
StudyFolderArgument = Annotated[
    str, typer.Argument(metavar="FOLDER|URL", help="The folder of a study that was run, or its URL.")
]
Quick = Annotated[bool, typer.Option("--quick", help="The small version: embedded digits, minutes on two cores.")]
DataFolder = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Where the data are, for studies on MNIST or CIFAR-10.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting: training.epochs=5, seeds=3; may be repeated."),
]
Folder = Annotated[
    str,
    typer.Option(
        metavar="FOLDER|URL",
        help="For results; a run that was stopped goes on there. A URL, s3://bucket/study, needs no folder that nodes share.",
    ),
]
WorkFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="For a run's own copy of a study behind a URL; in the user's cache by default."
    ),
]
EngineName = Annotated[str, typer.Option(metavar="local|ray|slurm", help="Where cells are computed.")]
Workers = Annotated[int | None, typer.Option(metavar="N", min=1, help="Cells at the same time; one a core by default.")]
Minutes = Annotated[
    float | None, typer.Option("--cell-minutes", metavar="M", min=0, help="Most minutes that a cell may take.")
]
Address = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="A running Ray cluster to join.")]
Resources = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=N,…", help="What a cell takes of a Ray cluster: num_cpus=1,num_gpus=0.25."),
]
RuntimeEnv = Annotated[
    str | None,
    typer.Option(metavar="FILE|JSON", help="Ray's runtime_env of the cells: a .json or .toml file, or JSON."),
]
SlurmSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--slurm", metavar="KEY=VALUE", help="What submitit asks of Slurm: slurm_partition=short, timeout_min=60, …"
    ),
]


@study.command("list")
def list_command() -> None:
    """List the built-in studies."""
    from spiritlevel.study.plan import list_studies, read_plan

    table = Table("study", "what", "networks", "quick", box=None, pad_edge=False)
    for name, title in list_studies().items():
        full, quick = len(read_plan(name).cells), len(read_plan(name, quick=True).cells)
        table.add_row(name, title, str(full), str(quick))
    Console().print(table)


@study.command()
def show(name: NameOrFile) -> None:
    """Print a study's file, to read or to start your own from."""
    from spiritlevel.study.plan import read_plan, read_text

    read_plan(name)
    print(read_text(name)[0], end="")


@study.command()
def run(
    name: NameOrFile,
    folder: Folder,
    quick: Quick = False,
    data_folder: DataFolder = None,
    set_: Overrides = None,
    engine: EngineName = "local",
    workers: Workers = None,
    cell_minutes: Minutes = None,
    address: Address = None,
    resources: Resources = None,
    runtime_env: RuntimeEnv = None,
    slurm: SlurmSettings = None,
    work_folder: WorkFolder = None,
    quiet: Quiet = False,
) -> None:
    """Train and measure every network of a study, then write its report.

    Stopped in whatever way, the same command goes on where it was.
    """
    from spiritlevel.study.engines import make_engine
    from spiritlevel.study.engines.asked import read_resources, read_runtime_env
    from spiritlevel.study.plan import read_override, read_plan
    from spiritlevel.study.progress import StudyProgress
    from spiritlevel.study.remote import study_at
    from spiritlevel.study.run import run_study

    read = read_plan(
        name, quick=quick, data_folder=None if data_folder is None else str(data_folder), overrides=set_ or ()
    )
    work = _work_folder(folder, work_folder)
    jobs = dict(read_override(setting, "--slurm") for setting in slurm or ())
    progress = StudyProgress(quiet)
    with study_at(folder, work=work) as found:
        made = make_engine(
            engine,
            logs=(work or Path(folder)) / "jobs",
            workers=workers,
            minutes=cell_minutes,
            address=address,
            resources=read_resources(resources or ()),
            runtime_env=read_runtime_env(runtime_env),
            slurm=jobs,
            tell=progress.tell,
        )
        progress.tell(str(read))
        summary = run_study(read, found, made, progress)
        if summary.done:
            _write_report(found, quiet)
    if summary.failed:
        print(f"{len(summary.failed)} of {summary.total} cells failed; see `spiritlevel study status {folder}`")
        raise typer.Exit(1)


def _work_folder(folder: str, given: Path | None) -> Path | None:
    """Where a run works on a study behind a URL; None for a study in a folder, which is worked on where it is."""
    from spiritlevel.errors import SpiritLevelError
    from spiritlevel.study.objectstore import is_url
    from spiritlevel.study.remote import default_work_folder

    if not is_url(folder):
        if given is not None:
            raise SpiritLevelError(f"--work-folder is for results behind a URL; {folder} is a folder itself")
        check_folder("--folder", Path(folder))
        return None
    work = given or default_work_folder(folder)
    check_folder("--work-folder", work)
    return work


@study.command()
def status(
    folder: StudyFolderArgument,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Say how far a study is: what is running, waiting, tried again, excluded or failed, and why."""
    from spiritlevel.study.remote import TO_SUMMARIZE, study_at
    from spiritlevel.study.status import is_at_work, summarize

    with study_at(folder, TO_SUMMARIZE) as found:
        summary, working = summarize(found), is_at_work(found)
    if as_json:
        told = {**vars(summary), "missing": summary.missing, "at_work": working}
        print(found.words(json.dumps(told, indent=1)))
        return
    for line in summary.lines():
        print(found.words(line))
    if summary.waiting and not working:
        print("no run is at work here: the same `spiritlevel study run` goes on where it was")


@study.command()
def report(folder: StudyFolderArgument, quiet: Quiet = False) -> None:
    """Write results.csv, correlations.csv and report.html of a study, finished or not."""
    from spiritlevel.study.remote import study_at

    with study_at(folder) as found:
        _write_report(found, quiet)


def _write_report(folder: StudyFolder, quiet: bool) -> None:
    from spiritlevel.study.show.page import write_study_report

    folder.bring_results()
    page = write_study_report(folder.path)
    folder.publish()
    if not quiet:
        print(f"wrote {folder.words(str(page))}", file=sys.stderr)


@study.command()
def correlate(
    folders: Annotated[
        list[str], typer.Argument(metavar="FOLDER|URL...", help="Folders of studies, or of their tables.")
    ],
    page: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write a page with the distribution.")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE.csv", help="Write every environment's sign errors.")] = None,
) -> None:
    """Say which measure can be relied on over several studies: the sign test of Dziugaite et al. 2020."""
    from spiritlevel.saved import write_whole
    from spiritlevel.study.remote import TO_SUMMARIZE, study_at
    from spiritlevel.study.show.winners import standings_table, winner_sentences, winners_page
    from spiritlevel.study.signs import SignTest, environments_csv
    from spiritlevel.study.tables import read_study_or_tables

    read = []
    for folder in folders:
        with study_at(folder, TO_SUMMARIZE) as stored:
            read.append(read_study_or_tables(stored.path))
    test = SignTest(read)
    written = [(path, text) for path, text in ((page, winners_page), (csv, environments_csv)) if path is not None]
    for path, text in written:
        write_whole(path, text(test))
    for sentence in winner_sentences(test):
        print(sentence)
    if test.standings():
        _print_standings(standings_table(test))
    for path, _ in written:
        print(f"wrote {path}", file=sys.stderr)


def _print_standings(found: Numbers) -> None:
    """The table, or its columns of sign errors where all of them do not fit: names of measures are never cut."""
    from spiritlevel.study.show.winners import ESSENTIAL

    console = Console()
    fits = console.width >= WIDE
    shown = [number for number, column in enumerate(found.columns) if fits or column in ESSENTIAL]
    table = Table(box=None, pad_edge=False)
    for number in shown:
        table.add_column(found.columns[number], no_wrap=number == 0)
    for row in found.texts():
        table.add_row(*(row[number] for number in shown))
    console.print(table)
    if not fits:
        left_out = ", ".join(column for number, column in enumerate(found.columns) if number not in shown)
        print(f"In a terminal of {WIDE} columns, and with --page: {left_out}.")
