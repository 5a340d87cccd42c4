"""Claims and tables of executed plans, from results.json. Needs the standard library alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from experiments.common.claims import Claim, Judge, Row, claim, of_every
from experiments.common.markdown import row_table, table

TOLERANCE = 1e-10
PLANS, LEAST_STEPS = 600, 100
MIXED_STEPS = 20
SLOWER, RECORDING = 1.05, 1.02
"""Limits of the 95% interval of a step's ratio: to the native module, and to one that records nothing."""


def plans_claims(document: dict[str, Any]) -> list[Claim]:
    """Equality, and how many of the plans were run."""
    rows = document.get("rows", []) if document.get("run", {}).get("steps", LEAST_STEPS) >= LEAST_STEPS else []
    return [
        of_every(
            f"A plan of the search trains the same weights as one process, to {TOLERANCE:g} over {LEAST_STEPS} steps",
            rows,
            _holds,
            lambda row: f"{row['model']} {row['plan']}",
        ),
        claim(f"All {PLANS} drawn plans were run", None if not rows else len(rows) >= PLANS, f"{len(rows)} were"),
    ]


def _holds(row: Row) -> bool:
    return row["difference"] is not None and row["difference"] <= TOLERANCE


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Counts and the largest difference, by model and number of processes, and how many plans have each feature."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row['model']} {row['processes']}", []).append(row)
    return {
        **_outcome(rows),
        "by_launch": {
            name: _outcome(group) | {"different": len({row["plan"] + row["granularity"] for row in group})}
            for name, group in groups.items()
        },
        "features": dict(Counter(name for row in rows for name in row["features"])),
    }


def _outcome(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "plans": len(rows),
        "failed": sum(not _holds(row) for row in rows),
        "worst": max((row["difference"] for row in rows if row["difference"] is not None), default=None),
    }


def run_of(rows: Sequence[Row], *, command: str) -> dict[str, Any]:
    """With what the rows were made, over all the calls that made them: what differs among them, with commas between."""
    named = {
        key: ", ".join(dict.fromkeys(str(row.get(key, "not recorded")) for row in rows))
        for key in ("machine", "date", "commit")
    }
    seconds = {key: round(sum(row.get(key, 0.0) for row in rows), 1) for key in ("wall_s", "cpu_s")}
    recorded = sum("commit" in row for row in rows)
    return {"command": command, "recorded": recorded, **named, "load": rows[0].get("load") if rows else None, **seconds}


def plans_tables(document: dict[str, Any]) -> dict[str, str]:
    """Plans by launch and by feature."""
    counts = document["summary"]
    most = "none" if counts["worst"] is None else f"{counts['worst']:.1e}"
    launches = [
        (*name.split(), str(group["plans"]), str(group["failed"]), "" if group["worst"] is None else f"{group['worst']:.1e}")
        for name, group in counts["by_launch"].items()
    ]
    features = [(name, str(count)) for name, count in sorted(counts["features"].items(), key=lambda item: -item[1])]
    run = document["run"]
    lines = [
        f"{counts['plans']} plans were run, {counts['failed']} of them differ. The largest difference is {most}.",
        table(("model", "processes", "plans", "failed", "largest difference"), launches, words=1),
        table(("feature", "plans"), features, words=1),
        f"{run['steps']} steps, seed {run['seed']}, {run['date']}, torch {run['torch']}, gloo.",
    ]
    return {"plans_executed": "\n\n".join(lines)}


def mixed_claims(document: dict[str, Any]) -> list[Claim]:
    """Equality with one process."""
    return [
        of_every(
            f"Random mixed plans train the same weights as one process, to {TOLERANCE:g} over {MIXED_STEPS} steps",
            [row for row in document.get("rows", []) if row["steps"] >= MIXED_STEPS],
            lambda row: float(row["worst_difference"]) <= TOLERANCE,
            lambda row: f"{row['model']} on {row['processes']} ({row['worst_difference']})",
        )
    ]


def mixed_tables(document: dict[str, Any]) -> dict[str, str]:
    """The largest difference by model and number of processes."""
    worst = {(row["model"], row["processes"]): row["worst_difference"] for row in document["rows"]}
    models, counts = dict.fromkeys(model for model, _ in worst), sorted({count for _, count in worst})
    lines = [(model, *(worst[model, count] for count in counts)) for model in models]
    return {"mixed_plans": table(("model", *(f"{count} processes" for count in counts)), lines)}


def reference_claims(document: dict[str, Any]) -> list[Claim]:
    """Equal weights, and paired step ratios with their 95% intervals."""
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


def reference_finding(document: dict[str, Any]) -> str:
    """How many plans are equal, fast and light."""
    rows = document["rows"]
    equal = sum(row["difference"] <= TOLERANCE for row in rows)
    fast = sum(row["ratio"]["high"] < SLOWER for row in rows)
    light = sum(row["recording"]["high"] < RECORDING for row in rows)
    return (
        f"{equal} of {len(rows)} plans train the weights of the native modules to {TOLERANCE:g}. The 95% interval of the step "
        f"ratio lies below {SLOWER} in {fast}, and that of recording below {RECORDING} in {light}."
    )


def reference_tables(document: dict[str, Any]) -> dict[str, str]:
    """One plan per row, and how it was measured."""
    columns = (
        ("case", "{case}"),
        ("difference", "{difference:.0e}"),
        ("ours, ms", "{parsim_ms:.2f}"),
        ("native, ms", "{native_ms:.2f}"),
        (f"ratio (95%), wanted < {SLOWER}", lambda row: _interval(row["ratio"], SLOWER)),
        ("CPU (95%)", lambda row: _interval(row["cpu_ratio"]) if "cpu_ratio" in row else ""),
        (f"recording, wanted < {RECORDING}", lambda row: _interval(row["recording"], RECORDING)),
        ("A/A", lambda row: _interval(row["floor"])),
    )
    told = (
        f"{document['equal_steps']} float64 steps are compared; {document['rounds']} rounds of {document['steps']} are timed. "
        f"{document['machine']}, torch {document['torch']}, {document['date']}, load average {document['load']} "
        "(two ranks make 2 of it)."
    )
    return {"reference": f"{row_table(document['rows'], columns)}\n\n{told}"}


def _interval(ratio: dict[str, float], limit: float | None = None) -> str:
    shown = f"{ratio['median']:.3f} ({ratio['low']:.3f}–{ratio['high']:.3f})"
    return f"**{shown}**" if limit is not None and ratio["high"] >= limit else shown


JUDGES = {
    "plans_executed": Judge(claims=plans_claims, tables=plans_tables),
    "mixed_plans": Judge(claims=mixed_claims, tables=mixed_tables),
    "reference": Judge(claims=reference_claims, tables=reference_tables, finding=reference_finding),
}
