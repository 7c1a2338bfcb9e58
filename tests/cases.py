"""Small networks of every kind, with their data, loss and layers, for the tests of the core.

Every network has at most a few hundred parameters, so that its Hessian can be written down.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


def sequential(*parts: nn.Module) -> Callable[[], nn.Module]:
    """A network of copies of `parts`, initialized when it is built."""

    def build() -> nn.Module:
        model = copy.deepcopy(nn.Sequential(*parts))  # fresh modules at every call, whatever became of the last ones
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        return model

    return build


def chain(*indices: int) -> dict[str, Matrix]:
    return {f"{index}.weight": ROWS_FIRST for index in indices}


def mlp(bias: bool = True, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 6, bias=bias), activation(), nn.Linear(6, 5, bias=bias), activation(), nn.Linear(5, 3, bias=bias)
    )


class Function(nn.Module):
    """Parameters by name and shape, and a function of them and the inputs."""

    def __init__(self, run: Callable[..., Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self._run = run
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(*shape) / max(1, shape[-1]) ** 0.5))

    def forward(self, *x: Tensor) -> Tensor:
        return self._run(self, *x)


class Skip(nn.Module):
    """A skip connection around a layer, and its result beside the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x))
        h = h + F.leaky_relu(self.inner(h), 0.2)
        return self.last(torch.cat([h, x], dim=1))


class Twice(nn.Module):
    """One module applied to what it produced."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.shared(F.relu(self.shared(x)))))


class Siamese(nn.Module):
    """One module applied to two inputs side by side: still linear in its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.last = nn.Linear(4, 4), nn.Linear(8, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.last(torch.cat([F.relu(self.shared(a)), F.relu(self.shared(b))], dim=1))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.second(F.relu(self.first(x)))))


class Conv1D(nn.Module):
    """GPT-2's layer: the weight stored inputs first, applied by addmm."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(fan_in, fan_out) * 0.5)
        self.bias = nn.Parameter(torch.randn(fan_out) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.shape[:-1], -1)


class Words(nn.Module):
    """An embedding, a layer at every position, a mean over positions."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 3, padding_idx=padding)
        self.inner, self.last = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.inner(self.embedding(x))).mean(1))


class Pair(nn.Module):
    """An embedding looked up for two inputs, whose sum goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(6, 3), nn.Linear(3, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.last(F.relu(self.embedding(a).sum(1) + self.embedding(b).sum(1)))


class TiedHead(nn.Module):
    """An embedding whose weight is that of the last layer, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.inner(self.embedding(x).mean(1))))


class Unused(nn.Module):
    """One layer runs but goes nowhere, one never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.aside, self.never = nn.Linear(5, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x))
        self.aside(h)
        return self.last(h)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 3)
        nn.init.normal_(self.attention.in_proj_bias, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.attention(x, x, x, need_weights=False)
        return self.last(mixed.mean(1))


class SequenceFirst(nn.Module):
    """Samples in the second dimension inside, as recurrent code has it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.inner(x.transpose(0, 1))).mean(0))


def normalized(norm: nn.Module, *, convolution: bool = True) -> nn.Module:
    """A normalization with running statistics, scales and shifts that are not those of a fresh layer."""
    first = nn.Conv2d(2, 4, 3, bias=False) if convolution else nn.Linear(4, 4)
    for name, tensor in (*norm.named_parameters(), *norm.named_buffers()):
        if tensor.is_floating_point():
            spread = torch.randn(tensor.shape) * 0.3
            tensor.data.copy_(1 + spread.abs() if name in ("weight", "running_var") else spread)
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten()] if convolution else []
    return nn.Sequential(first, norm, nn.ReLU(), *tail, nn.Linear(4, 3))


def with_zero_biases() -> nn.Module:
    model = mlp()
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    return model


def with_dead_neurons() -> nn.Module:
    """One neuron never fires, one has no outgoing weight, one input is always zero."""
    model = mlp()
    with torch.no_grad():
        model[0].bias[1] = -100.0
        model[2].weight[:, 3] = 0.0
        model[2].weight[2] = 0.0
    return model


def frozen(*indices: int, bias: bool = False) -> nn.Module:
    model = mlp()
    for index in indices:
        model[index].weight.requires_grad_(False)
        model[index].bias.requires_grad_(bias)
    return model


def one_input_zero(generator: torch.Generator) -> Tensor:
    x = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    x[:, 2] = 0
    return x


def square_loss_times_quartic(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of the user's own, with an indefinite Hessian at the outputs."""
    return (outputs.square().sum(1) - outputs[:, 0] * outputs[:, 1] * targets.square()).mean()


def _case(name: str, build: Any, inputs: Any, layers: Mapping[str, Matrix], **options: Any) -> Case:
    return Case(name, build, inputs, layers, **options)


X4, IMAGE, SERIES = gaussian(12, 4), gaussian(7, 2, 6, 6), gaussian(7, 2, 9)
CONVOLUTIONAL = {"0.weight": ROWS_FIRST, "3.weight": ROWS_FIRST}


def convolution(*parts: nn.Module, features: int) -> Callable[[], nn.Module]:
    return sequential(*parts, nn.Flatten(), nn.Linear(features, 3))


EXACT = [
    _case("mlp", mlp, X4, chain(0, 2, 4)),
    _case("mlp without biases", lambda: mlp(bias=False), X4, chain(0, 2, 4)),
    _case("mlp, squared error", mlp, X4, chain(0, 2, 4), loss="mse"),
    _case("mlp, normalized loss", mlp, X4, chain(0, 2, 4), loss="normalized_cross_entropy"),
    _case("mlp, own loss", mlp, X4, chain(0, 2, 4), loss=square_loss_times_quartic),
    _case("mlp, class probabilities", mlp, X4, chain(0, 2, 4), targets=lambda g: torch.rand(12, 3, generator=g)),
    _case("one sample", mlp, gaussian(1, 4), chain(0, 2, 4)),
    _case("linear regression", lambda: nn.Linear(4, 1), X4, {"weight": ROWS_FIRST}, outputs=1, loss="mse"),
    _case("leaky ReLU", lambda: mlp(activation=lambda: nn.LeakyReLU(0.2)), X4, chain(0, 2, 4)),
    _case("in-place ReLU", lambda: mlp(activation=lambda: nn.ReLU(inplace=True)), X4, chain(0, 2, 4)),
    _case("hard tanh", lambda: mlp(activation=nn.Hardtanh), X4, chain(0, 2, 4)),
    _case("PReLU", lambda: mlp(activation=nn.PReLU), X4, chain(0, 2, 4)),
    _case(
        "PReLU with channels",
        sequential(nn.Conv2d(2, 3, 3), nn.PReLU(3), nn.Flatten(), nn.Linear(48, 3)),
        IMAGE,
        chain(0, 3),
    ),
    _case("zero biases", with_zero_biases, X4, chain(0, 2, 4)),
    _case("dead neurons", with_dead_neurons, one_input_zero, chain(0, 2, 4)),
    _case("frozen first layer", lambda: frozen(0), X4, chain(2, 4)),
    _case("frozen middle layer", lambda: frozen(2), X4, chain(0, 4)),
    _case("frozen last layer", lambda: frozen(4), X4, chain(0, 2)),
    _case("frozen weights", lambda: frozen(2, bias=True), X4, chain(0, 4)),
    _case(
        "skip and concatenation", Skip, X4, dict.fromkeys(["first.weight", "inner.weight", "last.weight"], ROWS_FIRST)
    ),
    _case(
        "siamese",
        Siamese,
        lambda g: (X4(g), X4(g)),
        {"shared.weight": ROWS_FIRST, "last.weight": ROWS_FIRST},
    ),
    _case(
        "convolution, max pooling",
        convolution(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), features=27),
        IMAGE,
        {"0.weight": ROWS_FIRST, "4.weight": ROWS_FIRST},
    ),
    _case(  # with negative entries on the diagonal, which are clipped before a kernel is summed
        "convolution, normalized loss",
        convolution(nn.Conv2d(2, 3, 3), nn.ReLU(), features=48),
        IMAGE,
        CONVOLUTIONAL,
        loss="normalized_cross_entropy",
    ),
    _case(
        "two convolutions, average pooling",
        convolution(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(3, 3, 2), nn.ReLU(), features=3),
        IMAGE,
        {"0.weight": ROWS_FIRST, "3.weight": ROWS_FIRST, "6.weight": ROWS_FIRST},
    ),
    _case(
        "convolution with stride and dilation",
        convolution(nn.Conv2d(2, 3, (3, 2), stride=(2, 1), dilation=(1, 2), padding=(1, 0)), nn.ReLU(), features=36),
        IMAGE,
        CONVOLUTIONAL,
    ),
    _case(
        "grouped convolution",
        convolution(nn.Conv2d(2, 4, 3, groups=2, stride=2), nn.ReLU(), features=16),
        IMAGE,
        {"0.weight": Matrix(groups=2), "3.weight": ROWS_FIRST},
    ),
    _case(
        "depthwise convolution",
        convolution(nn.Conv2d(2, 2, 3, groups=2, padding="same", bias=False), nn.ReLU(), features=72),
        IMAGE,
        {"0.weight": Matrix(groups=2), "3.weight": ROWS_FIRST},
    ),
    _case(
        "same padding, even kernel",
        convolution(nn.Conv2d(2, 2, (2, 4), padding="same"), nn.ReLU(), features=72),
        IMAGE,
        CONVOLUTIONAL,
    ),
    _case(
        "circular padding",
        convolution(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), nn.ReLU(), features=72),
        IMAGE,
        CONVOLUTIONAL,
    ),
    _case(
        "1-d convolution",
        convolution(nn.Conv1d(2, 3, 3, stride=2, padding=2), nn.ReLU(), features=18),
        SERIES,
        CONVOLUTIONAL,
    ),
    _case(
        "3-d convolution",
        convolution(nn.Conv3d(1, 2, 2, stride=(1, 2, 1)), nn.ReLU(), features=24),
        gaussian(6, 1, 3, 4, 4),
        CONVOLUTIONAL,
    ),
    _case(
        "1-d transposed convolution",
        convolution(nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1), nn.ReLU(), features=30),
        gaussian(7, 2, 5),
        {"0.weight": COLUMNS_FIRST, "3.weight": ROWS_FIRST},
    ),
    _case(
        "grouped transposed convolution",
        convolution(nn.ConvTranspose2d(4, 4, 2, groups=2, dilation=2), nn.ReLU(), features=64),
        gaussian(7, 4, 2, 2),
        {"0.weight": Matrix("columns first", groups=2), "3.weight": ROWS_FIRST},
    ),
    _case(
        "transposed convolution, wide output padding",
        convolution(nn.ConvTranspose1d(2, 3, 2, dilation=3, output_padding=2), nn.ReLU(), features=30),
        gaussian(7, 2, 5),
        {"0.weight": COLUMNS_FIRST, "3.weight": ROWS_FIRST},
    ),
    _case(
        "batch normalization",
        lambda: normalized(nn.BatchNorm2d(4)),
        IMAGE,
        {"0.weight": ROWS_FIRST, "5.weight": ROWS_FIRST},
    ),
    _case(
        "GPT-2 layers",
        lambda: nn.Sequential(Conv1D(4, 5), nn.ReLU(), Conv1D(5, 3)),
        X4,
        dict.fromkeys(["0.weight", "2.weight"], COLUMNS_FIRST),
    ),
    _case(
        "GPT-2 layers over sequences",
        lambda: nn.Sequential(Conv1D(3, 4), nn.ReLU(), nn.Flatten(), Conv1D(12, 3)),
        gaussian(7, 3, 3),
        {"0.weight": COLUMNS_FIRST, "3.weight": COLUMNS_FIRST},
    ),
    _case(
        "x @ W and x @ W.permute",
        lambda: Function(lambda m, x: F.relu(x @ m.a.permute(1, 0) + m.b) @ m.c, a=(5, 4), b=(5,), c=(5, 3)),
        X4,
        {"a": ROWS_FIRST, "c": COLUMNS_FIRST},
    ),
    _case(
        "matmul by function, transposed twice",
        lambda: Function(lambda m, x: torch.matmul(torch.mm(x, m.a.T).clamp(min=0), m.c.T.T), a=(5, 4), c=(5, 3)),
        X4,
        {"a": ROWS_FIRST, "c": COLUMNS_FIRST},
    ),
    _case(
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
    _case(
        "embedding",
        Words,
        tokens(9, 4, 6),
        {"embedding.weight": COLUMNS_FIRST, "inner.weight": ROWS_FIRST, "last.weight": ROWS_FIRST},
    ),
    _case(
        "embedding with padding",
        lambda: Words(padding=0),
        lambda g: torch.cat([torch.randint(1, 6, (4, 4), generator=g), torch.randint(0, 2, (5, 4), generator=g)]),
        {"embedding.weight": COLUMNS_FIRST, "inner.weight": ROWS_FIRST, "last.weight": ROWS_FIRST},
    ),
    _case(
        "embedding with padding from the start",
        lambda: Words(padding=0),
        lambda g: torch.randint(0, 3, (9, 4), generator=g),
        {"embedding.weight": COLUMNS_FIRST, "inner.weight": ROWS_FIRST, "last.weight": ROWS_FIRST},
    ),
    _case(
        "embedding looked up twice",
        Pair,
        # Tokens of both inputs differ in the first samples and meet later.
        lambda g: (torch.tensor([[0, 1], [2, 0]] + [[1, 2]] * 5), torch.tensor([[3, 4], [4, 5]] + [[1, 3]] * 5)),
        {"embedding.weight": COLUMNS_FIRST, "last.weight": ROWS_FIRST},
    ),
    _case(
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
    _case(
        "a matrix at two positions",
        lambda: Function(lambda m, x: (x[:, 0] @ m.a + F.relu(x[:, 1] @ m.a)) @ m.c, a=(3, 4), c=(4, 3)),
        gaussian(7, 2, 3),
        {"a": COLUMNS_FIRST, "c": COLUMNS_FIRST},
    ),
    _case(
        "samples inside a merged dimension",
        lambda: Function(
            lambda m, x: F.relu(x.transpose(0, 1).reshape(-1, 3) @ m.a).view(2, -1, 4).mean(0) @ m.c, a=(3, 4), c=(4, 3)
        ),
        gaussian(7, 2, 3),
        {"a": COLUMNS_FIRST, "c": COLUMNS_FIRST},
    ),
    _case(
        "maxout",
        lambda: Function(lambda m, x: torch.maximum(x @ m.a, x @ m.b) @ m.c, a=(4, 5), b=(4, 5), c=(5, 3)),
        X4,
        dict.fromkeys("abc", COLUMNS_FIRST),
    ),
    _case(
        "linear over sequences",
        sequential(nn.Linear(3, 4), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)),
        gaussian(7, 3, 3),
        {"0.weight": ROWS_FIRST, "3.weight": ROWS_FIRST},
    ),
    _case("sequence first", SequenceFirst, gaussian(7, 2, 3), {"inner.weight": ROWS_FIRST, "last.weight": ROWS_FIRST}),
    _case(
        "an output for every position",
        lambda: nn.Conv1d(2, 3, 3, padding=1),
        gaussian(5, 2, 4),
        {"weight": ROWS_FIRST},
        targets=lambda g: torch.randint(0, 3, (5, 4), generator=g),
    ),
]

ESTIMATED = [
    _case("GELU", lambda: mlp(activation=nn.GELU), X4, chain(0, 2, 4), estimated=frozenset(["0.weight", "2.weight"])),
    _case(
        "tanh, squared error",
        lambda: mlp(activation=nn.Tanh),
        X4,
        chain(0, 2, 4),
        loss="mse",
        estimated=frozenset(["0.weight", "2.weight"]),
    ),
    _case(
        "a module used twice",
        Twice,
        X4,
        {"shared.weight": ROWS_FIRST, "last.weight": ROWS_FIRST},
        estimated=frozenset(["shared.weight"]),
    ),
    _case(
        "tied weights",
        Tied,
        X4,
        {"first.weight": ROWS_FIRST, "last.weight": ROWS_FIRST},
        estimated=frozenset(["first.weight"]),
    ),
    _case(
        "layer normalization",
        lambda: normalized(nn.LayerNorm(4), convolution=False),
        X4,
        {"0.weight": ROWS_FIRST, "3.weight": ROWS_FIRST},
        estimated=frozenset(["0.weight"]),
    ),
    _case(
        "group normalization",
        lambda: normalized(nn.GroupNorm(2, 4)),
        IMAGE,
        {"0.weight": ROWS_FIRST, "5.weight": ROWS_FIRST},
        estimated=frozenset(["0.weight"]),
    ),
    _case(
        "a scale used in two ways",
        lambda: Function(lambda m, x: F.relu(x @ m.a.t() * m.s) @ m.c * m.s.exp().sum(), a=(5, 4), s=(5,), c=(5, 3)),
        X4,
        {"a": ROWS_FIRST, "c": COLUMNS_FIRST},
        estimated_vectors=True,
    ),
    _case(
        "a slope used twice",
        lambda: Function(lambda m, x: F.prelu(F.prelu(x @ m.a.t(), m.s) @ m.c, m.s), a=(5, 4), s=(1,), c=(5, 3)),
        X4,
        {"a": ROWS_FIRST, "c": COLUMNS_FIRST},
        estimated_vectors=True,
    ),
    _case(
        "an embedding that is the last layer too",
        TiedHead,
        tokens(8, 4, 5),
        {"embedding.weight": COLUMNS_FIRST, "inner.weight": ROWS_FIRST},
        outputs=5,
        estimated=frozenset(["embedding.weight"]),
    ),
    _case(
        "a layer that is not used",
        Unused,
        X4,
        dict.fromkeys(["first.weight", "aside.weight", "last.weight"], ROWS_FIRST),
        estimated=frozenset(["aside.weight"]),
    ),
    _case(
        "the matrix first",
        lambda: Function(lambda m, x: F.relu(m.a @ x.t()).t() @ m.c, a=(5, 4), c=(5, 3)),
        X4,
        {"a": ROWS_FIRST, "c": COLUMNS_FIRST},
        estimated=frozenset(["a"]),
    ),
    _case(
        "a gate",
        lambda: Function(lambda m, x: (x @ m.a * F.silu(x @ m.b)) @ m.c, a=(4, 5), b=(4, 5), c=(5, 3)),
        X4,
        dict.fromkeys("abc", COLUMNS_FIRST),
        estimated=frozenset("b"),
    ),
    _case(
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
