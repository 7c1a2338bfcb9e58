"""Everything in the documentation that looks executable is executed; everything generated is up to date.

`python tests/test_docs.py` rewrites the generated parts.
"""

import json
import re
import runpy
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import spiritlevel as sl
from spiritlevel import cli
from spiritlevel.measuring import registry as measures
from spiritlevel.show.citations import CITATIONS
from spiritlevel.subjects.data import list_data
from spiritlevel.subjects.networks import list_models

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
LONG_PAGES = ("studies.md", "guarantees.md")  # their blocks train networks: `make test-long`
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SLOW_COMMANDS = ("demo",)  # a test of their own runs them at a smaller size

KINDS = ("layer", "neuron", "linear", "rotation")
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_GENERATED = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


# --- what is generated ---------------------------------------------------------------------------------------------


def commands():
    """The functions of the commands; `study`, which has commands of its own, is told of apart."""
    return [cli.command(name) for name in cli.COMMANDS if name != "study"]


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [header, ("---",) * len(header), *map(tuple, cells)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _mark(measure: sl.Measure, claim: str) -> str:
    return "✓" if claim in measure.invariant_under else "✗"


def _survives() -> str:
    rows = [
        (f"`{m.name}`", CITATIONS[m.paper].short, *(_mark(m, claim) for claim in KINDS)) for m in sl.list_measures()
    ]
    return _table(("measure", "paper", *KINDS), sorted(rows, key=lambda row: row[2:]))


def _measures() -> str:
    rows = [
        (
            f"`{m.name}`",
            m.summary,
            f"`{m.formula}`",
            ", ".join(claim for claim in KINDS if claim in m.invariant_under) or "nothing",
            ", ".join(f"`{key}={value!r}`" for key, value in m.options.items()) or "none",
            "no" if m.costly else "yes",
        )
        for m in sl.list_measures()
    ]
    return _table(("measure", "what it is", "formula", "survives", "options", "in the default set"), rows)


def _names() -> str:
    rows = [(f"`sl.{name}`", _first_sentence(getattr(sl, name))) for name in sl.__all__ if name != "__version__"]
    return _table(("name", "what it is"), rows)


def _first_sentence(thing: object) -> str:
    return (thing.__doc__ or "").strip().partition("\n\n")[0].replace("\n", " ").replace("    ", "")


def _commands() -> str:
    rows = [(f"`spiritlevel {command.__name__}`", _first_sentence(command)) for command in commands()]
    return _table(("command", "what it does"), rows)


def _models() -> str:
    return _table(("model", "what it is"), [(f"`{name}`", holds) for name, holds in list_models().items()])


def _data() -> str:
    return _table(("data", "what it holds"), [(f"`{name}`", holds) for name, holds in list_data().items()])


GENERATORS: dict[str, Callable[[], str]] = {
    "survives": _survives,
    "measures": _measures,
    "names": _names,
    "commands": _commands,
    "models": _models,
    "data": _data,
}


def generated(text: str) -> str:
    """The page with every generated part as it should be."""
    return _GENERATED.sub(lambda part: f"{part[1]}\n{GENERATORS[part[2]]()}\n{part[4]}", text)


# --- tests ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.long] * (page.name in LONG_PAGES)) for page in PAGES],
    ids=lambda page: page.name,
)
def test_blocks_run(page: Path, tmp_path, monkeypatch) -> None:
    """Python and shell blocks of a page in order, one namespace, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    text, namespace = page.read_text(encoding="utf-8"), {"__name__": "__page__"}
    with torch.random.fork_rng(devices=[]):
        for block in _BLOCK.finditer(text):
            if block[1] == "python":
                # Blank lines before the block make the line numbers of an error those of the page.
                source = "\n" * text.count("\n", 0, block.start(2)) + block[2]
                exec(compile(source, str(page), "exec"), namespace)
            elif block[1] in ("console", "bash") and block[2].startswith("spiritlevel"):
                run_commands(block[2])


def run_commands(block: str) -> None:
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line)
        if words and words[0] == "spiritlevel":
            arguments = [words[1], "--help"] if words[1] in SLOW_COMMANDS else words[1:]
            with pytest.raises(SystemExit) as left:
                cli.main(arguments)
            assert not left.value.code, line


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example_runs(example: Path, tmp_path, monkeypatch, capsys) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) < 40
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_parts_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == generated(text), "run `python tests/test_docs.py` and commit what it changed"


def test_the_reference_has_every_measure_name_and_command() -> None:
    """Independent of the generator: a name that is missing from the page is missing here."""
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    for record in sl.list_measures():
        assert f"`{record.name}`" in text
        assert record.formula.replace("|", "\\|") in text
    for name in set(sl.__all__) - {"__version__"}:
        assert f"`sl.{name}`" in text
    for command in commands():
        assert f"`spiritlevel {command.__name__}`" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            place, _, anchor = target.partition("#")
            found = page.parent / place if place else page
            assert found.exists(), target
            if anchor:
                headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
                assert anchor in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings], target


def test_a_new_measure_reaches_command_line_and_audit(monkeypatch, capsys) -> None:
    """The page about adding a measure, then its one line: the record alone makes the measure known everywhere."""
    page = (ROOT / "docs" / "adding-a-measure.md").read_text(encoding="utf-8")
    namespace: dict[str, object] = {}
    with torch.random.fork_rng(devices=[]):
        for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[:2]:
            exec(block, namespace)
    record, model, x, y = (namespace[name] for name in ("kappa_trace_mean", "model", "x", "y"))
    assert isinstance(record, sl.Measure)
    monkeypatch.setitem(measures.ALL, record.name, record)

    with pytest.raises(SystemExit):
        cli.main(["measures", "--json"])
    assert json.loads(capsys.readouterr().out)[-1]["formula"] == record.formula
    with pytest.raises(SystemExit):
        cli.main(["measures"])
    assert record.name in capsys.readouterr().out
    assert record.name in sl.measure(model, (x, y))
    audit = sl.audit(model, (x, y), measures=[record.name])
    assert audit.verdict(record.name, "layer") == "invariant"
    assert audit.verdict(record.name, "neuron") == "moves"
    assert record.name in _measures()


def test_the_citation_is_of_this_version() -> None:
    assert f"\nversion: {sl.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_pages_name_no_machine() -> None:
    for path in [*PAGES, *EXAMPLES, ROOT / "CHANGELOG.md", ROOT / "CITATION.cff"]:
        assert not re.search(r"/(work|home|root|tmp)/", path.read_text(encoding="utf-8")), path


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(generated(each.read_text(encoding="utf-8")), encoding="utf-8")
