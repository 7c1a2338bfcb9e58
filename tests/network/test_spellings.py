"""One linear map, however a network writes it down: the same layer, the same side, the same numbers."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

import spiritlevel as sl

X, Y = torch.randn(7, 4, generator=torch.Generator().manual_seed(0)).double(), torch.tensor([0, 1, 2, 0, 1, 2, 0])

# x (…, inputs) times a matrix that is stored with its inputs first.
INPUTS_FIRST = {
    "x @ W": lambda x, w: x @ w,
    "matmul by name": lambda x, w: torch.matmul(x, other=w),
    "mm by name": lambda x, w: torch.mm(x, mat2=w),
    "einsum": lambda x, w: torch.einsum("bi,io->bo", x, w),
    "einsum, matrix first": lambda x, w: torch.einsum("io,bi->bo", w, x),
    "einsum without a result": lambda x, w: torch.einsum("bi,io", x, w),
    "einsum of a list": lambda x, w: torch.einsum("...i,io->...o", [x, w]),
    "einsum, results first": lambda x, w: torch.einsum("bi,io->ob", x, w).T,
    "einsum, samples last": lambda x, w: torch.einsum("ib,io->bo", x.T, w),
    "tensordot": lambda x, w: torch.tensordot(x, w, ([1], [0])),
    "tensordot over one": lambda x, w: torch.tensordot(x, w, 1),
    "tensordot, matrix first": lambda x, w: torch.tensordot(w, x, ([0], [-1])).T,
    "(W.T @ x.T).T": lambda x, w: (w.T @ x.T).T,
    "linear of a transpose": lambda x, w: F.linear(x, w.T),
    "linear of a transpose laid out anew": lambda x, w: F.linear(x, w.T.contiguous()),
    "addmm with a factor": lambda x, w: torch.addmm(torch.zeros(1).double(), x, w, alpha=1),
    "row by row": lambda x, w: torch.stack([row @ w for row in x]),
    "mv of a transpose": lambda x, w: torch.stack([torch.mv(w.T, row) for row in x]),
    "changed in place afterwards": lambda x, w: (x @ w).mul_(1.0),
}
# Seen as layers, but not what goes into them.
NOT_FOLLOWED = ("addmm with a factor", "row by row", "mv of a transpose")
NAMES = ["rho_sum", "rho_row_sum", "kappa_trace_sum", "normalized_sharpness", "relative_flatness", "whitened_flatness"]


class Net(nn.Module):
    """Two matrices, inputs first, multiplied as `times` does it."""

    def __init__(self, times, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.a = nn.Parameter(torch.randn(4, width, generator=generator).double())
        self.b = nn.Parameter(torch.randn(width, 3, generator=generator).double())
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        return self.times(torch.relu(self.times(x, self.a)), self.b)


@pytest.mark.parametrize("width", [5, 4], ids=["oblong", "square"])
@pytest.mark.parametrize("spelling", INPUTS_FIRST)
def test_a_layer_is_the_same_however_it_is_written(spelling: str, width: int) -> None:
    expected = sl.measure(Net(INPUTS_FIRST["x @ W"], width), (X, Y), measures=NAMES)
    found = sl.measure(Net(INPUTS_FIRST[spelling], width), (X, Y), measures=NAMES)
    for name in NAMES:
        if name == "whitened_flatness" and spelling in NOT_FOLLOWED:
            assert not found[name].available
            assert "layers whose inputs are not seen" in found[name].notes[0]
            continue
        assert found[name].value == pytest.approx(expected[name].value, rel=1e-9)
        assert found[name].layers == pytest.approx(expected[name].layers, rel=1e-9)
    neurons = {name: len(each) for name, each in found["rho_sum"].neurons.items()}
    assert neurons == {"a": 4, "b": width}


TOKENS = torch.tensor([[0, 5], [3, 3], [6, 1], [2, 0], [4, 2], [5, 6], [1, 4]])
LOOKUPS = {
    "table[tokens]": lambda tokens, table: table[tokens],
    "table[tokens, :]": lambda tokens, table: table[tokens, :],
    "table[tokens, ...]": lambda tokens, table: table[tokens, ...],
    "counted from the end": lambda tokens, table: table[tokens - 7],
    "short numbers": lambda tokens, table: table[tokens.int()],
}


class Lookup(nn.Module):
    """A table of seven rows, read as `look_up` does it, and two layers behind it."""

    def __init__(self, look_up) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.Parameter(torch.randn(7, 3).double())
        self.a, self.b = nn.Linear(6, 4).double(), nn.Linear(4, 3).double()
        self.look_up = look_up

    def forward(self, tokens: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(self.look_up(tokens, self.table).flatten(1))))


@pytest.mark.parametrize("spelling", LOOKUPS)
def test_a_table_that_is_indexed_is_an_embedding(spelling: str) -> None:
    expected, found = (
        sl.measure(Lookup(look_up), (TOKENS, Y), measures=NAMES) for look_up in (F.embedding, LOOKUPS[spelling])
    )
    for name in NAMES:
        assert set(found[name].layers) == {"table", "a.weight", "b.weight"}
        assert found[name].layers == pytest.approx(expected[name].layers, rel=1e-9)
    assert len(found["rho_sum"].neurons["table"]) == 7
    written, called = (sl.find_symmetries(Lookup(each), TOKENS) for each in (LOOKUPS[spelling], F.embedding))
    groups = [[(group.name, group.kind, group.dimension) for group in each.groups] for each in (written, called)]
    assert groups[0] == groups[1]
    assert written.orbit_dimension == 4 + 9


def test_a_table_that_is_indexed_is_an_embedding_in_an_exported_program() -> None:
    model = Lookup(LOOKUPS["table[tokens]"])
    exported = torch.export.export(model, (TOKENS,), dynamic_shapes=({0: torch.export.Dim.AUTO},)).module()
    expected, found = (sl.measure(each, (TOKENS, Y), measures=["rho_sum"])["rho_sum"] for each in (model, exported))
    assert found.layers == pytest.approx(expected.layers, rel=1e-9)


class Steps(nn.Module):
    """Layers that are called as often as a tensor says, chosen by tensors, and experts that are gone through by their numbers."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.hidden, self.last = (
            way,
            nn.ModuleList(nn.Linear(4, 4) for _ in range(2)).double(),
            nn.Linear(4, 3).double(),
        )
        self.register_buffer("one", torch.tensor(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "range":
            for _ in range(self.one):
                x = torch.tanh(self.hidden[1](x))
        elif self.way == "list":
            x = torch.tanh(self.hidden[self.one](x))
        else:
            chosen, out = torch.ones(len(x), dtype=torch.long), torch.zeros_like(x)
            for number in chosen.unique():
                out[chosen == number] = torch.tanh(self.hidden[number](x[chosen == number]))
            x = out
        result: Tensor = self.last(x)
        return result


@pytest.mark.parametrize("way", ["range", "list", "experts"])
def test_a_tensor_may_be_an_index_in_python(way: str) -> None:
    model = Steps(way)
    plain = nn.Sequential(model.hidden[1], nn.Tanh(), model.last)
    for name in ("hessian_trace", "kappa_trace_sum"):
        found = sl.measure(model, (X, Y), measures=[name], parameters=["hidden.1.weight", "last.weight"])[name].value
        expected = sl.measure(plain, (X, Y), measures=[name], parameters=["0.weight", "2.weight"])[name].value
        assert found == pytest.approx(expected, rel=1e-9)


def test_rows_that_are_chosen_for_all_samples_are_no_lookup() -> None:
    """They are the matrix that every sample is multiplied by, with its rows in another order."""

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.weight, self.b = nn.Parameter(torch.randn(5, 4).double()), nn.Linear(3, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(F.linear(x, self.weight[torch.tensor([4, 0, 2])])))

    report = sl.measure(Chosen(), (X, Y), measures=["kappa_sum"])
    assert list(report["kappa_sum"].layers) == ["b.weight"]
    assert any("weight; measures of layers leave them out" in note for note in report.notes)


def test_token_mixing_is_swept_like_any_other_layer() -> None:
    """W @ x mixes the rows of every sample."""

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Parameter(torch.randn(5, 4, generator=torch.Generator().manual_seed(2)).double())
            self.out = nn.Linear(15, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.relu(self.mix @ x).flatten(1))

    torch.manual_seed(0)
    model, x = Mixer(), torch.randn(6, 4, 3).double()
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    found = sl.measure(model, (x, y), measures=["kappa_trace_sum"])["kappa_trace_sum"]
    assert found.exact

    def loss(mix: Tensor) -> Tensor:
        return F.cross_entropy(model.out(torch.relu(mix @ x).flatten(1)), y)

    hessian = torch.func.hessian(loss)(model.mix.detach()).reshape(20, 20)
    expected = float((model.mix.square().sum() * hessian.trace()).detach())
    assert found.layers["mix"] == pytest.approx(expected, rel=1e-9)


def test_recurrent_layers_count_in_relative_flatness() -> None:
    """By its definition Σ ⟨w_s, w_s'⟩ Tr H_ss', from double backward."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.r, self.o = nn.LSTM(4, 2, batch_first=True), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.o(self.r(x)[0][:, -1])

    torch.manual_seed(0)
    model, x, y = Recurrent().double(), torch.randn(6, 3, 4).double(), torch.tensor([0, 1, 2, 0, 1, 2])
    measures = ["relative_flatness", "relative_flatness_normalized", "whitened_flatness", "whitened_flatness_max"]
    report = sl.measure(model, (x, y), measures=measures)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), y), weight, create_graph=True)
            rows = [torch.autograd.grad(entry, weight, retain_graph=True)[0] for entry in gradient.reshape(-1)]
            hessian = torch.stack(rows).reshape(*weight.shape, *weight.shape)
            expected = torch.einsum("sj,tj,sktk->", weight, weight, hessian).detach()
            assert report["relative_flatness"].layers[name] == pytest.approx(float(expected), rel=1e-8, abs=1e-12)
    for name in measures[1:]:
        assert report[name].notes == (
            "layers whose inputs are not seen, because they are used in a way that is not followed: r.weight_ih_l0, "
            "r.weight_hh_l0",
        )


class Computed(nn.Module):
    """Its first matrix is the product of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(4, 2).double()), nn.Parameter(torch.randn(2, 4).double()))
        self.out = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(x @ (self.a @ self.b)))


def test_matrices_that_meet_no_activation_are_no_layers_and_the_report_says_so() -> None:
    torch.manual_seed(0)
    normed = nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 3)).double().eval()
    for model, layers, left in (
        (Computed(), ["out.weight"], "a, b"),
        (normed, ["2.weight"], "0.parametrizations.weight.original"),
    ):
        report = sl.measure(model, (X, Y), measures=["kappa_sum"])
        assert list(report["kappa_sum"].layers) == layers
        said = f"not among the layers, because no activation is multiplied by them as they are: {left}; measures of layers leave them out"
        assert said in report.notes


def test_nothing_is_said_where_every_matrix_is_a_layer() -> None:
    report = sl.measure(Net(INPUTS_FIRST["x @ W"], 5), (X, Y), measures=["kappa_sum", "hessian_trace"])
    assert not [note for note in report.notes if "layers" in note]


def test_a_residual_may_be_added_by_addmm() -> None:
    class Added(nn.Module):
        def __init__(self, fused: bool) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.a, self.c = nn.Linear(4, 5), nn.Linear(4, 3)
            self.b, self.fused = nn.Parameter(torch.randn(5, 3)), fused

        def forward(self, x: Tensor) -> Tensor:
            h, residual = torch.relu(self.a(x)), self.c(x)
            return torch.addmm(residual, h, self.b) if self.fused else residual + h @ self.b

    names = ["rho_sum", "kappa_trace_sum", "kappa_sum"]
    fused, apart = (sl.measure(Added(fused).double(), (X, Y), measures=names) for fused in (True, False))
    for name in names:
        assert fused[name].layers == pytest.approx(apart[name].layers, rel=1e-9)


class Filled(nn.Module):
    """A recurrent layer that reads a buffer into which the samples were written."""

    def __init__(self, write) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.r, self.o, self.write = nn.LSTM(4, 2, batch_first=True).double(), nn.Linear(2, 3).double(), write

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.r(self.write(torch.zeros(x.shape, dtype=x.dtype), x))[0][:, -1])


def assigned(buffer: Tensor, x: Tensor) -> Tensor:
    buffer[:, : x.shape[1]] = x
    return buffer


def through_a_view(buffer: Tensor, x: Tensor) -> Tensor:
    for step in range(x.shape[1]):
        buffer[:, step].copy_(x[:, step])
    return buffer


WRITES = {
    "assigned": assigned,
    "copied": lambda buffer, x: buffer.copy_(x),
    "added": lambda buffer, x: buffer.add_(x),
    "through a view": through_a_view,
    "as a result": lambda buffer, x: torch.add(x, 0.0, out=buffer),
}


@pytest.mark.parametrize("way", WRITES)
def test_a_buffer_that_samples_were_written_into_is_an_activation(way: str) -> None:
    x, y = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(5)).double(), torch.tensor([0, 1, 2, 0, 1])
    names = ["kappa_trace_sum", "rho_sum", "relative_flatness"]
    plain = sl.measure(Filled(lambda _, x: x), (x, y), measures=names)
    found = sl.measure(Filled(WRITES[way]), (x, y), measures=names)
    for name in names:
        assert found[name].layers == pytest.approx(plain[name].layers, rel=1e-9)
        assert len(found[name].layers) == 3


@pytest.mark.parametrize("followed_first", [True, False])
def test_a_matrix_that_is_followed_only_at_times_has_no_moments(followed_first: bool) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(6)
            self.w, self.o = nn.Parameter(torch.randn(4, 4).double()), nn.Linear(4, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            ways = [lambda x: x @ self.w, lambda x: torch.addmm(x.new_zeros(1), x, self.w, alpha=1)]
            first, second = ways if followed_first else ways[::-1]
            return self.o(torch.tanh(second(torch.tanh(first(x)))))

    found = sl.measure(Twice(), (X, Y), measures=["whitened_flatness", "relative_flatness_normalized"])
    for value in found.values.values():
        assert value.notes == (
            "layers whose inputs are not seen, because they are used in a way that is not followed: w",
        )


def test_a_size_of_one_that_stands_for_another_is_left_to_torch() -> None:
    class Broadcast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(7)
            self.w, self.o = nn.Parameter(torch.randn(3, 5).double()), nn.Linear(5, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.o(torch.tanh(torch.einsum("bi,ih->bh", x[:, :1], self.w)))

    model = Broadcast()
    found = sl.measure(model, (X, Y), measures=["hessian_trace"])["hessian_trace"]
    hessian = torch.func.hessian(lambda w: F.cross_entropy(torch.func.functional_call(model, {"w": w}, (X,)), Y))(
        model.w.detach()
    ).reshape(15, 15)
    assert found.layers["w"] == pytest.approx(float(hessian.trace().detach()), rel=1e-8)
