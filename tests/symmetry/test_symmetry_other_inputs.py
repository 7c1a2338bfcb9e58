"""A rescaling that is found leaves the function alone for other inputs than the example too: longer ones above all."""

import pytest
import torch
from torch import Tensor, nn

import spiritlevel as sl


class Positions(nn.Module):
    """A table of positions, sliced to the length of the input, as many language models have it."""

    def __init__(self, shape: tuple[int, ...], norm: bool) -> None:
        super().__init__()
        self.token = nn.Embedding(7, 4)
        self.position = nn.Parameter(torch.randn(shape))
        self.norm = nn.LayerNorm(4) if norm else nn.Identity()
        self.hidden, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        table = self.position[:, :length] if self.position.dim() == 3 else self.position[:length]
        return self.head(torch.relu(self.hidden(self.norm(self.token(tokens) + table))))


class Distances(nn.Module):
    """Attention with a bias for every distance between positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4) for _ in range(4))
        self.table = nn.Parameter(torch.randn(15))

    def forward(self, x: Tensor) -> Tensor:
        i = torch.arange(x.shape[1])
        scores = self.q(x) @ self.k(x).mT + self.table[i[:, None] - i[None] + 7]
        return self.o(scores.softmax(-1) @ self.v(x))


class Recurrent(nn.Module):
    """Its first state is zero, so that a single step says nothing about the recurrent weights."""

    def __init__(self) -> None:
        super().__init__()
        self.r, self.o = nn.RNN(3, 5, nonlinearity="relu", batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.r(x)[0])


class Sines(nn.Module):
    """Sinusoidal positions, the first row of which is half zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1], dtype=x.dtype)
        return self.b(torch.relu(self.a(x) + torch.cat([angles.sin(), angles.cos()], dim=1)))


class Read(nn.Module):
    """Reads the first rows of a table behind, or in front of, something else that is done with it."""

    def __init__(self, read, shape: tuple[int, ...] = (8, 4)) -> None:
        super().__init__()
        self.table, self.read = nn.Parameter(torch.randn(shape)), read
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(self.read(x, self.table, x.shape[1]))))


class Decaying(nn.Module):
    """h ← a·h + Wx from zero: what an example of one step says nothing about."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.w, self.o = nn.Parameter(torch.rand(4)), nn.Linear(3, 4, bias=False), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 4)
        for step in range(x.shape[1]):
            h = h * self.decay + self.w(x[:, step])
        return self.o(h)


def tokens(length: int) -> Tensor:
    return torch.randint(7, (2, length), generator=torch.Generator().manual_seed(length))


def vectors(width: int):
    return lambda length: torch.randn(2, length, width, generator=torch.Generator().manual_seed(length)).double()


# Network, inputs of a length, lengths of a short and of the longest input, and how many factors there are.
CASES = {
    "positions": (lambda: Positions((8, 4), norm=False), tokens, 3, 8, 10),
    "positions behind a normalization": (lambda: Positions((1, 8, 4), norm=True), tokens, 3, 8, None),
    "distances": (Distances, vectors(4), 3, 8, None),
    "mixing by a softmax": (
        lambda: Read(lambda x, p, n: p[:n, :n].softmax(-1) @ x, (8, 8)),
        vectors(4),
        3,
        8,
        None,
    ),
    "positions behind a bend": (lambda: Read(lambda x, p, n: x + torch.tanh(p[:n])), vectors(4), 3, 8, None),
    "a gate": (lambda: Read(lambda x, p, n: x * torch.sigmoid(p[:n])), vectors(4), 3, 8, None),
    "a copy": (lambda: Read(lambda x, p, n: x + p.clone()[:n]), vectors(4), 3, 8, None),
    "a multiple": (lambda: Read(lambda x, p, n: x + (0.1 * p)[:n]), vectors(4), 3, 8, None),
    "one step of a decay": (Decaying, vectors(3), 1, 6, None),
    "a recurrent network": (Recurrent, vectors(3), 3, 6, 5),
    "one step of a recurrent network": (Recurrent, vectors(3), 1, 6, 0),
    "sines": (Sines, vectors(4), 3, 7, None),
    "the first of sines": (Sines, vectors(4), 1, 7, None),
}


@pytest.mark.parametrize("name", CASES)
def test_twins_agree_on_longer_inputs_than_the_example(name: str) -> None:
    torch.manual_seed(0)
    build, inputs, short, longest, factors = CASES[name]
    model = build().double().eval()
    symmetries = sl.find_symmetries(model, inputs(short))
    assert factors is None or symmetries.dimension == factors
    if short > 1:
        assert symmetries.dimension == sl.find_symmetries(model, inputs(longest)).dimension
    twins = [symmetries.sample(1.0, seed=0).apply(model), sl.canonicalize(model, inputs(short))]
    for twin in twins:
        for length in (short, longest):
            torch.testing.assert_close(twin(inputs(length)), model(inputs(length)), rtol=1e-9, atol=1e-9)
