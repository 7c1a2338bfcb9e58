"""The site: `docs/` as pages with search, every public name, a gallery drawn and notebooks executed while it is built.

    make docs    # out/site/index.html

MkDocs with the Material theme and mkdocstrings is what most libraries of this field use now (curvlinops, einops, diffrax, lineax,
equinox): our pages are Markdown already, and nothing has to be written twice. Nothing is loaded from elsewhere, neither while it
is built nor while it is read: no fonts, no scripts, no images of others.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import nbformat
from gallery import PICTURES, trained
from mkdocs.commands.build import build as build_pages
from mkdocs.config import load_config
from nbclient import NotebookClient
from nbconvert import MarkdownExporter

import spiritlevel as sl

ROOT = Path(__file__).parents[2]
SOURCE, SITE = ROOT / "out/site-source", ROOT / "out/site"
OUTSIDE = ("examples", "benchmarks")  # folders that pages link to


def main() -> None:
    """Gather, draw, run, build, check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--without-running", action="store_true", help="leave out gallery and notebooks, for a quick look"
    )
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    logging.getLogger("mkdocs.plugins.mkdocs_autorefs").setLevel(
        logging.ERROR
    )  # formulas in brackets look like references
    quick = parser.parse_args().without_running
    gather()
    (SOURCE / "api.md").write_text(api(), encoding="utf-8")
    (SOURCE / "gallery.md").write_text("# Gallery\n" if quick else gallery(), encoding="utf-8")
    (SOURCE / "notebooks.md").write_text(notebooks(run=not quick), encoding="utf-8")
    build_pages(load_config(str(ROOT / "mkdocs.yml")))
    problems = broken_links(SITE)
    print(
        "\n".join(problems)
        or f"{SITE / 'index.html'}: all links lead somewhere. With search: {sys.executable} -m http.server -d {SITE}"
    )
    sys.exit(bool(problems))


def gather() -> None:
    """Copy what the pages are made of, with links that leave `docs/` turned to copies inside."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCE, ignore=shutil.ignore_patterns("site", "*.ipynb", "__pycache__"))
    for folder in OUTSIDE:
        made = shutil.ignore_patterns("__pycache__", "out", ".venv", ".cache")  # by running what is there
        shutil.copytree(ROOT / folder, SOURCE / folder, ignore=made)
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    for name in ("LICENSE", "CITATION.cff", "CONTRIBUTING.md", "CHANGELOG.md"):
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        (SOURCE / name).write_text(text, encoding="utf-8")
    (SOURCE / "index.md").write_text(readme, encoding="utf-8")
    for page in SOURCE.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        page.write_text(re.sub(r"\]\(\.\./", "](", text), encoding="utf-8")


def api() -> str:
    """A page with every public name: signature, definition, example, cost."""
    lines = ["# Every public name", "", "Signature, definition, example and cost, from the docstrings.", ""]
    for name in sl.__all__:
        if name not in ("__version__", "plot"):
            lines += [f"## `sl.{name}`", "", f"::: spiritlevel.{name}", ""]
    for name in sl.plot.__all__:
        lines += [f"## `sl.plot.{name}`", "", f"::: spiritlevel.plot.{name}", ""]
    return "\n".join(lines)


def gallery() -> str:
    """Every picture with the code that draws it."""
    folder = SOURCE / "gallery"
    folder.mkdir(exist_ok=True)
    lines = ["# Gallery", "", "Every picture is drawn while this page is built, by the code beside it.", ""]
    for draw in PICTURES:
        drawing, name = draw(), draw.__name__.replace("_", "-")
        drawing.save(folder / f"{name}.png")
        code = inspect.getsource(draw)
        lines += [f"## {name.replace('-', ' ').capitalize()}", "", (draw.__doc__ or "").strip(), ""]
        lines += [f"![{drawing.description}](gallery/{name}.png)", "", "```python", code.rstrip(), "```", ""]
    return "\n".join([*lines, "## The network of all of these", "", "```python", inspect.getsource(trained), "```", ""])


def notebooks(*, run: bool) -> str:
    """Execute every notebook, write it as a page, and list them."""
    lines = ["# Notebooks", "", "Executed while this site is built.", ""]
    for path in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
        if run:
            with tempfile.TemporaryDirectory() as folder:  # where a notebook writes its pictures
                place = {"metadata": {"path": folder}}
                NotebookClient(notebook, timeout=300, kernel_name="python3", resources=place).execute()
        body, resources = MarkdownExporter().from_notebook_node(notebook)  # type: ignore[no-untyped-call]
        pages = SOURCE / "notebooks"
        pages.mkdir(exist_ok=True)
        for name, content in resources.get("outputs", {}).items():
            (pages / f"{path.stem}-{name}").write_bytes(content)
            body = body.replace(f"({name})", f"({path.stem}-{name})")
        (pages / f"{path.stem}.md").write_text(body, encoding="utf-8")
        lines.append(f"- [{notebook.cells[0].source.splitlines()[0].lstrip('# ')}](notebooks/{path.stem}.md)")
    return "\n".join([*lines, ""])


def broken_links(site: Path) -> list[str]:
    """Links, anchors and images of the built site that lead nowhere, and anything that would be loaded from elsewhere."""
    site = site.resolve()
    pages = {page: page.read_text(encoding="utf-8") for page in sorted(site.rglob("*.html"))}
    anchors = {page: {unescape(name) for name in re.findall(r'\sid="([^"]+)"', text)} for page, text in pages.items()}
    found = []
    for page, text in pages.items():
        for kind, link in re.findall(r'<(?:a|img|script|link)\b[^>]*?\s(href|src)="([^"]+)"', text):
            outside = link.startswith(("http:", "https:", "//", "mailto:", "data:"))
            if outside and kind == "src":
                found.append(f"{page.relative_to(site)}: {link} would be loaded from elsewhere")
            if not outside and page.name != "404.html" and not leads_somewhere(page, unescape(link), anchors):
                found.append(f"{page.relative_to(site)}: {link} leads nowhere")
        found += [
            f"{page.relative_to(site)}: a style sheet of {url} would be loaded from elsewhere"
            for url in re.findall(r'<link[^>]+rel="(?:stylesheet|preconnect)"[^>]+href="(https?:[^"]+)"', text)
        ]
    return found


def leads_somewhere(page: Path, link: str, anchors: Mapping[Path, set[str]]) -> bool:
    """Whether a link from a page of the site has a target, and that the part it names."""
    target, _, part = link.partition("#")
    if target.startswith("/"):
        return True
    place = (page.parent / unquote(target.partition("?")[0])).resolve() if target else page
    if place.is_dir():
        place /= "index.html"
    return place.is_file() and (not part or place not in anchors or unquote(part) in anchors[place])


if __name__ == "__main__":
    main()
