"""The networks of the table of cases, of at most a few hundred parameters each."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def sequential(*parts: nn.Module) -> Callable[[], nn.Module]:
    """A network of copies of `parts`, initialized when it is built."""

    def build() -> nn.Module:
        model = copy.deepcopy(nn.Sequential(*parts))  # fresh modules at every call, whatever became of the last ones
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        return model

    return build


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


def convolution(*parts: nn.Module, features: int) -> Callable[[], nn.Module]:
    return sequential(*parts, nn.Flatten(), nn.Linear(features, 3))
