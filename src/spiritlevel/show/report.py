"""A report as a table in a terminal, as a page, and as a fragment of a notebook."""

from __future__ import annotations

from spiritlevel.measuring.report import Report
from spiritlevel.presenting import register
from spiritlevel.show.page import report_fragment, report_page
from spiritlevel.show.sections import Section
from spiritlevel.show.tables import render, report_table


def one_page(report: Report, *, audit: Section | None = None, spectrum: Section | None = None) -> str:
    """The page of one report, with what else is known of the same model."""
    return report_page({"": report}, audit=audit, spectrum=spectrum)


def report_text(report: Report) -> str:
    """The table as plain text."""
    return render(report_table(report))


register(Report, text=report_text, page=one_page, fragment=report_fragment)
