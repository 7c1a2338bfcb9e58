"""A PAC-Bayes certificate on the test error of a noisy network (tsuzuku2019, equations 1 to 4, 11, 17 and 62)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Any, Literal

import torch
from torch import Tensor, nn

from spiritlevel.curvature.statistics import DIAGONAL
from spiritlevel.errors import SpiritLevelError
from spiritlevel.guarantees.certificate import Certificate
from spiritlevel.guarantees.noise import optimize_scales
from spiritlevel.guarantees.posterior import HYPERPRIORS, Hyperprior, Scale, divergence, scales_of
from spiritlevel.guarantees.zero_one import ZeroOne, choose_zero_one, error_rates, kl_upper
from spiritlevel.measuring.evidence import Evidence
from spiritlevel.measuring.needs import Needs
from spiritlevel.problem.contract import Parameters
from spiritlevel.problem.losses import Loss
from spiritlevel.problem.problem import Problem
from spiritlevel.symmetry import canonicalize

METHODS = ("matrix", "rows", "optimized")
VECTORS: Mapping[str, torch.dtype | None] = {"noise": None, "float32": torch.float32, "bfloat16": torch.bfloat16}

# The part of δ that pays for the Monte Carlo estimate of the posterior's training error.
MONTE_CARLO_SHARE = 0.2
# λ runs over √m · LAMBDA_RATIO^k up to 4m.
LAMBDA_RATIO = 1.1
# How much is spent on every candidate of the noise's scale, first and again on the best ones, before the final estimate.
SEARCH_DRAWS, CLOSER_DRAWS, SEARCH_SAMPLES = 16, 64, 2000


def pac_bayes(
    model: nn.Module,
    data: Any,
    loss: str | Callable[..., Any] | Loss = "cross_entropy",
    *,
    test_data: Any = None,
    method: Literal["matrix", "rows", "optimized"] = "matrix",
    vectors: Literal["noise", "float32", "bfloat16"] = "noise",
    hyperprior: Literal["octaves", "float32"] = "octaves",
    delta: float = 0.05,
    draws: int = 200,
    zero_one: ZeroOne | None = None,
    prior: nn.Module | None = None,
    known: Sequence[str] = (),
    deviation: Literal["tight", "paper"] = "tight",
    steps: int = 200,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    fix_data: bool = False,
) -> Certificate:
    """An upper bound on the test error of the network with noise on its weights, from the training data alone.

    L_D(Q) ≤ L_S(Q) + (KL(Q‖P) + ln(1/δ) + Ψ(λ, m))/λ with the 0–1 loss, Q = N(θ, diag s²), P = N(θ₀, diag s²), θ₀ = 0. All that is
    chosen after seeing the data is paid for: scales s on a finite set, λ on a geometric grid, tensors without noise by the
    bits that describe them, the Monte Carlo estimate of L_S(Q) by its own share of δ. It is a bound for Q, not for the
    network without noise: the difference of their test errors is term (A) of (4), which nobody knows from training data.

    The network is first replaced by the balanced member of its orbit (`canonicalize`), which computes the same function,
    so that every rescaled twin gives the same certificate up to rounding: also the same noise is drawn.

    Args:
        model, data, loss, dtype, fix_data: As for `measure`; the loss is the surrogate whose curvature sets the scales.
        test_data: Data to compare the bound with. It plays no part in it.
        method: "matrix": one σ a tensor by (11). "rows": σ_i σ'_j for the rows and columns of every layer by (17).
            "optimized": the same, improved by stochastic gradient on (62).
        vectors: Biases and normalization. "noise": one σ a tensor, as weights in "matrix". "float32", "bfloat16": no noise,
            described by as many bits each (rounded to them first), as footnote 5 of the paper has it.
        hyperprior: "octaves": σ from 121 half octaves. "float32": σ any positive float32, at 21.5 nats each.
        delta: The probability that the certificate may be wrong.
        draws: How many networks are drawn to estimate L_S(Q).
        zero_one: (outputs, targets) → one number in [0, 1] a sample, where the largest output is not the prediction.
        prior: A network of the same form whose weights were fixed without this data (its initialization, or one trained on
            other samples): the prior is centred there instead of at 0, which is tighter, and no longer blind to rescaling.
        known: Patterns of frozen parameters and buffers that were fixed before this data was seen, and cost nothing.
        deviation: Ψ: "tight" λ²/(8m), Hoeffding's lemma for losses in [0, 1]; "paper" λ²/(2m), equation (3).
        steps: Gradient steps of "optimized".
        seed: For everything random.

    >>> generator = torch.Generator().manual_seed(0)
    >>> y = torch.arange(2000) % 2
    >>> x = torch.randn(2000, 1, generator=generator) / 4 + (2 * y - 1).unsqueeze(1)  # wrong once in 30000
    >>> model = nn.Linear(1, 2, bias=False)
    >>> with torch.no_grad():
    ...     _ = model.weight.copy_(torch.tensor([[-1.0], [1.0]]))
    >>> certificate = pac_bayes(model, (x, y), draws=400)
    >>> certificate.bound < 0.15, abs(sum(certificate.terms.values()) - certificate.bound) < 1e-12
    (True, True)
    """
    _check_choices(method, vectors, hyperprior, deviation, delta, draws)
    problem = Problem(model, loss, data, dtype=dtype, fix_data=fix_data)
    if problem.samples < 2:
        raise SpiritLevelError(f"a bound needs at least two samples, got {problem.samples}: m enters as 1/√m")
    wrong = choose_zero_one(problem, zero_one)
    model, notes = _balanced(problem, known, prior)
    problem = Problem(model, loss, problem.data, dtype=dtype)
    setting = _Setting(
        problem, wrong, delta, draws, 8.0 if deviation == "tight" else 2.0, HYPERPRIORS[hyperprior], seed
    )
    mean = _described(problem, VECTORS[vectors], known, prior)
    scales = scales_of(setting.evidence().statistics, mean.offsets, by_rows=method != "matrix")
    scales, lam = _best_multiple(setting, mean, scales)
    if method == "optimized":
        generator = setting.generator(3)
        scales = optimize_scales(problem, mean.parameters, mean.offsets, scales, lam, steps=steps, generator=generator)
        scales, lam = _best_multiple(setting, mean, scales)
    tests = None if test_data is None else Problem(model, loss, test_data, dtype=dtype, fix_data=fix_data)
    return replace(_certify(setting, mean, scales, method, tests), notes=(*notes, *problem.notes))


def _check_choices(method: str, vectors: str, hyperprior: str, deviation: str, delta: float, draws: int) -> None:
    for name, value, known in (
        ("method", method, METHODS),
        ("vectors", vectors, tuple(VECTORS)),
        ("hyperprior", hyperprior, tuple(HYPERPRIORS)),
        ("deviation", deviation, ("tight", "paper")),
    ):
        if value not in known:
            raise SpiritLevelError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
    if not 0 < delta < 1:
        raise SpiritLevelError(f"delta is the probability of being wrong, a number between 0 and 1; got {delta!r}")
    if not (isinstance(draws, int) and draws >= 1):
        raise SpiritLevelError(f"draws must be a positive whole number, got {draws!r}")


@dataclass(frozen=True)
class _Setting:
    """What stays the same while scales are tried."""

    problem: Problem
    zero_one: ZeroOne
    delta: float
    draws: int
    deviation_divisor: float  # Ψ = λ²/(deviation_divisor·m)
    hyperprior: Hyperprior
    seed: int
    lambdas: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        m = self.problem.samples
        count = math.ceil(math.log(4 * math.sqrt(m)) / math.log(LAMBDA_RATIO)) + 1
        object.__setattr__(self, "lambdas", tuple(math.sqrt(m) * LAMBDA_RATIO**k for k in range(count)))

    def generator(self, purpose: int) -> torch.Generator:
        """A stream of its own for every purpose, the same for every twin."""
        return torch.Generator().manual_seed((int(self.seed) * 1_000_003 + 7919 * purpose) % (1 << 63))

    def evidence(self) -> Evidence:
        needs = Needs(statistics=frozenset([DIAGONAL]))
        return Evidence(self.problem, needs, tolerance=1e-2, seed=self.seed, most_probes=64)

    @property
    def log_confidence(self) -> float:
        """ln(number of λ / δ), with the part of δ that the bound itself may use."""
        return math.log(len(self.lambdas) / ((1 - MONTE_CARLO_SHARE) * self.delta))

    def slack(self, kl: float) -> tuple[float, float]:
        """(KL + ln(1/δ) + Ψ)/λ at the best λ of the grid, and that λ."""
        m = self.problem.samples
        return min(
            ((kl + self.log_confidence + lam**2 / (self.deviation_divisor * m)) / lam, lam) for lam in self.lambdas
        )

    def monte_carlo(self, estimate: float) -> float:
        """What the mean over posterior draws may exceed its estimate by."""
        return kl_upper(estimate, -math.log(MONTE_CARLO_SHARE * self.delta) / self.draws) - estimate


# --- what is described, what is noisy ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Mean:
    """The middle of the posterior.

    parameters: θ. offsets: θ − θ₀ of the tensors with noise. fixed: nats that describe the tensors without.
    """

    parameters: Parameters
    offsets: Parameters
    fixed: float


def _balanced(problem: Problem, known: Sequence[str], prior: nn.Module | None) -> tuple[nn.Module, list[str]]:
    """The balanced twin, or the model itself with a note where there is no twin or it would move a fixed parameter."""
    if known or prior is not None:
        return problem.model, [
            "the prior fixes weights, so the network is not balanced first and rescaled twins differ"
        ]
    try:
        return canonicalize(problem.model, problem.data.first[:2].inputs), []
    except (SpiritLevelError, RuntimeError, TypeError) as error:
        return problem.model, [f"the network could not be balanced first, so rescaled twins may differ: {error}"]


def _described(problem: Problem, precision: torch.dtype | None, known: Sequence[str], prior: nn.Module | None) -> _Mean:
    """Which tensors carry noise, around what, and what it costs to describe the others."""
    parameters, offsets, bits = dict(problem.parameters), {}, 0
    centres = _centres(problem, prior)
    for name, tensor in parameters.items():
        if precision is None or tensor.dim() > 1:
            offsets[name] = tensor.double() - centres.get(name, 0.0)
        else:
            parameters[name] = tensor.to(precision).to(tensor.dtype)
            bits += tensor.numel() * torch.finfo(precision).bits
    for name, tensor in [*problem.model.named_parameters(), *problem.model.named_buffers()]:
        free = name.endswith("num_batches_tracked") or any(fnmatch(name, pattern) for pattern in known)
        if name not in parameters and not free:
            bits += 8 * tensor.element_size() * tensor.numel()
    return _Mean(parameters, offsets, bits * math.log(2))


def _centres(problem: Problem, prior: nn.Module | None) -> dict[str, Tensor]:
    if prior is None:
        return {}
    centres = {name: tensor.detach().to(problem.device).double() for name, tensor in prior.named_parameters()}
    for name, tensor in problem.parameters.items():
        if name not in centres or centres[name].shape != tensor.shape:
            came = tuple(centres[name].shape) if name in centres else "nothing"
            raise SpiritLevelError(
                f"prior must be a network of the same form: {name!r} has shape {tuple(tensor.shape)}, in the prior {came}"
            )
    return centres


# --- choosing and certifying -------------------------------------------------------------------------------------


def _drawn(
    parameters: Parameters, scales: Mapping[str, Scale], count: int, generator: torch.Generator
) -> Iterator[Parameters]:
    """Networks of the posterior. The noise is the same for every twin, in units of its scales."""
    deviations = {name: scale.deviation(parameters[name]) for name, scale in scales.items()}
    for _ in range(count):
        drawn = dict(parameters)
        for name, deviation in deviations.items():
            noise = torch.randn(deviation.shape, generator=generator, dtype=torch.float64).to(deviation.device)
            drawn[name] = (parameters[name].double() + deviation * noise).to(parameters[name].dtype)
        yield drawn


def _costs(setting: _Setting, mean: _Mean, scales: Mapping[str, Scale]) -> tuple[dict[str, float], float]:
    """Σ (θ−θ₀)²/(2s²) of every tensor, and what naming the scales costs."""
    named = sum(scale.count for scale in scales.values()) * setting.hyperprior.cost
    return divergence(scales, mean.offsets), named


@dataclass(frozen=True)
class _Trial:
    scales: dict[str, Scale]
    lam: float
    bound: float
    kl_bound: float


def _best_multiple(setting: _Setting, mean: _Mean, scales: Mapping[str, Scale]) -> tuple[dict[str, Scale], float]:
    """All noise times one factor, on the hyperprior's numbers: the factor with the least bound as far as a few draws tell.

    The factor needs no payment of its own, because every σ is paid for wherever it lies on its set; the final estimate
    draws anew. Candidates are those with a divergence of 4m, 2m, m, …, 1, then, with more draws, the ones around the best.
    Where all are vacuous, kl_bound decides, which is below 1 and still tells them apart.
    """
    m, total = setting.problem.samples, sum(divergence(scales, mean.offsets).values())

    def tried(target: float, draws: int) -> _Trial:
        factor = math.log(total / target) / 2 if total > 0 else 0.0
        moved = {name: scale.times(factor).on(setting.hyperprior) for name, scale in scales.items()}
        return _try(setting, mean, moved, draws)

    targets = [4.0 * m / 2**k for k in range(math.ceil(math.log2(4 * m)) + 1)]
    best = _least({target: tried(target, SEARCH_DRAWS) for target in targets})
    closer = {best * 2**k: tried(best * 2**k, CLOSER_DRAWS) for k in (-0.5, 0, 0.5, 1, 2)}
    trial = closer[_least(closer)]
    return trial.scales, trial.lam


def _try(setting: _Setting, mean: _Mean, scales: dict[str, Scale], draws: int) -> _Trial:
    """The bounds that these scales would give, estimated from a few draws on some of the data."""
    kl, named = _costs(setting, mean, scales)
    total = sum(kl.values()) + named + mean.fixed
    slack, lam = setting.slack(total)
    networks = _drawn(mean.parameters, scales, draws, setting.generator(1))
    rates = error_rates(setting.problem, networks, setting.zero_one, SEARCH_SAMPLES)
    # A few draws that all went well by luck must not win: be a nat pessimistic about them.
    rate = kl_upper(sum(rates) / len(rates), 1 / len(rates))
    return _Trial(scales, lam, rate + slack, kl_upper(rate, total / setting.problem.samples))


def _least(found: Mapping[float, _Trial]) -> float:
    by_bound = min(found, key=lambda target: found[target].bound)
    return by_bound if found[by_bound].bound < 1 else min(found, key=lambda target: found[target].kl_bound)


def _certify(
    setting: _Setting, mean: _Mean, scales: Mapping[str, Scale], method: str, tests: Problem | None
) -> Certificate:
    kl, named = _costs(setting, mean, scales)
    parameters, m = mean.parameters, setting.problem.samples
    total = sum(kl.values()) + named + mean.fixed

    def rates_on(problem: Problem) -> list[float]:  # the same networks on every problem
        networks = _drawn(parameters, scales, setting.draws, setting.generator(2))
        return error_rates(problem, itertools.chain([parameters], networks), setting.zero_one)

    plain, *rates = rates_on(setting.problem)
    noisy = sum(rates) / len(rates)
    lam = setting.slack(total)[1]
    terms = {
        "training error": plain,
        "noise": noisy - plain,
        "Monte Carlo": setting.monte_carlo(noisy),
        "divergence": sum(kl.values()) / lam,
        "scales": named / lam,
        "description": mean.fixed / lam,
        "confidence": setting.log_confidence / lam,
        "deviation": lam / (setting.deviation_divisor * m),
    }
    moment = 2 * math.sqrt(m) if m >= 8 else m + 1  # Maurer's constant is proved from 8 samples on
    confidence = math.log(moment / ((1 - MONTE_CARLO_SHARE) * setting.delta))
    return Certificate(
        bound=sum(terms.values()),
        terms=terms,
        kl_bound=kl_upper(noisy + terms["Monte Carlo"], (total + confidence) / m),
        training_error=plain,
        noisy_training_error=noisy,
        divergence=total,
        layers=kl,
        lam=lam,
        delta=setting.delta,
        samples=m,
        draws=setting.draws,
        num_scales=sum(scale.count for scale in scales.values()),
        method=method,
        **({} if tests is None else _on_test(rates_on(tests))),
    )


def _on_test(rates: Sequence[float]) -> dict[str, Any]:
    noisy = torch.tensor(rates[1:], dtype=torch.float64)
    spread = float(noisy.std()) / math.sqrt(len(noisy)) if len(noisy) > 1 else 0.0
    return {"test_error": rates[0], "noisy_test_error": float(noisy.mean()), "noisy_test_error_spread": spread}


__all__ = ["Certificate", "pac_bayes"]
