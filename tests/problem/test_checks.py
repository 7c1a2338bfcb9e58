"""What cannot be measured is refused with what to do."""

import pytest
import torch
from small_problem import X, Y, network
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import spiritlevel as sl
from refusals import refused


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


@pytest.mark.filterwarnings("ignore")  # torch will leave this kind of quantization to another library
def test_a_quantized_model_is_named():
    quantized = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 1)), {nn.Linear})
    with refused(
        "the model is quantized (torch.ao.nn.quantized.dynamic.modules.linear.Linear), so it has no parameters to measure: "
        "measure it as it was before that"
    ):
        sl.measure(quantized, (torch.eye(2), torch.zeros(2, 1)), "mse")


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


def test_a_loss_that_cannot_be_computed_says_what_it_was_given():
    def failing(outputs, targets):
        raise KeyError("mask")

    given = "cannot be computed from float64 of shape (8, 3) as outputs and int64 of shape (8,) as targets"
    for loss, said in (
        (nn.BCEWithLogitsLoss(), "Target size (torch.Size([8])) must be the same as input size (torch.Size([8, 3]))"),
        (failing, "KeyError: 'mask'"),
    ):
        name = getattr(loss, "__name__", type(loss).__name__)
        with refused(f"the loss {name!r} {given}: {said}"):
            sl.measure(network(), (X, Y), loss)
    with refused("the loss '<lambda>' cannot be computed from the model and the first batch: KeyError: 'x'"):
        sl.measure(network(), [{"y": X}], lambda model, batch: (model(batch["x"]).mean(), 1))


def test_a_network_that_fails_for_whatever_reason():
    class Fails(nn.Sequential):
        def forward(self, x):
            raise KeyError("mask")

    with refused("the model cannot be called on the first batch: KeyError: 'mask'"):
        sl.measure(Fails(nn.Linear(4, 3)).double(), (X, Y))


@pytest.mark.parametrize("count", [-1, float("nan"), float("inf"), None])
def test_counts_that_are_no_weights(count):
    with refused(
        "a loss of the form (model, batch) must return (mean loss, count), with the number of samples or tokens that the mean "
        f"is over as count; got {count!r}"
    ):
        sl.measure(network(), [(X, Y)], lambda model, batch: (model(batch[0]).mean(), count))


def test_counts_that_are_all_zero():
    with refused("the counts that the loss returns with its means are all zero: nothing would be measured"):
        sl.measure(network(), [(X, Y)], lambda model, batch: (model(batch[0]).mean(), 0))


def test_a_network_that_joins_samples_and_positions():
    class Flat(nn.Linear):
        def forward(self, x):
            return super().forward(x.unsqueeze(2)).flatten(0, 1)

    with refused(
        f"the network returns outputs of shape ({8 * X.shape[1]}, 3) for 8 samples, and one row a sample is needed: let it "
        "return (samples, …), or pass a loss of the form (model, batch) -> (mean, count)"
    ):
        sl.measure(Flat(1, 3).double(), (X, X), lambda outputs, targets: outputs.square().mean())


def test_arguments_of_the_wrong_kind():
    with refused("parameters must be names or patterns of parameters, got [0]"):
        sl.measure(network(), (X, Y), parameters=[0])
    with refused("measures must be names of measures or what get_measure returns, got 5"):
        sl.measure(network(), (X, Y), measures=5)
    with refused("a measure is asked for by its name, or as what get_measure returns; got None"):
        sl.measure(network(), (X, Y), measures=[None])
    with refused("dtype must be torch.float32 or torch.float64, got 'float64'"):
        sl.measure(network(), (X, Y), dtype="float64")
    with refused("eigenvalues must be a whole number of at least 1, got 1.5"):
        sl.sharpen(network(), (X, Y), target=10, eigenvalues=1.5)
    for strengths in (1.0, (float("nan"),), (), "a", (0,)):
        with refused(f"strengths must be positive numbers, as (0.5, 1.0); got {strengths!r}"):
            sl.audit(network(), (X, Y), strengths=strengths)


def test_dict_batches_need_a_loss_of_their_own():
    with refused(
        "the batches are dicts without 'labels' for every sample, and the loss 'cross_entropy' needs targets: pass a loss of "
        "the form (model, batch) -> (mean loss, count), for example `def loss(model, batch): return model(**batch).loss, "
        "int((batch['labels'] != -100).sum())`"
    ):
        sl.measure(network(), [{"x": X, "y": Y}])
    with refused(
        "a loss of the form (model, batch) must return (mean loss, count), got Tensor: return for example `loss, "
        "len(batch['x'])`"
    ):
        sl.measure(network(), [{"x": X}], lambda model, batch: model(batch["x"]).mean())
    for batch, count in (((X,), "len(batch[0])"), (X, "len(batch)")):
        said = "a loss of the form (model, batch) must return (mean loss, count), got Tensor: return for example"
        with refused(f"{said} `loss, {count}`"):
            sl.measure(network(), [batch], sl.batch_loss(lambda model, batch: model(batch[0]).mean()))


def test_inputs_in_another_precision_than_the_model():
    with pytest.raises(
        sl.SpiritLevelError,
        match=r"^the model cannot be called on the first batch \(inputs of torch.float64, parameters of torch.float32: "
        r"convert one, or pass dtype=torch.float32\): ",
    ):
        sl.measure(network().float(), (X, Y))
    assert sl.measure(network().float(), (X, Y), dtype=torch.float32, measures=["hessian_trace"]).loss > 0
