"""Claims and tables of the search against enumeration and of its properties, from results.json."""

from __future__ import annotations

from typing import Any

from experiments.common.claims import Claim, Judge, claim, of_every
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


def exhaustive_claims(document: dict[str, Any]) -> list[Claim]:
    """No loss on all problems."""
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


def exhaustive_tables(document: dict[str, Any]) -> dict[str, str]:
    """Outcomes by what a problem leaves free, as Markdown."""
    rows = list(document["rows"].values())
    groups = {title: [row for row in rows if row["free"] == name] for name, title in FREE.items()} | {"together": rows}
    lines = []
    for title, own in groups.items():
        counts = [sum(row["outcome"] == outcome for row in own) for outcome in ("tie", "infeasible", "loss")]
        largest = max((row["loss"] for row in own), default=0.0)
        lines.append((title, *(f"{count:,}" for count in (len(own), *counts)), f"{100 * largest:.1f}%" if counts[-1] else ""))
    return {
        "search_exhaustive": table(
            ("what is free", "problems", "ties", "nothing fits for both", "losses", "largest loss"), lines, words=1
        )
    }


PROPERTIES, COMPARED, MOST_CPU_S = 19, 20, 240
"""Properties there are, problems that each is to compare, and CPU-seconds that each may take."""

CHOICES = (
    *("ZeRO 1", "ZeRO 2", "ZeRO 3", "recomputation", "microbatches", "other buckets", "gpipe", "chunks", "dp", "tp", "pp"),
    *("shards", "one device", "mixed", "uneven stages", "idle devices"),
)
"""What a search is free to choose beyond the plainest plan; each is to be in some answer that was compared."""


def properties_claims(document: dict[str, Any]) -> list[Claim]:
    """What every property is to show."""
    rows = document.get("rows", [])
    used = document.get("summary", {}).get("used", {})
    never = [name for name in CHOICES if not used.get(name)]
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
            f"never: {', '.join(never)}" if never else f"all {len(CHOICES)} kinds of choices",
        ),
    ]


def properties_tables(document: dict[str, Any]) -> dict[str, str]:
    """Counts per property, and what the chosen plans use, as Markdown."""
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
    used = [(name, f"{summary['used'].get(name, 0):,}") for name in CHOICES]
    properties = table(("property", *heads, "CPU-s", "slowest"), lines, words=1)
    return {"search_properties": f"{properties}\n\n{table(('a plan with', 'answers'), used, words=1)}"}


JUDGES = {
    "search_exhaustive": Judge(claims=exhaustive_claims, tables=exhaustive_tables),
    "search_properties": Judge(claims=properties_claims, tables=properties_tables),
}
