"""What every measure claims to survive, checked both ways: what is claimed stays, what is not claimed moves."""

import functools

import pytest
import torch
from torch import nn

import cases
import spiritlevel as sl

pytestmark = pytest.mark.usefixtures("own_precision")

LAYER, NEURON = frozenset({"layer"}), frozenset({"layer", "neuron"})
CLAIMS = {
    "hessian_spectral_norm": frozenset(),
    "hessian_trace": frozenset(),
    "epsilon_sharpness": frozenset(),
    "keskar_sharpness": frozenset(),
    "keskar_subspace_sharpness": frozenset(),
    "volume_flatness": NEURON | {"linear", "rotation"},
    "riemannian_spectral_norm": LAYER,
    "riemannian_sharpness": LAYER,
    "riemannian_nodewise_spectral_norm": NEURON,
    "fisher_rao_norm": NEURON,
    "matrix_normalized_sharpness": LAYER,
    "normalized_sharpness": NEURON,
    "kappa_max": LAYER,
    "kappa_sum": LAYER,
    "kappa_trace_max": LAYER,
    "kappa_trace_sum": LAYER,
    "rho_max": NEURON,
    "rho_sum": NEURON,
    "rho_row_max": NEURON,
    "rho_row_sum": NEURON,
    "fisher_rao_full": NEURON | {"linear", "rotation"},
    "minimum_sharpness": LAYER,
    "minimum_sharpness_neurons": NEURON,
    "adaptive_sharpness": NEURON,
    "adaptive_sharpness_average": NEURON,
    "geodesic_sharpness": LAYER | {"linear"},
    "path_norm": NEURON,
    "relative_flatness": LAYER,
    "relative_flatness_normalized": NEURON,
    "relative_flatness_last": LAYER,
    "whitened_flatness": NEURON | {"linear", "rotation", "input map"},
    "whitened_flatness_max": NEURON | {"linear", "rotation", "input map"},
}
SEARCHED = frozenset(
    name for name in CLAIMS if name.endswith("sharpness") and not name.startswith(("normalized", "matrix", "minimum"))
)
NAMES = list(CLAIMS)


def test_the_claims_are_those_of_the_table():
    assert {each.name: each.invariant_under for each in sl.list_measures()} == CLAIMS


def networks():
    """An MLP and a convolutional network with biases, at points that are no minima."""
    mlp, x, y = cases.by_name("mlp").make()
    image = torch.randn(8, 2, 6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        convolutional = nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 3)
        ).double()
    return {"mlp": (mlp, x, y), "convolutional": (convolutional, image, torch.arange(8) % 3)}


FACTORS = {
    "mlp": {"0.weight": 5.0, "2.weight": 4.0, "4.weight": 0.05},
    "convolutional": {"0.weight": 3.0, "4.weight": 0.5, "6.weight": 2 / 3},
}


def twin(name, kind):
    model, x, _ = networks()[name]
    if kind == "layer":
        return sl.rescale_layers(model, FACTORS[name], x)
    return sl.find_symmetries(model, x).sample(strength=1.0, seed=1).apply(model)


def run(model, x, y, loss="cross_entropy"):
    searched = [
        sl.get_measure(each, **{"rho" if each.startswith(("adaptive", "geodesic")) else "epsilon": 1e-2})
        for each in sorted(SEARCHED)
    ]
    return sl.measure(model, (x, y), loss, measures=[*sorted(set(NAMES) - SEARCHED), *searched], tolerance=1e-10)


@functools.cache
def report(name, kind):
    model, x, y = networks()[name]
    return run(twin(name, kind) if kind else model, x, y)


def reports(name, kind):
    """Of the network itself, and of its twin of this kind."""
    return report(name, ""), report(name, kind)


@pytest.mark.parametrize("measure", NAMES)
@pytest.mark.parametrize("kind", ["layer", "neuron"])
@pytest.mark.parametrize("name", ["mlp", "convolutional"])
def test_a_claim_holds_and_what_is_not_claimed_moves(name, kind, measure):
    before, after = (report[measure].value for report in reports(name, kind))
    # Gains in front of attention move geodesic sharpness, and there is no attention here.
    if kind in CLAIMS[measure] or measure == "geodesic_sharpness":
        # The maxima are searched for: they agree to the precision of the search.
        assert after == pytest.approx(before, rel=1e-6 if measure in SEARCHED else 1e-9)
    else:
        assert abs(after / before - 1) > 1e-2


@pytest.mark.parametrize("name", ["mlp", "convolutional"])
def test_layers_and_neurons_are_as_invariant_as_the_whole(name):
    before, after = reports(name, "neuron")
    for measure in ("rho_sum", "rho_row_sum", "normalized_sharpness"):
        assert after[measure].layers == pytest.approx(dict(before[measure].layers), rel=1e-9)
        for layer, values in before[measure].neurons.items():
            torch.testing.assert_close(after[measure].neurons[layer], values, rtol=1e-9, atol=1e-15)
    before, after = reports(name, "layer")
    for measure in ("kappa_sum", "kappa_trace_sum", "matrix_normalized_sharpness"):
        assert after[measure].layers == pytest.approx(dict(before[measure].layers), rel=1e-9)


@pytest.mark.parametrize("loss", ["normalized_cross_entropy", "cross_entropy"])
def test_only_the_normalized_loss_is_blind_to_the_scale_of_the_outputs(loss):
    model, x, y = cases.by_name("mlp").make()
    names = sorted(set(NAMES) - SEARCHED - {"volume_flatness", "hessian_spectral_norm", "hessian_trace"})
    others = {"relative_flatness_last", "minimum_sharpness", "minimum_sharpness_neurons", "path_norm"}
    names = sorted(set(names) - others)  # for cross entropy only, or of the weights themselves
    before = sl.measure(model, (x, y), loss, measures=names, tolerance=1e-10)
    with torch.no_grad():
        model[4].weight.mul_(10)
        model[4].bias.mul_(10)
    after = sl.measure(model, (x, y), loss, measures=names, tolerance=1e-10)
    for name in names:
        if loss == "cross_entropy":
            assert abs(after[name].value / before[name].value - 1) > 1e-2, name
        else:
            assert after[name].value == pytest.approx(before[name].value, rel=1e-9), name


def test_an_affine_map_of_the_inputs_that_the_first_layer_absorbs_moves_what_it_may():
    """f(x) = g(Ax) with A absorbed: the function of the data is the same, no measure claims to be."""
    model, x, y = cases.by_name("mlp").make()
    names = sorted(set(NAMES) - SEARCHED - {"volume_flatness"})
    before = sl.measure(model, (x, y), measures=names, tolerance=1e-10)
    mix = torch.tensor([[2.0, 1, 0, 0], [0, 0.5, 0, 3], [1, 0, 1, 0], [0, 0, 0, 4]], dtype=torch.float64)
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight @ torch.linalg.inv(mix))
    after = sl.measure(model, (x @ mix.T, y), measures=names, tolerance=1e-10)
    assert after.loss == pytest.approx(before.loss, rel=1e-12)
    moved = [name for name in names if abs(after[name].value / before[name].value - 1) > 1e-2]
    assert set(moved) >= {
        "hessian_trace",
        "riemannian_spectral_norm",
        "kappa_trace_sum",
        "normalized_sharpness",
        "rho_sum",
    }


# --- rangamani2019, Tables 2 and 3, networks of full size -------------------------------------------------------------


def dense_network():
    return nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))


def convolutional_network():
    return nn.Sequential(
        nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
        nn.Linear(320, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


TABLES = {
    "table 2, mild": (dense_network, (784,), (5, 4, 1 / 20)),
    "table 2, strong": (dense_network, (784,), (100, 30, 1 / 3000)),
    "table 3, mild": (convolutional_network, (1, 28, 28), (5, 4, 3, 2, 1 / 120)),
    "table 3, strong": (convolutional_network, (1, 28, 28), (50, 24, 30, 1 / 6, 1 / 6000)),
}
FAST = ["riemannian_spectral_norm", "matrix_normalized_sharpness", "kappa_trace_sum", "rho_sum"]


def away_from_kinks(model, x):
    """The samples without a ReLU, or two entries of one pooling window, so near to changing sides that rounding decides."""
    near = torch.zeros(len(x), dtype=torch.bool)
    for layer in model:
        if isinstance(layer, nn.ReLU):
            gaps = x.abs()
        elif isinstance(layer, nn.MaxPool2d):
            windows = nn.functional.unfold(x, 2, stride=2).view(len(x), x.shape[1], 4, -1).sort(2).values
            gaps = windows[:, :, 3] - windows[:, :, 2]
        else:
            gaps = None
        if gaps is not None:
            near |= gaps.flatten(1).amin(1) < 1e-5 * x.square().mean().sqrt()
        x = layer(x)
    return ~near


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "agreement"), [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=["double", "single"]
)
@pytest.mark.parametrize("table", TABLES)
def test_the_rescaled_networks_of_the_paper_agree(table, dtype, agreement):
    build, shape, factors = TABLES[table]
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(200, *shape, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 10, (200,), generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build().double()
    with torch.no_grad():
        kept = away_from_kinks(model, x).nonzero().squeeze(1)[:100]
    assert len(kept) == 100
    model, x, y = model.to(dtype), x[kept].to(dtype), y[kept]
    weights = [name for name, p in model.named_parameters() if p.dim() > 1]
    # D H D is the same matrix for both, so that Lanczos takes the same steps at any tolerance.
    other = sl.rescale_layers(model, dict(zip(weights, factors, strict=True)), x[:8])
    before, after = (sl.measure(each, (x, y), measures=FAST, tolerance=1e-3) for each in (model, other))
    for name in FAST:
        assert after[name].value == pytest.approx(before[name].value, rel=agreement), name
