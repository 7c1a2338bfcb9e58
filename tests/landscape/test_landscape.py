"""Lines and planes: what they pass through, what each normalization survives, and what an interruption keeps."""

import copy
import json
import math

import pytest
import torch
from torch import nn

import spiritlevel as sl
from spiritlevel.curvature.dense import dense_hessian
from spiritlevel.landscape import landscape
from spiritlevel.landscape.directions import NORMALIZATIONS, Finder, _difference, between
from spiritlevel.problem.problem import Problem
from spiritlevel.symmetry import inner, layer_directions, layer_metric, neuron_directions, node_metric


@pytest.fixture(scope="module")
def trained():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)).double()
        x = torch.randn(40, 4, dtype=torch.float64)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.3).long()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, x, y


def twins(trained):
    model, x, _ = trained
    layer = sl.rescale_layers(model, {"0.weight": 3.0, "2.weight": 0.5, "4.weight": 1 / 1.5}, x)
    return layer, sl.find_symmetries(model, x).sample(strength=1.0, seed=1).apply(model)


def loss_of(model, x, y):
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(x), y))


def test_a_line_is_the_loss_at_moved_weights(trained):
    model, x, y = trained
    found = landscape.line(model, (x, y), normalization="none", count=1, points=5)
    problem = Problem(model, "cross_entropy", (x, y))
    direction = Finder(problem, "none", None, 0).find("random", 1)[1][0]
    moved = {name: value + 0.5 * direction[name] for name, value in problem.parameters.items()}
    outputs = torch.func.functional_call(model, moved, x)
    assert found.steps.tolist() == [-1.0, -0.5, 0.0, 0.5, 1.0]
    assert float(found.losses[0, 3]) == pytest.approx(float(nn.functional.cross_entropy(outputs, y)), rel=1e-12)
    assert float(found.accuracies[0, 3]) == pytest.approx(float((outputs.argmax(1) == y).double().mean()))
    assert float(found.losses[0, 2]) == pytest.approx(problem.loss(), rel=1e-12)


@pytest.mark.parametrize("directions", ["random", "eigen"])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_every_normalization_survives_what_it_says(trained, directions, normalization):
    model, x, y = trained
    layer, neuron = twins(trained)
    lines = [
        landscape.line(m, (x, y), directions=directions, normalization=normalization, count=2, points=5).losses
        for m in (model, layer, neuron)
    ]
    same = [torch.allclose(lines[0], other, rtol=1e-6) for other in lines[1:]]
    assert same == [normalization != "none", "neuron" in normalization]


def test_layer_and_filter_normalization_have_the_norms_they_promise(trained):
    model, x, y = trained
    problem = Problem(model, "cross_entropy", (x, y))
    by_layer = Finder(problem, "layer", None, 0).find("random", 1)[1][0]
    for name, value in problem.parameters.items():
        assert float(by_layer[name].norm()) == pytest.approx(float(value.norm()))
    by_filter = Finder(problem, "filter", None, 0).find("random", 1)[1][0]
    torch.testing.assert_close(by_filter["2.weight"].norm(dim=1), problem.parameters["2.weight"].norm(dim=1))
    assert not by_filter["2.bias"].any()
    moving = Finder(problem, "filter", True, 0).find("random", 1)[1][0]
    torch.testing.assert_close(moving["2.bias"].abs(), problem.parameters["2.bias"].abs())
    assert not Finder(problem, "layer", False, 0).find("random", 1)[1][0]["2.bias"].any()


def test_filters_of_a_convolution_are_its_output_channels_however_it_is_stored():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), nn.ConvTranspose2d(4, 3, 2), nn.Flatten())
        x = torch.randn(3, 2, 4, 4)
    problem = Problem(model, "mse", (x, model(x).detach()))
    found = Finder(problem, "filter", None, 0).find("random", 1)[1][0]
    torch.testing.assert_close(
        found["0.weight"].flatten(1).norm(dim=1), problem.parameters["0.weight"].flatten(1).norm(dim=1)
    )
    columns = [
        tensor.transpose(0, 1).flatten(1).norm(dim=1) for tensor in (found["2.weight"], problem.parameters["2.weight"])
    ]
    torch.testing.assert_close(*columns)


def test_a_direction_on_the_quotient_is_orthogonal_to_every_rescaling(trained):
    model, x, y = trained
    problem = Problem(model, "cross_entropy", (x, y))
    symmetries = sl.find_symmetries(model, x)
    for name, moves, metric in (
        ("quotient", layer_directions(symmetries), layer_metric),
        ("quotient neuron", neuron_directions(symmetries), node_metric),
    ):
        step = Finder(problem, name, None, 0).find("random", 1)[1][0]
        for k in range(moves.dimension):
            vertical = moves.vertical(problem.parameters, torch.eye(moves.dimension, dtype=torch.float64)[k])
            assert abs(float(inner(metric, problem.parameters, vertical, step))) < 1e-9


def test_eigen_directions_are_eigenvectors(trained):
    model, x, y = trained
    problem = Problem(model, "cross_entropy", (x, y))
    H = dense_hessian(problem)
    true = torch.linalg.eigvalsh(H)
    labels, found = Finder(problem, "none", None, 0).find("eigen", 2)
    vectors = [torch.cat([part.reshape(-1) for part in each.values()]) for each in found]
    for k, u in enumerate(vectors):
        assert float(u @ H @ u) == pytest.approx(float(true[-1 - k]), rel=1e-3)
        assert float(u.norm()) == pytest.approx(1.0)
    assert abs(float(vectors[0] @ vectors[1])) < 1e-8
    assert labels[0] == f"eigenvalue {float(true[-1]):.4g}"


def test_a_line_between_two_networks_ends_at_both_with_their_buffers():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        a, b = (nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)) for _ in range(2))
        x, y = torch.randn(20, 3), torch.arange(20) % 2
        for model in (a, b):
            model(torch.randn(50, 3))  # running means of its own
            model.eval()
    found = landscape.line(a, (x, y), directions=b, span=(0.0, 1.0), points=3)
    for model, value in ((a, found.losses[0, 0]), (b, found.losses[0, -1])):
        assert float(value) == pytest.approx(loss_of(model, x, y), rel=1e-5)
    assert "1.running_mean" in between(Problem(a, "cross_entropy", (x, y)), b)
    with pytest.raises(sl.SpiritLevelError, match=r"same architecture: 0.weight has shape \(5, 3\)"):
        landscape.line(a, (x, y), directions=nn.Sequential(nn.Linear(3, 4)))


class Normalized(nn.Module):
    """A network with a running variance of its own size and a mask."""

    def __init__(self, seed: int, spread: float) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)).double()
            self.layers(spread * torch.randn(50, 3).double())
        self.layers[1].running_var.mul_(spread)
        self.register_buffer("mask", torch.zeros(2, 2))
        self.eval()

    def forward(self, x):
        return self.layers(x)


def by_hand(models: list[nn.Module], steps: list[float], shares: list[float], data) -> float:
    """The loss with weights at a + Σ step·(b − a) and buffers at a mixture with these shares."""
    first, *others = (model.state_dict() for model in models)
    mixed = copy.deepcopy(models[0])
    buffers = {name for name, _ in mixed.named_buffers()}
    state = {}
    for name, here in first.items():
        weights = shares if name in buffers else steps
        moves = [w * (other[name] - here) for w, other in zip(weights, others, strict=True)]
        state[name] = here + sum(moves) if here.is_floating_point() else here
    mixed.load_state_dict(state)
    return loss_of(mixed, *data)


def test_beyond_two_networks_buffers_stay_and_the_loss_is_finite():
    a, b = Normalized(0, 1.0), Normalized(1, 30.0)
    data = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)).double(), torch.arange(20) % 2
    assert float((a.layers[1].running_var - 0.25 * (b.layers[1].running_var - a.layers[1].running_var)).min()) < 0
    found = landscape.line(a, data, directions=b, points=7)  # from −0.25 to 1.25
    assert bool(found.losses.isfinite().all())
    for t, value in zip(found.steps.tolist(), found.losses[0].tolist(), strict=True):
        assert value == pytest.approx(by_hand([a, b], [t], [min(max(t, 0.0), 1.0)], data), rel=1e-9)
    assert found.notes == (
        "beyond the models buffers stay what they are at the nearest mixture of them: layers.1.running_mean, "
        "layers.1.running_var",
    )
    assert landscape.line(a, data, directions=b, span=(0.0, 1.0), points=3).notes == ()


def test_beyond_three_networks_too():
    models = [Normalized(0, 1.0), Normalized(1, 30.0), Normalized(2, 5.0)]
    data = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)).double(), torch.arange(20) % 2
    found = landscape.surface(models[0], data, directions=tuple(models[1:]), points=5)  # −0.5, 0, 0.5, 1, 1.5
    assert bool(found.losses.isfinite().all())
    shares = {(0, 0): [0.0, 0.0], (3, 3): [0.5, 0.5], (4, 0): [1.0, 0.0], (2, 1): [0.5, 0.0], (4, 3): [0.75, 0.25]}
    for (i, j), share in shares.items():
        steps = [float(found.x[i]), float(found.y[j])]
        assert float(found.losses[j, i]) == pytest.approx(by_hand(models, steps, share, data), rel=1e-9)


def test_infinities_that_differ_leave_no_line():
    a, b = Normalized(0, 1.0), Normalized(1, 2.0)
    b.mask[0, 1] = -math.inf
    data = torch.randn(20, 3).double(), torch.arange(20) % 2
    with pytest.raises(
        sl.SpiritLevelError, match="no line between the two models: mask is not finite where they differ"
    ):
        landscape.line(a, data, directions=b)


def test_infinities_that_both_have_do_not_move():
    mask = torch.tensor([0.0, -math.inf])
    assert _difference(mask, mask).tolist() == [0.0, 0.0]


def test_a_plane_through_three_networks_has_them_at_its_corners(trained):
    model, x, y = trained
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        others = [nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)).double()
                  for _ in range(2)]  # fmt: skip
    found = landscape.surface(model, (x, y), directions=tuple(others), span=(0.0, 1.0), points=2)
    expected = [loss_of(m, x, y) for m in (model, *others)]
    assert [float(found.losses[0, 0]), float(found.losses[0, 1]), float(found.losses[1, 0])] == pytest.approx(expected)


class Interrupter:
    """A listener that interrupts after some points and counts what was computed."""

    def __init__(self, after=math.inf):
        self.after, self.calls = after, []

    def __call__(self, done, total):
        self.calls.append((done, total))
        if done >= self.after:
            raise KeyboardInterrupt


def test_an_interrupted_grid_is_continued_and_nothing_is_computed_twice(trained, tmp_path):
    model, x, y = trained
    file = tmp_path / "grid.json"
    with pytest.raises(KeyboardInterrupt):
        landscape.surface(model, (x, y), points=5, file=file, progress=Interrupter(after=7))
    assert len(json.loads(file.read_text())["values"]) == 7
    second = Interrupter()
    found = landscape.surface(model, (x, y), points=5, file=file, progress=second)
    assert second.calls[0] == (7, 25)
    assert second.calls[-1] == (25, 25)
    assert len(second.calls) == 25 - 7 + 1
    whole = landscape.surface(model, (x, y), points=5)
    assert torch.equal(found.losses, whole.losses)
    third = Interrupter()
    landscape.surface(model, (x, y), points=5, file=file, progress=third)
    assert third.calls == [(25, 25)]


@pytest.mark.parametrize("change", ["weights", "data", "grid", "seed"])
def test_what_is_kept_is_of_no_use_to_another_problem(trained, tmp_path, change):
    model, x, y = trained
    file = tmp_path / "grid.json"
    options = {"count": 1, "points": 3, "file": file}
    landscape.line(model, (x, y), **options)
    other, listener = twins(trained)[0] if change == "weights" else model, Interrupter()
    data = (x + 1, y) if change == "data" else (x, y)
    options |= {"grid": {"span": (-2.0, 2.0)}, "seed": {"seed": 1}}.get(change, {})
    landscape.line(other, data, progress=listener, **options)
    assert listener.calls[0] == (0, 3)


def test_a_broken_file_is_computed_anew(trained, tmp_path):
    model, x, y = trained
    file = tmp_path / "grid.json"
    file.write_text("{")
    assert landscape.line(model, (x, y), count=1, points=3, file=file).losses.shape == (1, 3)
    assert len(json.loads(file.read_text())["values"]) == 3


def test_landscapes_are_saved_and_loaded_with_infinite_losses(tmp_path):
    steps = torch.tensor([-1.0, 0.0], dtype=torch.float64)
    line = landscape.Line(steps, torch.tensor([[math.inf, 1.0]]).double(), None, ("seed 0",), "layer", ("a note",))
    line.save(tmp_path / "line.json")
    loaded = landscape.load(tmp_path / "line.json")
    assert isinstance(loaded, landscape.Line)
    assert loaded.losses.tolist() == [[math.inf, 1.0]]
    assert loaded.to_dict() == line.to_dict()
    assert landscape.Line.load(tmp_path / "line.json").to_dict() == line.to_dict()


def test_a_file_of_another_kind_is_refused(tmp_path):
    grid = torch.zeros(2, 2)
    surface = landscape.Surface(grid[0], grid[0], grid, None, ("seed 0", "seed 1"), "layer")
    surface.save(tmp_path / "surface.json")
    assert isinstance(landscape.load(tmp_path / "surface.json"), landscape.Surface)
    with pytest.raises(ValueError, match="not a saved line: the file holds a surface"):
        landscape.Line.load(tmp_path / "surface.json")
    (tmp_path / "points.json").write_text('{"format": "spiritlevel-landscape-1", "fingerprint": "", "values": {}}')
    with pytest.raises(ValueError, match="the file holds a grid that is not finished"):
        landscape.load(tmp_path / "points.json")


def test_the_model_comes_back_as_it_was_and_regression_has_no_accuracy(trained):
    model, x, _ = trained
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    found = landscape.line(model, (x, torch.zeros(40, 3).double()), "mse", count=1, points=3)
    assert found.accuracies is None
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalization": "silly"}, "normalization must be one of none, layer, filter"),
        ({"directions": "silly"}, 'directions must be "random", "eigen" or a model'),
        ({"points": 1}, "points must be at least 2, got 1"),
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"span": (1.0, -1.0)}, "span must be two finite numbers"),
    ],
)
def test_wrong_arguments_are_refused_in_words(trained, options, message):
    model, x, y = trained
    with pytest.raises(sl.SpiritLevelError, match=message):
        landscape.line(model, (x, y), **options)


def test_a_loss_of_the_same_name_is_another_loss(trained, tmp_path):
    model, x, y = trained
    options = {"count": 1, "points": 3, "file": tmp_path / "grid.json"}
    first = landscape.line(model, (x, y), lambda f, t: nn.functional.cross_entropy(f, t), **options)
    second = landscape.line(model, (x, y), lambda f, t: 2 * nn.functional.cross_entropy(f, t), **options)
    torch.testing.assert_close(second.losses, 2 * first.losses)


# --- what the words beside a picture say --------------------------------------------------------------------------------


def drawn_line(*labels):
    steps = torch.linspace(-1, 1, 5, dtype=torch.float64)
    return landscape.Line(steps, torch.rand(len(labels), 5, dtype=torch.float64), None, labels, "layer", ())


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ((("seed 0", "seed 1"), ("seed 0",)), "random directions"),
        ((("eigenvalue 2",), ("eigenvalue 3",)), "top eigenvectors"),
        ((("to model 2",), ("to model 2",)), "the line between two networks"),
        ((("seed 0",), ("eigenvalue 2",)), "lines of several kinds"),
    ],
)
def test_lines_are_called_what_they_are(labels, said):
    drawn = sl.plot.line({"a": drawn_line(*labels[0]), "b": drawn_line(*labels[1])})
    assert drawn.title == f"Loss along {said}"
    assert f"along {said}." in drawn.description


def test_a_plane_through_weights_that_are_no_minimum_is_not_said_to_pass_through_one():
    model, data = nn.Linear(2, 1), (torch.eye(2), torch.zeros(2, 1))
    assert sl.plot.surface(model, data, "mse", points=3).title == "Loss over a plane through the network's weights"


def test_a_surface_says_where_it_is_not_finite_and_what_lies_off_the_middle():
    x = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    losses = torch.arange(1.0, 10.0, dtype=torch.float64).reshape(3, 3)
    whole = sl.plot.surface(landscape.Surface(x, x.clone(), losses, None, ("to model 2", "to model 3"), "none", ()))
    assert whole.description.endswith("It is 1.00 at (0, 0), lowest with 1.00 at (0, 0) and highest with 9.00.")
    losses[2, 2], losses[0, 2] = math.inf, math.nan
    cut = sl.plot.surface(landscape.Surface(x, x.clone(), losses, None, ("to model 2", "to model 3"), "none", ()))
    assert cut.description.endswith("and highest with 8.00 where it is finite; at 2 of 9 points it is not.")
