"""Three small trained networks against values of an independent dense computation in float64."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import spiritlevel as sl
from measure_names import DEFINED

REFERENCE = Path(__file__).parent.parent / "reference"
EXPECTED = json.loads((REFERENCE / "expected.json").read_text())
# Measure → the entry of the reference that holds its layers.
LAYERS = {
    "kappa_max": "kappa",
    "kappa_sum": "kappa",
    "kappa_trace_max": "kappa_trace",
    "kappa_trace_sum": "kappa_trace",
    "matrix_normalized_sharpness": "matrix_normalized_layers",
    "normalized_sharpness": "normalized_layers",
}
NEURONS = {"rho_max": "rho_columns", "rho_sum": "rho_columns", "rho_row_max": "rho_rows", "rho_row_sum": "rho_rows"}


class Residual(nn.Module):
    """Two leaky-ReLU layers around a skip connection, no biases."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6, bias=False)
        self.inner = nn.Linear(6, 6, bias=False)
        self.last = nn.Linear(6, 2, bias=False)

    def forward(self, x):
        h = nn.functional.leaky_relu(self.first(x), 0.1)
        return self.last(h + nn.functional.leaky_relu(self.inner(h), 0.1))


def mlp():
    return nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 3),
        nn.LeakyReLU(0.1),
        nn.Flatten(),
        nn.Linear(16, 6),
        nn.ReLU(),
        nn.Linear(6, 3),
    )


NETWORKS = {"mlp": (mlp, "cross_entropy"), "cnn": (cnn, "cross_entropy"), "residual": (Residual, "mse")}


def load(name):
    """The trained network, its data and the name of its loss."""
    build, loss = NETWORKS[name]
    arrays = np.load(REFERENCE / "tensors.npz")
    model = build().double().eval()
    model.load_state_dict({key: torch.from_numpy(arrays[f"{name}/{key}"]) for key in model.state_dict()})
    return model, (torch.from_numpy(arrays[f"{name}/x"]), torch.from_numpy(arrays[f"{name}/y"])), loss


def assert_reference(report, expected):
    for name in DEFINED:
        if name in expected:
            assert report[name].value == pytest.approx(expected[name], rel=1e-8), name
    for name, entry in LAYERS.items():
        if entry in expected:
            assert report[name].layers == pytest.approx(expected[entry], rel=1e-8), name
    for name, entry in NEURONS.items():
        for layer, values in expected.get(entry, {}).items():
            np.testing.assert_allclose(report[name].neurons[layer], values, rtol=1e-8, atol=1e-12 * max(values))


@pytest.mark.parametrize("name", NETWORKS)
def test_every_value_of_the_reference(name):
    model, data, loss = load(name)
    report = sl.measure(model, data, loss, measures=DEFINED, tolerance=1e-10)
    assert report.loss == pytest.approx(EXPECTED[name]["loss"], rel=1e-8)
    assert set(DEFINED) <= set(EXPECTED[name])
    assert_reference(report, EXPECTED[name])


@pytest.mark.parametrize("name", [name for name in NETWORKS if "normalized_cross_entropy" in EXPECTED[name]])
def test_every_value_under_the_normalized_loss(name):
    model, data, _ = load(name)
    expected = EXPECTED[name]["normalized_cross_entropy"]
    report = sl.measure(model, data, "normalized_cross_entropy", measures=DEFINED, tolerance=1e-10)
    assert len(expected) > 3
    assert report.loss == pytest.approx(expected.get("loss", report.loss), rel=1e-8)
    assert_reference(report, expected)


@pytest.mark.parametrize("measure", ["epsilon_sharpness", "riemannian_sharpness"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_ascent_finds_at_least_the_best_known_maximum(name, measure):
    model, data, loss = load(name)
    known = EXPECTED[name][measure]
    asked = sl.get_measure(measure, epsilon=known["epsilon"])
    value = sl.measure(model, data, loss, measures=[asked], tolerance=1e-6)[measure]
    assert value.value >= known["best_found"] * (1 - 1e-6)
