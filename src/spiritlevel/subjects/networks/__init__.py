"""Networks by name, at the sizes of the papers, or by the user's own `package.module:factory`."""

import contextlib
import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from spiritlevel.errors import SpiritLevelError, suggest
from spiritlevel.subjects.factory import import_factory
from spiritlevel.subjects.networks.attention import HEADS, Transformer
from spiritlevel.subjects.networks.convolutional import VGG16, AlexNet, CaffeLeNet, ConvNet, LeNet
from spiritlevel.subjects.networks.dense import FullyConnected
from spiritlevel.subjects.networks.initialize import SCHEMES, initialize
from spiritlevel.subjects.networks.residual import ResNet, WideResNet

__all__ = ["build_model", "is_own_model", "list_initializations", "list_models"]

Shape = tuple[int, ...]


class _Model(NamedTuple):
    build: Callable[[Shape, int, float], nn.Module]
    holds: str
    images: bool = True


def build_model(
    name: str,
    *,
    input_shape: Sequence[int],
    classes: int,
    width: float = 1.0,
    init: str = "default",
    seed: int = 0,
) -> nn.Module:
    """The network that `name` names (see `list_models`), for samples of `input_shape`, with `classes` outputs.

    `width` multiplies every number of hidden neurons or channels; `init` names the distribution of the starting weights
    (see `list_initializations`), `seed` their draw. The global generator of torch is left as it was.

    >>> model = build_model("mlp:300-100", input_shape=(784,), classes=10)
    >>> [tuple(p.shape) for p in model.parameters() if p.dim() == 2]
    [(300, 784), (100, 300), (10, 100)]
    """
    shape = tuple(input_shape)
    _check_numbers(shape, classes, width, seed)
    if init != "default" and init not in SCHEMES:
        known = list_initializations()
        raise SpiritLevelError(f"unknown init {init!r}{suggest(init, known) or '.'} Known: {', '.join(known)}")
    with _seeded(seed):
        model = _build(name, shape, classes, width)
        initialize(model, init)
    return model


def list_models() -> dict[str, str]:
    """Every name that `build_model` takes, with what it builds."""
    listed = {name: model.holds for name, model in MODELS.items()}
    listed["mlp:300-100"] = "fully connected with these hidden widths; or all sizes, as mlp:784-300-100-10"
    listed["resnetN"] = "CIFAR ResNet with N = 6n + 2 layers"
    listed["wrn-D-K"] = "wide ResNet with D = 6n + 4 layers and width factor K"
    listed["transformer-N"] = "N blocks of attention on patches of an image: RMS normalization, 4 heads, ReLU"
    listed["package.module:factory"] = "your own; called with those of input_shape, classes and width that it names"
    return listed


def list_initializations() -> list[str]:
    """Every name that `init` takes."""
    return ["default", *SCHEMES]


def is_own_model(name: str) -> bool:
    """Whether `name` is one of the user's own, `package.module:factory`.

    >>> is_own_model("mynetworks:small"), is_own_model("mlp:300-100")
    (True, False)
    """
    reserved = name in MODELS or name.partition(":")[0] == "mlp"
    return not reserved and re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) is not None


def _build(name: str, shape: Shape, classes: int, width: float) -> nn.Module:
    if name in MODELS:
        model = MODELS[name]
    elif match := re.fullmatch(r"mlp:(\d+(?:-\d+)*)", name):
        widths = [int(w) for w in match[1].split("-")]
        model = _Model(lambda s, c, w: _mlp(_hidden_widths(name, widths, s, c), s, c, w), "", images=False)
    elif name.partition(":")[0] == "mlp":
        raise SpiritLevelError(f"a fully connected network is named by its hidden widths, 'mlp:300-100', got {name!r}")
    elif match := re.fullmatch(r"resnet(\d+)", name):
        model = _resnet(int(match[1]))
    elif match := re.fullmatch(r"wrn-(\d+)-(\d+)", name):
        model = _wide_resnet(int(match[1]), int(match[2]))
    elif match := re.fullmatch(r"transformer-(\d+)", name):
        model = _transformer(int(match[1]))
    elif is_own_model(name):
        return _build_own(name, shape, classes, width)
    else:
        known = list_models()
        raise SpiritLevelError(f"unknown model {name!r}{suggest(name, known) or '.'} Known: {', '.join(known)}")
    if model.images and (len(shape) != 3 or min(shape[1:]) < 4):
        raise SpiritLevelError(
            f"{name} needs images: an input shape (channels, height, width) of at least 4×4 pixels, got {shape}; "
            "reshape the samples, or use a fully connected network such as 'mlp:300-100'"
        )
    return model.build(shape, classes, width)


def _build_own(name: str, shape: Shape, classes: int, width: float) -> nn.Module:
    factory = import_factory(name, MODELS)
    if isinstance(factory, nn.Module):
        raise SpiritLevelError(f"{name} is a module already; name a function or class that builds one")
    offered = {"input_shape": shape, "classes": classes, "width": width}
    named = inspect.signature(factory).parameters
    if width != 1.0 and "width" not in named:
        raise SpiritLevelError(f"width={width} needs a factory with an argument 'width'; {name} has none")
    model = factory(**{key: value for key, value in offered.items() if key in named})
    if not isinstance(model, nn.Module):
        raise SpiritLevelError(f"{name} must return a torch.nn.Module, got {type(model).__name__}")
    return model


def _check_numbers(shape: Shape, classes: int, width: float, seed: int) -> None:
    if not shape or not all(isinstance(side, int) and side > 0 for side in shape):
        raise SpiritLevelError(f"input_shape must be positive whole numbers, such as (1, 28, 28), got {shape}")
    if not isinstance(classes, int) or classes < 1:
        raise SpiritLevelError(f"classes must be a positive whole number, got {classes!r}")
    if not (math.isfinite(width) and width > 0):
        raise SpiritLevelError(f"width must be a positive factor, such as 0.5, got {width!r}")
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise SpiritLevelError(f"seed must be a whole number from 0 to 2**63 - 1, got {seed!r}")


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draws of the processor's global generator follow `seed` inside, and are as if nothing happened afterwards."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_rng_state(before)


# --- families ---------------------------------------------------------------------------------------------------------


def _scale(number: int, width: float) -> int:
    return max(1, round(number * width))


def _scaled(numbers: Sequence[int], width: float) -> tuple[int, ...]:
    return tuple(_scale(number, width) for number in numbers)


def _mlp(hidden: Sequence[int], shape: Shape, classes: int, width: float) -> nn.Module:
    return FullyConnected([math.prod(shape), *_scaled(hidden, width), classes])


def _hidden_widths(name: str, sizes: list[int], shape: Shape, classes: int) -> list[int]:
    """The hidden widths of `mlp:…`, which lists either them or all sizes from input to output."""
    if min(sizes) < 1:
        raise SpiritLevelError(f"every width in {name!r} must be at least 1")
    features = math.prod(shape)
    if len(sizes) < 2 or sizes[-1] != classes:
        return sizes
    if sizes[0] == features:
        return sizes[1:-1]
    hidden = "-".join(map(str, sizes))
    raise SpiritLevelError(
        f"{name!r} ends with the number of classes, {classes}, but does not start with the number of inputs, {features}; "
        f"write all sizes, 'mlp:{features}-{'-'.join(map(str, sizes[1:]))}', or if {classes} is a hidden width too, "
        f"'mlp:{features}-{hidden}-{classes}'"
    )


def _lenet(channels: Shape, pad_below: int) -> Callable[[Shape, int, float], nn.Module]:
    return lambda shape, classes, width: LeNet(
        shape, classes, _scaled(channels, width), _scaled((120, 84), width), pad_below
    )


def _caffe_lenet(shape: Shape, classes: int, width: float) -> nn.Module:
    return CaffeLeNet(shape, classes, _scaled((20, 50), width), _scale(500, width))


def _resnet(layers: int) -> _Model:
    blocks, rest = divmod(layers - 2, 6)
    if rest or blocks < 1:
        raise SpiritLevelError(f"a CIFAR ResNet has 6n + 2 layers (8, 14, 20, 32, 44, 56, 110), got resnet{layers}")
    return _Model(
        lambda shape, classes, width: ResNet(shape[0], classes, blocks, _scale(16, width)),
        f"CIFAR ResNet with {layers} layers, batch normalization and parameter-free shortcuts (He et al. 2016)",
    )


def _wide_resnet(layers: int, factor: int) -> _Model:
    blocks, rest = divmod(layers - 4, 6)
    if rest or blocks < 1 or factor < 1:
        raise SpiritLevelError(f"a wide ResNet has 6n + 4 layers (10, 16, 22, 28, 40), got wrn-{layers}-{factor}")

    def build(shape: Shape, classes: int, width: float) -> nn.Module:
        first, second, third = _scaled([16 * factor, 32 * factor, 64 * factor], width)
        return WideResNet(shape[0], classes, blocks, 16, (first, second, third))

    return _Model(
        build, f"wide ResNet with {layers} layers and width factor {factor}, batch normalization (tsuzuku2019)"
    )


def _transformer(blocks: int) -> _Model:
    if blocks < 1:
        raise SpiritLevelError("a transformer has at least one block: transformer-1")
    return _Model(
        lambda shape, classes, width: Transformer(shape, classes, blocks, HEADS * _scale(8, width)),
        f"{blocks} blocks of attention on patches of an image",
    )


def _convnet(shape: Shape, classes: int, width: float) -> nn.Module:
    return ConvNet(shape, classes, _scaled((16, 32), width), _scale(64, width))


def _alexnet(shape: Shape, classes: int, width: float) -> nn.Module:
    return AlexNet(shape, classes, _scale(64, width), _scaled((384, 192), width))


def _vgg16(shape: Shape, classes: int, width: float) -> nn.Module:
    return VGG16(shape, classes, _scaled((64, 128, 256, 512, 512), width), _scale(512, width))


def _dense(hidden: Sequence[int], holds: str) -> _Model:
    return _Model(lambda shape, classes, width: _mlp(hidden, shape, classes, width), holds, images=False)


MODELS: dict[str, _Model] = {
    "convnet": _Model(_convnet, "two 3×3 convolutions and one hidden layer; the small default"),
    "rangamani-fc": _dense((300, 100), "784-300-100-10 (rangamani2019, Table 1)"),
    "rangamani-conv": _Model(_lenet((10, 20), 16), "conv5×10, conv5×20, 320-120-84-10 (rangamani2019, Table 1)"),
    "mnist-fc": _dense((512,) * 5, "five hidden layers of 512 (rangamani2019, Table 4)"),
    "petzka-fc": _dense((50, 50, 50, 30), "784-50-50-50-30-10 (petzka2019, Figures 3 to 6)"),
    "lenet": _Model(_lenet((6, 16), 32), "conv5×6, conv5×16, 120, 84 (rangamani2019, tsuzuku2019)"),
    "lenet5": _Model(_lenet((6, 16), 32), "the same network by the name petzka2019 gives it on CIFAR-10"),
    "lenet-caffe": _Model(
        _caffe_lenet, "conv5×20, conv5×50, 500: LeNet as Caffe's example has it, seven times as large"
    ),
    "alexnet": _Model(_alexnet, "AlexNet-type for small images without normalization (rangamani2019, Table 4)"),
    "vgg16": _Model(_vgg16, "VGG16-type for small images without normalization (rangamani2019, Table 4)"),
    "wrn-16-4": _wide_resnet(16, 4),
    **{f"resnet{layers}": _resnet(layers) for layers in (20, 32, 44, 56)},
}
