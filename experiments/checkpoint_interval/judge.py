"""Claims of checkpoint intervals, from results.json."""

from __future__ import annotations

from typing import Any

from experiments.common.claims import Claim, Judge, of_every
from experiments.common.markdown import row_table
from parsim.units import format_seconds

AS_ASSUMED = "as the formulas assume"


def claims(document: dict[str, Any]) -> list[Claim]:
    """The formulas where their assumptions hold."""
    rows = document.get("rows", [])
    return [
        of_every(
            "Where their assumptions hold, Young's and Daly's intervals cost less than .1% against the best simulated one",
            [row for row in rows if row["case"].startswith(AS_ASSUMED)],
            lambda row: max(row["young_costs_percent"], row["daly_costs_percent"]) < 0.1,
            lambda row: row["case"],
        ),
        of_every(
            "They never cost more than 2%, whichever assumption fails",
            rows,
            lambda row: max(row["young_costs_percent"], row["daly_costs_percent"]) <= 2.0,
            lambda row: f"{row['case']} ({max(row['young_costs_percent'], row['daly_costs_percent']):.1f}%)",
        ),
    ]


def tables(document: dict[str, Any]) -> dict[str, str]:
    """Intervals of every case, and what the formulas' cost, as Markdown."""
    times = {"M": "M_s", "d": "d_s", "Young": "young_s", "Daly": "daly_s", "simulated": "simulated_s", "mean run": "run_s"}
    columns = (
        ("case", "{case}"),
        *((name, lambda row, key=key: format_seconds(row[key])) for name, key in times.items()),
        ("Young's costs", "{young_costs_percent:+.2f}% ± {young_error_percent:.2f}"),
        ("Daly's costs", "{daly_costs_percent:+.2f}% ± {daly_error_percent:.2f}"),
    )
    return {"checkpoint_interval": row_table(document["rows"], columns)}


JUDGES = {"checkpoint_interval": Judge(claims=claims, tables=tables)}
