"""One rank of `run.py`, started by parsim's launcher: `python -m rank JOB.json`."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from experiments.executor.reference_cases import BATCH, BUCKET_MIB, CASES, Case
from parsim.execute.checkpoint import checkpoint
from parsim.execute.job import RunSpec
from parsim.execute.numerics import numerics_of
from parsim.execute.optimizer import make_optimizer
from parsim.execute.processes.exchange import meet
from parsim.execute.processes.group import close_group, init_group, read_place, worker_main
from parsim.execute.processes.heartbeat import Doing, pulse
from parsim.execute.processes.output import write_progress
from parsim.execute.processes.setup import prepare_rank
from parsim.execute.rank_run import ProcessGroups
from parsim.execute.runtime import RankProgram
from parsim.execute.stage import StageReplica, seeded_module
from parsim.execute.streams import TaskTime, ThreadStreams
from parsim.files import write_json_atomically
from parsim.model.build import example_batch, loss_of
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.objective import LOSSES
from parsim.program.lower import lower
from parsim.program.placed import PlanIndex

CPU = torch.device("cpu")
SEED, BATCHES, LEARNING_RATE = 0, 4, 1e-3
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class SwitchedStreams(ThreadStreams):
    """The executor's, which between two steps can be told to read no clock and to keep no `TaskTime`."""

    def record(self, on: bool) -> None:
        """From the next step on."""
        for name in ("_clock", "_note"):
            self.__dict__.pop(name, None)
        if not on:
            self.__dict__ |= {"_clock": repeat(0.0).__next__, "_note": self._note_nothing}

    def _note_nothing(self, task: int, stream: str, ready_s: float) -> None:
        self._end_s[task] = 0.0


class Batches:
    """The same few global batches for every program, cut as a rank reads them."""

    def __init__(self, case: Case, dtype: torch.dtype, rank: int) -> None:
        self.pipelined = case.backend == "pipelining"
        self.rank, self.microbatches = rank, case.microbatches
        self.whole: list[tuple[Tensor, Tensor]] = []
        for seed in range(BATCHES):
            given, target = example_batch(case.spec, BATCH, seed=seed, dtype=dtype)
            (inputs,) = given.values()
            assert target is not None, "models of the zoo have targets apart from their inputs"
            self.whole.append((inputs, target))

    def local(self, step: int) -> tuple[Tensor, Tensor]:
        """What this rank reads of a step: all of it under a pipeline, its replica's part else."""
        inputs, target = self.whole[step % BATCHES]
        if self.pipelined:
            return inputs, target
        size = BATCH // dist.get_world_size()
        part = slice(self.rank * size, (self.rank + 1) * size)
        return inputs[part], target[part]

    def source(self, step: int) -> Callable[[int], Mapping[str, Tensor]]:
        """The same, as the executor asks for it."""
        inputs, target = self.local(step)
        size = len(inputs) // self.microbatches

        def batch(number: int) -> Mapping[str, Tensor]:
            part = slice(number * size, (number + 1) * size)
            return {"input:0": inputs[part], "target": target[part]}

        return batch


class Executor:
    """The plan as parsim's executor interprets it. Attributes: streams: can be told not to record when tasks ran."""

    def __init__(self, case: Case, model: Model, batches: Batches, dtype: torch.dtype, rank: int) -> None:
        plan = case.plan(model)
        run = RunSpec(
            name="run",
            model=case.spec,
            model_path="",
            plan=plan,
            optimizer=case.optimizer,
            learning_rate=LEARNING_RATE,
            dataset="synthetic",
            dtype="float64" if dtype == torch.float64 else "float32",
        )
        numerics = numerics_of(run, CPU)
        layout = PlanIndex(plan, model)
        graph = lower(plan, layout.model)
        self.stage = StageReplica(
            case.spec,
            layout,
            rank,
            optimizer=case.optimizer,
            learning_rate=LEARNING_RATE,
            dtype=numerics.weights,
            seed=SEED,
            device=CPU,
            numerics=numerics,
        )
        groups = ProcessGroups(300.0)
        groups.make(graph, run.precision)
        self.streams = SwitchedStreams()
        self.program = RankProgram(graph, self.stage, self.streams, groups.mine)
        self.batches, self.number = batches, 0
        self.last: list[TaskTime] = []

    def step(self) -> None:
        _, self.last = self.program.step(self.batches.source(self.number))
        self.number += 1

    def weights(self, folder: Path) -> dict[str, Tensor]:
        """All weights, on every rank; through a checkpoint, which puts shards together. Every rank calls it."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        checkpoint.save_checkpoint(folder, self.number, self.stage.state(), seed=SEED, rank=rank, world_size=ranks)
        dist.barrier()
        found = checkpoint.latest_checkpoint(folder)
        assert found is not None, "it was just written"
        return dict(checkpoint.load_state(found).weights)

    def close(self) -> None:
        self.streams.close()


class Native:
    """DDP, FSDP2 or torch pipelining, as their documentation shows them."""

    def __init__(self, case: Case, model: Model, batches: Batches, dtype: torch.dtype, rank: int) -> None:
        self.case, self.batches, self.number = case, batches, 0
        self.kind, self.share = loss_of(case.spec), BATCH
        module = seeded_module(case.spec, SEED, dtype, CPU)
        self.module, self.advance = MAKE[case.backend](self, module, model, rank)
        self.parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.optimizer = make_optimizer(case.optimizer, self.parameters, LEARNING_RATE)

    def loss(self, output: Any, target: Tensor) -> Tensor:
        return LOSSES[self.kind].total(output, target) / self.share

    def step(self) -> None:
        inputs, target = self.batches.local(self.number)
        self.optimizer.zero_grad(set_to_none=True)
        self.advance(inputs, target)
        self.optimizer.step()
        self.number += 1

    def weights(self, folder: Path) -> dict[str, Tensor]:
        """All weights, on every rank. Every rank calls it."""
        del folder
        own = {name.removeprefix("module."): _whole(value) for name, value in self.module.named_parameters()}
        everyone: list[dict[str, Tensor] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        return {name: value for held in everyone if held is not None for name, value in held.items()}

    def close(self) -> None:
        """Nothing runs beside this thread."""


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()


Advance = Callable[[Tensor, Tensor], None]


def _data_parallel(native: Native, module: nn.Module) -> tuple[nn.Module, Advance]:
    native.share = BATCH // dist.get_world_size()  # these backends take the mean of gradients over ranks

    def advance(inputs: Tensor, target: Tensor) -> None:
        native.loss(module(inputs), target).backward()  # type: ignore[no-untyped-call]

    return module, advance


def _ddp(native: Native, module: nn.Module, model: Model, rank: int) -> tuple[nn.Module, Advance]:
    return _data_parallel(native, DistributedDataParallel(module, bucket_cap_mb=BUCKET_MIB))


def _fsdp2(native: Native, module: nn.Module, model: Model, rank: int) -> tuple[nn.Module, Advance]:
    modules = dict(module.named_modules())
    for component in model.components:
        if re.search(r"\.\d+$", component.name):  # a block of a list; embedding and head may share weights and go to the root
            fully_shard(modules[component.name])
    fully_shard(module)
    return _data_parallel(native, module)


def _pipelining(native: Native, module: nn.Module, model: Model, rank: int) -> tuple[nn.Module, Advance]:
    inputs, _ = native.batches.whole[0]
    case = native.case
    example = inputs[: BATCH // case.microbatches]
    pipe = pipeline(module, mb_args=(example,), split_spec={case.second: SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, CPU)
    schedule = SCHEDULES[case.order](stage, case.microbatches, loss_fn=native.loss, scale_grads=False)

    def advance(inputs: Tensor, target: Tensor) -> None:
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=target)

    return stage.submod, advance


MAKE: Mapping[str, Callable[[Native, nn.Module, Model, int], tuple[nn.Module, Advance]]] = {
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "pipelining": _pipelining,
}


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
