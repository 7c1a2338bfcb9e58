"""Critical sharpness: on quadratics the directional sharpness, elsewhere the step at which the loss turns."""

import copy
import math

import pytest
import torch
from torch import nn

import spiritlevel as sl
from dense_oracle import dense
from small_training import Training
from spiritlevel.tracking.critical import critical_step
from spiritlevel.tracking.optimizers import next_update
from spiritlevel.tracking.quantities import resolve


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("guess", [1e-3, 1.0, 1e4])
def test_the_root_of_a_quadratic_from_any_guess(scale: float, guess: float) -> None:
    looked: list[float] = []

    def rise(step: float) -> float:
        looked.append(step)
        return scale * (-step + 5 * step**2)

    found = critical_step(rise, -scale, guess, 1e-3)
    assert found.low <= 0.2 <= found.high * (1 + 1e-12)
    assert found.high - found.low <= 1e-3 * found.high
    assert found.losses == len(looked) <= 3 + abs(math.log2(guess / 0.2)) + 6


def test_few_losses_where_the_rise_is_no_quadratic() -> None:
    """exp(4η) − 1 − 8η turns positive at 0.31404…; bisection alone would take thirty."""
    found = critical_step(lambda step: math.exp(4 * step) - 1 - 8 * step, -4.0, 1.0, 1e-8)
    assert found.low == pytest.approx(0.3141, abs=1e-3)
    assert found.losses <= 16
    wall = critical_step(lambda step: math.inf if step > 0.7 else -step, -1.0, 1.0, 1e-3)
    assert wall.low <= 0.7 <= wall.high


def test_no_step_or_every_step() -> None:
    never, always = (critical_step(rise, -1.0, 1.0, 1e-3) for rise in (lambda step: -step, lambda step: step))
    assert not never.found
    assert math.isinf(never.high)
    assert not always.found
    assert always.low == 0


def quadratic() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    model = nn.Linear(4, 1, bias=False).double()
    return model, (x, torch.randn(30, 1, generator=generator, dtype=torch.float64))


def sharpness_along(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor], direction: torch.Tensor) -> float:
    """dᵀHd/(−gᵀd) from the dense Hessian."""
    hessian = dense(model, nn.functional.mse_loss, *data)
    loss = nn.functional.mse_loss(model(data[0]), data[1])
    gradient = torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, list(model.parameters()))])
    return float(direction @ hessian @ direction / -(gradient @ direction))


def test_on_a_quadratic_it_is_the_directional_sharpness() -> None:
    model, data = quadratic()
    loss = nn.functional.mse_loss(model(data[0]), data[1])
    loss.backward()
    gradient, weight = model.weight.grad.reshape(-1), model.weight.detach().reshape(-1).clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer.step()
    model.weight.data = weight.view(1, 4).clone()
    names = ["critical_sharpness_gradient", "critical_sharpness_invariant", "critical_sharpness"]
    report = sl.measure(model, data, "mse", measures=resolve(names, optimizer), tolerance=1e-4)
    moments = optimizer.state[model.weight]
    first = (0.9 * moments["exp_avg"] + 0.1 * model.weight.grad) / (1 - 0.9**2)
    second = (0.999 * moments["exp_avg_sq"] + 0.001 * model.weight.grad.square()) / (1 - 0.999**2)
    update = -(first / (second.sqrt() + 1e-8)).reshape(-1)
    for name, direction in zip(names, (-gradient, -weight.square() * gradient, update), strict=True):
        value = report[name]
        assert value.value == pytest.approx(sharpness_along(model, data, direction), abs=value.error + 1e-9), name
        assert value.error <= 1e-4 * value.value
        assert value.converged


def test_single_precision_says_what_rounding_leaves() -> None:
    """Near a minimum the loss hardly falls: the error holds what rounding does to the turn."""
    model, (x, y) = quadratic()
    with torch.no_grad():
        solution = torch.linalg.lstsq(x, y).solution.T
        model.weight.copy_(solution + 1e-3 * torch.randn(1, 4, generator=torch.Generator().manual_seed(1)))
    names = ["critical_sharpness_gradient"]
    exact = sl.measure(model, (x, y), "mse", measures=resolve(names, None), tolerance=1e-6)[names[0]]
    single = copy.deepcopy(model).float()
    rough = sl.measure(single, (x.float(), y.float()), "mse", measures=resolve(names, None))[names[0]]
    assert abs(rough.value - exact.value) <= rough.error + exact.error + 1e-3 * exact.value


def test_at_a_minimum_there_is_none() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    data = torch.eye(2), torch.zeros(2, 1)
    value = sl.measure(model, data, "mse", measures=resolve(["critical_sharpness_gradient"], None))[
        "critical_sharpness_gradient"
    ]
    assert not value.available
    assert value.notes == ("the loss does not fall along this direction, not even for a short step",)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
        lambda p: torch.optim.Adagrad(p, lr=0.01),
    ],
)
def test_the_next_update_is_the_one_that_comes(make) -> None:
    """Of any optimizer, and the optimizer and the weights are left as they were."""
    training = Training()
    training.optimizer = make(training.model.parameters())
    training.run(3)
    problem = sl.Problem(training.model, "cross_entropy", training.data)
    gradient = problem.gradient()[1]
    found = next_update(training.optimizer, problem, gradient)
    before = {name: value.detach().clone() for name, value in training.model.named_parameters()}
    for name, value in training.model.named_parameters():
        value.grad = gradient[name].clone()
    training.optimizer.step()
    for name, value in training.model.named_parameters():
        assert torch.equal(value.detach() - before[name], found[name]), name


def test_an_optimizer_that_needs_a_closure_has_no_update_to_show() -> None:
    training = Training()
    optimizer = torch.optim.LBFGS(training.model.parameters())
    tracker = sl.Tracker(training.model, training.data, optimizer=optimizer, measures=["critical_sharpness"])
    value = tracker.step(0, force=True)["critical_sharpness"]
    assert not value.available
    assert "there is no direction" in value.notes[0]
