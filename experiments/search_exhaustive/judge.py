"""Claims of the search against enumeration, from results.json."""

from __future__ import annotations

from typing import Any

from experiments.common.claims import Claim, claim, of_every

PROBLEMS = 1000


def claims(document: dict[str, Any]) -> list[Claim]:
    """No loss on all problems.

    Args:
        document: results.json; an empty one compares nothing.
    """
    rows = document.get("rows", {})
    return [
        claim(
            f"At least {PROBLEMS:,} random problems were enumerated",
            None if not rows else len(rows) >= PROBLEMS,
            f"{len(rows)} were",
        ),
        of_every(
            "The search finds a plan as fast as the best of all plans, and none where there is none",
            rows.items(),
            lambda row: row[1]["outcome"] in ("tie", "infeasible"),
            lambda row: f"problem {row[0]} ({100 * row[1]['loss']:.1f}%)",
        ),
    ]
