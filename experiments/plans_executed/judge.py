"""Claims of executed plans, from results.json."""

from __future__ import annotations

from typing import Any

from experiments.common.claims import Claim, claim, of_every

TOLERANCE, PLANS, LEAST_STEPS = 1e-10, 600, 100


def claims(document: dict[str, Any]) -> list[Claim]:
    """Equality, and how many of the plans were run.

    Args:
        document: results.json; an empty one compares nothing.
    """
    rows = document.get("rows", []) if document.get("run", {}).get("steps", LEAST_STEPS) >= LEAST_STEPS else []
    return [
        of_every(
            f"A plan of the search trains the same weights as one process, to {TOLERANCE:g} over {LEAST_STEPS} steps",
            rows,
            lambda row: row["difference"] is not None and row["difference"] <= TOLERANCE,
            lambda row: f"{row['model']} {row['plan']}",
        ),
        claim(f"All {PLANS} drawn plans were run", None if not rows else len(rows) >= PLANS, f"{len(rows)} were"),
    ]
