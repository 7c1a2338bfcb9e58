"""A drawing: a matplotlib figure with its numbers, a title and a description, and the SVG that a page can hold.

The SVG is byte-stable for the same input, takes its ink from the text around it (`currentColor`) and its colours from
the page's variables (`--sl-0` …), so that one picture serves light, dark and paper.
"""

from __future__ import annotations

import io
import os
import re
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from spiritlevel.saved import write_whole
from spiritlevel.show.numbers import Numbers

INK = "#1b1c1d"

# Where along viridis each series lies. On white only its dark half has contrast enough, on black only its light half.
_LIGHT = tuple(to_hex(matplotlib.colormaps["viridis"](x)) for x in (0.02, 0.52, 0.27, 0.40, 0.14, 0.47))
_DARK = tuple(to_hex(matplotlib.colormaps["viridis"](x)) for x in (0.98, 0.55, 0.76, 0.65, 0.87, 0.60))
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))

_STYLE: Mapping[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "spiritlevel",
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 9.0,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "hatch.color": INK,
    "hatch.linewidth": 0.5,
    "lines.linewidth": 1.4,
    "lines.markersize": 5.0,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
}


@dataclass(frozen=True)
class Drawing:
    """A picture that can be read without seeing it.

    Attributes:
        figure: The matplotlib figure, to be saved or changed at will.
        table: The numbers drawn.
        title: What it shows, in a line.
        description: What one sees in it, in a sentence or two.
    """

    figure: Figure
    table: Numbers
    title: str
    description: str

    def svg(self) -> str:
        """An `<svg>` element without background, identical for identical input, titled and described."""
        stream = io.StringIO()
        with style():
            self.figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
        return _inlined(stream.getvalue(), self.title, self.description)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture on white, in the format of the file's ending (.png, .svg, .pdf): same input, same bytes."""
        target = Path(path) if Path(path).suffix else Path(path).with_suffix(".png")
        # Dates and versions are left out; a PDF calls its date otherwise.
        nameless = {".svg": {"Date": None, "Title": self.title, "Description": self.description},
                    ".png": {"Software": None, "Title": self.title, "Description": self.description},
                    ".pdf": {"CreationDate": None, "Title": self.title}}  # fmt: skip
        kind = target.suffix.lower()
        metadata: Any = nameless.get(kind)
        drawn = io.BytesIO()
        with style(), matplotlib.rc_context({"svg.fonttype": "path"}):
            self.figure.savefig(drawn, format=kind.removeprefix("."), dpi=200, facecolor="white", metadata=metadata)
        write_whole(target, drawn.getvalue())


def series_colour(index: int) -> str:
    """The colour of the series with that index on a light ground; a page replaces it on a dark one."""
    return _LIGHT[index % len(_LIGHT)]


def palette() -> tuple[tuple[str, str], ...]:
    """Every series colour for a light ground with its counterpart for a dark one."""
    return tuple(zip(_LIGHT, _DARK, strict=True))


@contextmanager
def style() -> Iterator[None]:
    """Draw within this: the look of all figures, user text never read as formulas, missing glyphs no cause to warn."""
    with matplotlib.rc_context(dict(_STYLE)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.*")
        yield


def _inlined(source: str, title: str, description: str) -> str:
    """matplotlib's file as an element for a page: own names for its parts, the page's colours, title and description."""
    root = ElementTree.fromstring(source)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {key.rpartition("}")[2]: _recoloured(text) for key, text in element.attrib.items()}
    for parent in [root, *root.iter("defs")]:
        for child in [child for child in parent if child.tag in {"metadata", "style"}]:
            parent.remove(child)
    # Two pictures on one page must not share names; the same picture must keep its own.
    prefix = "d" + sha256(f"{title}{description}{source}".encode()).hexdigest()[:10]
    _rename(root, prefix)
    _describe(root, prefix, title, description)
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=True)


def _recoloured(text: str) -> str:
    text = text.replace(INK, "currentColor").replace("'DejaVu Sans'", "system-ui, sans-serif")
    for index, colour in enumerate(_LIGHT):
        text = text.replace(colour, f"var(--sl-{index}, {colour})")
    return text


def _rename(root: ElementTree.Element, prefix: str) -> None:
    """Prefix the ids that something refers to, drop the others."""
    used = set(re.findall(r"url\(#([^)]+)\)", " ".join(t for e in root.iter() for t in e.attrib.values())))
    used |= {text[1:] for element in root.iter() for key, text in element.attrib.items() if key == "href"}
    for element in root.iter():
        for key, text in list(element.attrib.items()):
            if key == "id" and text not in used:
                del element.attrib[key]
            elif key == "id":
                element.attrib[key] = f"{prefix}-{text}"
            elif key == "href":
                element.attrib[key] = f"#{prefix}-{text[1:]}"
            else:
                element.attrib[key] = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", text)


def _describe(root: ElementTree.Element, prefix: str, title: str, description: str) -> None:
    for index, (tag, text) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(tag, id=f"{prefix}-{tag}")
        element.text = text
        root.insert(index, element)
    box = root.attrib["viewBox"]
    root.attrib = {
        "viewBox": box,
        "class": "sl-drawing",
        # What matplotlib puts into a style sheet of the file, which here would reach the whole page.
        "style": "stroke-linejoin: round; stroke-linecap: butt",
        "role": "img",
        "aria-labelledby": f"{prefix}-title",
        "aria-describedby": f"{prefix}-desc",
    }
