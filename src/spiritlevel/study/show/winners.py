"""Which measure can be relied on, over all studies: the standings of the sign test as a table, a picture and sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from spiritlevel.show.drawing import INK, Drawing, series_colour, style
from spiritlevel.show.figures import axes_of, finished
from spiritlevel.show.numbers import Cell as Entry
from spiritlevel.show.numbers import Numbers, plain_text, shortened
from spiritlevel.show.page import render_page
from spiritlevel.show.scales import light_grid
from spiritlevel.show.sections import Section
from spiritlevel.study.show.figures import interval_text
from spiritlevel.study.signs import FEWEST_PAIRS, SignTest, Standing

COLUMNS = (
    "measure", "environments", "sign error, mean", "worst environment", "environments better than chance",
    "fragile over seeds", "over levels", "over studies", "at the end", "at the end, rescaled", "elsewhere",
)  # fmt: skip
RESCALED = 0.02  # by how much a sign error rises that rescaling moved
ESSENTIAL = ("measure", "sign error, mean", "worst environment", "at the end", "at the end, rescaled")


def standings_table(test: SignTest) -> Numbers:
    """All measures, the smallest mean sign error first."""
    return Numbers(COLUMNS, tuple(_row(standing) for standing in test.standings()))


def _row(standing: Standing) -> tuple[Entry, ...]:
    after, before = standing.rescaled
    shares = (standing.better_than_chance, standing.seeds, standing.levels, standing.studies, before, after)
    error, count = standing.elsewhere
    elsewhere = f"{error:.2f} over {count}" if count else "–"
    numbers = (interval_text(standing.mean), f"{standing.worst:.2f}", *map(_percent, shares), elsewhere)
    return (plain_text(standing.measure), standing.environments, *numbers)


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.0f} %"


def standings_drawing(test: SignTest) -> Drawing:
    """The sign error of every measure in every environment: a dot each; the mean of those that all share, with its interval as a bar."""
    standings = test.standings()
    with style():
        figure, axes = axes_of(None, height=0.9 + 0.3 * max(len(standings), 2))
        for place, standing in enumerate(standings):
            errors = list(test.errors(standing.measure).values())
            # The golden ratio spreads dots that coincide without chance.
            heights = [place + 0.5 * ((i * 0.6180339887) % 1 - 0.5) for i in range(len(errors))]
            axes.plot(errors, heights, "o", color=series_colour(0), alpha=0.45, markersize=3.2, markeredgewidth=0)
            mean = standing.mean
            axes.plot([mean.value], [place], "d", color=INK, markersize=6)
            if mean.bounded:
                axes.plot([mean.low, mean.high], [place, place], color=INK, linewidth=1.4)
        axes.axvline(0.5, color=INK, linewidth=0.8, linestyle="--")
        names = [shortened(plain_text(standing.measure), 36) for standing in standings]
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlim(-0.03, 1.03)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        light_grid(axes, "x")
        axes.set_xlabel("sign error (0 right, 0.5 a coin, 1 wrong)")
    rows: tuple[tuple[Entry, ...], ...] = tuple(
        (plain_text(s.measure), *(float(np.quantile(list(test.errors(s.measure).values()), q)) for q in (0, 0.5, 1)))
        for s in standings
    )
    table = Numbers(("measure", "best environment", "median", "worst environment"), rows)
    every = len(test.common) == len(test.environments)
    words = (
        f"Sign errors of {len(standings)} measures in {'' if every else 'up to '}{len(test.environments)} environments, "
        f"the best {'' if every else f'of the {len(test.common)} that all share '}at the top."
    )
    return finished(figure, table, "Sign errors in all environments", words)


def winner_sentences(test: SignTest) -> list[str]:
    """Who errs least, whether that is more than noise, and how far it can be trusted."""
    standings = test.standings()
    if not standings:
        return [f"No environment has {FEWEST_PAIRS:g} sure pairs of networks yet, so that no measure can be judged."]
    best = standings[0]
    equal = sum(abs(standing.mean.value - best.mean.value) < 1e-12 for standing in standings[1:])
    shared = f", together with {'1 other' if equal == 1 else f'{equal} others'}," if equal else ""
    every = len(test.common) == len(test.environments)
    over = (
        f"{best.environments} environments"
        if every
        else f"the {best.environments} environments that all measures share"
    )
    said = [
        f"{plain_text(best.measure)}{shared} errs least: a mean sign error of {interval_text(best.mean)} over {over}, "
        "where a coin has 0.5."
    ]
    if len(standings) > 1 + equal:
        second = standings[1 + equal]
        lead = test.lead(best.measure, second.measure)
        sure = lead.bounded and lead.low > 0
        alike = [s for s in standings[1:] if not test.lead(best.measure, s.measure).low > 0]
        said.append(
            f"Its lead over {plain_text(second.measure)}, {interval_text(lead)}, is {'more than' if sure else 'within'} noise; "
            f"{len(alike)} of {len(standings) - 1} other measures cannot be told from it."
        )
    return [*said, *_after_rescaling(standings), _worst_cases(standings), *_elsewhere(test)]


def _after_rescaling(standings: Sequence[Standing]) -> list[str]:
    """Whether the best measure keeps its error where only weights are rescaled, and which does if it does not."""
    after, before = standings[0].rescaled
    if not after > before + RESCALED:
        return []
    said = (
        f"After the random rescaling, which changes no function, {plain_text(standings[0].measure)} errs on {_percent(after)} of the pairs "
        f"at the end, {_percent(before)} before"
    )
    steady = next((each for each in standings if each.rescaled[0] <= each.rescaled[1] + RESCALED), None)
    return [
        f"{said}; of measures that keep their error, {plain_text(steady.measure)} errs least." if steady else f"{said}."
    ]


def _worst_cases(standings: Sequence[Standing]) -> str:
    """Which measure is wrong least where it is wrong most; a tie of all has no winner."""
    robust = min(standings, key=lambda standing: standing.worst)
    errs = f"{_percent(robust.worst)} of the pairs in {plain_text(robust.where)}"
    never = ", so that no measure is right everywhere" if robust.worst >= 0.5 else ""
    alike = sum(standing.worst - robust.worst < 1e-12 for standing in standings)
    if alike == len(standings) > 1:
        return f"The worst case is equally bad for all of them: each errs on as many as {errs}{never}."
    shared = f" and {alike - 1} other{'s' if alike > 2 else ''}" if alike > 1 else ""
    return f"The mildest worst case is that of {plain_text(robust.measure)}{shared}: it errs on {errs}{never}."


def _elsewhere(test: SignTest) -> list[str]:
    """How measures do where not all of them were tried: of those that were tried in most of it."""
    there = [(standing.elsewhere[0], standing) for standing in test.standings() if standing.elsewhere[1]]
    if not there:
        return []
    most = max(standing.elsewhere[1] for _, standing in there)
    told = sorted((error, plain_text(standing.measure)) for error, standing in there if standing.elsewhere[1] == most)
    errors = ", ".join(f"{name} {error:.2f}" for error, name in told)
    return [f"In {most} further environments, where not all were measured: {errors}."]


def winners_page(test: SignTest) -> str:
    """The page over all studies, self-contained."""
    text = (
        "A pair is two networks that differ in one factor; a measure errs on it if it calls the one with the smaller gap "
        "the sharper. An environment holds the pairs of one study, at one level of the train loss or at the end, that differ "
        "in the same two values of one factor. Pairs count by how sure the sign of their gap is, given how much the gap "
        "moves from seed to seed."
    )
    section = Section(
        "signs",
        "The sign test",
        (text,),
        (standings_drawing(test),) if test.standings() else (),
        (("Measures over all environments", standings_table(test)),) if test.standings() else (),
    )
    return render_page(
        title="Which measure can be relied on", answer=winner_sentences(test), sections=[section], citations=[]
    )
