"""Claims of profiles that learn from a run, in simulation, from results.json."""

from __future__ import annotations

import re
from typing import Any

from experiments.common.claims import Claim, of_every

TARGET = 5.0


def claims(document: dict[str, Any]) -> list[Claim]:
    """The median error of each cause after one run of 20 steps, and after the cause is gone and seen to be.

    Args:
        document: results.json; an empty one compares nothing.
    """
    rows = document.get("rows", [])
    return [
        of_every(
            f"{text} the median error of the next prediction is at most {TARGET:.0f}% for every cause and noise",
            rows,
            lambda row, stage=stage: middle(row[stage]) <= TARGET,
            lambda row, stage=stage: f"{row['cause']}, noise {row['noise']} ({row[stage]})",
        )
        for text, stage in (("After 20 steps of a change", "after"), ("After 20 steps without it again", "undone"))
    ]


def middle(text: str) -> float:
    """The median from its text, "1.2% (worst ...".

    Raises:
        ValueError: the text begins otherwise.
    """
    found = re.match(r"([\d.]+)%", text)
    if found is None:
        raise ValueError(f"no median in {text!r}")
    return float(found.group(1))
