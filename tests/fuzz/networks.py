"""Families of small networks, ordinary and odd, each from a recipe that prints as code."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from dense_oracle import Matrix

ROWS_FIRST, COLUMNS_FIRST = Matrix(), Matrix("columns first")
FEATURES, VOCABULARY, LENGTH, SIDE = 4, 5, 3, 4


@dataclass(frozen=True)
class Network:
    """What a network is made of. Not every family reads every entry."""

    family: str = "mlp"
    activation: str = "relu"
    depth: int = 1
    width: int = 3
    bias: bool = True
    norm: str = "none"
    seed: int = 0


class _Once(torch.autograd.Function):
    """x·|x|/2 with a backward pass of its own that cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.abs() / 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.abs()


class OnceDifferentiable(nn.Module):
    """An activation without second derivative; the honest copy has it."""

    honest = False

    def forward(self, x: Tensor) -> Tensor:
        return x * x.abs() / 2 if self.honest else _Once.apply(x)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class GradientReversal(nn.Module):
    """Passes its input on and turns gradients round, as domain-adversarial training does."""

    honest = False

    def forward(self, x: Tensor) -> Tensor:
        return x if self.honest else _Reversed.apply(x)


class Squares(nn.Module):
    """Squares an activation where it is large, decided batch by batch: most batches take the other path."""

    def forward(self, h: Tensor) -> Tensor:
        hot = h.flatten(1).amax(1) > 1.0
        if bool(hot.any()):
            h = torch.where(hot.view(-1, *[1] * (h.dim() - 1)), h * h, h)
        return h


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky": lambda: nn.LeakyReLU(0.2),
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "softplus": nn.Softplus,
    "squares": Squares,
    "identity": nn.Identity,
}
ODD_ACTIVATIONS = {"once": OnceDifferentiable, "reversal": lambda: nn.Sequential(GradientReversal(), nn.ReLU())}


def activation(recipe: Network) -> nn.Module:
    return {**ACTIVATIONS, **ODD_ACTIVATIONS}[recipe.activation]()


def norm(recipe: Network, channels: int, spatial: bool = False) -> nn.Module:
    """A normalization with statistics, scales and shifts that are not those of a fresh layer."""
    if recipe.norm == "none":
        return nn.Identity()
    batch = nn.BatchNorm2d(channels) if spatial else nn.BatchNorm1d(channels)
    layer: nn.Module = batch if recipe.norm == "batch" else nn.GroupNorm(1, channels)
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        if tensor.is_floating_point():
            spread = torch.randn(tensor.shape) * 0.3
            tensor.data.copy_(1 + spread.abs() if name in ("weight", "running_var") else spread)
    return layer


class Mlp(nn.Module):
    inputs = "vectors"

    def __init__(self, recipe: Network, outputs: int) -> None:
        super().__init__()
        self.body = nn.ModuleList()
        width = FEATURES
        for _ in range(recipe.depth):
            self.body.append(nn.Linear(width, recipe.width, bias=recipe.bias))
            self.body.append(norm(recipe, recipe.width))
            self.body.append(activation(recipe))
            width = recipe.width
        self.head = nn.Linear(width, outputs, bias=recipe.bias)

    def features(self, x: Tensor) -> Tensor:
        for part in self.body:
            x = part(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Dead(Mlp):
    """One neuron never fires, one has no outgoing weight, one input is not connected."""

    def __init__(self, recipe: Network, outputs: int) -> None:
        super().__init__(recipe, outputs)
        with torch.no_grad():
            first = self.body[0]
            first.weight[:, 1] = 0
            first.weight[0] = 0
            if first.bias is not None:
                first.bias[0] = -1.0
            self.head.weight[:, -1] = 0


class Constant(Mlp):
    """Outputs that do not depend on the inputs."""

    def __init__(self, recipe: Network, outputs: int) -> None:
        super().__init__(recipe, outputs)
        nn.init.zeros_(self.head.weight)


class Narrow(Mlp):
    """A second path of width zero beside the first."""

    def __init__(self, recipe: Network, outputs: int) -> None:
        super().__init__(recipe, outputs)
        self.none, self.nowhere = nn.Linear(FEATURES, 0), nn.Linear(0, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.nowhere(self.none(x))


class Blind(Mlp):
    """A forward pass that records no gradient; the honest copy records it."""

    honest = False

    def forward(self, x: Tensor) -> Tensor:
        if self.honest:
            return super().forward(x)
        with torch.no_grad():
            return super().forward(x)


class Residual(nn.Module):
    inputs = "vectors"

    def __init__(self, recipe: Network, outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, recipe.width, bias=recipe.bias)
        self.inner = nn.Linear(recipe.width, recipe.width, bias=recipe.bias)
        self.norm, self.activation = norm(recipe, recipe.width), activation(recipe)
        self.head = nn.Linear(recipe.width + FEATURES, outputs, bias=recipe.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(self.first(x))
        h = h + self.activation(self.norm(self.inner(h)))
        return self.head(torch.cat([h, x], 1))


class Shared(nn.Module):
    """One matrix at two depths."""

    inputs = "vectors"

    def __init__(self, recipe: Network, outputs: int) -> None:
        super().__init__()
        self.shared = nn.Linear(FEATURES, FEATURES, bias=recipe.bias)
        self.activation = activation(recipe)
        self.head = nn.Linear(FEATURES, outputs, bias=recipe.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.activation(self.shared(self.activation(self.shared(x)))))


class Experts(nn.Module):
    """Every sample goes to one expert; the last expert gets none of them."""

    inputs = "vectors"

    def __init__(self, recipe: Network, outputs: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(FEATURES, recipe.width, bias=recipe.bias) for _ in range(3))
        self.activation = activation(recipe)
        self.head = nn.Linear(recipe.width, outputs, bias=recipe.bias)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > x[:, 1]).long()
        mixed = x.new_zeros(len(x), self.head.in_features)
        for index, expert in enumerate(self.experts):
            mine = (chosen == index).nonzero()[:, 0]
            if len(mine):
                mixed = mixed.index_add(0, mine, self.activation(expert(x[mine])))
        return self.head(mixed)


class Convolution(nn.Module):
    inputs = "images"

    def __init__(self, recipe: Network, outputs: int) -> None:
        super().__init__()
        channels = min(recipe.width, 3)
        self.first = nn.Conv2d(1, channels, 2, bias=recipe.bias)
        self.norm, self.activation = norm(recipe, channels, spatial=True), activation(recipe)
        self.pool = nn.MaxPool2d(2, 1) if recipe.depth > 1 else nn.AvgPool2d(2, 1)
        self.head = nn.Linear(channels * (SIDE - 2) ** 2, outputs, bias=recipe.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.activation(self.norm(self.first(x)))).flatten(1))


class Words(nn.Module):
    inputs = "tokens"

    def __init__(self, recipe: Network, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 3, padding_idx=0 if recipe.depth > 1 else None)
        self.inner, self.activation = nn.Linear(3, recipe.width, bias=recipe.bias), activation(recipe)
        self.head = nn.Linear(recipe.width, outputs, bias=recipe.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.activation(self.inner(self.embedding(x))).mean(1))


class Attention(nn.Module):
    inputs = "sequences"

    def __init__(self, recipe: Network, outputs: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(FEATURES, 2, batch_first=True, bias=recipe.bias)
        self.head = nn.Linear(FEATURES, outputs, bias=recipe.bias)

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.attention(x, x, x, need_weights=False)
        return self.head(mixed.mean(1))


class Clamping(Mlp):
    """Writes to its own weights as it runs; they are within the bounds already, so that nothing changes."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-1e30, 1e30)
        return super().forward(x)


class Gated(nn.Module):
    """A gate: linear in one matrix, curved in the other."""

    inputs = "vectors"

    def __init__(self, recipe: Network, outputs: int) -> None:
        super().__init__()
        self.value = nn.Linear(FEATURES, recipe.width, bias=recipe.bias)
        self.gate = nn.Linear(FEATURES, recipe.width, bias=recipe.bias)
        self.head = nn.Linear(recipe.width, outputs, bias=recipe.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.value(x) * F.silu(self.gate(x)))


class InputsFirst(nn.Module):
    """A matrix that is stored with its inputs first, multiplied in one of the ways to write that down."""

    ways: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
        lambda x, w: torch.einsum("io,bi->bo", w, x),
        lambda x, w: torch.einsum("bi,io", x, w),
        lambda x, w: torch.tensordot(x, w, ([1], [0])),
        lambda x, w: (w.T @ x.T).T,
        lambda x, w: torch.mm(x, mat2=w),
        lambda x, w: F.linear(x, w.T.contiguous()),
        lambda x, w: torch.addmm(x.new_zeros(1), x, w, alpha=1),
        lambda x, w: torch.stack([row @ w for row in x]),
    )

    def __init__(self, inputs: int, outputs: int, way: int) -> None:
        super().__init__()
        self.weight, self.times = nn.Parameter(torch.randn(inputs, outputs) / 2), self.ways[way % len(self.ways)]

    def forward(self, x: Tensor) -> Tensor:
        return self.times(x, self.weight)


class Spelled(nn.Module):
    """Products that are not written as a linear layer."""

    inputs = "vectors"

    def __init__(self, recipe: Network, outputs: int) -> None:
        super().__init__()
        self.first = InputsFirst(FEATURES, recipe.width, recipe.seed)
        self.activation = activation(recipe)
        self.head = InputsFirst(recipe.width, outputs, recipe.seed // len(InputsFirst.ways))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.activation(self.first(x)))


class Recurrent(nn.Module):
    inputs = "sequences"

    def __init__(self, recipe: Network, outputs: int) -> None:
        super().__init__()
        kind = nn.GRU if recipe.depth > 1 else nn.LSTM
        self.recurrent = kind(FEATURES, min(recipe.width, 2), batch_first=True, bias=recipe.bias)
        self.head = nn.Linear(min(recipe.width, 2), outputs, bias=recipe.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


class Mixing(Mlp):
    """Samples know of one another in the hidden layer, in one of the ways that happen by oversight."""

    ways: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda h: h - h.mean(0),
        lambda h: h + h.roll(1, 0),
        lambda h: h / (1 + h.norm()),
        lambda h: h.cumsum(0) / len(h),
        lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None])[0],
        lambda h: h.cummax(0).values,
        lambda h: torch.where(h == h.amax(0), h, 0 * h),
    )

    def __init__(self, recipe: Network, outputs: int) -> None:
        super().__init__(recipe, outputs)
        self.mixed = self.ways[recipe.seed % len(self.ways)]

    def features(self, x: Tensor) -> Tensor:
        return self.mixed(super().features(x))


FAMILIES: dict[str, type[nn.Module]] = {
    "mlp": Mlp,
    "residual": Residual,
    "convolution": Convolution,
    "shared": Shared,
    "experts": Experts,
    "words": Words,
    "attention": Attention,
    "gated": Gated,
    "spelled": Spelled,
    "recurrent": Recurrent,
    "dead": Dead,
    "constant": Constant,
    "narrow": Narrow,
    "blind": Blind,
    "clamping": Clamping,
    "mixing": Mixing,
}


def build(recipe: Network, outputs: int) -> nn.Module:
    """The network in float64 and eval mode, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = FAMILIES[recipe.family](recipe, outputs)
        for name, parameter in model.named_parameters():
            if name.endswith("bias") and recipe.family != "dead":
                nn.init.normal_(parameter, std=0.2)
    return model.double().eval()


def matrices(model: nn.Module) -> dict[str, Matrix]:
    """Every weight that serves as a matrix, with how it is stored."""
    found = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, nn.Linear | nn.Conv2d) and module.weight.numel():
            found[f"{prefix}weight"] = ROWS_FIRST
        elif isinstance(module, nn.Embedding | InputsFirst):
            found[f"{prefix}weight"] = COLUMNS_FIRST
        elif isinstance(module, nn.MultiheadAttention):
            found[f"{prefix}in_proj_weight"] = ROWS_FIRST
        elif isinstance(module, nn.RNNBase):
            found |= {f"{prefix}weight_{side}_l0": ROWS_FIRST for side in ("ih", "hh")}
    return found


def reached(model: nn.Module, inputs: Tensor) -> dict[str, Matrix]:
    """Those matrices that a sample reaches: what does not run is no layer, and has no curvature unless it decays."""
    ran: list[nn.Module] = []
    handles = [each.register_forward_hook(lambda module, *_: ran.append(module)) for each in model.modules()]
    with torch.no_grad():
        model(inputs)
    for handle in handles:
        handle.remove()
    whole = nn.MultiheadAttention  # calls functions with the weights of its parts
    running = {id(weight) for module in ran for weight in module.parameters(recurse=isinstance(module, whole))}
    return {name: how for name, how in matrices(model).items() if id(model.get_parameter(name)) in running}


def set_honest(model: nn.Module, penalty: float) -> nn.Module:
    """Derivatives are those of the function: what hides them in the network under test is undone.

    torch holds the row of a padding index fixed. A row that decays is not, and what it looks up moves with it.
    """
    for module in model.modules():
        if hasattr(module, "honest"):
            module.honest = True
        if penalty and isinstance(module, nn.Embedding):
            module.padding_idx = None
    return model
