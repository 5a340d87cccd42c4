"""One rank of a launch: `python -m parsim.execute.worker JOB.json`, started by torchrun.

Builds its part of every run of the job, then trains, or measures the runs in interleaved rounds, and leaves its records in
the job's output folder.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parsim.data import BatchOrder, Samples
from parsim.data.for_model import dataset_for
from parsim.errors import ExecutionError
from parsim.execute.adaptive_run import Steering
from parsim.execute.cuda.faults import check_alone, checkpoint_text, is_lost_device, lost_device, out_of_memory
from parsim.execute.cuda.memory_counters import MemoryUse, counters_of
from parsim.execute.job import EXECUTION, Job, RunSpec
from parsim.execute.loading import Loader
from parsim.execute.numerics import described, numerics_of, set_switches
from parsim.execute.processes.group import ProcessPlace, Stream, close_group, init_group, make_groups, read_place, worker_main
from parsim.execute.processes.pinning import prepare_rank
from parsim.execute.processes.progress import write_progress
from parsim.execute.processes.speed_probe import SpeedProbe
from parsim.execute.records.measurement import RankRecord
from parsim.execute.records.memory_lines import StepWatch, watching
from parsim.execute.records.task_time import TaskTime
from parsim.execute.runtime import RankProgram, required_groups
from parsim.execute.score import score
from parsim.execute.stage import StageReplica
from parsim.execute.state import checkpoint
from parsim.execute.state.reshard import reshard
from parsim.execute.streams import make_streams
from parsim.files import write_text_atomically
from parsim.graph.lower import lower
from parsim.graph.plan_index import PlanIndex
from parsim.graph.taskgraph import TaskGraph
from parsim.model.component import LOSS
from parsim.model.model import Model
from parsim.model.number_formats import number_format
from parsim.plans.plan import Plan

RECORDED_STEPS = 64
"""Task times are kept of at most this many steps per run."""
SAY_EVERY_S = 1.0


class ProcessGroups:
    """The process groups of this launch, made as plans ask for them. Every rank asks for the same ones in the same order.

    Attributes: mine: those this rank belongs to, by stream.
    """

    def __init__(self) -> None:
        self.mine: dict[Stream, dist.ProcessGroup] = {}
        self._made: set[Stream] = set()

    def make(self, graph: TaskGraph, precision: str) -> None:
        """Make the groups that the graph needs in that precision and that do not exist yet."""
        needed = required_groups(graph)
        if number_format(precision).scales_loss:
            needed.append(agreement(graph.world_size))
        new = [stream for stream in needed if stream not in self._made]
        self._made.update(new)
        self.mine.update(make_groups(new))


def agreement(world_size: int) -> Stream:
    """The stream on which all ranks of a plan agree whether any gradient has overflowed.

    Args:
        world_size: ranks of the plan.
    """
    return "scale", tuple(range(world_size))


class RankRun:
    """One run of the job on this rank: its program, its data, and where it stands."""

    def __init__(
        self, run: RunSpec, layout: PlanIndex, graph: TaskGraph, place: ProcessPlace, groups: Mapping[Stream, dist.ProcessGroup]
    ) -> None:
        device = torch.device(place.device)
        numerics = numerics_of(run, device)
        self.run = run
        self.checkpoints: Path | None = None
        self.layout = layout
        self.stage = StageReplica(
            run.model,
            layout,
            place.rank,
            optimizer=run.optimizer,
            learning_rate=run.learning_rate,
            dtype=numerics.weights,
            seed=run.seed,
            device=device,
            numerics=numerics,
        )
        if numerics.loss_scale is not None:
            group = groups[agreement(run.plan.world_size)]
            self.stage.agree = lambda flag: dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        self.streams = make_streams(device)
        self.program = RankProgram(graph, self.stage, self.streams, groups)
        self.data = run_dataset(run, "train")
        self.loader = Loader(
            self.data,
            BatchOrder(n=len(self.data), global_batch=run.plan.global_batch, seed=run.seed),
            layout,
            place.rank,
            dtype=numerics.weights,
            device=device,
            pin=Tensor.pin_memory if self.streams.loads_ahead else None,
        )
        self.step_number = 0
        self.losses: list[float] = []
        self.recorded: list[list[TaskTime]] = []
        self.rounds: list[tuple[float, float, int]] = []
        self.cpu_s: list[float] = []
        self.pace_s: list[float] = []
        self.peak_bytes = 0
        self.memory_lines: dict[str, int] = {}
        self.memory: MemoryUse | None = None
        self.counters = counters_of(device)

    def switched(self, plan: Plan, place: ProcessPlace, groups: ProcessGroups) -> RankRun:
        """The same training under another plan: weights, optimizer state, buffers, random state, data order and records stay.

        Every rank calls it at the same step.
        """
        layout = PlanIndex(plan, self.layout.model)
        graph = lower(plan, layout.model)
        groups.make(graph, self.run.precision)
        random = checkpoint.rng_state(str(self.stage.device))
        after = RankRun(replace(self.run, plan=plan), layout, graph, place, groups.mine)
        reshard(self.stage, after.stage)
        checkpoint.restore_rng(random, str(self.stage.device))
        after.checkpoints = self.checkpoints
        after.step_number, after.losses, after.rounds, after.cpu_s = self.step_number, self.losses, self.rounds, self.cpu_s
        self.close()
        return after

    def close(self) -> None:
        """End what runs beside the rank's own thread."""
        self.loader.close()
        self.streams.close()

    def step(self, *, keep: bool) -> None:
        """One training step on the next global batch; `keep` its task times and its loss."""
        batch = self.loader.batch(self.step_number)
        following = self.loader.following(self.step_number + 1) if self.streams.loads_ahead else None
        try:
            loss, times = self.program.step(batch, following)
        except RuntimeError as error:
            raise self._explained(error) from error
        self.step_number += 1
        if keep:
            self.losses.append(loss / self.run.plan.global_batch if self.stage.loss_counts else float("nan"))
            if len(self.recorded) < RECORDED_STEPS:
                self.recorded.append(times)

    def _explained(self, error: RuntimeError) -> RuntimeError | ExecutionError:
        """What a GPU's failure means for the run; any other error as it is."""
        if not isinstance(error, torch.OutOfMemoryError) and not is_lost_device(error):
            return error
        found = None if self.checkpoints is None else checkpoint.latest_checkpoint(self.checkpoints)
        kept = checkpoint_text(None if found is None else found.step)
        rank, device = self.stage.rank, self.stage.device
        if not isinstance(error, torch.OutOfMemoryError):
            return lost_device(rank, str(device), self.step_number, error, kept)
        held = {line: sum(_bytes_of(tensors)) for line, tensors in self.stage.resident_tensors().items()}
        predicted = self.run.predicted_memory[rank] if self.run.predicted_memory else {}
        return out_of_memory(
            rank=rank,
            step=self.step_number,
            predicted=predicted,
            held=held,
            allocated_bytes=sum(held.values()) if self.counters is None else self.counters.allocated_bytes(),
            kept=kept,
        )

    def timed(self, steps: int) -> None:
        """`steps` steps as one round."""
        cpu, start = time.process_time(), time.perf_counter()
        for _ in range(steps):
            self.step(keep=True)
        self.rounds.append((start, time.perf_counter(), steps))
        self.cpu_s.append(time.process_time() - cpu)

    def measure_memory(self) -> None:
        """One step under the eyes of the live-bytes counter, and on a GPU one more under those of allocator and driver; their
        times are not kept."""
        with watching(self.stage) as watch:
            self.program.watch = watch
            self.step(keep=False)
            self.peak_bytes, self.memory_lines = watch.live.peak_bytes, watch.peak_lines()
        self.program.watch = StepWatch()
        self.memory = MemoryUse(live_bytes=self.peak_bytes)
        if self.counters is not None:
            self.counters.forget_peaks()
            self.step(keep=False)
            self.memory = replace(
                self.memory,
                allocated_bytes=self.counters.allocated_bytes(),
                reserved_bytes=self.counters.reserved_bytes(),
                driver_bytes=self.counters.driver_bytes(),
            )

    def state(self) -> checkpoint.RankState:
        """What this rank contributes to a checkpoint."""
        return replace(self.stage.state(), rng=checkpoint.rng_state(str(self.stage.device)))

    def resume(self, found: checkpoint.Checkpoint) -> None:
        """Go on from a checkpoint of any plan of the same model."""
        same = found.world_size == self.layout.plan.world_size
        names = [*self.stage.parameters, *self.stage.buffers()]
        saved = checkpoint.load_state(found, names, rank=self.stage.rank if same else None)
        self.stage.load(saved)
        checkpoint.restore_rng(saved.rng, str(self.stage.device))
        self.step_number = found.step

    def record(self) -> RankRecord:
        return RankRecord(
            rank=self.stage.rank,
            rounds=self.rounds,
            steps=self.recorded,
            losses=self.losses,
            cpu_s=self.cpu_s,
            peak_bytes=self.peak_bytes,
            pace_s=self.pace_s,
            memory_lines=self.memory_lines,
            memory=self.memory,
        )


def _bytes_of(tensors: Sequence[Tensor]) -> list[int]:
    """Of every storage once."""
    return list({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def run_dataset(run: RunSpec, split: str) -> Samples:
    """The run's data in the shape its model takes.

    Args:
        run: one run of the job. split: "train" or "test".
    """
    return dataset_for(run.model, run.dataset, root=run.data_root, split=split, seed=run.seed)


def main(job_path: Path) -> None:
    """Run one rank from start to end: join the group, build every run of the job, train or measure, write the records.

    Args:
        job_path: the JSON file of the job.
    """
    job = Job.load(job_path)
    started = read_place()
    pinning = prepare_rank(started.local_rank, started.local_world_size, device=job.device)
    place = init_group(job.device, timeout_s=job.timeout_s)
    if place.device.startswith("cuda"):
        free, total = torch.cuda.mem_get_info(torch.device(place.device))
        check_alone(place.rank, place.device, total - free)
    set_switches(tf32=any(run.precision == "tf32" for run in job.runs))
    if place.rank == 0:
        write_text_atomically(Path(job.output) / EXECUTION, json.dumps(described(job, place.device), indent=1))
    plans = []
    for run in job.runs:
        layout = PlanIndex(run.plan, Model.load(Path(run.model_path)))
        plans.append((run, layout, lower(run.plan, layout.model)))
    groups = ProcessGroups()
    for run, _, graph in plans:
        groups.make(graph, run.precision)
    runs = [
        RankRun(run, layout, graph, place, groups.mine) if place.rank < run.plan.world_size else None
        for run, layout, graph in plans
    ]
    if job.mode == "train":
        (only,) = runs
        assert only is not None, "a training job has as many ranks as its plan"
        runs = [_train(job, only, place, groups)]
    else:
        _measure(job, runs, place, SpeedProbe(torch.device(place.device)) if pinning.first else None)
    for entry in runs:
        if entry is not None:
            entry.record().save(Path(job.output) / entry.run.name)
            entry.close()
    close_group(place)


def _measure(job: Job, runs: Sequence[RankRun | None], place: ProcessPlace, probe: SpeedProbe | None) -> None:
    """Warm every run up, then measure rounds in which the runs take turns, so drift affects all equally. Before and after
    its steps, ranks with a `probe` measure the speed of their cores.
    """
    for entry in runs:
        if entry is not None:
            for _ in range(job.warmup_steps):
                entry.step(keep=False)
            entry.measure_memory()
    for number in range(job.rounds):
        for entry in runs:
            looks = probe if entry is not None else None
            dist.barrier()
            before_s = looks.seconds() if looks is not None else 0.0
            dist.barrier()
            if entry is not None:
                for _ in range(job.settle_steps):
                    entry.step(keep=False)
            dist.barrier()  # what one rank is ahead after settling belongs to no time
            if entry is not None:
                entry.timed(job.steps)
            dist.barrier()
            if looks is not None and entry is not None:
                entry.pace_s.append((before_s + looks.seconds()) / 2)
        if place.rank == 0:
            write_progress({"round": f"{number + 1}/{job.rounds}"})
    dist.barrier()
    for entry in runs:
        if entry is not None and job.keep_state:
            _save(Path(job.output) / entry.run.name / "checkpoints", entry)


def _train(job: Job, entry: RankRun, place: ProcessPlace, groups: ProcessGroups) -> RankRun:
    """Train to step `job.steps`, with checkpoints and switches of plan; then score the result on the test samples."""
    folder = Path(job.output) / "checkpoints"
    entry.checkpoints = folder
    if job.resume:
        found = checkpoint.latest_checkpoint(folder)
        if found is not None:
            entry.resume(found)
            if place.rank == 0:
                write_progress({"resumed": f"at step {found.step}"})
    said = time.monotonic()
    steering = Steering(job.adaptive, entry.run, job.steps) if job.adaptive is not None else None
    best = float("-inf")
    dist.barrier()  # rank 0 has read the profile meanwhile
    warm = 0
    while entry.step_number < job.steps:
        if warm < job.warmup_steps:
            entry.step(keep=True)
            entry.recorded.clear()
            warm += 1
        else:
            entry.timed(1)
        done = entry.step_number
        for switch in job.switches:
            if switch.step == done:
                entry = entry.switched(switch.plan, place, groups)
        if steering is not None and job.adaptive is not None and steering.due(done):
            entry = _steer(job, steering, entry, place, groups)
            if done % job.adaptive.epoch_steps == 0:
                best = _keep_if_better(job, entry, place, best)
        if done == job.steps or (job.checkpoint_every and done % job.checkpoint_every == 0):
            _save(folder, entry)
        speaker, share = _speaker(entry.layout)
        if place.rank == speaker and (time.monotonic() - said > SAY_EVERY_S or done == job.steps):
            said = time.monotonic()
            write_progress({"step": f"{done}/{job.steps}", "loss on its last samples": f"{entry.losses[-1] / share:.4f}"})
    dist.barrier()
    if place.rank == 0:
        last = checkpoint.latest_checkpoint(folder)
        assert last is not None, "the last step writes a checkpoint"
        result = score(entry.run, checkpoint.load_state(last), run_dataset(entry.run, "test"), entry.stage.device)
        (Path(job.output) / "score.json").write_text(json.dumps(result))
        write_progress(result)
        if steering is not None:
            decisions = [decision.to_dict() for decision in steering.decisions]
            (Path(job.output) / "decisions.json").write_text(json.dumps(decisions, indent=1))
    dist.barrier()
    entry.measure_memory()
    return entry


def _steer(job: Job, steering: Steering, entry: RankRun, place: ProcessPlace, groups: ProcessGroups) -> RankRun:
    """Show the controller the last window; change plan if it says so."""
    assert job.adaptive is not None
    rounds = entry.rounds[-job.adaptive.window_steps :]
    step_s = (rounds[-1][1] - rounds[0][0]) / len(rounds) if rounds else 0.0
    times = entry.recorded[-job.adaptive.window_steps :]
    plan = steering.decide(entry.run.plan, entry.layout.model, entry.step_number, times, step_s)
    entry.recorded.clear()
    if plan is None:
        return entry
    if place.rank == 0:
        write_progress({"step": entry.step_number, "new plan": plan.summary(), "because": steering.decisions[-1].reason})
    return entry.switched(plan, place, groups)


def _keep_if_better(job: Job, entry: RankRun, place: ProcessPlace, best: float) -> float:
    """At the end of an epoch: a checkpoint under `best/` if the model scores better than ever before."""
    folder = Path(job.output) / "best"
    _save(folder / "new", entry)
    dist.barrier()
    found: list[float] = [best]
    if place.rank == 0:
        last = checkpoint.latest_checkpoint(folder / "new")
        assert last is not None, "every rank has just written its part"
        result = score(entry.run, checkpoint.load_state(last), run_dataset(entry.run, "test"), entry.stage.device)
        reached = result.get("test_accuracy", -result["test_loss"])
        found = [max(best, reached)]
        if reached > best:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            (folder / "new").rename(folder / "checkpoints")
        shutil.rmtree(folder / "new", ignore_errors=True)
    dist.broadcast_object_list(found, src=0)
    return found[0]


def _save(folder: Path, entry: RankRun) -> None:
    stage = entry.stage
    checkpoint.save_checkpoint(
        folder,
        entry.step_number,
        entry.state(),
        seed=entry.run.seed,
        rank=stage.rank,
        world_size=stage.layout.plan.world_size,
    )


def _speaker(layout: PlanIndex) -> tuple[int, float]:
    """The last rank whose loss counts, and the share of the batch that it sees."""
    plan, placement = layout.plan, layout.placement[LOSS]
    mesh = plan.mesh
    shard = {"place": placement.shard, "replicate": 0}.get(placement.kind, mesh.tp - 1)
    share = placement.batch_ways(mesh.tp) / mesh.tp / mesh.dp
    return plan.stages[-1].ranks[(mesh.dp - 1) * mesh.tp + shard], share


if __name__ == "__main__":
    worker_main(main)
