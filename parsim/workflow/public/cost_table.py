"""A CostTable: the result of `parsim.cost`, one row per price."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parsim.workflow.public.frames import frame

if TYPE_CHECKING:
    import pandas as pd

LINES_SHOWN = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Attributes: title: what was priced where. rows: one price each, as in `document`, the JSON of `parsim cost`."""

    title: str
    rows: tuple[Mapping[str, Any], ...]
    document: Mapping[str, Any]

    def table(self) -> pd.DataFrame:
        """One row per price.

        Columns: what is priced (operation, size_bytes, ranks; or component, phase, samples, rule, ways); seconds, and the 90%
        interval of one repetition, seconds_p05 and seconds_p95; busbw_bytes_per_s and algorithm of a collective; source,
        detail, extrapolated (outside the measured range).
        """
        rows = []
        for row in self.rows:
            plain = {key: value for key, value in row.items() if key not in ("seconds", "terms")}
            interval = row["seconds"]
            rows.append(plain | {"seconds": interval["median"], "seconds_p05": interval["p05"], "seconds_p95": interval["p95"]})
        last = ("seconds", "seconds_p05", "seconds_p95")
        names = list(dict.fromkeys(key for row in rows for key in row if key not in last))
        found = [name for name in names if name not in ("source", "detail", "extrapolated")]
        return frame(rows, [*found, *last, "source", "detail", "extrapolated"])

    def explain(self) -> pd.DataFrame:
        """How every price is made, one row per term in the order in which they apply.

        Columns: price (number of the row of `table()`), term, operation, value, unit, running_total_s (seconds after the term;
        the last is the price), origin, detail.
        """
        rows = [{"price": number, **term} for number, row in enumerate(self.rows) for term in row["terms"]]
        return frame(rows, list(dict.fromkeys(key for row in rows for key in row)))

    def to_dict(self) -> dict[str, Any]:
        return dict(self.document)

    def __str__(self) -> str:
        from parsim.report.tables import cost_table, to_text

        return to_text(cost_table(self.rows, title=self.title)).rstrip()

    def __repr__(self) -> str:
        lines = str(self).splitlines()
        if len(lines) <= LINES_SHOWN:
            return "\n".join(lines)
        more = len(lines) - LINES_SHOWN + 1
        return "\n".join([*lines[: LINES_SHOWN - 1], f"... {more} more lines: print it, or table()"])

    def _repr_html_(self) -> str:
        from parsim.report.notebook import table_html
        from parsim.report.tables import cost_table

        return table_html(cost_table(self.rows, title=self.title))
