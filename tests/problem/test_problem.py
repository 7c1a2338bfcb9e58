"""The problem as a pure function: what it computes, and in how much memory."""

import copy
import subprocess
import sys

import pytest
import torch
from small_problem import X, Y, network
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import cases
import dense_oracle
import spiritlevel as sl
from refusals import refused

# --- the function -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "mlp, squared error", "batch normalization", "embedding", "tied weights"])
def test_loss_and_gradient_are_those_of_the_mean_over_all_samples(name):
    case = cases.by_name(name)
    model, x, y = case.make()
    problem = sl.Problem(model, case.loss, (x, y))
    value, theta = dense_oracle.flat_loss(model, case.mean_loss, x, y), dense_oracle.flat(model).requires_grad_()
    wanted = value(theta)
    (slope,) = torch.autograd.grad(wanted, theta)
    loss, gradient = problem.gradient()
    assert loss == pytest.approx(float(wanted.detach()), rel=1e-13)
    assert problem.loss() == pytest.approx(float(wanted.detach()), rel=1e-13)
    torch.testing.assert_close(torch.cat([part.flatten() for part in gradient.values()]), slope, rtol=1e-11, atol=1e-14)


def test_the_loss_at_other_parameters():
    model = network()
    problem = sl.Problem(model, "cross_entropy", (X, Y))
    other = {name: 2 * value for name, value in problem.parameters.items()}
    doubled = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in doubled.parameters():
            parameter.mul_(2)
    assert problem.loss(other) == pytest.approx(float(F.cross_entropy(doubled(X), Y).detach()), rel=1e-13)


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_the_size_of_chunks_does_not_matter(size):
    problem = sl.Problem(network(), "cross_entropy", DataLoader(TensorDataset(X, Y), batch_size=9))
    wanted = problem.loss()
    problem.chunk_size = size
    assert problem.loss() == pytest.approx(wanted, rel=1e-13)
    assert sum(weight for _, weight in problem.chunks()) == pytest.approx(1, rel=1e-13)


def test_frozen_parameters_are_left_out_and_tied_ones_count_once():
    model = network()
    model[0].requires_grad_(False)
    assert list(sl.Problem(model, "cross_entropy", (X, Y)).parameters) == ["2.weight", "2.bias"]
    tied, x, y = cases.by_name("tied weights").make()
    names = list(sl.Problem(tied, "cross_entropy", (x, y)).parameters)
    assert names == ["first.weight", "first.bias", "second.bias", "last.weight", "last.bias"]


def test_parameters_can_be_chosen_by_pattern():
    problem = sl.Problem(network(), "cross_entropy", (X, Y), parameters=["0.*"])
    assert list(problem.parameters) == ["0.weight", "0.bias"]
    with refused("no parameter matches 'conv*'; the model has 0.weight, 0.bias, 2.weight, 2.bias, …"):
        sl.Problem(network(), "cross_entropy", (X, Y), parameters=["conv*"])


class Keywords(nn.Module):
    """A model of the kind that is called with the entries of a dict and returns its own loss."""

    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, x, labels=None):
        logits = self.inner(x)
        return {"logits": logits, "loss": None if labels is None else F.cross_entropy(logits, labels)}


def whole_batch(model, batch):
    return model(**batch)["loss"], len(batch["labels"])


def test_a_loss_of_model_and_batch_is_weighted_by_its_count():
    batches = [{"x": X[:30], "labels": Y[:30]}, {"x": X[30:], "labels": Y[30:]}]
    model = Keywords()
    problem = sl.Problem(model, whole_batch, batches)
    assert problem.loss() == pytest.approx(float(F.cross_entropy(model.inner(X), Y).detach()), rel=1e-12)
    names = ["hessian_spectral_norm", "riemannian_spectral_norm", "kappa_sum"]
    report = sl.measure(model, batches, whole_batch, measures=names, tolerance=1e-10)
    plain = sl.measure(model.inner, (X, Y), measures=names, tolerance=1e-10)
    for name in names:
        assert report[name].value == pytest.approx(plain[name].value, rel=1e-8)


def test_inputs_by_keyword_with_targets_beside_them():
    model = Keywords()
    data = [({"x": X[:25]}, Y[:25]), ({"x": X[25:]}, Y[25:])]
    problem = sl.Problem(model, lambda outputs, targets: F.cross_entropy(outputs["logits"], targets), data)
    assert problem.loss() == pytest.approx(float(F.cross_entropy(model.inner(X), Y).detach()), rel=1e-12)


# --- memory -----------------------------------------------------------------------------------------------------------


LARGE = """
import resource, torch, spiritlevel as sl
from spiritlevel.curvature.examine import examine
from spiritlevel.curvature.blocks import GaussNewtonBlocks
from spiritlevel.curvature.hessian import HessianProducts
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
x, y = torch.randn(60_000, 16), torch.randint(0, 2, (60_000,))
model = nn.Sequential(nn.Linear(16, 1600), nn.ReLU(), nn.Linear(1600, 60), nn.ReLU(), nn.Linear(60, 2))
problem = sl.Problem(model, "cross_entropy", (x, y))
products = HessianProducts(problem)
products([torch.randn(products.flat.size)])
products.release()  # as a measurement does before it goes on to the blocks
blocks = GaussNewtonBlocks(problem, examine(problem), ["0.weight", "2.weight", "4.weight"])
blocks({name: torch.randn_like(problem.parameters[name]) for name in blocks.names})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts kilobytes on Linux only")
def test_memory_does_not_grow_with_the_data():
    """60,000 samples through 1,660 units: all that is kept between products, under 1.8 GB in the whole process."""
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 1.8e9, done.stdout


# --- which samples matter ---------------------------------------------------------------------------------------------


def test_the_heaviest_samples_reach_far_also_where_the_last_layer_is_zero():
    """Mass alone would name the first two, which are blank and move nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3)).double()
    nn.init.zeros_(model[2].weight)
    x = torch.randn(12, 4, dtype=torch.float64)
    x[:2] = 0
    x[7] *= 100
    telling = sl.Problem(model, "cross_entropy", (x, torch.arange(12) % 3)).telling_samples(1)
    assert torch.equal(telling.inputs[0], x[7])
