"""What an optimizer knows that its gradient does not say: its next update, its preconditioner, its learning rate."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, optim

from spiritlevel.errors import SpiritLevelError
from spiritlevel.problem.contract import Parameters
from spiritlevel.problem.problem import Problem


def unwrapped_optimizer(optimizer: Any) -> optim.Optimizer:
    """torch's own optimizer; Lightning and Accelerate put theirs around it."""
    while not isinstance(optimizer, optim.Optimizer) or type(optimizer).__name__ == "AcceleratedOptimizer":
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            raise SpiritLevelError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        optimizer = inner
    return optimizer


def check_optimizer(optimizer: optim.Optimizer, parameters: Mapping[str, Tensor]) -> None:
    """Refuse an optimizer of another model."""
    owned = {id(tensor) for _, tensor in _owned(optimizer)}
    if not any(id(tensor) in owned for tensor in parameters.values()):
        raise SpiritLevelError(
            "the optimizer holds no parameter of the model: it belongs to another model, or the model was replaced after it "
            "was made. Make the optimizer from model.parameters() of the model that is tracked"
        )


def _owned(optimizer: optim.Optimizer) -> Iterator[tuple[Mapping[str, Any], Tensor]]:
    return ((group, tensor) for group in optimizer.param_groups for tensor in group["params"])


def learning_rate(optimizer: optim.Optimizer) -> float:
    """The largest of its groups."""
    return max(float(group["lr"]) for group in optimizer.param_groups)


def next_update(optimizer: optim.Optimizer, problem: Problem, gradient: Parameters) -> Parameters:
    """What the optimizer would add to the parameters for this gradient, by a step of a copy of it.

    The copy has the same state, so that momentum, moments, weight decay and whatever else it does are in it.
    """
    twin = copy.deepcopy(optimizer)  # its parameters and state with it; hooks and schedulers stay behind
    names = {id(tensor): name for name, tensor in problem.callers_parameters().items()}
    copies: dict[str, tuple[Tensor, Tensor]] = {}
    for (_, mine), (_, other) in zip(_owned(optimizer), _owned(twin), strict=True):
        name = names.get(id(mine))
        other.grad = None if name is None else gradient[name].to(other)
        if name is not None:
            copies[name] = (other, other.detach().clone())
    twin.step()
    zero = {name: torch.zeros_like(value) for name, value in problem.parameters.items()}
    moved = {name: (after.detach() - before).to(zero[name]) for name, (after, before) in copies.items()}
    return {**zero, **moved}


# --- preconditioners -------------------------------------------------------------------------------------------------


def preconditioner_of(optimizer: optim.Optimizer | None) -> Callable[[Problem], Tensor] | None:
    """problem → the diagonal of P^(−1/2), for an optimizer that divides by P; None for one that does not, or is unknown."""
    if type(optimizer) not in _PRECONDITIONERS:
        return None
    assert optimizer is not None
    divisor = _PRECONDITIONERS[type(optimizer)]

    def diagonal(problem: Problem) -> Tensor:
        groups = {id(tensor): group for group, tensor in _owned(optimizer)}
        parts = []
        for name, tensor in problem.callers_parameters().items():
            like = problem.parameters[name]
            state = optimizer.state.get(tensor, {})
            if id(tensor) not in groups or not state:
                parts.append(torch.zeros_like(like).reshape(-1))  # the optimizer does not move it
            else:
                parts.append(divisor(groups[id(tensor)], state).to(like).rsqrt().reshape(-1))
        return torch.cat(parts)

    return diagonal


def has_state(optimizer: optim.Optimizer | None) -> bool:
    """Whether it has made a step."""
    return optimizer is not None and bool(optimizer.state)


def _adam(group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    """(1 − β₁^t)(√v̂ + ε): Adam's step is η·m/P."""
    beta1, beta2 = group["betas"]
    step = float(state["step"])
    second = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
    root: Tensor = (second.double() / (1 - beta2**step)).sqrt()
    return root.add(float(group["eps"])).mul(1 - beta1**step)


def _rmsprop(group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    mean: Tensor = state["square_avg"].double()
    if group["centered"]:
        mean = mean - state["grad_avg"].double().square()
    return mean.clamp(min=0).sqrt().add(float(group["eps"]))


_PRECONDITIONERS: dict[Any, Callable[[Mapping[str, Any], Mapping[str, Any]], Tensor]] = {
    optim.Adam: _adam,
    optim.AdamW: _adam,
    optim.RMSprop: _rmsprop,
}
