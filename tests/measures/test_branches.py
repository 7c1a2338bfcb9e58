"""Networks that compute something else for other samples: exactness must not depend on which of them come first."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spiritlevel as sl
from dense_oracle import dense


class HotBranch(nn.Module):
    """Squares what it sees where an input is large, in an operation that runs only if there is such a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h, hot = self.first(x), x[:, :1] > 1
        if hot.any():
            h = torch.where(hot, h * h, h)
        return self.second(h)


class Experts(nn.Module):
    """Every sample passes through one of three layers; a layer without samples does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.last = nn.ModuleList(nn.Linear(3, 4) for _ in range(3)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).long() + (x[:, 0] > 1).long()
        h = x.new_zeros(len(x), 4)
        for index, expert in enumerate(self.experts):
            mine = (chosen == index).nonzero().squeeze(1)
            if len(mine):
                h = h.index_put((mine,), F.relu(expert(x[mine])))
        return self.last(h)


def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 2, (60,), generator=generator)


@pytest.mark.parametrize("network", [HotBranch, Experts])
@pytest.mark.parametrize("order", ["as drawn", "largest first", "largest last"])
def test_no_order_of_the_data_makes_a_wrong_value_exact(network: type[nn.Module], order: str) -> None:
    torch.manual_seed(1)
    model = network().double()
    x, y = _data()
    by_size = x[:, 0].argsort(descending=order == "largest first")
    x, y = (x, y) if order == "as drawn" else (x[by_size], y[by_size])
    report = sl.measure(model, (x, y), measures=["hessian_trace", "kappa_trace_sum", "kappa_max"], most_probes=256)
    truth = float(dense(model, F.cross_entropy, x, y).trace())
    trace = report["hessian_trace"]
    assert abs(trace.value - truth) <= 4 * trace.error + 1e-12
    weights = {name for name, _ in model.named_parameters() if name.endswith("weight")}
    assert set(report["kappa_max"].layers) == set(report["kappa_trace_sum"].layers) == weights


def test_blank_first_samples_hide_nothing() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.GELU(), nn.Linear(4, 2, bias=False)).double()
    x, y = _data()
    x[:20] = 0
    trace = sl.measure(model, (x, y), measures=["hessian_trace"], most_probes=256)["hessian_trace"]
    assert abs(trace.value - float(dense(model, F.cross_entropy, x, y).trace())) <= 4 * trace.error + 1e-12


def test_a_branch_that_depends_on_the_company_of_a_sample_is_refused() -> None:
    """Where all samples of a chunk are large another layer comes in: what a sample gives depends on the others."""

    class Company(HotBranch):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.second(h * h if len(x) == 7 else h)

    torch.manual_seed(3)
    x, y = _data()
    problem = sl.Problem(Company().double(), "cross_entropy", (x, y))
    from spiritlevel.curvature.examine import examine
    from spiritlevel.curvature.statistics import TappedChunk

    anatomy = examine(problem)
    with pytest.raises(sl.SpiritLevelError, match="computes something else for some batches"):
        TappedChunk(problem, anatomy, problem.first_chunk()[:7], inputs=False)
