"""Claims of predictions for V100s, from results.json."""

from __future__ import annotations

from statistics import median
from typing import Any

from experiments.common.claims import Claim, claim

WORST, MEDIAN, EIGHT = 15.0, 8.0, 5.0


def claims(document: dict[str, Any]) -> list[Claim]:
    """One GPU from operators alone, and eight GPUs by the shipped profile.

    Args:
        document: results.json; an empty one compares nothing.
    """
    single = [percent(row["error"]) for row in document.get("single_gpu", [])]
    eight = [row for row in document.get("eight_gpus", []) if row["profile"] == "with the efficiency"]
    errors = [percent(row["error"]) for row in eight]
    return [
        claim(
            f"One GPU, no row of a whole model used: the worst case is at most {WORST:.0f}% off",
            None if not single else max(single) <= WORST,
            f"{max(single):.1f}% of {len(single)} cases" if single else "",
        ),
        claim(
            f"One GPU, no row of a whole model used: the median is at most {MEDIAN:.0f}%",
            None if not single else median(single) <= MEDIAN,
            f"{median(single):.1f}%" if single else "",
        ),
        claim(
            f"Throughput of eight GPUs is at most {EIGHT:.0f}% off",
            None if not errors else max(errors) <= EIGHT,
            ", ".join(f"{row['model']} {row['error']}" for row in eight),
        ),
    ]


def percent(text: str) -> float:
    """The size of an error from its text."""
    return abs(float(str(text).replace("−", "-").rstrip("%")))
