"""What an audit found: a verdict for every measure under every kind of change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from spiritlevel.measuring.report import Report
from spiritlevel.presenting import Shown
from spiritlevel.saved import Format, Saved, number

Verdict = Literal["invariant", "moves", "undecided"]


@dataclass(frozen=True)
class Trial:
    """One twin: which kind of change, how strong, drawn with which seed, and what was measured on it."""

    kind: str
    strength: float
    seed: int
    report: Report


@dataclass(frozen=True)
class Finding:
    """What the audit says of one measure under one kind of change.

    Attributes:
        measure, kind: What was audited.
        verdict: "invariant", "moves" or "undecided".
        factor: The largest ratio between the values of twin and original seen, 1.0 where nothing changed; infinite
            where a value became zero or changed its sign.
        strength: The weakest strength at which a change showed; None where none did.
        claimed: Whether the measure claims to survive.
        reason: What a reader must know: why undecided and which tolerance would decide.
    """

    measure: str
    kind: str
    verdict: Verdict
    factor: float
    strength: float | None
    claimed: bool
    reason: str = ""

    @property
    def claim_fails(self) -> bool:
        """A measure that claims to survive and was seen to move."""
        return self.claimed and self.verdict == "moves"


@dataclass(frozen=True)
class Audit(Saved, Shown):
    """All findings of one audit, with the numbers behind them.

    `verdict(measure, kind)` and `factor(measure, kind)` answer the question; printing gives a table.

    >>> import tempfile, torch, spiritlevel as sl
    >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
    >>> data = torch.ones(2, 1), torch.zeros(2, 1)
    >>> found = sl.audit(model, data, "mse", measures=["kappa_trace_sum"], kinds=["layer"], strengths=[1.0])
    >>> found.verdict("kappa_trace_sum", "layer"), round(found.factor("kappa_trace_sum", "layer"), 6)
    ('invariant', 1.0)
    >>> found.finding("kappa_trace_sum", "layer").claimed, [place for place, _ in found.series("kappa_trace_sum", "layer")]
    (True, [0.0, 1.0])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found.save(f"{folder}/audit.json")
    ...     found.to_html(f"{folder}/audit.html")
    ...     Audit.load(f"{folder}/audit.json").findings == Audit.from_dict(found.to_dict()).findings == found.findings
    True
    """

    _format: ClassVar = Format("spiritlevel-audit-1", "audit")

    findings: tuple[Finding, ...]
    original: Report
    trials: tuple[Trial, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)

    def finding(self, measure: str, kind: str) -> Finding:
        """What was found for one measure under one kind of change."""
        for each in self.findings:
            if each.measure == measure and each.kind == kind:
                return each
        if kind in self.skipped:
            raise KeyError(f"{kind!r} was not audited: {self.skipped[kind]}")
        kinds = sorted({each.kind for each in self.findings})
        raise KeyError(f"no finding for {measure!r} under {kind!r}; audited were {', '.join(kinds)}")

    def verdict(self, measure: str, kind: str) -> Verdict:
        """ "invariant", "moves" or "undecided"."""
        return self.finding(measure, kind).verdict

    def factor(self, measure: str, kind: str) -> float:
        """The largest ratio between twin and original that was seen."""
        return self.finding(measure, kind).factor

    @property
    def failed_claims(self) -> tuple[Finding, ...]:
        """Findings that contradict what a measure claims to survive."""
        return tuple(each for each in self.findings if each.claim_fails)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of change that were tried."""
        return tuple(dict.fromkeys(each.kind for each in self.findings))

    def series(self, measure: str, kind: str) -> list[tuple[float, float]]:
        """(strength, value) of every twin of one kind, the original first."""
        found = [(0.0, self.original[measure].value)]
        return found + [(t.strength, t.report[measure].value) for t in self.trials if t.kind == kind]

    @classmethod
    def _from_parts(cls, parts: dict[str, Any]) -> Audit:
        return cls(
            findings=tuple(Finding(**{**each, "factor": number(each["factor"])}) for each in parts["findings"]),
            original=Report.from_dict(parts["original"]),
            trials=tuple(Trial(**{**each, "report": Report.from_dict(each["report"])}) for each in parts["trials"]),
            skipped=parts["skipped"],
        )
