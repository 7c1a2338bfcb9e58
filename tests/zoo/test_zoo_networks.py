"""torch's own building blocks, put together as people do: attention, recurrence, U-Nets, normalization, wrappers."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spiritlevel as sl
import zoo

LABELS = zoo.integers(3, 6)


def mean_of(loss, *x, y=LABELS):
    return lambda model: loss(model(*x), y)


def check_classifier(build, *x, **options):
    """A classifier of the six samples in `x`, by the built-in cross entropy."""
    model = zoo.seeded(build)
    data = (x[0] if len(x) == 1 else tuple(x), LABELS)
    return zoo.check(model, data, "cross_entropy", mean_of(F.cross_entropy, *x), **options)


class Head(nn.Module):
    """A body, what to take of its result, and a layer on top."""

    def __init__(self, body, features, take):
        super().__init__()
        self.body, self.take, self.head = body, take, nn.Linear(features, 3)

    def forward(self, *x):
        return self.head(self.take(self.body(*x)))


# --- attention ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "sequence first"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["norm first", "norm last"])
def test_transformer_encoder(batch_first, norm_first):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=batch_first, norm_first=norm_first, dropout=0.3)
            self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            x = x if batch_first else x.transpose(0, 1)
            return self.head(self.encoder(x).mean(1 if batch_first else 0))

    report = check_classifier(Encoder, zoo.gaussian(6, 3, 4), exact=False)
    assert "encoder.layers.0.self_attn.in_proj_weight" in report.problem["estimated_layers"]
    assert "head.weight" not in report.problem["estimated_layers"]


def test_multihead_attention_with_a_mask_and_other_keys():
    class Cross(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=3, batch_first=True)
            self.head = nn.Linear(4, 3)

        def forward(self, x, memory, padding):
            mixed, weights = self.attention(x, memory, memory, key_padding_mask=padding)
            return self.head(mixed.mean(1)) + weights.mean()

    padding = torch.zeros(6, 4, dtype=torch.bool)
    padding[2:, 3] = True
    check_classifier(Cross, zoo.gaussian(6, 2, 4), zoo.gaussian(6, 4, 3, seed=7), padding, exact=False)


def test_vision_transformer():
    class Vision(nn.Module):
        """Patches by a convolution, a class token, positions, one block, the class token's head."""

        def __init__(self):
            super().__init__()
            self.patches = nn.Conv2d(1, 4, 2, stride=2)
            self.token, self.positions = nn.Parameter(torch.zeros(1, 1, 4)), nn.Parameter(torch.zeros(1, 5, 4))
            self.before, self.after = nn.LayerNorm(4), nn.LayerNorm(4)
            self.qkv, self.out, self.mlp = nn.Linear(4, 12), nn.Linear(4, 4), nn.Linear(4, 4)
            self.head = nn.Linear(4, 3)

        def forward(self, image):
            x = self.patches(image).flatten(2).mT
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
            q, k, v = self.qkv(self.before(x)).unflatten(2, (3, 2, 2)).permute(2, 0, 3, 1, 4)
            x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            x = x + F.gelu(self.mlp(self.after(x)))
            return self.head(x[:, 0])

    report = check_classifier(Vision, zoo.gaussian(6, 1, 4, 4), exact=False)
    assert list(report.problem["layers"]) == ["patches.weight", "qkv.weight", "out.weight", "mlp.weight", "head.weight"]


# --- recurrence ---------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_of_two_layers_in_both_directions(kind):
    report = check_classifier(
        lambda: Head(kind(2, 3, num_layers=2, bidirectional=True, batch_first=True), 6, lambda out: out[0].mean(1)),
        zoo.gaussian(6, 3, 2),
        exact=False,
    )
    assert len(report.problem["estimated_layers"]) == 8  # two matrices for each layer and direction
    assert "head.weight" not in report.problem["estimated_layers"]


def test_a_recurrent_cell_in_a_loop():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRUCell(2, 4), nn.Linear(4, 3)

        def forward(self, x):
            h = x.new_zeros(len(x), 4)
            for step in x.unbind(1):
                h = self.cell(step, h)
            return self.head(h)

    check_classifier(Loop, zoo.gaussian(6, 3, 2), exact=False)


class Language(nn.Module):
    """An embedding, a recurrent layer, a score for every token; the scores' matrix may be the embedding."""

    def __init__(self, tied):
        super().__init__()
        self.embedding, self.cell = nn.Embedding(7, 4, padding_idx=0), nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, 7, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.cell(self.embedding(x))[0]).mT


@pytest.mark.parametrize("tied", [True, False])
def test_language_models_of_every_token(tied):
    x, y = zoo.integers(7, 6, 4), zoo.integers(7, 6, 4, seed=5)
    model = zoo.seeded(lambda: Language(tied))
    oracle = copy.deepcopy(model)
    if tied:  # a row that is a token's score moves, so the lookup of padding moves with it
        oracle.embedding.padding_idx = None
    report = zoo.check(model, (x, y), "cross_entropy", mean_of(F.cross_entropy, x, y=y), oracle=oracle, exact=False)
    assert len(report.problem["layers"]) == (3 if tied else 4)


# --- convolutions and normalization -------------------------------------------------------------------------------


class UNet(nn.Module):
    """Down, up by a transposed convolution and by interpolation, what was seen on the way down beside it."""

    def __init__(self):
        super().__init__()
        self.down, self.bottom = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 3, 3, padding=1)
        self.up, self.merge = nn.ConvTranspose2d(3, 2, 2, stride=2), nn.Conv2d(4, 2, 1)
        self.wide, self.last = nn.Conv2d(3, 2, 1), nn.Conv2d(2, 2, 1)

    def forward(self, x):
        seen = F.relu(self.down(x))
        deep = F.relu(self.bottom(F.max_pool2d(seen, 2)))
        joined = F.relu(self.merge(torch.cat([self.up(deep), seen], 1)))
        wide = F.interpolate(self.wide(deep), scale_factor=2.0, mode="bilinear", align_corners=False)
        return self.last(joined + wide)


def test_a_u_net_with_a_label_for_every_pixel():
    x, y = zoo.gaussian(3, 1, 4, 4), zoo.integers(2, 3, 4, 4)
    zoo.check(zoo.seeded(UNet), (x, y), "cross_entropy", mean_of(F.cross_entropy, x, y=y), exact=True)


@pytest.mark.parametrize(
    ("norm", "exact"),
    [
        (lambda: nn.BatchNorm2d(4), True),
        (lambda: nn.BatchNorm2d(4, affine=False), True),
        (lambda: nn.GroupNorm(2, 4), False),
        (lambda: nn.InstanceNorm2d(4, affine=True), False),
        (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), True),
        (lambda: nn.LayerNorm([4, 3, 3]), False),
        (lambda: nn.RMSNorm([4, 3, 3]), False),
        (lambda: nn.LocalResponseNorm(2), False),
    ],
    ids=[
        "batch",
        "batch without scale",
        "group",
        "instance",
        "instance with statistics",
        "layer",
        "rms",
        "local response",
    ],
)
def test_normalization(norm, exact):
    def build():
        model = nn.Sequential(nn.Conv2d(1, 4, 2), norm(), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
        for name, buffer in model.named_buffers():
            if name.endswith(("mean", "var")):
                buffer.copy_(0.5 + torch.rand_like(buffer))
        return model

    check_classifier(build, zoo.gaussian(6, 1, 4, 4), exact=exact)


# --- several inputs, outputs of every kind --------------------------------------------------------------------------


@dataclass
class Scores:
    logits: Tensor
    hidden: Tensor


class Several(nn.Module):
    """Two inputs, and outputs in the form that is asked for."""

    def __init__(self, form):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 3), nn.Bilinear(4, 2, 3), nn.Linear(3, 3)
        self.form = form

    def forward(self, a, b):
        hidden = torch.tanh(self.first(a) + self.second(a, b))
        return self.form(self.head(hidden), hidden)


FORMS = {
    "tuple": (lambda *parts: parts, lambda out: out),
    "list": (lambda *parts: list(parts), lambda out: out),
    "dict": (lambda *parts: dict(zip(("logits", "hidden"), parts, strict=True)), lambda out: out.values()),
    "dataclass": (Scores, lambda out: (out.logits, out.hidden)),
}


@pytest.mark.parametrize("form", ["tuple", "list", "dict", "dataclass"])
def test_several_inputs_and_outputs(form):
    make, parts = FORMS[form]

    def loss(outputs, targets):
        logits, hidden = parts(outputs)
        return F.cross_entropy(logits, targets) + 0.1 * hidden.square().mean()

    a, b = zoo.gaussian(6, 4), zoo.gaussian(6, 2, seed=8)
    model = zoo.seeded(lambda: Several(make))
    report = zoo.check(model, ((a, b), LABELS), loss, lambda model: loss(model(a, b), LABELS), exact=False)
    assert set(report.problem["estimated_layers"].values()) == {
        "the outputs are not one tensor with a row for every sample"
    }


# --- wrappers -----------------------------------------------------------------------------------------------------


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def small():
    return nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 3))


def test_distributed_data_parallel_is_taken_off_and_said(one_process):
    x = zoo.gaussian(6, 4)
    inner = zoo.seeded(small)
    wrapped = nn.parallel.DistributedDataParallel(inner)
    report = zoo.check(wrapped, (x, LABELS), "cross_entropy", mean_of(F.cross_entropy, x), oracle=inner)
    assert "measured the module beneath DistributedDataParallel" in report.notes


class Everything(nn.Module):
    """Operations whose arguments an exported program passes in an order of its own."""

    def __init__(self):
        super().__init__()
        self.embedding, self.bag = nn.Embedding(7, 4), nn.EmbeddingBag(7, 4, mode="sum")
        self.convolution, self.batch = nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)
        self.instance, self.layer = nn.InstanceNorm1d(4, affine=True), nn.LayerNorm(4)
        self.hard, self.head = nn.Hardsigmoid(), nn.Linear(4, 3)
        self.plain = False  # whether to do without the two operations that have no second derivative

    def forward(self, x):
        z = self.batch(self.convolution(self.embedding(x).mT))
        gate = F.relu6(F.embedding(x, self.bag.weight).sum(1) + 3) / 6 if self.plain else self.hard(self.bag(x))
        return self.head(self.layer(self.instance(z).mT).mean(1) + gate)


def test_an_exported_program():
    x = zoo.integers(7, 6, 4)
    model = zoo.seeded(Everything)
    oracle = copy.deepcopy(model)
    oracle.plain = True
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    report = sl.measure(program, (x, LABELS), measures=zoo.MEASURES, tolerance=1e-7, most_probes=256)
    zoo.compare(report, oracle, zoo.hessian(oracle, mean_of(F.cross_entropy, x)))
    plain = sl.measure(model, (x, LABELS), measures=zoo.MEASURES, tolerance=1e-7, most_probes=256)
    assert report.problem["estimated_layers"].keys() == plain.problem["estimated_layers"].keys()
    assert "measured the module beneath the exported program" in report.notes
    assert any("embedding_bag, hardsigmoid" in note for note in report.notes)


# --- parts of a model ---------------------------------------------------------------------------------------------


class LowRank(nn.Module):
    """A frozen layer with a trained correction of rank one."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.zeros(1, inputs)), nn.Parameter(torch.zeros(outputs, 1))

    def forward(self, x):
        return self.base(x) + 0.5 * F.linear(F.linear(x, self.a), self.b)


def test_low_rank_corrections_of_a_frozen_network():
    report = check_classifier(
        lambda: nn.Sequential(LowRank(4, 5), nn.ReLU(), LowRank(5, 3)), zoo.gaussian(6, 4), exact=True
    )
    assert report.problem["layers"] == ["0.a", "0.b", "2.a", "2.b"]


def test_parameters_chosen_by_name_and_pattern():
    x = zoo.gaussian(6, 4)
    model = zoo.seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)))
    part = copy.deepcopy(model)
    part[0].bias.requires_grad_(False)
    part[2].requires_grad_(False)
    zoo.check(
        model,
        (x, LABELS),
        "cross_entropy",
        mean_of(F.cross_entropy, x),
        oracle=part,
        parameters=["0.weight", "4.*"],
        exact=False,
    )


def test_parts_in_other_precisions_are_measured_in_one():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.low, self.high = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.high(torch.tanh(self.low(x.to(self.low.weight.dtype))).to(self.high.weight.dtype))

    x, wide = zoo.gaussian(6, 4).float(), zoo.seeded(Mixed)
    wide.low.bfloat16().double()
    wide.high.float().double()
    model = copy.deepcopy(wide)
    model.low.bfloat16()
    model.high.float()
    report = zoo.check(
        model,
        (x, LABELS),
        "cross_entropy",
        mean_of(F.cross_entropy, x.double()),
        oracle=wide,
        dtype=torch.float64,
        exact=False,
    )
    assert (report.problem["dtype"], model.low.weight.dtype) == ("float64", torch.bfloat16)


def test_a_caller_in_mixed_precision_is_measured_in_full():
    x, model = zoo.gaussian(6, 4).float(), zoo.seeded(small).float()
    plain = sl.measure(model, (x, LABELS), measures=["hessian_spectral_norm"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = sl.measure(model, (x, LABELS), measures=["hessian_spectral_norm"])
    assert found["hessian_spectral_norm"].value == plain["hessian_spectral_norm"].value
