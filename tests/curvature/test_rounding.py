"""What rounding may have changed is in the error, in double precision too."""

import torch
from torch import nn

import spiritlevel as sl
from fuzz.found import FOUND
from fuzz.subjects import build


def test_terms_that_cancel_in_double_precision_are_seen():
    """In single precision the same overflows, which says nothing of double precision."""
    built = build(FOUND["terms that cancel in double precision"])
    value = sl.measure(built.model, built.data, built.loss, **built.arguments)["kappa_sum"]
    assert value.error > 1e-3 * value.value


def test_digits_that_are_known_are_kept():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.LayerNorm(3), nn.Linear(3, 3)).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    value = sl.measure(model, (x, torch.arange(6) % 3), "cross_entropy", measures=["kappa_sum"])["kappa_sum"]
    assert value.error < 1e-11 * value.value
