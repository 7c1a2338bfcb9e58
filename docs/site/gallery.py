"""The gallery of the site: every function draws one picture from a call or two, and its source stands beside it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import spiritlevel as sl
from spiritlevel import landscape


@functools.cache
def trained(hidden: int = 16, batch: int = 20, seed: int = 0) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """A small network on three noisy classes, trained for a few epochs, and its data."""
    torch.manual_seed(seed)
    x = torch.randn(180, 8, generator=torch.Generator().manual_seed(7))
    y = (x[:, :3] + 0.3 * x[:, 3:6]).argmax(1)
    model = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 12), nn.ReLU(), nn.Linear(12, 3))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(40):
        for rows in torch.randperm(len(x)).split(batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model, (x, y)


def layers_along_the_depth() -> Any:
    """Where the sharpness sits: κ of every layer of two networks."""
    small, data = trained(batch=10)
    large, _ = trained(batch=90)
    return sl.plot.layers({"small batches": small, "large batches": large}, data)


def neurons_of_every_layer() -> Any:
    """How ρ is spread over neurons; dead ones are counted."""
    model, data = trained()
    return sl.plot.neurons(model, data)


def loss_along_random_lines() -> Any:
    """The loss along layer-normalized random directions, with a band over five of them."""
    model, data = trained()
    return sl.plot.line(model, data, count=5, points=21)


def loss_between_two_networks() -> Any:
    """The straight line between two minima of one architecture."""
    first, data = trained(seed=0)
    second, _ = trained(seed=1)
    return sl.plot.line(landscape.line(first, data, directions=second, points=21, span=(-0.2, 1.2)))


def loss_over_a_plane() -> Any:
    """Contours over the two top eigenvectors."""
    model, data = trained()
    return sl.plot.surface(landscape.surface(model, data, directions="eigen", points=11))


def loss_as_a_surface() -> Any:
    """The same idea in three dimensions, along random directions."""
    model, data = trained()
    return sl.plot.surface(landscape.surface(model, data, points=11), three_d=True)


def eigenvalue_density() -> Any:
    """The density of the Hessian's eigenvalues, with its error band and both ends."""
    model, data = trained()
    return sl.plot.spectrum(sl.spectrum(model, data, probes=4, steps=30, ends=2))


def two_spectra() -> Any:
    """Rescaling layers changes the plain spectrum and leaves the function alone."""
    model, data = trained()
    twin = sl.rescale_layers(model, {"0.weight": 4.0, "2.weight": 0.25}, data[0][:2])
    spectra = {
        name: sl.spectrum(m, data, probes=4, steps=30, ends=2) for name, m in (("network", model), ("twin", twin))
    }
    return sl.plot.spectrum(spectra)


def invariant_spectra() -> Any:
    """The same two in the metric that no rescaling of layers changes."""
    model, data = trained()
    twin = sl.rescale_layers(model, {"0.weight": 4.0, "2.weight": 0.25}, data[0][:2])
    spectra = {
        name: sl.spectrum(m, data, operator="riemannian", probes=4, steps=30, ends=2)
        for name, m in (("network", model), ("twin", twin))
    }
    return sl.plot.spectrum(spectra)


def an_attack() -> Any:
    """Measures along a rescaling that changes no output: plain ones rise at will, invariant ones stay."""
    model, data = trained()
    return sl.plot.attack(model, data)


def minima_in_other_coordinates() -> Any:
    """Three minima of one loss after a change of coordinates."""
    return sl.plot.reparametrizations()


def the_power_method() -> Any:
    """Rangamani's Algorithm 1 on the quotient manifold, step by step."""
    model, data = trained()
    return sl.plot.convergence(model, data)


def a_measure_against_the_gap() -> Any:
    """A measure of several networks against their generalization gap, with the correlation."""
    values, gaps = [], []
    fresh = torch.randn(500, 8, generator=torch.Generator().manual_seed(8))
    labels = (fresh[:, :3] + 0.3 * fresh[:, 3:6]).argmax(1)
    for hidden in (4, 8, 16, 32, 64):
        model, (x, y) = trained(hidden=hidden)
        values.append(sl.measure(model, (x, y), measures=["kappa_trace_sum"])["kappa_trace_sum"].value)
        with torch.no_grad():
            losses = [float(nn.functional.cross_entropy(model(a), b)) for a, b in ((fresh, labels), (x, y))]
        gaps.append(losses[0] - losses[1])
    return sl.plot.scatter(values, gaps)


PICTURES: tuple[Callable[[], Any], ...] = (
    layers_along_the_depth,
    neurons_of_every_layer,
    loss_along_random_lines,
    loss_between_two_networks,
    loss_over_a_plane,
    loss_as_a_surface,
    eigenvalue_density,
    two_spectra,
    invariant_spectra,
    an_attack,
    minima_in_other_coordinates,
    the_power_method,
    a_measure_against_the_gap,
)
