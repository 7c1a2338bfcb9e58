"""What happens when a measurement cannot finish: Ctrl-C, and memory that runs out."""

import pytest
import torch
from torch import nn

import spiritlevel as sl
from spiritlevel.curvature import hessian, statistics
from spiritlevel.errors import SpiritLevelError

NAMES = ["hessian_trace", "rho_sum", "hessian_spectral_norm", "kappa_sum"]


@pytest.fixture
def subject():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    return model, (torch.randn(64, 5).double(), torch.randint(0, 3, (64,)))


def interrupting(stage_wanted: str):
    def listen(stage: str, passes: float) -> None:
        if stage.startswith(stage_wanted) and passes > 2:
            raise KeyboardInterrupt

    return listen


def test_ctrl_c_returns_what_is_finished(subject) -> None:
    model, data = subject
    whole = sl.measure(model, data, measures=NAMES)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = sl.measure(model, data, measures=NAMES, progress=interrupting("hessian_spectral_norm"))
    assert list(report) == ["hessian_trace", "rho_sum"]
    assert report.interrupted
    assert report.notes[0] == "interrupted: hessian_spectral_norm, kappa_sum were not finished"
    assert report["rho_sum"].value == whole["rho_sum"].value
    assert report.loss == whole.loss
    assert not whole.interrupted
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_ctrl_c_before_anything_is_finished_ends_the_call(subject) -> None:
    model, data = subject
    with pytest.raises(KeyboardInterrupt):
        sl.measure(model, data, measures=NAMES[2:], progress=interrupting("hessian_spectral_norm"))


def test_ctrl_c_in_the_sampling_error_keeps_the_measurement(subject) -> None:
    report = sl.measure(*subject, measures=NAMES[:2], samples=40, progress=interrupting_parts)
    assert report.interrupted
    assert list(report) == NAMES[:2]
    assert "is not in the bars" in report.notes[0]


def interrupting_parts(stage: str, passes: float) -> None:
    if "sampling error, part 3" in stage:
        raise KeyboardInterrupt


def test_the_time_left_is_told(subject) -> None:
    heard: list[str] = []
    clock = iter(range(0, 100_000, 5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spiritlevel.measures.progress.time.monotonic", lambda: float(next(clock)))
        sl.measure(*subject, measures=NAMES, progress=lambda stage, passes: heard.append(stage))
    assert any(" s left" in stage for stage in heard)
    assert heard[0] == "hessian_trace"


def failing_above(size: int, error: Exception, target, name: str, patch: pytest.MonkeyPatch) -> None:
    """Memory for chunks of up to `size` samples only."""
    original = getattr(target, name)

    def limited(self, *args, **kwargs):
        chunk = next(argument for argument in args if hasattr(argument, "targets"))
        if len(chunk) > size:
            raise error
        return original(self, *args, **kwargs)

    patch.setattr(target, name, limited)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        MemoryError(),
    ],
)
def test_smaller_chunks_are_tried(subject, monkeypatch, error) -> None:
    whole = sl.measure(*subject, measures=NAMES, tolerance=1e-9)
    failing_above(10, error, statistics.TappedChunk, "__init__", monkeypatch)
    failing_above(10, error, hessian.HessianProducts, "_graph", monkeypatch)
    report = sl.measure(*subject, measures=NAMES, tolerance=1e-9)
    for name in NAMES:
        assert report[name].value == pytest.approx(whole[name].value, rel=1e-6)
    assert any("so smaller ones were used" in note for note in report.notes)


def test_when_nothing_helps_the_error_has_the_numbers(subject, monkeypatch) -> None:
    failing_above(0, torch.OutOfMemoryError("CUDA out of memory"), statistics.TappedChunk, "__init__", monkeypatch)
    with pytest.raises(SpiritLevelError, match="out of memory while computing rho_sum, with 57 parameters"):
        sl.measure(*subject, measures=["rho_sum"])


def test_another_error_is_not_taken_for_a_lack_of_memory(subject, monkeypatch) -> None:
    failing_above(2, RuntimeError("something else"), statistics.TappedChunk, "__init__", monkeypatch)
    with pytest.raises(RuntimeError, match="something else"):
        sl.measure(*subject, measures=["rho_sum"])
