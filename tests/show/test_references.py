"""The scale of well-known networks on a page."""

import math
from dataclasses import replace

from report_samples import sample_report
from spiritlevel.show.answer import answer
from spiritlevel.show.references import reference_table, references, scale_words
from spiritlevel.show.sections import reference_section


def test_a_measure_is_placed_among_well_known_networks():
    known = references()
    assert len(known) >= 2
    assert all(math.isfinite(value) and value > 0 for each in known for value in each.values.values())
    report = sample_report()
    report = replace(report, problem={**report.problem, "loss_function": "cross_entropy"})
    words = (
        scale_words(report, "kappa_trace_sum") if "kappa_trace_sum" in report else scale_words(report, "hessian_trace")
    )
    assert all(each.name in words for each in known)
    table = reference_table(report)
    assert table.rows[0][0] == "this network"
    assert len(table.rows) == 1 + len(known)
    assert {"demo, small batch", "LeNet", "ResNet-20"} <= {each.name for each in known}
    shown = {row[0]: row[1] for row in table.texts()[1:]}  # no digit that the library does not keep
    assert all(len(loss.replace(".", "").lstrip("0")) <= 4 for loss in shown.values())
    assert reference_section({"": report}).tables
    (scale,) = [sentence for sentence in answer({"": report}) if sentence.startswith("For scale")]
    assert all(each.name in scale for each in known)


def test_other_losses_and_several_networks_have_no_scale():
    report = replace(sample_report(), problem={"loss_function": "mse"})
    assert scale_words(report, "hessian_trace") == ""
    assert reference_table(report) is None
    assert reference_section({"a": report, "b": report}) is None
