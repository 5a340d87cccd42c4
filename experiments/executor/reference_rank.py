"""One rank of `run.py`, started by parsim's launcher: `python -m rank JOB.json`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.executor.reference_cases import CASES, Case
from experiments.executor.reference_programs import CPU, SEED, Batches, Executor, Native
from parsim.execute.processes.exchange import meet
from parsim.execute.processes.group import close_group, init_group, read_place, worker_main
from parsim.execute.processes.heartbeat import Doing, pulse
from parsim.execute.processes.output import write_progress
from parsim.execute.processes.setup import prepare_rank
from parsim.execute.stage import seeded_module
from parsim.files import write_json_atomically
from parsim.model.load import load_model
from parsim.model.model import Model

SETTLE_STEPS = 2
PAIRS = 20
"""Of steps per round, one of which records."""
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """equal_steps: in float64, for the comparison of weights. rounds, steps: timed, in float32."""

    case: str
    equal_steps: int
    rounds: int
    steps: int


def main(path: Path) -> None:
    """Compare weights, then time the programs in turns."""
    job = Job(**json.loads(path.read_text()))
    (case,) = (entry for entry in CASES if entry.name == job.case)
    pulse().begin(Doing.PREPARING, "starting")
    started = read_place()
    prepare_rank(started.local_rank, started.local_world_size)
    place = init_group("cpu", timeout_s=TIMEOUT_S)
    model = load_model(case.spec, granularity="block")
    found: dict[str, Any] = {"difference": difference(case, model, job.equal_steps, path.parent, place.rank)}
    programs = programs_of(case, model, torch.float32, place.rank)
    for program in programs.values():
        for _ in range(SETTLE_STEPS):
            program.step()
    ours = programs["parsim"]
    assert isinstance(ours, Executor)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    cpu_s: dict[str, list[float]] = {name: [] for name in programs}
    steps_s: list[tuple[list[float], list[float]]] = []
    for number in range(job.rounds):
        pulse().begin(Doing.WORKING, "timing", number + 1)
        order = list(programs) if number % 2 == 0 else list(programs)[::-1]
        for name in order:
            wall, cpu = timed(programs[name], job.steps)
            seconds[name].append(wall)
            cpu_s[name].append(cpu)
        steps_s.append(switched(ours, PAIRS))
        if place.rank == 0:
            write_progress({"round": f"{number + 1}/{job.rounds}"})
    found |= {"seconds": seconds, "cpu_s": cpu_s, "switched": steps_s}
    write_json_atomically(path.parent / f"rank-{place.rank}.json", found)
    for program in programs.values():
        program.close()
    close_group(place)


def programs_of(case: Case, model: Model, dtype: torch.dtype, rank: int) -> Mapping[str, Executor | Native]:
    """parsim and the backend, which comes twice for the A/A floor."""
    batches = Batches(case, dtype, rank)
    return {
        "parsim": Executor(case, model, batches, dtype, rank),
        "native": Native(case, model, batches, dtype, rank),
        "native again": Native(case, model, batches, dtype, rank),
    }


def timed(program: Executor | Native, steps: int) -> tuple[float, float]:
    """Seconds per step of this rank, and its processor seconds, after steps that are not timed."""
    for _ in range(SETTLE_STEPS):
        program.step()
    meet()
    begun, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        program.step()
    return (time.perf_counter() - begun) / steps, (time.process_time() - cpu) / steps


def switched(program: Executor, pairs: int) -> tuple[list[float], list[float]]:
    """Seconds of single steps of one program that records in every other step: those that record, and those that do not.

    The two steps of a pair change places from pair to pair, so neither always comes behind the other.
    """
    for _ in range(SETTLE_STEPS):
        program.step()
    meet()
    found: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(pairs):
        for on in (True, False) if pair % 2 == 0 else (False, True):
            program.streams.record(on)
            begun = time.perf_counter()
            program.step()
            found[on].append(time.perf_counter() - begun)
    program.streams.record(True)
    return found[True], found[False]


def difference(case: Case, model: Model, steps: int, folder: Path, rank: int) -> float:
    """The largest difference of any weight after float64 steps, over the largest absolute weight of its array."""
    batches = Batches(case, torch.float64, rank)
    ours = Executor(case, model, batches, torch.float64, rank)
    theirs = Native(case, model, batches, torch.float64, rank)
    for _ in range(steps):
        ours.step()
        theirs.step()
    first = {
        name: value.detach().clone() for name, value in seeded_module(case.spec, SEED, torch.float64, CPU).named_parameters()
    }
    made, wanted = ours.weights(folder / "checkpoints"), theirs.weights(folder)
    dist.barrier()
    ours.close()
    assert set(made) == set(wanted), sorted(set(made) ^ set(wanted))
    assert all(_relative(made[name], first[name].detach()) > 0 for name in made), "every weight has moved"
    return max(_relative(made[name], wanted[name]) for name in made)


def _relative(made: Tensor, wanted: Tensor) -> float:
    return float((made - wanted).abs().max() / wanted.abs().max().clamp_min(1e-300))


if __name__ == "__main__":
    worker_main(main)
