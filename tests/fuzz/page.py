"""docs/reliability.md from the figures of a long run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fuzz.check import OTHER_SEEDS, ROUNDING, WIDTH

START, END = "<!-- figures of make fuzz -->\n", "<!-- end of figures -->"


def updated(page: str, figures: Mapping[str, Any]) -> str:
    """The page with the figures in their place."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{tables(figures)}\n{END}{after}"


def joined(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of several runs, on several cores or days, as those of one."""
    found = dict(runs[0])
    for run in runs[1:]:
        for name, value in run.items():
            found[name] = _sum(found[name], value) if name not in ("torch", "seed") else found[name]
    return found | {name: ", ".join(dict.fromkeys(str(run[name]) for run in runs)) for name in ("torch", "seed")}


def _sum(first: Any, second: Any) -> Any:
    return dict(Counter(first) + Counter(second)) if isinstance(first, Mapping) else first + second


def tables(figures: Mapping[str, Any]) -> str:
    return "\n".join([_summary(figures), _numbers(figures), _reasons(figures), _spread(figures)])


def _table(header: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    lines = [header, ("---",) + ("---:",) * (len(header) - 1), *rows]
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in lines)


def _summary(figures: Mapping[str, Any]) -> str:
    verdicts, kills, interruptions = figures["verdicts"], figures["kills"], figures["interruptions"]
    wrong = sum(verdicts.get(name, 0) for name in ("wrong", "crashed", "changed"))
    survived = sum(count for said, count in kills.items() if said.startswith("survived"))
    rows = [
        ("inputs tried", f"{figures['inputs']:,}"),
        ("right", f"{verdicts.get('right', 0):,}"),
        ("refused, with a reason", f"{verdicts.get('refused', 0):,}"),
        ("not judged: the definition itself is not finite in float64", verdicts.get("out of range", 0)),
        ("wrong", wrong),
        ("interruptions (Ctrl-C at a random line)", sum(interruptions.values())),
        ("models changed by them", interruptions.get("changed", 0)),
        ("kills (SIGTERM, SIGINT, SIGKILL) of studies and measurements", sum(kills.values()) - kills.get("ended before", 0)),
        ("survived", survived),
    ]  # fmt: skip
    said = f"torch {figures['torch']}, seed {figures['seed']}, {figures['seconds'] / 60:.0f} minutes of one core.\n"
    return f"{_table(('', 'count'), rows)}\n{said}"


def _numbers(figures: Mapping[str, Any]) -> str:
    rows: list[tuple[object, ...]] = []
    for kind, width in WIDTH.items():
        count = figures["numbers"].get(kind, 0)
        inside = figures["within_error"].get(kind, 0)
        rows.append((kind, count, f"{100 * inside / count:.1f} %" if count else "–", f"{width:g}"))
    return _table(("numbers", "count", "within one error + rounding", "errors allowed"), rows)


def _reasons(figures: Mapping[str, Any]) -> str:
    rows = [(reason.replace("|", "\\|"), n) for reason, n in ordered(figures["refusals"])]
    return _table(("refused because", "inputs"), rows) if rows else ""


def _spread(figures: Mapping[str, Any]) -> str:
    return "".join(
        f"{title}: {', '.join(f'{name} {count}' for name, count in ordered(figures[key]))}.\n\n"
        for title, key in (("Networks", "families"), ("Losses", "losses"), ("Precisions", "precisions"))
    )


def ordered(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def rule() -> str:
    """What the page must say of the allowances, from the numbers the check uses."""
    single, double = (f"{value:.2g}" for value in ROUNDING.values())
    return f"{single} in float32 and {double} in float64; {OTHER_SEEDS} other seeds"
