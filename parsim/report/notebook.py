"""A ReportTable as HTML for a notebook: without styles, every text escaped."""

from __future__ import annotations

import html

from parsim.report.tables import ReportTable


def table_html(table: ReportTable) -> str:
    """Caption, head, rows (those to point out in bold) and notes."""
    head = "".join(f"<th>{html.escape(column.name)}</th>" for column in table.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{_cell(text, number in table.emphasised)}</td>" for text in row) + "</tr>"
        for number, row in enumerate(table.rows)
    )
    caption = f"<caption>{html.escape(table.title)}</caption>" if table.title else ""
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in table.notes)
    listing = f"<ul>{notes}</ul>" if notes else ""
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{listing}"


def paragraph_html(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _cell(text: str, emphasised: bool) -> str:
    return f"<b>{html.escape(text)}</b>" if emphasised else html.escape(text)
