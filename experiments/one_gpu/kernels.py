"""Kernels of one step of every model, by torch.profiler: what explains an error of a prediction once the machine is gone.

    python experiments/one_gpu/kernels.py --precision amp_bf16 --out FILE [--device cuda] [--quick]

A process of its own, since a profiler slows the launches of its process down from then on. FILE gets a JSON line per model as
soon as it is there: how many kernels ran, how long the device was busy, how long from the first to the last, and per name of a
kernel how often it ran and how long, as CSV.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from parsim.execute.processes.output import PARENT_VARIABLE, die_with_parent

NAMES_KEPT, NAME_LENGTH = 60, 120
WARM_STEPS = 3


class Ran(NamedTuple):
    """A kernel that ran."""

    name: str
    start_us: float
    end_us: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="small models: the rehearsal")
    parser.add_argument("--precision", required=True)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    from questions import ON_A_GPU, REHEARSED

    if PARENT_VARIABLE in os.environ:
        die_with_parent(int(os.environ[PARENT_VARIABLE]))
    scope = REHEARSED if asked.quick else ON_A_GPU
    for question in scope.steps_in(asked.precision):
        try:
            row = {"question": question.name, **profiled(question, asked.device)}
        except Exception as error:  # of the other models it may still be known
            row = {"question": question.name, "error": f"{type(error).__name__}: {error}"[:500]}
        with asked.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return 0


def profiled(question: Any, device: str) -> dict[str, Any]:
    """One step of the executor."""
    import torch
    from programs import ExecutorStep, let_go
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    kind = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    executor = ExecutorStep(question, where)
    try:
        for _ in range(WARM_STEPS):
            executor.step()
        with profile(activities=[activity]) as profiler:
            executor.step()
        events: Iterable[Any] = profiler.events() or ()
        ran = [
            Ran(event.name, event.time_range.start, event.time_range.end)
            for event in events
            if event.device_type == kind and not event.is_user_annotation  # which spans kernels
        ]
    finally:
        executor.streams.close()
        del executor
        let_go(where)
    return summary(ran)


def summary(ran: Iterable[Ran]) -> dict[str, Any]:
    """Of kernels that may overlap: busy is the time in which at least one runs."""
    ordered = sorted(ran, key=lambda kernel: kernel.start_us)
    by_name: dict[str, tuple[int, float]] = {}
    busy_us = end_us = 0.0
    for kernel in ordered:
        count, total_us = by_name.get(kernel.name, (0, 0.0))
        by_name[kernel.name] = count + 1, total_us + kernel.end_us - kernel.start_us
        busy_us += max(0.0, kernel.end_us - max(kernel.start_us, end_us))
        end_us = max(end_us, kernel.end_us)
    longest = sorted(by_name.items(), key=lambda entry: -entry[1][1])
    rest = [value for _, value in longest[NAMES_KEPT:]]
    rows = [(name, *value) for name, value in longest[:NAMES_KEPT]]
    if rest:
        rows.append((f"{len(rest)} other names", sum(count for count, _ in rest), sum(total_us for _, total_us in rest)))
    lines = [f"{count},{total_us:.1f},{_shortened(name)}" for name, count, total_us in rows]
    return {
        "kernels": len(ordered),
        "busy_s": 1e-6 * busy_us,
        "span_s": 1e-6 * (end_us - ordered[0].start_us) if ordered else 0.0,
        "csv": "\n".join(["count,microseconds,name", *lines]),
    }


def _shortened(name: str) -> str:
    """On one line, without the beginning that all names of templates share."""
    return " ".join(name.removeprefix("void ").split())[:NAME_LENGTH]


def in_a_process(precision: str, device: str, *, quick: bool, out: Path, timeout_s: float) -> dict[str, Any]:
    """The lines that a process of its own has written when it ends, or when it is ended.

    Returns: `steps`, one per model, and `ended`, why there are no more, "" if there are all.
    """
    out.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__)), "--precision", precision, "--device", device, "--out", str(out)]
    environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
    ended = ""
    try:
        done = subprocess.run(
            [*command, *(["--quick"] if quick else [])],
            env=environment,
            timeout=timeout_s,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode:
            ended = f"its process ended with {done.returncode}: {done.stderr.strip()[-500:]}"
    except subprocess.TimeoutExpired:
        ended = f"ended after {timeout_s:.0f} s"
    whole = out.read_text(encoding="utf-8").split("\n")[:-1] if out.is_file() else []  # without a line that was cut off
    return {"steps": [json.loads(line) for line in whole], "ended": ended}


if __name__ == "__main__":
    sys.exit(main())
