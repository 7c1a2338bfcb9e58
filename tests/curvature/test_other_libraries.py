"""Other libraries as oracles: curvlinops' dense Hessian and BackPACK's diagonal, which share no code with this one.

`make test` installs both; where one is missing these tests fail, they are not skipped.
"""

import copy
import functools
import warnings
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import spiritlevel as sl
from dense_oracle import trainable
from spiritlevel.measuring.evidence import Evidence
from spiritlevel.measuring.needs import Needs, Operator

with warnings.catch_warnings(action="ignore"):  # what curvlinops imports is compiled by torch.jit.script
    import curvlinops
    from backpack import backpack, extend
    from backpack.extensions import DiagGGNExact, DiagHessian

# theirs, not ours
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed"),
]

CLOSE = 1e-6
MOST_PROBES = 1000  # so many that what is not exact is formed by products with unit vectors


def perceptron(activation, *widths):
    layers = [layer for wide, narrow in pairwise(widths) for layer in (nn.Linear(wide, narrow), activation())]
    return nn.Sequential(*layers[:-1])


def convolutional():
    layers = nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)
    return nn.Sequential(*layers)


def normalized():
    layers = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)
    model = nn.Sequential(*layers)
    model(1 + 2 * torch.randn(50, 1, 6, 6))  # running statistics other than 0 and 1
    return model


# Name → network, shape of one input, loss, and what BackPACK is asked for: the diagonal of the Hessian, or where it has
# no rule for a layer that of the Gauss–Newton matrix, which is the same where every piece of the network is linear.
NETWORKS = {
    "MLP, ReLU": (lambda: perceptron(nn.ReLU, 5, 8, 6, 3), (5,), nn.CrossEntropyLoss(), DiagHessian),
    "MLP, tanh": (lambda: perceptron(nn.Tanh, 5, 7, 3), (5,), nn.MSELoss(), DiagHessian),
    "deep MLP, sigmoid": (lambda: perceptron(nn.Sigmoid, 5, 6, 6, 6, 6, 3), (5,), nn.CrossEntropyLoss(), DiagHessian),
    "convolutions": (convolutional, (1, 6, 6), nn.CrossEntropyLoss(), DiagHessian),
    "batch normalization, pooling": (normalized, (1, 6, 6), nn.CrossEntropyLoss(), DiagGGNExact),
}


@functools.cache
def subject(name):
    make, shape, loss, extension = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model, x = make().double().eval(), torch.randn(12, *shape).double()
        y = torch.arange(12) % 3 if isinstance(loss, nn.CrossEntropyLoss) else torch.randn(12, 3).double()
    return SimpleNamespace(model=model, loss=loss, x=x, y=y, extension=extension)


@functools.cache
def hessian(name):
    """curvlinops: products with every unit vector."""
    given = subject(name)
    parameters = list(given.model.parameters())
    operator = curvlinops.HessianLinearOperator(given.model, given.loss, parameters, [(given.x, given.y)])
    return (operator @ torch.eye(operator.shape[1], dtype=torch.float64)).detach()


def blocks(name):
    """Parameter → its diagonal block of curvlinops' Hessian."""
    start, found = 0, {}
    for key, parameter in subject(name).model.named_parameters():
        part = slice(start, start + parameter.numel())
        found[key], start = hessian(name)[part, part], part.stop
    return found


def diagonals(name):
    """BackPACK: parameter → the diagonal that its extension computes in one backward pass."""
    given = subject(name)
    model, loss = extend(copy.deepcopy(given.model)), extend(copy.deepcopy(given.loss))
    with backpack(given.extension()):
        loss(model(given.x), given.y).backward()
    attribute = given.extension().savefield
    return {key: getattr(parameter, attribute) for key, parameter in model.named_parameters()}


def evidence(name, needs):
    given = subject(name)
    problem = sl.Problem(given.model, given.loss, (given.x, given.y))
    return Evidence(problem, needs, tolerance=1e-9, seed=0, most_probes=MOST_PROBES)


def assert_close(found, wanted):
    """Equal within 1e-6 of the largest entry."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=CLOSE * float(wanted.abs().max()))


@pytest.mark.parametrize("name", NETWORKS)
def test_diagonals_are_those_of_both(name):
    found = evidence(name, Needs(statistics=frozenset({"diagonal"}))).statistics.diagonal
    theirs, dense = diagonals(name), blocks(name)
    assert found.keys() == theirs.keys() == dense.keys()
    for key, diagonal in found.items():
        assert_close(diagonal, theirs[key])
        assert_close(diagonal.reshape(-1), dense[key].diag())


@pytest.mark.parametrize("name", NETWORKS)
def test_traces_and_norms_are_those_of_the_dense_hessian(name):
    given, H = subject(name), hessian(name)
    measures = ("hessian_trace", "hessian_spectral_norm", "kappa_trace_sum", "kappa_sum")
    data = given.x, given.y
    report = sl.measure(given.model, data, given.loss, measures=measures, tolerance=1e-9, most_probes=MOST_PROBES)
    assert float(report["hessian_trace"]) == pytest.approx(float(H.trace()), rel=CLOSE)
    assert float(report["hessian_spectral_norm"]) == pytest.approx(float(torch.linalg.norm(H, 2)), rel=CLOSE)
    weights, dense = trainable(given.model), blocks(name)
    assert len(report["kappa_sum"].layers) >= 2
    for key, largest in report["kappa_sum"].layers.items():
        size = float(weights[key].square().sum())
        assert largest == pytest.approx(size * float(torch.linalg.eigvalsh(dense[key])[-1]), rel=CLOSE)
        assert report["kappa_trace_sum"].layers[key] == pytest.approx(size * float(dense[key].trace()), rel=CLOSE)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_ends_of_the_spectrum_are_those_of_the_dense_hessian(name):
    ends = {"largest": -1, "smallest": 0}
    needs = Needs(operators=tuple(Operator("identity", end) for end in ends))
    eigenvalues = torch.linalg.eigvalsh(hessian(name))
    for operator, pair in evidence(name, needs).eigenpairs.items():
        wanted = float(eigenvalues[ends[operator.end]])
        assert pair.value == pytest.approx(wanted, rel=CLOSE, abs=CLOSE * float(eigenvalues.abs().max()))
