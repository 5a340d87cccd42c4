"""Claims of checkpoint intervals, from results.json."""

from __future__ import annotations

from typing import Any

from experiments.common.claims import Claim, Judge, of_every
from experiments.common.markdown import table
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
    head = ("case", "M", "d", "Young", "Daly", "simulated", "mean run", "Young's costs", "Daly's costs")
    lines = []
    for row in document["rows"]:
        times = [format_seconds(row[key]) for key in ("M_s", "d_s", "young_s", "daly_s", "simulated_s", "run_s")]
        costs = [f"{row[f'{name}_costs_percent']:+.2f}% ± {row[f'{name}_error_percent']:.2f}" for name in ("young", "daly")]
        lines.append([row["case"], *times, *costs])
    return {"checkpoint_interval": table(head, lines)}


JUDGES = {"checkpoint_interval": Judge(claims=claims, tables=tables)}
