"""Derivatives that are not what they seem: located and refused, or taken another way."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import spiritlevel as sl
import zoo
from refusals import refused
from zoo import X, Y, mean_on, whole

# --- derivatives ------------------------------------------------------------------------------------------------------


class Bent(nn.Module):
    """|Wx|^1.5, whose second derivative is infinite where Wx = 0."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.first(x).abs() ** 1.5)


BENT = (
    "the second derivative of the loss by 'first.weight' is NaN or infinite {}, though the loss and its gradient are finite "
    "there. Likely cause: a square root, a norm or a power at zero; add a small constant inside it, or leave the sample out"
)


@pytest.mark.parametrize("name", ["hessian_spectral_norm", "riemannian_spectral_norm", "kappa_sum"])
def test_a_second_derivative_that_is_not_finite_is_located(name):
    x = torch.cat([X, torch.zeros(1, 4, dtype=torch.float64), X])
    with refused(BENT.format("at sample 6")):
        sl.measure(zoo.seeded(Bent), (x, Y.repeat(3)[:13]), measures=[name])
    batches = [(X, Y), (x[6:], Y.repeat(2)[:7])]
    with refused(BENT.format("on the batch that starts at sample 6")):
        sl.measure(zoo.seeded(Bent), batches, whole, measures=[name])


def test_a_gradient_that_is_not_finite_is_located():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 3)

        def forward(self, x):
            return self.last(self.first(x).square().sqrt())

    x = torch.cat([X, torch.zeros(1, 4, dtype=torch.float64)])
    with refused(
        "the gradient of the loss by 'first.weight' is NaN or infinite at sample 6, though the loss is finite there"
    ):
        sl.measure(zoo.seeded(Root), (x, Y.repeat(2)[:7]), measures=["hessian_spectral_norm"])


class Cube(torch.autograd.Function):
    """A third power whose backward can be differentiated, and one whose backward cannot."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, slope):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * slope


class OnceCube(Cube):
    backward = staticmethod(torch.autograd.function.once_differentiable(Cube.backward))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize(("function", "rel"), [(Cube, 1e-6), (OnceCube, 1e-4)], ids=["twice", "once"])
def test_functions_with_a_backward_of_their_own(function, rel):
    class Applied(nn.Module):
        def __init__(self, apply):
            super().__init__()
            self.first, self.last, self.apply_ = nn.Linear(4, 4), nn.Linear(4, 3), apply

        def forward(self, x):
            return self.last(self.apply_(self.first(x)))

    model, oracle = zoo.seeded(lambda: Applied(function.apply)), zoo.seeded(lambda: Applied(lambda z: z**3))
    report = zoo.check(model, (X, Y), "cross_entropy", mean_on(X), oracle=oracle, exact=False, rel=rel)
    assert ("central differences" in report["hessian_spectral_norm"].method) == (function is OnceCube)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_that_are_computed_again(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last, self.recompute = nn.Linear(4, 4), nn.Linear(4, 3), True

        def forward(self, x):
            def block(z):
                return torch.tanh(self.first(z))

            return self.last(checkpoint(block, x, use_reentrant=reentrant) if self.recompute else block(x))

    model = zoo.seeded(Checkpointed)
    oracle = copy.deepcopy(model)
    oracle.recompute = False
    zoo.check(model, [(X, Y)], whole, mean_on(X), oracle=oracle, exact=False)


# --- gradients that are not those of the loss -------------------------------------------------------------------------


class Reversed(torch.autograd.Function):
    """The identity, with a gradient of the other sign."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, slope):
        return -slope


class Between(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between):
        super().__init__()
        self.first, self.between, self.last = nn.Linear(4, 4), between, nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.between(torch.tanh(self.first(x))))


def straight_through(z):
    return z + ((4 * z).round() / 4 - z).detach()


def partly_detached(z):
    return z + 0.3 * z.detach().square()


def scaled_by_a_hook(z):
    if z.requires_grad:
        z.register_hook(lambda slope: 1.1 * slope)
    return z


@pytest.mark.parametrize("loss", ["cross_entropy", whole], ids=["outputs", "whole batch"])
@pytest.mark.parametrize("between", [Reversed.apply, straight_through, partly_detached, scaled_by_a_hook])
@pytest.mark.parametrize("single", [False, True], ids=["double", "single"])
def test_gradients_that_are_not_those_of_the_loss(between, loss, single):
    model, x = zoo.seeded(lambda: Between(between)), X
    if single:
        model, x = model.float(), X.float()
    data = (x, Y) if loss == "cross_entropy" else [(x, Y)]
    for names in (["hessian_spectral_norm"], ["hessian_trace"]):
        with pytest.raises(
            sl.SpiritLevelError,
            match=r"^the gradient of this network is not that of its loss: along a direction in 'first.weight' autograd gives "
            r"a slope of .*, and the loss has .*\. Likely cause: gradient reversal, a straight-through estimator or a hook",
        ):
            sl.measure(model, data, loss, measures=names)


def test_a_backward_hook_that_changes_gradients():
    model = zoo.seeded(lambda: Between(nn.Identity()))
    model.between.register_full_backward_hook(lambda module, inputs, outputs: (2 * inputs[0],))
    with pytest.raises(sl.SpiritLevelError, match=r"^the gradient of this network is not that of its loss"):
        sl.measure(model, (X, Y))


def test_a_loss_of_nearly_nothing_does_not_hide_a_wrong_gradient():
    y = torch.arange(3).repeat(20)
    x = F.one_hot(y, 4).double()

    def build(between):
        model = Between(between)
        with torch.no_grad():
            model.first.weight.copy_(torch.eye(4)), model.first.bias.zero_()
            model.last.weight.copy_(25 * torch.eye(3, 4)), model.last.bias.zero_()
        return model.double()

    assert sl.Problem(build(nn.Identity()), "cross_entropy", (x, y)).gradient()[0] < 2e-8
    with pytest.raises(sl.SpiritLevelError, match=r"^the gradient of this network is not that of its loss"):
        sl.measure(build(Reversed.apply), (x, y), measures=["hessian_trace"])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("single", [False, True], ids=["double", "single"])
def test_kinks_and_steps_are_no_wrong_gradients(seed, single):
    """ReLU, max pooling, sorting and rounding without a gradient: what autograd gives is the slope wherever there is one."""

    class Kinked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(4, 64), nn.Linear(32, 32), nn.Linear(32, 3)
            self.steps = nn.Linear(4, 1)

        def forward(self, x):
            h = F.max_pool1d(F.relu(self.first(x)).unsqueeze(1), 2).squeeze(1)
            h = F.leaky_relu(self.inner(h.sort(1).values)).abs()
            return self.last(h) * (1 + (3 * self.steps(x)).round().sign() * 0.1)

    model = zoo.seeded(Kinked, seed)
    x, y = zoo.gaussian(200, 4, seed=seed), zoo.integers(3, 200, seed=seed)
    if single:
        model, x = model.float(), x.float()
    sl.Problem(model, "cross_entropy", (x, y)).check_derivatives()


@pytest.mark.parametrize("scale", [1e-11, 1.0, 30.0, 1e3, 1e5])
def test_slopes_that_rounding_swallows_are_no_wrong_gradients(scale):
    """Weights so small that they do not show in the loss, or so large that the loss is zero to the last bit."""
    model = nn.Linear(4, 3, bias=False).double()
    x, y = 3.0 * F.one_hot(torch.arange(3).repeat(4), 4).double(), torch.arange(3).repeat(4)
    with torch.no_grad():
        model.weight.copy_(scale * torch.eye(3, 4))
    sl.Problem(model, "cross_entropy", (x, y)).check_derivatives()
    sl.Problem(model.float(), "cross_entropy", (x.float(), y)).check_derivatives()


CUT = (
    "the loss depends on {!r}, but autograd records no way from there to the loss, so that every derivative would be zero. "
    "Likely cause: torch.no_grad() or inference_mode() around the network, or detach(), .data, item() or float() on the way. "
    "Let autograd record it, or freeze what should not count with requires_grad_(False)"
)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "names", [["hessian_spectral_norm"], ["hessian_trace"], ["fisher_rao_norm"], ["keskar_sharpness"]]
)
def test_a_network_that_autograd_does_not_see(around, names):
    class Unseen(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        @around()
        def forward(self, x):
            return self.inner(x)

    with refused(CUT.format("inner.weight")):
        sl.measure(zoo.seeded(Unseen), (X, Y), measures=names)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")
@pytest.mark.parametrize("cut", [float, torch.Tensor.detach, lambda t: t.data, torch.Tensor.item])
def test_a_parameter_that_autograd_does_not_see(cut):
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return self.inner(x) * cut(self.scale)

    model = zoo.seeded(Partly)
    with refused(CUT.format("scale")):
        sl.measure(model, (X, Y))
    model.scale.requires_grad_(False)
    zoo.check(model, (X, Y), "cross_entropy", mean_on(X))


def test_hooks_on_parameters_do_not_reach_the_measurement():
    model = zoo.seeded(lambda: Between(nn.Identity()))
    oracle = copy.deepcopy(model)
    model.first.weight.register_hook(lambda slope: 0.1 * slope)
    zoo.check(model, (X, Y), "cross_entropy", mean_on(X), oracle=oracle, exact=False)
