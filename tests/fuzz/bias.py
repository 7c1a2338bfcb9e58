"""`make bias`: are estimates that are not linear in the Hessian biased, and do their errors hold?

Six networks of at most a thousand parameters, each measured with many seeds and the default number of probes, beside the
definition from the whole Hessian in float64: z = (value − definition) / error. A table goes to standard output.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import spiritlevel as sl
from dense_oracle import Matrix
from fuzz.networks import _Once
from fuzz.oracle import Quantities, Truth, _gradient, truths
from spiritlevel.problem import batches

MEASURES = ("normalized_sharpness", "matrix_normalized_sharpness", "kappa_trace_max", "rho_max", "rho_row_max")
# What the rule asks for: the mean of z, and how many definitions lie within two errors.
MOST_BIAS, LEAST_WITHIN = 0.5, 0.9


class Attention(nn.Module):
    """Two heads of softmax attention; `rotary` turns queries and keys by their place and looks at the past only."""

    def __init__(self, width: int, *, rotary: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=not rotary) for _ in range(4))
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = (self._heads(layer(x)) for layer in (self.query, self.key, self.value))
        if self.rotary:
            queries, keys = _turned(queries), _turned(keys)
        scores = queries @ keys.mT / queries.shape[-1] ** 0.5
        if self.rotary:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -1e9)
        return self.out((scores.softmax(-1) @ values).transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (2, -1)).transpose(1, 2)


def _turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2]).to(x)[:, None] * 10.0 ** -torch.arange(half).to(x)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], -1)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.attention = nn.Embedding(10, 8), Attention(8, rotary=True)
        self.norms = nn.ModuleList(RMSNorm(8) for _ in range(3))
        self.gate, self.up, self.down = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)  # fmt: skip
        self.head = nn.Linear(8, 10, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        x = x + self.attention(self.norms[0](x))
        inner = self.norms[1](x)
        x = x + self.down(F.silu(self.gate(inner)) * self.up(inner))
        return self.head(self.norms[2](x)[:, -1])


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.attention = nn.Embedding(10, 8), Attention(8, rotary=False)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        x = self.norms[0](x + self.attention(x))
        return self.head(self.norms[1](x + self.down(F.gelu(self.up(x))))[:, 0])


class Lora(nn.Module):
    """A frozen network, and a low-rank change of its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.head = nn.Linear(12, 16).requires_grad_(False), nn.Linear(16, 3).requires_grad_(False)
        self.a, self.b = nn.Linear(12, 6, bias=False), nn.Linear(6, 16, bias=False)
        self.b.weight.data.mul_(0.05)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.frozen(x) + self.b(self.a(x))))


class OnceDifferentiable(nn.Module):
    """x·|x|/2 without a second derivative; the honest copy has it."""

    honest = False

    def forward(self, x: Tensor) -> Tensor:
        return x * x.abs() / 2 if self.honest else _Once.apply(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.again, self.out = nn.Linear(6, 20), nn.Linear(20, 20), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.tanh(self.into(x))
        for _ in range(3):
            state = torch.tanh(self.again(state) + self.into(x))
        return self.out(state)


@dataclass
class Case:
    """whole: measured through a loss of the form (model, batch), so that outputs are not seen."""

    title: str
    build: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    steps: int
    whole: bool = False


def _words(samples: int, classes: int, label: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    words = torch.randint(0, 10, (samples, 6))
    return words, label(words) % classes


def _numbers(samples: int, width: int, classes: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(samples, width).double()
    return x, x[:, :classes].argmax(1)


def _gelu() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 14), nn.GELU(), nn.Linear(14, 14), nn.GELU(), nn.Linear(14, 4))


def _once() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 14), OnceDifferentiable(), nn.Linear(14, 12), nn.Tanh(), nn.Linear(12, 4))


CASES = (
    Case("Llama-type", Llama, lambda: _words(24, 10, lambda words: 3 * words[:, 0] + words[:, 2]), 20),
    Case("LoRA, loss of (model, batch)", Lora, lambda: _numbers(40, 12, 3), 60, whole=True),
    Case("BERT-type", Bert, lambda: _words(40, 3, lambda words: words[:, 1]), 150),
    Case("once differentiable", _once, lambda: _numbers(60, 10, 4), 60),
    Case("GELU", _gelu, lambda: _numbers(60, 10, 4), 150),
    Case("recurrent, loss of (model, batch)", Recurrent, lambda: _numbers(40, 6, 3), 30, whole=True),
)


def trained(case: Case) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(3)
    model, (x, y) = case.build().double(), case.data()
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], 0.01)
    for _ in range(case.steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, x, y


def definitions(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Truth]:
    """Every measure from the whole Hessian."""
    OnceDifferentiable.honest = True
    try:
        values = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
        leaves = {name: each.clone().requires_grad_() for name, each in values.items()}
        gradient = _gradient(F.cross_entropy(functional_call(model, leaves, (x,)), y), leaves, create=True)
        hessian = torch.stack([_gradient(entry, leaves) for entry in gradient]).detach()
    finally:
        OnceDifferentiable.honest = False
    ends = np.cumsum([each.numel() for each in values.values()]).tolist()
    slices = {name: slice(end - each.numel(), end) for end, (name, each) in zip(ends, values.items(), strict=True)}
    kinds = {f"{name}.weight": _orientation(module) for name, module in model.named_modules()}
    q = Quantities(
        ((hessian + hessian.T) / 2).numpy(),
        torch.cat([each.reshape(-1) for each in values.values()]).numpy(),
        slices,
        {name: tuple(each.shape) for name, each in values.items()},
        np.zeros(1),
        {name: kind for name, kind in kinds.items() if kind is not None and name in values},
        0.0,
    )
    return truths(q, MEASURES)


def _orientation(module: nn.Module) -> Matrix | None:
    if isinstance(module, nn.Embedding):
        return Matrix("columns first")
    return Matrix() if isinstance(module, nn.Linear) else None


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch["x"]), batch["y"]), len(batch["y"])


def readings(case: Case, seeds: int) -> Iterator[tuple[str, bool, np.ndarray]]:
    """Of every measure: its name, whether it is exact or the same with every seed, and z of every seed."""
    model, x, y = trained(case)
    expected = definitions(model, x, y)
    what: tuple[Any, Any] = ([{"x": x, "y": y}], _loss) if case.whole else ((x, y), "cross_entropy")
    reports = [sl.measure(model, *what, measures=list(MEASURES), seed=seed) for seed in range(seeds)]
    for name in MEASURES:
        found = [report[name] for report in reports]
        z = np.array([(each.value - expected[name].value) / each.error for each in found])
        yield name, found[0].exact or (seeds > 1 and len({each.value for each in found}) == 1), z


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz.bias", description=__doc__)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--network", default="", help="only those whose names hold this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    batches.SMALL = 0  # small networks as large ones: their curvature is estimated, not written down
    print("| network | measure | mean z | within one error | within two |\n| --- | --- | ---: | ---: | ---: |")
    outside = 0
    for case in [case for case in CASES if arguments.network in case.title]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, exact, z in readings(case, arguments.seeds):
                one, two = (np.mean(np.abs(z) <= count) for count in (1, 2))
                outside += two < LEAST_WITHIN or (not exact and abs(z.mean()) > MOST_BIAS)
                said = f"exact | {one:.0%} | {two:.0%}" if exact else f"{z.mean():+.2f} | {one:.0%} | {two:.0%}"
                print(f"| {case.title} | `{name}` | {said} |", flush=True)
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
