"""`spiritlevel bench` runs the benchmark of a clone and says so where there is none."""

import shutil
import subprocess
import sys
from pathlib import Path

import spiritlevel

PACKAGE = Path(spiritlevel.__file__).parent


def test_an_installed_package_says_that_the_benchmark_needs_a_clone(tmp_path):
    # With what is compiled: that takes seconds to do again.
    shutil.copytree(PACKAGE, tmp_path / "site" / "spiritlevel")
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); from spiritlevel.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "bench", "--quick"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    said = " ".join(done.stderr.split())
    assert done.returncode == 2, said
    assert "clone the repository" in said
    assert not list(tmp_path.glob("out*"))


def test_the_benchmark_is_not_part_of_the_package():
    assert not (PACKAGE / "bench").exists()
    assert (PACKAGE.parents[1] / "benchmarks" / "run.py").is_file()
