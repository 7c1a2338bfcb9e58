"""Losses: the factor of their Hessian at the outputs, and what they refuse."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cases
from refusals import refused
from spiritlevel.problem.batches import Data
from spiritlevel.problem.losses import BUILT_IN, Loss, output_factor, output_hessians, resolve_loss
from spiritlevel.problem.weighted import weighted_by

N, C = 6, 4


def outputs(*shape):
    return 3 * torch.randn(*(shape or (N, C)), generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def labels(*shape):
    return torch.randint(0, C, shape or (N,), generator=torch.Generator().manual_seed(1))


def dense_hessians(mean, f, y):
    """∇²ℓ_n of every sample by itself."""
    found = []
    for n in range(len(f)):
        hessian = torch.autograd.functional.hessian(lambda z, n=n: mean(z[None], y[n : n + 1]), f[n])
        found.append(hessian.reshape(f[n].numel(), f[n].numel()))
    return torch.stack(found)


def rebuilt(factor):
    total = torch.zeros(())
    for vector, signs in factor.columns():
        flat = vector.flatten(1)
        outer = flat.unsqueeze(2) * flat.unsqueeze(1)
        total = total + (outer if signs is None else outer * signs[:, None, None])
    return total


PROBLEMS = {
    "cross entropy": ("cross_entropy", outputs(), labels()),
    "cross entropy, two classes": ("cross_entropy", outputs(N, 2), labels() % 2),
    "cross entropy, one class": ("cross_entropy", outputs(N, 1), labels() * 0),
    "cross entropy at positions": ("cross_entropy", outputs(N, C, 2, 3), labels(N, 2, 3)),
    "probabilities": ("cross_entropy", outputs(), torch.rand(N, C, dtype=torch.float64)),
    "confident": ("cross_entropy", 50 * outputs(), labels()),
    "squared error": ("mse", outputs(), outputs().flip(0)),
    "squared error of images": ("mse", outputs(N, 2, 3), outputs(N, 2, 3).flip(0)),
    "normalized": ("normalized_cross_entropy", outputs(), labels()),
    "own": (cases.square_loss_times_quartic, outputs(), outputs()[:, 0]),
    "absolute error": (F.l1_loss, outputs(), outputs().flip(0)),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_columns_rebuild_the_hessian_of_every_sample(name):
    loss, f, y = PROBLEMS[name]
    mean = cases.LOSSES[loss] if isinstance(loss, str) else loss
    wanted = dense_hessians(mean, f, y)
    torch.testing.assert_close(rebuilt(output_factor(resolve_loss(loss), f, y)), wanted, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(output_hessians(resolve_loss(loss), f, y), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("name", "columns"), [("cross entropy", C - 1), ("squared error", C), ("own", C - 2)])
def test_no_more_columns_than_the_rank(name, columns):
    loss, f, y = PROBLEMS[name]
    factor = output_factor(resolve_loss(loss), f, y)
    assert factor.num_columns <= max(columns, C)
    assert len(list(factor.columns())) == factor.num_columns
    if name == "cross entropy":
        assert factor.num_columns == columns


@pytest.mark.parametrize("name", ["cross entropy", "own", "squared error", "normalized"])
def test_random_columns_have_the_hessian_as_their_mean(name):
    loss, f, y = PROBLEMS[name]
    factor = output_factor(resolve_loss(loss), f, y)
    generator = torch.Generator().manual_seed(0)
    total, draws = 0, 4000
    for _ in range(draws):
        for vector, signs in factor.sample(generator):
            flat = vector.flatten(1)
            outer = flat.unsqueeze(2) * flat.unsqueeze(1)
            total = total + (outer if signs is None else outer * signs[:, None, None])
    wanted = rebuilt(factor)
    assert (total / draws - wanted).abs().max() < 0.1 * wanted.abs().max()


def test_curvature_that_is_not_finite_is_told_before_eigenvalues_are_asked_for():
    distance = resolve_loss(lambda f, y: (f - y).abs().pow(1.5).mean())
    with pytest.raises(
        FloatingPointError, match=r"^the second derivative of the loss by the outputs is NaN or infinite"
    ):
        output_factor(distance, outputs(), outputs())


def test_columns_of_certain_samples_keep_their_digits_in_single_precision():
    f = torch.tensor([[0.0, 25.0, 3.0, -4.0], [1.0, 0.0, 2.0, 30.0], [40.0, 0.0, -1.0, 5.0]], dtype=torch.float64)
    y = torch.zeros(3, dtype=torch.long)
    wanted = rebuilt(output_factor(resolve_loss("cross_entropy"), f, y))
    found = rebuilt(output_factor(resolve_loss("cross_entropy"), f.float(), y)).double()
    assert ((found - wanted).abs() <= 3e-6 * wanted.abs()).all()


def test_many_classes_are_never_held_as_a_matrix():
    """Columns are made one at a time: nothing of classes² numbers a sample is there."""
    f = torch.randn(4, 2000, generator=torch.Generator().manual_seed(0))
    factor = output_factor(resolve_loss("cross_entropy"), f, torch.zeros(4, dtype=torch.long))
    next(factor.columns())
    next(factor.sample(torch.Generator().manual_seed(0)))
    assert factor.num_columns == 1999
    assert max(value.numel() for value in vars(factor).values() if isinstance(value, torch.Tensor)) == 4 * 2000


def test_the_normalized_loss_does_not_see_scale_and_shift():
    loss = resolve_loss("normalized_cross_entropy").mean
    f, y = outputs(), labels()
    assert float(loss(7 * f + 3, y)) == pytest.approx(float(loss(f, y)), rel=1e-13)
    assert float(loss(f, y)) == pytest.approx(float(cases.normalized_cross_entropy(f, y)), rel=1e-13)


def test_a_callable_is_a_loss_and_one_that_takes_the_model_is_known_by_its_argument():
    def whole(model, batch):
        return model(batch).mean(), 1

    assert not resolve_loss(F.cross_entropy).whole_batch
    assert resolve_loss(whole).whole_batch
    assert resolve_loss(torch.nn.CrossEntropyLoss()).name == "CrossEntropyLoss"
    assert resolve_loss(BUILT_IN["mse"]) is BUILT_IN["mse"]
    assert isinstance(resolve_loss("mse"), Loss)


def refuses(name, f, y, message):
    with refused(message):
        BUILT_IN[name].check(f, y, 0)


def test_unknown_losses_are_refused_with_the_nearest_name():
    known = "Known: cross_entropy, mse, normalized_cross_entropy, or pass a callable."
    with refused(f"unknown loss 'cross_entrpy'; did you mean 'cross_entropy'? {known}"):
        resolve_loss("cross_entrpy")
    with refused(f"unknown loss 'zzz'. {known}"):
        resolve_loss("zzz")
    with refused("loss must be a name or a callable, got int"):
        resolve_loss(3)
    with refused("loss is the class CrossEntropyLoss: pass what it makes, CrossEntropyLoss()"):
        resolve_loss(nn.CrossEntropyLoss)


def test_labels_that_do_not_fit():
    f, y = outputs(), labels()
    y[4] = 9
    refuses(
        "cross_entropy",
        f,
        y,
        "label 9 of sample 4 is out of range: the network has 4 outputs, so labels must be 0 to 3",
    )
    y[4] = -100
    refuses(
        "cross_entropy",
        f,
        y,
        "label -100 of sample 4 is no class. Where it marks what does not count, pass loss=torch.nn.CrossEntropyLoss(), whose "
        "mean leaves it out",
    )
    refuses(
        "cross_entropy", f, labels().int(), "cross entropy needs labels of dtype int64, got torch.int32: use y.long()"
    )
    refuses(
        "cross_entropy",
        f,
        labels()[:, None],
        "cross entropy needs labels of shape (6,) for outputs of shape (6, 4), got (6, 1): use y.squeeze(1)",
    )
    refuses(
        "cross_entropy",
        f,
        F.one_hot(labels(), C),
        "cross entropy needs labels of shape (6,) for outputs of shape (6, 4), got (6, 4): as class probabilities, pass "
        "y.float(); as labels, y.argmax(1)",
    )
    refuses(
        "cross_entropy",
        f,
        labels().float(),
        "cross entropy needs integer labels of shape (6,) or class probabilities of shape (6, 4); got torch.float32 of "
        "shape (6,): use y.long()",
    )
    refuses(
        "cross_entropy",
        f[:, 0],
        labels(),
        "cross entropy needs outputs of shape (samples, classes, …), got (6,): return the logits, one row a sample",
    )
    probabilities = torch.zeros(N, C)
    probabilities[2] = torch.tensor([0.5, -0.5, 1.0, 0.0])
    refuses(
        "cross_entropy", f, probabilities, "the class probabilities of sample 2 are negative: [0.5, -0.5, 1.0, 0.0]"
    )


def test_targets_that_would_broadcast():
    refuses(
        "mse",
        outputs(),
        outputs()[:, 0],
        "mse needs targets of the outputs' shape (6, 4), got (6,): broadcasting would compare every output with every "
        "target; use y.reshape(…) or y.unsqueeze(1)",
    )


def test_outputs_without_spread():
    f = outputs()
    f[3] = 2.0
    message = (
        "all outputs of sample 13 are equal, so normalized_cross_entropy (which divides by their standard deviation) is "
        "not defined there: leave the sample out or use cross_entropy"
    )
    with refused(message):
        BUILT_IN["normalized_cross_entropy"].check_outputs(f, 10)


def softly(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


WEIGHTS = torch.tensor([0.5, 2.0, 1.25], dtype=torch.float64)
IMAGE = (4, 3, 2, 2)
OF_TORCH = {
    "soft labels": (nn.CrossEntropyLoss(), softly(*IMAGE)),
    "weighted, smoothed soft labels": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2), softly(*IMAGE)),
    "weighted labels, some of which do not count": (
        nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1, ignore_index=1),
        torch.arange(16).reshape(4, 2, 2) % 3,
    ),
    "multi-label": (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS.reshape(3, 1, 1)), softly(*IMAGE).round()),
    "weighted multi-label": (nn.BCEWithLogitsLoss(weight=softly(3, 1, 2)), softly(*IMAGE)),
    "squared error of images": (nn.MSELoss(), softly(*IMAGE)),
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_losses_of_torch_over_images_have_their_curvature_in_closed_form(name):
    given, targets = OF_TORCH[name]
    outputs = torch.randn(*IMAGE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loss = weighted_by(resolve_loss(given), Data([(outputs[:3], targets[:3]), (outputs[3:], targets[3:])]))
    assert loss.curvature is not None
    count = loss.count(targets)
    parts = [(loss.count(targets[part]), loss.mean(outputs[part], targets[part])) for part in (slice(3), slice(3, 4))]
    whole = sum(n * value for n, value in parts) / count
    assert float(whole) == pytest.approx(
        float(given(outputs, targets)), rel=1e-12
    )  # batches weigh as torch weighs them
    columns = loss.curvature(outputs, targets).columns()
    found = sum(torch.einsum("na,nb->nab", s.flatten(1), s.flatten(1)) for s, _ in columns)
    H = torch.autograd.functional.hessian(lambda f: given(f.reshape(IMAGE), targets), outputs.flatten()).reshape(
        4, 12, 4, 12
    )
    wanted = 4 * torch.stack([H[n, :, n] for n in range(4)])
    assert torch.allclose(found, wanted, atol=1e-12)


@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss])
def test_a_module_of_torch_with_a_hook_or_a_forward_of_its_own_has_no_closed_form(kind):
    """Its curvature is that of what it computes, not of what its class says."""
    f = outputs()
    y = labels() if kind is nn.CrossEntropyLoss else torch.rand(N, C, dtype=torch.float64)
    hooked, replaced = kind(), kind()
    hooked.register_forward_hook(lambda module, given, value: 2 * value)
    replaced.forward = lambda f, y: 2 * kind()(f, y)
    for given in (hooked, replaced):
        loss = weighted_by(resolve_loss(given), Data((f, y)))
        assert loss.curvature is None
        torch.testing.assert_close(output_hessians(loss, f, y), 2 * dense_hessians(kind(), f, y))
