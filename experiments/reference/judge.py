"""Claims of the executor beside torch's own parallel modules, from results.json."""

from __future__ import annotations

from typing import Any

from experiments.common.claims import Claim, of_every

TOLERANCE, SLOWER, RECORDING = 1e-10, 1.05, 1.02


def claims(document: dict[str, Any]) -> list[Claim]:
    """Equal weights, and paired step ratios with their 95% intervals.

    Args:
        document: results.json; an empty one compares nothing.
    """
    rows = document.get("rows", [])
    return [
        of_every(
            f"Weights equal the native modules' to {TOLERANCE:g}",
            rows,
            lambda row: row["difference"] <= TOLERANCE,
            lambda row: row["case"],
        ),
        of_every(
            f"The 95% interval of the step ratio to the native module lies below {SLOWER}",
            rows,
            lambda row: row["ratio"]["high"] < SLOWER,
            lambda row: f"{row['case']} ({row['ratio']['median']:.2f})",
        ),
        of_every(
            f"That of recording lies below {RECORDING}",
            rows,
            lambda row: row["recording"]["high"] < RECORDING,
            lambda row: f"{row['case']} ({row['recording']['median']:.2f})",
        ),
    ]
