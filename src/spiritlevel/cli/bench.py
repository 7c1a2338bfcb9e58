"""`spiritlevel bench`: this library beside its peers, in costs of one gradient."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from spiritlevel.cli.options import check_folder
from spiritlevel.errors import SpiritLevelError

Folder = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="For all it makes; benchmarks, or out/bench when quick.")
]
DataFolder = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Real MNIST and CIFAR-10; synthetic without.")]
Weights = Annotated[Path | None, typer.Option(metavar="FILE", help="Weights of ResNet-20; trained briefly without.")]
Subjects = Annotated[
    str,
    typer.Option(metavar="A,B", help="Of mlp, conv, lenet5, resnet20, vgg16, growth, growth-mlp and so on, memory."),
]
Libraries = Annotated[str, typer.Option(metavar="A,B", help="Ask only these; what others answered before stays.")]
Rounds = Annotated[int | None, typer.Option(metavar="N", min=1, help="How often each library is asked.")]
Quick = Annotated[bool, typer.Option("--quick", help="This library alone on a tiny network, in a minute.")]


def bench(
    folder: Folder = None,
    quick: Quick = False,
    data_folder: DataFolder = None,
    checkpoint: Weights = None,
    only: Subjects = "",
    rounds: Rounds = None,
    libraries: Libraries = "",
) -> None:
    """Measure costs beside the other libraries.

    Installs the peers into an environment of its own, runs them and this library in alternation on the same networks,
    data and accuracy, the small networks trained to four losses, one thread and one process each, and writes results,
    tables and pictures. Takes about an hour on a quiet machine.
    """
    running, readme, pictures = (_part(name) for name in ("run", "readme", "pictures"))
    folder = folder or Path("out/bench" if quick else "benchmarks")
    check_folder("--folder", folder)
    for option, path in (("--data-folder", data_folder), ("--checkpoint", checkpoint)):
        if path is not None and not path.exists():
            raise SpiritLevelError(f"{option}: {path} does not exist")
    running.run(running.Settings(folder, quick, data_folder, checkpoint, _names(only), rounds, _names(libraries)))
    for written in (readme.write_readme(folder), *pictures.write_pictures(folder)):
        print(written)


def _names(listed: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in listed.split(",") if name.strip())


def _part(name: str) -> Any:
    """A module of the benchmark, which lives beside the package in a clone and is not installed with it."""
    clone = Path(__file__).parents[3]
    if not (clone / "benchmarks" / "run.py").is_file():
        raise SpiritLevelError(
            "`spiritlevel bench` runs the benchmark of a clone, and this is an installed package without one: "
            "clone the repository, `make setup` there and call it again"
        )
    if str(clone) not in sys.path:
        sys.path.insert(0, str(clone))
    return importlib.import_module(f"benchmarks.{name}")
