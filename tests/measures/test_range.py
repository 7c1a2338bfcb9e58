"""Twins whose weights, gradients and curvature leave the range of single precision."""

import pytest
import torch
from torch import nn

import spiritlevel as sl

pytestmark = pytest.mark.usefixtures("own_precision")

INVARIANT = [
    "kappa_max",
    "riemannian_spectral_norm",
    "riemannian_nodewise_spectral_norm",
    "rho_sum",
    "normalized_sharpness",
    "kappa_trace_sum",
    "fisher_rao_norm",
]


@pytest.fixture(scope="module")
def network() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, (torch.randn(40, 5), torch.randint(0, 3, (40,)))


@pytest.mark.parametrize("factor", [1e3, 1e6, 1e11, 1e12, 1e20, 1e30])
def test_invariant_measures_survive_any_factor(network, factor: float) -> None:  # type: ignore[no-untyped-def]
    model, data = network
    before = sl.measure(model, data, measures=INVARIANT)
    factors = {"0.weight": factor, "2.weight": 1.0, "4.weight": 1 / factor}
    after = sl.measure(sl.rescale_layers(model, factors, data[0][:2]), data, measures=INVARIANT)
    for name in INVARIANT:
        distance = abs(after[name].value - before[name].value)
        assert distance <= after[name].error + before[name].error + 2e-6 * before[name].value, name
    assert any("double precision" in note for note in after.notes) == (factor > 1e4)


@pytest.mark.parametrize("factor", [1e15, 1e-15])
def test_all_weights_scaled(network, factor: float) -> None:  # type: ignore[no-untyped-def]
    """Every number as in double precision from the start."""
    model, data = network
    scaled = nn.Sequential(
        *[nn.Linear(m.in_features, m.out_features) if isinstance(m, nn.Linear) else m for m in model]
    )
    scaled.load_state_dict({name: factor * tensor for name, tensor in model.state_dict().items()})
    found = sl.measure(scaled, data, measures=INVARIANT)
    wanted = sl.measure(scaled.double(), (data[0].double(), data[1]), measures=INVARIANT)
    for name in INVARIANT:
        assert found[name].value == pytest.approx(wanted[name].value, rel=1e-9), name
        assert found[name].converged or found[name].value == 0, name


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_norm_at_zero_is_told_as_that_in_either_precision(dtype):
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)), torch.randn(12, 5)

    def distance(outputs, targets):
        return (outputs - targets).norm(dim=1).mean()

    with pytest.raises(sl.SpiritLevelError) as told:
        sl.measure(model, (x, model(x).detach()), distance, measures=["hessian_trace"], dtype=dtype)
    assert "Likely cause: a square root, a norm or a power at zero; add a small constant inside it" in str(told.value)
    assert "scale the data" not in str(told.value)
