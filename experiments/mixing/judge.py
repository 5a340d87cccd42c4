"""Claims of mixed placements, from results.json."""

from __future__ import annotations

from typing import Any

from experiments.common.claims import Claim, claim, of_every
from experiments.common.markdown import table


def claims(document: dict[str, Any]) -> list[Claim]:
    """Where mixing pays, and where it does not.

    Args:
        document: results.json; an empty one compares nothing.
    """
    rows = document.get("rows", [])
    vgg = {row["batch"]: gain(row) for row in rows if row["model"] == "vgg16" and row["memory_gib"] == 32.0}
    vit = [row for row in rows if row["model"] == "vit_b_16" and row["memory_gib"] == 32.0]
    largest = max(vgg.values(), default=None)
    return [
        claim(
            "A mixed plan of VGG-16 on eight V100s takes at least 20% less time than the best uniform plan at some batch",
            None if largest is None else largest >= 0.20,
            "" if largest is None else f"{100 * largest:.1f}% less at most",
        ),
        of_every(
            "For ViT-B/16 plain data parallelism is the best plan found where it fits",
            vit,
            lambda row: row["adaptive_ms"] == row["dp_ms"],
            lambda row: f"batch {row['batch']}",
        ),
    ]


def gain(row: dict[str, Any]) -> float:
    """Share of time saved, from its text in percent."""
    return float(str(row["less_time_than_best_uniform"]).rstrip("%")) / 100


def tables(document: dict[str, Any]) -> str:
    """The best simulated plan of each family as Markdown, milliseconds.

    Args:
        document: results.json.
    """
    head = (
        "model",
        "batch",
        "memory per device",
        "dp ms",
        "mp ms",
        "hp ms",
        "adaptive ms",
        "less than the best uniform",
        "kinds",
    )
    lines = []
    for row in document["rows"]:
        times = [str(row[f"{family}_ms"]) for family in ("dp", "mp", "hp", "adaptive")]
        kinds = row["mixes"].replace("+", ", ")
        gained = row["less_time_than_best_uniform"]
        lines.append((row["model"], str(row["batch"]), f"{row['memory_gib']:g} GiB", *times, gained, kinds))
    return table(head, list(dict.fromkeys(lines)), words=1)
