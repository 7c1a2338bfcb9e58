"""The list of what may be skipped is kept: a skip that is not on it fails the run, and one that is gets counted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import skips

TESTS = Path(__file__).parent
MODULE = """\
import pytest

def test_browser():
    pytest.skip("no browser: chromium")

def test_extra():
    pytest.importorskip("no_such_package")

@pytest.mark.xfail(reason="known")
def test_known():
    assert False

def test_fine():
    pass
"""


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "1")], ids=["one process", "workers"])
def test_a_skip_that_is_not_on_the_list_fails_the_run(tmp_path, workers):
    (tmp_path / "test_some.py").write_text(MODULE)
    (tmp_path / "test_module.py").write_text("import pytest\npytest.importorskip('nor_this_one')\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "skips",
        *workers,
        "-c",
        os.devnull,
        "--rootdir",
        tmp_path,
        tmp_path,
    ]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run([*command, "-p", "no:cacheprovider", "--continue-on-collection-errors"],
                          capture_output=True, text=True, env=environment, check=False)  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "1 test was not run: this machine has no browser (chromium and chromedriver)" in done.stdout
    for package in ("no_such_package", "nor_this_one"):
        assert (
            f"skipped for a reason that is not on the list in tests/skips.py: Skipped: could not import '{package}'"
            in (done.stdout)
        )
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed, 1 error" in done.stdout


def test_on_linux_only_a_browser_may_be_missing(monkeypatch):
    assert [lack.says for lack in skips.MAY_LACK if lack.here] == [r"no browser: .*"] or not skips.LINUX
