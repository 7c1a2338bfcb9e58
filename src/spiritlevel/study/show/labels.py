"""Names and short texts that the parts of a study's page share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from spiritlevel.measuring.registry import known_records
from spiritlevel.show.numbers import significant
from spiritlevel.study.correlate import Answers, Correlations
from spiritlevel.study.results import Study, is_of_network
from spiritlevel.study.show.figures import interval_text
from spiritlevel.study.statistics import Estimate

GAP_LABELS: Mapping[str, str] = {
    "gap_accuracy": "train − test accuracy",
    "gap_loss": "test − train loss",
    "test_error": "test error",
}
_STAYS = 0.01  # relative: what an attack moves by less has not moved


def factor_ratio_text(found: Estimate) -> str:
    ends = f" [{significant(found.low, 2)}, {significant(found.high, 2)}]" if found.bounded else ""
    return significant(found.value, 2) + ends


def is_main(row: Correlations, study: Study) -> bool:
    """A network's measure as trained, against the study's own gap."""
    return row.gap == study.gap and not row.rescaled and is_of_network(row.quantity)


def before_after(study: Study, found: Answers) -> dict[str, tuple[Correlations, Correlations]]:
    """Measure → its correlations as trained and after random rescaling, where both are known."""
    pairs = {}
    for row in found.rows:
        if is_main(row, study) and row.kendall.known:
            after = found.row(row.quantity, study.gap, rescaled=True)
            if after is not None and after.kendall.known:
                pairs[row.quantity] = (row, after)
    return pairs


def of_paper(names: Sequence[str], paper: str | None) -> list[str]:
    """Those of the measures that a paper proposed."""
    records = known_records()
    found = {name: records.get(name.partition("(")[0]) for name in names}
    return [name for name, record in found.items() if record is not None and record.paper == paper]


def attack_ratios(study: Study) -> dict[str, dict[float, list[float]]]:
    """Measure → target → the ratio to the trained network, of every network that was attacked."""
    ratios: dict[str, dict[float, list[float]]] = {}
    for cell in study.measured:
        for attack in cell.attacks:
            for name, after in attack.measures.items():
                before = cell.measures.get(name)
                usable = is_of_network(name) and before is not None and before.value > 0
                if usable and before is not None and math.isfinite(after.value) and after.value > 0:
                    ratios.setdefault(name, {}).setdefault(attack.target, []).append(after.value / before.value)
    return ratios


def unmoved(ratios: Mapping[str, Mapping[float, Sequence[float]]]) -> list[str]:
    return [n for n, found in ratios.items() if all(abs(v - 1) < _STAYS for vs in found.values() for v in vs)]


def estimate_text(found: Estimate) -> str:
    return interval_text(found) if found.known else "–"
