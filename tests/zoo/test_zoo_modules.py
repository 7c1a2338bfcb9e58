"""Modules that write, hide or share what they compute with, and inputs of unusual kinds."""

import copy
import functools
import types
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spiritlevel as sl
import zoo
from refusals import refused
from spiritlevel.problem import checks
from zoo import TOKENS, X, Y, check_cross_entropy, mean_on, whole

# --- the caller's module ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["cross_entropy", whole], ids=["outputs", "whole batch"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_weights_that_are_written_in_forward(loss, frozen):
    class Clamping(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            with torch.no_grad():
                self.first.weight.clamp_(-0.1, 0.1)
            return self.last(self.first(x))

    model = zoo.seeded(Clamping)
    model.first.requires_grad_(not frozen)
    data = (X, Y) if loss == "cross_entropy" else [(X, Y)]
    if frozen:
        oracle = copy.deepcopy(model)
        with torch.no_grad():
            oracle.first.weight.clamp_(-0.1, 0.1)
        zoo.check(model, data, loss, mean_on(X), oracle=oracle)
        return
    with (
        zoo.unchanged(model),
        refused(
            "the network writes into its own weight 'first.weight' when it runs, so the loss is not a function of the parameters: "
            "do that outside of forward, or in train mode only (if self.training), and measure what it leaves"
        ),
    ):
        sl.measure(model, data, loss)


class Bound(nn.Module):
    """Calls its layers by ways that a copy of the structure has to follow."""

    def __init__(self, way):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.also = self.first  # one module under two names
        self.way = {
            "closure": lambda x: self.last(torch.tanh(self.first(x))),
            "method": self.both,
            "partial": functools.partial(Bound.both, self),
            "list": [self.first, torch.tanh, self.last],
            "table": {"first": self.first, "last": [self.last]},
            "object": types.SimpleNamespace(first=self.first, last=self.last),
        }[way]
        self.kind = way

    def both(self, x):
        return self.last(torch.tanh(self.also(x)))

    def forward(self, x):
        if self.kind == "list":
            for step in self.way:
                x = step(x)
            return x
        if self.kind == "table":
            return self.way["last"][0](torch.tanh(self.way["first"](x)))
        if self.kind == "object":
            return self.way.last(torch.tanh(self.way.first(x)))
        return self.way(x)


@pytest.mark.parametrize("way", ["closure", "method", "partial", "list", "table", "object"])
@pytest.mark.parametrize("loss", ["cross_entropy", whole], ids=["outputs", "whole batch"])
def test_modules_that_are_reached_by_other_ways_than_their_names(way, loss):
    model, oracle = zoo.seeded(lambda: Bound(way)), zoo.seeded(lambda: Bound("method"))
    data = (X, Y) if loss == "cross_entropy" else [(X, Y)]
    zoo.check(model, data, loss, lambda m: F.cross_entropy(m.both(X), Y), oracle=oracle, exact=False)
    assert (sl.Problem(model, loss, data).module is model) == (way == "object")


def test_a_loss_that_calls_another_name_of_the_model():
    net = zoo.seeded(lambda: Bound("method"))

    def loss(model, batch):
        return F.cross_entropy(net(batch[0]), batch[1]), len(batch[1])

    zoo.check(net, [(X, Y)], loss, mean_on(X), exact=False)


def test_a_tensor_that_was_taken_out_of_its_module():
    class Taken(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)
            self.weight_of = [self.inner.weight.detach()]

        def forward(self, x):
            return F.linear(self.inner(x), torch.eye(3).to(x)) + F.linear(x, self.weight_of[0])

    model = Taken().double()
    model.weight_of[0] = model.inner.weight.detach()
    with refused(
        "the network reads your model's 'inner.weight' past the module it belongs to (through a tensor that was taken out of "
        "it), so it cannot be computed with other weights: read it from the module in forward, or in a loss of the form "
        "(model, batch) from the model that is passed in"
    ):
        sl.measure(model, (X, Y))


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_compiled_module_inside_a_network():
    def build(compiled):
        first = nn.Linear(4, 4)
        return nn.Sequential(torch.jit.script(first) if compiled else first, nn.Tanh(), nn.Linear(4, 3))

    model, oracle = zoo.seeded(lambda: build(True)), zoo.seeded(lambda: build(False))
    report = sl.measure(model, (X, Y), measures=["hessian_spectral_norm"], tolerance=1e-9)
    wanted = float(torch.linalg.eigvalsh(zoo.hessian(oracle, mean_on(X))).abs().max())
    assert report["hessian_spectral_norm"].value == pytest.approx(wanted, rel=1e-7)


# --- valid, though it looks odd ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")
def test_a_number_for_python_in_forward():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            h = self.first(x)
            return self.last(torch.tanh(h) if float(h.abs().sum()) > 0 else h)

    check_cross_entropy(Branching, exact=False)


@pytest.mark.parametrize("loss", ["cross_entropy", whole], ids=["outputs", "whole batch"])
def test_minus_infinity_in_a_buffer(loss):
    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(1, 2), nn.Linear(2, 3)
            self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))

        def forward(self, x):
            h = self.first(x.unsqueeze(2))
            return self.last(((h @ h.mT + self.mask).softmax(2) @ h)[:, -1])

    data = (X, Y) if loss == "cross_entropy" else [(X, Y)]
    zoo.check(zoo.seeded(Causal), data, loss, mean_on(X), exact=False)


def test_tensors_made_in_inference_mode():
    def build():
        return zoo.seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)))

    with torch.inference_mode():
        model, x, y = build(), X.clone(), Y.clone()
        model[0].weight.requires_grad_(False)
    plain = build()
    plain[0].weight.requires_grad_(False)
    wanted = sl.measure(plain, (X, Y), measures=zoo.MEASURES)
    for data in ((x, y), [(x[:2], y[:2]), (x[2:], y[2:])]):
        found = sl.measure(model, data, measures=zoo.MEASURES)
        for name in zoo.MEASURES:
            assert found[name].value == pytest.approx(wanted[name].value, rel=1e-9), name
    batches = [{"x": x, "y": y}]
    found = sl.measure(
        model, batches, lambda model, b: (F.cross_entropy(model(b["x"]), b["y"]), 6), measures=["kappa_sum"]
    )
    assert found["kappa_sum"].value == pytest.approx(wanted["kappa_sum"].value, rel=1e-3)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_of_width_zero():
    class Hollow(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out_of, self.beside = nn.Linear(4, 0), nn.Linear(0, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.out_of(torch.relu(self.into(x))) + self.beside(x)

    model = zoo.seeded(Hollow)
    H = zoo.hessian(model, mean_on(X))
    report = sl.measure(model, (X, Y), measures="all", tolerance=0.01)
    assert report["hessian_trace"].value == pytest.approx(float(H.trace()), rel=1e-9)
    assert report["hessian_spectral_norm"].value == pytest.approx(float(torch.linalg.eigvalsh(H)[-1]), rel=1e-6)
    assert report["rho_sum"].layers["into.weight"] == report["rho_sum"].layers["out_of.weight"] == 0
    assert sl.audit(model, (X, Y), measures=["rho_sum"], strengths=[1.0]).trials
    assert sl.spectrum(model, (X, Y), steps=5, probes=2).size == 18


@pytest.mark.parametrize("how", ["block", "decorator", "cuda"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_autocast_inside_the_network_has_no_effect(how):
    """If torch enters autocast by another way than `autocast.__enter__`, activations are rounded and this fails."""

    class Casting(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.first, self.last, self.how = nn.Linear(4, 4), nn.Linear(4, 3), how

        def plain(self, x):
            return self.last(torch.tanh(self.first(x)))

        def forward(self, x):
            if self.how == "block":
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return self.plain(x)
            if self.how == "decorator":
                return torch.autocast("cpu", dtype=torch.bfloat16)(self.plain)(x)
            if self.how == "cuda":
                with torch.cpu.amp.autocast(dtype=torch.bfloat16):
                    return self.plain(x)
            return self.plain(x)

    names = ["hessian_spectral_norm", "hessian_trace", "kappa_sum"]
    model, plain = zoo.seeded(lambda: Casting(how)).float(), zoo.seeded(lambda: Casting("")).float()
    found, wanted = (sl.measure(each, (X.float(), Y), measures=names) for each in (model, plain))
    assert found.loss == wanted.loss
    assert [found[name].value for name in names] == [wanted[name].value for name in names]
    assert model(X.float()).dtype == torch.bfloat16  # and outside it is as it was


# --- buffers, devices, inputs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["cross_entropy", whole], ids=["outputs", "whole batch"])
def test_a_forward_pass_that_changes_its_buffers(loss):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
            self.register_buffer("calls", torch.ones(()))
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x):
            h = torch.tanh(self.first(x)) / self.calls.clone()
            self.calls += 1
            self.seen.copy_(h.mean(0).detach())
            return self.last(h)

    model = zoo.seeded(Counting)
    oracle = copy.deepcopy(model)
    oracle.calls.requires_grad_(False)

    def mean(model):
        model.calls.fill_(1)
        return F.cross_entropy(model(X), Y)

    data = (X, Y) if loss == "cross_entropy" else [(X, Y)]
    report = zoo.check(model, data, loss, mean, oracle=oracle, exact=False)
    assert "the model changes its own buffers when it runs; they are reset before every call" in report.notes
    assert float(model.calls) == 1


def test_integers_as_inputs():
    class Ids(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.last(torch.tanh(self.first(x.to(self.first.weight.dtype) / 7)))

    check_cross_entropy(Ids, x=TOKENS, exact=False)
    check_cross_entropy(Ids, x=TOKENS.to(torch.uint8), exact=False)


def test_tensors_without_data():
    with refused("batch 0 is on the meta device, which holds no numbers: pass tensors with data"):
        sl.measure(nn.Linear(4, 3), (X.float().to("meta"), Y.to("meta")))
    with refused("'1.weight' is on the meta device, which holds no numbers: load the model's weights before measuring"):
        sl.measure(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3, device="meta")), (X.float(), Y))


def test_a_batch_elsewhere_is_moved_to_the_model():
    """The meta device stands in for a model that is not where the data is: whatever it is given arrives there."""
    problem = sl.Problem(nn.Linear(4, 3).double(), "cross_entropy", (X, Y))
    problem.device = torch.device("meta")
    placed = problem.first_chunk()
    assert placed.inputs.is_meta
    assert placed.targets.is_meta


def test_a_model_on_several_devices():
    parts = {"first.weight": torch.zeros(2), "first.bias": torch.zeros(2), "last.weight": torch.zeros(2, device="meta")}
    with refused(
        "the model is spread over several devices ('first.weight' on cpu, 'last.weight' on meta): move it to one with "
        "model.to(device)"
    ):
        checks.check_devices(parts)


@dataclass
class SimpleLogits:
    scores: torch.Tensor


def test_dropout_behind_a_dataclass_is_noticed():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x):
            return SimpleLogits(F.dropout(self.inner(x), 0.5))

    with pytest.raises(sl.NondeterministicError, match=r"^the network gives different outputs for the same inputs"):
        sl.measure(Noisy().double(), (X, Y), lambda outputs, targets: F.cross_entropy(outputs.scores, targets))
