"""The small run, always the same inputs; `make fuzz` tries thousands of others. What was found once stays in `found.py`."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fuzz import kills
from fuzz.check import check
from fuzz.found import FOUND
from fuzz.interruptions import EVERYWHERE, SWAPPING, interrupt, interruptible
from fuzz.subjects import Subject, subjects
from measure_names import SPECTRAL

# Without shrinking, which would take minutes: a subject prints as code, and fuzz.reduce makes it smaller.
SMALL = settings(
    derandomize=True, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
)


@pytest.mark.slow
@settings(SMALL, max_examples=50)
@given(subjects)
def test_the_number_within_its_error_or_a_refusal(subject: Subject) -> None:
    outcome = check(subject)
    assert outcome.fine, f"{outcome}\n{subject!r}"


@pytest.mark.parametrize("dtype", [None, "float32"], ids=["as measured", "in single precision"])
@pytest.mark.parametrize("name", FOUND)
def test_what_was_wrong_once(name: str, dtype: str | None) -> None:
    subject = FOUND[name]
    outcome = check(replace(subject, options=replace(subject.options, dtype=dtype)))
    assert outcome.fine, outcome


SEARCHED = {
    name: tuple(each for each in SPECTRAL if each in (subject.options.measures or SPECTRAL))
    for name, subject in FOUND.items()
}


@pytest.mark.parametrize("name", [name for name, measures in SEARCHED.items() if measures])
def test_what_was_wrong_once_by_a_search(name: str) -> None:
    """As larger networks have it, and as it was when most of these were found."""
    options = replace(FOUND[name].options, measures=SEARCHED[name], searched=True)
    outcome = check(replace(FOUND[name], options=options))
    assert outcome.fine, outcome


@pytest.mark.slow
@settings(SMALL, max_examples=5)
@given(subjects, st.floats(0, 1), st.sampled_from((SWAPPING, EVERYWHERE)))
def test_ctrl_c_leaves_the_model_as_it_was(subject: Subject, fraction: float, parts: tuple[str, ...]) -> None:
    said = interrupt(interruptible(subject), fraction, parts)
    assert not said.startswith("changed"), said


@pytest.mark.long
def test_a_measurement_that_is_ended_keeps_what_is_finished(tmp_path: Path) -> None:
    undisturbed = kills.undisturbed_measurement(tmp_path)
    assert kills.kill_measurement(tmp_path, "ended", signal.SIGTERM, 1.0, undisturbed) == "survived"


def test_the_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    check(Subject())
    assert torch.equal(torch.get_rng_state(), before)
