"""`docs/results.md` from the folders of studies, by one command.

`python docs/results/make.py FOLDER…` adds the networks of studies that were run, finished or not, to the tables in
`docs/results/STUDY/` (`study.json`, `results.csv`, `levels.csv`, `correlations.csv`, all numbers to six digits), and writes the
page anew from all tables that lie there. Networks that stand there already stay, so that runs on several days and machines
add up (`joining.py`). Without a folder it only writes the page. Words that do not depend on numbers are in `template.txt`;
what was tried and what remains of a study in `STUDY/notes.md`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from contest import winners  # noqa: E402
from joining import crossed_again, joined  # noqa: E402
from lines import ends  # noqa: E402
from tellers import FEW, TELLERS  # noqa: E402
from telling import Told, Verdict, each_network, made  # noqa: E402

from spiritlevel.landscape import load  # noqa: E402
from spiritlevel.plot import line as draw_line  # noqa: E402
from spiritlevel.saved import write_json, write_whole  # noqa: E402
from spiritlevel.study.correlate import answers, correlations_csv  # noqa: E402
from spiritlevel.study.csv_tables import levels_csv, results_csv  # noqa: E402
from spiritlevel.study.plan import read_plan  # noqa: E402
from spiritlevel.study.results import Study, read_study  # noqa: E402
from spiritlevel.study.statistics import FEWEST, RESAMPLES  # noqa: E402
from spiritlevel.study.store import StudyFolder  # noqa: E402
from spiritlevel.study.tables import read_tables  # noqa: E402

PAGE = HERE.parent / "results.md"
LARGEST_CHECKPOINT = 400_000  # bytes
# Factors at whose ends a network's weights lie beside the tables, with what their files are called.
SHIPPED = {"training.batch_size": "batch", "data.label_noise": "labels"}


def short(text: str) -> str:
    """A csv file with six digits instead of seventeen: measures are good to three or four."""
    return re.sub(r"(?<=,)-?\d+\.\d{6,}(?:e[+-]?\d+)?(?=[,\n])", lambda number: f"{float(number[0]):.6g}", text)


def gather(folder: Path, results: Path = HERE) -> Path:
    """Add the networks of a study to its tables in `results`, which need not be there yet; where they are then."""
    ran = read_study(folder)
    place = results / ran.name
    plain = described(json.loads((folder / "study.json").read_text(encoding="utf-8")), ran)
    plain, ran = crossed_again(plain, ran)
    study = ran
    if (place / "study.json").exists():
        before = json.loads((place / "study.json").read_text(encoding="utf-8"))
        plain, study = joined(crossed_again(before, read_tables(place)), (plain, ran))
    write_json(place / "study.json", plain)
    write_whole(place / "results.csv", short(results_csv(study)))
    if study.marks:
        write_whole(place / "levels.csv", short(levels_csv(study)))
    for factor, word in SHIPPED.items() if _on_all_images(plain["config"]) else ():
        wanted = {
            (model, level) for model, level, _ in ends(study, factor)
        }  # of all runs: this one may have had other levels
        for model, level, checkpoint in pair(ran, folder, factor):
            name = f"{model}-{word}-{level:g}.safetensors"
            # Any network of a level will do, and weights are large.
            if (model, level) in wanted and not (place / name).exists():
                write_whole(place / name, checkpoint.read_bytes())
    return place


def _on_all_images(config: Mapping[str, Any]) -> bool:
    """Whether the commands of the page, which know of no part of the images, would measure networks on what they were trained on."""
    data = config.get("data")
    return not (isinstance(data, Mapping) and data.get("train_samples"))


def pair(study: Study, folder: Path, factor: str) -> Iterator[tuple[str, float, Path]]:
    """The weights of one network at the smallest and one at the largest level, if they are small enough to be shipped."""
    for model, level, hashes in ends(study, factor):
        checkpoint = StudyFolder(folder).cell(hashes[0]).checkpoint
        if checkpoint.is_file() and checkpoint.stat().st_size <= LARGEST_CHECKPOINT:
            yield model, level, checkpoint


def described(plain: dict[str, Any], study: Study) -> dict[str, Any]:
    """`study.json` without the place of the data on this machine, and with what it was computed by."""
    trained = [cell for cell in study.cells if cell.environment]
    known = {key: trained[0].environment.get(key, "?") for key in ("torch", "python", "threads")} if trained else {}
    config = {**plain["config"], "environment": known}
    if isinstance(config.get("data"), dict):
        config["data"] = {**config["data"], "folder": None}
    return {**plain, "config": config}


def told_of(place: Path, draws: int = RESAMPLES) -> Told:
    """A study from its tables, with its answers, which are written beside them."""
    study = read_tables(place)
    found = answers(study, draws=draws)
    write_whole(place / "correlations.csv", short(correlations_csv(found, study)))
    return Told(study, found, place)


def section(told: Told) -> str:
    """What the page says of a study between its words."""
    judge, body = TELLERS[told.study.name]
    # A study of batches is told from two networks on, also of those that only came to a mark; correlations of fewer than six have no
    # interval and say nothing.
    of_batches = told.study.name.startswith("rangamani")
    enough = (
        sum(bool(cell.along or cell.measures) for cell in told.study.cells) >= 2
        if of_batches
        else len(told.study.measured) >= FEWEST
    )
    lines = [*made(told), *(body(told) if enough else each_network(told))]
    found = judge(told)
    said = f"**Verdict: {found.verdict}** (networks: {found.networks}). Here: {found.here}."
    lines += ["", *line_plots(told), said, "", *notes(told.folder), *shipped(told)]
    files = ["results.csv", *(["levels.csv"] if told.study.marks else []), "correlations.csv"]
    links = ", ".join(f"[{name}](results/{told.study.name}/{name})" for name in files)
    return "\n".join([*lines, f"Numbers: {links}."])


def line_plots(told: Told) -> list[str]:
    """The lines of `lines.py`, if it was run: the loss around small and large batches."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(told.folder.glob("line-*-batch-*.json")):
        model, _, batch = path.stem.removeprefix("line-").rpartition("-batch-")
        found.setdefault(model, {})[f"batch {batch}"] = load(path)
    made_lines = []
    for model, lines in found.items():
        ordered = dict(sorted(lines.items(), key=lambda entry: int(entry[0].split()[1])))
        drawing = draw_line(ordered, title=f"Loss along random directions, {model}")
        made_lines += [told.picture(f"lines-{model}", drawing), ""]
    intro = (
        "The loss along random directions in which every layer moves by up to its own norm (Rangamani et al. 2019, Figure 2); "
        "bands hold all directions and seeds:"
    )
    return [intro, "", *made_lines] if made_lines else []


def shipped(told: Told) -> list[str]:
    """How a reader measures the networks whose weights lie beside the tables."""
    pattern = re.compile(rf"(?P<model>.+)-(?P<word>{'|'.join(SHIPPED.values())})-(?P<level>[0-9.e+]+)")
    found = [match for path in told.folder.glob("*.safetensors") if (match := pattern.fullmatch(path.stem))]
    data = told.study.config["data"]["name"] if found else ""
    commands = [
        f"spiritlevel measure {each['model']} --data {data}:DATA --checkpoint docs/results/{told.study.name}/{each[0]}.safetensors"
        for each in sorted(found, key=lambda each: (each["model"], float(each["level"])))
    ]
    said = {
        "batch": "Weights of a small and a large batch lie beside the tables",
        "labels": "Weights of a network with true labels and of one with random ones lie beside the tables, and say which labels those were",
    }
    intro = f"{said[found[0]['word']]}; `DATA` is the folder of the official files:" if found else ""
    return [intro, "", "```text", *commands, "```", ""] if commands else []


def notes(place: Path) -> list[str]:
    """What was tried and what remains, as written down for a study."""
    path = place / "notes.md"
    return [path.read_text(encoding="utf-8").strip(), ""] if path.exists() else []


def verdict_of(name: str, told: Told | None) -> Verdict:
    if told is None:
        return Verdict("not run at this size yet", f"0 of {len(read_plan(name).cells)}", "open")
    return TELLERS[name][0](told) if told.study.measured or told.study.marks else Verdict("–", "0", FEW)


def write_page(results: Path = HERE, page: Path = PAGE, draws: int = RESAMPLES) -> None:
    """Write the page from the template and from the tables in `results`."""
    text = (results / "template.txt").read_text(encoding="utf-8")
    studies = {name: told_of(results / name, draws) for name in TELLERS if (results / name / "study.json").exists()}
    for name in TELLERS:
        told = studies.get(name)
        found = verdict_of(name, told)
        row = f"{found.here} | {found.networks} | {found.verdict}"
        body = "Not run at this size yet." if told is None else section(told)
        text = text.replace(f"{{{{verdict {name}}}}}", row).replace(f"{{{{{name}}}}}", body)
    text = text.replace("{{measures}}", "\n".join(winners(studies, results, draws)))
    write_whole(page, text)


def main(folders: Sequence[str]) -> None:
    for folder in folders:
        gather(Path(folder))
    write_page()


if __name__ == "__main__":
    main(sys.argv[1:])
