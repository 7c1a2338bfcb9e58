"""How much of a noisy diagonal is negative in truth: clipping it at 0 counts noise as curvature.

Let every entry have the mean ĥ and the standard error s. Σ u ĥ⁺ is too large, since noise below 0 is cut off and noise
above it is not. Σ u ĥ has no bias, but lacks what is negative in truth and should have been cut off. So Σ u h⁺ is the
sum of all entries less that of the negative ones in truth, and those are estimated: t = ĥ/s scatters about θ = h/s as a
noncentral Student's t, whatever the network, and the distribution of θ that makes the t of all entries of a tensor most
likely says how much of it lies below 0, as far as it is more likely than one that has nothing there. It finds nothing
where all curvature is positive, as it is near a minimum, or where half of the entries are 0; and all of it where negative
entries stand out of the noise.

Weighted by u·s, the distribution of θ has Σ u h⁻ as its mean negative part, without a word on how θ and s go together.
"""

from __future__ import annotations

import functools
import math

import torch
from scipy import special
from torch import Tensor

# Beyond so many standard errors the sign of an entry is certain.
CERTAIN_SIGN = 8.0
# The distance between the places where θ may lie, and the width of the bins in which t is counted.
STEP = 0.25
# θ lies up to so many steps beyond t: s may have come out small by chance.
REACH = 1.5
# Steps of expectation and maximization: a hundred more or fewer change nothing that can be told from noise.
STEPS = 100
# Standard errors of different luck that the distribution of t is averaged over, and entries looked at together.
QUANTILES, TOGETHER = 200, 1 << 22
TINY = torch.finfo(torch.float64).tiny


def true_share(clipped_from: Tensor, spread: Tensor, scales: Tensor, degrees: int) -> float:
    """Σ u h⁺ as a share of Σ u ĥ⁺; below 0 where noise is larger than the curvature.

    Args:
        clipped_from: ĥ, the diagonal before it was clipped.
        spread: The standard error of every entry; 0 for one that is exact.
        scales: u.
        degrees: Degrees of freedom of the standard errors.

    >>> h = torch.tensor([1.0, -1.0, 3.0]).double()  # exact: all that is negative is so in truth
    >>> true_share(h, torch.zeros(3).double(), torch.ones(3).double(), 7)
    1.0
    """
    positive, negative, certain, squares = 0.0, 0.0, 0.0, 0.0
    counts = torch.zeros(_places(CERTAIN_SIGN).numel(), dtype=torch.float64)
    parts = [torch.split(each.reshape(-1), TOGETHER) for each in (clipped_from, spread, scales)]
    for h, s, u in zip(*parts, strict=True):
        t = h / s
        unsure = t.abs() < CERTAIN_SIGN  # never where s = 0
        mass, weight = u * h, (u * s)[unsure]
        positive += float(mass.clamp(min=0).sum())
        negative -= float(mass.clamp(max=0).sum())
        certain -= float(mass[~unsure].clamp(max=0).sum())
        squares += float(weight.square().sum())
        bins = ((t[unsure] + CERTAIN_SIGN) / STEP).round().long()
        counts += torch.bincount(bins, weight, minlength=len(counts)).cpu()
    if not (negative and positive):
        return 1.0
    total = float(counts.sum())
    real = certain + (_negative_part(counts, degrees, total**2 / squares) if squares else 0.0)
    return 1 - (negative - min(negative, real)) / positive


def _places(largest: float) -> Tensor:
    return torch.arange(-largest, largest + STEP / 2, STEP, dtype=torch.float64)


def _negative_part(counts: Tensor, degrees: int, entries: float) -> float:
    """The mean negative part of the distribution of θ that makes the counts of t, of so many entries, most likely.

    A distribution with no negative part is another candidate: about zero, the two can hardly be told apart, and the first
    would always find some. It counts as far as the data speak for it: D²/(D² + 4), with D twice the difference of the
    logarithms of their likelihoods, about 1 where nothing is negative.
    """
    likelihood = _likelihood(degrees)  # (bins of t, places of θ)
    seen = likelihood.sum(0)
    places = _places(REACH * CERTAIN_SIGN)
    shares = torch.stack([torch.ones_like(places), (places >= 0).double()], 1) * counts.sum() / len(places)
    for _ in range(STEPS):
        expected = (likelihood @ shares).clamp(min=TINY)
        shares = shares * (likelihood.mT @ (counts.unsqueeze(1) / expected)) / seen.unsqueeze(1)
    free, positive = (likelihood @ shares).clamp(min=TINY).log().unbind(1)
    evidence = max(0.0, 2 * float(counts @ (free - positive)) * entries / float(counts.sum()))
    # Where a sign is certain, t is not among the counts, and is not to be counted again.
    found = float(-(shares[:, 0] * places.clamp(max=0) * seen / seen.max()).sum())
    return found * evidence**2 / (evidence**2 + 4)


@functools.cache
def _likelihood(degrees: int) -> Tensor:
    """E[σ; t = (θ + z)/σ lies in a bin], for standard normal z and σ², a mean of squares with so many degrees of freedom.

    Every t is counted with its own s, which is σ times the true one; so the expectation is weighted by σ.
    """
    quantiles = (torch.arange(QUANTILES, dtype=torch.float64) + 0.5) / QUANTILES
    sigma = torch.from_numpy(special.gammaincinv(degrees / 2, quantiles.numpy()) * 2 / degrees).sqrt().view(-1, 1, 1)
    t, theta = _places(CERTAIN_SIGN).view(-1, 1), _places(REACH * CERTAIN_SIGN)
    density = sigma * (-(t * sigma - theta).square() / 2).exp() / math.sqrt(2 * math.pi)
    return (sigma * density).mean(0) * STEP
