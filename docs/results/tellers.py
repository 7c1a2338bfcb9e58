"""What the page of results says of each study: a line of the table of verdicts, and its section."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from equal_loss import parted_sentence, parted_table
from onward import by_script, onward_table, said_of_those_trained_on, script_table, with_those_trained_on
from telling import (
    MATRIX,
    NAMES,
    NORMALIZED,
    Told,
    Verdict,
    batch_text,
    bold,
    by_level,
    correlations,
    each_network,
    layers,
    mean_text,
    measured_text,
    progress,
    ratio,
    side_by_side,
    text,
)

from spiritlevel.show.drawing import Drawing
from spiritlevel.show.numbers import significant
from spiritlevel.study.along import Mark
from spiritlevel.study.correlate import Contrast
from spiritlevel.study.levels import ratios_along
from spiritlevel.study.results import Cell, Study
from spiritlevel.study.show.along import batch_axis, path_drawing
from spiritlevel.study.show.figures import ByLevel, boxes, lines
from spiritlevel.study.statistics import FEWEST, Estimate

FEW = "open: too few networks so far"
# The least factor between batches in the paper, and a ratio that it would exceed by far.
FACTORS = {"rangamani-mnist": ("67,000", 100.0), "rangamani-cifar10": ("16", 5.0)}


# --- petzka2019 -------------------------------------------------------------------------------------------------------


def petzka_mnist_verdict(told: Told) -> Verdict:
    hidden = layers(told.study, "kappa_trace")[:-1]
    count = progress(told.study)
    if len(told.study.measured) < FEWEST:
        return Verdict(measured_text(len(told.study.measured)), count, FEW)
    found = [told.r(f"kappa_trace[{name}]").value for name in hidden]
    after = [told.r(f"kappa_trace[{name}]", rescaled=True).value for name in hidden]
    kept = max(abs(one - other) for one, other in zip(found, after, strict=True))
    here = (
        f"r {', '.join(f'{value:.2f}' for value in found)} for hidden layers 1 to {len(found)}, "
        f"{told.r('kappa_trace_sum').value:.2f} for the sum; rescaling changes them by at most {significant(kept, 1)}"
    ).replace("-", "−")
    reached = sum(value >= 0.7 for value in found)
    invariance = "invariance agrees" if kept < 0.005 else "invariance disagrees"
    verdict = "agrees" if reached == len(found) else f"{reached} of {len(found)} layers reach 0.7"
    above = [told.r(f"kappa_trace_{over}").value > max(found) for over in ("sum", "max")]
    over = {2: "", 1: "; of sum and largest over layers one is above every layer", 0: "; sum and largest over layers are not above every layer"}  # fmt: skip
    lowest = min(told.r(f"kappa_trace[{name}]").low for name in hidden)
    if not lowest > 0:
        verdict += f" so far, on {len(told.study.measured)} measured networks, whose intervals still reach {lowest:.2f}".replace("-", "−")  # fmt: skip
    return Verdict(here, count, f"{invariance}; correlation of every layer: {verdict}{over[sum(above)]}")


def petzka_mnist(told: Told) -> list[str]:
    hidden = layers(told.study, "kappa_trace")[:-1]
    wide = ("kappa_trace_sum", "kappa_trace_max", "rho_sum", "rho_max")
    rows = [(f"κ_τ, hidden layer {i}", "≥ 0.7", f"kappa_trace[{name}]") for i, name in enumerate(hidden, 1)]
    rows += [(f"ρ_σ, hidden layer {i}", "“significant”", f"rho_sum[{name}]") for i, name in enumerate(hidden, 1)]
    rows += [(f"ρ, hidden layer {i}", "“significant”", f"rho_max[{name}]") for i, name in enumerate(hidden, 1)]
    rows += [(NAMES[name], "larger than any layer's", name) for name in wide]
    others = [name for name in told.study.quantities(layers=False) if name not in wide]
    rows += [(NAMES[name], "not given", name) for name in others]
    shown = {f"kappa_trace[{name}]": f"κ_τ, layer {i}" for i, name in enumerate(hidden, 1)}
    shown |= {f"hessian_trace[{name}]": f"plain trace, layer {i}" for i, name in enumerate(hidden, 1)}
    shown |= {name: NAMES[name] for name in (*wide, "hessian_trace", "hessian_spectral_norm")}
    batches = [batch_text(cell) for cell in told.study.measured]
    level_rows = [(f"κ_τ, hidden layer {i}", f"kappa_trace[{name}]") for i, name in enumerate(hidden, 1)]
    return [
        *correlations(told, rows),
        "",
        *_at_equal_loss(told, level_rows),
        "",
        "How many times larger at batch 8000 than at batch 1000 (ratio of geometric means):",
        "",
        *_ratio_table(told),
        "",
        *side_by_side(
            told.scatter("kappa-trace-sum", "kappa_trace_sum", batches),
            told.picture(
                "path-kappa-trace-sum", path_drawing(told.study, "kappa_trace_sum", label="κ_τ, sum over layers")
            ),
            told.before_and_after("rescaling", shown),
            told.scatter("hessian-trace", "hessian_trace", batches),
        ),
        "",
        f"_How far training went_: the gap has r = {text(_with_loss(told))} with the train loss at the end.",
    ]


def _at_equal_loss(told: Told, rows: Sequence[tuple[str, str]]) -> list[str]:
    """Coefficients at every level of the train loss: of these rows, and of all measures of the whole network."""
    followed = dict.fromkeys(name for mark in told.study.marks for name in told.study.at(mark).quantities(layers=False))
    intro = (
        "At equal train loss, r with the gap at that level (in brackets the number of networks that came there, those that "
        "the filter leaves out at the end among them):"
    )
    return [intro, "", *by_level(told, [*rows, *((NAMES[name], name) for name in followed)])]


def _with_loss(told: Told) -> Estimate:
    losses = np.array([cell.trained("train_loss") for cell in told.study.measured])
    gaps = np.array([cell.gap(told.study.gap) for cell in told.study.measured])
    return Estimate(float(np.corrcoef(losses, gaps)[0, 1]))


def petzka_cifar10_verdict(told: Told) -> Verdict:
    count = progress(told.study)
    if len(told.study.measured) < FEWEST:
        return Verdict(measured_text(len(told.study.measured)), count, FEW)
    last = layers(told.study, "kappa_trace")[-2]
    found, after = (told.r(f"kappa_trace[{last}]", rescaled) for rescaled in (False, True))
    kept = abs(found.value - after.value) < 0.005
    here = f"r {text(found)}, after rescaling {text(after)}; plain trace {text(told.r('hessian_trace'))}, then {text(told.r('hessian_trace', rescaled=True))}"
    return Verdict(here, count, f"invariance {'agrees' if kept else 'disagrees'}; correlation: {_beside(found, 0.91)}")


def _beside(found: Estimate, papers: float) -> str:
    """What an interval says of the paper's coefficient; one that holds both zero and that decides nothing."""
    if not found.bounded:
        return FEW
    holds = found.high >= papers
    if not found.low > 0:
        return f"open so far, the interval holds zero and the paper's {papers}" if holds else "disagrees"
    if found.low > 0.5:
        return "agrees" if holds else f"agrees in kind; the interval ends below the paper's {papers}"
    return "agrees within a wide interval" if holds else "same sign, smaller"


def petzka_cifar10(told: Told) -> list[str]:
    last, output = layers(told.study, "kappa_trace")[-2:]
    ends = ((last, "last hidden layer"), (output, "output layer"))
    rows = [(f"κ_τ, {words} (`{name}`)", "0.91", f"kappa_trace[{name}]") for name, words in ends]
    rows += [(f"κ, {words} (`{name}`)", "“significant”, weaker", f"kappa[{name}]") for name, words in ends]
    rows += [
        (f"plain trace, {words} (`{name}`)", "“very weak” after", f"hessian_trace[{name}]") for name, words in ends
    ]
    rows += [(NAMES[name], "not given", name) for name in told.study.quantities(layers=False)]
    shown = {f"kappa_trace[{name}]": f"κ_τ, {words}" for name, words in ends}
    shown |= {f"hessian_trace[{name}]": f"plain trace, {words}" for name, words in ends}
    shown |= {name: NAMES[name] for name in ("kappa_trace_sum", "rho_sum", "hessian_trace", "hessian_spectral_norm")}
    batches = [batch_text(cell) for cell in told.study.measured]
    label = f"κ_τ of the last hidden layer ({last})"
    level_rows = [(f"κ_τ, {words} (`{name}`)", f"kappa_trace[{name}]") for name, words in ends]
    ratios = _ratio_table(told)
    return [
        *correlations(told, rows),
        "",
        *_at_equal_loss(told, level_rows),
        "",
        *(
            ["How many times larger at batch 512 than at the smallest batch (ratio of geometric means):", "", *ratios]
            if ratios
            else []
        ),
        "",
        *side_by_side(
            told.scatter("kappa-trace-layer", f"kappa_trace[{last}]", batches, label),
            told.picture(
                "path-kappa-trace-sum", path_drawing(told.study, "kappa_trace_sum", label="κ_τ, sum over layers")
            ),
            told.before_and_after("rescaling", shown),
            told.scatter("hessian-trace", "hessian_trace", batches),
        ),
    ]


# --- tsuzuku2019 ------------------------------------------------------------------------------------------------------


# The paper speaks of networks whose train accuracy is near 1. Where less than this of the labels is fitted, the gap, train − test accuracy,
# is mostly that test labels are true; one network in ten may be like that.
FITTED, MOST_UNFITTED = 0.8, 0.1


def tsuzuku_verdict(told: Told) -> Verdict:
    count = progress(told.study)
    said, verdicts = [], []
    for part in told.parts:
        own = part.study.measured
        if len(own) < FEWEST:
            said.append(f"{part.model}: {measured_text(len(own))}")
            verdicts.append(f"{part.model}: {FEW}")
            continue
        ours, plain = part.r(NORMALIZED), part.r("hessian_trace")
        reached = [cell.trained("train_accuracy") for cell in own]
        said.append(f"{part.model}: {ours.value:.2f} and {plain.value:.2f}, train accuracy at least {min(reached):.1%}")
        unfitted = sum(accuracy < FITTED for accuracy in reached)
        if unfitted > MOST_UNFITTED * len(own):
            verdicts.append(f"{part.model}: open: the paper's fits its labels, this one does not")
        else:
            but = f" ({unfitted} of {len(own)} fits less than {FITTED:.0%} of its labels)" if unfitted else ""
            told_of = _of_labels(ours, plain, part.tau(NORMALIZED), part.tau("hessian_trace"))
            verdicts.append(f"{part.model}: {told_of}{' so far' if 'so far' in count else ''}{but}")
    return Verdict("; ".join(said).replace("-0", "−0"), count, "; ".join(verdicts))


def _of_labels(ours: Estimate, plain: Estimate, our_order: Estimate, plain_order: Estimate) -> str:
    """The paper says two things: normalized sharpness rises with the share of random labels, and tells more than the trace.

    Its coefficient is Pearson's, in which a measure that rises like a root loses; whether it has the networks in better order is told.
    """
    if not ours.low > 0:
        return "open, the interval holds zero" if ours.high > 0 else "disagrees"
    if ours.value > plain.value:
        return "agrees"
    if our_order.value > plain_order.value:
        orders = f"τ {our_order.value:.2f} and {plain_order.value:.2f}"
        return f"random labels are told in better order than by the trace ({orders}), with a smaller r"
    return "random labels are told, but no better than by the trace"


def tsuzuku(told: Told) -> list[str]:
    measures = (NORMALIZED, MATRIX, "normalized_sharpness", "hessian_trace", "kappa_trace_sum", "rho_sum")
    made: list[str] = []
    for part in told.parts:
        kind = part.model.partition(":")[0]
        reached = [cell.trained("train_accuracy") for cell in part.study.measured]
        if len(reached) < FEWEST:
            made += [f"**{part.model}**", "", *each_network(part), ""]
            continue
        made += [
            f"**{part.model}**, {len(reached)} networks, lowest train accuracy {min(reached, default=float('nan')):.1%}:",
            "",
            "| measure | r with the gap | Kendall's τ | Spearman given the train loss |",
            "|---|---|---|---|",
        ]
        for name in (each for each in measures if each in part.study.quantities(layers=False)):
            row = part.found.row(name, part.study.gap)
            given = Estimate() if row is None else row.partial_spearman
            made.append(f"| {NAMES[name]} | {bold(part.r(name))} | {text(part.tau(name))} | {text(given)} |")
        noise = [_share(cell) for cell in part.study.measured]
        made += ["", *side_by_side(
            part.scatter(f"{kind}-normalized-sharpness", NORMALIZED, noise),
            part.scatter(f"{kind}-hessian-trace", "hessian_trace", noise),
        ), ""]  # fmt: skip
    pictures = [
        told.picture(name, _along_noise(told.study, quantity))
        for name, quantity in (("labels-normalized-sharpness", NORMALIZED), ("labels-hessian-trace", "hessian_trace"))
    ]
    return [*made, *side_by_side(*pictures)]


# --- rangamani2019 ----------------------------------------------------------------------------------------------------


def _ratios(told: Told) -> dict[str, dict[Mark | None, Contrast]]:
    axis = batch_axis(told.study)
    return {} if axis is None else ratios_along(told.study, axis, draws=told.found.draws)


def rangamani_verdict(told: Told) -> Verdict:
    count = progress(told.study)
    said, decided, scripts, lowest = [], [], [], list[float]()
    for part in told.parts:
        if script := by_script(part):
            scripts.append((part.model, script))
        found = _ratios(part).get("riemannian_spectral_norm", {})
        losses = [each.times.value for mark, each in found.items() if mark is not None and mark.kind == "loss"]
        epochs = [each.times.value for mark, each in found.items() if mark is not None and mark.kind == "epoch"]
        if losses:
            span = f"{significant(min(losses), 2)} to {significant(max(losses), 2)} times at equal train loss"
            equal = f", up to {significant(max(epochs), 2)} times at equal epochs" if epochs else ""
            ends = f", {script}" if script else ""
            said.append(f"{part.model}: large batches are {span}{equal}{ends}{said_of_those_trained_on(part)}")
            decided.append(max(losses))
            lowest += (
                [mark.level for mark in found if mark is not None and mark.kind == "loss"]
                if None not in found
                else [0.0]
            )
        else:
            said.append(f"{part.model}: no pair of batches at one level yet")
    if not decided:
        return Verdict("; ".join(said), count, FEW)
    so_far = " so far" if "so far" in count else ""
    least, large = FACTORS[told.study.name]
    if max(decided) >= large:
        return Verdict("; ".join(said), count, f"agrees{so_far}")
    if reached := [f"{script.words} for {model}" for model, script in scripts if script.mean >= large]:
        decision = (
            f"agrees in kind, with another reason: by the authors' script the factor is {' and '.join(reached)} (the paper has {least} or "
            f"more), most of it the train loss; at equal train loss and the paper's rates it is at most {significant(max(decided), 2)}"
        )
        return Verdict("; ".join(said), count, decision)
    left = f"at equal train loss the factor is at most {significant(max(decided), 2)}; the paper has {least} or more"
    if min(lowest) > 0:
        down = f"no large batch has come to the end; down to a train loss of {min(lowest):g}, "
        return Verdict("; ".join(said), count, f"open{so_far}: {down}{left}")
    return Verdict("; ".join(said), count, f"disagrees{so_far}: {left}")


def rangamani(told: Told) -> list[str]:
    made = ["| network | batch | networks | test accuracy | train loss | Riemannian spectral norm | plain norm |",
            "|---|---|---|---|---|---|---|"]  # fmt: skip
    for part in told.parts:
        batches = sorted({cell.factors["training.batch_size"] for cell in part.study.cells})
        made += [_batch_row(part, batch) for batch in batches]
    pictures = []
    for part in told.parts:
        table = _ratio_table(part)
        if table:
            made += [
                "",
                f"**{part.model}**: how many times larger at the large batch (ratio of geometric means):",
                "",
                *table,
            ]
        if apart := parted_table(part):
            made += ["", *apart, "", *filter(None, [parted_sentence(part)])]
        for further in filter(None, (onward_table(part), script_table(part))):
            made += ["", *further]
        kind, shown = part.model.partition(":")[0], with_those_trained_on(part)
        pictures += [
            told.picture(
                f"path-{kind}-{name.replace('_', '-')}", path_drawing(shown, name, f", {part.model}", NAMES[name])
            )
            for name in ("riemannian_spectral_norm", "normalized_sharpness")
            if part.study.marks
        ]
    if not pictures:
        pictures = [told.picture("spectral-norm", _by_batch(told.study, "riemannian_spectral_norm"))]
    return [*made, "", *side_by_side(*pictures)]


def _ratio_table(told: Told) -> list[str]:
    """The ratio of every measure between the largest and the smallest batch, at every mark and at the end."""
    found = _ratios(told)
    marks = list(dict.fromkeys(mark for ratios in found.values() for mark in ratios))
    if not marks:
        return []
    head = f"| measure | {' | '.join('the end' if mark is None else str(mark) for mark in marks)} |"
    rows = [
        f"| {NAMES.get(name, name)} | {' | '.join(ratio(ratios.get(mark)) for mark in marks)} |"
        for name, ratios in found.items()
    ]
    return [head, "|---" * (1 + len(marks)) + "|", *rows]


def _batch_row(part: Told, batch: int) -> str:
    cells = [cell for cell in part.study.measured if cell.factors["training.batch_size"] == batch]
    norms = [
        [cell.measures[name].value for cell in cells] for name in ("riemannian_spectral_norm", "hessian_spectral_norm")
    ]
    entries = (
        part.model,
        str(batch),
        str(len(cells)),
        mean_text([100 * cell.trained("test_accuracy") for cell in cells], 4) + (" %" if cells else ""),
        mean_text([cell.trained("train_loss") for cell in cells], 2),
        *(mean_text(values, 3) for values in norms),
    )
    return f"| {' | '.join(entries)} |"


# --- pieces -----------------------------------------------------------------------------------------------------------


def _along_noise(study: Study, quantity: str) -> Drawing:
    shares = sorted({float(cell.factors["data.label_noise"]) for cell in study.cells})
    found = _levels(study, quantity, lambda cell: shares.index(float(cell.factors["data.label_noise"])))
    label = NAMES[quantity].partition(",")[0]
    texts = [f"{share:g}" for share in shares]
    return lines(ByLevel(texts, found), title=f"{label} and random labels", label=label,
                 factor="share of random labels", places=shares)  # fmt: skip


def _by_batch(study: Study, quantity: str) -> Drawing:
    batches = sorted({int(cell.factors["training.batch_size"]) for cell in study.cells})
    found = _levels(study, quantity, lambda cell: batches.index(int(cell.factors["training.batch_size"])))
    label = NAMES[quantity]
    return boxes(
        ByLevel(list(map(str, batches)), found), title=f"{label} by batch size", label=label, factor="batch size"
    )


def _levels(study: Study, quantity: str, level: Callable[[Cell], int]) -> dict[str, dict[int, list[float]]]:
    series: dict[str, dict[int, list[float]]] = {}
    for cell, value in zip(study.measured, study.column(quantity), strict=True):
        series.setdefault(str(cell.factors.get("model.name", "")), {}).setdefault(level(cell), []).append(value)
    return series


def _share(cell: Cell) -> str:
    """Random labels in four steps: more markers cannot be told apart."""
    share = float(cell.factors["data.label_noise"])
    steps: Sequence[tuple[float, str]] = ((0.05, "no random labels"), (0.35, "0.1 to 0.3"), (0.65, "0.4 to 0.6"))
    return next((words for bound, words in steps if share < bound), "0.7 to 1")


TELLERS: Mapping[str, tuple[Callable[[Told], Verdict], Callable[[Told], list[str]]]] = {
    "rangamani-mnist": (rangamani_verdict, rangamani),
    "petzka-mnist": (petzka_mnist_verdict, petzka_mnist),
    "tsuzuku-mnist": (tsuzuku_verdict, tsuzuku),
    "petzka-cifar10": (petzka_cifar10_verdict, petzka_cifar10),
    "rangamani-cifar10": (rangamani_verdict, rangamani),
    "tsuzuku-cifar10": (tsuzuku_verdict, tsuzuku),
}
