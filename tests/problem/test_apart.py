"""Samples that know of one another, in the network or in the loss, are refused; so few that a handful of samples does not show it, too."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spiritlevel as sl
from refusals import refused

COUNT = 38
LABELS = torch.randint(0, 3, (COUNT,), generator=torch.Generator().manual_seed(1))
MIXED = (
    "a sample's output depends on the other samples of its batch, so the loss is not a mean over samples. Likely cause: {}, or "
    "pass a loss of the form (model, batch) -> (mean, count), which keeps your batches as they are"
)
NORMALIZED = (
    "batch normalization with the statistics of the batch, as in train mode, or another operation along the first dimension. "
    "Use running statistics (track_running_stats=True) in eval mode"
)


class Recurrent(nn.Module):
    """A recurrent layer that takes samples for time, because `batch_first` is missing."""

    def __init__(self):
        super().__init__()
        self.cell, self.last = nn.GRU(4, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.cell(x)[0].mean(1))


class Causal(nn.Module):
    """Every sample sees those before it: the first half of a batch is what it is alone."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x):
        counts = torch.arange(1, len(x) + 1, dtype=x.dtype).unsqueeze(1)
        return self.last(torch.tanh(self.first(x)).cumsum(0) / counts)


class Crowded(nn.Module):
    """Experts with places for a dozen samples each: a few samples never fill them."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 3) for _ in range(2))

    def forward(self, x):
        best, chosen = self.gate(x).softmax(1).max(1)
        total = torch.zeros(len(x), 3, dtype=x.dtype)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            total = total + (best * (mine & (mine.cumsum(0) <= 12))).unsqueeze(1) * expert(x)
        return total


@pytest.mark.parametrize(
    ("network", "shape", "cause"),
    [
        (Recurrent, (5, 4), "layers that take the first dimension for time (cell). Make them with batch_first=True"),
        (Causal, (4,), NORMALIZED),
        (Crowded, (4,), NORMALIZED),
    ],
)
@pytest.mark.parametrize("batches", [1, 2])
def test_outputs_that_depend_on_other_samples_are_refused(network, shape, cause, batches):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model, x = network().double(), torch.randn(COUNT, *shape, dtype=torch.float64)
    parts = list(zip(x.tensor_split(batches), LABELS.tensor_split(batches), strict=True))
    with refused(MIXED.format(cause), sl.NondeterministicError):
        sl.measure(model, parts if batches > 1 else parts[0], measures=["hessian_trace"])


class Pair(nn.Module):
    """Features and logits, as several outputs or side by side in one."""

    def __init__(self, together):
        super().__init__()
        self.first, self.last, self.together = nn.Linear(4, 4), nn.Linear(4, 3), together

    def forward(self, x):
        features = torch.tanh(self.first(x))
        both = features, self.last(features)
        return torch.cat(both, 1) if self.together else both


def pulled_together(outputs, targets):
    """Cross entropy, and the samples of a rare class are drawn to one another."""
    features, logits = (outputs[:, :4], outputs[:, 4:]) if isinstance(outputs, torch.Tensor) else outputs
    same = ((targets.unsqueeze(1) == targets) & (targets == 2)).to(logits)
    apart = (features.unsqueeze(1) - features).square().sum(-1)
    return F.cross_entropy(logits, targets) + (apart * same).sum() / len(targets)


@pytest.mark.parametrize("together", [True, False])
def test_a_loss_that_couples_two_samples_of_all_is_refused_wherever_they_are(together):
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = Pair(together).double()
        x, y = (
            torch.randn(36, 4, generator=generator, dtype=torch.float64),
            torch.randint(0, 2, (36,), generator=generator),
        )
        y[torch.randperm(36, generator=generator)[:2]] = 2
        with pytest.raises(sl.SpiritLevelError, match=r"^the loss 'pulled_together' is not a mean over samples: "):
            sl.measure(model, (x, y), pulled_together, measures=["hessian_trace"])


def test_a_mean_over_what_a_mask_among_the_outputs_leaves_is_refused():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.last = nn.Embedding(6, 4), nn.Linear(4, 5)

        def forward(self, tokens):
            return self.last(torch.tanh(self.table(tokens))), (tokens != 0).double()

    def masked(outputs, targets):
        losses = F.cross_entropy(outputs[0].movedim(-1, 1), targets, reduction="none")
        return (losses * outputs[1]).sum() / outputs[1].sum()

    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(low, high, (36, 4), generator=generator) for low, high in ((1, 6), (0, 5)))
    tokens[20:, 1:] = 0
    with pytest.raises(sl.SpiritLevelError, match=r"^the loss 'masked' is not a mean over samples: "):
        sl.measure(Masked().double(), (tokens, targets), masked, measures=["hessian_trace"])


@dataclass
class Record:
    features: torch.Tensor
    logits: torch.Tensor


class Beside(Pair):
    """Features and logits in a record, or with something that has no row a sample."""

    def __init__(self, beside):
        super().__init__(together=False)
        self.beside = beside

    def forward(self, x):
        both = super().forward(x)
        if self.beside == "record":
            return Record(*both)
        return (
            *both,
            self.last.weight.norm() if self.beside == "number" else self.last.weight.expand(12, 3, 4).flatten(0, 1),
        )


def of_the_first_two(loss):
    return lambda outputs, targets: loss(
        (outputs.features, outputs.logits) if isinstance(outputs, Record) else outputs[:2], targets
    )


@pytest.mark.parametrize("beside", ["record", "number", "as many rows by chance"])
def test_outputs_are_halved_whatever_lies_beside_them(beside):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Beside(beside).double(), torch.randn(36, 4, dtype=torch.float64)
    y = torch.arange(36) % 2
    y[[5, 30]] = 2
    with pytest.raises(sl.SpiritLevelError, match=r"is not a mean over samples: "):
        sl.measure(model, (x, y), of_the_first_two(pulled_together), measures=["hessian_trace"])
    plain = of_the_first_two(lambda outputs, targets: F.cross_entropy(outputs[1], targets))
    expected = sl.measure(model, (x, y), sl.batch_loss(lambda net, batch: (plain(net(batch[0]), batch[1]), len(batch[1]))),
                          measures=["hessian_spectral_norm"])  # fmt: skip
    found = sl.measure(model, (x, y), plain, measures=["hessian_spectral_norm"])
    assert found["hessian_spectral_norm"].value == pytest.approx(expected["hessian_spectral_norm"].value, rel=1e-6)


def test_batches_of_another_shape_are_looked_at_too():
    class Centred(nn.Module):
        """Takes the mean over the batch away where sentences are of five words."""

        def __init__(self):
            super().__init__()
            self.last = nn.Linear(4, 3)

        def forward(self, x):
            out = self.last(torch.tanh(x).mean(1))
            return out - out.mean(0) if x.shape[1] == 5 else out

    x = torch.randn(160, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = [(x.reshape(8, 5, 4)[:, :length], torch.arange(8) % 3) for length in (3, 5)]
    with refused(MIXED.format(NORMALIZED), sl.NondeterministicError):
        sl.measure(Centred().double(), data, measures=["hessian_trace"])


def test_outputs_that_are_not_finite_are_told_with_their_sample():
    x = torch.ones(36, 4, dtype=torch.float64)
    x[25] = 1e250
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)).double()
    with torch.no_grad():
        model[0].weight.mul_(1e100)
    with pytest.raises(sl.SpiritLevelError, match="of sample 25"):
        sl.measure(model, (x, torch.arange(36) % 3), measures=["hessian_trace"])


def test_layers_that_take_time_first_are_not_blamed_for_a_normalization():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.norm = nn.GRU(4, 3), nn.BatchNorm1d(3, track_running_stats=False)

        def forward(self, x):
            return self.norm(self.cell(x.transpose(0, 1))[0][-1])

    told = NORMALIZED.replace(", or another operation along the first dimension", " (norm)")
    x = torch.linspace(-1, 1, 8 * 20, dtype=torch.float64).reshape(8, 5, 4).sin()
    with refused(MIXED.format(told), sl.NondeterministicError):
        sl.measure(Turned().double(), (x, torch.arange(8) % 3), measures=["hessian_trace"])
