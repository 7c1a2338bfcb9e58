"""The preflight must not take rounding or a kink for a wrong second derivative."""

import pytest
import torch
from torch import nn

import spiritlevel as sl
from spiritlevel.curvature.hessian import HessianProducts
from spiritlevel.errors import SpiritLevelError
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


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def like_tokens(scale):
    """Attention on tokens that are all alike: in truth scores have no effect, and rounding gives them one of scale⁴."""
    torch.manual_seed(1)
    x = scale * torch.eye(4, dtype=torch.float64)[:2].unsqueeze(1).expand(2, 3, 4)
    return Problem(Attending().double(), "mse", (x.clone(), torch.zeros(2, 3, dtype=torch.float64)))


def test_what_is_not_symmetric_is_an_error_and_in_the_end_a_refusal():
    assert HessianProducts(like_tokens(1.0)).relative_error < 1e-13
    assert 1e-12 < HessianProducts(like_tokens(1e3)).relative_error < 1e-3
    with pytest.raises(
        SpiritLevelError, match="at its weights, along two directions that must give the same both ways round"
    ):
        HessianProducts(like_tokens(1e6))


class _SkewInSingle(torch.autograd.Function):
    """½‖w‖², whose gradient in single precision turns with w: the second derivative is not symmetric there."""

    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w)
        return w.square().sum() / 2

    @staticmethod
    def backward(ctx, g):
        (w,) = ctx.saved_tensors
        turned = torch.stack([w[1], -w[0]]) if w.dtype == torch.float32 else torch.zeros_like(w)
        return g * (w + turned)


class Skew(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.6, 0.5]))

    def forward(self, x):
        return _SkewInSingle.apply(self.w) * x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_symmetry_is_asked_of_the_precision_that_is_measured_in(dtype, own_precision):
    x = torch.ones(4, 1)
    problem = Problem(Skew(), lambda outputs, y: outputs.mean(), (x, x), dtype=dtype)
    if dtype == torch.float64:
        assert HessianProducts(problem).relative_error < 1e-13
        return
    with pytest.raises(
        SpiritLevelError, match=r"both ways round.* or measure in double precision \(dtype=torch.float64\)"
    ):
        HessianProducts(problem)


class _SteepOnce(torch.autograd.Function):
    """½‖w‖² + 10²⁰ w₀, which can be differentiated once: no digit of its gradient shows its curvature, 1, along w₀."""

    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w)
        return w.square().sum() / 2 + 1e20 * w[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (w,) = ctx.saved_tensors
        return g * (w + 1e20 * torch.eye(len(w), dtype=w.dtype)[0])


class Steep(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.6], dtype=torch.float64))

    def forward(self, x):
        return _SteepOnce.apply(self.w) * (x + 1e-30 * self.w)  # or autograd would see a constant gradient


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_curvature_that_rounding_hides_from_differences_of_gradients_is_in_the_error():
    x = torch.ones(4, 1, dtype=torch.float64)
    report = sl.measure(Steep(), (x, x), lambda outputs, y: outputs.mean(), measures=["hessian_spectral_norm"])
    found = report["hessian_spectral_norm"]
    assert "central differences" in found.method
    assert abs(found.value - 1) <= found.error
    assert not found.converged


def test_a_number_that_is_not_the_form_of_its_vector_has_the_distance_as_error():
    """As a search finds it where a block is nothing but rounding; of small networks, where it costs nothing to ask."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    problem = Problem(model, "cross_entropy", (torch.randn(6, 4).double(), torch.arange(6) % 3))
    products = HessianProducts(problem)
    vector = torch.randn(products.flat.size, dtype=torch.float64)
    form = float(vector @ products([vector])[0])
    near, far = products.step_errors([products.flat.to_dict(vector)] * 2, [form, form + 0.5])
    assert near < 1e-12
    assert far == pytest.approx(0.5)
