"""One check for every model: numbers against an explicitly formed Hessian, and a model that comes back bit for bit.

The Hessian is that of `mean(model)`, the loss over all data written by hand, so nothing of the package takes part in it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dense_oracle
import spiritlevel as sl

MEASURES = ("hessian_trace", "kappa_trace_sum", "kappa_sum", "hessian_spectral_norm", "riemannian_spectral_norm")
Mean = Callable[[nn.Module], Tensor]


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The model in double precision and eval mode, the same at every call, with no parameter at zero."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build().double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def gaussian(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def integers(high: int, *shape: int, seed: int = 2) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


class _Called(nn.Module):
    def __init__(self, model: nn.Module, mean: Mean) -> None:
        super().__init__()
        self.model, self._mean = model, mean

    def forward(self) -> Tensor:
        return self._mean(self.model)


def hessian(model: nn.Module, mean: Mean) -> Tensor:
    """∇² of mean(model) over the trainable parameters, entry by entry."""
    parameters, whole = dense_oracle.trainable(model), _Called(model, mean)

    def value(theta: Tensor) -> Tensor:
        parts = theta.split([p.numel() for p in parameters.values()])
        named = {f"model.{name}": part.view(p.shape) for (name, p), part in zip(parameters.items(), parts, strict=True)}
        return torch.func.functional_call(whole, named, ())

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        try:
            H = torch.autograd.functional.hessian(value, dense_oracle.flat(model), vectorize=True)
        except RuntimeError:  # an operation without a batching rule
            H = torch.autograd.functional.hessian(value, dense_oracle.flat(model))
    assert torch.allclose(H, H.T, rtol=1e-8, atol=1e-10 * float(H.abs().max())), "the oracle is no Hessian"
    return (H + H.T) / 2


def places(model: nn.Module) -> dict[str, slice]:
    ends, found = 0, {}
    for name, parameter in dense_oracle.trainable(model).items():
        found[name] = slice(ends, ends + parameter.numel())
        ends += parameter.numel()
    return found


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Tensors, gradients, flags and modes are after the block, bit for bit, what they were before."""

    def state() -> tuple[list[Tensor], list[Any]]:
        tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
        flags = [(p.requires_grad, id(p), id(p.grad), p.dtype) for p in model.parameters()]
        return [tensor.detach().clone() for tensor in tensors], [*flags, *(m.training for m in model.modules())]

    random, (tensors, flags) = torch.get_rng_state(), state()
    yield
    assert all(map(torch.equal, state()[0], tensors))
    assert state()[1] == flags
    assert torch.equal(torch.get_rng_state(), random)


def check(
    model: nn.Module,
    data: Any,
    loss: Any,
    mean: Mean,
    *,
    exact: bool | None = None,
    rel: float = 1e-6,
    oracle: nn.Module | None = None,
    **options: Any,
) -> sl.Report:
    """Measure, and compare with the dense Hessian of `mean`; `oracle` stands in for `model` there."""
    enough = 8 + max(248, sum(p.numel() for p in model.parameters()))  # to form every block, where products are exact
    options = {"tolerance": 1e-7, "most_probes": enough, "measures": MEASURES, **options}
    model.train()
    with unchanged(model):
        report = sl.measure(model, data, loss, **options)
    model.eval()
    truth = model if oracle is None else oracle
    H = hessian(truth, mean)
    compare(report, truth, H, rel)
    assert report.loss == pytest.approx(float(mean(truth).detach()), rel=rel)
    if exact is not None:
        assert (report["hessian_trace"].method == "exact sweep") == exact
    return report


def compare(report: sl.Report, model: nn.Module, H: Tensor, rel: float = 1e-6) -> None:
    theta, where = dense_oracle.flat(model), places(model)
    D = torch.cat([theta[place].norm().expand(place.stop - place.start) for place in where.values()])
    top = {
        "hessian_spectral_norm": float(torch.linalg.eigvalsh(H).abs().max()),
        "riemannian_spectral_norm": float(torch.linalg.eigvalsh(D[:, None] * H * D)[-1]),
    }
    for name, wanted in top.items():
        assert report[name].value == pytest.approx(wanted, rel=rel), name
    blocks = {name: H[where[name], where[name]] for name in report["kappa_sum"].layers}
    squares = {name: float(theta[where[name]].square().sum()) for name in blocks}
    scale = max(abs(value) for value in report["kappa_sum"].layers.values())
    for name, block in blocks.items():
        wanted = squares[name] * float(torch.linalg.eigvalsh(block)[-1])
        assert report["kappa_sum"].layers[name] == pytest.approx(wanted, rel=rel, abs=rel * scale), name
    _near(report["hessian_trace"], float(H.trace()), rel)
    _near(report["kappa_trace_sum"], sum(squares[name] * float(blocks[name].trace()) for name in blocks), rel)


def _near(value: sl.Value, wanted: float, rel: float) -> None:
    """Equal where exact, as blocks are that were formed whole, else within four standard errors, which are small."""
    assert value.error <= 0.1 * abs(wanted), (value, wanted)
    bound = rel * abs(wanted) if value.exact else 4 * value.error + rel * abs(wanted)
    assert abs(value.value - wanted) <= bound, (value, wanted)


# A small problem that many tests share.
X, Y = gaussian(6, 4), integers(3, 6)
TOKENS = integers(7, 6, 4)


def whole(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """A loss of the form (model, batch) -> (mean, count)."""
    return F.cross_entropy(model(batch[0]), batch[1]), len(batch[1])


def mean_on(x: Tensor) -> Mean:
    return lambda model: F.cross_entropy(model(x), Y)


def check_cross_entropy(build: Callable[[], nn.Module], x: Tensor = X, **options: Any) -> sl.Report:
    return check(seeded(build), (x, Y), "cross_entropy", mean_on(x), **options)
