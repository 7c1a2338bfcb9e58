"""Saved results: files that were written by earlier versions load, and everything comes back as it was."""

import json
import math
import os
import re
from pathlib import Path

import pytest
import torch

import spiritlevel as sl
from refusals import refused
from spiritlevel import landscape
from spiritlevel.saved import Format, json_ready, write_json, write_whole

# Written by the version before `saved.Format`, with numbers that are not finite in all the ways there are.
FILES = Path(__file__).parent / "saved_files"
LOADERS = {
    "report": sl.Report.load,
    "audit": sl.Audit.load,
    "comparison": sl.Comparison.load,
    "certificate": sl.Certificate.load,
    "robustness": sl.Robustness.load,
    "line": landscape.load,
    "surface": landscape.load,
    "spectrum": sl.Spectrum.load,
    "history": sl.History.load,
}


@pytest.mark.parametrize("name", LOADERS)
def test_what_was_saved_before_loads_and_is_saved_the_same(name, tmp_path):
    options = {"witnesses": True} if name == "report" else {}
    LOADERS[name](FILES / f"{name}.json").save(tmp_path / "again.json", **options)
    text = (tmp_path / "again.json").read_text(encoding="utf-8")
    again, before = json.loads(text, parse_constant=pytest.fail), json.loads((FILES / f"{name}.json").read_text())
    if name == "spectrum":  # the word means something else in a report, whose files have always had it
        assert again.pop("exact") is False
    assert _without_what_came_later(again) == {key: e for key, e in before.items() if key != "statements"}
    assert ("\n" in text) == ("\n" in (FILES / f"{name}.json").read_text())


def _without_what_came_later(entry):
    """Without the fields that files of today have beyond those of before, and without sentences, which are made anew."""
    later = ("error_kind", "interrupted", "about", "statements")
    if isinstance(entry, dict):
        return {key: _without_what_came_later(e) for key, e in entry.items() if key not in later}
    return [_without_what_came_later(e) for e in entry] if isinstance(entry, list) else entry


def test_numbers_of_old_files_are_what_they_were():
    value = sl.Report.load(FILES / "report.json")["rho_sum"]
    assert (value.value, value.layers["0.weight"]) == (math.inf, math.inf)
    assert math.isnan(value.error)
    assert math.isnan(value.layer_errors["0.weight"])
    assert math.isnan(value.details["second"])
    assert value.details["history"] == [1.0, -math.inf]
    assert value.neurons["0.weight"].isnan().tolist() == [False, True]
    assert value.neurons["0.weight"].dtype == torch.float64
    assert math.isnan(sl.Report.load(FILES / "report.json").loss)
    assert sl.Audit.load(FILES / "audit.json").findings[0].factor == math.inf
    part = sl.Comparison.load(FILES / "comparison.json").parts["a"]["rho_sum"]
    assert (part[0], math.isnan(part[1]), part[2]) == (1.0, True, 2.0)
    certificate = sl.Certificate.load(FILES / "certificate.json")
    assert certificate.bound == math.inf
    assert math.isnan(certificate.noisy_test_error)
    robustness = sl.Robustness.load(FILES / "robustness.json")
    assert all(map(math.isnan, (robustness.values[1], robustness.noise, robustness.curve[0].adversarial)))
    assert robustness.witness.shape == (1, 2, 2)
    assert landscape.load(FILES / "line.json").losses[0, 0] == math.inf
    assert landscape.load(FILES / "line.json").losses[1, 2] == -math.inf
    assert landscape.load(FILES / "surface.json").losses.isnan().tolist() == [[False, False], [False, True]]
    spectrum = sl.Spectrum.load(FILES / "spectrum.json")
    assert spectrum.loss == math.inf
    assert math.isnan(spectrum.top[0].residual)


def test_points_kept_by_an_earlier_version_are_not_computed_again(tmp_path):
    model, data = torch.nn.Linear(2, 2), (torch.randn(6, 2), torch.arange(6) % 2)
    file, done = tmp_path / "grid.json", []
    landscape.surface(model, data, points=2, file=file)
    kept = {"0:0": ["inf", 0.5], "0:1": [1.5, "nan"], "1:0": ["nan", 0.5], "1:1": [2.0, 0.5]}
    before = {"format": "spiritlevel-landscape-1", "fingerprint": json.loads(file.read_text())["fingerprint"]}
    file.write_text(json.dumps({**before, "values": kept}))
    again = landscape.surface(model, data, points=2, file=file, progress=lambda at, _: done.append(at))
    assert again.losses.nan_to_num(nan=-1.0).tolist() == [[torch.finfo(torch.float64).max, 1.5], [-1.0, 2.0]]
    assert done in ([], [4])


WHAT = {"line": "landscape", "surface": "landscape", "robustness": "feature robustness"}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("content", ['{"format": "something"}', "{}", "[1]", "null"])
def test_one_sentence_refuses_another_format(name, content, tmp_path):
    (tmp_path / "other.json").write_text(content)
    needed = json.loads((FILES / f"{name}.json").read_text())["format"]
    found = "'something'" if "something" in content else None
    with refused(f"not a saved {WHAT.get(name, name)}: its format is {found}, needed is {needed!r}", ValueError):
        LOADERS[name](tmp_path / "other.json")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\x00", b"[" * 100_000])
def test_a_file_that_is_not_json_is_refused(content, tmp_path):
    (tmp_path / "cut.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"^not a saved report: .*cut\.json is not JSON \("):
        sl.Report.load(tmp_path / "cut.json")


def test_a_result_inside_another_keeps_its_own_format():
    inner = sl.Report.load(FILES / "report.json")
    document = Format("outer-1", "outer").document({"inner": [inner], "rest": 1.0})
    assert document["inner"] == [inner.to_dict()]
    assert document["inner"][0]["format"] == "spiritlevel-report-1"


def test_tensors_are_lists_whether_finite_or_not():
    assert json_ready(torch.tensor([[1.0, 2.0]])) == [[1.0, 2.0]]
    assert json_ready(torch.tensor([1.0, math.nan])) == [1.0, "nan"]
    assert json_ready(torch.tensor([1, 2])) == [1, 2]


def test_a_number_that_json_lacks_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(tmp_path / "a.json", {"a": math.nan})
    assert list(tmp_path.iterdir()) == []


def test_files_have_ordinary_permissions_and_bytes(tmp_path):
    write_whole(tmp_path / "deep" / "text", "a\nb")
    (tmp_path / "other").write_bytes(b"")
    assert (tmp_path / "deep" / "text").read_bytes() == b"a\nb"
    assert (tmp_path / "deep" / "text").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_folder_that_cannot_be_opened_does_not_keep_a_file_from_being_written(tmp_path, monkeypatch):
    """Windows opens no folders."""

    def refuse(*_arguments):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        write_whole(tmp_path / "a", b"1")
    assert (tmp_path / "a").read_bytes() == b"1"


def test_a_link_is_followed_and_a_pipe_is_written_into(tmp_path):
    """A rename would put a file in their place, also in that of /dev/null."""
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_whole(tmp_path / "link", "a")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "a"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", "b")
    assert os.read(reader, 10) == b"b"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_an_open_file_is_written_into_by_its_name_under_dev(tmp_path):
    """Standard output that a shell has sent into a file: the shell would not see one that is put in its place."""
    with (tmp_path / "out").open("w+b") as stream:
        write_whole(f"/dev/fd/{stream.fileno()}", "a")
        assert os.fstat(stream.fileno()).st_size == 1


def test_an_error_of_the_disk_names_the_file(tmp_path, monkeypatch):
    def full(*_arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=re.escape(f"No space left on device: '{tmp_path / 'a'}'")):
        write_whole(tmp_path / "a", b"1")
    assert list(tmp_path.iterdir()) == []
