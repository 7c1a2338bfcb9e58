"""Whitened and relative flatness against explicitly formed Hessians, and between networks with the same function."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cases
import metric_oracle
import spiritlevel as sl

METRIC = {
    "whitened_flatness": "whitened",
    "relative_flatness": "relative",
    "relative_flatness_normalized": "normalized",
}


class Transformer(nn.Module):
    """One block with RMS normalization, two heads and a ReLU; `q`, `k`, `v` and `o` have no biases."""

    def __init__(self, width=8, heads=2, hidden=12, vocabulary=7, length=5, activation=F.relu):
        super().__init__()
        self.heads, self.activation = heads, activation
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(length, width) * 0.3)
        self.n1, self.n2, self.n3 = (nn.RMSNorm(width) for _ in range(3))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position
        y = self.n1(x)
        q, k, v = (f(y).unflatten(2, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(self.activation(self.up(self.n2(x))))
        return self.head(self.n3(x)[:, -1])


@functools.cache
def transformer(activation=F.relu, width=8):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Transformer(width=width, activation=activation).double()
        for norm in (model.n1, model.n2, model.n3):
            nn.init.uniform_(norm.weight, 0.5, 2)
    x = torch.randint(0, 7, (24, 5), generator=torch.Generator().manual_seed(1))
    return model, x, x.sum(1) % 7


def changed_heads(model, strength=0.5):
    """W_Q → AW_Q, W_K → A⁻ᵀW_K, W_V → BW_V, W_O → W_OB⁻¹ in every head."""
    twin, generator = copy.deepcopy(model), torch.Generator().manual_seed(2)
    size = len(twin.q.weight) // twin.heads
    with torch.no_grad():
        for head in range(twin.heads):
            own = slice(head * size, (head + 1) * size)
            a, b = (
                torch.matrix_exp(strength * torch.randn(size, size, generator=generator, dtype=torch.float64))
                for _ in range(2)
            )
            twin.q.weight[own] = a @ twin.q.weight[own]
            twin.k.weight[own] = torch.linalg.inv(a).T @ twin.k.weight[own]
            twin.v.weight[own] = b @ twin.v.weight[own]
            twin.o.weight[:, own] = twin.o.weight[:, own] @ torch.linalg.inv(b)
    return twin


def turned_stream(model):
    """The gains of the normalizations folded into what reads them, and the residual stream turned."""
    twin, generator = copy.deepcopy(model), torch.Generator().manual_seed(3)
    width = twin.q.weight.shape[1]
    turn = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))[0]
    readers = {"n1": ("q", "k", "v"), "n2": ("up",), "n3": ("head",)}
    with torch.no_grad():
        for table in (twin.embedding.weight, twin.position):
            table.copy_(table @ turn.T)
        for norm, names in readers.items():
            for name in names:
                weight = getattr(twin, name).weight
                weight.copy_(weight * getattr(twin, norm).weight @ turn.T)
            getattr(twin, norm).weight.fill_(1)
        for name in ("o", "down"):
            getattr(twin, name).weight.copy_(turn @ getattr(twin, name).weight)
    return twin


def rescaled(model):
    return sl.find_symmetries(model, transformer()[1]).sample(strength=1.0, seed=0).apply(model)


# --- definitions -----------------------------------------------------------------------------------------------------


def convolutional(groups=1):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 2, stride=2, groups=groups), nn.ReLU(),
            nn.Flatten(), nn.Linear(16, 3),
        ).double()  # fmt: skip
    image = torch.randn(20, 2, 4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return model, image, torch.arange(20) % 3


def problems():
    mlp, x, y = cases.by_name("mlp").make()
    siamese, pair, label = cases.by_name("siamese").make()
    return {
        "mlp": (mlp, x, y),
        "convolution": convolutional(),
        "grouped convolution": convolutional(groups=2),
        "a weight used twice": (siamese, pair, label),
        "transformer": transformer(F.gelu),
    }


@pytest.mark.parametrize("name", problems())
def test_every_layer_is_the_trace_of_its_block_in_the_metric(name):
    model, x, y = problems()[name]
    names = list(METRIC) if name != "transformer" else ["whitened_flatness"]
    report = sl.measure(model, (x, y), measures=names, tolerance=1e-10, most_probes=1000)
    for measure, value in report.values.items():
        wanted = {
            layer: metric_oracle.trace(model, F.cross_entropy, x, y, layer, METRIC[measure]) for layer in value.layers
        }
        assert len(wanted) >= 2
        assert value.layers == pytest.approx(wanted, rel=1e-8)
        assert value.value == pytest.approx(sum(wanted.values()), rel=1e-8)
        assert value.exact
        assert value.error <= 1e-9 * value.value


def test_probed_layers_lie_within_their_errors(only_probes):
    model, x, y = cases.by_name("GELU").make()
    report = sl.measure(model, (x, y), measures=list(METRIC), tolerance=1e-10, most_probes=64)
    for measure, value in report.values.items():
        assert not value.exact
        for layer, found in value.layers.items():
            wanted = metric_oracle.trace(model, F.cross_entropy, x, y, layer, METRIC[measure])
            assert abs(found - wanted) <= 5 * value.layer_errors[layer] + 1e-9 * abs(wanted), (measure, layer)


@pytest.mark.parametrize("name", ["mlp", "convolution"])
def test_the_largest_eigenvalue_is_that_of_the_block_in_the_metric(name):
    model, x, y = problems()[name]
    value = sl.measure(model, (x, y), measures=["whitened_flatness_max"], tolerance=1e-9)["whitened_flatness_max"]
    for layer, found in value.layers.items():
        wanted = metric_oracle.largest(model, F.cross_entropy, x, y, layer)
        assert found == pytest.approx(wanted, rel=1e-8)
        assert abs(found - wanted) <= value.layer_errors[layer] + 1e-12
    assert value.value == pytest.approx(metric_oracle.largest(model, F.cross_entropy, x, y, *value.layers), rel=1e-8)
    assert value.certified


def test_the_witness_raises_the_loss_as_the_eigenvalue_says():
    model, x, y = problems()["mlp"]
    value = sl.measure(model, (x, y), measures=["whitened_flatness_max"], tolerance=1e-9)["whitened_flatness_max"]
    values = {name: p.detach() for name, p in model.named_parameters()}

    def loss(t):
        moved = {
            name: part + t * value.witness[name] if name in value.witness else part for name, part in values.items()
        }
        return F.cross_entropy(torch.func.functional_call(model, moved, (x,)), y)

    zero = torch.zeros((), dtype=torch.float64)
    assert float(torch.func.grad(torch.func.grad(loss))(zero)) == pytest.approx(value.value, rel=1e-8)


# --- what it survives ------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("change", [changed_heads, turned_stream, rescaled])
def test_no_symmetry_of_a_transformer_moves_whitened_flatness(change, only_probes):
    """Not even where it is estimated: probes turn with the network."""
    model, x, y = transformer(F.relu)
    twin = change(model)
    torch.testing.assert_close(twin(x), model(x), rtol=1e-10, atol=1e-10)
    names = ["whitened_flatness", "whitened_flatness_max", "rho_row_sum", "fisher_rao_full"]
    before, after = (sl.measure(each, (x, y), measures=names, most_probes=8) for each in (model, twin))
    layers = before["whitened_flatness"].layers
    assert after["whitened_flatness"].layers == pytest.approx(dict(layers), rel=1e-9)
    assert len(layers) == 8
    largest = before["whitened_flatness_max"], after["whitened_flatness_max"]
    assert largest[1].value == pytest.approx(largest[0].value, rel=1e-9)
    assert largest[1].layers == pytest.approx(dict(largest[0].layers), rel=1e-9)
    assert after["fisher_rao_full"].value == pytest.approx(before["fisher_rao_full"].value, rel=1e-9)
    if change is not rescaled:
        assert abs(after["rho_row_sum"].value / before["rho_row_sum"].value - 1) > 0.02


def test_what_else_is_asked_for_does_not_change_its_probes(only_probes):
    """Other measures may take another number of probes for an equivalent network."""
    model, x, y = cases.by_name("GELU").make()
    names = ["whitened_flatness", "hessian_trace", "rho_sum", "relative_flatness"]
    alone, among = (sl.measure(model, (x, y), measures=some, tolerance=0.05) for some in (names[:1], names))
    assert not alone["whitened_flatness"].exact
    assert among["whitened_flatness"].value == alone["whitened_flatness"].value


def test_an_invertible_matrix_on_the_inputs_does_not_move_it():
    model, x, y = cases.by_name("mlp").make()
    before = sl.measure(model, (x, y), measures=["whitened_flatness"])["whitened_flatness"]
    mix = torch.tensor([[2.0, 1, 0, 0], [0, 0.5, 0, 3], [1, 0, 1, 0], [0, 0, 0, 400]], dtype=torch.float64)
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight @ torch.linalg.inv(mix))
    after = sl.measure(model, (x @ mix.T, y), measures=["whitened_flatness"])["whitened_flatness"]
    assert after.layers == pytest.approx(dict(before.layers), rel=1e-9)


def test_inputs_that_nearly_depend_on_each_other_keep_their_digits():
    """A condition of 1e12: sums of squares alone would keep four digits."""
    model, x, y = cases.by_name("mlp").make()
    before = sl.measure(model, (x, y), measures=["whitened_flatness"])["whitened_flatness"]
    turn = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    mix = turn @ torch.diag(torch.tensor([1.0, 1e-2, 1e-4, 1e-6], dtype=torch.float64)) @ turn.T
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight @ torch.linalg.inv(mix))
    after = sl.measure(model, (x @ mix.T, y), measures=["whitened_flatness"])["whitened_flatness"]
    assert after.value == pytest.approx(before.value, rel=1e-9)
    assert abs(after.value - before.value) <= after.error + before.error


# --- what it says ----------------------------------------------------------------------------------------------------


def test_inputs_of_lower_rank_are_told_and_noise_stays_within_them():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 3)).double()
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wide = torch.cat([x, x @ torch.ones(2, 2).double(), torch.zeros(12, 1).double()], 1)
    y = torch.arange(12) % 3
    value = sl.measure(model, (wide, y), measures=["whitened_flatness"])["whitened_flatness"]
    assert "0.weight: its inputs span 2 of 5 dimensions, and noise stays within them" in value.notes
    wanted = metric_oracle.trace(model, F.cross_entropy, wide, y, "0.weight", "whitened")
    assert value.layers["0.weight"] == pytest.approx(wanted, rel=1e-9)


def test_a_layer_whose_inputs_are_zero_has_no_curvature():
    model, x, y = problems()["convolution"]
    with torch.no_grad():
        model[0].bias.fill_(-100.0)  # silent
    names = ["whitened_flatness", "whitened_flatness_max"]
    report = sl.measure(model, (x, y), measures=names, tolerance=1e-2)
    assert report["whitened_flatness"].layers["2.weight"] == 0
    assert report["whitened_flatness"].layers["5.weight"] > 0


def test_single_precision_says_how_far_it_may_be_off():
    model, x, y = cases.by_name("mlp").make()
    exact = sl.measure(model, (x, y), measures=["whitened_flatness"])["whitened_flatness"]
    single = sl.measure(model.float(), (x.float(), y), measures=["whitened_flatness"], dtype=torch.float32)
    single = single["whitened_flatness"]
    assert 0 < single.error < 1e-3 * exact.value
    assert abs(single.value - exact.value) <= single.error


def test_a_layer_with_too_many_inputs_is_named():
    model = nn.Sequential(nn.Linear(9000, 2), nn.ReLU(), nn.Linear(2, 2))
    value = sl.measure(model, (torch.randn(4, 9000), torch.arange(4) % 2), measures=["whitened_flatness"])[
        "whitened_flatness"
    ]
    assert not value.available
    assert value.notes == ("layers with more than 8192 inputs, whose second moments cannot be inverted: 0.weight",)


def test_the_last_layer_has_a_closed_form():
    for model, x, y in (problems()["mlp"], transformer()):
        report = sl.measure(model, (x, y), measures=["relative_flatness", "relative_flatness_last"])
        last = report["relative_flatness_last"]
        ((name, value),) = last.layers.items()
        assert last.exact
        assert value == last.value == pytest.approx(report["relative_flatness"].layers[name], rel=1e-10)


def test_a_certain_network_keeps_the_digits_of_the_closed_form():
    model, x, y = problems()["mlp"]
    with torch.no_grad():
        for part in (model[4].weight, model[4].bias):
            part.mul_(300)
    report = sl.measure(model, (x, y), measures=["relative_flatness", "relative_flatness_last"])
    last = report["relative_flatness_last"]
    assert last.value == pytest.approx(report["relative_flatness"].layers["4.weight"], rel=1e-9)


def test_no_closed_form_for_another_loss():
    case = cases.by_name("mlp")
    model, x, _ = case.make()
    value = sl.measure(model, (x, model(x).detach() + 1), "mse", measures=["relative_flatness_last"])
    assert not value["relative_flatness_last"].available
    assert "cross entropy" in value["relative_flatness_last"].notes[0]


def test_the_full_fisher_form_is_the_mean_of_squared_slopes():
    model, x, y = problems()["mlp"]
    slopes = []
    for n in range(len(y)):
        loss = F.cross_entropy(model(x[n : n + 1]), y[n : n + 1])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        slopes.append(sum(float((g * p.detach()).sum()) for g, p in zip(gradients, model.parameters(), strict=True)))
    value = sl.measure(model, (x, y), measures=["fisher_rao_full"])["fisher_rao_full"]
    assert value.value == pytest.approx(sum(s * s for s in slopes) / len(slopes), rel=1e-12)
    assert value.exact
