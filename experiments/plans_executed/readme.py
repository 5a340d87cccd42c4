"""The tables of the README, made from results.json: `python experiments/plans_executed/readme.py` checks, `--write` writes."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.markdown import table
from parsim.files import write_text_atomically

FOLDER = Path(__file__).parent
RESULTS, README = FOLDER / "results.json", FOLDER / "README.md"
BEGIN, END = "<!-- begin tables -->", "<!-- end tables -->"
TOLERANCE = 1e-10


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts and the largest difference, by model and number of processes, and how many plans have each feature.

    Args:
        rows: of results.json.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(f"{row['model']} {row['processes']}", []).append(row)
    return {
        "plans": len(rows),
        "failed": sum(not _holds(row) for row in rows),
        "worst": max((row["difference"] for row in rows if row["difference"] is not None), default=None),
        "by_launch": {
            name: {
                "plans": len(some),
                "different": len({row["plan"] + row["granularity"] for row in some}),
                "failed": sum(not _holds(row) for row in some),
                "worst": max((row["difference"] for row in some if row["difference"] is not None), default=None),
            }
            for name, some in groups.items()
        },
        "features": dict(Counter(name for row in rows for name in row["features"])),
    }


def run_of(rows: Sequence[dict[str, Any]], *, command: str) -> dict[str, Any]:
    """With what the rows were made, over all the calls that made them: what differs among them, with commas between.

    Args:
        rows: of results.json, each with what its launch recorded. command: of the last call, which wrote them.
    """
    named = {
        key: ", ".join(dict.fromkeys(str(row.get(key, "not recorded")) for row in rows))
        for key in ("machine", "date", "commit")
    }
    seconds = {key: round(sum(row.get(key, 0.0) for row in rows), 1) for key in ("wall_s", "cpu_s")}
    recorded = sum("commit" in row for row in rows)
    return {"command": command, "recorded": recorded, **named, "load": rows[0].get("load") if rows else None, **seconds}


def _holds(row: dict[str, Any]) -> bool:
    return row["difference"] is not None and row["difference"] <= TOLERANCE


def tables(document: dict[str, Any]) -> str:
    """Both tables as Markdown.

    Args:
        document: results.json.
    """
    found = document["summary"]
    most = "none" if found["worst"] is None else f"{found['worst']:.1e}"
    lines = [f"{found['plans']} plans were run, {found['failed']} of them differ. The largest difference is {most}.", ""]
    launches = [
        (*name.split(), str(entry["plans"]), str(entry["failed"]), "" if entry["worst"] is None else f"{entry['worst']:.1e}")
        for name, entry in found["by_launch"].items()
    ]
    features = [(name, str(count)) for name, count in sorted(found["features"].items(), key=lambda item: -item[1])]
    lines += [table(("model", "processes", "plans", "failed", "largest difference"), launches, words=1), ""]
    lines += [table(("feature", "plans"), features, words=1)]
    run = document["run"]
    lines += ["", f"{run['steps']} steps, seed {run['seed']}, {run['date']}, torch {run['torch']}, gloo."]
    return "\n".join(lines)


def write_readme(*, check: bool = False) -> None:
    """Put the tables of results.json into the README.

    Args:
        check: change nothing.

    Raises:
        SystemExit: with `check`, where the README has others.
    """
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    made = f"{before}{BEGIN}\n{tables(json.loads(RESULTS.read_text()))}\n{END}{after}"
    if check and made != text:
        raise SystemExit("the README has other tables than results.json gives; run readme.py --write")
    if not check:
        write_text_atomically(README, made)


if __name__ == "__main__":
    write_readme(check="--write" not in sys.argv)
