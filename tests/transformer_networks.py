"""Small networks whose channels can be mixed: attention of every kind, adapters, linear maps in a row."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks import mlp, randomized


class RMSNorm(nn.Module):
    """Written by hand, as in Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def rotary(x: Tensor) -> Tensor:
    """Rotary positions for [batch, heads, positions, channels]."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * 3.0 ** -torch.arange(half, dtype=x.dtype)
    cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Attention(nn.Module):
    """Attention by hand: heads of any sizes, grouped queries, rotary positions, normalized queries and keys."""

    def __init__(
        self,
        width: int,
        sizes: tuple[int, ...],
        *,
        shared: int = 1,
        bias: bool = False,
        rotary: bool = False,
        normed: bool = False,
        tied: bool = False,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.sizes, self.shared, self.rotary, self.normed, self.causal = sizes, shared, rotary, normed, causal
        keys, queries = sum(sizes), shared * sum(sizes)
        self.q = nn.Linear(width, queries, bias=bias)
        self.k = self.q if tied else nn.Linear(width, keys, bias=bias)
        self.v, self.o = nn.Linear(width, keys, bias=bias), nn.Linear(queries, width, bias=bias)
        self.q_norm, self.k_norm = (RMSNorm(sizes[0]) if normed else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for q, k, v in zip(
            self.q(x).split([n for n in self.sizes for _ in range(self.shared)], -1),
            (k for k in self.k(x).split(self.sizes, -1) for _ in range(self.shared)),
            (v for v in self.v(x).split(self.sizes, -1) for _ in range(self.shared)),
            strict=True,
        ):
            q, k = self.q_norm(q), self.k_norm(k)
            if self.rotary:
                q, k = rotary(q[:, None])[:, 0], rotary(k[:, None])[:, 0]
            scores = q @ k.mT / q.shape[-1] ** 0.5
            if self.causal:
                scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
            found.append(scores.softmax(-1) @ v)
        return self.o(torch.cat(found, -1))


class Fused(nn.Module):
    """One matrix for queries, keys and values, and the fused kernel."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.o = (
            heads,
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), between an embedding and a last layer."""

    def __init__(self, tokens: int, width: int, attention: nn.Module, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(tokens, width), attention
        self.norms = nn.ModuleList(norm(width) for _ in range(3))
        self.up, self.down = nn.Linear(width, 5, bias=False), nn.Linear(5, width, bias=False)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.attention(self.norms[0](x))
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return self.head(self.norms[2](x))


class Adapter(nn.Module):
    """A linear layer plus a product of two thin ones, each with an input of its own (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(4, 5), nn.Linear(4, 2, bias=False), nn.Linear(2, 5, bias=False)
        self.last = nn.Linear(5, 4)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.base(x) + self.b(self.a(x))).tanh())


class Multihead(nn.Module):
    """torch's own attention, read by a last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, bias=False, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def bottleneck() -> nn.Sequential:
    """Two convolutions of size one with nothing between them."""
    first, second = nn.Conv2d(4, 2, 1, bias=False), nn.Conv2d(2, 5, 1, bias=False)
    return nn.Sequential(first, second, nn.Tanh(), nn.Conv2d(5, 3, 3), nn.Flatten())


def made(build: Callable[[], nn.Module], shape: tuple[int, ...], tokens: int = 0) -> tuple[nn.Module, Tensor]:
    """A randomized network and an input for it: real numbers, or tokens."""
    torch.manual_seed(0)
    model, generator = randomized(build()), torch.Generator().manual_seed(1)
    if tokens:
        return model, torch.randint(0, tokens, shape, generator=generator)
    return model, torch.randn(shape, generator=generator, dtype=torch.float64)


def block(width: int = 4, norm: Callable[[int], nn.Module] = RMSNorm, **options: bool | int) -> Callable[[], nn.Module]:
    return lambda: Block(9, width, Attention(width, (2, 2), **options), norm)  # type: ignore[arg-type]


def plain_norm(width: int) -> nn.Module:
    """A layer normalization without a shift."""
    return nn.LayerNorm(width, bias=False)


SEQUENCE = (3, 4, 6)
# For each network: how to build it, the shape of its input, the number of tokens, and its linear and rotation dimensions.
GROUPS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int, int]] = {
    "linear maps in a row": (lambda: mlp(5, 3, 4, bias=False, activation=nn.Identity), (7, 5), 0, 9, 0),
    "three in a row": (lambda: mlp(5, 4, 3, 6, bias=False, activation=nn.Identity), (7, 5), 0, 16 + 9, 0),
    "wider than it reads": (lambda: mlp(2, 4, 4, 3, bias=False, activation=nn.Identity), (7, 2), 0, 16 + 16, 0),
    "multihead": (Multihead, SEQUENCE, 0, 4 * 9, 0),
    "by hand": (lambda: Attention(6, (3, 3)), SEQUENCE, 0, 4 * 9, 0),
    "causal": (lambda: Attention(6, (3, 3), causal=True), SEQUENCE, 0, 4 * 9, 0),
    "fused": (lambda: Fused(6, 2), SEQUENCE, 0, 4 * 9, 0),
    "heads of unequal size": (lambda: Attention(6, (2, 3)), SEQUENCE, 0, 2 * (4 + 9), 0),
    "grouped queries": (lambda: Attention(6, (2, 2), shared=2), SEQUENCE, 0, 2 * (4 + 4), 0),
    "rotary": (lambda: Attention(6, (4,), rotary=True), SEQUENCE, 0, 4 + 16, 0),
    "rotary and grouped": (lambda: Attention(6, (4, 4), shared=2, rotary=True), (3, 5, 6), 0, 2 * (4 + 16), 0),
    "normalized queries": (lambda: Attention(6, (3, 3), normed=True), SEQUENCE, 0, 2 * 9, 0),
    "tied query and key": (lambda: Attention(6, (3, 3), tied=True), SEQUENCE, 0, 2 * 9, 0),
    "adapter": (Adapter, (7, 4), 0, 4, 0),
    "bottleneck": (bottleneck, (3, 4, 5, 5), 0, 4, 0),
    "block": (block(), (4, 4), 9, 4 * 4, 6),
    "block with rotary positions": (block(rotary=True), (4, 4), 9, 2 * 2 + 2 * 4, 6),
    "block with layer normalization": (block(norm=plain_norm), (4, 4), 9, 4 * 4, 3),
}
