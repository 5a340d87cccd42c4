"""Claims of predicted peak memory, from results.json."""

from __future__ import annotations

import statistics
from typing import Any

from experiments.common.claims import Claim, claim, of_every

AIM_MEAN, AIM_WORST = 0.5, 3.0


def claims(document: dict[str, Any]) -> list[Claim]:
    """The promises of the design.

    Args:
        document: results.json; an empty one compares nothing.
    """
    rows = document.get("rows", [])
    errors = [abs(row["fullest_percent"]) for row in rows]
    return [
        claim(
            f"The mean error of a plan's fullest rank is at most {AIM_MEAN}%",
            None if not errors else statistics.mean(errors) <= AIM_MEAN,
            f"{statistics.mean(errors):.2f}% of {len(errors)} plans" if errors else "",
        ),
        of_every(
            f"No fullest rank is further off than {AIM_WORST:.0f}%",
            rows,
            lambda row: abs(row["fullest_percent"]) <= AIM_WORST,
            lambda row: f"{row['model']} {row['fullest_percent']:+.1f}%",
        ),
    ]
