"""Tables of how prices were computed: `parsim cost --explain`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parsim.report.tables import Column, ReportTable
from parsim.units import format_seconds


def price_tables(rows: Sequence[Mapping[str, Any]]) -> list[ReportTable]:
    """One table per row of `parsim cost`: its terms in the order in which they make the price.

    Args:
        rows: with the key "terms", as `parsim.costs.estimate.Estimate.term_rows` gives them.
    """
    return [terms_table(row["terms"], title=f"How {_what(row)} is priced") for row in rows]


def terms_table(terms: Sequence[Mapping[str, Any]], *, title: str) -> ReportTable:
    """Terms of one price: name, operation, value, running total, where from."""
    columns = (
        Column(name="term"),
        Column(name="operation"),
        Column(name="value", numeric=True),
        Column(name="running total", numeric=True),
        Column(name="from", wraps=True),
    )
    body = tuple(
        (
            str(term["term"]),
            str(term["operation"]),
            format_seconds(term["value"]) if term["unit"] == "s" else f"{term['value']:.4g}",
            format_seconds(term["running_total_s"]),
            ": ".join(text for text in (str(term["origin"]), str(term["detail"])) if text),
        )
        for term in terms
    )
    return ReportTable(title=title, columns=columns, rows=body)


def _what(row: Mapping[str, Any]) -> str:
    if "component" not in row:
        return str(row["operation"])
    shard = f" (1/{row['ways']} by {row['rule']})" if "ways" in row else ""
    return f"{row['component']} {row['phase']}{shard}"
