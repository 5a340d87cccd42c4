"""Claims of the search against enumeration, from results.json."""

from __future__ import annotations

from typing import Any

from experiments.common.claims import Claim, claim, of_every
from experiments.common.markdown import table

PROBLEMS = 1000
FREE = {
    "plain": 'placements, meshes, cuts, orders, microbatches ("plain")',
    "zero": '"plain" and ZeRO 0 to 3',
    "recompute": '"plain" and recomputation',
    "all": '"plain" and both',
    "buckets": '"plain" and every bucket size',
}
"""What a problem leaves free, by its name in the results."""


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
            "The search finds a plan as fast as the best of all plans, or none if none fits",
            rows.items(),
            lambda row: row[1]["outcome"] in ("tie", "infeasible"),
            lambda row: f"problem {row[0]} ({100 * row[1]['loss']:.1f}%)",
        ),
    ]


def tables(document: dict[str, Any]) -> str:
    """Outcomes by what a problem leaves free, as Markdown.

    Args:
        document: results.json.
    """
    rows = list(document["rows"].values())
    groups = {title: [row for row in rows if row["free"] == name] for name, title in FREE.items()} | {"together": rows}
    lines = []
    for title, own in groups.items():
        counts = [sum(row["outcome"] == outcome for row in own) for outcome in ("tie", "infeasible", "loss")]
        largest = max((row["loss"] for row in own), default=0.0)
        lines.append((title, *(f"{count:,}" for count in (len(own), *counts)), f"{100 * largest:.1f}%" if counts[-1] else ""))
    return table(("what is free", "problems", "ties", "nothing fits for both", "losses", "largest loss"), lines, words=1)
