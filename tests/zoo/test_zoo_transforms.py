"""Networks that differentiate or vectorize themselves: physics-informed ones, energies, per-sample functions."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spiritlevel as sl
import zoo
from spiritlevel.problem.problem import Problem

X, Y = zoo.gaussian(6, 2), zoo.gaussian(6, 2, seed=3)


class Energy(nn.Module):
    """A scalar of two numbers; its outputs are the derivatives of that by both."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.lift = nn.Conv1d(1, 3, 2)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)
        self.activation = activation

    def energy(self, x: Tensor) -> Tensor:
        lifted = self.activation(self.lift(x.view(-1, 1, 2))).view(-1, 3)
        return self.last(self.activation(self.first(lifted))).view(x.shape[:-1])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.energy(x), self.energy(-x)], 1)


class ByGrad(Energy):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(self.energy))(x)


class ByReverse(Energy):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.jacrev(self.energy))(x)


class ByForward(Energy):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.jacfwd(self.energy))(x)


class ByColumns(Energy):
    def forward(self, x: Tensor) -> Tensor:
        along = [x.new_tensor(each).expand_as(x) for each in ([1.0, 0.0], [0.0, 1.0])]
        return torch.stack([torch.func.jvp(self.energy, (x,), (each,))[1] for each in along], 1)


class ByAutograd(Energy):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


KINDS = [ByGrad, ByReverse, ByForward, ByColumns, ByAutograd]


def mean(model: nn.Module) -> Tensor:
    return F.mse_loss(model(X), Y)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_networks_that_differentiate_themselves(kind: type[Energy]) -> None:
    zoo.check(zoo.seeded(lambda: kind(nn.Tanh())), (X, Y), "mse", mean)


def test_whichever_way_they_do_the_numbers_are_the_same() -> None:
    reports = [sl.measure(zoo.seeded(lambda kind=kind: kind(nn.Tanh())), (X, Y), "mse") for kind in KINDS]
    first, *others = [{name: report[name].value for name in report} for report in reports]
    for other in others:
        assert other == pytest.approx(first, rel=1e-8)


class PerSample(Energy):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda each: torch.stack([self.energy(each), self.energy(-each)]))(x)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_networks_that_are_written_for_one_sample(activation: type[nn.Module]) -> None:
    zoo.check(zoo.seeded(lambda: PerSample(activation())), (X, Y), "mse", mean)


def test_what_they_keep_is_counted_where_autograd_cannot_be_watched() -> None:
    """Chunks and kept graphs are sized by it: not below what the same network keeps that is written for a batch."""

    def kept(kind: type[Energy]) -> int:
        problem = Problem(zoo.seeded(lambda: kind(nn.Tanh())), "mse", (X, Y))
        return problem.bytes_kept(lambda: problem.chunk_loss(problem.leaves(), problem.first_chunk()))

    plain, counted = kept(ByAutograd), kept(ByGrad)
    assert plain <= counted <= 20 * plain
