"""Convolution, pooling and ReLU as one step, and dense layers as one: against torch's own derivatives in double precision, and where nothing is compiled."""

from __future__ import annotations

import functools
import itertools
import math
import shutil

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study import compiling
from spiritlevel.study.compiling import compiled, how
from spiritlevel.study.dense_layers import ROOM, dense_layers
from spiritlevel.study.pooled import gather, pooled_convolution, roomy, with_border
from spiritlevel.study.pooled_networks import outputs
from spiritlevel.subjects.networks import build_model

NO_COMPILER = "there is no C++ compiler here"
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason=NO_COMPILER)
# networks, samples, channels, side, outputs, kernel
SHAPES = [
    (1, 3, 1, 32, 6, 5),
    (4, 5, 3, 32, 6, 5),
    (3, 4, 6, 14, 16, 5),
    (2, 3, 20, 12, 50, 5),  # more outputs than one pass has, and rows of more vectors
    (1, 2, 7, 9, 27, 4),  # a side that pooling does not divide
    (2, 2, 1, 6, 8, 3),
    (2, 2, 2, 40, 7, 3),  # more windows beside each other than one pass has
    (1, 0, 2, 8, 3, 5),  # no samples
]


@pytest.fixture(params=["compiled", "compiled for vectors of eight", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All ways to compute the step."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if request.param == "torch":
        monkeypatch.setattr(compiling, "compiled", lambda: None)
    elif request.param != "compiled":
        monkeypatch.setattr(compiling, "X86", dict.fromkeys(compiling.X86, compiling.AVX2))
        monkeypatch.setattr(compiling, "compiled", functools.cache(compiled.__wrapped__))
    if request.param != "torch" and compiling.compiled() is None:
        pytest.skip(NO_COMPILER)
    yield request.param
    torch.set_num_threads(threads)


def by_torch(x: Tensor, weight: Tensor, bias: Tensor, relu: bool, pool: int = 2) -> Tensor:
    """The step of every network by its definition."""
    maps = [F.conv2d(x[k % len(x)].permute(0, 3, 1, 2), weight[k], bias[k]) for k in range(len(weight))]
    made = [F.max_pool2d(each, pool, stride=2, padding=pool - 2) for each in maps]
    stacked = torch.stack(made).permute(0, 1, 3, 4, 2)
    return torch.relu(stacked) if relu else stacked


def assert_near(found: Tensor, exact: Tensor) -> None:
    """Nothing but rounding apart, as a whole: one wrong entry of thousands would be a thousand times as far."""
    assert found.shape == exact.shape
    assert (found.double() - exact).norm() <= 1e-6 * exact.norm()


def channels_last(weight: Tensor) -> Tensor:
    return weight.flatten(0, 1).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("pool", [2, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_torch(way, shape, pool, shared, relu):
    networks, samples, channels, side, channels_out, kernel = shape
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    x = with_border(draw(1 if shared else networks, samples, side, side, channels), 0)
    weight, bias = draw(networks, channels_out, channels, kernel, kernel), draw(networks, channels_out)
    step = pooled_convolution(networks, relu=relu, pool=pool)
    out = step.forward(x, channels_last(weight), bias.flatten())
    exact = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    expected = by_torch(*exact, relu, pool)
    assert_near(out, expected)

    gradient = draw(*out.shape)
    weight_gradient = torch.full_like(channels_last(weight), torch.nan)
    bias_gradient = torch.full_like(bias.flatten(), torch.nan)
    inputs = step.backward(gradient, weight_gradient, bias_gradient, of_inputs=not shared)
    of_x, of_weight, of_bias = torch.autograd.grad(expected, exact, gradient.double())
    assert_near(weight_gradient.view_as(of_weight), of_weight)
    assert_near(bias_gradient.view_as(of_bias), of_bias)
    assert (inputs is None) == shared
    if inputs is not None:
        assert_near(inputs, of_x)


def test_of_equal_values_the_first_has_the_gradient_and_none_where_relu_cuts_at_zero(way):
    x = with_border(torch.ones(1, 1, 6, 6, 1), 0)
    weight = torch.stack([torch.ones(1, 5, 5), torch.zeros(1, 5, 5)])[None]
    bias = torch.tensor([[0.0, 0.0]])
    step = pooled_convolution(1, relu=True)
    out = step.forward(x, channels_last(weight), bias.flatten())
    assert out.flatten().tolist() == [25.0, 0.0]
    weights, biases = torch.empty_like(channels_last(weight)), torch.empty(2)
    inputs = step.backward(torch.ones_like(out), weights, biases, of_inputs=True)
    assert inputs is not None
    assert biases.tolist() == [1.0, 0.0]  # a value of exactly zero passes nothing on
    assert torch.equal(weights[0, 0], torch.ones(5, 5))
    assert torch.equal(inputs[0, 0, ..., 0], F.pad(torch.ones(5, 5), (0, 1, 0, 1)))
    of_torch = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    expected = torch.autograd.grad(by_torch(*of_torch, relu=True).sum(), of_torch)
    assert torch.equal(inputs, expected[0])


def test_of_equal_values_in_windows_that_overlap_the_first_has_the_gradient_of_each(way):
    x = with_border(torch.ones(1, 1, 7, 7, 1), 0)
    weight, bias = torch.ones(1, 1, 1, 3, 3), torch.zeros(1, 1)
    step = pooled_convolution(1, relu=True, pool=3)
    out = step.forward(x, channels_last(weight), bias.flatten())
    weights, biases = torch.empty_like(channels_last(weight)), torch.empty(1)
    inputs = step.backward(torch.ones_like(out), weights, biases, of_inputs=True)
    of_torch = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    expected = torch.autograd.grad(by_torch(*of_torch, relu=True, pool=3).sum(), of_torch)
    for found, exact in zip((inputs, weights, biases), expected, strict=True):
        assert torch.equal(found.flatten(), exact.flatten())


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("pool", [2, 3])
@pytest.mark.parametrize("channels", [1, 5])
def test_what_is_not_a_number_stays_so(way, channels, pool, relu):
    """Otherwise a training that diverged would seem to go on."""
    for place in range(4):
        x = with_border(torch.randn(1, 1, 6, 6, channels), 0)
        x[0, 0, place // 2 * 5, place % 2 * 5] = torch.nan  # seen by one of the four values of the window
        weight = channels_last(torch.randn(1, 2, channels, 5, 5))
        out = pooled_convolution(1, relu=relu, pool=pool).forward(x, weight, torch.zeros(2))
        assert out.shape == (1, 1, 1, 1, 2)
        assert out.isnan().all()


@pytest.mark.parametrize("pool", [2, 3])
@pytest.mark.parametrize("channels", [2, 6])
def test_images_need_not_be_square(way, channels, pool):
    generator = torch.Generator().manual_seed(0)
    x = with_border(torch.randn(1, 3, 11, 18, channels, generator=generator), 0)
    weight, bias = torch.randn(1, 9, channels, 4, 4, generator=generator), torch.randn(1, 9, generator=generator)
    step = pooled_convolution(1, relu=True, pool=pool)
    out = step.forward(x, channels_last(weight), bias.flatten())
    exact = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    expected = by_torch(*exact, relu=True, pool=pool)
    assert_near(out, expected)
    inputs = step.backward(out, torch.empty_like(channels_last(weight)), torch.empty(9), of_inputs=True)
    assert_near(inputs, torch.autograd.grad(expected, exact, expected.detach())[0])


def test_chosen_images_lie_inside_their_border(way):
    images = torch.randn(7, 3, 4, 5)
    chosen = torch.tensor([6, 0, 6])
    for border in (0, 2):
        out = roomy(1, 3, 4 + 2 * border, 5 + 2 * border, 3).zero_()
        gather(images, chosen, border, out)
        assert torch.equal(out[0].permute(0, 3, 1, 2), F.pad(images[chosen], (border,) * 4))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("lenet5", (3, 32, 32)), ("lenet", (1, 8, 8)), ("lenet-caffe", (1, 28, 28)), ("alexnet", (3, 12, 12))],
)
def test_networks_say_the_same_without_derivatives(way, name, shape):
    model = build_model(name, input_shape=shape, classes=10, seed=0)
    images = torch.randn(30, *shape)
    for x in (images[:0], images[3:8], images):
        with torch.no_grad():
            torch.testing.assert_close(outputs(model, x), model(x), rtol=1e-5, atol=1e-5)


# networks, samples, channels, side, sizes of the layers
DENSE = [
    (1, 4, 16, 5, (120, 84, 10)),
    (3, 4, 16, 5, (120, 84, 10)),
    (2, 33, 5, 2, (7, 10)),
    (1, 62, 50, 4, (50, 10)),
    (1, 130, 50, 4, (50, 10)),
    (1, 1, 3, 1, (3,)),
    (1, 9, 16, 4, (96, 48, 10)),
]


@pytest.mark.parametrize("shape", DENSE)
def test_losses_and_gradients_of_dense_layers_are_those_of_torch(way, shape):
    networks, samples, channels, side, sizes = shape
    generator = torch.Generator().manual_seed(0)
    sizes = (channels * side * side, *sizes)
    shapes = [
        each for pair in itertools.pairwise(sizes) for each in ((networks, pair[1], pair[0]), (networks, 1, pair[1]))
    ]
    room = torch.full((sum(math.prod(each) for each in shapes) + ROOM,), torch.nan)
    room[-ROOM:] = 0  # weights may be read a little beyond their end; nothing else is
    parts = torch.split(room[:-ROOM], [math.prod(each) for each in shapes])
    tensors = [part.view(each) for part, each in zip(parts, shapes, strict=True)]
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) / tensor.shape[-1] ** 0.5)
    gradients = [torch.full_like(tensor, torch.nan) for tensor in tensors]
    images = torch.randn(networks, samples, side, side, channels, generator=generator)
    labels = torch.randint(sizes[-1], (networks, samples), generator=generator)
    layers, of_layers = (list(zip(of[::2], of[1::2], strict=True)) for of in (tensors, gradients))
    losses, of_images = dense_layers()(images, labels, layers, of_layers)

    exact = [tensor.double().requires_grad_() for tensor in (images, *tensors)]
    h = exact[0].permute(0, 1, 4, 2, 3).flatten(2)
    for position, (weight, bias) in enumerate(zip(exact[1::2], exact[2::2], strict=True)):
        h = (torch.relu(h) if position else h) @ weight.mT + bias
    expected = torch.stack([F.cross_entropy(out, label) for out, label in zip(h, labels, strict=True)])
    assert_near(losses, expected)
    for found, of_torch in zip((of_images, *gradients), torch.autograd.grad(expected.sum(), exact), strict=True):
        assert_near(found, of_torch)


@pytest.mark.parametrize("diverged", [0, 1, 2])
def test_a_network_that_diverged_leaves_those_beside_it_alone(way, diverged):
    sizes, generator = (20, 7, 3), torch.Generator().manual_seed(0)
    shapes = [each for pair in itertools.pairwise(sizes) for each in ((3, pair[1], pair[0]), (3, 1, pair[1]))]
    weights = torch.randn(sum(math.prod(each) for each in shapes) + ROOM, generator=generator)
    parts = torch.split(weights[:-ROOM], [math.prod(each) for each in shapes])
    images = torch.randn(3, 5, 1, 1, 20, generator=generator)

    def step() -> list[Tensor]:
        tensors = [part.view(each) for part, each in zip(parts, shapes, strict=True)]
        gradients = [torch.zeros_like(tensor) for tensor in tensors]
        layers, of_layers = (list(zip(of[::2], of[1::2], strict=True)) for of in (tensors, gradients))
        losses, of_images = dense_layers()(images, torch.ones(3, 5, dtype=torch.long), layers, of_layers)
        return [losses, of_images, *gradients]

    before = step()
    for part, each in zip(parts, shapes, strict=True):
        part.view(each)[diverged] = torch.nan
    after = step()
    assert after[0][diverged].isnan()
    others = [position for position in range(3) if position != diverged]
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one[others], other[others])


def test_outputs_that_are_not_a_number_have_a_loss_that_is_none(way):
    weight, bias = torch.full((1, 2, 16), torch.nan), torch.zeros(1, 1, 2)
    layers, gradients = [(weight, bias)], [(torch.empty_like(weight), torch.empty_like(bias))]
    losses, _ = dense_layers()(torch.ones(1, 3, 1, 1, 16), torch.zeros(1, 3, dtype=torch.long), layers, gradients)
    assert losses.isnan().all()


# --- compiling --------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache of compiled code, for this test and not for those after it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled.cache_clear()
    yield tmp_path
    compiled.cache_clear()


@needs_compiler
def test_it_is_compiled_once_and_kept(fresh, monkeypatch):
    assert compiled() is not None
    (kept,) = (fresh / "spiritlevel" / "compiled").iterdir()
    assert kept.suffix == ".so"
    compiled.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert compiled() is not None


@needs_compiler
@pytest.mark.parametrize(
    "damage", [lambda code: code[:4096], lambda code: code[: len(code) // 2].ljust(len(code), b"\0"), lambda code: b""]
)
def test_code_that_was_cut_off_in_the_cache_is_compiled_again(fresh, damage):
    assert compiled() is not None
    (kept,) = (fresh / "spiritlevel" / "compiled").iterdir()
    whole = kept.read_bytes()
    kept.unlink()  # this process has it open
    kept.write_bytes(damage(whole))
    compiled.cache_clear()
    assert compiled() is not None
    (again,) = (fresh / "spiritlevel" / "compiled").iterdir()
    assert len(again.read_bytes()) == len(whole)


@needs_compiler
def test_a_compiler_that_does_not_know_the_flag_of_gcc_compiles_without_it(fresh, monkeypatch, tmp_path):
    other = tmp_path / "other"
    other.write_text(
        f'#!/bin/sh\ncase "$*" in *{compiling.OF_GCC[0]}*) exit 1;; esac\nexec {shutil.which("c++")} "$@"\n'
    )
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
    monkeypatch.setattr(compiling, "COMPILERS", ("no-such-compiler",))
    assert compiled() is not None


@needs_compiler
def test_how_says_what_was_loaded_whatever_became_of_the_sources(fresh, monkeypatch, tmp_path):
    said = how()
    shutil.copytree(compiling.HERE, tmp_path / "changed", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (tmp_path / "changed" / "vectors.h").write_text("// another one")
    monkeypatch.setattr(compiling, "HERE", tmp_path / "changed")
    assert how() == said


def test_a_user_without_a_home_is_left_to_torch(fresh, monkeypatch):
    def none():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(compiling, "user_cache", none)
    assert compiled() is None


def test_images_of_other_channels_are_refused(way):
    model = build_model("lenet", input_shape=(1, 28, 28), classes=10)
    with pytest.raises((SpiritLevelError, RuntimeError), match=r"channels"):
        outputs(model, torch.zeros(2, 3, 28, 28))


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_without_a_compiler_that_works_torch_computes_it(fresh, monkeypatch, compiler):
    monkeypatch.setattr(compiling, "COMPILERS", (compiler,))
    monkeypatch.delenv("CXX", raising=False)
    assert compiled() is None
    assert how() == "by torch"
    assert not [path for path in fresh.rglob("*") if path.is_file()]


def test_a_cache_that_cannot_be_written_is_no_obstacle(fresh, monkeypatch):
    (fresh / "spiritlevel").write_text("a file where the folder should be")
    assert compiled() is None


@needs_compiler
def test_several_threads_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert how() == "by torch"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert how().startswith("by compiled code ")
