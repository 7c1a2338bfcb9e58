"""What a study found, in sentences."""

from __future__ import annotations

import math

from spiritlevel.show.numbers import p_value, plain_text, significant, times
from spiritlevel.study.correlate import Answers, Contest, Correlations, contrasts
from spiritlevel.study.results import Study
from spiritlevel.study.show.along import along_sentences, batch_axis
from spiritlevel.study.show.figures import interval_text
from spiritlevel.study.show.labels import GAP_LABELS, attack_ratios, before_after, factor_ratio_text, of_paper, unmoved
from spiritlevel.study.statistics import FEWEST


def study_answer(study: Study, found: Answers) -> list[str]:
    """What the study found, in sentences: who wins and how surely, what rescaling does, what was left out."""
    parts = [_part_sentence(found)] if found.parts else []
    ranked = [*parts, *_winner_sentences(study, found), *along_sentences(study, found), *_batch_sentences(study)]
    ranked += _rescaling_sentences(study, found)
    # A study that attacks asks what an attack can do.
    return [*_attack_sentences(study), *ranked, _count_sentence(study)]


def _part_sentence(found: Answers) -> str:
    """Who ranks best within each network and data set."""
    told = []
    for name, part in found.parts.items():
        best = _best(part)
        if best is None or best.networks < FEWEST:
            told.append(f"{plain_text(name)} has too few networks to say")
        elif best.kendall.value <= 0 or best.kendall.low <= 0:
            told.append(f"{plain_text(name)} by no measure better than chance")
        else:
            shared = _shared(part.contests[False], " and {}")
            told.append(
                f"{plain_text(name)} by {plain_text(best.quantity)}{shared} (Kendall τ {interval_text(best.kendall)})"
            )
    return f"Best ranked: {'; '.join(told)}."


def _shared(held: Contest, words: str) -> str:
    """A phrase for how many other measures rank exactly as well as the best; empty where none does."""
    equal = sum(duel.difference.value < 1e-12 for duel in held.duels)
    return words.format("1 other" if equal == 1 else f"{equal} others") if equal else ""


def _best(found: Answers) -> Correlations | None:
    held = found.contests.get(False)
    if held is None or held.best is None:
        return None
    return next(row for row in found.rows if row.quantity == held.best)


def _winner_sentences(study: Study, found: Answers) -> list[str]:
    held, best = found.contests.get(False), _best(found)
    count = len(study.measured)
    if held is None or best is None or best.networks < FEWEST:
        return [
            f"{count} measured networks are too few to say which measure ranks them; {FEWEST} allow a first interval."
        ]
    name, tau = plain_text(best.quantity), best.kendall
    who = f"all {best.networks} networks together" if found.parts else f"the {best.networks} networks"
    interval = f", 95 % interval {_two(tau.low)} to {_two(tau.high)}" if tau.bounded else ""
    if tau.value <= 0 or (tau.bounded and tau.low <= 0):
        return [
            f"No measure ranks {who} better than chance: the best, {name}, has a Kendall τ of {_two(tau.value)}{interval}."
        ]
    share = round(100 * (1 + tau.value) / 2)
    shared = _shared(held, ", together with {}")
    sentences = [
        f"{name} ranks {who} best{shared}: Kendall τ {_two(tau.value)}{interval}.",
        f"Of two networks the one it calls sharper has the larger gap ({GAP_LABELS[study.gap]}) about {share} times in 100.",
    ]
    return [*sentences, *_lead_sentences(held, found, study)]


def _batch_sentences(study: Study) -> list[str]:
    """How much sharper the largest batches are than the smallest, by the measure of the study's own paper."""
    told: dict[str, list[str]] = {}
    for name, part in (study.parts or {"": study}).items():
        axis = batch_axis(part)
        found = [] if axis is None else [c for c in contrasts(part, axis) if c.times.known]
        if axis is not None and found:
            own = of_paper([c.measure for c in found], study.paper)
            chosen = next(c for c in found if not own or c.measure == own[0])
            lead = f"From {axis.label} {chosen.first} to {chosen.last} {plain_text(chosen.measure)} changes"
            where = f" on {plain_text(name)}" if name else ""
            told.setdefault(lead, []).append(f"by a factor of {factor_ratio_text(chosen.times)}{where}")
    return [f"{lead} {', '.join(factors)}." for lead, factors in told.items()]


def _lead_sentences(held: Contest, found: Answers, study: Study) -> list[str]:
    """Whether the lead is significant, and against whom."""
    if not held.duels:
        return []
    second = held.duels[0]
    runner = found.row(second.measure, study.gap)
    tau = "" if runner is None else f" (τ {_two(runner.kendall.value)})"
    alike = [duel.measure for duel in held.duels if not duel.p < 0.05]
    sentence = (
        f"Its lead over the next, {plain_text(second.measure)}{tau}, is {'' if second.p < 0.05 else 'not '}significant "
        f"({_p(second.p)}, adjusted for all pairs of measures)."
    )
    if len(alike) == len(held.duels) > 1:
        sentence += f" None of the other {len(alike)} measures can be told from it."
    elif len(alike) > 1:
        sentence += f" {len(alike)} of the other {len(held.duels)} measures cannot be told from it."
    return [sentence]


def _rescaling_sentences(study: Study, found: Answers) -> list[str]:
    pairs = before_after(study, found)
    if not pairs:
        return []
    kept = [name for name, (before, after) in pairs.items() if abs(before.kendall.value - after.kendall.value) < 0.005]
    lost = max(pairs, key=lambda name: pairs[name][0].kendall.value - pairs[name][1].kendall.value)
    before, after = (row.kendall.value for row in pairs[lost])
    sentence = f"After a random rescaling that changes no function, {len(kept)} of {len(pairs)} measures rank as before"
    if before - after >= 0.005:
        sentence += f"; {plain_text(lost)} falls from τ {_two(before)} to {_two(after)}"
    return [sentence + "."]


def _attack_sentences(study: Study) -> list[str]:
    ratios = attack_ratios(study)
    if not ratios:
        return []
    still = unmoved(ratios)
    moving = {name: max(v for f in found.values() for v in f) for name, found in ratios.items() if name not in still}
    if not moving:
        return [f"The attack moved none of {len(ratios)} measures."]
    worst = max(moving, key=lambda name: moving[name])
    change = max((attack.output_change for cell in study.measured for attack in cell.attacks), default=math.nan)
    return [
        f"An attack that leaves the outputs alone (largest change {significant(change, 2)}) makes {plain_text(worst)} up to "
        f"{times(moving[worst])} larger; {len(still)} of {len(ratios)} measures stay where they were."
    ]


def _count_sentence(study: Study) -> str:
    parts = [f"{len(study.measured)} of {len(study.cells)} networks are measured"]
    for status, words in (
        ("excluded", "excluded"),
        ("failed", "failed"),
        ("unfinished", "unfinished"),
    ):
        count = sum(cell.status == status for cell in study.cells)
        if count:
            parts.append(f"{count} {words}")
    return ", ".join(parts) + (", each listed below." if len(parts) > 1 else "; none is left out.")


def _two(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def _p(p: float) -> str:
    return "p unknown" if math.isnan(p) else f"p {'' if p <= 0.001 else '= '}{p_value(p)}"
