"""Tables that are looked up with padding: a row that is held fixed, wherever it is, and one that moves after all."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spiritlevel as sl
from zoo import hessian, integers, seeded

TOKENS, LABELS = integers(7, 12, 3), integers(3, 12)


class Padded(nn.Module):
    """An embedding whose padding row is not zero, as after an initialization of all weights."""

    def __init__(self, bend):
        super().__init__()
        self.table, self.last, self.bend = nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 3), bend

    def forward(self, tokens):
        return self.last(self.bend(self.table(tokens).sum(1)))


@pytest.mark.parametrize("bend", [torch.relu, torch.tanh])
def test_rows_and_columns_of_a_table_leave_out_a_padding_row_that_is_not_zero(bend):
    model = seeded(lambda: Padded(bend))
    assert bool(model.table.weight[0].any())
    dense = hessian(model, lambda net: F.cross_entropy(net(TOKENS), LABELS))[:28, :28].reshape(7, 4, 7, 4)
    weight = model.table.weight.detach()
    rows = torch.einsum("vi,viui,ui->i", weight, dense, weight)
    columns = torch.einsum("vi,vivj,vj->v", weight, dense, weight)
    report = sl.measure(model, (TOKENS, LABELS), measures=["rho_row_sum", "rho_sum"], tolerance=1e-6)
    for name, expected in (("rho_row_sum", rows), ("rho_sum", columns)):
        found = report[name].neurons["table.weight"]
        error = 1e-9 if report[name].exact else 5 * report[name].error + 1e-9
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=error)


class TwiceLookedUp(nn.Module):
    """One table, looked up once with padding and once without, in either order."""

    def __init__(self, padding, padded_first):
        super().__init__()
        self.table, self.last = nn.Parameter(torch.randn(6, 4)), nn.Linear(4, 3)
        self.paddings = (padding, None) if padded_first else (None, padding)

    def forward(self, one, other):
        first, second = (F.embedding(t, self.table, p).sum(1) for t, p in zip((one, other), self.paddings, strict=True))
        return self.last(torch.relu(first + second))


@pytest.mark.parametrize("padded_first", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_a_row_that_is_padding_in_one_lookup_only_moves(padded_first, seed):
    one, other, labels = (
        integers(6, 30, 3, seed=seed),
        integers(6, 30, 2, seed=seed + 10),
        integers(3, 30, seed=seed + 20),
    )
    model = seeded(lambda: TwiceLookedUp(0, padded_first), seed)
    dense = hessian(
        seeded(lambda: TwiceLookedUp(None, padded_first), seed), lambda net: F.cross_entropy(net(one, other), labels)
    )
    report = sl.measure(model, ((one, other), labels), measures=["hessian_trace", "kappa_sum", "hessian_spectral_norm"])
    assert report["hessian_trace"].value == pytest.approx(float(dense.trace()), rel=1e-9)
    assert report["hessian_spectral_norm"].value == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=1e-6)
    blocks = {"table": dense[:24, :24], "last.weight": dense[24:36, 24:36]}
    for name, block in blocks.items():
        size = model.get_parameter(name).detach().square().sum()
        assert report["kappa_sum"].layers[name] == pytest.approx(
            float(size * torch.linalg.eigvalsh(block)[-1]), rel=1e-6
        )


class Filter(nn.Module):
    """A complex weight that is stored as pairs of real numbers, behind an odd number of other weights."""

    def __init__(self):
        super().__init__()
        self.first, self.pairs, self.last = nn.Linear(4, 3), nn.Parameter(torch.randn(2, 2)), nn.Linear(3, 3)

    def forward(self, x):
        return self.last(torch.fft.irfft(torch.fft.rfft(self.first(x)) * torch.view_as_complex(self.pairs), n=3))


def test_complex_weights_that_are_stored_as_pairs_lie_anywhere_in_a_vector():
    model, x, y = seeded(Filter), torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).double(), integers(3, 8)
    dense = hessian(model, lambda net: F.cross_entropy(net(x), y))
    report = sl.measure(model, (x, y), measures=["hessian_trace", "hessian_spectral_norm", "epsilon_sharpness"])
    norm = float(torch.linalg.eigvalsh(dense).abs().max())
    assert abs(report["hessian_trace"].value - float(dense.trace())) <= 4 * report["hessian_trace"].error + 1e-9
    assert report["hessian_spectral_norm"].value == pytest.approx(norm, rel=1e-6)
    assert sl.spectrum(model, (x, y)).top[0].value == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=1e-6)


@pytest.mark.parametrize(
    ("named", "given", "model", "targets"),
    [
        ("mse", nn.MSELoss(), nn.Linear(4, 1), lambda count, length: torch.ones(count, length, 1).double()),
        ("cross_entropy", nn.CrossEntropyLoss(), nn.Conv1d(4, 3, 1), lambda count, length: integers(3, count, length)),
    ],
)
def test_batches_of_other_shapes_than_the_first_fit_a_loss_by_name(named, given, model, targets):
    shapes, model = [(3, 2), (2, 7)], model.double()
    like = (lambda n, t: (n, t, 4)) if named == "mse" else (lambda n, t: (n, 4, t))
    data = [(torch.ones(like(*shape)).double(), targets(*shape)) for shape in shapes]
    values = [
        sl.measure(model, data, loss, measures=["hessian_trace"])["hessian_trace"].value for loss in (named, given)
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-12)
    wrong = [data[0], (data[1][0], targets(2, 6))]
    with pytest.raises(
        sl.SpiritLevelError, match="targets of the outputs' shape" if named == "mse" else "needs labels of shape"
    ):
        sl.measure(model, wrong, named, measures=["hessian_trace"])
