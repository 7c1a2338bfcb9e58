"""Layers found by use: which parameters are matrices, how they are stored, and which are bent."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cases
from spiritlevel.network.layers import Layer
from spiritlevel.network.tracing import trace


def traced(case):
    model, x, _ = case.make()
    args = x if isinstance(x, tuple) else (x,)
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return trace(lambda leaves: torch.func.functional_call(model, leaves, args), parameters)


@pytest.mark.parametrize("case", cases.CASES, ids=cases.case_id)
def test_layers_are_found_with_their_orientation(case):
    found = traced(case)
    assert set(found.layers) == set(case.layers)
    for name, layer in found.layers.items():
        assert layer.transposed == (case.layers[name].kind == "columns first"), name
        assert layer.groups == case.layers[name].groups, name


@pytest.mark.parametrize("case", cases.CASES, ids=cases.case_id)
def test_what_bends_is_what_is_estimated(case):
    assert set(traced(case).bent) & set(case.layers) == case.estimated


def test_a_reason_comes_with_every_bent_parameter():
    assert traced(cases.by_name("GELU")).bent["0.weight"] == "gelu"
    assert traced(cases.by_name("a module used twice")).bent["shared.weight"] == "applied to what it already produced"
    assert traced(cases.by_name("layer normalization")).bent["0.weight"] == "layer_norm"
    assert traced(cases.by_name("a gate")).bent["b"] == "silu"


@pytest.mark.parametrize(
    ("shape", "layer"),
    [
        ((5, 4), Layer("w")),
        ((5, 4), Layer("w", transposed=True)),
        ((6, 2, 3), Layer("w", groups=3)),
        ((6, 2, 3, 2), Layer("w", groups=2, transposed=True)),
    ],
    ids=str,
)
def test_the_matrix_of_a_tensor_puts_every_entry_in_its_row_and_column(shape, layer):
    tensor = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    kind = "columns first" if layer.transposed else "rows first"
    rows, columns = cases.Matrix(kind, layer.groups).indices(shape)
    matrix = layer.matrix(tensor)
    count = matrix.shape[1], matrix.shape[2]
    for value, row, column in zip(tensor.flatten().tolist(), rows, columns, strict=True):
        group, inside = divmod(row, count[0])
        assert value in matrix[group, inside, column - group * count[1]].tolist()


def test_a_network_is_followed_without_hooks_or_names():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.randn(3, 4))  # a matrix, whatever it is called
            self.weight = nn.Parameter(torch.randn(3))  # a shift

        def forward(self, x):
            return F.linear(x, self.bias) + self.weight

    model = Odd()
    found = trace(
        lambda leaves: torch.func.functional_call(model, leaves, (torch.randn(2, 4),)), dict(model.named_parameters())
    )
    assert found.layers == {"bias": Layer("bias")}
    assert found.bent == {}
