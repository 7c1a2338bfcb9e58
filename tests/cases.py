"""A table of cases: small networks of every kind, with their data, loss and layers, for the tests of the core.

Every network has at most a few hundred parameters, so that its Hessian can be written down.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from case_networks import (
    Attention,
    Conv1D,
    Function,
    Pair,
    SequenceFirst,
    Siamese,
    Skip,
    Tied,
    TiedHead,
    Twice,
    Unused,
    Words,
    convolution,
    frozen,
    mlp,
    normalized,
    sequential,
    with_dead_neurons,
    with_zero_biases,
)
from dense_oracle import Matrix

ROWS_FIRST, COLUMNS_FIRST = Matrix(), Matrix("columns first")


@dataclass(frozen=True)
class Case:
    """A network with data.

    layers: Weight's name → how its matrix is stored. estimated: the parameters whose blocks are more than their
    Gauss–Newton block, or of a form the exact sweep does not know; estimated_vectors: other parameters are such.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Any]
    layers: Mapping[str, Matrix]
    outputs: int = 3
    loss: Any = "cross_entropy"
    estimated: frozenset[str] = frozenset()
    estimated_vectors: bool = False
    seed: int = 0
    targets: Callable[[torch.Generator], Tensor] | None = None

    def make(self, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Any, Tensor]:
        """The network in eval mode, its inputs and its targets, the same at every call."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            model = self.build().to(dtype).eval()
        generator = torch.Generator().manual_seed(self.seed + 1)
        x = self.inputs(generator)
        x = tuple(_as(part, dtype) for part in x) if isinstance(x, tuple) else _as(x, dtype)
        count = len(x[0] if isinstance(x, tuple) else x)
        if self.targets is not None:
            y = self.targets(generator)
        elif self.loss == "mse":
            y = torch.randn(count, self.outputs, generator=generator, dtype=torch.float64)
        else:
            y = torch.randint(0, self.outputs, (count,), generator=generator)
        return model, x, _as(y, dtype)

    @property
    def mean_loss(self) -> Callable[[Any, Tensor], Tensor]:
        return LOSSES[self.loss] if isinstance(self.loss, str) else self.loss


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def normalized_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    centred = outputs - outputs.mean(1, keepdim=True)
    return F.cross_entropy(outputs / centred.square().mean(1, keepdim=True).sqrt(), targets)


LOSSES = {"cross_entropy": F.cross_entropy, "mse": F.mse_loss, "normalized_cross_entropy": normalized_cross_entropy}


def gaussian(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(*shape, generator=generator, dtype=torch.float64)


def tokens(count: int, length: int, vocabulary: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randint(0, vocabulary, (count, length), generator=generator)


def chain(*indices: int) -> dict[str, Matrix]:
    return {f"{index}.weight": ROWS_FIRST for index in indices}


def one_input_zero(generator: torch.Generator) -> Tensor:
    x = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    x[:, 2] = 0
    return x


def square_loss_times_quartic(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of the user's own, with an indefinite Hessian at the outputs."""
    return (outputs.square().sum(1) - outputs[:, 0] * outputs[:, 1] * targets.square()).mean()


X4, IMAGE, SERIES = gaussian(12, 4), gaussian(7, 2, 6, 6), gaussian(7, 2, 9)
CONVOLUTIONAL = {"0.weight": ROWS_FIRST, "3.weight": ROWS_FIRST}


EXACT = [
    Case("mlp", mlp, X4, chain(0, 2, 4)),
    Case("mlp without biases", lambda: mlp(bias=False), X4, chain(0, 2, 4)),
    Case("mlp, squared error", mlp, X4, chain(0, 2, 4), loss="mse"),
    Case("mlp, normalized loss", mlp, X4, chain(0, 2, 4), loss="normalized_cross_entropy"),
    Case("mlp, own loss", mlp, X4, chain(0, 2, 4), loss=square_loss_times_quartic),
    Case("mlp, class probabilities", mlp, X4, chain(0, 2, 4), targets=lambda g: torch.rand(12, 3, generator=g)),
    Case("one sample", mlp, gaussian(1, 4), chain(0, 2, 4)),
    Case("linear regression", lambda: nn.Linear(4, 1), X4, {"weight": ROWS_FIRST}, outputs=1, loss="mse"),
    Case("leaky ReLU", lambda: mlp(activation=lambda: nn.LeakyReLU(0.2)), X4, chain(0, 2, 4)),
    Case("in-place ReLU", lambda: mlp(activation=lambda: nn.ReLU(inplace=True)), X4, chain(0, 2, 4)),
    Case("hard tanh", lambda: mlp(activation=nn.Hardtanh), X4, chain(0, 2, 4)),
    Case("PReLU", lambda: mlp(activation=nn.PReLU), X4, chain(0, 2, 4)),
    Case(
        "PReLU with channels",
        sequential(nn.Conv2d(2, 3, 3), nn.PReLU(3), nn.Flatten(), nn.Linear(48, 3)),
        IMAGE,
        chain(0, 3),
    ),
    Case("zero biases", with_zero_biases, X4, chain(0, 2, 4)),
    Case("dead neurons", with_dead_neurons, one_input_zero, chain(0, 2, 4)),
    Case("frozen first layer", lambda: frozen(0), X4, chain(2, 4)),
    Case("frozen middle layer", lambda: frozen(2), X4, chain(0, 4)),
    Case("frozen last layer", lambda: frozen(4), X4, chain(0, 2)),
    Case("frozen weights", lambda: frozen(2, bias=True), X4, chain(0, 4)),
    Case(
        "skip and concatenation", Skip, X4, dict.fromkeys(["first.weight", "inner.weight", "last.weight"], ROWS_FIRST)
    ),
    Case(
        "siamese",
        Siamese,
        lambda g: (X4(g), X4(g)),
        {"shared.weight": ROWS_FIRST, "last.weight": ROWS_FIRST},
    ),
    Case(
        "convolution, max pooling",
        convolution(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), features=27),
        IMAGE,
        {"0.weight": ROWS_FIRST, "4.weight": ROWS_FIRST},
    ),
    Case(  # with negative entries on the diagonal, which are clipped before a kernel is summed
        "convolution, normalized loss",
        convolution(nn.Conv2d(2, 3, 3), nn.ReLU(), features=48),
        IMAGE,
        CONVOLUTIONAL,
        loss="normalized_cross_entropy",
    ),
    Case(
        "two convolutions, average pooling",
        convolution(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(3, 3, 2), nn.ReLU(), features=3),
        IMAGE,
        {"0.weight": ROWS_FIRST, "3.weight": ROWS_FIRST, "6.weight": ROWS_FIRST},
    ),
    Case(
        "convolution with stride and dilation",
        convolution(nn.Conv2d(2, 3, (3, 2), stride=(2, 1), dilation=(1, 2), padding=(1, 0)), nn.ReLU(), features=36),
        IMAGE,
        CONVOLUTIONAL,
    ),
    Case(
        "grouped convolution",
        convolution(nn.Conv2d(2, 4, 3, groups=2, stride=2), nn.ReLU(), features=16),
        IMAGE,
        {"0.weight": Matrix(groups=2), "3.weight": ROWS_FIRST},
    ),
    Case(
        "depthwise convolution",
        convolution(nn.Conv2d(2, 2, 3, groups=2, padding="same", bias=False), nn.ReLU(), features=72),
        IMAGE,
        {"0.weight": Matrix(groups=2), "3.weight": ROWS_FIRST},
    ),
    Case(
        "same padding, even kernel",
        convolution(nn.Conv2d(2, 2, (2, 4), padding="same"), nn.ReLU(), features=72),
        IMAGE,
        CONVOLUTIONAL,
    ),
    Case(
        "circular padding",
        convolution(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), nn.ReLU(), features=72),
        IMAGE,
        CONVOLUTIONAL,
    ),
    Case(
        "1-d convolution",
        convolution(nn.Conv1d(2, 3, 3, stride=2, padding=2), nn.ReLU(), features=18),
        SERIES,
        CONVOLUTIONAL,
    ),
    Case(
        "3-d convolution",
        convolution(nn.Conv3d(1, 2, 2, stride=(1, 2, 1)), nn.ReLU(), features=24),
        gaussian(6, 1, 3, 4, 4),
        CONVOLUTIONAL,
    ),
    Case(
        "1-d transposed convolution",
        convolution(nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1), nn.ReLU(), features=30),
        gaussian(7, 2, 5),
        {"0.weight": COLUMNS_FIRST, "3.weight": ROWS_FIRST},
    ),
    Case(
        "grouped transposed convolution",
        convolution(nn.ConvTranspose2d(4, 4, 2, groups=2, dilation=2), nn.ReLU(), features=64),
        gaussian(7, 4, 2, 2),
        {"0.weight": Matrix("columns first", groups=2), "3.weight": ROWS_FIRST},
    ),
    Case(
        "transposed convolution, wide output padding",
        convolution(nn.ConvTranspose1d(2, 3, 2, dilation=3, output_padding=2), nn.ReLU(), features=30),
        gaussian(7, 2, 5),
        {"0.weight": COLUMNS_FIRST, "3.weight": ROWS_FIRST},
    ),
    Case(
        "batch normalization",
        lambda: normalized(nn.BatchNorm2d(4)),
        IMAGE,
        {"0.weight": ROWS_FIRST, "5.weight": ROWS_FIRST},
    ),
    Case(
        "GPT-2 layers",
        lambda: nn.Sequential(Conv1D(4, 5), nn.ReLU(), Conv1D(5, 3)),
        X4,
        dict.fromkeys(["0.weight", "2.weight"], COLUMNS_FIRST),
    ),
    Case(
        "GPT-2 layers over sequences",
        lambda: nn.Sequential(Conv1D(3, 4), nn.ReLU(), nn.Flatten(), Conv1D(12, 3)),
        gaussian(7, 3, 3),
        {"0.weight": COLUMNS_FIRST, "3.weight": COLUMNS_FIRST},
    ),
    Case(
        "x @ W and x @ W.permute",
        lambda: Function(lambda m, x: F.relu(x @ m.a.permute(1, 0) + m.b) @ m.c, a=(5, 4), b=(5,), c=(5, 3)),
        X4,
        {"a": ROWS_FIRST, "c": COLUMNS_FIRST},
    ),
    Case(
        "matmul by function, transposed twice",
        lambda: Function(lambda m, x: torch.matmul(torch.mm(x, m.a.T).clamp(min=0), m.c.T.T), a=(5, 4), c=(5, 3)),
        X4,
        {"a": ROWS_FIRST, "c": COLUMNS_FIRST},
    ),
    Case(
        "a scale, a shift and a slope by hand",
        lambda: Function(
            lambda m, x: F.prelu(F.linear(x, m.a) * m.scale - m.shift, m.slope) @ m.c,
            a=(5, 4),
            scale=(5,),
            shift=(1, 5),
            slope=(1,),
            c=(5, 3),
        ),
        X4,
        {"a": ROWS_FIRST, "c": COLUMNS_FIRST},
    ),
    Case(
        "embedding",
        Words,
        tokens(9, 4, 6),
        {"embedding.weight": COLUMNS_FIRST, "inner.weight": ROWS_FIRST, "last.weight": ROWS_FIRST},
    ),
    Case(
        "embedding with padding",
        lambda: Words(padding=0),
        lambda g: torch.cat([torch.randint(1, 6, (4, 4), generator=g), torch.randint(0, 2, (5, 4), generator=g)]),
        {"embedding.weight": COLUMNS_FIRST, "inner.weight": ROWS_FIRST, "last.weight": ROWS_FIRST},
    ),
    Case(
        "embedding with padding from the start",
        lambda: Words(padding=0),
        lambda g: torch.randint(0, 3, (9, 4), generator=g),
        {"embedding.weight": COLUMNS_FIRST, "inner.weight": ROWS_FIRST, "last.weight": ROWS_FIRST},
    ),
    Case(
        "embedding looked up twice",
        Pair,
        # Tokens of both inputs differ in the first samples and meet later.
        lambda g: (torch.tensor([[0, 1], [2, 0]] + [[1, 2]] * 5), torch.tensor([[3, 4], [4, 5]] + [[1, 3]] * 5)),
        {"embedding.weight": COLUMNS_FIRST, "last.weight": ROWS_FIRST},
    ),
    Case(
        "einsum and tensordot",
        lambda: Function(
            lambda m, x: torch.tensordot(
                F.relu(torch.einsum("...j,jk->...k", F.relu(torch.einsum("bi,oi->bo", x, m.a)), m.b)), m.c, dims=1
            ),
            a=(5, 4),
            b=(5, 4),
            c=(4, 3),
        ),
        X4,
        {"a": ROWS_FIRST, "b": COLUMNS_FIRST, "c": COLUMNS_FIRST},
    ),
    Case(
        "a matrix at two positions",
        lambda: Function(lambda m, x: (x[:, 0] @ m.a + F.relu(x[:, 1] @ m.a)) @ m.c, a=(3, 4), c=(4, 3)),
        gaussian(7, 2, 3),
        {"a": COLUMNS_FIRST, "c": COLUMNS_FIRST},
    ),
    Case(
        "samples inside a merged dimension",
        lambda: Function(
            lambda m, x: F.relu(x.transpose(0, 1).reshape(-1, 3) @ m.a).view(2, -1, 4).mean(0) @ m.c, a=(3, 4), c=(4, 3)
        ),
        gaussian(7, 2, 3),
        {"a": COLUMNS_FIRST, "c": COLUMNS_FIRST},
    ),
    Case(
        "maxout",
        lambda: Function(lambda m, x: torch.maximum(x @ m.a, x @ m.b) @ m.c, a=(4, 5), b=(4, 5), c=(5, 3)),
        X4,
        dict.fromkeys("abc", COLUMNS_FIRST),
    ),
    Case(
        "linear over sequences",
        sequential(nn.Linear(3, 4), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)),
        gaussian(7, 3, 3),
        {"0.weight": ROWS_FIRST, "3.weight": ROWS_FIRST},
    ),
    Case("sequence first", SequenceFirst, gaussian(7, 2, 3), {"inner.weight": ROWS_FIRST, "last.weight": ROWS_FIRST}),
    Case(
        "an output for every position",
        lambda: nn.Conv1d(2, 3, 3, padding=1),
        gaussian(5, 2, 4),
        {"weight": ROWS_FIRST},
        targets=lambda g: torch.randint(0, 3, (5, 4), generator=g),
    ),
]

ESTIMATED = [
    Case("GELU", lambda: mlp(activation=nn.GELU), X4, chain(0, 2, 4), estimated=frozenset(["0.weight", "2.weight"])),
    Case(
        "tanh, squared error",
        lambda: mlp(activation=nn.Tanh),
        X4,
        chain(0, 2, 4),
        loss="mse",
        estimated=frozenset(["0.weight", "2.weight"]),
    ),
    Case(
        "a module used twice",
        Twice,
        X4,
        {"shared.weight": ROWS_FIRST, "last.weight": ROWS_FIRST},
        estimated=frozenset(["shared.weight"]),
    ),
    Case(
        "tied weights",
        Tied,
        X4,
        {"first.weight": ROWS_FIRST, "last.weight": ROWS_FIRST},
        estimated=frozenset(["first.weight"]),
    ),
    Case(
        "layer normalization",
        lambda: normalized(nn.LayerNorm(4), convolution=False),
        X4,
        {"0.weight": ROWS_FIRST, "3.weight": ROWS_FIRST},
        estimated=frozenset(["0.weight"]),
    ),
    Case(
        "group normalization",
        lambda: normalized(nn.GroupNorm(2, 4)),
        IMAGE,
        {"0.weight": ROWS_FIRST, "5.weight": ROWS_FIRST},
        estimated=frozenset(["0.weight"]),
    ),
    Case(
        "a scale used in two ways",
        lambda: Function(lambda m, x: F.relu(x @ m.a.t() * m.s) @ m.c * m.s.exp().sum(), a=(5, 4), s=(5,), c=(5, 3)),
        X4,
        {"a": ROWS_FIRST, "c": COLUMNS_FIRST},
        estimated_vectors=True,
    ),
    Case(
        "a slope used twice",
        lambda: Function(lambda m, x: F.prelu(F.prelu(x @ m.a.t(), m.s) @ m.c, m.s), a=(5, 4), s=(1,), c=(5, 3)),
        X4,
        {"a": ROWS_FIRST, "c": COLUMNS_FIRST},
        estimated_vectors=True,
    ),
    Case(
        "an embedding that is the last layer too",
        TiedHead,
        tokens(8, 4, 5),
        {"embedding.weight": COLUMNS_FIRST, "inner.weight": ROWS_FIRST},
        outputs=5,
        estimated=frozenset(["embedding.weight"]),
    ),
    Case(
        "a layer that is not used",
        Unused,
        X4,
        dict.fromkeys(["first.weight", "aside.weight", "last.weight"], ROWS_FIRST),
        estimated=frozenset(["aside.weight"]),
    ),
    Case(
        "a product that is not followed",
        lambda: Function(lambda m, x: F.relu(torch.addmm(x.new_zeros(1), x, m.a, alpha=1)) @ m.c, a=(4, 5), c=(5, 3)),
        X4,
        dict.fromkeys("ac", COLUMNS_FIRST),
        estimated=frozenset(["a"]),
    ),
    Case(
        "a gate",
        lambda: Function(lambda m, x: (x @ m.a * F.silu(x @ m.b)) @ m.c, a=(4, 5), b=(4, 5), c=(5, 3)),
        X4,
        dict.fromkeys("abc", COLUMNS_FIRST),
        estimated=frozenset("b"),
    ),
    Case(
        "attention",
        Attention,
        gaussian(6, 3, 4),
        dict.fromkeys(["attention.in_proj_weight", "attention.out_proj.weight", "last.weight"], ROWS_FIRST),
        estimated=frozenset(["attention.in_proj_weight"]),
    ),
]

CASES = EXACT + ESTIMATED


def by_name(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def case_id(case: Case) -> str:
    return case.name.replace(" ", "-").replace(",", "")
