"""Pictures: data returned equals what was computed, the same input gives the same bytes, a user's axes are used."""

import math
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from scipy import stats
from torch import nn

import spiritlevel as sl
from case_networks import mlp
from spiritlevel import plot
from spiritlevel.landscape import landscape
from spiritlevel.show.correlation import correlate


@pytest.fixture(scope="module")
def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = mlp().double(), torch.randn(24, 4, dtype=torch.float64)
    return model, (x, torch.arange(24) % 3)


@pytest.fixture(scope="module")
def pictures(network):
    """Name → a function that draws it, on axes if they are given."""
    model, data = network
    line = landscape.line(model, data, count=3, points=7)
    plane = landscape.surface(model, data, points=5)
    spectrum = sl.spectrum(model, data, steps=10, probes=3)
    report = sl.measure(model, data, measures=["kappa_trace_sum", "rho_sum"])
    history = sl.measure(model, data, measures=[sl.get_measure("riemannian_spectral_norm", method="power")])
    points = [sl.Tracker(model, data, measures=["rho_sum"]).step(k, loss=1 / (k + 1), force=True) for k in range(2)]
    followed = sl.History(points)
    return {
        "convergence": lambda axes=None: plot.convergence(history, axes=axes),
        "line": lambda axes=None: plot.line({"a": line, "b": line}, axes=axes),
        "surface": lambda axes=None: plot.surface(plane, axes=axes),
        "attack": lambda axes=None: plot.attack(
            model, data, measures=["hessian_trace", "kappa_trace_sum"], alphas=(0.1, 10.0), axes=axes
        ),
        "layers": lambda axes=None: plot.layers(report, axes=axes),
        "neurons": lambda axes=None: plot.neurons(report, axes=axes),
        "spectrum": lambda axes=None: plot.spectrum({"a": spectrum, "b": spectrum}, axes=axes),
        "history": lambda axes=None: plot.history({"a": followed, "b": followed}, axes=axes),
        "scatter": lambda axes=None: plot.scatter([1.0, 2.0, 3.0, 5.0], [0.1, 0.3, 0.2, 0.4], axes=axes),
    }


NAMES = ["convergence", "line", "surface", "attack", "layers", "neurons", "spectrum", "history", "scatter"]


def test_the_names_promised_are_there():
    assert set(NAMES) | {"reparametrizations"} == set(plot.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_has_everything_and_the_same_bytes_every_time(pictures, name, tmp_path):
    first, second = pictures[name](), pictures[name]()
    assert first.title
    assert first.description.endswith(".")
    assert first.table.rows
    assert len({len(row) for row in first.table.rows} | {len(first.table.columns)}) == 1
    assert first.svg() == second.svg() == first.svg()
    ElementTree.fromstring(first.svg())
    for suffix in (".png", ".svg", ".pdf"):
        for index, drawing in enumerate((first, second)):
            drawing.save(tmp_path / f"{index}{suffix}")
        assert (tmp_path / f"0{suffix}").read_bytes() == (tmp_path / f"1{suffix}").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_goes_where_the_user_wants_it(pictures, name):
    figure = Figure(layout="constrained")
    left, right = figure.subplots(1, 2)
    drawing = pictures[name](axes=left)
    assert drawing.figure is figure
    assert left.has_data()
    assert not right.has_data()
    assert not figure.legends
    assert isinstance(figure.get_layout_engine(), ConstrainedLayoutEngine)  # the user's layout is the user's


def test_a_line_draws_what_was_computed(network):
    found = landscape.line(*network, count=3, points=5)
    drawing = plot.line(found)
    for i, (t, middle, low, high) in enumerate(drawing.table.rows):
        at = found.losses[:, i]
        expected = [float(part) for part in (found.steps[i], at.median(), at.min(), at.max())]
        assert [t, middle, low, high] == pytest.approx(expected, rel=1e-12)
    assert drawing.table.rows == plot.line(network[0], network[1], count=3, points=5).table.rows


def test_losses_that_overflow_are_drawn_as_gaps_and_kept_in_the_table():
    steps = torch.tensor([-1.0, 0.0, 1.0]).double()
    found = landscape.Line(steps, torch.tensor([[math.inf, 1.0, math.nan]]).double(), None, ("seed 0",), "none")
    drawing = plot.line(found)
    assert drawing.table.rows[0][1] == math.inf
    assert "<svg" in drawing.svg()
    plane = landscape.Surface(steps, steps, torch.full((3, 3), math.nan).double(), None, ("a", "b"), "none")
    with pytest.raises(sl.SpiritLevelError, match="not finite anywhere"):
        plot.surface(plane)


def test_accuracies_are_drawn_on_request_and_refused_without_labels(network):
    model, (x, y) = network
    found = landscape.line(model, (x, y), count=1, points=3)
    assert [row[1] for row in plot.line(found, quantity="accuracy").table.rows] == found.accuracies[0].tolist()
    without = landscape.line(model, (x, torch.zeros(24, 3).double()), "mse", count=1, points=3)
    with pytest.raises(sl.SpiritLevelError, match="the targets are not labels"):
        plot.line(without, quantity="accuracy")


def test_a_surface_draws_what_was_computed_also_in_three_dimensions(network):
    found = landscape.surface(*network, points=3)
    flat, deep = plot.surface(found), plot.surface(found, three_d=True)
    assert [row[2] for row in flat.table.rows] == found.losses.flatten().tolist()
    assert flat.table.rows == deep.table.rows
    assert deep.figure.axes[0].name == "3d"
    assert deep.svg() == plot.surface(found, three_d=True).svg()


def test_an_attack_moves_plain_measures_by_what_theory_says_and_no_others(network):
    drawing = plot.attack(*network, measures=["hessian_trace", "kappa_trace_sum", "rho_sum"], alphas=(1e-2, 1.0, 1e2))
    rows = {row[0]: row[1:] for row in drawing.table.rows}
    assert rows["kappa_trace_sum"] == pytest.approx([1.0] * 3, rel=1e-9)
    assert rows["rho_sum"] == pytest.approx([1.0] * 3, rel=1e-9)
    parts = sl.measure(*network, measures=["hessian_trace"])["hessian_trace"].layers
    alpha = 1e-2  # the first layer and the biases before the last shrink, the last layer grows
    scale = {name: 1.0 if name == "2.weight" else alpha for name in parts} | {"4.weight": 1 / alpha, "4.bias": 1.0}
    expected = sum(value / scale[name] ** 2 for name, value in parts.items()) / sum(parts.values())
    assert rows["hessian_trace"][0] == pytest.approx(expected, rel=1e-6)
    assert "2 of 3 measures stay" in drawing.description


def test_reparametrizing_reverses_the_ranking_by_curvature():
    drawing = plot.reparametrizations()
    original, reversed_ = drawing.table.rows[0][1:], drawing.table.rows[1][1:]
    assert sorted(range(3), key=lambda i: original[i]) == [0, 1, 2]
    assert sorted(range(3), key=lambda i: reversed_[i]) == [2, 1, 0]
    flat = drawing.table.rows[2][1:]
    assert flat[1] == min(flat)
    assert flat[1] == pytest.approx(original[1] / 0.1 ** (2 * -0.35), rel=1e-2)  # divided by b^{2a} at θ̂
    assert drawing.svg() == plot.reparametrizations().svg()
    with pytest.raises(sl.SpiritLevelError, match="4 panels need as many axes, got 1"):
        plot.reparametrizations(axes=[Figure().add_subplot()])


def test_convergence_is_that_of_algorithm_1(network):
    report = sl.measure(*network, measures=[sl.get_measure("riemannian_spectral_norm", method="power")])
    history = report["riemannian_spectral_norm"].details["history"]
    for source in (report, report["riemannian_spectral_norm"], history, {"a": report}):
        assert [row[1] for row in plot.convergence(source).table.rows] == history
    assert [row[1] for row in plot.convergence(*network).table.rows] == history
    with pytest.raises(sl.SpiritLevelError, match="method='power'"):
        plot.convergence(sl.measure(*network, measures=["rho_sum"]))


def test_several_models_and_measures_have_a_line_each(network):
    model, data = network
    drawing = plot.layers({"a": model, "b": model}, data, measures=["kappa_trace_sum", "rho_sum"])
    assert drawing.table.columns[1:] == ("a: kappa_trace_sum", "a: rho_sum", "b: kappa_trace_sum", "b: rho_sum")
    assert plot.neurons(model, data).table.rows[0][1] == 4
    with pytest.raises(sl.SpiritLevelError, match="hessian_trace has no values of neurons"):
        plot.neurons(model, data, name="hessian_trace")
    with pytest.raises(sl.SpiritLevelError, match="empty mapping"):
        plot.line({})


def test_names_of_users_are_inert(network):
    hostile = "<script>$x^2$</script>\x1b[31m"
    found = landscape.line(*network, count=1, points=3)
    assert "<script>" not in plot.line({hostile: found, "b": found}).svg()


@pytest.mark.parametrize("kind", ["pearson", "spearman", "kendall"])
def test_the_interval_of_a_correlation_holds_the_truth_as_often_as_it_says(kind):
    """Over pairs of normals with a known correlation; ranks of normals have closed forms."""
    generator = torch.Generator().manual_seed(0)
    r = 0.6
    truth = {"pearson": r, "spearman": 6 / math.pi * math.asin(r / 2), "kendall": 2 / math.pi * math.asin(r)}[kind]
    inside = 0
    for _ in range(200):
        x, noise = torch.randn(2, 40, generator=generator)
        _, low, high = correlate(x.tolist(), (r * x + math.sqrt(1 - r * r) * noise).tolist(), kind, 0.9)
        inside += low <= truth <= high
    assert 0.84 <= inside / 200 <= 0.95


def test_a_scatter_says_the_correlation_of_all_groups():
    x, y = {"a": [1.0, 2.0, 3.0], "b": [40.0, 50.0, 60.0]}, {"a": [0.1, 0.3, 0.2], "b": [0.5, 0.4, 0.6]}
    drawing = plot.scatter(x, y, label="rho_sum", correlation="kendall")
    expected = stats.kendalltau([*x["a"], *x["b"]], [*y["a"], *y["b"]])[0]
    assert f"is {expected:.3f}" in drawing.description
    assert drawing.table.rows[3] == ("b", 40.0, 0.5)
    with pytest.raises(sl.SpiritLevelError, match="the same groups"):
        plot.scatter([1.0, 2.0], [1.0])
    with pytest.raises(sl.SpiritLevelError, match="at least 3 networks"):
        plot.scatter([1.0, 2.0], [1.0, 2.0])
    with pytest.raises(sl.SpiritLevelError, match="correlation must be one of pearson"):
        correlate([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], "tau")


def test_pictures_are_an_attribute_of_the_package_and_others_are_refused():
    assert isinstance(sl.plot, type(math))
    with pytest.raises(AttributeError, match="no attribute 'plots'"):
        _ = sl.plots


def test_a_network_without_two_layers_cannot_be_attacked():
    model = nn.Linear(3, 2)
    with pytest.raises(sl.SpiritLevelError, match="needs two layers, and this network has 1"):
        plot.attack(model, (torch.randn(4, 3), torch.tensor([0, 1, 0, 1])))
