"""Claims of epoch averaging, from results.json."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from experiments.common.claims import SEEDS, Claim, Judge, Row, claim, mean_of, of_every

TOLERANCE = 0.015
EPOCHS = 20


def claims(document: dict[str, Any]) -> list[Claim]:
    """Orderings, specified accuracies and the straggler's price.

    Args:
        document: results.json; an empty one compares nothing.
    """
    scaling: list[Row] = document.get("scaling", [])
    scores = {
        (row["rule"], row["workers"]): mean_of(row)
        for row in scaling
        if row["epochs"] == EPOCHS and len(row["scores"]) >= SEEDS
    }
    counts = sorted(count for kind, count in scores if kind == "average")
    both = [count for count in counts if ("half", count) in scores]
    specified = [row for row in scaling if row["specified"] is not None and len(row["scores"]) >= SEEDS]
    straggler = {row["rule"]: row["epochs_per_s_against_no_straggler"] for row in document.get("straggler", [])}
    slow, merged = straggler.get("average"), straggler.get("half")
    return [
        of_every(
            f"Every specified accuracy is met within {TOLERANCE} over {SEEDS} seeds",
            specified,
            lambda row: abs(mean_of(row) - row["specified"]) <= TOLERANCE,
            lambda row: f"{row['rule']} P={row['workers']} {row['epochs']} epochs ({mean_of(row):.3f}, {row['specified']:.3f})",
        ),
        of_every(
            "Accuracy of averaging falls with the number of workers",
            list(pairwise(counts)),
            lambda pair: scores["average", pair[0]] > scores["average", pair[1]],
            lambda pair: f"{pair[0]} to {pair[1]} workers",
        ),
        of_every(
            "Merging by halves is at most .01 more accurate than averaging",
            both,
            lambda count: scores["half", count] <= scores["average", count] + 0.01,
            lambda count: f"P={count}",
        ),
        claim(
            "A worker at half speed halves the rate of averaging",
            None if slow is None else abs(slow - 0.5) <= 0.005,
            "" if slow is None else f"{slow:.3f} of the rate",
        ),
        claim(
            "Merging keeps at least .93 of (7 + .5)/8 of the rate",
            None if merged is None else merged >= 0.93 * 7.5 / 8,
            "" if merged is None else f"{merged:.3f} of the rate",
        ),
    ]


JUDGES = {"epoch_averaging": Judge(claims=claims)}
