"""Claims of decoupled backpropagation, from results.json."""

from __future__ import annotations

from typing import Any

from experiments.common.claims import SEEDS, Claim, Judge, Row, claim, mean_of, of_every
from experiments.common.markdown import table

TOLERANCE = 0.02
EPOCH_TOLERANCE = 0.10

ORDER = ("bp", "ddg", "fr", "fdg")
"""Of the algorithms in tables."""


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


def named_tables(document: dict[str, Any]) -> dict[str, str]:
    """Accuracy, epoch times and speed-ups as Markdown, by the name in the marks of the README.

    Args:
        document: results.json.
    """
    accuracy = [
        (
            row["case"],
            str(row["staleness_updates"]),
            row["mode"],
            f"{row['accuracy']:.3f} ± {row['deviation']:.3f}",
            "" if row["expected"] is None else f"{row['expected']:.3f}",
            "" if row["expected"] is None else f"{row['accuracy'] - row['expected']:+.3f}",
        )
        for row in document["accuracy"]
    ]
    epochs = [
        (
            row["algorithm"].upper(),
            str(row["K"]),
            f"{row['simulated_s']:.1f}",
            f"{row['printed_s']:.1f}",
            f"{100 * row['error']:+.1f}%",
        )
        for row in sorted(document["epoch_times"], key=lambda row: (ORDER.index(row["algorithm"]), row["K"]))
    ]
    speedups = [
        (
            str(row["K"]),
            str(row["batches"]),
            f"{row['closed_form']:.3f}",
            f"{row['simulated']:.3f}",
            str(row["batches_of_activations_held"]),
        )
        for row in document["speedup"]
    ]
    return {
        "accuracy": table(("case", "delay, updates", "mode", "accuracy", "specified", "difference"), accuracy, words=1),
        "epoch times": table(("algorithm", "K", "simulated s", "printed s", "error"), epochs, words=1),
        "speed-up": table(
            ("K", "batches", "closed form", "simulated", "activations held (batches, all modules)"), speedups, words=0
        ),
    }


JUDGES = {"stale_gradients": Judge(claims=claims, tables=named_tables)}
