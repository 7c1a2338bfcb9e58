"""Nothing of the caller's is touched: everything comes back bit for bit, after an error too."""

import copy
import random
import threading

import numpy as np
import pytest
import torch
from small_problem import X, Y, network
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import spiritlevel as sl
from spiritlevel.curvature.hessian import HessianProducts
from spiritlevel.problem.quiet import is_undisturbed, undisturbed


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


def test_a_block_is_around_its_own_model_in_its_own_thread_only():
    model, seen = network(), []
    with undisturbed(model):
        assert is_undisturbed(model)
        assert not is_undisturbed(network())
        thread = threading.Thread(target=lambda: seen.append(is_undisturbed(model)))
        thread.start()
        thread.join()
    assert seen == [False]
    assert not is_undisturbed(model)


def test_products_from_kept_graphs_are_the_same_within_a_block_and_under_the_callers_autocast(own_precision):
    """Within one they open none of their own; outside of one they do, or autocast would round them."""
    problem = sl.Problem(network().float(), "cross_entropy", (X.float(), Y))
    products = HessianProducts(problem)
    vector = torch.ones(products.flat.size, dtype=problem.dtype)
    products([vector])  # keeps the graphs
    with problem.undisturbed():
        (within,) = products([vector])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (outside,) = products([vector])
    assert torch.equal(within, outside)
