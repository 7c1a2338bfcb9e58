"""What goes wrong in practice: handled and said, or refused with what to do."""

import copy
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
from spiritlevel import checks

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
            "an embedding with max_norm=0.5 writes into its own weight whenever it runs, so the loss is no function of the "
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
    report = sl.measure(model, (X, Y), measures=names, tolerance=1e-7, most_probes=64)
    H = zoo.hessian(oracle, mean_on(X))
    assert report[names[1]].value == pytest.approx(float(torch.linalg.eigvalsh(H).abs().max()), rel=1e-6)
    assert abs(report[names[0]].value - float(H.trace())) < 6 * report[names[0]].error


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
