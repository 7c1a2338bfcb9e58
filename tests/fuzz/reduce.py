"""From a subject that shows something to a smaller one that shows the same: every entry is set to its plain value in turn."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from fuzz.check import Outcome, check, reason
from fuzz.subjects import Samples, Subject


def signature(outcome: Outcome) -> tuple[str, ...]:
    """What must stay the same: the verdict, and the message or the measure and how sure it was."""
    worst = outcome.worst
    return (outcome.verdict, reason(outcome.reason)) if worst is None else (outcome.verdict, worst.measure, worst.kind)


def reduced(subject: Subject) -> tuple[Subject, Outcome]:
    """The same finding with as little else as possible."""
    outcome = check(subject)
    if outcome.worst is not None:
        only = replace(subject, options=replace(subject.options, measures=(outcome.worst.measure,)))
        if outcome.worst.measure != "loss" and not (smaller := check(only)).fine:
            subject, outcome = only, smaller
    for _ in range(2):
        for simpler in _simpler(subject):
            candidate = simpler(subject)
            if candidate != subject and signature(found := check(candidate)) == signature(outcome):
                subject, outcome = candidate, found
    return subject, outcome


def _simpler(subject: Subject) -> Iterator[Any]:
    for count in (1, 2, 3):
        yield lambda now, count=count: replace(now, samples=replace(now.samples, count=min(count, now.samples.count)))
    yield lambda now: replace(now, samples=Samples(count=now.samples.count))
    for part in fields(Subject):
        plain = getattr(Subject(), part.name)
        if not is_dataclass(plain):
            yield lambda now, name=part.name, plain=plain: replace(now, **{name: plain})
            continue
        for entry in fields(plain):
            if entry.name not in ("measures", "count"):
                yield lambda now, name=part.name, entry=entry.name, plain=plain: replace(
                    now, **{name: replace(getattr(now, name), **{entry: getattr(plain, entry)})}
                )
