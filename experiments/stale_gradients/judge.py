"""Claims of decoupled backpropagation, from results.json."""

from __future__ import annotations

from typing import Any

from experiments.common.claims import SEEDS, Claim, Row, claim, mean_of, of_every

TOLERANCE = 0.02
EPOCH_TOLERANCE = 0.10


def claims(document: dict[str, Any]) -> list[Claim]:
    """Accuracies, orderings of epoch times and the printed cells.

    Args:
        document: results.json; an empty one compares nothing.
    """
    enough = [row for row in document.get("accuracy", []) if len(row["scores"]) >= SEEDS]
    specified = [row for row in enough if row["expected"] is not None]
    by_name = {row["case"]: mean_of(row) for row in enough}
    slow, fast = by_name.get("fdg K=4 stash lr .05 beta .5"), by_name.get("fdg K=4 stash lr .05")
    times: list[Row] = document.get("epoch_times", [])
    seconds = {(row["algorithm"], row["K"]): row["simulated_s"] for row in times}
    modules = sorted({count for name, count in seconds if name == "fdg"})
    return [
        of_every(
            f"Every specified accuracy is met within {TOLERANCE} over {SEEDS} seeds",
            specified,
            lambda row: abs(mean_of(row) - row["expected"]) <= TOLERANCE,
            lambda row: f"{row['case']} ({mean_of(row):.3f}, {row['expected']:.3f})",
        ),
        claim(
            "Gradient shrinking of .5 slows a short run",
            None if slow is None or fast is None else slow < fast,
            "" if slow is None or fast is None else f"{slow:.3f} against {fast:.3f}",
        ),
        of_every(
            "FDG < DDG < FR < BP in epoch time",
            modules,
            lambda k: seconds["fdg", k] < seconds["ddg", k] < seconds["fr", k] < seconds["bp", 1],
            lambda k: f"K={k}",
        ),
        of_every(
            "One overhead explains every printed WRN-28-10 epoch within 10%",
            times,
            lambda row: abs(row["error"]) <= EPOCH_TOLERANCE,
            lambda row: f"{row['algorithm']} K={row['K']} ({100 * row['error']:+.1f}%)",
        ),
    ]
