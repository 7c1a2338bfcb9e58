"""Discovery is right on every kind of network: nothing wrong is found, nothing is missed, the model is not touched."""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks import CASES, ResNet, built, mlp, randomized
from spiritlevel.errors import SpiritLevelError, TracingError
from spiritlevel.symmetry import find_symmetries
from spiritlevel.symmetry.scales import fixed
from spiritlevel.symmetry.trace import RULES
from symmetry_oracle import number_of_symmetries

# ReLU6 cuts too rarely at random inputs for derivatives to notice every cut.
COUNTED = sorted(set(CASES) - {"mobilenet relu6"})


@pytest.mark.parametrize("name", CASES)
def test_dimension_is_the_closed_form(name: str) -> None:
    model, x = built(name)
    assert find_symmetries(model, x).dimension == CASES[name].dimension


@pytest.mark.parametrize("name", COUNTED)
def test_dimension_is_what_derivatives_count(name: str) -> None:
    model, _ = built(name)
    assert number_of_symmetries(model, CASES[name].shape) == CASES[name].dimension


@pytest.mark.parametrize("name", CASES)
def test_sampled_twins_compute_the_same_function_on_new_inputs(name: str) -> None:
    model, x = built(name)
    symmetries = find_symmetries(model, x)
    twin = symmetries.sample(strength=1.5, seed=3).apply(model)
    fresh = torch.randn((5, *x.shape[1:]), generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(twin(fresh), model(fresh), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_every_factor_moves_the_model(name: str) -> None:
    model, x = built(name)
    symmetries = find_symmetries(model, x)
    for factor in range(0, symmetries.dimension, 7):
        moved = symmetries.slices(factor)
        assert {part.exponent > 0 for part in moved} >= {True}
        logs = torch.zeros(symmetries.dimension)
        logs[factor] = 1.0
        scales = symmetries.log_scales(logs)
        for part in moved:
            value = scales[part.name].expand(symmetries.tensors[part.name].shape)[part.index]
            torch.testing.assert_close(value, torch.full_like(value, part.exponent))


def test_factors_are_independent() -> None:
    for name in ("used on two branches", "tied modules", "plain attention", "gated", "resnet A"):
        model, x = built(name)
        symmetries = find_symmetries(model, x)
        columns = []
        for k in range(symmetries.dimension):
            logs = torch.eye(symmetries.dimension)[k]
            scales = symmetries.log_scales(logs)
            columns.append(torch.cat([v.expand(symmetries.tensors[n].shape).flatten() for n, v in scales.items()]))
        assert torch.linalg.matrix_rank(torch.stack(columns)) == symmetries.dimension


def test_slices_of_a_perceptron() -> None:
    symmetries = find_symmetries(mlp(4, 3, 2), torch.ones(1, 4))
    parts = {(part.name, part.exponent): part.index for part in symmetries.slices(1)}
    assert set(parts) == {("0.weight", 1.0), ("0.bias", 1.0), ("2.weight", -1.0)}
    assert parts["0.weight", 1.0][0].tolist() == [1]
    assert parts["0.weight", 1.0][1] == slice(None)
    assert parts["2.weight", -1.0][0] == slice(None)
    assert parts["2.weight", -1.0][1].tolist() == [1]


def test_flatten_maps_a_channel_to_its_block_of_features() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
    symmetries = find_symmetries(model, torch.ones(1, 1, 4, 4))
    index = {part.name: part.index for part in symmetries.slices(2)}["3.weight"]
    assert index[1].tolist() == [8, 9, 10, 11]


def test_groups_say_which_factors_cross_a_batch_normalization() -> None:
    model, x = built("vgg with batch norm")
    groups = find_symmetries(model, x).scale_groups
    assert [group.kind for group in groups] == ["batch-norm", "neuron"] * 3 + ["neuron"]
    assert groups[0].multiplies == ("0.weight", "0.bias", "1.running_mean")
    assert groups[0].divides == ("1.weight",)


def test_the_table_names_groups_conditions_and_barriers() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 2))
    text = find_symmetries(model, torch.ones(1, 3)).describe()
    assert "4 independent scale factors in 1 groups" in text
    assert "0.weight[i, :], 0.bias[i]  2.weight[:, i]" in text
    assert "0.weight · 2.weight = 1" in text
    assert "scales are fixed by: gelu" in text


def test_the_model_comes_back_bit_for_bit() -> None:
    model = ResNet("A").train()
    model.blocks[0].eval()
    calls = []
    handle = model.fc.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(2, 3, 8, 8)
    model(x).sum().backward()
    before = copy.deepcopy(model.state_dict())
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    modes = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    symmetries = find_symmetries(model, x)
    symmetries.sample(1.0, 0).apply(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, grads[name]) for name, p in model.named_parameters())
    assert handle.id in model.fc._forward_hooks


class Branching(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer, self.last = how, nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).relu()
        if self.how == "bool" and x.sum() > 1:
            x = x * 2
        if self.how == "item":
            x = x / x.max().item()
        if self.how == "tolist" and x.flatten().tolist()[0] > 0:
            x = -x
        if self.how == "mask":
            x = x + x[x > 0].sum()
        return self.last(x)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("bool", 'a number read out of an activation .* at "if self.how == "bool" and x.sum'),
        ("item", "a number read out of an activation"),
        ("tolist", r"a number read out of an activation \(Tensor.tolist\)"),
        ("mask", "a result whose shape depends on the data"),
    ],
)
def test_branching_on_data_is_refused_with_the_place(how: str, message: str) -> None:
    with pytest.raises(TracingError, match=message):
        find_symmetries(Branching(how), torch.ones(2, 3))


def test_other_refusals_say_what_to_do() -> None:
    with pytest.raises(SpiritLevelError, match="a tensor, a tuple of arguments or a dict of keywords; got str"):
        find_symmetries(mlp(2, 3, 1), "x")
    tied = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    tied[2].weight = nn.Parameter(tied[0].weight.data)
    with pytest.raises(TracingError, match="different objects in the same memory; tie them by assigning one"):
        find_symmetries(tied, torch.ones(1, 3))


class OneOperation(nn.Module):
    """Linear, an operation, linear: what the operation does to the five scales in between."""

    def __init__(self, operation: object, width: int = 5) -> None:
        super().__init__()
        self.first, self.last, self.operation = nn.Linear(4, 5), nn.LazyLinear(2), operation

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.operation(self.first(x)))


OPERATIONS = {
    "abs": (torch.abs, 5),
    "neg": (lambda h: -h, 5),
    "times a constant": (lambda h: 3.0 * h, 5),
    "plus a constant": (lambda h: h + 1.0, 0),
    "plus zero": (lambda h: h + 0.0, 5),
    "clamp at zero": (lambda h: h.clamp(min=0), 5),
    "clamp elsewhere": (lambda h: h.clamp(min=-1), 0),
    "maximum with itself reversed": (lambda h: torch.maximum(h, h.flip(-1)), 3),
    "minus the mean": (lambda h: h - h.mean(-1, keepdim=True), 1),
    "divided by its norm": (lambda h: h / h.norm(dim=-1, keepdim=True), 1),
    "softplus": (F.softplus, 0),
    "sign": (torch.sign, 5),
    "square": (lambda h: h**2, 5),
    "root of abs": (lambda h: h.abs().sqrt(), 5),
    "mask": (lambda h: torch.where(h > 0, h, 0.5 * h), 5),
    "product with another feature": (lambda h: h[:, :4] * h[:, 1:], 5),
    "drop a feature": (lambda h: h[:, :4], 5),
    "repeat": (lambda h: h.repeat(1, 2), 5),
    "pad with ones": (lambda h: F.pad(h, (1, 1), value=1.0), 5),
    "concatenate with constants": (lambda h: torch.cat([h, torch.ones(len(h), 2, dtype=h.dtype)], -1), 5),
    "cumulative sum": (lambda h: h.cumsum(-1), 1),
    "sort": (lambda h: h.sort(-1).values, 1),
    "top two": (lambda h: h.topk(2, -1).values, 1),
    "largest": (lambda h: h.amax(-1, keepdim=True), 1),
    "in place on a view": (lambda h: _in_place(h), 5),
    "random mask": (lambda h: F.dropout(h, 0.5, training=True), 5),
}


def _in_place(h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[:, :2] = h[:, 3:]
    out[:, 2:].copy_(h[:, :3]).mul_(2.0)
    return out


@pytest.mark.parametrize("name", OPERATIONS)
def test_one_operation_between_two_layers(name: str) -> None:
    operation, expected = OPERATIONS[name]
    model, x = OneOperation(operation).double(), torch.randn(6, 4, dtype=torch.float64)
    model(x)
    model = randomized(model)
    symmetries = find_symmetries(model, x)
    # A sign or a last feature that nothing reads still has its own factor: nothing downstream sees it.
    assert symmetries.dimension == expected
    if name != "random mask":
        symmetries.sample(1.0, 0).apply(model)


def test_a_frozen_layer_and_a_dictionary_of_inputs() -> None:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 2)

        def forward(self, tokens: Tensor, scale: Tensor) -> dict[str, Tensor]:
            return {"logits": self.head(self.embed(tokens) * scale)}

    model = Keywords()
    model.embed.requires_grad_(False)
    symmetries = find_symmetries(model, {"tokens": torch.tensor([[1, 2]]), "scale": torch.tensor(2.0)})
    assert symmetries.dimension == 4
    assert symmetries.scale_groups[0].multiplies == ("embed.weight",)
    symmetries.sample(1.0, 0).apply(model)


def test_weight_normalization_frees_the_length_of_v() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(3, 2)).double()
    symmetries = find_symmetries(model, torch.randn(2, 4, dtype=torch.float64))
    assert symmetries.dimension == 3 + 3
    symmetries.sample(1.0, 0).apply(model)


def test_a_buffer_that_is_a_constant_stays() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.ones(3))
            self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x) + self.shift)

    assert find_symmetries(Shifted(), torch.ones(1, 2)).dimension == 0


@pytest.mark.parametrize("answer", ["error", "wrong shape"])
def test_a_form_of_an_operation_that_its_rule_does_not_know_is_fixed(answer: str, monkeypatch) -> None:
    def broken(recorder: object, call: object) -> object:
        if answer == "error":
            raise KeyError("dim")
        return fixed((1, 1, 1))

    monkeypatch.setitem(RULES, "relu", broken)
    symmetries = find_symmetries(mlp(2, 3, 1), torch.ones(1, 2))
    assert symmetries.dimension == 0
    assert symmetries.barriers == {"relu": 1}


def calls_for_a_resnet(depth: int) -> int:
    """How many functions are called to find the symmetries: what takes the time, and the same on every machine."""
    model, x, count = ResNet("A", depth=depth, widths=(16, 32, 64)), torch.randn(1, 3, 32, 32), 0

    def called(_frame: object, event: str, _what: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        find_symmetries(model, x)
    finally:
        sys.setprofile(before)
    return count


def test_the_work_for_resnet_56_grows_with_its_depth_and_no_faster() -> None:
    calls_for_a_resnet(1)  # what is looked up once
    shallow, deep = calls_for_a_resnet(3), calls_for_a_resnet(9)
    assert deep < 3.1 * shallow
    assert deep < 250_000  # half a second; a search among all pairs of blocks would take millions
