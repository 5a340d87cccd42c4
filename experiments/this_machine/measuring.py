"""Real runs of cases, in interleaved rounds of one launch."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

from calibration.rounds.calibrate import Launcher
from experiments.this_machine.cases import GRANULARITY, Case
from parsim.execute.job import Job, RunSpec
from parsim.execute.measurement import Measurement, load_measurement
from parsim.execute.processes.output import relayed
from parsim.model.load import load_model
from parsim.program.lower import lower

TIMEOUT_S = 3600.0
STEPS, SETTLE_STEPS = 2, 1
"""Of every case in every round: two steps that count, after one in which the caches settle."""


def measure(
    folder: Path, cases: Sequence[Case], ranks: int, rounds: int, launcher: Launcher, *, seed: int
) -> list[tuple[Case, Measurement]]:
    """Every case in turn, round after round. The order of the cases is drawn anew for every seed."""
    folder.mkdir(parents=True, exist_ok=True)
    order = sorted(cases, key=lambda case: case.name)
    random.Random(seed).shuffle(order)
    models = {case.subject.name: load_model(case.subject.spec, granularity=GRANULARITY) for case in order}
    for name, model in models.items():
        model.save(folder / f"{name}.json")
    runs = tuple(run_of(case, folder) for case in order)
    job = Job(output=str(folder.resolve()), mode="measure", runs=runs, steps=STEPS, rounds=rounds, settle_steps=SETTLE_STEPS)
    job.save(folder / "job.json")
    launcher(folder / "job.json", ranks, timeout_s=TIMEOUT_S, on_line=relayed(progress))
    return [(case, load_measurement(folder / case.name, lower(case.plan, models[case.subject.name]))) for case in order]


def run_of(case: Case, folder: Path) -> RunSpec:
    return RunSpec(
        name=case.name,
        model=case.subject.spec,
        model_path=str(folder / f"{case.subject.name}.json"),
        plan=case.plan,
        optimizer=case.subject.optimizer,
        learning_rate=1e-4,
        dataset=case.subject.dataset,
    )


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
