"""All plans of one model on a few gloo ranks, one after another in the same processes; what each ended with lies in files.

The ranks are forked, so nothing is imported or traced twice, and run the same `RankRun` as a launch of `parsim run` does. A
plan that fails, or is not done in time, ends the processes; the plans behind it get new ones. Left out of a launch: the
launcher, pinning and priorities, which change no number.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import traceback
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch
import torch.distributed as dist

from parsim.execute.job import RunSpec
from parsim.execute.processes.group import ProcessPlace
from parsim.execute.processes.output import die_with_parent
from parsim.execute.rank_run import ProcessGroups, RankRun
from parsim.execute.stage import recorded_programs
from parsim.files import write_text_atomically
from parsim.model.model import Model
from parsim.program.lower import lower
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import TaskGraph


def run_plans(runs: Sequence[RunSpec], processes: int, folder: Path, *, steps: int, timeout_s: float) -> dict[str, str]:
    """Train under every plan. Returns what went wrong, by name of the run; none is missing without a reason.

    Args:
        runs: each with a name of its own, under which its checkpoint and losses are left in `folder`.
        processes: that are started; plans of fewer ranks leave the last ones idle.
        steps: of every plan. timeout_s: seconds a plan may take before its processes are ended.
    """
    failed: dict[str, str] = {}
    left = [_prepared(run) for run in runs]
    while left:
        begun, reason = _launched(left, processes, folder, steps, timeout_s)
        if not reason:
            break
        failed[left[begun][0].name] = reason
        left = left[begun + 1 :]
    return failed


def losses_of(folder: Path, run: RunSpec) -> list[float]:
    """Mean loss of every step, added up over the ranks that count it."""
    each = [json.loads((folder / run.name / f"losses-{rank}.json").read_text()) for rank in range(run.plan.world_size)]
    return [sum(value for value in values if value is not None) for values in zip(*each, strict=True)]


Program = tuple[RunSpec, PlanIndex, TaskGraph]


def _prepared(run: RunSpec) -> Program:
    """The program of a plan, and its components recorded: the ranks find both where they were forked from."""
    layout = PlanIndex(run.plan, Model.load(Path(run.model_path)))
    sizes = [run.plan.microbatch_samples, *(layout.local_samples(component.name) for component in layout.model.components)]
    for samples in dict.fromkeys(sizes):
        recorded_programs(run.model, samples, layout.model.granularity, torch.float64, "cpu", None)
    return run, layout, lower(run.plan, layout.model)


def _launched(runs: Sequence[Program], processes: int, folder: Path, steps: int, timeout_s: float) -> tuple[int, str]:
    """The number of the plan at which the processes were, and why they ended before their time; "" where they did not."""
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        notes = Path(name)
        ranks = [
            context.Process(target=_rank, args=(rank, os.getpid(), processes, notes, list(runs), folder, steps, timeout_s))
            for rank in range(processes)
        ]
        try:
            for process in ranks:
                process.start()
            return _watched(ranks, notes, timeout_s)
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()


def _watched(ranks: Sequence[ForkProcess], notes: Path, timeout_s: float) -> tuple[int, str]:
    """Until all have ended, one has failed, or a plan takes too long."""
    running, began, begun = list(ranks), time.monotonic(), -1
    while running:
        wait([process.sentinel for process in running], timeout=1.0)
        note = notes / "begun"
        now = int(note.read_text()) if note.is_file() else 0
        if now != begun:
            begun, began = now, time.monotonic()
        for rank, process in enumerate(ranks):
            if process.exitcode:
                told = [path.read_text() for path in sorted(notes.glob("error-*"), key=lambda path: path.stat().st_mtime)]
                return begun, told[0] if told else f"rank {rank} ended with {process.exitcode}"
        if time.monotonic() - began > timeout_s:
            return begun, f"not done within {timeout_s:.0f} s"
        running = [process for process in running if process.exitcode is None]
    return begun, ""


def _rank(
    rank: int, parent: int, processes: int, notes: Path, runs: Sequence[Program], folder: Path, steps: int, timeout_s: float
) -> None:
    die_with_parent(parent)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    try:
        store = dist.FileStore(str(notes / "store"), processes)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
        groups = ProcessGroups(timeout_s=2 * timeout_s)
        place = ProcessPlace(rank=rank, world_size=processes, local_rank=rank, local_world_size=processes, attempt=0)
        for number, (run, layout, graph) in enumerate(runs):
            if rank == 0:
                write_text_atomically(notes / "begun", str(number))
            groups.make(graph, run.precision, layout)
            if rank < run.plan.world_size:
                entry = RankRun(run, layout, graph, place, groups.mine, steps=steps)
                for _ in range(steps):
                    entry.step(keep=True)
                entry.save(folder / run.name / "checkpoints")
                write_text_atomically(folder / run.name / f"losses-{rank}.json", json.dumps(entry.record.losses))
                entry.close()
            dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        write_text_atomically(notes / f"error-{rank}", traceback.format_exc())
        os._exit(1)  # other threads of this rank may wait for ranks that are gone
    os._exit(0)
