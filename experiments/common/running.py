"""Run one experiment as a process of its own, and put beside its results what they were run with."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from parsim.execute.processes.machine import describe_environment, machine_line

ROOT = Path(__file__).resolve().parents[2]
PROGRESS = "parsim-progress "
"""Lines of ranks that an experiment started itself, on its stdout."""
VERSIONS = ("python", "torch", "numpy")
PROGRESS_LOG = "progress.log"


def part_parser(doc: str | None, quick: str, *, out: str = "", parts: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The options that every part has: `--quick` (what the small version is) and `--json`; `--out` for a part that keeps files;
    `--parts A,B` of those there are, by default all."""

    def names(text: str) -> list[str]:
        if unknown := sorted(set(text.split(",")) - set(parts)):
            raise argparse.ArgumentTypeError(f"unknown parts {', '.join(unknown)}; known: {', '.join(parts)}")
        return text.split(",")

    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{quick}: a check that all runs, not a result")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    if out:
        parser.add_argument("--out", type=Path, default=Path(out), help="folder of what the part keeps")
    if parts:
        parser.add_argument("--parts", type=names, default=list(parts), help=f"of {', '.join(parts)}")
    return parser


def show(document: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the results of a part: as JSON, or every list of rows as a table, and every other value on a line."""
    if as_json:
        print(json.dumps(document))
        return
    for name, value in document.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            print(f"\n{name}", *value[0], sep="\t")
            for row in value:
                print(*(f"{cell:.4g}" if isinstance(cell, float) else cell for cell in row.values()), sep="\t")
        else:
            print(f"{name}: {value}")


class ExperimentError(Exception):
    """An experiment that did not end with results."""


def documented(
    script: str, arguments: Sequence[str], *, quick: bool, out: Path, limit_s: float | None = None
) -> dict[str, Any]:
    """Run `python -m SCRIPT`, which gets --json and --out, and read the JSON that it prints; a document that is a list stands
    under `rows`.

    Beside it stands `run` (command, machine, versions, date, commit, load, quick, wall_s, cpu_s). What it prints on stderr goes
    to `out`/progress.log as it comes, so a run of half an hour can be watched. Raises ExperimentError: it failed, took too
    long, or printed no JSON.
    """
    command = [sys.executable, "-m", script, *arguments, "--json", *_out(script, out)]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    load, began_at = os.getloadavg()[0], commit()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    out.mkdir(parents=True, exist_ok=True)
    log = out / PROGRESS_LOG
    try:
        with log.open("w", encoding="utf-8") as told:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=told, text=True, timeout=limit_s, check=False
            )
    except subprocess.TimeoutExpired:
        raise ExperimentError(f"{script} was stopped after {limit_s:g} s; give it more, or leave it out") from None
    if done.returncode:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise ExperimentError(f"{script} ended with status {done.returncode}: {last[0]}; more in {log}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    printed = "".join(line for line in done.stdout.splitlines(keepends=True) if not line.startswith(PROGRESS))
    try:
        found = json.loads(printed)
    except json.JSONDecodeError:
        raise ExperimentError(f"{script} printed no JSON document, but {printed[:80]!r}") from None
    described = describe_environment()
    run = {
        "command": " ".join(["python", "-m", script, *arguments]),
        "machine": machine_line(described),
        "versions": {key: described["versions"][key] for key in VERSIONS if key in described["versions"]},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": began_at,
        "load": round(load, 1),
        "quick": quick,
        "wall_s": round(time.perf_counter() - began, 1),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
    }
    own = found if isinstance(found, dict) else {"rows": found}
    return {"run": run, **own} | {"run": own.get("run", {}) | run}


def _out(script: str, out: Path) -> tuple[str, ...]:
    """--out DIR where the script has it."""
    source = (ROOT / script.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
    return ("--out", str(out)) if '"--out", type=Path, default' in source or 'out="runs/' in source else ()


def commit() -> str:
    """The commit of the working tree, with a + where parsim or the experiments' code differ from it; "" outside git."""
    try:
        head = _git("rev-parse", "--short=7", "HEAD")
        changed = _git("status", "--porcelain", "--", "parsim", "calibration", "experiments/*.py", "experiments/*/*.py")
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + ("+" if changed else "")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
