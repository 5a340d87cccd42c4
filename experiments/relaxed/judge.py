"""Claims of the steps of relaxed plans, from results.json."""

from __future__ import annotations

from typing import Any

from experiments.common.claims import Claim, Judge, claim
from experiments.common.markdown import table

AIM = 0.10


def claims(document: dict[str, Any]) -> list[Claim]:
    """The median error, and the intervals.

    Args:
        document: results.json; an empty one compares nothing.
    """
    summary = document.get("summary", {})
    at_speed, rows = summary.get("median_error_at_speed"), summary.get("rows", 0)
    held = summary.get("within_interval")
    return [
        claim(
            f"The median error of a relaxed step is at most {100 * AIM:.0f}%, at the cores' speed beside the run",
            None if at_speed is None else at_speed <= AIM,
            "" if at_speed is None else f"{100 * at_speed:.2f}% of {rows} plans",
        ),
        claim(
            "At least 85% of measured steps lie within the 90% interval",
            None if held is None or not rows else held >= 0.85 * rows,
            "" if held is None else f"{held} of {rows}",
        ),
    ]


def tables(document: dict[str, Any]) -> dict[str, str]:
    """Predicted and measured steps as Markdown.

    Args:
        document: results.json.
    """
    lines = [
        (
            row["case"],
            f"`{row['rule']}`",
            f"{1e3 * row['predicted_s']:.1f}",
            f"{1e3 * row['measured_s']:.1f}",
            f"{100 * row['error']:+.0f}%",
            f"{100 * row['error_at_speed']:+.1f}%",
        )
        for row in document["rows"]
    ]
    head = ("case", "synchronisation", "predicted ms", "measured ms", "error", "error at the cores' speed")
    text = table(head, lines, words=2)
    return {"relaxed": text}


JUDGES = {"relaxed": Judge(claims=claims, tables=tables)}
