"""The loss around trained networks along random directions, small against large batches: Figure 2 of Rangamani et al. 2019.

`python docs/results/lines.py FOLDER [SAMPLES]` takes every finished network of a run at its smallest and its largest batch (a run of
one batch has that one) and adds its lines to `STUDY/line-MODEL-batch-N.json` beside this file, directions of all seeds together; `make.py` draws them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from joining import crossed_again  # noqa: E402

from spiritlevel.errors import SpiritLevelError  # noqa: E402
from spiritlevel.landscape import Line, line, load  # noqa: E402
from spiritlevel.study.plan import list_studies, read_plan  # noqa: E402
from spiritlevel.study.results import Study, read_study  # noqa: E402
from spiritlevel.study.samples import Samples, load_samples  # noqa: E402
from spiritlevel.study.settings import CellConfig  # noqa: E402
from spiritlevel.study.store import CellFolder, StudyFolder  # noqa: E402
from spiritlevel.study.train import build  # noqa: E402
from spiritlevel.subjects.checkpoint import load_checkpoint  # noqa: E402
from spiritlevel.subjects.networks import list_initializations  # noqa: E402

SAMPLES, DIRECTIONS, POINTS = 1000, 3, 21
BATCH = "training.batch_size"


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


def ends(study: Study, factor: str = BATCH) -> Iterator[tuple[str, float, list[str]]]:
    """Network and batch (or another factor) → hashes of the networks trained at the smallest and the largest that were planned."""
    section = study.config.get("model")
    fixed = section.get("name") if isinstance(section, Mapping) else section
    found: dict[str, dict[float, list[str]]] = {}
    for cell in study.cells:
        if factor in cell.factors:
            levels = found.setdefault(str(cell.factors.get("model.name") or fixed), {})
            levels.setdefault(cell.factors[factor], []).extend([cell.hash] if cell.training else [])
    for name, levels in found.items():
        for level in sorted({min(levels), max(levels)}):
            if levels[level]:
                yield name, level, levels[level]


def main(folder: str, count: str = str(SAMPLES), results: Path = HERE) -> None:
    plain = json.loads((Path(folder) / "study.json").read_text(encoding="utf-8"))
    study = crossed_again(plain, read_study(folder))[1]
    planned = (
        {cell.factors.get(BATCH) for cell in read_plan(study.name).cells} if study.name in list_studies() else set()
    )
    for model, batch, hashes in ends(study):
        if planned and batch not in (min(planned), max(planned)):  # a run of one batch between them
            continue
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
