"""What a command leaves where its output cannot be printed, and what it prints where a terminal is narrow."""

import io
import sys

import pytest
import torch
from torch import nn

import spiritlevel as sl
from spiritlevel import cli
from spiritlevel.cli.output import write_result
from spiritlevel.cli.study import _print_standings
from spiritlevel.show.numbers import Numbers


class Gone:
    """Something to show to a reader who has left."""

    def __rich_console__(self, console, options):
        raise BrokenPipeError(32, "Broken pipe")


def test_files_are_written_before_anything_is_printed(tmp_path):
    report = sl.measure(nn.Linear(2, 2), (torch.randn(4, 2), torch.tensor([0, 1, 0, 1])), measures=["hessian_trace"])
    files = tmp_path / "report.json", tmp_path / "report.html"
    with pytest.raises(BrokenPipeError):
        write_result(report, Gone(), *files, report.to_html, quiet=False)
    assert sl.Report.load(files[0])["hessian_trace"].value == report["hessian_trace"].value
    assert files[1].stat().st_size > 1000


def test_a_terminal_without_greek_gets_question_marks(monkeypatch):
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="latin-1"))
    with pytest.raises(SystemExit) as left:
        cli.main(["measures"])
    sys.stdout.flush()
    assert left.value.code == 0
    assert "?" in printed.getvalue().decode("latin-1")


@pytest.mark.parametrize("columns", [80, 160])
def test_names_of_measures_are_never_cut(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    names = ["measure", "environments", "sign error, mean", "worst environment", "environments better than chance"]
    names += ["fragile over seeds", "over levels", "over studies", "at the end", "at the end, rescaled"]
    name = "riemannian_nodewise_spectral_norm"
    _print_standings(Numbers(tuple(names), ((name, *["0.12"] * 9),)))
    found = capsys.readouterr().out
    assert name in found
    assert ("In a terminal of 150 columns, and with --page: environments, " in found) == (columns == 80)
