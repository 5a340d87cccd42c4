"""One rank of a launch: `python -m parsim.execute.worker JOB.json`, started by `launch` or torchrun.

Builds its part of every run of the job, then trains, or measures the runs in interleaved rounds, and leaves its records in
the job's output folder.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import torch

from parsim.errors import ExecutionError
from parsim.execute.cuda.faults import told_outside_steps
from parsim.execute.job import EXECUTION, Job
from parsim.execute.numerics import check_switches, described, set_switches, switches
from parsim.execute.processes import exchange as clocks
from parsim.execute.processes.exchange import meet
from parsim.execute.processes.group import ProcessPlace, close_group, init_group, read_place, worker_main
from parsim.execute.processes.heartbeat import Doing, pulse
from parsim.execute.processes.output import WARNING, sole_user, write_progress
from parsim.execute.processes.rendezvous import is_launched
from parsim.execute.processes.setup import Pinning, prepare_rank
from parsim.execute.processes.speed_probe import SpeedProbe
from parsim.execute.rank_run import ProcessGroups, RankRun, built
from parsim.execute.train import train
from parsim.files import write_text_atomically
from parsim.model.model import Model
from parsim.numeric import keep_what_is_there
from parsim.program.lower import lower
from parsim.program.placed import PlanIndex

WATCHED_S = 86_400.0
"""The timeout of collectives under a launcher that watches all ranks' heartbeats and ends them itself."""


def main(job_path: Path) -> None:
    """Run one rank of the job in that JSON file: join the group, build every run, train or measure, write the records. Raises
    ExecutionError: another training holds the folder of this one."""
    pulse().begin(Doing.PREPARING, "starting")
    warnings.showwarning = _tell_warning
    job = Job.load(job_path)
    started = read_place()
    with contextlib.ExitStack() as held:
        alone = job.mode == "train" and started.rank == 0 and not is_launched()
        if alone and not held.enter_context(sole_user(Path(job.output))):
            raise ExecutionError(f"another training runs in {job.output}; wait until it has ended, or end it")
        pinning = prepare_rank(started.local_rank, started.local_world_size, device=job.device)
        timeout_s = WATCHED_S if is_launched() else job.timeout_s
        place = init_group(job.device, timeout_s=timeout_s, alone=True)
        with told_outside_steps(place.rank, place.device, lambda: pulse().doing):
            _work(job, place, pinning, timeout_s)
        close_group(place)


def _work(job: Job, place: ProcessPlace, pinning: Pinning, timeout_s: float) -> None:
    plans = []
    for run in job.runs:
        layout = PlanIndex(run.plan, Model.load(Path(run.model_path)))
        plans.append((run, layout, lower(run.plan, layout.model)))
    groups = ProcessGroups(timeout_s)
    for run, layout, graph in plans:
        groups.make(graph, run.precision, layout)
    runs = [built(run, layout, graph, place, groups, steps=job.total_steps) for run, layout, graph in plans]
    set_switches(tf32=any(run.precision == "tf32" for run in job.runs))  # after modules of users, which may set them too
    set_at_start = switches()
    if place.rank == 0:
        write_text_atomically(Path(job.output) / EXECUTION, json.dumps(described(job, place.device), indent=1))
    before = clocks.look()
    if job.mode == "train":
        looks = pinning.first and job.device == "cpu"  # the probe of a GPU takes memory that the plan may need
        probe = SpeedProbe(torch.device(place.device)) if looks else None
        only = [run for run in runs if run is not None]
        runs.clear()  # once another plan takes over, nobody may keep the arrays of the run before
        runs = [train(job, only.pop(), place, groups, probe)]
    else:
        _measure(job, runs, place, looks=pinning.first)
    after = clocks.look()
    check_switches(set_at_start)
    for entry in runs:
        if entry is not None:
            record = entry.record
            if before.ahead_s or after.ahead_s:
                record = record.on_clock(clocks.on_rank_0(before, after))
            record.save(Path(job.output) / entry.run.name)
            entry.close()


def _tell_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Tell the launcher of a warning that is about the run; those of libraries about themselves stay on this rank's stderr."""
    if "site-packages" in Path(filename).parts or not issubclass(category, UserWarning | RuntimeWarning):
        print(warnings.formatwarning(message, category, filename, lineno, line), file=file or sys.stderr)
    else:
        write_progress({WARNING: str(message)})


def _measure(job: Job, runs: Sequence[RankRun | None], place: ProcessPlace, *, looks: bool) -> None:
    """Warm every run up, then measure rounds in which the runs take turns, so drift affects all equally. Before and after
    its steps, ranks that look measure the speed of their cores.
    """
    for entry in runs:
        if entry is not None:
            for _ in range(job.warmup_steps):
                entry.step(keep=False)
            entry.measure_memory()
    probe = SpeedProbe(torch.device(place.device)) if looks else None  # only now: what it takes of a GPU is no memory of a run
    keep_what_is_there()
    for number in range(job.rounds):
        for entry in runs:
            looks_here = probe if entry is not None else None
            meet()
            before_s = looks_here.seconds() if looks_here is not None else 0.0
            meet()
            if entry is not None:
                for _ in range(job.settle_steps):
                    entry.step(keep=False)
            meet()  # what one rank is ahead after settling belongs to no time
            if entry is not None:
                entry.timed(job.steps)
            meet()
            if looks_here is not None and entry is not None:
                entry.record.pace_s.append((before_s + looks_here.seconds()) / 2)
        if place.rank == 0:
            write_progress({"round": f"{number + 1}/{job.rounds}"})
    meet()
    for entry in runs:
        if entry is not None and job.keep_state:
            entry.save(Path(job.output) / entry.run.name / "checkpoints")


if __name__ == "__main__":
    worker_main(main)
