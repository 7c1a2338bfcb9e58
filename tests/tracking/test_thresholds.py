"""Lines of stability: below them an optimizer's steps on a quadratic shrink, above them they grow."""

import pytest
import torch
from torch import nn

import spiritlevel as sl
from dense_oracle import dense
from small_training import Training
from spiritlevel.tracking.optimizers import preconditioner_of
from spiritlevel.tracking.quantities import resolve
from spiritlevel.tracking.thresholds import thresholds


def sizes_after(options: dict, sharpness: float, steps: int = 400) -> float:
    """Where gradient descent with these options is on ½λx² after so many steps from 1."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], **options)
    largest = 0.0
    for step in range(steps):
        weight.grad = sharpness * weight.detach()
        optimizer.step()
        largest = max(largest, abs(float(weight.detach()))) if step > steps - 10 else largest
    return largest


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "momentum": 0.5, "nesterov": True},
        {"lr": 0.1, "momentum": 0.5, "dampening": 0.5},
        {"lr": 0.1, "weight_decay": 3.0},
    ],
)
def test_descent_is_stable_below_its_line_and_not_above(options: dict) -> None:
    found, notes = thresholds(torch.optim.SGD([nn.Parameter(torch.ones(1))], **options))
    line = found["hessian_largest_eigenvalue"]
    assert notes == ()
    assert sizes_after(options, 0.97 * line) < 1e-2 < 1e2 < sizes_after(options, 1.03 * line)


@pytest.mark.parametrize(("kind", "decay"), [(torch.optim.Adam, 0.0), (torch.optim.AdamW, 1.5)])
def test_adam_is_stable_below_its_line_and_not_above(kind, decay: float) -> None:
    """With its second moment held at 1, so that the preconditioner is 1, and far from the start, where it has no bias."""
    line = thresholds(kind([nn.Parameter(torch.ones(1))], lr=0.1, weight_decay=decay))[0][
        "preconditioned_largest_eigenvalue"
    ]
    if not decay:
        assert line == pytest.approx(38 / 0.1)
    for factor, grows in ((0.97, False), (1.03, True)):
        x, momentum, step = 1.0, 0.0, 0.1
        for _ in range(400):
            gradient = factor * line * x
            momentum = 0.9 * momentum + 0.1 * gradient
            x = (1 - step * decay) * x - step * momentum
        assert (abs(x) > 10) == grows


def test_an_unknown_optimizer_has_no_line_but_a_note() -> None:
    training = Training()
    optimizer = torch.optim.Adagrad(training.model.parameters(), lr=0.1)
    found, notes = thresholds(optimizer)
    assert found == {"critical_sharpness": 20.0}
    assert notes == ("no line of stability is known for Adagrad; those of SGD, Adam, AdamW and RMSprop are",)
    names = ["hessian_largest_eigenvalue"]
    point = sl.Tracker(training.model, training.data, optimizer=optimizer, measures=names).step(0, force=True)
    assert point.notes == notes
    with pytest.raises(sl.SpiritLevelError, match="needs an optimizer that divides by a diagonal"):
        resolve(["preconditioned_largest_eigenvalue"], optimizer)
    assert thresholds(None) == ({}, ())
    assert thresholds(torch.optim.SGD(training.model.parameters(), lr=0.0))[0] == {}


def test_a_schedule_moves_the_line() -> None:
    training = Training()
    tracker = sl.Tracker(
        training.model, training.data, optimizer=training.optimizer, measures=["gradient_norm"], every=1
    )
    tracker.step(0)
    training.optimizer.param_groups[0]["lr"] = 0.05
    tracker.step(1)
    lines = [point.thresholds["hessian_largest_eigenvalue"] for point in tracker.history]
    assert lines == pytest.approx([38.0, 76.0])


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    ],
)
def test_the_preconditioned_eigenvalue_is_that_of_a_dense_matrix(make) -> None:
    training = Training(dtype=torch.float64)
    training.optimizer = make(training.model.parameters())
    training.run(7)
    tracker = sl.Tracker(
        training.model, training.data, optimizer=training.optimizer,
        measures=["preconditioned_largest_eigenvalue"], samples=None, tolerance=1e-6,
    )  # fmt: skip
    value = tracker.step(7, force=True)["preconditioned_largest_eigenvalue"]
    root = preconditioner_of(training.optimizer)(sl.Problem(training.model, "cross_entropy", training.data))
    hessian = dense(training.model, nn.functional.cross_entropy, *training.data)
    assert value.value == pytest.approx(float(torch.linalg.eigvalsh(root[:, None] * hessian * root)[-1]), rel=1e-6)
    # P is what the optimizer divides by: its next step from a first moment of one and the same second moment.
    if type(training.optimizer) is torch.optim.Adam:
        state = training.optimizer.state[training.model[0].weight]
        divided = (state["exp_avg_sq"] / (1 - 0.999**7)).sqrt() + 1e-8
        assert torch.allclose(root[:48], ((1 - 0.9**7) * divided).rsqrt().reshape(-1), rtol=1e-12)


def test_before_the_first_step_there_is_no_preconditioner() -> None:
    training = Training()
    optimizer = torch.optim.Adam(training.model.parameters())
    tracker = sl.Tracker(
        training.model, training.data, optimizer=optimizer, measures=["preconditioned_largest_eigenvalue"]
    )
    point = tracker.step(0, force=True)
    assert point.values == {}
    assert point.notes == ("preconditioned_largest_eigenvalue comes after the optimizer's first step",)
