"""Checkpoints: bit for bit there and back, refused where they do not fit or would run code, never half written."""

import os
import pickle
import zipfile
from collections import OrderedDict

import pytest
import safetensors.torch
import torch
from torch import nn

from spiritlevel.errors import SpiritLevelError
from spiritlevel.subjects import archives, checkpoint
from spiritlevel.subjects.checkpoint import load_checkpoint, read_state_dict, save_checkpoint
from spiritlevel.subjects.networks import build_model


def net(seed=0, hidden=4):
    return build_model(f"mlp:{hidden}", input_shape=(3,), classes=2, seed=seed)


class Tied(nn.Module):
    """An embedding whose weight is also the last layer's."""

    def __init__(self, tie=True):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tie:
            self.head.weight = self.embedding.weight


def equal(first, second):
    a, b = first.state_dict(), second.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def refused(path, match, model=None, **options):
    with pytest.raises(SpiritLevelError, match=match) as caught:
        load_checkpoint(model or net(), path, **options)
    return str(caught.value)


# --- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet8", "convnet", "mlp:5"])
def test_a_saved_network_comes_back_bit_for_bit_with_its_buffers(tmp_path, name):
    first, second = (build_model(name, input_shape=(1, 8, 8), classes=3, seed=seed) for seed in (0, 1))
    first(torch.randn(4, 1, 8, 8))  # moves running means and counters
    path = tmp_path / "new folder" / "net.safetensors"
    save_checkpoint(first, path)
    assert not equal(first, second)
    assert load_checkpoint(second, path) is second
    assert equal(first, second)


def test_tied_weights_stay_tied_and_fit_models_that_do_not_tie_them(tmp_path):
    path = tmp_path / "net.safetensors"
    first, tied, untied = Tied(), Tied(), Tied(tie=False)
    save_checkpoint(first, path)
    load_checkpoint(tied, path)
    load_checkpoint(untied, path)
    assert tied.head.weight is tied.embedding.weight
    assert equal(first, tied)
    assert equal(first, untied)


def test_tied_weights_saved_once_are_enough_for_a_model_that_ties_them(tmp_path):
    path = tmp_path / "net.safetensors"
    first, second = Tied(), Tied()
    safetensors.torch.save_model(first, str(path))
    assert len(safetensors.torch.load_file(path)) == 1
    load_checkpoint(second, path)
    assert equal(first, second)
    refused(path, "missing from the file: (head|embedding).weight", Tied(tie=False))


def test_a_transposed_weight_is_saved(tmp_path):
    first, second = net(), net(1)
    first.fc1.weight = nn.Parameter(torch.arange(12.0).view(3, 4).T)
    path = tmp_path / "net.safetensors"
    save_checkpoint(first, path)
    load_checkpoint(second, path)
    assert equal(first, second)


@pytest.mark.parametrize("wrapper", [None, "state_dict", "model", "model_state_dict"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("zipped", [True, False])
def test_torch_files_are_read_however_training_scripts_wrap_them(tmp_path, wrapper, prefix, zipped):
    first, second = net(0), net(1)
    state = OrderedDict((prefix + name, tensor) for name, tensor in first.state_dict().items())
    content = state if wrapper is None else {"epoch": 3, wrapper: state, "optimizer": {"lr": 0.1}}
    path = tmp_path / "net.pt"
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    load_checkpoint(second, path)
    assert equal(first, second)


def test_a_prefix_that_belongs_to_the_model_is_kept(tmp_path):
    first, second = (nn.Sequential(OrderedDict(module=net(seed))) for seed in (0, 1))
    save_checkpoint(first, tmp_path / "net.safetensors")
    load_checkpoint(second, tmp_path / "net.safetensors")
    assert equal(first, second)


def test_old_files_without_the_counter_of_batch_normalization_fit(tmp_path):
    first, second = (build_model("resnet8", input_shape=(3, 8, 8), classes=3, seed=seed) for seed in (0, 1))
    state = {k: v for k, v in first.state_dict().items() if not k.endswith("num_batches_tracked")}
    torch.save(state, tmp_path / "net.th")
    load_checkpoint(second, tmp_path / "net.th")
    assert equal(first, second)


def test_half_precision_is_widened_to_the_model(tmp_path):
    path = tmp_path / "net.safetensors"
    save_checkpoint(net().half(), path)
    model = load_checkpoint(net(1), path)
    assert model.fc1.weight.dtype == torch.float32
    assert torch.equal(model.fc1.weight, net().half().fc1.weight.float())


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_all_that_does_not_fit_is_listed_at_once_and_nothing_is_changed(tmp_path):
    state = net(hidden=6).state_dict()
    state["extra.weight"] = state.pop("fc2.bias")
    torch.save(state, tmp_path / "net.pt")
    model = net()
    message = refused(tmp_path / "net.pt", "net.pt does not fit FullyConnected; build the model the file", model)
    assert message.splitlines()[1:] == [
        "  missing from the file: fc2.bias",
        "  not in the model: extra.weight",
        "  other shapes: fc1.weight: (6, 3) in the file, (4, 3) in the model, "
        "fc1.bias: (6,) in the file, (4,) in the model, fc2.weight: (2, 6) in the file, (2, 4) in the model",
    ]
    assert equal(model, net())


def test_a_long_list_is_shortened(tmp_path):
    torch.save({f"w{i}": torch.ones(1) for i in range(40)}, tmp_path / "net.pt")
    refused(tmp_path / "net.pt", r"not in the model: w0, w1, .*w11 and 28 more")


def test_without_strict_names_may_differ_but_shapes_may_not(tmp_path):
    path = tmp_path / "net.pt"
    first, second = net(0), net(1)
    torch.save({"fc1.weight": first.fc1.weight.detach(), "extra": torch.ones(1)}, path)
    refused(path, "missing from the file: fc1.bias, fc2.weight, fc2.bias\n  not in the model: extra")
    load_checkpoint(second, path, strict=False)
    assert torch.equal(second.fc1.weight, first.fc1.weight)
    assert torch.equal(second.fc2.weight, net(1).fc2.weight)
    refused(path, r"fc1.weight: \(4, 3\) in the file, \(9, 3\) in the model", net(hidden=9), strict=False)


def test_a_file_with_nothing_for_the_model_is_refused_even_without_strict(tmp_path):
    torch.save({"other": torch.ones(1)}, tmp_path / "net.pt")
    refused(tmp_path / "net.pt", "missing from the file: fc1.weight", strict=False)


# --- what is not read -------------------------------------------------------------------------------------------------


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_needs_code_is_refused_and_nothing_runs(tmp_path, zipped):
    trace, path = tmp_path / "ran", tmp_path / "net.pt"
    torch.save({"state_dict": {"w": Hostile(trace)}}, path, _use_new_zipfile_serialization=zipped)
    message = refused(path, r"net.pt is refused: it holds (posix|nt)\.system, which would have to run code to load\.")
    assert message.endswith("write its weights only: torch.save(model.state_dict(), path)")
    assert not trace.exists()


def test_a_whole_module_is_refused_with_the_conversion(tmp_path):
    torch.save(nn.Sequential(nn.Linear(3, 2)), tmp_path / "net.pt")
    refused(
        tmp_path / "net.pt", r"holds torch.nn.modules.container.Sequential, which would .* torch.save\(model.state_dict"
    )


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_plain_pickle_is_refused_and_nothing_runs(tmp_path, protocol):
    trace, path = tmp_path / "ran", tmp_path / "net.pkl"
    path.write_bytes(pickle.dumps({"w": Hostile(trace)}, protocol=protocol))
    refused(
        path, r"net.pkl is (refused: it holds posix.system|not a whole file of torch tensors \(Unsupported operand)"
    )
    assert not trace.exists()


@pytest.mark.parametrize("content", [b"", b"junk", b"PK\x03\x04 half"])
def test_a_damaged_torch_file_is_refused(tmp_path, content):
    (tmp_path / "net.pt").write_bytes(content)
    refused(tmp_path / "net.pt", r"net.pt is not a whole file of torch tensors \(.+\); write it by torch.save")


def test_a_torch_file_that_unpacks_to_a_thousand_times_its_size_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "net.pt"
    torch.save({"w": torch.zeros(2**18)}, path)
    with zipfile.ZipFile(path) as stored, zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for member in stored.infolist():
            packed.writestr(member.filename, stored.read(member))
    monkeypatch.setattr(archives, "HARMLESS", 1000)
    told = r"packed\.pt is refused: its \d,\d\d\d bytes would unpack to 1,04\d,\d\d\d, more than 100 times as many"
    refused(tmp_path / "packed.pt", told)
    assert read_state_dict(path)["w"].shape == (2**18,)


@pytest.mark.parametrize("size", [2**40, 2**63, 8])
def test_a_safetensors_file_whose_header_lies_is_refused(tmp_path, size):
    path = tmp_path / "net.safetensors"
    header = b'{"w":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}' % (size // 4, size)
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    refused(path, r"net\.safetensors is not a whole safetensors file")
    path.write_bytes((2**50).to_bytes(8, "little") + header)
    refused(path, r"net\.safetensors is not a whole safetensors file")


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
@pytest.mark.parametrize("cut", [40, 20_000])
def test_a_truncated_file_is_refused(tmp_path, ending, cut):
    path, large = tmp_path / f"net.{ending}", nn.Linear(100, 100)
    torch.save(large.state_dict(), path) if ending == "pt" else save_checkpoint(large, path)
    path.write_bytes(path.read_bytes()[:-cut])
    refused(path, rf"net.{ending} is not a whole (file of torch tensors|safetensors file) \(.+\)")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({"epoch": 3, "loss": 0.5}, "found a dictionary with epoch, loss"),
        ({}, "found a dictionary with "),
        ([torch.ones(1)], "found list"),
        ({"state_dict": {"w": torch.ones(1), "lr": 0.1}}, "found a dictionary with state_dict"),
    ],
)
def test_a_file_without_named_tensors_says_what_it_holds(tmp_path, content, found):
    torch.save(content, tmp_path / "net.pt")
    refused(tmp_path / "net.pt", f"must hold named tensors, on the outside or under one of state_dict, .*{found}")


def test_a_file_that_is_not_there():
    with pytest.raises(SpiritLevelError, match=r"no checkpoint file nowhere\.pt"):
        read_state_dict("nowhere.pt")


# --- writing ----------------------------------------------------------------------------------------------------------


def test_only_safetensors_are_written(tmp_path):
    with pytest.raises(
        SpiritLevelError, match=r"written as safetensors; name the file 'net\.safetensors', got .*net\.pt"
    ):
        save_checkpoint(net(), tmp_path / "net.pt")
    assert list(tmp_path.iterdir()) == []


def test_state_that_is_no_tensor_is_refused(tmp_path):
    class WithState(nn.Linear):
        def get_extra_state(self):
            return {"steps": 3}

    with pytest.raises(SpiritLevelError, match="a checkpoint holds tensors only; _extra_state of WithState are none"):
        save_checkpoint(WithState(1, 1), tmp_path / "net.safetensors")


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_whole_and_no_traces(tmp_path, monkeypatch, step):
    path = tmp_path / "net.safetensors"
    save_checkpoint(net(0), path)

    def full(*_arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync") if step == "fsync" else (checkpoint.Path, "replace")), full)
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(net(1), path)
    assert list(tmp_path.iterdir()) == [path]
    assert equal(load_checkpoint(net(2), path), net(0))


def test_the_file_is_flushed_to_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    path, seen, fsync = tmp_path / "net.safetensors", [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (seen.append(path.exists()), fsync(handle)))
    save_checkpoint(net(), path)
    assert seen == [False, True]  # the content before the rename, the folder after it


def test_the_file_has_ordinary_permissions(tmp_path):
    path, other = tmp_path / "net.safetensors", tmp_path / "other"
    save_checkpoint(net(), path)
    other.write_bytes(b"")
    assert path.stat().st_mode == other.stat().st_mode
