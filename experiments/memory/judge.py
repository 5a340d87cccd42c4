"""Claims and tables of predicted peak memory, from results.json. Needs the standard library alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.common.claims import Claim, Judge, claim, of_every
from experiments.common.markdown import row_table, table

LINES: Mapping[str, tuple[str, ...]] = {
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer state": ("optimizer_state",),
    "buffers": ("buffers",),
    "activations and boundary values": ("activations", "boundary_values", "casts"),
    "receive buffers": ("receive_buffers",),
    "inputs not yet read": ("inputs",),
    "workspace": ("workspace", "unsharded"),
}
"""By the name in the table. One value can be saved by its maker and kept by its reader: of storages these are not two."""


def by_line(lines: Mapping[str, int]) -> list[int]:
    """Bytes of lines of tensors, in the order of `LINES`. Raises KeyError for a line that belongs to none."""
    place = {line: number for number, lines_of in enumerate(LINES.values()) for line in lines_of}
    found = [0] * len(LINES)
    for line, size in lines.items():
        found[place[line]] += size
    return found


Row = Mapping[str, Any]
AIM_MEAN, AIM_WORST = 0.5, 3.0
"""Percent of a peak."""
EXACT = 1e-3
"""Of a peak: less than that is not judged. An optimizer's counters of steps, 4 bytes an array, are on one side only."""
SMALLEST_BYTES = 2**20
"""A rank that holds less is not judged in percent: a loss alone on a rank is 900 bytes, and a label 100 of them."""


def claims(document: dict[str, Any]) -> list[Claim]:
    """The promises of the design."""
    rows = document.get("rows", [])
    errors = [abs(row["fullest_percent"]) for row in rows]
    return [
        claim(
            f"The mean error of a plan's fullest rank is at most {AIM_MEAN}%",
            None if not errors else statistics.mean(errors) <= AIM_MEAN,
            f"{statistics.mean(errors):.2f}% of {len(errors)} plans" if errors else "",
        ),
        of_every(
            f"No fullest rank is further off than {AIM_WORST:.0f}%",
            rows,
            lambda row: abs(row["fullest_percent"]) <= AIM_WORST,
            lambda row: f"{row['model']} {row['fullest_percent']:+.1f}%",
        ),
    ]


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Of some cases: how many, their errors in percent, and how often the stated interval of a rank holds its peak."""
    errors = [abs(row["error_percent"]) for row in rows]
    fullest = [abs(row["fullest_percent"]) for row in rows]
    ranks = [rank for row in rows for rank in row["ranks"] if rank[3] >= SMALLEST_BYTES]
    held = sum(low - EXACT * measured <= measured <= high + EXACT * measured for low, _, high, measured in ranks)
    below = sum(measured <= high + EXACT * measured for _, _, high, measured in ranks)
    return {
        "cases": len(rows),
        "ranks": len(ranks),
        "mean_percent": statistics.mean(errors) if errors else 0.0,
        "worst_percent": max(errors, default=0.0),
        "outside": sum(error > AIM_WORST for error in errors),
        "fullest_mean_percent": statistics.mean(fullest) if fullest else 0.0,
        "fullest_worst_percent": max(fullest, default=0.0),
        "fullest_outside": sum(error > AIM_WORST for error in fullest),
        "held_percent": 100 * held / len(ranks) if ranks else 0.0,
        "below_percent": 100 * below / len(ranks) if ranks else 0.0,
    }


def grouped(rows: Sequence[Row], title: str, key: Callable[[Row], str]) -> str:
    """A table of errors by what `key` says of a case, the last line for all of them."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    spread = ("lowest", "highest")
    head = (title, "cases", "fullest rank: mean", *spread, "any rank: mean", *spread, f"outside {AIM_WORST:.0f}%")
    lines = []
    for name, own in [*sorted(found.items()), ("all", list(rows))]:
        cells = [cell for key in ("fullest_percent", "error_percent") for cell in _errors([row[key] for row in own])]
        outside = sum(abs(row["error_percent"]) > AIM_WORST for row in own)
        lines.append((name, str(len(own)), *cells, str(outside)))
    return table(head, lines, words=1)


def _errors(errors: Sequence[float]) -> tuple[str, str, str]:
    return f"{statistics.mean(map(abs, errors)):.2f}%", f"{min(errors):+.2f}%", f"{max(errors):+.2f}%"


def by_line_table(rows: Sequence[Row]) -> str:
    """Over all cases of plans: the share of every line in the measured peaks, and its error in percent of the peak."""
    lines = []
    counted = [row for row in rows if "measured_lines" in row]
    for number, name in enumerate(LINES):
        peaks = [sum(row["measured_lines"]) for row in counted]
        shares = [100 * row["measured_lines"][number] / peak for row, peak in zip(counted, peaks, strict=True)]
        errors = [
            100 * (row["predicted_lines"][number] - row["measured_lines"][number]) / peak
            for row, peak in zip(counted, peaks, strict=True)
        ]
        mean = statistics.mean(map(abs, errors))
        lines.append((name, f"{statistics.mean(shares):.1f}%", f"{mean:.2f}%", f"{min(errors):+.2f}%", f"{max(errors):+.2f}%"))
    return table(("line", "share of the peak", "mean error", "lowest", "highest"), lines, words=1)


def furthest(rows: Sequence[Row], count: int = 8) -> str:
    """The cases that are furthest off."""
    columns = (("error", "{error_percent:+.2f}%"), ("model", "{model}"), ("plan", lambda row: row["plan"].replace("|", " ")))
    return row_table(sorted(rows, key=lambda row: -abs(row["error_percent"]))[:count], columns)


def tables(document: dict[str, Any]) -> dict[str, str]:
    """Errors by kind of plan, by model and by line, and the furthest off."""
    rows, run = document["rows"], document["run"]
    found = summary(rows)
    text = "\n".join(
        [
            f"{found['cases']} cases. Of the fullest rank of a plan, which decides whether it fits, the mean error is "
            f"{found['fullest_mean_percent']:.2f}% and the worst {found['fullest_worst_percent']:.1f}% (aim {AIM_MEAN}% and "
            f"{AIM_WORST:.0f}%); {found['fullest_outside']} lie outside {AIM_WORST:.0f}%. Of the worst rank of a plan the mean "
            f"is {found['mean_percent']:.2f}%, and {found['outside']} lie outside. torch {run['torch']}, {run['date']}, CPU, "
            "other work beside.",
            "",
            f"Coverage of the stated intervals, up to 0.1% of a peak: {found['held_percent']:.1f}% of {found['ranks']} ranks "
            f"have their peak within p05 to p95. {found['below_percent']:.1f}% have it at or below p95, as safe plans do.",
            "",
            grouped(rows, "plans", lambda row: row["kind"]),
            "",
            grouped(rows, "model", lambda row: row["model"] + (" (looked at while building)" if row["tuned"] else "")),
            "",
            "Furthest off:",
            "",
            furthest(rows),
            "",
            "By line, in percent of the measured peak, over all cases of plans (`parsim/program/lifetimes.py` says what a",
            "line means on both sides):",
            "",
            by_line_table(rows),
        ]
    )
    return {"memory": text}


JUDGES = {"memory": Judge(claims=claims, tables=tables)}
