"""A network's symmetries as a table a person can read."""

import io

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spiritlevel.presenting import register
from spiritlevel.symmetry.group import Group
from spiritlevel.symmetry.symmetries import Symmetries

OTHERS = {"linear": "invertible matrices", "rotation": "rotations", "shift": "shifts of biases"}
MOST_NAMES = 8


def describe(symmetries: Symmetries, width: int = 120) -> str:
    """One row per group of factors, then the layerwise conditions, the other groups and what fixed a scale."""
    title = f"{symmetries.dimension} independent scale factors in {len(symmetries.scale_groups)} groups"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="", title_style="")
    for column in ("group", "kind", "factors", "multiplies", "divides"):
        table.add_column(column, justify="right" if column == "factors" else "left", overflow="fold")
    for group in symmetries.scale_groups:
        multiplies, divides = (", ".join(names) for names in _with_slices(symmetries, group))
        cells = (group.name, group.kind, str(len(group.factors)), multiplies, divides)
        table.add_row(*map(Text, cells))
    buffer = io.StringIO()
    Console(file=buffer, width=width, color_system=None, highlight=False).print(table)
    lines = [line.rstrip() for line in buffer.getvalue().splitlines()]
    if symmetries.layer_groups:
        lines += ["", "one factor per layer, with"] + [f"  {group.condition}" for group in symmetries.layer_groups]
    for kind, words in OTHERS.items():
        found = [group for group in symmetries.groups if group.kind == kind]
        if found:
            lines += ["", f"{words}, {sum(group.dimension for group in found)} dimensions in {len(found)} groups"]
            lines += [f"  {group.name}" for group in found[:MOST_NAMES]]
            lines += [f"  and {len(found) - MOST_NAMES} more"] if len(found) > MOST_NAMES else []
    if symmetries.barriers:
        lines += ["", "scales are fixed by: " + ", ".join(sorted(symmetries.barriers))]
    return "\n".join(lines) + "\n"


def _with_slices(symmetries: Symmetries, group: Group) -> tuple[list[str], list[str]]:
    """What the first factor of a group multiplies and divides, written like an index into the tensor."""
    up: list[str] = []
    down: list[str] = []
    for part in symmetries.slices(group.factors[0]):
        index = ", ".join(_entry(entry) for entry in part.index)
        power = "" if abs(part.exponent) == 1 else f"^{abs(part.exponent):g}"
        (up if part.exponent > 0 else down).append(f"{part.name}[{index}]{power}")
    return up, down


def _entry(entry: object) -> str:
    if isinstance(entry, slice):
        return ":"
    number = len(entry)  # type: ignore[arg-type]
    return "i" if number == 1 else f"{number} of i"


register(Symmetries, text=describe)
