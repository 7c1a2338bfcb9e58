"""The data as a stream: what is accepted, what is refused and in which words."""

import collections
import dataclasses

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import spiritlevel as sl
from refusals import refused
from spiritlevel.problem.batches import Batch, Data
from spiritlevel.problem.objects import tensors_of

X, Y = torch.arange(24.0).reshape(12, 2), torch.arange(12) % 3
REMEDY = (
    "A second derivative needs the same data at every pass: build the loader with shuffle=False and without random "
    "transforms, or pass fix_data=True to keep the first pass in memory"
)


def refuses(source, message, error=sl.SpiritLevelError):
    with refused(message, error):
        Data(source)


class Samples(Dataset):
    """Samples changed by `change` every time they are read."""

    def __init__(self, change=lambda x, y: (x, y)):
        self.change = change

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return self.change(X[index], Y[index])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


class Batches:
    """A re-iterable whose passes may differ."""

    def __init__(self, *passes):
        self.passes = passes
        self.number = -1

    def __iter__(self):
        self.number += 1
        return iter(self.passes[min(self.number, len(self.passes) - 1)])


@pytest.mark.parametrize(
    "source",
    [
        (X, Y),
        [X, Y],
        (X.numpy(), Y.numpy()),
        [(X[:5], Y[:5]), (X[5:], Y[5:])],
        ((X[:5], Y[:5]), (X[5:], Y[5:])),
        [[X[:1], Y[:1]], [X[1:2], Y[1:2]], [X[2:], Y[2:]]],
        TensorDataset(X, Y),
        Samples(),
        Stream(),
        DataLoader(TensorDataset(X, Y), batch_size=5),
        DataLoader(Stream(), batch_size=5),
    ],
    ids=[
        "pair",
        "list",
        "arrays",
        "batches",
        "two batches",
        "three",
        "tensors",
        "dataset",
        "stream",
        "loader",
        "streamed",
    ],
)
@pytest.mark.parametrize("size", [1, 4, 5, 100])
def test_chunks_of_any_size_hold_every_sample_once_in_order(source, size):
    chunks = list(Data(source).chunks(size))
    assert all(len(chunk) == size for chunk in chunks[:-1])
    assert 0 < len(chunks[-1]) <= size
    assert torch.equal(torch.cat([chunk.inputs for chunk in chunks]), X)
    assert torch.equal(torch.cat([chunk.targets for chunk in chunks]), Y)


def test_a_pair_is_never_copied():
    chunk = next(Data((X, Y)).chunks(3))
    assert chunk.inputs.data_ptr() == X.data_ptr()


def test_samples_are_counted_over_ragged_batches():
    data = Data(DataLoader(TensorDataset(X, Y), batch_size=5))
    assert data.samples == 12
    assert [len(batch) for batch in data] == [5, 5, 2]


def test_batches_whose_shapes_do_not_join_are_kept_apart():
    first, second = (torch.zeros(2, 3), Y[:2]), (torch.zeros(2, 5), Y[:2])
    assert [tuple(chunk.inputs.shape) for chunk in Data([first, second]).chunks(4)] == [(2, 3), (2, 5)]


def test_several_inputs_and_keywords_stay_together():
    positional = Data([(X, X * 2, Y)])
    chunk = next(positional.chunks(5))
    assert torch.equal(chunk.inputs[1], 2 * X[:5])
    keywords = Data([({"a": X, "b": X * 2}, Y)])
    assert torch.equal(next(keywords.chunks(5)).inputs["b"], 2 * X[:5])
    labelled = Data([{"a": X, "labels": Y}])
    assert labelled.samples == 12
    assert list(labelled.first.inputs) == ["a"]
    assert labelled.first.content.keys() == {"a", "labels"}
    whole = Data([{"a": X, "b": X[:3]}])
    assert whole.first.targets is None


class Triangle:
    """A graph as libraries for them keep it: entries by key, no mapping."""

    def __init__(self, **entries):
        self.entries = entries

    def keys(self):
        return list(self.entries)

    def __getitem__(self, key):
        return self.entries[key]

    def __setitem__(self, key, entry):
        self.entries[key] = entry

    def __copy__(self):
        return Triangle(**self.entries)


Pair = collections.namedtuple("Pair", "x y")
Record = dataclasses.make_dataclass("Record", ["x", "name"], frozen=True)


@pytest.mark.parametrize(
    "source",
    [
        X,
        [X[:5], X[5:], X[:2]],
        TensorDataset(X),
        Triangle(x=X, edges=torch.zeros(2, 7)),
        [Triangle(x=X, edges=torch.zeros(2, 7))],
        [Record(X, "first")],
        [(X, {"boxes": X})],
        [((X, torch.zeros(2, 7)), Y)],
        [Pair(X, Y)],
        {"x": X},
    ],
)
def test_batches_of_any_kind_for_a_loss_that_takes_them_whole(source):
    seen = []

    @sl.batch_loss
    def loss(net, batch):
        seen.append(batch)
        return net.weight.square().sum(), 1

    net = torch.nn.Linear(2, 1, bias=False).double()
    found = sl.measure(net, source, loss, measures=["hessian_trace"], dtype=torch.float64)
    assert found["hessian_trace"].value == pytest.approx(4.0)
    if not isinstance(source, TensorDataset):
        wanted = source[0] if isinstance(source, list) else source
        assert type(seen[-1]) is type(wanted)
    dtypes = [{t.dtype for t in tensors_of(batch) if t.is_floating_point()} for batch in seen]
    assert dtypes[0] == {torch.float64}  # in the model's precision; the last ones may be to see what rounding does
    assert X.dtype == torch.float32


def test_a_changed_graph_is_noticed():
    passes = [[Triangle(x=X)], [Triangle(x=X.flip(0))]]
    refuses(
        Batches(*passes),
        "the data changes from pass to pass: batch 0 differs from the pass before. Likely cause: shuffling or random "
        f"augmentation. {REMEDY}",
        sl.NondeterministicError,
    )


def test_a_batch_maps_only_tensors():
    batch = Batch({"x": X, "note": "kept"}, Y).map(lambda leaf: leaf[:2])
    assert (len(batch), batch.inputs["note"]) == (2, "kept")


# --- refusals ---------------------------------------------------------------------------------------------------


def test_no_data():
    message = "the data is empty: no batch with at least one sample came out of it"
    refuses((X[:0], Y[:0]), message)
    refuses([], message)


def test_different_lengths():
    for source, message in (
        ((X, Y[:5]), "inputs and targets of batch 0 have different lengths: 12 and 5"),
        ([(X, Y), (X[:3], Y[:4])], "inputs and targets of batch 1 have different lengths: 3 and 4"),
    ):
        with refused(message):
            sl.measure(torch.nn.Linear(2, 3), source)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_located(bad):
    x, y = X.clone(), torch.rand(12, 2)
    x[7, 1] = x[9, 0] = bad
    refuses((x, Y), "the inputs contain NaN or infinity: first at sample 7 (2 such in this batch)")
    halves = [(x[:5], Y[:5]), (x[5:], Y[5:])]
    refuses(halves, "the inputs contain NaN or infinity: first at sample 7 (2 such in this batch)")
    y[3] = bad
    refuses((X, y), "the targets contain NaN or infinity: first at sample 3 (1 such in this batch)")


def test_large_finite_numbers_are_not_refused():
    assert Data((torch.full((4, 3), 3e38), Y[:4])).samples == 4


def test_what_can_be_read_only_once():
    for source, kind in ((iter([(X, Y)]), "list_iterator"), (((X, Y) for _ in range(2)), "generator")):
        refuses(
            source,
            f"data is a {kind}, which can be read only once, but several passes are needed: pass list(data), a "
            "DataLoader, or a pair of tensors (x, y)",
        )


def test_what_is_no_data_at_all():
    refuses(None, "data must be a pair of tensors (x, y), a DataLoader or a re-iterable of batches, got NoneType")
    other = "; for batches of any other kind pass a loss of the form (model, batch) -> (mean loss, count), see spiritlevel.batch_loss"
    refuses(["text"], f"a batch must be a pair (inputs, targets) or a dict, got str of length 4{other}")
    for source, kind in ((X, "Tensor"), ([(X,)], "tuple of length 1")):
        with refused(f"a batch must be a pair (inputs, targets) or a dict, got {kind}{other}"):
            sl.measure(torch.nn.Linear(2, 3), source)


def test_a_loader_that_shuffles():
    for size in (5, 12):
        refuses(
            DataLoader(TensorDataset(X, Y), batch_size=size, shuffle=True),
            "the data changes from pass to pass: batch 0 differs from the pass before. Likely cause: the loader shuffles "
            f"(shuffle=True). {REMEDY}",
            sl.NondeterministicError,
        )


def noise(x, y):
    return x + torch.randn(2), y


def flip(x, y):
    return x.flip(0) if torch.rand(()) < 0.5 else x, y


@pytest.mark.parametrize("change", [noise, flip])
def test_a_loader_that_augments(change):
    refuses(
        DataLoader(Samples(change), batch_size=12),
        "the data changes from pass to pass: batch 0 differs from the pass before. Likely cause: shuffling or random "
        f"augmentation. {REMEDY}",
        sl.NondeterministicError,
    )


def test_labels_that_change_places():
    refuses(
        Batches([(X, Y)], [(X, Y.roll(1))]),
        "the data changes from pass to pass: batch 0 differs from the pass before. Likely cause: shuffling or random "
        f"augmentation. {REMEDY}",
        sl.NondeterministicError,
    )


def test_a_pass_with_more_or_fewer_batches():
    whole = [(X[:6], Y[:6]), (X[6:], Y[6:])]
    told = "the data changes from pass to pass: {}. Likely cause: shuffling or random augmentation. " + REMEDY
    refuses(Batches(whole, whole[:1]), told.format("1 batches came where 2 came before"), sl.NondeterministicError)
    message = told.format("batch 2 differs from the pass before")
    refuses(Batches(whole, [*whole, whole[0]]), message, sl.NondeterministicError)


def test_a_change_at_a_later_pass_is_refused_there():
    same, other = [(X, Y)], [(X + 1, Y)]
    data = Data(Batches(same, same, same, other))
    list(data)
    with pytest.raises(sl.NondeterministicError, match="batch 0 differs"):
        list(data)


def test_fixing_keeps_the_first_pass():
    loader = DataLoader(TensorDataset(X, Y), batch_size=5, shuffle=True)
    data = Data(loader, fix=True)
    first, second = (torch.cat([batch.inputs for batch in data]) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first.sort(0).values, X)


def test_empty_batches_have_no_part_in_anything():
    empty = (X[:0], Y[:0])
    data = Data([empty, (X[:5], Y[:5]), empty, (X[5:], Y[5:]), empty])
    assert data.samples == 12
    assert len(data.first) == 5
    assert [len(batch) for batch in data] == [5, 7]
    assert [len(chunk) for chunk in data.chunks(100)] == [12]
    assert Data([{"x": X[:0]}, {"x": X}]).samples == 12
    refuses([empty, empty], "the data is empty: no batch with at least one sample came out of it")


def test_samples_spread_over_the_data_have_every_label_among_them():
    x, y = torch.arange(1000.0).unsqueeze(1), torch.zeros(1000, dtype=torch.long)
    y[777], y[778], y[3] = -100, 5, 2
    for source in ((x, y), [(x[i : i + 90], y[i : i + 90]) for i in range(0, 1000, 90)]):
        (batch,) = Data(source).spread(4)
        assert batch.inputs.flatten().tolist() == [0, 3, 125, 375, 625, 777, 778, 875]
        assert batch.targets.tolist() == [0, 2, 0, 0, 0, -100, 5, 0]
    positions = torch.zeros(1000, 6, dtype=torch.long)
    positions[501, 2] = -100
    (batch,) = Data((x, positions)).spread(4)
    assert batch.inputs.flatten().tolist() == [0, 125, 375, 501, 625, 875]


def test_batches_of_other_shapes_are_spread_one_by_one():
    batches = [(torch.zeros(4, length), torch.zeros(4)) for length in (2, 3, 5)]
    assert [tuple(batch.inputs.shape) for batch in Data(batches).spread(6)] == [(2, 2), (2, 3), (2, 5)]
    assert [len(batch) for batch in Data((X, Y)).spread(100)] == [12]
