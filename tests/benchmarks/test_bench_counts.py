"""What fixed small problems cost, by counting: a change that makes them dearer fails here, without a clock."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import spiritlevel as sl
from benchmarks.ours import evidence_for
from benchmarks.subjects import Subject
from benchmarks.tasks import SWEEP
from spiritlevel.curvature.columns import columns_needed
from spiritlevel.problem.problem import Problem

SAMPLES, CLASSES = 600, 5


class _Products(TorchDispatchMode):
    """Counts matrix products and convolutions, and the multiplications in them."""

    NAMES = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.NAMES:
            self.calls += 1
        return func(*args, **(kwargs or {}))


def _dense():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def _conv():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, CLASSES))


def _data(*shape):
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(SAMPLES) % CLASSES
    return torch.randn(SAMPLES, *shape, generator=generator) + y.view(-1, *[1] * len(shape)), y


CASES = {"dense": (_dense, (12,)), "conv": (_conv, (1, 8, 8))}


@pytest.fixture(params=CASES)
def case(request, own_precision):
    build, shape = CASES[request.param]
    model, (x, y) = build(), _data(*shape)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, (x, y)


# Samples that checks of the problem and of rounding look at.
CHECKS = 600


def _counting_samples(monkeypatch):
    """How many samples go forward through the network, and how many calls that takes."""
    seen = {"samples": 0, "calls": 0}
    outputs = Problem.outputs

    def counted(self, parameters, batch):
        seen["samples"] += len(batch)
        seen["calls"] += 1
        return outputs(self, parameters, batch)

    monkeypatch.setattr(Problem, "outputs", counted)
    return seen


def test_a_sweep_sends_the_data_forward_twice(case, monkeypatch):
    """Once to see what runs and which samples matter, once for the sums; a few samples more for checks and rounding."""
    seen = _counting_samples(monkeypatch)
    report = sl.measure(*case, measures=SWEEP, tolerance=1e-9)
    assert report.cost.passes == 2
    assert report.cost.products == report.cost.gradients == 0
    assert seen["samples"] <= 2 * SAMPLES + CHECKS
    assert seen["calls"] <= 80


def test_a_sweep_pulls_back_at_most_one_column_a_class(case):
    model, (x, y) = case
    layers = sum(parameter.dim() > 1 for parameter in model.parameters())
    whole = Problem(model, "cross_entropy", (x, y)).chunk_size
    chunks = -(-SAMPLES // whole)
    with _Products() as counted:
        sl.measure(model, (x, y), measures=["hessian_trace"], tolerance=1e-9)
    # Per chunk: forward once, each class back through every layer, and one product a layer and class for the sums.
    assert counted.calls <= chunks * layers * (2 + 3 * CLASSES) + 60 * layers


def test_the_largest_eigenvalue_takes_few_full_products(case):
    report = sl.measure(*case, measures=["hessian_spectral_norm"], tolerance=1e-4)
    assert report["hessian_spectral_norm"].converged
    assert report.cost.gradients <= 1
    assert report.cost.products <= 14
    assert report.cost.passes <= 15


def test_further_operators_share_the_passes(case):
    one = sl.measure(*case, measures=["hessian_spectral_norm"], tolerance=1e-4).cost
    three = sl.measure(
        *case,
        measures=["hessian_spectral_norm", "riemannian_spectral_norm", "riemannian_nodewise_spectral_norm"],
        tolerance=1e-4,
    ).cost
    assert three.gradients == one.gradients
    assert three.passes <= 2 * one.passes + 5


def test_eigenvalues_build_every_graph_once(case, monkeypatch):
    seen = _counting_samples(monkeypatch)
    sl.measure(*case, measures=["hessian_spectral_norm", "riemannian_spectral_norm"], tolerance=1e-4)
    assert seen["samples"] <= 2 * SAMPLES + CHECKS  # every further product goes through the kept graph


def test_layer_blocks_do_not_go_through_the_network_at_every_product(case, monkeypatch):
    seen = _counting_samples(monkeypatch)
    report = sl.measure(*case, measures=["kappa_sum"])
    assert report["kappa_sum"].converged
    assert report.cost.passes <= 15
    assert seen["samples"] <= 2 * SAMPLES + CHECKS  # once for the survey, which has the loss, once for the blocks


def test_the_default_set_shares_what_it_needs(case, monkeypatch):
    seen = _counting_samples(monkeypatch)
    report = sl.measure(*case)
    assert report.cost.passes <= 40
    assert report.cost.products <= 60
    assert report.cost.gradients <= 1
    assert seen["samples"] <= 4 * SAMPLES + 1.5 * CHECKS  # survey, sweep, graphs of gradients, layer blocks


# Train loss below which training stops → at most so many columns a sample are needed, of four, and so many samples visited, of all.
ALONG = {1.0: (4.0, 1.0), 0.1: (1.2, 0.95), 1e-2: (0.6, 0.65), 1e-3: (0.45, 0.45)}


@pytest.fixture(scope="module")
def along():
    """One training, its weights kept where the loss first lay below each level."""
    model, (x, y) = _dense(), _data(12)
    optimizer, kept = torch.optim.Adam(model.parameters(), lr=0.02), {}
    while len(kept) < len(ALONG):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        kept |= {level: copy.deepcopy(model) for level in ALONG if level not in kept and float(loss.detach()) < level}
        loss.backward()
        optimizer.step()
    return kept, (x, y)


def test_columns_and_samples_fall_with_the_train_loss(along, own_precision, monkeypatch):
    models, data = along
    seen = _counting_samples(monkeypatch)
    counts = {}
    for level, model in models.items():
        evidence = evidence_for(Subject(None, model, *data), SWEEP, 1e-3)
        assert evidence.anatomy.axes  # the survey and all checks are done here
        seen["samples"] = 0
        assert evidence.swept.swept_columns <= CLASSES - 1
        # Samples are swept in sets, with the columns of the one that needs most: of 600 that decides more than the loss does.
        needed = columns_needed(evidence.problem, 1e-3)
        columns = CLASSES - 1 if needed is None else float(needed.double().mean())
        counts[level] = (columns, seen["samples"] / SAMPLES)
    for level, (columns, samples) in ALONG.items():
        assert counts[level][0] <= columns, counts
        assert counts[level][1] <= samples, counts
    assert counts[1e-3][0] < counts[1e-2][0] < counts[0.1][0], counts
    assert counts[1e-3][1] < counts[1e-2][1] < counts[0.1][1], counts


def _peak(samples):
    """The most bytes that torch held at once, by its own account: the same on every machine, whatever the allocator keeps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    data = torch.randn(samples, 64), torch.randint(0, 10, (samples,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as run:
        sl.measure(model, data, measures=["hessian_trace", "rho_sum", "normalized_sharpness"])
    changes = [event.nbytes() for event in run.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert len(changes) > 1_000
    return max(itertools.accumulate(changes))


@pytest.mark.long
def test_the_peak_of_a_sweep_does_not_grow_with_the_data():
    few = _peak(4_000)
    assert few < 7 << 20
    # The activations of 20,000 samples would hold 20 MB; what the survey keeps of a sample, its outputs and mass, is 1.2 MB.
    assert _peak(20_000) < few + (2 << 20)
