"""The problem as a pure function: what it computes, what it refuses, and that the caller's things stay as they were."""

import copy
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import cases
import dense_oracle
import spiritlevel as sl
from refusals import refused

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(1))


def network(*layers):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), *(layers or (nn.ReLU(),)), nn.Linear(6, 3)).double()


# --- the function -----------------------------------------------------------------------------------------------


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


# --- nothing of the caller's is touched -------------------------------------------------------------------------


def everything(model):
    """All that a caller could notice: tensors bit by bit, gradients, flags, modes, hooks, random states."""
    return {
        "tensors": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "identities": [id(tensor) for tensor in (*model.parameters(), *model.buffers())],
        "versions": [tensor._version for tensor in (*model.parameters(), *model.buffers())],
        "gradients": [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in model.parameters()],
        "flags": [p.requires_grad for p in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "hooks": [
            [dict(hooks) for name, hooks in sorted(vars(module).items()) if name.endswith("_hooks")]
            for module in model.modules()
        ],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1:]),  # noqa: NPY002
        "grad enabled": torch.is_grad_enabled(),
    }


def assert_same(before, after):
    def same(a, b):
        if isinstance(a, torch.Tensor | np.ndarray):
            return bool((torch.as_tensor(a) == torch.as_tensor(b)).all())
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        if isinstance(a, list | tuple):
            return len(a) == len(b) and all(map(same, a, b))
        return a == b

    for key in before:
        assert same(before[key], after[key]), key


class Restless(Dataset):
    """Draws from every global generator, without using what it drew."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
        return X[index], Y[index]


def used_model():
    """In train mode, part of it in eval mode, with gradients, hooks, dropout and running statistics."""
    model = network(nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.5)).train()
    model[1].double().eval()
    F.cross_entropy(model(X), Y).backward()
    model[0].register_forward_hook(lambda module, inputs, output: None)
    model[4].register_full_backward_hook(lambda module, inputs, outputs: None)
    return model


@pytest.mark.parametrize("measures", ["all", ["hessian_trace"]], ids=["all", "one"])
@pytest.mark.parametrize("data", [(X, Y), DataLoader(Restless(), batch_size=16)], ids=["pair", "loader"])
def test_the_callers_things_come_back_bit_for_bit(measures, data):
    model = used_model()
    x, y = X.clone(), Y.clone()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)  # noqa: NPY002
    before = everything(model)
    sl.measure(model, data, measures=measures, tolerance=0.05)
    assert_same(before, everything(model))
    assert torch.equal(x, X)
    assert torch.equal(y, Y)


@pytest.mark.parametrize("after", [0, 1, 2, 3, 5, 8, 11])
def test_they_come_back_after_an_error_too(after):
    model = used_model()

    class Interrupted(Exception):
        pass

    calls = []

    def loss(outputs, targets):
        calls.append(1)
        if len(calls) > after:
            raise Interrupted
        return F.cross_entropy(outputs, targets)

    before = everything(model)
    with pytest.raises(Interrupted):
        sl.measure(model, (X, Y), loss)
    assert_same(before, everything(model))


def test_no_gradient_mode_of_the_caller_does_not_matter():
    wanted = sl.measure(network(), (X, Y), tolerance=1e-6)
    with torch.no_grad():
        found = sl.measure(network(), (X, Y), tolerance=1e-6)
    model = network()
    with torch.inference_mode():
        assert sl.measure(model, (X, Y), tolerance=1e-6).loss == pytest.approx(wanted.loss)
    for name, value in wanted.values.items():
        assert found[name].value == pytest.approx(value.value, rel=1e-12)


def test_dropout_modules_are_off_and_training_mode_is_put_back():
    model = network(nn.ReLU(), nn.Dropout(0.9)).train()
    quiet = copy.deepcopy(model).eval()
    assert sl.measure(model, (X, Y), measures=["hessian_trace"])["hessian_trace"].value == pytest.approx(
        sl.measure(quiet, (X, Y), measures=["hessian_trace"])["hessian_trace"].value, rel=1e-12
    )
    assert model.training


def test_buffers_that_change_are_reset_before_every_call():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()
            self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

        def forward(self, x):
            self.calls += 1
            return self.inner(x) * self.calls

    model = Counting()
    report = sl.measure(model, (X, Y), measures=["hessian_trace"])
    assert float(model.calls) == 0
    assert report.loss == pytest.approx(float(F.cross_entropy(model.inner(X), Y).detach()), rel=1e-12)
    assert "the model changes its own buffers when it runs; they are reset before every call" in report.notes


def test_inputs_that_the_model_writes_into_are_copied_first():
    class Greedy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x):
            x -= 1
            return self.inner(x)

    x = X.clone()
    report = sl.measure(Greedy(), (x, Y), measures=["hessian_trace"])
    assert torch.equal(x, X)
    assert report.loss == pytest.approx(float(F.cross_entropy(network()(X - 1), Y).detach()), rel=1e-12)
    assert "the model changes its inputs in place; it is given copies" in report.notes


# --- refusals ---------------------------------------------------------------------------------------------------


class Always(nn.Module):
    """Functional dropout that forgot `training=self.training`."""

    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, x):
        return F.dropout(self.inner(x), 0.5)


def test_functional_dropout():
    message = (
        "the network gives different outputs for the same inputs in eval mode. Likely cause: {}. Pass "
        "training=self.training to functional dropout, and draw no random numbers in forward when the module is in eval mode"
    )
    with refused(message.format("dropout or noise in forward"), sl.NondeterministicError):
        sl.measure(Always(), (X, Y))

    class MyDropout(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5)

    with refused(message.format("dropout that ignores eval mode (1)"), sl.NondeterministicError):
        sl.measure(network(MyDropout()), (X, Y))


def test_batch_normalization_without_running_statistics():
    message = (
        "a sample's output depends on the other samples of its batch, so the loss is not a mean over samples. Likely cause: "
        "batch normalization with the statistics of the batch, as in train mode (1). Use running statistics "
        "(track_running_stats=True) in eval mode, or pass a loss of the form (model, batch) -> (mean, count), which keeps "
        "your batches as they are"
    )
    with refused(message, sl.NondeterministicError):
        sl.measure(network(nn.BatchNorm1d(6, track_running_stats=False)), (X, Y))


def test_a_random_loss_of_model_and_batch():
    def loss(model, batch):
        return F.dropout(model(batch[0])).mean(), len(batch[1])

    with pytest.raises(
        sl.NondeterministicError, match=r"^the loss gives .* and then .* for the same batch in eval mode\."
    ):
        sl.measure(network(), [(X, Y)], loss)


def test_no_parameters_are_no_choice():
    message = "parameters is empty, so there is nothing to measure: name some, or leave it out for all trainable ones"
    for nothing in ([], (), ""):
        with refused(message):
            sl.measure(network(), (X, Y), parameters=nothing)


def test_a_module_under_two_names_keeps_its_parameters():
    """torch.func.functional_call leaves its tensors in such a module."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()
            self.also = self.inner

        def forward(self, x):
            return self.inner(x)

    model = Twice()
    before = everything(model)
    found = sl.measure(model, (X, Y), measures=["hessian_spectral_norm"])["hessian_spectral_norm"]
    assert_same(before, everything(model))
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    plain = sl.measure(network(), (X, Y), measures=["hessian_spectral_norm"])["hessian_spectral_norm"]
    assert found.value == pytest.approx(plain.value, rel=1e-12)


def test_a_compiled_model():
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        traced = torch.jit.trace(network(), X)
    with refused(
        "the model is compiled (torch.jit), so it cannot be computed with other weights: pass the module it was made from"
    ):
        sl.measure(traced, (X, Y))


def test_all_frozen_or_nothing_at_all():
    model = network().requires_grad_(False)
    with refused(
        "every parameter is frozen (requires_grad=False), so there is nothing to measure: call requires_grad_(True) on "
        "those that should count"
    ):
        sl.measure(model, (X, Y))
    with refused("the model has no parameters, so there is nothing to measure"):
        sl.measure(nn.ReLU(), (X, Y))
    with refused("model must be a torch.nn.Module, got function"):
        sl.measure(network, (X, Y))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_parameters_and_buffers_that_are_not_finite(bad):
    model = network(nn.BatchNorm1d(6)).double()
    model[2].weight.data[1, 2] = bad
    model[2].weight.data[0, 0] = bad
    with refused("'2.weight' contains NaN or infinity (2 entries)"):
        sl.measure(model, (X, Y))
    model = network(nn.BatchNorm1d(6)).double()
    model[1].running_mean[3] = bad
    with refused("'1.running_mean' contains NaN or infinity (1 entries)"):
        sl.measure(model, (X, Y))


def test_parameters_of_other_kinds():
    with pytest.warns(UserWarning, match="Complex modules"):
        model = nn.Linear(4, 3).to(torch.complex64)
    with refused("parameter 'weight' is complex; flatness is defined here for real parameters only"):
        sl.measure(model, (X, Y))
    with refused("parameter 'weight' is not initialized: run the model once before measuring"):
        sl.measure(nn.LazyLinear(3), (X, Y))


def test_outputs_that_are_not_finite():
    model = network()
    model[2].weight.data.mul_(1e308)
    with refused("the network's outputs contain NaN or infinity on finite inputs"):
        sl.measure(model, (X * 100, Y))


@pytest.mark.parametrize(
    "name", ["hessian_trace", "hessian_spectral_norm", "kappa_sum", "fisher_rao_norm", "keskar_sharpness"]
)
def test_a_loss_that_is_not_finite_is_located(name):
    x = X.clone()
    x[30] = 1e4

    def exploding(outputs, targets):
        return outputs.abs().exp().sum(1).mean()

    with refused("the loss of sample 30 is inf: every sample needs a finite loss"):
        sl.measure(network(), (x, Y), exploding, measures=[name])
    with refused("the loss is inf on the first batch"):
        sl.measure(network(), (x[28:], Y[28:]), exploding, measures=[name])


def test_outputs_without_spread_are_located_wherever_they_are():
    model = nn.Linear(4, 3, bias=False).double()
    for sample in (2, 31):
        x = X.clone()
        x[sample] = 0
        with refused(
            f"all outputs of sample {sample} are equal, so normalized_cross_entropy (which divides by their standard "
            "deviation) is not defined there: leave the sample out or use cross_entropy"
        ):
            sl.measure(model, (x, Y), "normalized_cross_entropy", measures=["hessian_trace"])


@pytest.mark.parametrize("loss", ["cross_entropy", "normalized_cross_entropy"])
@pytest.mark.parametrize("loader", [False, True])
def test_labels_out_of_range_are_located_wherever_they_are(loss, loader):
    y = Y.clone()
    y[33] = 5
    data = DataLoader(TensorDataset(X, y), batch_size=16) if loader else (X, y)
    with refused("label 5 of sample 33 is out of range: the network has 3 outputs, so labels must be 0 to 2"):
        sl.measure(network(), data, loss)


def test_losses_that_are_no_mean():
    def unreduced(outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="none")

    def summed(outputs, targets):
        return (outputs * 0 + 1).mean(1).sum()

    def constant(outputs, targets):
        return F.cross_entropy(outputs.detach(), targets)

    with refused("loss returned a tensor of shape (8,); `measure` needs the mean over the batch: return `loss.mean()`"):
        sl.measure(network(), (X, Y), unreduced)
    with refused(
        "the loss 'summed' is not a mean over samples: 8 on 8 samples, but its two halves average to 4. Return the mean over "
        "the batch (not the sum), or pass a loss of the form (model, batch) -> (mean, count), which is weighted by its own "
        "count"
    ):
        sl.measure(network(), (X, Y), summed)
    with refused("the loss must return a tensor, got float"):
        sl.measure(network(), (X, Y), lambda outputs, targets: 1.0)
    with refused(
        "the loss 'constant' does not depend on the outputs: it returned a constant, or left torch on the way (detach, item, "
        "numpy)"
    ):
        sl.measure(network(), (X, Y), constant)


def test_dict_batches_need_a_loss_of_their_own():
    with refused(
        "the batches are dicts without 'labels' for every sample, and the loss 'cross_entropy' needs targets: pass a loss of "
        "the form (model, batch) -> (mean loss, count), for example `def loss(model, batch): return model(**batch).loss, "
        "int((batch['labels'] != -100).sum())`"
    ):
        sl.measure(network(), [{"x": X, "y": Y}])
    with refused(
        "a loss of the form (model, batch) must return (mean loss, count), got Tensor: return for example `out.loss, "
        "len(batch['input_ids'])`"
    ):
        sl.measure(network(), [{"x": X}], lambda model, batch: model(batch["x"]).mean())


def test_inputs_in_another_precision_than_the_model():
    with pytest.raises(
        sl.SpiritLevelError,
        match=r"^the model cannot be called on the first batch \(inputs of torch.float64, parameters of torch.float32: "
        r"convert one, or pass dtype=torch.float32\): ",
    ):
        sl.measure(network().float(), (X, Y))
    assert sl.measure(network().float(), (X, Y), dtype=torch.float32, measures=["hessian_trace"]).loss > 0


# --- memory -----------------------------------------------------------------------------------------------------

LARGE = """
import resource, torch, spiritlevel as sl
from spiritlevel.curvature.examine import examine
from spiritlevel.curvature.blocks import GaussNewtonBlocks
from spiritlevel.curvature.hessian import HessianProducts
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
x, y = torch.randn(60_000, 784), torch.randint(0, 2, (60_000,))
model = nn.Sequential(nn.Linear(784, 1100), nn.ReLU(), nn.Linear(1100, 560), nn.ReLU(), nn.Linear(560, 2))
problem = sl.Problem(model, "cross_entropy", (x, y))
products = HessianProducts(problem)
products([torch.randn(products.flat.size)])
products.release()  # as a measurement does before it goes on to the blocks
blocks = GaussNewtonBlocks(problem, examine(problem), ["0.weight", "2.weight", "4.weight"])
blocks({name: torch.randn_like(problem.parameters[name]) for name in blocks.names})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts kilobytes on Linux only")
def test_memory_does_not_grow_with_the_data():
    """60,000 samples through 1.5 million parameters: all that is kept between products, under 2 GB in the whole process."""
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 2e9
