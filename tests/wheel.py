"""`make wheel`: build, look inside, install in a fresh environment, and run the README's lines there.

Not a test of pytest: it takes a minute and downloads what the library depends on, torch from the environment it runs in.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
WANTED = ("show/page.html.jinja", "show/page.css", "show/page.js", "show/references.json", "py.typed")


def main() -> None:
    """Each step in turn; the first that fails ends it."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    run(sys.executable, "-m", "build", str(ROOT))
    (wheel,) = (ROOT / "dist").glob("*.whl")
    check(wheel)
    with tempfile.TemporaryDirectory() as folder:
        python = fresh(Path(folder))
        # With the packages of this environment in reach, so that torch is not downloaded again; ours is not among them.
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel))
        where = subprocess.check_output(
            [python, "-c", "import spiritlevel; print(spiritlevel.__file__)"], text=True, cwd=folder
        )
        assert folder in where, f"the wheel was not imported, but {where}"
        script = Path(folder) / "readme.py"
        script.write_text("\n".join(blocks(ROOT / "README.md")), encoding="utf-8")
        run(python, str(script), cwd=folder)
        run(python, "-m", "spiritlevel", "--version", cwd=folder)
    print(f"{wheel.name}: built, complete, installs, and the README runs with it")


def run(*command: str, cwd: str | None = None) -> None:
    subprocess.run(command, check=True, cwd=cwd)


def check(wheel: Path) -> None:
    """What the library reads at run time must be in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    missing = [name for name in WANTED if f"spiritlevel/{name}" not in names]
    assert not missing, f"missing from {wheel.name}: {missing}"
    assert not [name for name in names if name.startswith(("tests/", "docs/"))]


def fresh(folder: Path) -> str:
    """An environment of its own that sees the packages of this one, but not this checkout."""
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    query = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    inside = subprocess.check_output([str(python), "-c", query], text=True).strip()
    ours = subprocess.check_output([sys.executable, "-c", query], text=True).strip()
    Path(inside, "packages.pth").write_text(ours + "\n", encoding="utf-8")
    return str(python)


def blocks(page: Path) -> list[str]:
    """The Python blocks of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


if __name__ == "__main__":
    main()
