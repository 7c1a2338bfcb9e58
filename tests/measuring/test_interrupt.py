"""What happens when a measurement cannot finish: Ctrl-C, SIGTERM, and memory that runs out."""

import random
import signal
import sys
import threading
import types
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn

import spiritlevel as sl
from spiritlevel import cli
from spiritlevel.curvature import hessian, statistics
from spiritlevel.errors import SpiritLevelError
from spiritlevel.measuring import run
from spiritlevel.network.modes import saved_tensor_hooks
from spiritlevel.problem.quiet import undisturbed
from spiritlevel.subjects.checkpoint import save_checkpoint
from spiritlevel.subjects.networks import build_model

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


def test_ctrl_c_returns_what_is_finished(subject, by_searches) -> None:
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


def test_ctrl_c_before_anything_is_finished_ends_the_call(subject, by_searches) -> None:
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


class ByHelper(nn.Module):
    """Reaches its layers through an object that no copy of the structure can follow."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.helper = inner, types.SimpleNamespace(inner=inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.helper.inner(x)


class InterruptedAt:
    """Raises KeyboardInterrupt before one bytecode of the code that swaps parameters and puts things back."""

    FILES = ("spiritlevel/problem/replica", "spiritlevel/problem/quiet", "spiritlevel/problem/problem", "contextlib")

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def __call__(self, frame, event, arg):
        if not any(name in frame.f_code.co_filename for name in self.FILES):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.step

    def step(self, frame, event, arg):
        self.count += event == "opcode"
        if event == "opcode" and self.count == self.at:
            raise KeyboardInterrupt
        return self.step


def traced(problem: sl.Problem, at: int) -> InterruptedAt:
    tracer, before = InterruptedAt(at), sys.gettrace()
    sys.settrace(tracer)
    try:
        problem.loss()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return tracer


@pytest.mark.parametrize("inside", [False, True], ids=["stand-in", "own module"])
def test_ctrl_c_at_any_bytecode_leaves_the_model_as_it_was(subject, inside) -> None:
    model, data = subject
    model = ByHelper(model) if inside else model
    problem = sl.Problem(model, "cross_entropy", data)
    assert (problem.module is model) == inside
    wanted, parameters = problem.loss(), dict(model.named_parameters())
    values = {name: value.detach().clone() for name, value in parameters.items()}
    patched = torch.amp.autocast_mode.autocast.__enter__
    bytecodes = traced(problem, -1).count
    for at in random.Random(0).sample(range(1, bytecodes + 1), 200):
        assert traced(problem, at).count >= at
        found = dict(model.named_parameters())
        assert found.keys() == parameters.keys()
        assert all(found[name] is parameter for name, parameter in parameters.items())
        assert all(torch.equal(found[name], value) for name, value in values.items())
        assert all(module.training for module in model.modules())
    assert torch.amp.autocast_mode.autocast.__enter__ is patched
    assert problem.loss() == wanted


class CutShort:
    """Raises KeyboardInterrupt where the first block that `undisturbed` guards is left, before it can put anything back."""

    def __init__(self) -> None:
        self.struck = False

    def __call__(self, frame, event, arg):
        left = frame.f_code.co_name == "__exit__" and getattr(frame.f_locals.get("self"), "gen", None)
        if left and left.__name__ == "undisturbed" and not self.struck:
            self.struck = True
            raise KeyboardInterrupt


def test_a_block_that_was_cut_short_changes_nothing_when_its_traceback_is_forgotten() -> None:
    """If it did, autocast would be without effect and the model in eval mode from then on."""
    model, autocast = nn.Linear(2, 2), torch.amp.autocast_mode.autocast
    entering, before, kept = autocast.__enter__, sys.gettrace(), []
    with undisturbed(model):
        sys.settrace(CutShort())
        try:
            with undisturbed(model):
                pass
        except KeyboardInterrupt as struck:
            kept.append(struck)
        finally:
            sys.settrace(before)
    assert len(kept) == 1
    assert autocast.__enter__ is entering
    model.train()
    kept.clear()
    assert autocast.__enter__ is entering
    assert model.training


def test_overlapping_runs_leave_torch_as_it_was() -> None:
    """Two threads: the first to come is the first to go, and the second must not put back what the first had changed."""
    autocast = torch.amp.autocast_mode.autocast
    entering, fast = autocast.__enter__, torch.backends.mha.get_fastpath_enabled()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with undisturbed(nn.Linear(2, 2)):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with undisturbed(nn.Linear(2, 2)):
        thread.start()
        assert inside.wait(10)
    assert autocast.__enter__ is not entering  # the other is still at work
    leave.set()
    thread.join(10)
    assert autocast.__enter__ is entering
    assert torch.backends.mha.get_fastpath_enabled() == fast


@pytest.mark.parametrize("own", [False, True], ids=["none", "the caller's"])
def test_hooks_on_saved_tensors_that_an_interruption_left_are_removed(own: bool) -> None:
    def keep(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, keep) if own else nullcontext():
        before = saved_tensor_hooks()
        with suppress(KeyboardInterrupt), undisturbed(nn.Linear(2, 2)):
            for _ in range(2):
                torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t).__enter__()
            raise KeyboardInterrupt
        assert saved_tensor_hooks() == before
        assert (before is not None) == own
    torch.func.grad(torch.sum)(torch.ones(2))


# The alarm may fall into a callback of the garbage collector, such as hypothesis has, where Python ignores it with a warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_time_leaves_the_model_as_it_was(subject) -> None:
    model, data = subject
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    values = {name: value.clone() for name, value in model.state_dict().items()}

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before, drawn = signal.signal(signal.SIGALRM, interrupt), random.Random(0)
    try:
        for _ in range(60):
            try:
                signal.setitimer(signal.ITIMER_REAL, drawn.uniform(0.001, 0.08))
                sl.measure(model, data, measures=NAMES)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                pass
            held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            assert all(a is b for a, b in zip(model.parameters(), held, strict=True))
            assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
            assert all(module.training for module in model.modules())
            assert saved_tensor_hooks() is None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_sigterm_does_what_ctrl_c_does(monkeypatch, capsys, tmp_path) -> None:
    """The command prints what is finished and leaves with 143; outside of it the signal means what it meant before."""
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    compute = run.compute_within_memory

    def terminated(measure, evidence):
        if measure.name == "rho_sum":
            signal.raise_signal(signal.SIGTERM)  # not os.kill, which may reach another thread, and this one too late
        return compute(measure, evidence)

    monkeypatch.setattr(run, "compute_within_memory", terminated)
    weights = tmp_path / "weights.safetensors"
    save_checkpoint(build_model("mlp:6-5", input_shape=(12,), classes=3, seed=1), weights)
    asked = ["measure", "mlp:6-5", "--checkpoint", str(weights), "--data", "random:40,12,3,0", "--measures"]
    with pytest.raises(SystemExit) as left:
        cli.main([*asked, "hessian_trace,rho_sum,kappa_sum"])
    out = capsys.readouterr().out
    assert left.value.code == 143
    assert "hessian_trace" in out
    assert "interrupted: rho_sum, kappa_sum were not finished" in " ".join(out.split())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(SystemExit) as left:
        cli.main([*asked, "rho_sum"])
    assert left.value.code == 143


def test_a_sigterm_handler_of_the_caller_is_left_alone() -> None:
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        mine = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit):
            cli.main(["--version"])
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_time_left_is_told(subject) -> None:
    heard: list[str] = []
    clock = iter(range(0, 100_000, 5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spiritlevel.measuring.progress.time.monotonic", lambda: float(next(clock)))
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
