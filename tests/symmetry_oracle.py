"""An independent count of a network's rescaling symmetries, from derivatives and no graph."""

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

from networks import randomized

ROWS_PER_COLUMN = 4


class PlainBatchNorm(nn.Module):
    """Batch normalization in eval mode as a formula, which autograd can follow to the running mean."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.running_mean[:, None, None], self.running_var[:, None, None]
        return (x - mean) / (var + self.eps).sqrt() * self.weight[:, None, None] + self.bias[:, None, None]


def number_of_symmetries(model: nn.Module, shape: tuple[int, ...], least_draws: int = 10) -> int:
    """The dimension of {u : f(θ∘(1+εu)) = f(θ) + O(ε²) for every θ and x}, without parameters that do nothing.

    One u per parameter and running mean, shared by the positions of a kernel: the null space of the stacked Jacobians
    ∂f/∂θ·diag(θ) at enough random θ and x. Networks that are linear in x need many draws of θ.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, PlainBatchNorm(child))
    blocks = [_directions(model, shape, 0)]
    while len(blocks) < least_draws or sum(len(block) for block in blocks) < ROWS_PER_COLUMN * blocks[0].shape[1]:
        blocks.append(_directions(model, shape, len(blocks)))
    rows = torch.cat(blocks)
    alive = rows[:, (rows.abs() > 1e-12 * rows.abs().max()).any(0)]
    return alive.shape[1] - int(torch.linalg.matrix_rank(alive / alive.norm(dim=0), rtol=1e-8))


def _directions(model: nn.Module, shape: tuple[int, ...], seed: int) -> Tensor:
    model = randomized(model, seed)
    generator = torch.Generator().manual_seed(100 + seed)
    x = torch.randn((12, *shape[1:]), generator=generator, dtype=torch.float64)
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    state |= {name: b.clone() for name, b in model.named_buffers() if name.endswith("running_mean")}
    with sdpa_kernel(SDPBackend.MATH):
        jacobian = jacrev(lambda s: functional_call(model, s, (x,)).flatten())(state)
    columns = []
    for name, value in state.items():
        effect = jacobian[name] * value
        columns.append(effect.flatten(3).sum(-1).flatten(1) if value.dim() > 2 else effect.flatten(1))
    return torch.cat(columns, dim=1)
