"""Sweeps of the columns that matter: as much as the tolerance says is left, and what is left to chance is in the error."""

import pytest
import torch
from torch import nn

import spiritlevel as sl
from spiritlevel.curvature import columns
from spiritlevel.curvature.blocks import LEFT_OUT, GaussNewtonBlocks
from spiritlevel.curvature.dense import dense_hessian
from spiritlevel.curvature.examine import examine
from spiritlevel.curvature.hessian import LEFT_OF_HEAVY, LEFT_OF_WIDE, HessianProducts, tiers
from spiritlevel.curvature.statistics import sweep
from spiritlevel.problem.losses import resolve_loss
from spiritlevel.problem.survey import threshold

NAMES = ["hessian_trace", "rho_sum", "rho_row_sum", "normalized_sharpness", "kappa_trace_max"]
OPERATORS = ["hessian_spectral_norm", "riemannian_spectral_norm", "riemannian_nodewise_spectral_norm"]
CLASSES, SAMPLES = 6, 400


@pytest.fixture(autouse=True)
def _small_networks_too(monkeypatch):
    monkeypatch.setattr("spiritlevel.problem.batches.SMALL", 0)


@pytest.fixture(scope="module")
def fitted():
    """A network that fits most of its data: loss 0.02, and nearly all curvature in a few samples."""
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 8).double()
    y = nn.Linear(8, CLASSES).double()(x).argmax(1)
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, CLASSES)).double()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, (x, y)


@pytest.fixture(scope="module")
def exact(fitted):
    return sl.measure(*fitted, measures=NAMES, tolerance=1e-9)


def swept(model, data, tolerance):
    problem = sl.Problem(model, "cross_entropy", data)
    return columns.columns_needed(problem, tolerance)


def test_columns_come_by_size_and_combine():
    torch.manual_seed(0)
    outputs = 3 * torch.randn(5, 7).double()
    factor = resolve_loss("cross_entropy").curvature(outputs, torch.zeros(5, dtype=torch.long))
    found = torch.stack([column for column, _ in factor.columns()], 1)
    p = outputs.softmax(1)
    torch.testing.assert_close(found.mT @ found, torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1))
    torch.testing.assert_close(factor.sizes(), found.square().sum(2))
    assert bool((factor.sizes().diff(dim=1) <= 1e-15).all())
    weights = torch.randn(5, 6).double()
    torch.testing.assert_close(factor.combined(weights)[0], (weights.unsqueeze(2) * found).sum(1))


def test_fewer_columns_the_better_a_network_fits(fitted):
    """What is left is at most the tolerance of ΣtrS, and one column more would be too many."""
    model, data = fitted
    sizes = sl.Problem(model, "cross_entropy", data).survey.sizes
    means = []
    for tolerance in (1e-2, 1e-3, 1e-4):
        needed = swept(model, data, tolerance)
        left = sizes[torch.arange(CLASSES - 1) >= needed.unsqueeze(1)]
        assert float(left.sum()) <= tolerance * float(sizes.sum()) < float(left.sum()) + float(sizes.max())
        means.append(float(needed.double().mean()))
    assert means[0] < means[1] < means[2] < CLASSES - 1
    assert means[1] < 2


def test_what_is_left_to_chance_is_in_the_error(fitted, exact):
    model, data = fitted
    outside = 0
    for seed in range(12):
        report = sl.measure(model, data, measures=NAMES, seed=seed)
        for name in NAMES:
            value = report[name]
            assert not value.exact
            assert value.error_kind == "standard error"
            assert 0 < value.error <= 1e-3 * value.value
            assert "of 5 columns a sample, the rest from random samples" in value.method
            outside += abs(value.value - exact[name].value) > 2 * value.error
    assert outside <= 3


def test_the_mean_over_seeds_is_the_exact_value(fitted, exact):
    model, data = fitted
    found = torch.tensor(
        [sl.measure(model, data, measures=NAMES[:1], tolerance=0.1, seed=s)[NAMES[0]].value for s in range(30)]
    )
    off = abs(float(found.double().mean()) - exact[NAMES[0]].value)
    assert off <= 4 * float(found.double().std()) / 30**0.5
    assert float(found.double().std()) > 1e-6 * exact[NAMES[0]].value


def test_twins_take_the_same_columns(fitted):
    model, data = fitted
    symmetries = sl.find_symmetries(model, data[0])
    twin = symmetries.sample(1.0, seed=3).apply(model)
    mine, others = (sl.measure(each, data, measures=NAMES) for each in (model, twin))
    for name in ("rho_sum", "rho_row_sum", "normalized_sharpness"):
        assert others[name].value == pytest.approx(mine[name].value, rel=1e-10)


def test_a_stream_is_grouped_chunk_by_chunk(fitted, exact):
    model, (x, y) = fitted
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=150)
    report = sl.measure(model, loader, measures=NAMES)
    for name in NAMES:
        assert abs(report[name].value - exact[name].value) <= 2 * report[name].error


@pytest.mark.parametrize("tolerance", [1e-7, 1e-3])
def test_all_columns_where_less_is_asked_for_or_nothing_is_saved(fitted, tolerance):
    model, (x, y) = fitted
    data = (x, y) if tolerance < 1e-6 else (x, torch.arange(len(x)) % CLASSES)
    if tolerance > 1e-6:
        model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, CLASSES)).double()
    assert swept(model, data, tolerance) is None
    report = sl.measure(model, data, measures=NAMES, tolerance=tolerance)
    assert all(report[name].exact for name in NAMES)


def test_small_networks_are_swept_whole(fitted, monkeypatch):
    monkeypatch.setattr("spiritlevel.problem.batches.SMALL", 10_000_000)
    assert swept(*fitted, 1e-3) is None


def test_blocks_leave_out_columns_and_tell_what_these_could_add(fitted):
    model, data = fitted
    exact = sl.measure(model, data, measures=["kappa_max"], tolerance=1e-9)["kappa_max"]
    for seed in range(4):
        found = sl.measure(model, data, measures=["kappa_max"], tolerance=0.1, seed=seed)["kappa_max"]
        assert found.certified
        for name, value in found.layers.items():
            assert 0 < exact.layers[name] - value <= found.layer_errors[name] < 0.05 * value


def test_what_is_left_of_a_trace_is_told(fitted):
    """Against the sweep of all columns less that of the needed ones, layer by layer."""
    model, data = fitted
    problem = sl.Problem(model, "cross_entropy", data)
    anatomy, needed = examine(problem), columns.columns_needed(problem, 0.1)
    every = sweep(problem, anatomy, frozenset(["trace"]), torch.Generator()).found["trace"]
    blocks = GaussNewtonBlocks(problem, anatomy, list(anatomy.layers), tolerance=0.1 / LEFT_OUT)
    for name, bound in blocks.left_out(torch.Generator().manual_seed(0)).items():
        taken = sum(
            float((use.deltas.square().sum((0, 2)) * use.phi.square().sum(1)).sum()) / SAMPLES
            for chunk in blocks._chunks()
            for use in chunk.layers[name]
        )
        left = float(every[name][0]) - taken
        assert 0 < left <= bound < 4 * left  # twice of what fifty samples say
    assert float(needed.double().mean()) < 2


def test_samples_without_columns_are_not_visited(fitted):
    model, data = fitted
    problem = sl.Problem(model, "cross_entropy", data)
    anatomy, needed = examine(problem), columns.columns_needed(problem, 0.1)
    blocks = GaussNewtonBlocks(problem, anatomy, list(anatomy.layers), tolerance=0.1 / LEFT_OUT)
    visited = sum(chunk.shares.shape[1] for chunk in blocks._chunks())
    assert visited == int((needed > 0).sum()) < SAMPLES / 2


def test_eigenvalues_are_searched_on_the_heavy_samples_and_proved_on_all(fitted):
    model, data = fitted
    problem = sl.Problem(model, "cross_entropy", data)
    products = HessianProducts(problem)
    assert products.has_part()
    assert products.heavy_first
    masses, (heavy, standing, ring, others) = problem.survey.masses, tiers(problem)
    felt = masses.unsqueeze(1) * problem.survey.reaches
    for light, left in ((torch.cat([standing, ring, others]), LEFT_OF_HEAVY), (others, LEFT_OF_WIDE[-1])):
        assert float(masses[light].sum()) <= left * float(masses.sum())
        assert bool((felt[light].sum(0) <= left * felt.sum(0)).all())
    assert sorted(torch.cat([heavy, standing, ring, others]).tolist()) == list(range(SAMPLES))
    truth = float(torch.linalg.eigvalsh(dense_hessian(problem)).abs().max())
    report = sl.measure(model, data, measures=["hessian_spectral_norm"], tolerance=1e-4)
    found = report["hessian_spectral_norm"]
    assert found.converged
    assert abs(found.value - truth) <= found.error
    assert found.products <= 2  # over all data
    assert report.cost.products <= 2 + (14 * (len(heavy) + len(standing)) + 4 * (SAMPLES - len(others))) / SAMPLES


def test_a_wider_part_saves_products_with_all_data(fitted, monkeypatch):
    """One or two, where corrections without it take more; the same eigenvalues within their errors."""
    model, data = fitted
    with_it = sl.measure(model, data, measures=OPERATORS, tolerance=1e-4)
    monkeypatch.setattr("spiritlevel.curvature.hessian.LEFT_OF_WIDE", ())
    without = sl.measure(model, data, measures=OPERATORS, tolerance=1e-4)
    for name in OPERATORS:
        assert with_it[name].products < without[name].products
        assert abs(with_it[name].value - without[name].value) <= with_it[name].error + without[name].error


def test_the_wider_part_is_products_with_its_samples(fitted):
    """Whatever is kept: against the Hessian of those samples alone."""
    model, (x, y) = fitted
    for budget in (1 << 30, 0):
        problem = sl.Problem(model, "cross_entropy", (x, y))
        products = HessianProducts(problem, budget=budget)
        assert products.is_wider
        rows = torch.cat(tiers(problem)[:3])
        alone = HessianProducts(sl.Problem(model, "cross_entropy", (x[rows], y[rows])))
        vector = torch.linspace(-1, 1, products.flat.size).double()
        for _ in range(2):
            (found,), (expected,) = products.on_wider_part([vector]), alone([vector])
            torch.testing.assert_close(found, expected * len(rows) / SAMPLES)
        (found,), (expected,) = products([vector]), HessianProducts(problem, budget=0)([vector])
        torch.testing.assert_close(found, expected)


def test_light_samples_are_not_looked_at_before_a_product_with_all_data(fitted):
    """The graphs of heavy samples come first; the gradient is that of all data once all of them were visited."""
    model, data = fitted
    problem = sl.Problem(model, "cross_entropy", data)
    products = HessianProducts(problem)
    before = problem.work.passes
    assert products.has_part()
    heavy, standing, *_ = tiers(problem)
    assert problem.work.passes - before == pytest.approx((len(heavy) + len(standing)) / SAMPLES)
    assert products.gradient is None
    products([torch.ones(products.flat.size).double()])
    gradient = products.flat.join(list(problem.gradient()[1].values()))
    torch.testing.assert_close(products.gradient, gradient)
    assert products.loss == pytest.approx(problem.loss(), rel=1e-12)


@pytest.mark.parametrize("left", [0.0, 0.3, 1.5, 2.6, 4.0, 100.0])
def test_the_threshold_leaves_as_much_as_allowed(left):
    """Against the sorted entries; equal ones go together, zeros are always left."""
    sizes = torch.tensor([[8.0, 0.5, 2.0], [0.5, 0.0, 1e-30], [0.5, 3.0, 0.0]])
    least = threshold(sizes, left)
    assert (least is None) == (left >= float(sizes.sum()))
    if least is not None:
        kept = sizes[sizes > least]
        assert float(sizes[sizes <= least].sum()) <= left < float(sizes[sizes <= kept.min()].sum())


def test_the_threshold_of_many_entries_over_many_decades():
    sizes = torch.exp(20 * torch.randn(5000, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    for left in (1e-1, 1e-4, 1e-12):
        least = threshold(sizes, left * float(sizes.sum()))
        kept = sizes[sizes > least]
        assert float(sizes[sizes <= least].sum()) <= left * float(sizes.sum())
        assert float(sizes[sizes <= kept.min()].sum()) > left * float(sizes.sum())


def test_the_gradient_is_taken_once(fitted):
    """By the survey where nothing else brings it, by products with H where these are asked for; the same either way."""
    model, data = fitted
    swept_only = sl.measure(model, data, measures=["hessian_trace"])
    searched = sl.measure(model, data, measures=["hessian_spectral_norm"])
    truth = sl.Problem(model, "cross_entropy", data).gradient()[1]
    norm = sum(float(part.square().sum()) for part in truth.values()) ** 0.5
    for report in (swept_only, searched):
        assert report.problem["gradient_norm"] == pytest.approx(norm, rel=1e-9)
    assert searched.problem["gradient_metric_norm"] == pytest.approx(swept_only.problem["gradient_metric_norm"])


def test_graphs_of_light_samples_are_kept_only_where_many_products_follow(fitted, monkeypatch):
    monkeypatch.setattr("spiritlevel.curvature.hessian.LIGHT_BUDGET", 0)
    products = HessianProducts(sl.Problem(fitted[0], "cross_entropy", fitted[1]))
    vector = torch.ones(products.flat.size).double()
    (few,) = products([vector])
    held = len(products._kept)
    products.expect_many()
    (many,) = products([vector])
    torch.testing.assert_close(few, many)
    assert held < len(products._kept)


def certain_samples_that_reach_far(inputs):
    """Sixty samples of which a linear network is uncertain, on features of their own, and 340 of which it is certain."""
    torch.manual_seed(0)
    x, model = torch.zeros(SAMPLES, 12).double(), nn.Linear(12, 4, bias=False).double()
    x[:60, :6] = torch.randn(60, 6).double()
    x[60:, 6:] = inputs * torch.randn(SAMPLES - 60, 6).double().abs()
    with torch.no_grad():
        model.weight[:, 6:] = 0
        model.weight[2, 6:] = 8 / inputs
    return model, (x, torch.full((SAMPLES,), 2))


def linear_hessian(model, x, rows=slice(None), features=slice(None)):
    """The block of some features, from some of the samples."""
    p, phi = model(x[rows]).detach().softmax(1), x[rows, features]
    curvature = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    return torch.einsum("nij,na,nb->iajb", curvature, phi, phi).flatten(2).flatten(0, 1) / len(x)


def test_a_certain_sample_may_curve_more_than_an_uncertain_one():
    """Mass says how certain a network is, and not how far outputs move: no eigenvector hides in samples of large inputs."""
    model, data = certain_samples_that_reach_far(300.0)
    hessian = linear_hessian(model, data[0])
    truth = float(torch.linalg.eigvalsh(hessian)[-1])
    report = sl.measure(model, data, measures=["hessian_spectral_norm", "kappa_max", "hessian_trace"], tolerance=1e-3)
    assert report["hessian_spectral_norm"].value == pytest.approx(truth, rel=1e-3)
    assert report["kappa_max"].value == pytest.approx(truth * float(model.weight.detach().square().sum()), rel=1e-3)
    assert report["hessian_trace"].value == pytest.approx(float(hessian.trace()), rel=1e-3)


def test_mass_decides_where_certain_samples_reach_no_further():
    model, data = certain_samples_that_reach_far(1.0)
    problem = sl.Problem(model, "cross_entropy", data)
    assert columns.columns_needed(problem, 1e-3) is not None
    heavy = problem.survey.heaviest(LEFT_OF_HEAVY)
    assert int(heavy.sum()) <= 60
    assert not bool(heavy[60:].any())


def test_of_few_samples_none_is_left_out():
    """An eighth of them is drawn, and seven samples do not say what is left of sixty."""
    model, (x, y) = certain_samples_that_reach_far(1.0)
    for count, some_are in ((columns.FEWEST_TO_LEAVE - 1, False), (columns.FEWEST_TO_LEAVE, True)):
        problem = sl.Problem(model, "cross_entropy", (x[:count], y[:count]))
        assert (columns.columns_needed(problem, 1e-3) is not None) == some_are


@pytest.mark.parametrize("seed", [0, 1, 7, 9])
def test_light_samples_may_put_another_eigenvector_first(seed):
    """Two groups of samples on features of their own; the first leads among the heavy samples, the second among all."""
    torch.manual_seed(seed)
    x, model = torch.zeros(SAMPLES, 6).double(), nn.Linear(6, 3, bias=False).double()
    x[:30, :3], x[30:60, 3:] = torch.randn(30, 3).double(), torch.randn(30, 3).double()
    x[60:, 3] = 2 + torch.rand(SAMPLES - 60).double()
    with torch.no_grad():
        model.weight.mul_(0.05)
        model.weight[0, 3] = 3.0

    def leading(rows, features):
        return float(torch.linalg.eigvalsh(linear_hessian(model, x, rows, features))[-1])

    for _ in range(20):
        first, second = leading(slice(30), slice(3)), leading(slice(30, 60), slice(3, 6))
        every = leading(slice(30, SAMPLES), slice(3, 6))
        x[:30] *= ((second + 0.6 * (every - second)) / first) ** 0.5
    data = x, torch.zeros(SAMPLES, dtype=torch.long)
    truth = float(torch.linalg.eigvalsh(linear_hessian(model, x))[-1])
    found = sl.measure(model, data, measures=["hessian_spectral_norm"], tolerance=1e-3)["hessian_spectral_norm"]
    assert abs(found.value - truth) <= found.error + 1e-12 * truth


def test_rounding_is_looked_at_where_curvature_is():
    """Not on the samples with the steepest losses, which may have next to no part in an eigenvalue."""
    model, data = certain_samples_that_reach_far(3e4)
    heavy = sl.Problem(model, "cross_entropy", data).survey.heavy.batch
    assert float(heavy.inputs.abs().max()) > 3e3


def test_of_a_neuron_of_which_nothing_was_drawn_something_is_left(fitted):
    model, data = fitted
    problem = sl.Problem(model, "cross_entropy", data)
    sizes, needed = problem.survey.sizes, columns.columns_needed(problem, 1e-2)
    drawn = columns._Drawn(sizes, needed, torch.Generator().manual_seed(0))
    together, rest = columns.Sums(), columns.Sums()
    together.add("rows", "weight", torch.tensor([3.0, 1.0]).double())
    rest.add("rows", "weight", torch.tensor([0.0, 0.5]).double())
    share = drawn.uncertain_share
    found = drawn.uncertain(together, rest, "rows")["weight"]
    assert found.tolist() == pytest.approx([-share * 3 * 0.5 / 4, -share * 0.5])
    left = float(sizes[torch.arange(sizes.shape[1]) >= needed.unsqueeze(1)].sum() / sizes.sum())
    nothing = drawn.uncertain(together, columns.Sums(), "rows")["weight"]
    assert nothing.tolist() == pytest.approx([-share * left * 3, -share * left])


@pytest.mark.parametrize("size", [1024, 128])
def test_samples_are_swept_with_few_columns_more_than_they_need_in_chunks_of_some_size(size):
    """1,000 samples that need 0 to 8 columns, 1.3 in the mean, as a convolutional network of digits does at a loss of 1e-3."""
    counts = torch.repeat_interleave(torch.arange(9), torch.tensor([406, 260, 139, 91, 57, 32, 10, 3, 2]))
    sets = columns._alike(counts, 1, size)
    assert torch.cat(sets).sort().values.tolist() == list(range(406, 1000))
    chunks = [chunk for alike in sets for chunk in torch.split(alike, size)]
    assert min(map(len, chunks)) >= 64
    assert sum(len(alike) * int(counts[alike].max()) for alike in sets) / 1000 <= {1024: 3.0, 128: 1.8}[size]


def test_rounding_is_looked_at_in_the_columns_that_matter(fitted):
    model, (x, y) = fitted
    problem = sl.Problem(model, "cross_entropy", (x, y))
    anatomy = examine(problem)
    batch = problem.survey.heavy.batch
    kinds = frozenset(["diagonal", "rows", "columns"])
    found = columns.sweep_batch(problem, anatomy, kinds, batch)
    alone = sl.Problem(model, "cross_entropy", (batch.inputs, batch.targets))
    whole = sweep(alone, anatomy, kinds, torch.Generator()).found
    for kind in kinds:
        for name, array in found[kind].items():
            left = 1 - float(array.sum() / whole[kind][name][0].sum())
            assert 0 < left < 3 * columns.LEFT_OF_BATCH
