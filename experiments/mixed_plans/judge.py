"""Claims of executed mixed plans, from results.json."""

from __future__ import annotations

from typing import Any

from experiments.common.claims import Claim, of_every

TOLERANCE, LEAST_STEPS = 1e-10, 20


def claims(document: dict[str, Any]) -> list[Claim]:
    """Equality with one process.

    Args:
        document: results.json; an empty one compares nothing.
    """
    return [
        of_every(
            f"Random mixed plans train the same weights as one process, to {TOLERANCE:g} over {LEAST_STEPS} steps",
            [row for row in document.get("rows", []) if row["steps"] >= LEAST_STEPS],
            lambda row: float(row["worst_difference"]) <= TOLERANCE,
            lambda row: f"{row['model']} on {row['processes']} ({row['worst_difference']})",
        )
    ]
