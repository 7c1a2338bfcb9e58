"""f(cH) = c·f(H): nothing in the engine is absolute."""

import functools

import pytest
from torch.nn import functional as F

import cases
import spiritlevel as sl

SCALES = [1e-6, 1e-3, 7.0, 1e3, 1e6]
# The power of c by which a measure grows when the loss is multiplied by c.
POWERS = {
    "hessian_spectral_norm": 1,
    "hessian_trace": 1,
    "riemannian_spectral_norm": 1,
    "riemannian_nodewise_spectral_norm": 1,
    "matrix_normalized_sharpness": 0.5,
    "normalized_sharpness": 0.5,
    "fisher_rao_norm": 2,
    "kappa_max": 1,
    "kappa_sum": 1,
    "kappa_trace_max": 1,
    "kappa_trace_sum": 1,
    "rho_max": 1,
    "rho_sum": 1,
    "rho_row_max": 1,
    "rho_row_sum": 1,
}


@functools.cache
def report(name, scale):
    model, x, y = cases.by_name(name).make()
    return sl.measure(
        model, (x, y), lambda f, t: scale * F.cross_entropy(f, t), measures=list(POWERS), tolerance=1e-8, most_probes=16
    )


def test_the_law_covers_the_default_set():
    model, x, y = cases.by_name("mlp").make()
    assert set(sl.measure(model, (x, y), tolerance=0.5)) == set(POWERS)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["mlp", "convolution, max pooling", "GELU", "dead neurons"])
def test_every_measure_follows_the_scale_of_the_loss(name, scale):
    plain, scaled = report(name, 1.0), report(name, scale)
    assert scaled.loss == pytest.approx(scale * plain.loss, rel=1e-12)
    assert scaled.cost.products == pytest.approx(plain.cost.products)
    for measure, power in POWERS.items():
        factor = scale**power
        assert scaled[measure].value == pytest.approx(factor * plain[measure].value, rel=1e-8), measure
        assert scaled[measure].converged == plain[measure].converged, measure
        certified = measure in ("hessian_spectral_norm", "kappa_max", "kappa_sum") or measure.startswith("riemannian")
        if plain[measure].error <= 1e-11 * abs(
            plain[measure].value
        ):  # what rounding leaves is another draw at another scale
            assert scaled[measure].error <= 1e-11 * abs(scaled[measure].value), measure
        elif not certified:
            assert scaled[measure].error == pytest.approx(factor * plain[measure].error, rel=1e-6), measure
