"""Losses that keep their digits: torch's values everywhere, and its derivatives where torch still has them."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from spiritlevel.network import accurate

SHAPES = [(5,), (4, 7), (3, 5, 2), (2, 5, 3, 4)]


def _problem(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    classes = shape[0] if len(shape) == 1 else shape[1]
    logits = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, classes, () if len(shape) == 1 else (shape[0], *shape[2:]), generator=generator)
    soft = torch.rand(shape, generator=generator, dtype=torch.float64)
    return logits, labels, soft, torch.rand(classes, generator=generator, dtype=torch.float64) + 0.1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_is_torchs_with_every_option(shape: tuple[int, ...], reduction: str) -> None:
    logits, labels, soft, weights = _problem(shape)
    for weight, smoothing, ignored in itertools.product((None, weights), (0.0, 0.1), (-100, 2)):
        options = {"weight": weight, "label_smoothing": smoothing, "reduction": reduction}
        ours = accurate.cross_entropy(logits, labels, ignore_index=ignored, **options)
        theirs = F.cross_entropy(logits, labels, ignore_index=ignored, **options)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, equal_nan=True)
        torch.testing.assert_close(
            accurate.cross_entropy(logits, soft, **options),
            F.cross_entropy(logits, soft, **options),
            rtol=1e-12,
            atol=0,
        )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_binary_cross_entropy_is_torchs_with_every_option(shape: tuple[int, ...], reduction: str) -> None:
    logits, _, soft, _ = _problem(shape)
    for weight, positive in itertools.product((None, soft + 0.5), (None, 2 * soft)):
        options = {"weight": weight, "pos_weight": positive, "reduction": reduction}
        torch.testing.assert_close(
            accurate.binary_cross_entropy_with_logits(logits, soft, **options),
            F.binary_cross_entropy_with_logits(logits, soft, **options),
            rtol=1e-12,
            atol=0,
        )


def test_derivatives_agree_with_differences() -> None:
    logits, labels, soft, _ = _problem((4, 7))
    leaf = logits.requires_grad_()
    for function in (
        lambda x: accurate.cross_entropy(x, labels),
        lambda x: accurate.log_softmax(x, 1).square().sum(),
        lambda x: accurate.binary_cross_entropy_with_logits(x, soft),
        lambda x: accurate.logsigmoid(x).sum(),
    ):
        assert torch.autograd.gradcheck(function, leaf)
        assert torch.autograd.gradgradcheck(function, leaf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("margin", [5.0, 16.0, 20.0, 30.0, 60.0])
def test_second_derivatives_keep_their_digits(margin: float, dtype: torch.dtype) -> None:
    """Two classes: ℓ'' = p(1 − p) = 1/(2 + eᵐ + e⁻ᵐ), on the right side and on the wrong one."""
    expected = 1 / (2 + torch.tensor(margin, dtype=torch.float64).exp() + torch.tensor(-margin).double().exp())
    for sign in (1, -1):
        x = torch.tensor([[sign * margin, 0.0]], dtype=dtype, requires_grad=True)
        z = torch.tensor([sign * margin], dtype=dtype, requires_grad=True)
        target = torch.ones(1, dtype=dtype)
        for leaf, loss in (
            (x, accurate.cross_entropy(x, torch.tensor([0]))),
            (z, accurate.binary_cross_entropy_with_logits(z, target)),
            (z, -accurate.logsigmoid(z).sum()),
        ):
            (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
            (second,) = torch.autograd.grad(slope.flatten()[0], leaf)
            assert float(second.flatten()[0]) == pytest.approx(
                float(expected), rel=1e-5 if dtype == torch.float32 else 1e-13
            )


def test_infinite_and_missing_outputs_are_not_hidden() -> None:
    for broken in (torch.nan, torch.inf):
        assert torch.isnan(accurate.cross_entropy(torch.tensor([[broken, 0.0]]), torch.tensor([0])))
    masked = torch.tensor([[1.0, -torch.inf, 2.0]])
    torch.testing.assert_close(accurate.log_softmax(masked, 1), F.log_softmax(masked, 1))
