"""What goes wrong in practice: handled and said, or refused with what to do."""

import copy
import functools
import types
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import spiritlevel as sl
import zoo
from refusals import refused
from spiritlevel.problem import checks

X, Y = zoo.gaussian(6, 4), zoo.integers(3, 6)
TOKENS = zoo.integers(7, 6, 4)


def whole(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1]), len(batch[1])


def mean_on(x):
    return lambda model: F.cross_entropy(model(x), Y)


def check(build, x=X, **options):
    return zoo.check(zoo.seeded(build), (x, Y), "cross_entropy", mean_on(x), **options)


# --- parameters -------------------------------------------------------------------------------------------------------


class Scalars(nn.Module):
    """Two parameters without dimensions, one of them inside an exponential."""

    def __init__(self):
        super().__init__()
        self.scale, self.temperature = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(0.7))
        self.inner = nn.Linear(4, 3)

    def forward(self, x):
        return self.inner(x * self.scale) * self.temperature.exp()


def test_parameters_without_dimensions():
    assert check(Scalars, exact=False).problem["layers"] == ["inner.weight"]


def test_a_scalar_and_nothing_else():
    model = zoo.seeded(lambda: nn.Sequential(nn.Linear(4, 3).requires_grad_(False), nn.PReLU()))
    report = sl.measure(model, (X, Y))
    (h,) = zoo.hessian(model, mean_on(X)).flatten().tolist()
    assert report["hessian_trace"].value == pytest.approx(h, rel=1e-10)
    assert report["hessian_spectral_norm"].value == pytest.approx(abs(h), rel=1e-10)
    assert not report["kappa_sum"].available


@pytest.mark.parametrize("loss", ["cross_entropy", whole], ids=["outputs", "whole batch"])
def test_parameters_that_the_loss_never_reaches(loss):
    class Aside(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
            self.aside, self.never = nn.Linear(4, 2), nn.Linear(2, 2)
            self.cut = nn.Linear(4, 3)

        def forward(self, x):
            h = torch.tanh(self.first(x))
            self.aside(h)
            return self.last(h) + self.cut(h).detach() * 0

    data = (X, Y) if loss == "cross_entropy" else [(X, Y)]
    report = zoo.check(zoo.seeded(Aside), data, loss, mean_on(X), exact=False)
    assert report["kappa_sum"].layers["aside.weight"] == 0
    assert report["kappa_trace_sum"].layers["aside.weight"] == 0


@pytest.mark.parametrize("options", [{"sparse": True}, {"scale_grad_by_freq": True}], ids=["sparse", "by frequency"])
@pytest.mark.parametrize("loss", ["cross_entropy", whole], ids=["outputs", "whole batch"])
def test_embeddings_whose_gradient_is_not_that_of_the_loss(options, loss):
    def build(**options):
        return nn.Sequential(nn.Embedding(7, 3, **options), nn.Flatten(), nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 3))

    model, oracle = zoo.seeded(lambda: build(**options)), zoo.seeded(build)
    data = (TOKENS, Y) if loss == "cross_entropy" else [(TOKENS, Y)]
    report = zoo.check(model, data, loss, mean_on(TOKENS), oracle=oracle, exact=False)
    assert report.notes[:1] == ("rewritten with plain operations, whose second derivative is right: embedding",)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_write_into_their_weight(kind):
    features = 12 if kind is nn.Embedding else 3
    model = zoo.seeded(lambda: nn.Sequential(kind(7, 3, max_norm=0.5), nn.Flatten(), nn.Linear(features, 3)))
    model(TOKENS)
    with (
        zoo.unchanged(model),
        refused(
            "an embedding with max_norm=0.5 writes into its own weight whenever it runs, so the loss is not a function of the "
            "parameters: run the model once over the data, then set max_norm=None on the module and measure"
        ),
    ):
        sl.measure(model, (TOKENS, Y))
    model[0].max_norm = None
    assert sl.measure(model, (TOKENS, Y), measures=["hessian_trace"])["hessian_trace"].exact


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("flat", [False, True], ids=["rows", "offsets"])
def test_embedding_bags(mode, flat):
    """Bags of one size, as rows or as one row with offsets; what bends is the layer behind them."""

    class Bags(nn.Module):
        def __init__(self, plain):
            super().__init__()
            self.bag, self.plain = nn.EmbeddingBag(7, 3, mode=mode), plain
            self.inner, self.last = nn.Linear(3, 4), nn.Linear(4, 3)

        def forward(self, x):
            if self.plain:
                entries = F.embedding(x, self.bag.weight)
                z = entries.amax(1) if mode == "max" else getattr(entries, mode)(1)
            else:
                z = self.bag(x.flatten(), torch.arange(0, x.numel(), 4)) if flat else self.bag(x)
            return self.last(torch.tanh(self.inner(z)))

    model, oracle = zoo.seeded(lambda: Bags(False)), zoo.seeded(lambda: Bags(True))
    report = zoo.check(model, (TOKENS, Y), "cross_entropy", mean_on(TOKENS), oracle=oracle, exact=False)
    assert report.problem["layers"] == ["bag.weight", "inner.weight", "last.weight"]
    assert "last.weight" not in report.problem["estimated_layers"]


def test_weights_behind_a_norm():
    """Old and new weight normalization against g·v/‖v‖ written out: torch's own second derivative is wrong."""

    class Normalized(nn.Module):
        def __init__(self, plain):
            super().__init__()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                self.first = nn.utils.weight_norm(nn.Linear(4, 3))
            self.last, self.plain = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), plain

        def forward(self, x):
            if not self.plain:
                return self.last(torch.tanh(self.first(x)))
            g, v = self.last.parametrizations.weight.original0, self.last.parametrizations.weight.original1
            h = torch.tanh(F.linear(x, self.weight(self.first.weight_g, self.first.weight_v), self.first.bias))
            return F.linear(h, self.weight(g, v), self.last.bias)

        def weight(self, g, v):
            return g * v / v.square().sum(1, keepdim=True).sqrt()

    model, oracle = zoo.seeded(lambda: Normalized(False)), zoo.seeded(lambda: Normalized(True))
    names = ["hessian_trace", "hessian_spectral_norm"]
    report = sl.measure(model, (X, Y), measures=names, tolerance=1e-7, most_probes=256)
    H = zoo.hessian(oracle, mean_on(X))
    assert report[names[1]].value == pytest.approx(float(torch.linalg.eigvalsh(H).abs().max()), rel=1e-6)
    assert report[names[0]].value == pytest.approx(float(H.trace()), rel=1e-6)


def test_complex_parameters_inside_a_real_network():
    class Waves(nn.Module):
        def __init__(self):
            super().__init__()
            self.filter, self.head = nn.Parameter(torch.randn(3, dtype=torch.cfloat)), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=4))

    with refused("parameter 'filter' is complex; flatness is defined here for real parameters only"):
        sl.measure(Waves(), (X.float(), Y))


def test_complex_numbers_between_real_parameters_are_no_obstacle():
    class Waves(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.last(torch.fft.fft(self.first(x)).abs())

    check(Waves, exact=False)


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


# --- the caller's module ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["cross_entropy", whole], ids=["outputs", "whole batch"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_weights_that_are_written_in_forward(loss, frozen):
    class Clamping(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            with torch.no_grad():
                self.first.weight.clamp_(-0.1, 0.1)
            return self.last(self.first(x))

    model = zoo.seeded(Clamping)
    model.first.requires_grad_(not frozen)
    data = (X, Y) if loss == "cross_entropy" else [(X, Y)]
    if frozen:
        oracle = copy.deepcopy(model)
        with torch.no_grad():
            oracle.first.weight.clamp_(-0.1, 0.1)
        zoo.check(model, data, loss, mean_on(X), oracle=oracle)
        return
    with (
        zoo.unchanged(model),
        refused(
            "the network writes into its own weight 'first.weight' when it runs, so the loss is not a function of the parameters: "
            "do that outside of forward, or in train mode only (if self.training), and measure what it leaves"
        ),
    ):
        sl.measure(model, data, loss)


class Bound(nn.Module):
    """Calls its layers by ways that a copy of the structure has to follow."""

    def __init__(self, way):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.also = self.first  # one module under two names
        self.way = {
            "closure": lambda x: self.last(torch.tanh(self.first(x))),
            "method": self.both,
            "partial": functools.partial(Bound.both, self),
            "list": [self.first, torch.tanh, self.last],
            "table": {"first": self.first, "last": [self.last]},
            "object": types.SimpleNamespace(first=self.first, last=self.last),
        }[way]
        self.kind = way

    def both(self, x):
        return self.last(torch.tanh(self.also(x)))

    def forward(self, x):
        if self.kind == "list":
            for step in self.way:
                x = step(x)
            return x
        if self.kind == "table":
            return self.way["last"][0](torch.tanh(self.way["first"](x)))
        if self.kind == "object":
            return self.way.last(torch.tanh(self.way.first(x)))
        return self.way(x)


@pytest.mark.parametrize("way", ["closure", "method", "partial", "list", "table", "object"])
@pytest.mark.parametrize("loss", ["cross_entropy", whole], ids=["outputs", "whole batch"])
def test_modules_that_are_reached_by_other_ways_than_their_names(way, loss):
    model, oracle = zoo.seeded(lambda: Bound(way)), zoo.seeded(lambda: Bound("method"))
    data = (X, Y) if loss == "cross_entropy" else [(X, Y)]
    zoo.check(model, data, loss, lambda m: F.cross_entropy(m.both(X), Y), oracle=oracle, exact=False)
    assert (sl.Problem(model, loss, data).module is model) == (way == "object")


def test_a_loss_that_calls_another_name_of_the_model():
    net = zoo.seeded(lambda: Bound("method"))

    def loss(model, batch):
        return F.cross_entropy(net(batch[0]), batch[1]), len(batch[1])

    zoo.check(net, [(X, Y)], loss, mean_on(X), exact=False)


def test_a_tensor_that_was_taken_out_of_its_module():
    class Taken(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)
            self.weight_of = [self.inner.weight.detach()]

        def forward(self, x):
            return F.linear(self.inner(x), torch.eye(3).to(x)) + F.linear(x, self.weight_of[0])

    model = Taken().double()
    model.weight_of[0] = model.inner.weight.detach()
    with refused(
        "the network reads your model's 'inner.weight' past the module it belongs to (through a tensor that was taken out of "
        "it), so it cannot be computed with other weights: read it from the module in forward, or in a loss of the form "
        "(model, batch) from the model that is passed in"
    ):
        sl.measure(model, (X, Y))


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_compiled_module_inside_a_network():
    def build(compiled):
        first = nn.Linear(4, 4)
        return nn.Sequential(torch.jit.script(first) if compiled else first, nn.Tanh(), nn.Linear(4, 3))

    model, oracle = zoo.seeded(lambda: build(True)), zoo.seeded(lambda: build(False))
    report = sl.measure(model, (X, Y), measures=["hessian_spectral_norm"], tolerance=1e-9)
    wanted = float(torch.linalg.eigvalsh(zoo.hessian(oracle, mean_on(X))).abs().max())
    assert report["hessian_spectral_norm"].value == pytest.approx(wanted, rel=1e-7)


# --- valid, though it looks odd -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")
def test_a_number_for_python_in_forward():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            h = self.first(x)
            return self.last(torch.tanh(h) if float(h.abs().sum()) > 0 else h)

    check(Branching, exact=False)


@pytest.mark.parametrize("loss", ["cross_entropy", whole], ids=["outputs", "whole batch"])
def test_minus_infinity_in_a_buffer(loss):
    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(1, 2), nn.Linear(2, 3)
            self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))

        def forward(self, x):
            h = self.first(x.unsqueeze(2))
            return self.last(((h @ h.mT + self.mask).softmax(2) @ h)[:, -1])

    data = (X, Y) if loss == "cross_entropy" else [(X, Y)]
    zoo.check(zoo.seeded(Causal), data, loss, mean_on(X), exact=False)


def test_tensors_made_in_inference_mode():
    def build():
        return zoo.seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)))

    with torch.inference_mode():
        model, x, y = build(), X.clone(), Y.clone()
        model[0].weight.requires_grad_(False)
    plain = build()
    plain[0].weight.requires_grad_(False)
    wanted = sl.measure(plain, (X, Y), measures=zoo.MEASURES)
    for data in ((x, y), [(x[:2], y[:2]), (x[2:], y[2:])]):
        found = sl.measure(model, data, measures=zoo.MEASURES)
        for name in zoo.MEASURES:
            assert found[name].value == pytest.approx(wanted[name].value, rel=1e-9), name
    batches = [{"x": x, "y": y}]
    found = sl.measure(
        model, batches, lambda model, b: (F.cross_entropy(model(b["x"]), b["y"]), 6), measures=["kappa_sum"]
    )
    assert found["kappa_sum"].value == pytest.approx(wanted["kappa_sum"].value, rel=1e-3)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_of_width_zero():
    class Hollow(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out_of, self.beside = nn.Linear(4, 0), nn.Linear(0, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.out_of(torch.relu(self.into(x))) + self.beside(x)

    model = zoo.seeded(Hollow)
    H = zoo.hessian(model, mean_on(X))
    report = sl.measure(model, (X, Y), measures="all", tolerance=0.01)
    assert report["hessian_trace"].value == pytest.approx(float(H.trace()), rel=1e-9)
    assert report["hessian_spectral_norm"].value == pytest.approx(float(torch.linalg.eigvalsh(H)[-1]), rel=1e-6)
    assert report["rho_sum"].layers["into.weight"] == report["rho_sum"].layers["out_of.weight"] == 0
    assert sl.audit(model, (X, Y), measures=["rho_sum"], strengths=[1.0]).trials
    assert sl.spectrum(model, (X, Y), steps=5, probes=2).size == 18


@pytest.mark.parametrize("how", ["block", "decorator", "cuda"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_autocast_inside_the_network_has_no_effect(how):
    """If torch enters autocast by another way than `autocast.__enter__`, activations are rounded and this fails."""

    class Casting(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.first, self.last, self.how = nn.Linear(4, 4), nn.Linear(4, 3), how

        def plain(self, x):
            return self.last(torch.tanh(self.first(x)))

        def forward(self, x):
            if self.how == "block":
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return self.plain(x)
            if self.how == "decorator":
                return torch.autocast("cpu", dtype=torch.bfloat16)(self.plain)(x)
            if self.how == "cuda":
                with torch.cpu.amp.autocast(dtype=torch.bfloat16):
                    return self.plain(x)
            return self.plain(x)

    names = ["hessian_spectral_norm", "hessian_trace", "kappa_sum"]
    model, plain = zoo.seeded(lambda: Casting(how)).float(), zoo.seeded(lambda: Casting("")).float()
    found, wanted = (sl.measure(each, (X.float(), Y), measures=names) for each in (model, plain))
    assert found.loss == wanted.loss
    assert [found[name].value for name in names] == [wanted[name].value for name in names]
    assert model(X.float()).dtype == torch.bfloat16  # and outside it is as it was


# --- buffers, devices, inputs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["cross_entropy", whole], ids=["outputs", "whole batch"])
def test_a_forward_pass_that_changes_its_buffers(loss):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
            self.register_buffer("calls", torch.ones(()))
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x):
            h = torch.tanh(self.first(x)) / self.calls.clone()
            self.calls += 1
            self.seen.copy_(h.mean(0).detach())
            return self.last(h)

    model = zoo.seeded(Counting)
    oracle = copy.deepcopy(model)
    oracle.calls.requires_grad_(False)

    def mean(model):
        model.calls.fill_(1)
        return F.cross_entropy(model(X), Y)

    data = (X, Y) if loss == "cross_entropy" else [(X, Y)]
    report = zoo.check(model, data, loss, mean, oracle=oracle, exact=False)
    assert "the model changes its own buffers when it runs; they are reset before every call" in report.notes
    assert float(model.calls) == 1


def test_integers_as_inputs():
    class Ids(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.last(torch.tanh(self.first(x.to(self.first.weight.dtype) / 7)))

    check(Ids, x=TOKENS, exact=False)
    check(Ids, x=TOKENS.to(torch.uint8), exact=False)


def test_tensors_without_data():
    with refused("batch 0 is on the meta device, which holds no numbers: pass tensors with data"):
        sl.measure(nn.Linear(4, 3), (X.float().to("meta"), Y.to("meta")))
    with refused("'1.weight' is on the meta device, which holds no numbers: load the model's weights before measuring"):
        sl.measure(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3, device="meta")), (X.float(), Y))


def test_a_batch_elsewhere_is_moved_to_the_model():
    """The meta device stands in for a model that is not where the data is: whatever it is given arrives there."""
    problem = sl.Problem(nn.Linear(4, 3).double(), "cross_entropy", (X, Y))
    problem.device = torch.device("meta")
    placed = problem.first_chunk()
    assert placed.inputs.is_meta
    assert placed.targets.is_meta


def test_a_model_on_several_devices():
    parts = {"first.weight": torch.zeros(2), "first.bias": torch.zeros(2), "last.weight": torch.zeros(2, device="meta")}
    with refused(
        "the model is spread over several devices ('first.weight' on cpu, 'last.weight' on meta): move it to one with "
        "model.to(device)"
    ):
        checks.check_devices(parts)


@dataclass
class SimpleLogits:
    scores: torch.Tensor


def test_dropout_behind_a_dataclass_is_noticed():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x):
            return SimpleLogits(F.dropout(self.inner(x), 0.5))

    with pytest.raises(sl.NondeterministicError, match=r"^the network gives different outputs for the same inputs"):
        sl.measure(Noisy().double(), (X, Y), lambda outputs, targets: F.cross_entropy(outputs.scores, targets))
