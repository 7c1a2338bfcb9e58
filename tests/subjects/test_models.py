"""Networks by name: the sizes of the papers, any image, and starting weights that follow their seed."""

import itertools
import math
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spiritlevel.errors import SpiritLevelError
from spiritlevel.subjects.networks import MODELS, build_model, list_initializations, list_models

DIGITS, MNIST, CIFAR = (1, 8, 8), (1, 28, 28), (3, 32, 32)


def build(name, shape=MNIST, classes=10, **options):
    return build_model(name, input_shape=shape, classes=classes, **options)


def sizes(model):
    """The shapes of all linear and convolutional weights, in order."""
    return [tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]


def count(model):
    return sum(p.numel() for p in model.parameters())


def dense(*widths):
    return [(after, before) for before, after in itertools.pairwise(widths)]


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("rangamani-fc", MNIST, dense(784, 300, 100, 10)),
        ("mnist-fc", MNIST, dense(784, 512, 512, 512, 512, 512, 10)),
        ("petzka-fc", MNIST, dense(784, 50, 50, 50, 30, 10)),
        ("rangamani-conv", MNIST, [(10, 1, 5, 5), (20, 10, 5, 5), *dense(320, 120, 84, 10)]),
        ("lenet", MNIST, [(6, 1, 5, 5), (16, 6, 5, 5), *dense(400, 120, 84, 10)]),
        ("lenet-caffe", MNIST, [(20, 1, 5, 5), (50, 20, 5, 5), *dense(800, 500, 10)]),
        ("lenet-caffe", DIGITS, [(20, 1, 5, 5), (50, 20, 5, 5), *dense(200, 500, 10)]),
        ("lenet5", CIFAR, [(6, 3, 5, 5), (16, 6, 5, 5), *dense(400, 120, 84, 10)]),
        ("alexnet", CIFAR, [(64, 3, 5, 5), (64, 64, 5, 5), *dense(4096, 384, 192, 10)]),
        ("convnet", DIGITS, [(16, 1, 3, 3), (32, 16, 3, 3), *dense(128, 64, 10)]),
        ("mlp:300-100", MNIST, dense(784, 300, 100, 10)),
        ("mlp:784-300-100-10", MNIST, dense(784, 300, 100, 10)),
        ("mlp:64-10", DIGITS, dense(64, 10)),
        ("mlp:10", DIGITS, dense(64, 10, 10)),
        ("mlp:7-5", (3,), dense(3, 7, 5, 10)),
    ],
)
def test_networks_have_the_sizes_of_the_papers(name, shape, expected):
    assert sizes(build(name, shape)) == expected


# The published numbers of parameters: He et al. 2016 (by the public akamaster models), Zagoruyko & Komodakis 2016.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("resnet20", 269_722),
        ("resnet32", 464_154),
        ("resnet44", 658_586),
        ("resnet56", 853_018),
        ("wrn-16-4", 2_748_890),
    ],
)
def test_residual_networks_have_the_published_number_of_parameters(name, parameters):
    assert count(build(name, CIFAR)) == parameters


def test_vgg16_has_thirteen_convolutions_and_ends_in_one_pixel():
    shapes = sizes(build("vgg16", CIFAR))
    assert [s[0] for s in shapes if len(s) == 4] == [64] * 2 + [128] * 2 + [256] * 3 + [512] * 6
    assert shapes[-2:] == dense(512, 512, 10)


def test_resnet20_has_the_names_of_the_public_checkpoints():
    names = list(build("resnet20", CIFAR).state_dict())
    assert names[:4] == ["conv1.weight", "bn1.weight", "bn1.bias", "bn1.running_mean"]
    assert {"layer1.0.conv1.weight", "layer2.0.bn2.running_var", "layer3.2.conv2.weight", "linear.bias"} <= set(names)
    assert not any("shortcut" in name for name in names)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [DIGITS, MNIST, CIFAR, (2, 13, 21)])
def test_every_network_takes_any_image(name, shape):
    model = build(name, shape, classes=7, width=0.25).eval()
    with torch.no_grad():
        assert model(torch.rand(3, *shape)).shape == (3, 7)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in {"wrn-16-4"} and "resnet" not in name])
def test_networks_without_normalization_are_positively_homogeneous_but_not_linear(name):
    model = build(name, DIGITS, width=0.25, init="kaiming_normal")  # zero biases
    x = torch.randn(4, *DIGITS)
    with torch.no_grad():
        torch.testing.assert_close(model(3 * x), 3 * model(x), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(model(-x), -model(x), rtol=1e-2)


# --- what the networks compute ----------------------------------------------------------------------------------------


def test_fully_connected_network_is_the_formula():
    model = build("mlp:5-4", (2, 3), classes=3)
    x = torch.randn(6, 2, 3)
    h = x.reshape(6, 6)
    for fc in (model.fc1, model.fc2):
        h = (h @ fc.weight.T + fc.bias).clamp(min=0)
    torch.testing.assert_close(model(x), h @ model.fc3.weight.T + model.fc3.bias)


def chain(model, names):
    """The modules of `model` and pooling layers one after the other."""
    layers = {"relu": nn.ReLU(), "pool2": nn.MaxPool2d(2), "pool3": nn.MaxPool2d(3, 2, 1), "flatten": nn.Flatten()}
    return nn.Sequential(*(layers[n] if n in layers else getattr(model, n) for n in names.split()))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("lenet", "conv1 relu pool2 conv2 relu pool2 flatten fc1 relu fc2 relu fc3"),
        ("rangamani-conv", "conv1 relu pool2 conv2 relu pool2 flatten fc1 relu fc2 relu fc3"),
        ("convnet", "conv1 relu pool2 conv2 relu pool2 flatten fc1 relu fc2"),
        ("alexnet", "conv1 relu pool3 conv2 relu pool3 flatten fc1 relu fc2 relu fc3"),
    ],
)
def test_convolutional_networks_are_chains_of_their_layers(name, layers):
    model = build(name, width=0.5)
    x = torch.randn(3, *MNIST)
    torch.testing.assert_close(model(x), chain(model, layers)(x))


def test_vgg16_pools_after_each_stage_until_one_pixel_is_left():
    def stages(shape):
        children = dict(build("vgg16", shape, width=0.1).named_children())
        pools = [name for name, child in children.items() if isinstance(child, nn.MaxPool2d) and child.stride == 2]
        return pools, sum(name.startswith("relu5") for name in children)

    assert stages(CIFAR) == ([f"pool{i}" for i in range(1, 6)], 3)
    assert stages(DIGITS) == ([f"pool{i}" for i in range(1, 4)], 3)


def test_resnet_block_ends_in_relu_of_the_sum():
    block = build("resnet8", CIFAR).layer1[0].eval()
    x = torch.randn(2, 16, 4, 4)
    h = F.conv2d(x, block.conv1.weight, padding=1) / math.sqrt(1 + block.bn1.eps)
    h = F.conv2d(h.clamp(min=0), block.conv2.weight, padding=1) / math.sqrt(1 + block.bn2.eps)
    torch.testing.assert_close(block(x), (x + h).clamp(min=0))


def test_resnet_shortcut_subsamples_and_pads_zero_channels_on_both_sides():
    block = build("resnet20", CIFAR).layer2[0].eval()
    nn.init.zeros_(block.bn2.weight)
    x = torch.rand(2, 16, 8, 8)
    out = block(x)
    assert out.shape == (2, 32, 4, 4)
    torch.testing.assert_close(out[:, 8:24], x[:, :, ::2, ::2])
    assert out[:, :8].abs().max() == out[:, 24:].abs().max() == 0


def test_wide_block_adds_to_its_input_or_to_a_projection_of_the_normalized_input():
    layer = build("wrn-10-1", CIFAR).layer2.eval()
    nn.init.zeros_(layer[0].conv2.weight)
    x = torch.randn(2, 16, 8, 8)
    expected = F.conv2d(F.relu(layer[0].bn1(x)), layer[0].shortcut.weight, stride=2)
    torch.testing.assert_close(layer(x), expected)


def test_width_multiplies_hidden_sizes_only():
    assert sizes(build("rangamani-fc", width=0.1)) == dense(784, 30, 10, 10)
    assert sizes(build("mlp:3-3", (2,), width=0.01)) == dense(2, 1, 1, 10)
    assert sizes(build("resnet20", CIFAR, width=2))[0] == (32, 3, 3, 3)


# --- starting weights -------------------------------------------------------------------------------------------------


def same(first, second):
    return all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("init", list_initializations())
def test_weights_follow_the_seed_and_nothing_else(init):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = build("convnet", DIGITS, init=init, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert same(first, build("convnet", DIGITS, init=init, seed=5))
    assert not same(first, build("convnet", DIGITS, init=init, seed=6))


def test_the_global_generator_survives_an_error():
    state = torch.get_rng_state()
    with pytest.raises(SpiritLevelError):
        build("lenett")
    assert torch.equal(torch.get_rng_state(), state)


def test_default_is_what_torch_draws():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        expected = [nn.Linear(784, 30), nn.Linear(30, 10)]
    model = build("mlp:30", seed=3)
    assert torch.equal(model.fc1.weight, expected[0].weight)
    assert torch.equal(model.fc2.bias, expected[1].bias)


@pytest.mark.parametrize(
    ("init", "deviation"),
    [
        ("xavier_normal", math.sqrt(2 / (784 + 300))),
        ("xavier_uniform", math.sqrt(2 / (784 + 300))),
        ("kaiming_normal", math.sqrt(2 / 784)),
        ("kaiming_uniform", math.sqrt(2 / 784)),
        ("normal", math.sqrt(0.1)),
        ("uniform", 0.1 / math.sqrt(3)),
    ],
)
def test_weights_have_the_deviation_of_their_scheme_and_biases_are_zero(init, deviation):
    layer = build("rangamani-fc", init=init).fc1
    assert layer.weight.std().item() == pytest.approx(deviation, rel=0.01)
    assert layer.bias.abs().max() == 0
    bounded = layer.weight.abs().max() < 2 * deviation
    assert bounded == ("uniform" in init)


def test_orthogonal_rows_are_orthonormal():
    weight = build("rangamani-fc", init="orthogonal").fc1.weight.detach()
    torch.testing.assert_close(weight @ weight.T, torch.eye(300), atol=1e-5, rtol=0)


def test_normalization_layers_keep_their_ones_and_zeros():
    model = build("resnet8", CIFAR, init="normal")
    assert torch.equal(model.bn1.weight, torch.ones(16))
    assert torch.equal(model.bn1.bias, torch.zeros(16))


# --- the user's own ---------------------------------------------------------------------------------------------------


@pytest.fixture
def own(monkeypatch):
    module = types.ModuleType("mymodels")
    module.plain = lambda: nn.Linear(3, 2)
    module.shaped = lambda input_shape, classes, width=1.0: nn.Linear(input_shape[0], round(classes * width))
    module.wrong = lambda: "a network"
    module.empty = nn.Identity
    module.instance = nn.Linear(3, 2)
    monkeypatch.setitem(sys.modules, "mymodels", module)


@pytest.mark.usefixtures("own")
def test_a_factory_is_called_with_what_it_names_and_seeded():
    assert build("mymodels:plain", (3,)).weight.shape == (2, 3)
    assert build("mymodels:shaped", (5,), classes=4, width=2).weight.shape == (8, 5)
    assert same(build("mymodels:plain", seed=1), build("mymodels:plain", seed=1))
    assert not same(build("mymodels:plain", seed=1), build("mymodels:plain", seed=2))
    assert build("mymodels:plain", init="uniform").bias.abs().max() == 0


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("mymodels:wrong", {}, "mymodels:wrong must return a torch.nn.Module, got str"),
        (
            "mymodels:plain",
            {"width": 0.5},
            "width=0.5 needs a factory with an argument 'width'; mymodels:plain has none",
        ),
        ("mymodels:instance", {}, "mymodels:instance is a module already; name a function or class that builds one"),
        ("mymodels:plan", {}, "but 'plan' does not exist; did you mean 'plain'"),
        ("mymodels:empty", {"init": "normal"}, "and Identity has none; use init='default'"),
        ("mymodel_s:plain", {}, "no module named 'mymodel_s', needed for 'mymodel_s:plain'; install it, or run from"),
    ],
)
def test_a_factory_that_does_not_fit_is_refused(name, options, match):
    with pytest.raises(SpiritLevelError, match=match):
        build(name, **options)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("lenet-5", {}, "unknown model 'lenet-5'; did you mean 'lenet5'\\? Known: convnet, rangamani-fc"),
        ("resnet21", {}, r"a CIFAR ResNet has 6n \+ 2 layers .* got resnet21"),
        ("resnet2", {}, r"a CIFAR ResNet has 6n \+ 2 layers"),
        ("wrn-17-4", {}, r"a wide ResNet has 6n \+ 4 layers .* got wrn-17-4"),
        ("mlp", {}, "is named by its hidden widths, 'mlp:300-100', got 'mlp'"),
        ("mlp:wide", {}, "is named by its hidden widths, 'mlp:300-100', got 'mlp:wide'"),
        ("mlp:30-0", {}, "every width in 'mlp:30-0' must be at least 1"),
        ("mlp:784-300-10", {"shape": DIGITS}, "number of inputs, 64; write all sizes, 'mlp:64-300-10', or if 10 is"),
        ("lenet", {"shape": (784,)}, r"lenet needs images: an input shape \(channels, height, width\) .* got \(784,\)"),
        ("resnet20", {"shape": (3, 2, 9)}, r"of at least 4×4 pixels, got \(3, 2, 9\)"),
        (
            "lenet",
            {"init": "xavier"},
            "unknown init 'xavier'; did you mean 'xavier_normal'\\? Known: default, xavier_normal",
        ),
        ("lenet", {"width": 0}, "width must be a positive factor, such as 0.5, got 0"),
        ("lenet", {"width": math.nan}, "width must be a positive factor"),
        ("lenet", {"classes": 0}, "classes must be a positive whole number, got 0"),
        ("lenet", {"seed": -1}, "seed must be a whole number from 0"),
        ("lenet", {"seed": 0.5}, "seed must be a whole number from 0"),
        ("lenet", {"shape": ()}, r"input_shape must be positive whole numbers, such as \(1, 28, 28\), got \(\)"),
        ("lenet", {"shape": (1, 28, -28)}, "input_shape must be positive whole numbers"),
    ],
)
def test_what_cannot_be_built_says_why(name, options, match):
    with pytest.raises(SpiritLevelError, match=match):
        build(name, **options)


def test_every_model_is_listed_with_what_it_is():
    listed = list_models()
    assert set(MODELS) < set(listed)
    assert all(listed.values())
