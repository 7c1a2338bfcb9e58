"""Groups of invertible matrices, rotations and shifts: found, counted by singular values, applied and undone."""

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

import spiritlevel as sl
from networks import built, mlp, randomized
from spiritlevel.symmetry import Symmetries, find_symmetries, relative_change
from transformer_networks import GROUPS, Attention, made

EVERY = ["rescaling", "linear", "rotation", "shift"]


@cache
def found(name: str) -> tuple[nn.Module, Tensor, Symmetries]:
    build, shape, tokens, *_ = GROUPS[name]
    model, x = made(build, shape, tokens)
    return model, x, find_symmetries(model, x)


def total(symmetries: Symmetries, kind: str) -> int:
    return sum(group.dimension for group in symmetries.groups if group.kind == kind)


def nullity(model: nn.Module, shape: tuple[int, ...], tokens: int = 0) -> int:
    """The number of directions in the trained parameters that no output on random inputs sees, by singular values."""
    model = copy.deepcopy(model)  # a module that occurs twice would keep what it is called with
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    number = sum(p.numel() for p in parameters.values())
    generator, rows = torch.Generator().manual_seed(5), []
    while sum(map(len, rows)) < 2 * number:
        size = (12, *shape[1:])
        real = 2 * torch.randn(size, generator=generator, dtype=torch.float64)
        x = torch.randint(0, tokens, size, generator=generator) if tokens else real
        with sdpa_kernel(SDPBackend.MATH):
            jacobian = jacrev(lambda state, x=x: functional_call(model, state, (x,)).flatten())(parameters)
        rows.append(torch.cat([part.flatten(1) for part in jacobian.values()], dim=1))
    values = torch.linalg.svdvals(torch.cat(rows))
    return number - int((values > 1e-10 * values[0]).sum())


@pytest.mark.parametrize("name", GROUPS)
def test_matrices_and_rotations_have_the_dimension_they_should(name: str) -> None:
    _, _, _, linear, rotation = GROUPS[name]
    symmetries = found(name)[2]
    assert (total(symmetries, "linear"), total(symmetries, "rotation")) == (linear, rotation)


# A map that the next one sees only in part has more freedom, and so has a matrix that is its own transpose.
MORE = {"three in a row": 1, "tied query and key": 2 * 3}


@pytest.mark.parametrize("name", GROUPS)
def test_the_orbit_is_all_that_the_outputs_do_not_see(name: str) -> None:
    _, shape, tokens, *_ = GROUPS[name]
    model, _, symmetries = found(name)
    assert symmetries.orbit_dimension + MORE.get(name, 0) == nullity(model, shape, tokens)


@pytest.mark.parametrize("widths", [(6, 5, 4, 3), (4, 7, 2), (5, 6, 4)])
def test_a_relu_network_without_bias_has_one_direction_for_each_hidden_neuron(widths: tuple[int, ...]) -> None:
    model = randomized(mlp(*widths, bias=False))
    symmetries = find_symmetries(model, torch.randn(2, widths[0], dtype=torch.float64))
    assert symmetries.orbit_dimension == sum(widths[1:-1]) == nullity(model, (1, widths[0]))


@pytest.mark.parametrize(
    "name", ["mlp", "lenet", "layer norm", "vgg with batch norm", "attention", "plain attention", "encoder", "low rank"]
)
def test_the_orbit_is_never_larger_than_what_the_outputs_do_not_see(name: str) -> None:
    model, x = built(name)
    if sum(p.numel() for p in model.parameters()) < 1000:
        assert find_symmetries(model, x).orbit_dimension <= nullity(model, tuple(x.shape))


@pytest.mark.parametrize("name", GROUPS)
def test_twins_agree_and_the_way_back_is_the_inverse(name: str) -> None:
    model, x, symmetries = found(name)
    for kinds in (["linear"], ["rotation"], ["shift"], EVERY):
        move = symmetries.sample(0.7, seed=2, kinds=kinds)
        twin = move.apply(model)
        assert relative_change(model(x), twin(x)) < 1e-12
        moved = [not torch.allclose(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True)]
        assert any(moved) == any(group.kind in kinds for group in symmetries.groups)
        for back in (move.inverse().apply(twin), move.then(move.inverse()).apply(model)):
            for a, b in zip(model.parameters(), back.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_moves_compose_in_their_order() -> None:
    model, _, symmetries = found("block with layer normalization")
    first, second = (symmetries.sample(0.5, seed=seed, kinds=EVERY) for seed in (0, 1))
    rescaling = symmetries.sample(0.5, seed=2)
    state = dict(model.named_parameters())
    step_by_step = rescaling.transform(second.transform(first.transform(state)))
    for name, tensor in first.then(second).then(rescaling).transform(state).items():
        torch.testing.assert_close(tensor, step_by_step[name], rtol=1e-12, atol=1e-12)
    for name, tensor in (second @ first).transform(state).items():
        torch.testing.assert_close(tensor, first.then(second).transform(state)[name], rtol=0, atol=0)


def test_a_random_matrix_is_that_of_the_formula() -> None:
    model, _, symmetries = found("linear maps in a row")
    twin = symmetries.sample(0.3, seed=0, kinds=["linear"]).apply(model)
    A = twin[0].weight @ torch.linalg.pinv(model[0].weight)
    torch.testing.assert_close(twin[2].weight @ A, model[2].weight)
    assert 0.05 < float(torch.linalg.norm(A - torch.eye(3)).detach()) < 3


def test_biases_that_softmax_and_other_biases_hide_are_shifts() -> None:
    model, x = made(lambda: Attention(6, (3, 3), bias=True), (3, 4, 6))
    symmetries = find_symmetries(model, x)
    shifts = [(group.name, group.tensors) for group in symmetries.groups if group.kind == "shift"]
    assert shifts == [
        ("k.bias[0:3]", ("k.bias",)),
        ("k.bias[3:6]", ("k.bias",)),
        ("v.bias[0:3]", ("v.bias", "o.bias")),
        ("v.bias[3:6]", ("v.bias", "o.bias")),
    ]
    assert symmetries.orbit_dimension == nullity(model, (1, 4, 6)) == 4 * 9 + 12
    turned, x = made(lambda: Attention(6, (4,), bias=True, rotary=True), (3, 4, 6))
    names = [group.name for group in find_symmetries(turned, x).groups if group.kind == "shift"]
    assert names == ["v.bias[0:4]"]  # a rotated key's bias is seen


def test_a_bias_in_front_of_a_batch_normalization_is_a_shift() -> None:
    model, x = built("vgg with batch norm")
    symmetries = find_symmetries(model, x)
    shifts = [(group.name, group.tensors) for group in symmetries.groups if group.kind == "shift"]
    assert shifts[0] == ("0.bias[0:4]", ("0.bias", "1.bias"))
    assert [group[1] for group in shifts[1:]] == [("4.bias", "5.bias"), ("7.bias", "8.bias")]
    twin = symmetries.sample(1.0, 0, kinds=["shift"]).apply(model)
    assert relative_change(model(x), twin(x)) < 1e-12


def test_a_cut_stops_every_change_of_basis() -> None:
    """Where every unit is active a ReLU looks linear, and a mask of ones looks like no mask."""

    class Gated(nn.Module):
        def __init__(self, gate: str) -> None:
            super().__init__()
            self.gate, self.first, self.last = gate, nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            if self.gate == "relu":
                return self.last(h.relu())
            mask = x > -10 if self.gate in ("where", "mask") else x.clamp(0, 1)
            return self.last(torch.where(mask, h, 0.0) if self.gate == "where" else h * mask.to(h.dtype))

    for gate in ("relu", "where", "mask", "clamp"):
        model = Gated(gate).double()
        with torch.no_grad():
            model.first.weight.abs_()
        symmetries = find_symmetries(model, torch.full((1, 3), 5.0, dtype=torch.float64))
        assert total(symmetries, "linear") == 0, gate


def test_what_the_example_does_not_show_is_left_out() -> None:
    model, _ = made(lambda: Attention(6, (3, 3)), (1, 1, 6))
    symmetries = find_symmetries(model, torch.randn(1, 1, 6, dtype=torch.float64))  # one position: no scores to see
    assert {group.tensors for group in symmetries.groups if group.kind == "linear"} == {("v.weight", "o.weight")}


def test_an_adapter_that_was_never_trained_has_its_group() -> None:
    model, x = made(GROUPS["adapter"][0], (7, 4))
    with torch.no_grad():
        model.b.weight.zero_()
    symmetries = find_symmetries(model, x)
    assert total(symmetries, "linear") == 4
    assert symmetries.orbit_dimension == 4  # A moves, B stays zero


def test_discovery_leaves_the_model_alone_and_repeats_itself() -> None:
    model, x, symmetries = found("block")
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert find_symmetries(model, x).groups == symmetries.groups
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(p.grad is not None for p in model.parameters())


def test_single_precision_has_the_same_groups() -> None:
    model, x, symmetries = found("multihead")
    single = find_symmetries(copy.deepcopy(model).float(), x.float())
    assert single.groups == symmetries.groups
    single.sample(0.5, 0, kinds=["linear"]).apply(copy.deepcopy(model).float())


def test_wrong_use_is_refused_in_words() -> None:
    model, _, symmetries = found("multihead")
    with pytest.raises(sl.SpiritLevelError, match=r"kinds of factors are .*got \['atention'\]"):
        symmetries.sample(1.0, 0, kinds=["atention"])
    other = found("by hand")[2].sample(0.5, 0, kinds=["linear"])
    with pytest.raises(
        sl.SpiritLevelError, match=r"made for a network with q\.weight of shape \(6, 6\).*no such tensor"
    ):
        other.apply(model)
    with pytest.raises(sl.SpiritLevelError, match="of different networks do not compose"):
        other.then(symmetries.sample(0.5, 0, kinds=["linear"]))
    huge = symmetries.sample(2000.0, 0, kinds=["linear"])
    with pytest.raises(
        sl.SpiritLevelError, match=r"(is too strong to be undone|would overflow in float64); use a smaller"
    ):
        huge.apply(model)


class Normalized(nn.Module):
    """Divided by their length, hidden layers may be turned and stretched, but not mixed freely."""

    def __init__(self, held_back: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.held_back = nn.Linear(3, 4), nn.Linear(4, 2), held_back

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h / self.held_back(h))


@torch.no_grad()
def unrecorded(h: Tensor) -> Tensor:
    return h.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize(
    "held_back",
    [
        lambda h: h.norm(dim=-1, keepdim=True),
        lambda h: h.norm(dim=-1, keepdim=True).detach(),
        lambda h: h.detach().norm(dim=-1, keepdim=True),
        lambda h: h.data.norm(dim=-1, keepdim=True),
        unrecorded,
    ],
    ids=["recorded", "detached", "of detached", "of data", "without gradients"],
)
def test_what_is_held_back_from_autograd_is_part_of_the_function_all_the_same(held_back) -> None:
    model, x = randomized(Normalized(held_back)).double(), torch.randn(9, 3, dtype=torch.float64)
    symmetries = find_symmetries(model, x)
    assert {kind: total(symmetries, kind) for kind in ("rescaling", "rotation", "linear")} == {
        "rescaling": 1,
        "rotation": 6,
        "linear": 0,
    }
    for seed in range(3):
        assert relative_change(model(x), symmetries.sample(0.5, seed).apply(model)(x)) < 1e-10
