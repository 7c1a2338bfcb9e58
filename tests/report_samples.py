"""Reports made by hand: a small network, a sharper one, and an equivalent twin of the first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from spiritlevel.measuring.report import Report
from spiritlevel.measuring.value import Cost, Value

LAYER, NEURON = frozenset({"layer"}), frozenset({"layer", "neuron"})


@dataclass(frozen=True)
class Record:
    """Stands in for a measure's record."""

    name: str
    paper: str
    formula: str
    invariant_under: frozenset[str]
    summary: str


RECORDS: Mapping[str, Record] = {
    record.name: record
    for record in (
        Record("hessian_spectral_norm", "dinh2017", "max |λ(H)|", frozenset(), "The plain Hessian's largest |λ|."),
        Record("hessian_trace", "dinh2017", "Tr H", frozenset(), "The sum of the plain Hessian's eigenvalues."),
        Record("epsilon_sharpness", "dinh2017", "max_{‖δ‖≤ε} (L(θ+δ)−L(θ))/(1+L(θ))", frozenset(), "Largest rise."),
        Record("volume_flatness", "dinh2017", "vol{θ' : L(θ') < L(θ)+ε}", frozenset(), "Infinite by Theorem 2."),
        Record("riemannian_spectral_norm", "rangamani2019", "λ_max(DHD), D = blockdiag(‖W_l‖ I)", LAYER, "Quotient."),
        Record("riemannian_nodewise_spectral_norm", "rangamani2019", "λ_max(|θ| H |θ|)", NEURON, "Its node-wise kin."),
        Record("normalized_sharpness", "tsuzuku2019", "Σ_l min_{x,y} Σ_ij h_ij e^{x_i+y_j} + W_ij² e^{−x_i−y_j}",
               NEURON, "The sharpness after the best rescaling of rows and columns."),
        Record("fisher_rao_norm", "liang2019", "Σ_i θ_i² E[(∂ℓ/∂θ_i)²]", NEURON, "The Fisher–Rao norm of the weights."),
        Record("kappa_sum", "petzka2019", "Σ_l ‖W_l‖² λ_max(H_l)", LAYER, "Layers' norms times their top curvature."),
        Record("kappa_trace_sum", "petzka2019", "Σ_l ‖W_l‖² Tr H_l", LAYER, "Layers' norms times their traces."),
        Record("rho_sum", "petzka2019", "Σ_l Σ_j w_jᵀ H_jj w_j", NEURON, "The curvature each neuron contributes."),
    )
}  # fmt: skip

LAYERS = ("0.weight", "2.weight", "4.weight")
ENVIRONMENT = {"python": "3.11.2", "torch": "2.13.0", "spiritlevel": "0.1.0", "device": "cpu", "threads": "1"}


def layered(name: str, values: tuple[float, ...], error: float = 0.0, **fields: object) -> Value:
    """An exact or certified sum over the layers."""
    return Value(
        name=name,
        value=sum(values),
        error=error,
        exact=error == 0,
        converged=True,
        method="one sweep over the data" if error == 0 else "Lanczos, certified by its residual",
        layers=dict(zip(LAYERS, values, strict=True)),
        layer_errors={} if error == 0 else dict.fromkeys(LAYERS, error / 3),
        error_kind="exact" if error == 0 else "bound",
        **fields,  # type: ignore[arg-type]
    )


def top(name: str, value: float, error: float, **fields: object) -> Value:
    """A certified top eigenvalue."""
    method = "Lanczos, certified by its residual"
    return Value(
        name, value, error, exact=False, converged=True, method=method, products=14, error_kind="bound", **fields
    )  # type: ignore[arg-type]


def neurons(scale: float) -> dict[str, torch.Tensor]:
    """ρ of 64, 32 and 16 neurons, a few of them dead."""
    generator = torch.Generator().manual_seed(7)
    rho = {}
    for layer, width, dead in zip(LAYERS, (64, 32, 16), (9, 3, 0), strict=True):
        values = scale * torch.exp(1.3 * torch.randn(width, generator=generator, dtype=torch.float64)) / width
        values[:dead] = 0.0
        rho[layer] = values
    return rho


def sample_report(scale: float = 1.0, plain: float = 1.0) -> Report:
    """A report with every kind of value; `scale` multiplies the invariant measures, `plain` the plain ones."""
    rho = neurons(scale)
    history = [3.0 * scale * (1 - 0.7**k) for k in range(1, 24)]
    values = (
        top("hessian_spectral_norm", 12.3456789 * plain, 2.1e-4 * plain),
        layered("hessian_trace", (31.2 * plain, 11.8 / plain**0.5, 7.4)),
        Value("epsilon_sharpness", 0.0231 * plain, 4e-4 * plain, False, False, "projected ascent from 8 starts",
              notes=("the search stopped at its limit of 200 steps",), error_kind="lower bound"),
        Value("volume_flatness", float("inf"), 0.0, True, True, "Theorem 2",
              notes=("infinite: the network can be rescaled",)),
        top("riemannian_spectral_norm", 3.0 * scale, 1e-5, details={"history": history}),
        top("riemannian_nodewise_spectral_norm", 1.87654 * scale, 2e-5),
        layered("normalized_sharpness", (4.1 * scale, 2.2 * scale, 1.3 * scale),
                notes=("2 dead neurons add exactly 0",)),
        Value("fisher_rao_norm", 0.4321 * scale, 0.012 * scale, False, True, "estimated from 64 probes"),
        layered("kappa_sum", (10.0 * scale, 55.0 * scale, 23.0 * scale), error=3e-3 * scale),
        layered("kappa_trace_sum", (110.0 * scale, 455.0 * scale, 123.0 * scale)),
        layered("rho_sum", tuple(float(rho[layer].sum()) for layer in LAYERS), neurons=rho),
    )  # fmt: skip
    problem = {
        "loss_function": "cross_entropy",
        "samples": 1797,
        "parameters": 6218,
        "layers": list(LAYERS),
        "dtype": "float64",
        "estimated_layers": {},
    }
    cost = Cost(passes=41.0, products=31.0, gradients=210.0, seconds=3.21, peak_memory=84_000_000)
    return Report({value.name: value for value in values}, 0.01234, cost, problem, ENVIRONMENT)


def only(report: Report, *names: str) -> Report:
    """The report with these measures alone."""
    return replace(report, values={name: report[name] for name in names})


def demo_reports() -> dict[str, Report]:
    """What the demo shows: small batches, large batches, and a twin of the first a million times sharper on paper."""
    return {
        "small batch": sample_report(),
        "large batch": sample_report(scale=6.3, plain=4.2),
        "twin": sample_report(scale=1.0 + 3e-9, plain=1e6),
    }
