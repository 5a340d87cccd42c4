"""Claims and tables of the search's properties, from results.json."""

from __future__ import annotations

from typing import Any

from experiments.common.claims import Claim, claim, of_every
from experiments.common.markdown import table

PROPERTIES, COMPARED, MOST_CPU_S = 19, 20, 240
"""Properties there are, problems that each is to compare, and CPU-seconds that each may take."""

FREE = (
    *("ZeRO 1", "ZeRO 2", "ZeRO 3", "recomputation", "microbatches", "other buckets", "gpipe", "chunks", "dp", "tp", "pp"),
    *("shards", "one device", "mixed", "uneven stages", "idle devices"),
)
"""What a search is free to choose beyond the plainest plan; each is to be in some answer that was compared."""


def claims(document: dict[str, Any]) -> list[Claim]:
    """What every property is to show.

    Args:
        document: results.json; an empty one compares nothing.
    """
    rows = document.get("rows", [])
    used = document.get("summary", {}).get("used", {})
    never = [name for name in FREE if not used.get(name)]
    return [
        claim(f"All {PROPERTIES} properties were run", None if not rows else len(rows) == PROPERTIES, f"{len(rows)} were"),
        of_every(
            "Each holds on every problem that was compared",
            rows,
            lambda row: row["compared"] > 0 and row["passed"] == row["compared"],
            lambda row: f"{row['property']} ({row['passed']} of {row['compared']})",
        ),
        of_every(
            f"Each compared at least {COMPARED} problems",
            rows,
            lambda row: row["compared"] >= COMPARED,
            lambda row: f"{row['property']} ({row['compared']})",
        ),
        of_every(
            "Most of them are problems of several devices, and differ",
            rows,
            lambda row: min(row["several"], row["different"]) > row["compared"] / 2,
            lambda row: f"{row['property']} ({row['several']} and {row['different']} of {row['compared']})",
        ),
        of_every(
            f"Each takes at most {MOST_CPU_S} CPU-seconds",
            rows,
            lambda row: row["cpu_s"] <= MOST_CPU_S,
            lambda row: f"{row['property']} ({row['cpu_s']:.0f})",
        ),
        claim(
            "Every kind of choice of the search occurs in some answer",
            None if not rows else not never,
            f"never: {', '.join(never)}" if never else f"all {len(FREE)} kinds of choices",
        ),
    ]


def tables(document: dict[str, Any]) -> str:
    """Counts per property, and what the chosen plans use, as Markdown.

    Args:
        document: results.json.
    """
    rows, summary = document["rows"], document["summary"]
    keys = ("drawn", "compared", "several", "passed", "comparisons", "searches", "infeasible", "untried")
    heads = ("drawn", "compared", "on several devices", "passed", "comparisons", "searches", "nothing fits", "not all tried")
    lines = [
        [
            row["property"].replace("_", " "),
            *(f"{row[key]:,}" for key in keys),
            f"{row['cpu_s']:.0f}",
            f"{row['slowest_s']:.1f}",
        ]
        for row in rows
    ]
    total = [f"{sum(row[key] for row in rows):,}" for key in keys]
    slowest_s = max((row["slowest_s"] for row in rows), default=0)
    lines.append(["all", *total, f"{summary['cpu_s']:.0f}", f"{slowest_s:.1f}"])
    used = [(name, f"{summary['used'].get(name, 0):,}") for name in FREE]
    properties = table(("property", *heads, "CPU-s", "slowest"), lines, words=1)
    return f"{properties}\n\n{table(('a plan with', 'answers'), used, words=1)}"
