"""`make rates`: how often an eigenvalue that a search has certified lies outside its error, at three tolerances.

108 networks of eight families, half of them in single precision, under cross entropy (some of them certain of their labels) or
squared error, on 240 samples; each measured as a large one is, by searches with no more products than they need, and held against a
Hessian written down in float64. A table goes to standard output, and every number outside its error to standard error.
"""

import argparse
import sys
import warnings
from collections import Counter

import torch

import spiritlevel as sl
from fuzz.check import distance
from fuzz.networks import Network
from fuzz.oracle import quantities, truths
from fuzz.subjects import Options, Samples, Subject, build
from spiritlevel.problem import batches

MEASURES = ("hessian_spectral_norm", "riemannian_spectral_norm", "riemannian_nodewise_spectral_norm", "kappa_max")
FAMILIES = ("mlp", "residual", "convolution", "shared", "experts", "attention", "gated", "words")
ACTIVATIONS = ("relu", "gelu", "tanh", "leaky")
TOLERANCES = (1e-1, 1e-2, 1e-4)
NETWORKS = 108


def subject(number: int) -> Subject:
    """One of the networks: neighbours differ in family, width, precision and loss."""
    squared = bool(number // 4 % 2)
    return Subject(
        Network(
            FAMILIES[number % 8],
            ACTIVATIONS[number // 8 % 4],
            depth=1 + number % 2,
            width=(16, 24, 12)[number % 3],
            seed=1000 + number,
        ),
        "mse" if squared else "cross_entropy",
        Samples(count=240, seed=2000 + number),
        trained=None if squared else (None, None, 2, 4)[number % 4],
        precision=("float32", "float64")[number % 2],
        options=Options(measures=MEASURES),
    )


def judged(number: int, figures: Counter[tuple[float, str]]) -> None:
    """Measure one network at every tolerance and count."""
    built = build(subject(number))
    expected = truths(quantities(built, None), MEASURES)
    for tolerance in TOLERANCES:
        report = sl.measure(built.model, built.data, built.loss, measures=list(MEASURES), tolerance=tolerance)
        for name, truth in expected.items():
            off = distance(report[name], truth)
            figures[tolerance, "count"] += 1
            figures[tolerance, "outside"] += off > report[name].error
            figures[tolerance, "far"] += report[name].converged and off > tolerance * abs(truth.value)
            if off > report[name].error:
                said = f"{report[name].value:.9g} ± {report[name].error:.2g} for {truth.value:.9g}"
                print(f"{number}, tolerance {tolerance:g}: {name} {said}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz.rates", description=__doc__)
    parser.add_argument("--networks", type=int, default=NETWORKS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    batches.SMALL = 0  # small networks as large ones: by searches
    figures: Counter[tuple[float, str]] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(given.networks):
            judged(number, figures)
    print(
        "| tolerance | eigenvalues | outside their error | off by more than the tolerance |\n| ---: | ---: | ---: | ---: |"
    )
    for tolerance in TOLERANCES:
        print(
            f"| {tolerance:g} | "
            + " | ".join(str(figures[tolerance, each]) for each in ("count", "outside", "far"))
            + " |"
        )
    return 1 if any(figures[tolerance, "outside"] for tolerance in TOLERANCES) else 0


if __name__ == "__main__":
    sys.exit(main())
