"""The least trace over rescalings: against closed forms and against searches from explicitly formed Hessians."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn
from torch.nn import functional as F

import cases
import spiritlevel as sl


def values(model, data, loss="cross_entropy"):
    report = sl.measure(model, data, loss, measures=["minimum_sharpness", "minimum_sharpness_neurons", "hessian_trace"])
    return report["minimum_sharpness"], report["minimum_sharpness_neurons"], report["hessian_trace"]


def test_two_weights_in_a_row_have_a_closed_form():
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False)).double()
    nn.init.constant_(model[0].weight, 8.0)
    nn.init.constant_(model[2].weight, 2.0)
    data = torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1), 16.0, dtype=torch.float64)
    layers, neurons, trace = values(model, data, "mse")  # L = (w₂w₁ − 16)²: 2(w₂² + w₁²), least at w₁ = w₂ = 4
    assert trace.value == pytest.approx(2 * 68)
    assert layers.value == neurons.value == pytest.approx(64, rel=1e-12)
    assert layers.exact


def diagonals(model, x, y):
    values = {name: p.detach() for name, p in model.named_parameters()}
    found = {}
    for name, value in values.items():

        def loss(part, name=name):
            return F.cross_entropy(torch.func.functional_call(model, {**values, name: part}, (x,)), y)

        hessian = torch.autograd.functional.hessian(loss, value)
        found[name] = hessian.reshape(value.numel(), -1).diagonal().reshape(value.shape).numpy()
    return found


def least_trace(h, factors):
    """min over log-factors of the rescaled trace of a three-layer network with biases: one factor each for two layers' neurons."""

    def trace(logs):
        a, b = np.exp(2 * logs[: factors[0]]), np.exp(2 * logs[factors[0] :])
        a, b = np.broadcast_to(a, 6), np.broadcast_to(b, 5)
        return (
            (h["0.weight"] / a[:, None]).sum() + (h["0.bias"] / a).sum()
            + (h["2.weight"] * a / b[:, None]).sum() + (h["2.bias"] / b).sum()
            + (h["4.weight"] * b).sum() + h["4.bias"].sum()
        )  # fmt: skip

    return min(
        minimize(trace, np.zeros(sum(factors)) + start, method="BFGS", options={"gtol": 1e-12}).fun
        for start in (0, 0.3)
    )


def test_the_minimum_is_that_of_a_search_over_factors():
    model, x, y = cases.by_name("mlp").make()
    layers, neurons, trace = values(model, (x, y))
    h = diagonals(model, x, y)
    assert layers.value == pytest.approx(least_trace(h, (1, 1)), rel=1e-7)
    assert neurons.value <= least_trace(h, (6, 5)) * (1 + 1e-9)  # a neuron that is silent on all data goes to infinity
    assert neurons.value == pytest.approx(least_trace(h, (6, 5)), rel=1e-3)
    assert neurons.value < layers.value < trace.value


def test_the_flattest_network_of_the_orbit_attains_it():
    model, x, y = cases.by_name("mlp").make()
    flat = sl.flattest(model, (x, y))
    _, neurons, _ = values(model, (x, y))
    trace = sl.measure(flat, (x, y), measures=["hessian_trace"])["hessian_trace"]
    assert neurons.value == pytest.approx(trace.value, rel=1e-6)


def test_a_smooth_network_has_only_its_own_trace():
    model, x, y = cases.by_name("GELU").make()
    layers, neurons, trace = values(model, (x, y))
    assert layers.value == neurons.value
    assert layers.value >= trace.value * (1 - 1e-9)  # what is negative is clipped
