"""The preflight must not take rounding or a kink for a wrong second derivative."""

import pytest
import torch
from torch import nn

from spiritlevel.curvature.hessian import HessianProducts
from spiritlevel.problem.problem import Problem


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in torch.func.jvp
def test_a_network_whose_loss_is_all_but_zero_is_measured():
    """At a loss of 1e-10 the gradient is known to six digits only; a difference needs longer steps there."""
    torch.manual_seed(0)
    y = torch.arange(40) % 2
    x = 0.1 * torch.randn(40, 6, dtype=torch.float64) + (2 * y - 1).unsqueeze(1)
    model = nn.Linear(6, 2).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-2.0], [2.0]]).expand(2, 6))  # logits ∓12 and ±12 apart by 24
        model.bias.zero_()
    problem = Problem(model, "cross_entropy", (x, y))
    assert 0 < problem.loss() < 1e-9
    assert HessianProducts(problem).method == "kept graph"
