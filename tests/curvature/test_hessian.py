"""Products with the Hessian: every way of making them is the same product, and a wrong way is noticed."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cases
import dense_oracle
import spiritlevel as sl
from refusals import refused
from spiritlevel.curvature import hessian, ways
from spiritlevel.curvature.dense import dense_hessian
from spiritlevel.curvature.hessian import HessianProducts
from spiritlevel.curvature.ways import Flat
from spiritlevel.problem.problem import gradients_of

NAMES = ["mlp", "GELU", "convolution, max pooling", "batch normalization", "attention", "tied weights", "embedding"]
WAYS = {"kept graph": 1e-10, "jvp of the gradient": 1e-10, "central differences": 1e-4}


def problem_of(name, data=None):
    case = cases.by_name(name)
    model, x, y = case.make()
    H = dense_oracle.dense(model, case.mean_loss, x, y)
    return sl.Problem(model, case.loss, data or (x, y)), H


def directions(size, count=3):
    return list(torch.randn(count, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64))


def assert_products(products, H, tolerance):
    vectors = directions(len(H))
    for found, vector in zip(products(vectors), vectors, strict=True):
        assert float((found - H @ vector).norm()) <= tolerance * float((H @ vector).norm())


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_every_way_is_the_dense_product(name, method):
    problem, H = problem_of(name)
    assert_products(HessianProducts(problem, method=method), H, WAYS[method])


@pytest.mark.parametrize("budget", [0, 20_000, 1 << 30])
@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_kept_and_rebuilt_graphs_give_the_same(budget, chunk):
    problem, H = problem_of("mlp")
    problem.chunk_size = chunk
    products = HessianProducts(problem, budget=budget)
    for _ in range(3):
        assert_products(products, H, 1e-10)
    if budget == 0:
        assert products._kept == []


def test_kept_graphs_stay_within_the_budget():
    model, x, y = cases.by_name("mlp").make()
    x, y = x.repeat(200, 1), y.repeat(200)
    problem = sl.Problem(model, "cross_entropy", (x, y))
    problem.chunk_size = 100
    kept = []
    for budget in (1 << 17, 1 << 19, 1 << 30):
        products = HessianProducts(problem, budget=budget)
        products(directions(products.flat.size, 1))
        kept.append(len(products._kept))
    assert 0 < kept[0] < kept[1] < kept[2]


def test_forms_hold_one_image_at_a_time(monkeypatch):
    """Where they are compared in double precision, an image is twice as large as the model."""
    problem, H = problem_of("mlp")
    products, images = HessianProducts(problem, method="kept graph"), []

    def watched(*args):
        assert all(image() is None for image in images)
        found = hessian_pull_back(*args)
        images.extend(map(weakref.ref, found))
        return found

    hessian_pull_back = hessian.pull_back
    monkeypatch.setattr(hessian, "pull_back", watched)
    vectors = directions(len(H))
    forms = products.forms(problem.first_chunk(), [products.flat.to_dict(vector) for vector in vectors])
    assert forms == pytest.approx([float(vector @ H @ vector) for vector in vectors], rel=1e-10)
    assert len(images) == len(vectors) * len(products.flat.names)


def test_gradients_are_not_kept_with_their_graphs(monkeypatch):
    """A chunk's gradient is as large as the model, and a product does not read it."""
    built = []

    def watched(*args, **kwargs):
        gradient = gradients_of(*args, **kwargs)
        built.extend(map(weakref.ref, gradient))
        return gradient

    problem, H = problem_of("mlp")
    problem.chunk_size = 5
    products = HessianProducts(problem, method="kept graph")
    monkeypatch.setattr(ways, "gradients_of", watched)
    assert_products(products, H, 1e-10)
    assert len(products._kept) > 1
    assert built
    assert all(gradient() is None for gradient in built)


@pytest.mark.parametrize("name", NAMES)
def test_the_packages_own_dense_hessian_is_ours(name):
    problem, H = problem_of(name)
    torch.testing.assert_close(dense_hessian(problem), H, rtol=1e-9, atol=1e-13)


def test_blocks_are_diagonal_blocks():
    problem, H = problem_of("mlp")
    products = HessianProducts(problem)
    for name, place in Flat(problem.parameters).slices().items():
        vector = directions(place.stop - place.start, 1)[0]
        (found,) = products.within([{name: vector.view(problem.parameters[name].shape)}])
        torch.testing.assert_close(found[name].reshape(-1), H[place, place] @ vector, rtol=1e-9, atol=1e-13)


def test_loss_and_gradient_come_with_the_first_pass():
    problem, H = problem_of("mlp")
    products = HessianProducts(problem)
    products(directions(len(H), 1))
    loss, gradient = problem.gradient()
    assert products.loss == pytest.approx(loss, rel=1e-13)
    torch.testing.assert_close(products.gradient, products.flat.join(list(gradient.values())))


def test_flat_goes_there_and_back():
    parameters = {"a": torch.randn(2, 3), "b": torch.randn(4)}
    flat = Flat(parameters)
    back = flat.to_dict(flat.join(list(parameters.values())))
    assert all(torch.equal(back[name], parameters[name]) for name in parameters)
    assert flat.slices() == {"a": slice(0, 6), "b": slice(6, 10)}


# --- the preflight ------------------------------------------------------------------------------------------------


def data(features=4, count=10):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, features, generator=generator), torch.randint(0, 3, (count,), generator=generator)


class NoSecond(torch.autograd.Function):
    """Squares, with a backward that cannot be differentiated."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, slope):
        (x,) = ctx.saved_tensors
        return 2 * x * slope


class WrongSecond(torch.autograd.Function):
    """Squares, with a backward whose own derivative is wrong: it treats the input as a constant."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x.detach()
        return x.square()

    @staticmethod
    def backward(ctx, slope):
        return 2 * ctx.x * slope


def with_function(function):
    class Applied(nn.Module):
        def forward(self, x):
            return function.apply(x)

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), Applied(), nn.Linear(5, 3)).double()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_missing_second_derivative_is_replaced_by_differences_and_said():
    x, y = data()
    model = with_function(NoSecond)
    report = sl.measure(model, (x.double(), y), measures=["hessian_spectral_norm"], tolerance=1e-5)
    plain = nn.Sequential(model[0], cases.Function(lambda m, z: z.square()), model[2])
    wanted = sl.measure(plain, (x.double(), y), measures=["hessian_spectral_norm"], tolerance=1e-8)
    assert report["hessian_spectral_norm"].value == pytest.approx(wanted["hessian_spectral_norm"].value, rel=1e-3)
    assert "central differences" in report["hessian_spectral_norm"].method
    assert any(note.startswith("curvature products by central differences of gradients: ") for note in report.notes)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_wrong_second_derivative_is_not_used():
    x, y = data()
    model = with_function(WrongSecond)
    plain = nn.Sequential(model[0], cases.Function(lambda m, z: z.square()), model[2])
    wanted = sl.measure(plain, (x.double(), y), measures=["hessian_spectral_norm"], tolerance=1e-8)
    try:
        report = sl.measure(model, (x.double(), y), measures=["hessian_spectral_norm"], tolerance=1e-5)
    except sl.SpiritLevelError as error:
        assert str(error).startswith("the second derivative of this network cannot be trusted: ")  # noqa: PT017
    else:
        assert report["hessian_spectral_norm"].value == pytest.approx(wanted["hessian_spectral_norm"].value, rel=1e-3)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated")
def test_the_old_weight_norm_is_right_or_refused():
    x, y = data()
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)).double()

    class Own(nn.Module):
        """The same network with w = g·v/‖v‖ written out."""

        def __init__(self):
            super().__init__()
            self.g, self.v = nn.Parameter(model[0].weight_g.detach()), nn.Parameter(model[0].weight_v.detach())
            self.b, self.last = nn.Parameter(model[0].bias.detach()), model[2]

        def forward(self, z):
            return self.last(torch.tanh(F.linear(z, self.g * self.v / self.v.norm(dim=1, keepdim=True), self.b)))

    names = ["hessian_spectral_norm"]
    wanted = sl.measure(Own(), (x.double(), y), measures=names, tolerance=1e-8)[names[0]].value
    try:
        found = sl.measure(model, (x.double(), y), measures=names, tolerance=1e-6)[names[0]].value
    except sl.SpiritLevelError as error:
        assert str(error).startswith("the second derivative of this network cannot be trusted: ")  # noqa: PT017
    else:
        assert found == pytest.approx(wanted, rel=1e-3)


def test_a_gradient_that_is_none_of_any_function_is_refused():
    x, y = data()
    torch.manual_seed(0)
    model = cases.Function(lambda m, z: torch.tanh(z @ m.a + (z @ m.a).detach()) @ m.c, a=(4, 5), c=(5, 3)).double()
    with pytest.raises(sl.SpiritLevelError, match=r"^the gradient of this network is not that of its loss: .* in 'a' "):
        sl.measure(model, (x.double(), y), measures=["hessian_spectral_norm"])
    problem = sl.Problem(model, "cross_entropy", (x.double(), y))
    problem._derivatives_checked = True  # so that the comparison of second derivatives is on its own
    with refused(
        "the second derivative of this network cannot be trusted: kept graph differs from a central difference of gradients; "
        "jvp of the gradient differs from a central difference of gradients. Some operation of the network has a wrong double "
        "backward, or its gradient jumps where it should be smooth. torch's old torch.nn.utils.weight_norm is a known case: "
        "fold it into the weight with remove_weight_norm. Or the loss is written so that rounding leaves nothing of its slope "
        "where it is small: use torch's cross_entropy, log_softmax or binary_cross_entropy_with_logits, whose digits are kept"
    ):
        HessianProducts(problem)


def test_fused_attention_is_measured_by_the_math_kernel():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 5, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)

    def run(m, z):
        q, k, v = (z @ m.qkv).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v).mean(1) @ m.c

    torch.manual_seed(0)
    model = cases.Function(run, qkv=(4, 12), c=(4, 3))
    report = sl.measure(model, (x, y), measures=["hessian_spectral_norm"], tolerance=1e-4)
    H = dense_oracle.dense(model.double(), F.cross_entropy, x.double(), y)
    wanted = float(torch.linalg.eigvalsh(H).abs().max())
    assert report["hessian_spectral_norm"].value == pytest.approx(wanted, rel=1e-3)
    assert "kept graph" in report["hessian_spectral_norm"].method


def test_a_single_precision_network_is_checked_without_false_alarm():
    x, y = data()
    for scale in (1e-3, 1.0, 1e3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
        assert HessianProducts(sl.Problem(model, "cross_entropy", (scale * x, y))).method == "kept graph"
