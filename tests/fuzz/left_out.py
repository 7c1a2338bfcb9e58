"""`make left-out`: do errors hold where few samples carry nearly all curvature, and the others are not visited?

Forty networks (dense, convolutional, residual, of words, linear; piecewise linear or smooth), each trained on 400 samples that are
Gaussian, sparse, clustered or have outliers, and each once more as a twin, at a loss of 1 or at a loss of 1e-5. Every number is held
against its definition from a Hessian written down in float64. A table goes to standard output.
"""

import argparse
import copy
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spiritlevel as sl
from fuzz.check import distance
from fuzz.losses import LOSSES
from fuzz.oracle import Truth, quantities, truths
from fuzz.subjects import Built
from spiritlevel.problem import batches

CERTIFIED = (
    "hessian_spectral_norm",
    "riemannian_spectral_norm",
    "riemannian_nodewise_spectral_norm",
    "kappa_max",
    "kappa_sum",
)
SWEPT = (
    "hessian_trace",
    "kappa_trace_max",
    "rho_max",
    "rho_row_max",
    "rho_sum",
    "rho_row_sum",
    "matrix_normalized_sharpness",
    "normalized_sharpness",
)
SAMPLES, FEATURES, CLASSES, WORDS, STEPS = 400, 6, 3, 12, 1500
# The first matrix of a twin is so many times as large, and the last smaller by as much.
TWIN = 20.0


class Residual(nn.Module):
    def __init__(self, bend: nn.Module) -> None:
        super().__init__()
        self.into, self.up, self.down, self.out = (
            nn.Linear(6, 7),
            nn.Linear(7, 6),
            nn.Linear(6, 7),
            nn.Linear(7, CLASSES),
        )
        self.bend = bend

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        return self.out(x + self.down(self.bend(self.up(x))))


class Words(nn.Module):
    def __init__(self, bend: nn.Module) -> None:
        super().__init__()
        self.words, self.hidden, self.out = nn.Embedding(WORDS, 5), nn.Linear(5, 7), nn.Linear(7, CLASSES)
        self.bend = bend

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.bend(self.hidden(self.words(words).mean(1))))


def _dense(bend: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), bend, nn.Linear(8, 7), copy.deepcopy(bend), nn.Linear(7, CLASSES))


def _convolution(bend: nn.Module) -> nn.Module:
    filters = nn.Conv2d(1, 4, 2)
    return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), filters, bend, nn.Flatten(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, CLASSES))  # fmt: skip


NETWORKS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "dense": _dense,
    "convolution": _convolution,
    "residual": Residual,
    "words": Words,
    "linear": lambda _: nn.Sequential(nn.Linear(FEATURES, CLASSES)),
}
DATA = ("gaussian", "sparse", "clustered", "outliers")
BENDS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU}
STATES = ("twin", "loss of 1", "loss of 1e-5")


@dataclass(frozen=True)
class Case:
    network: str
    data: str
    bend: str
    state: str = "trained"
    seed: int = 0


def cases() -> Iterator[Case]:
    """Every network as trained, and in one of the other states, each of which comes as often."""
    found = [Case(network, data, bend) for network in NETWORKS for data in DATA for bend in BENDS]
    for seed, case in enumerate(found):
        yield replace(case, seed=seed)
        yield replace(case, seed=seed, state=STATES[seed % len(STATES)])


def _inputs(case: Case) -> Tensor:
    if case.network == "words":
        power = {"gaussian": 0.0, "sparse": 2.0, "clustered": 1.0, "outliers": 3.0}[case.data]
        return torch.multinomial(torch.arange(1.0, WORDS + 1) ** -power, SAMPLES * 5, replacement=True).view(SAMPLES, 5)
    x = torch.randn(SAMPLES, FEATURES, dtype=torch.float64)
    if case.data == "sparse":
        x *= torch.rand(SAMPLES, FEATURES) < 0.25
    if case.data == "clustered":
        x = 0.2 * x + 2 * torch.randn(5, FEATURES).double()[torch.randint(0, 5, (SAMPLES,))]
    if case.data == "outliers":
        x[:: SAMPLES // 6] *= 30
    return x


def built(case: Case) -> Built:
    """The network in double precision, trained, with its data."""
    torch.manual_seed(1000 + case.seed)
    model, x = NETWORKS[case.network](BENDS[case.bend]()).double(), _inputs(case)
    with torch.no_grad():
        y = copy.deepcopy(model)(x).mul(1 + torch.randn(SAMPLES, CLASSES).double() / 4).argmax(1)
    if case.state == "loss of 1e-5":
        _fitted(model, x, y, STEPS, 0.0)
        y = _certain(model, x)
    else:
        _fitted(model, x, y, STEPS, 1.0 if case.state == "loss of 1" else 0.0)
    if case.state == "twin":
        weights = [each for each in model.parameters() if each.dim() > 1]
        weights[0].data.mul_(TWIN)
        weights[-1].data.div_(TWIN)
    return Built(model, (x, y), "cross_entropy", {}, model, x, y, LOSSES["cross_entropy"])


def _fitted(model: nn.Module, x: Tensor, y: Tensor, steps: int, loss: float) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        value = F.cross_entropy(model(x), y)
        if float(value.detach()) <= loss:
            return
        value.backward()
        optimizer.step()


def _certain(model: nn.Module, x: Tensor) -> Tensor:
    """The labels that the network gives, and its last layer scaled until it has a loss of 1e-5 on them."""
    y, last = model(x).argmax(1), [each for each in model.modules() if isinstance(each, nn.Linear)][-1]
    low, high = 0.0, 60.0
    with torch.no_grad():
        outputs = model(x)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if F.cross_entropy(2**middle * outputs, y) > 1e-5 else (low, middle)
        for part in last.parameters():
            part.mul_(2**high)
    return y


def judged(case: Case, tolerances: tuple[float, ...], figures: Counter[tuple[str, str]]) -> None:
    """Measure one network in both precisions, and count every number by how it was found."""
    double = built(case)
    for dtype in (torch.float64, torch.float32):
        x = double.inputs.to(dtype) if double.inputs.is_floating_point() else double.inputs
        model = copy.deepcopy(double.model).to(dtype)
        wide = x.double() if x.is_floating_point() else x
        honest = replace(double, honest=copy.deepcopy(model).double(), inputs=wide)
        expected = truths(quantities(honest, None), (*CERTIFIED, *SWEPT))
        name = str(dtype).removeprefix("torch.")
        for tolerance in tolerances:
            report = sl.measure(
                model, (x, double.targets), "cross_entropy", measures=[*CERTIFIED, *SWEPT], tolerance=tolerance
            )
            for measure, truth in expected.items():
                _count(figures, case, name, report[measure], truth, tolerance)


def _count(
    figures: Counter[tuple[str, str]], case: Case, dtype: str, value: sl.Value, truth: Truth, tolerance: float
) -> None:
    kind = _kind(value, dtype)
    off = distance(value, truth)
    figures[kind, "count"] += 1
    for times in (1, 2):
        figures[kind, f"outside {times}"] += off > times * value.error
    if off > (2 if kind != "probes" else 4) * value.error:
        said = f"{value.value:.9g} ± {value.error:.2g} for {truth.value:.9g}, {kind}, {dtype}, tolerance {tolerance:g}"
        print(f"{case}: {value.name} {said}", file=sys.stderr, flush=True)


def _kind(value: sl.Value, dtype: str) -> str:
    if value.certified:
        return f"certified eigenvalues, {dtype}"
    if "probes" in value.method:
        return "probes"
    return "sweeps of all columns" if value.exact else "sweeps of some columns"


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz.left_out", description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="only every so many-th of the networks")
    parser.add_argument("--start", type=int, default=0, help="leave out so many first")
    parser.add_argument("--only", default="", help="only those in this state, such as twin")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    batches.SMALL = 0  # small networks as large ones: samples are left out
    figures: Counter[tuple[str, str]] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in [*cases()][arguments.start :: arguments.every]:
            if arguments.only in case.state:
                judged(case, (1e-2, 1e-4) if case.state == "trained" else (1e-3,), figures)
    print("| numbers | count | outside their error | outside twice of it |\n| --- | ---: | ---: | ---: |")
    for kind in dict.fromkeys(kind for kind, _ in figures):
        print(
            f"| {kind} | " + " | ".join(str(figures[kind, each]) for each in ("count", "outside 1", "outside 2")) + " |"
        )
    certain = [kind for kind, _ in figures if kind != "probes"]
    return 1 if any(figures[kind, "outside 2"] for kind in certain) else 0


if __name__ == "__main__":
    sys.exit(main())
