"""Parameters of unusual kinds: handled and said, or refused with what to do."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spiritlevel as sl
import zoo
from refusals import refused
from zoo import TOKENS, X, Y, check_cross_entropy, mean_on, whole


class Scalars(nn.Module):
    """Two parameters without dimensions, one of them inside an exponential."""

    def __init__(self):
        super().__init__()
        self.scale, self.temperature = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(0.7))
        self.inner = nn.Linear(4, 3)

    def forward(self, x):
        return self.inner(x * self.scale) * self.temperature.exp()


def test_parameters_without_dimensions():
    assert check_cross_entropy(Scalars, exact=False).problem["layers"] == ["inner.weight"]


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

    check_cross_entropy(Waves, exact=False)
