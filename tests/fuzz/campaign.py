"""The long run: so many inputs, interruptions and kills; what became of them as counts, and every finding as code."""

import json
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from fuzz import kills
from fuzz.check import Outcome, check, reason
from fuzz.interruptions import EVERYWHERE, SWAPPING, interrupt, interruptible
from fuzz.reduce import reduced, signature
from fuzz.subjects import Subject, subjects

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)


@dataclass
class Figures:
    """Counts of a run. findings: what is wrong, with the subject that shows it."""

    torch: str = torch.__version__
    seed: int = 0
    seconds: float = 0.0
    inputs: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    precisions: Counter[str] = field(default_factory=Counter)
    families: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    numbers: Counter[str] = field(default_factory=Counter)
    within_error: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    unavailable: Counter[str] = field(default_factory=Counter)
    interruptions: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    def count(self, subject: Subject, outcome: Outcome) -> None:
        self.inputs += 1
        self.verdicts[outcome.verdict] += 1
        self.precisions[subject.precision] += 1
        self.families[subject.network.family] += 1
        self.losses[subject.loss] += 1
        self.unavailable.update(said.partition(":")[2].strip() for said in outcome.unavailable)
        if outcome.verdict == "refused":
            self.refusals[reason(outcome.reason)] += 1
        for each in outcome.judged:
            self.numbers[each.kind] += 1
            self.within_error[each.kind] += each.within_error
        if not outcome.fine:
            self.findings.append(f"{outcome}\n    {subject!r}")

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(vars(self), indent=1, ensure_ascii=False), encoding="utf-8")


def draw(strategy: st.SearchStrategy[Any], count: int, start: int, use: Callable[[Any], None]) -> None:
    """`count` examples, each used once, from this seed on."""

    @seed(start)
    @settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
    )
    @given(strategy)
    def run(example: Any) -> None:
        use(example)

    run()


def run_inputs(figures: Figures, count: int, tell: Callable[[str], None]) -> None:
    """Check so many different inputs, in portions of a seed each; the first finding of a kind is made smaller."""
    met: set[Subject] = set()
    kinds: set[tuple[str, ...]] = set()

    def use(subject: Subject) -> None:
        if subject in met or figures.inputs >= count:
            return
        met.add(subject)
        outcome = check(subject)
        figures.count(subject, outcome)
        if not outcome.fine and signature(outcome) not in kinds:
            kinds.add(signature(outcome))
            smaller, found = reduced(subject)
            figures.findings[-1] = f"{found}\n    {smaller!r}"
        if not outcome.fine:
            tell(figures.findings[-1])

    portion = 0
    while figures.inputs < count:
        draw(subjects, min(200, count), figures.seed + portion, use)
        portion += 1
        tell(f"{figures.inputs} inputs, {figures.verdicts}")


def run_interruptions(figures: Figures, count: int) -> None:
    """Half of them anywhere, half where torch swaps parameters."""
    trials = st.tuples(subjects, st.floats(0, 1), st.sampled_from((EVERYWHERE, SWAPPING)))

    def use(trial: tuple[Subject, float, tuple[str, ...]]) -> None:
        subject, fraction, parts = trial
        if figures.interruptions.total() >= count:
            return
        said = interrupt(interruptible(subject), fraction, parts)
        if said == "refused":
            return
        figures.interruptions[said.partition(":")[0]] += 1
        if said.startswith("changed"):
            figures.findings.append(f"interruption at {fraction} in {parts}: {said}\n    {subject!r}")

    portion = 0
    while figures.interruptions.total() < count:
        draw(trials, 50, figures.seed + portion, use)
        portion += 1


def run_kills(figures: Figures, count: int) -> None:
    """Studies and measurements in turn, by every signal, at times spread over their run."""
    if not count:
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        study, undisturbed = kills.reference(folder), kills.undisturbed_measurement(folder)
        for trial in range(count):
            number, share = SIGNALS[trial // 2 % len(SIGNALS)], 0.618 * (trial + 1) % 1
            if trial % 2:
                said = kills.kill_measurement(folder, str(trial), number, share, undisturbed)
            else:
                said = kills.kill_study(folder, str(trial), number, 0.2 + 6 * share, study)
            figures.kills[said.partition(":")[0]] += 1
            if said.startswith("wrong"):
                figures.findings.append(f"kill {trial}: {said}")


def campaign(inputs: int, interruptions: int, killed: int, start: int, tell: Callable[[str], None]) -> Figures:
    """All of it."""
    figures, began = Figures(seed=start), time.monotonic()
    run_inputs(figures, inputs, tell)
    run_interruptions(figures, interruptions)
    tell(f"interruptions: {dict(figures.interruptions)}")
    run_kills(figures, killed)
    tell(f"kills: {dict(figures.kills)}")
    figures.seconds = time.monotonic() - began
    return figures
