"""What became of disturbed trainings: the lines of a record, the table made of them, and the curve of every fault."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path


@dataclass
class Outcome:
    """What became of one disturbed training."""

    fault: str
    noticed_s: float = float("nan")
    resumed_s: float = float("nan")
    problems: list[str] = field(default_factory=list)
    step: int = 0
    """Of the checkpoint after which the fault came."""
    plan: str = "data parallel"
    losses: list[float] = field(default_factory=list)
    """Of all steps, once the training has ended."""


def add_outcome(record: Path, outcome: Outcome, undisturbed: Sequence[float], **told: int) -> None:
    """A line of the record, and the curve of its fault."""
    line = {**told, "date": f"{datetime.now(UTC):%Y-%m-%d}", "load": round(os.getloadavg()[0], 1), **asdict(outcome)}
    del line["losses"]
    with record.open("a") as file:
        file.write(json.dumps({key: None if value != value else value for key, value in line.items()}) + "\n")
    if outcome.losses and outcome.plan == Outcome.plan:
        path = record.with_name("curves.json")
        curves = json.loads(path.read_text()) if path.is_file() else {"disturbed": {}}
        curves["undisturbed"] = list(undisturbed)
        curves["disturbed"][outcome.fault] = {"step": outcome.step, "losses": outcome.losses}
        path.write_text(json.dumps(curves, indent=1) + "\n")


def recorded(path: Path) -> list[Outcome]:
    """All outcomes of a file of `--record`."""
    names = [entry.name for entry in fields(Outcome)]
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    return [
        Outcome(**{name: float("nan") if line[name] is None else line[name] for name in names if name in line})
        for line in lines
    ]


def table(found: Sequence[Outcome]) -> str:
    """Markdown: one row per fault, seconds as medians and worst."""
    lines = ["| fault | tried | lost | noticed after s (worst) | resumed after s (worst) |", "|---|---:|---:|---:|---:|"]
    for fault in sorted({outcome.fault for outcome in found}):
        own = [outcome for outcome in found if outcome.fault == fault]
        lost = sum(bool(outcome.problems) for outcome in own)
        noticed, resumed = ([getattr(outcome, name) for outcome in own] for name in ("noticed_s", "resumed_s"))
        lines.append(f"| {fault} | {len(own)} | {lost} | {_seconds(noticed)} | {_seconds(resumed)} |")
    return "\n".join(lines)


def _seconds(values: Sequence[float]) -> str:
    known = sorted(value for value in values if value == value)
    return f"{known[len(known) // 2]:.1f} ({known[-1]:.1f})" if known else "-"
