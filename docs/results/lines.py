"""The loss around trained networks along random directions, small against large batches: Figure 2 of Rangamani et al. 2019.

`python docs/results/lines.py FOLDER [SAMPLES]` takes every finished network of a study at its smallest and its largest batch
and adds its lines to `STUDY/line-MODEL-batch-N.json` beside this file, directions of all seeds together; `make.py` draws them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from spiritlevel.errors import SpiritLevelError
from spiritlevel.landscape import Line, line, load
from spiritlevel.study.results import Study, read_study
from spiritlevel.study.samples import Samples, load_samples
from spiritlevel.study.settings import CellConfig
from spiritlevel.study.show.along import batch_axis
from spiritlevel.study.store import CellFolder, StudyFolder
from spiritlevel.study.train import build
from spiritlevel.subjects.checkpoint import load_checkpoint
from spiritlevel.subjects.networks import list_initializations

HERE = Path(__file__).resolve().parent
SAMPLES, DIRECTIONS, POINTS = 1000, 3, 21


def first_direction(config: CellConfig) -> int:
    """Directions of their own for every network, so that a band is over both: by its seed, and by how it starts if that is said."""
    starts = ["default", *(name for name in list_initializations() if name != "default")]
    return 1000 * config.seed + 10 * starts.index(config.model.initialization)


def one_line(folder: CellFolder, samples: Samples, count: int) -> Line:
    """The lines of one network on the first so many training samples; layers move by up to their own norm."""
    config = folder.config()
    model = load_checkpoint(build(config, samples.train), folder.checkpoint).eval()
    data = samples.train.x[:count], samples.labels(config)[:count]
    return line(model, data, count=DIRECTIONS, points=POINTS, seed=first_direction(config))


def joined(lines: list[Line]) -> Line:
    """All directions of several networks as one line; of those with the same label, which is that of a network, the last."""
    first = lines[0]
    if any(not torch.equal(each.steps, first.steps) for each in lines):
        raise SpiritLevelError("lines with other steps cannot be joined; move the old ones away to begin new ones")
    rows = {label: row for each in lines for label, row in zip(each.labels, each.losses, strict=True)}
    return Line(first.steps, torch.stack(list(rows.values())), None, tuple(rows), first.normalization)


def ends(study: Study) -> Iterator[tuple[str, int, list[str]]]:
    """Network and batch → hashes of the finished networks at the smallest and the largest batch."""
    for part in (study.parts or {"": study}).values():
        axis = batch_axis(part)
        for level in () if axis is None else (0, len(axis.levels) - 1):
            cells = [cell for cell in part.cells if cell.training and axis is not None and axis.level(cell) == level]
            section = study.config.get("model")
            fixed = section.get("name") if isinstance(section, Mapping) else section
            name = str(part.cells[0].factors.get("model.name") or fixed)
            if cells:
                yield name, int(cells[0].factors["training.batch_size"]), [cell.hash for cell in cells]


def main(folder: str, count: str = str(SAMPLES), results: Path = HERE) -> None:
    study = read_study(folder)
    for model, batch, hashes in ends(study):
        folders = [StudyFolder(folder).cell(name) for name in hashes]
        samples = load_samples(folders[0].config().data)
        firsts = {first_direction(each.config()) for each in folders}
        if len(firsts) < len(folders):
            raise SpiritLevelError(f"{model}, batch {batch}: networks differ in more than seed and initialization, so that their lines cannot be told apart")  # fmt: skip
        place = results / study.name / f"line-{model}-batch-{batch}.json"
        before = [loaded] if place.exists() and isinstance(loaded := load(place), Line) else []
        found = joined([*before, *(one_line(each, samples, int(count)) for each in folders)])
        found.save(place)
        print(f"{model}, batch {batch}: {len(folders)} networks, {len(found.losses)} directions")


if __name__ == "__main__":
    main(*sys.argv[1:])
