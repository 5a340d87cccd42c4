"""One rank of a launch: `python -m parsim.execute.worker JOB.json`, started by torchrun.

Builds its part of every run of the job, then trains, or measures the runs in interleaved rounds, and leaves its records in
the job's output folder.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parsim.data import BatchOrder, Dataset, load_dataset, part
from parsim.execute.checkpoint import RankState, latest_checkpoint, load_checkpoint, save_checkpoint
from parsim.execute.evaluate import accuracy_of
from parsim.execute.group import Place, close_group, init_group, make_groups, worker_main
from parsim.execute.job import Job, RunSpec
from parsim.execute.live_memory import LiveBytes
from parsim.execute.measurement import RankRecord
from parsim.execute.pinning import prepare_rank
from parsim.execute.runtime import RankProgram, required_groups
from parsim.execute.stage import StageReplica
from parsim.execute.streams import CudaStreams, Streams, TaskTime, ThreadStreams
from parsim.graph.layout import Layout
from parsim.graph.lower import lower
from parsim.graph.taskgraph import TaskGraph
from parsim.model.model import Model

DTYPES = {"float32": torch.float32, "float64": torch.float64}
RECORDED_STEPS = 64
"""Task times are kept of at most this many steps per run."""


class RankRun:
    """One run of the job on this rank: its program, its data, and where it stands."""

    def __init__(self, run: RunSpec, layout: Layout, graph: TaskGraph, place: Place, groups: _Groups) -> None:
        device = torch.device(place.device)
        self.run = run
        self.layout = layout
        self.stage = StageReplica(
            run.model,
            layout,
            place.rank,
            optimizer=run.optimizer,
            learning_rate=run.learning_rate,
            dtype=DTYPES[run.dtype],
            seed=run.seed,
            device=device,
        )
        self.streams: Streams = CudaStreams(device) if device.type == "cuda" else ThreadStreams()
        self.program = RankProgram(graph, self.stage, self.streams, groups)
        self.data = run_dataset(run, "train")
        self.order = BatchOrder(len(self.data), run.plan.global_batch, run.seed)
        self.step_number = 0
        self.losses: list[float] = []
        self.recorded: list[list[TaskTime]] = []
        self.rounds: list[tuple[float, float, int]] = []
        self.cpu_s: list[float] = []
        self.peak_bytes = 0

    def step(self, *, keep: bool) -> None:
        """One training step on the next global batch; `keep` its task times and its loss."""
        indices = self.order.indices(self.step_number)
        plan, replica = self.layout.plan, self.layout.plan.replica_of_rank(self.stage.rank)
        wanted = self.layout.batch_values[self.stage.number]

        def batch(microbatch: int) -> Mapping[str, Tensor]:
            own = part(indices, replica, plan.mesh.dp, microbatch, plan.microbatches)
            return batch_values(self.data, own, wanted, DTYPES[self.run.dtype], self.stage.device)

        loss, times = self.program.step(batch)
        self.step_number += 1
        if keep:
            has_loss = self.stage.number == plan.mesh.pp - 1
            self.losses.append(loss / plan.global_batch if has_loss else float("nan"))
            if len(self.recorded) < RECORDED_STEPS:
                self.recorded.append(times)

    def timed(self, steps: int) -> None:
        """`steps` steps as one round."""
        cpu, start = time.process_time(), time.perf_counter()
        for _ in range(steps):
            self.step(keep=True)
        self.rounds.append((start, time.perf_counter(), steps))
        self.cpu_s.append(time.process_time() - cpu)

    def measure_memory(self) -> None:
        """One step under the eyes of the live-bytes counter; its time is not kept."""
        if self.stage.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.stage.device)
            self.step(keep=False)
            self.peak_bytes = int(torch.cuda.max_memory_allocated(self.stage.device))
            return
        with LiveBytes() as live:
            for tensor in self.stage.resident_tensors():
                live.track(tensor)
            self.program.on_receive = live.track
            self.step(keep=False)
            self.peak_bytes = live.peak_bytes
        self.program.on_receive = lambda _: None

    def record(self) -> RankRecord:
        return RankRecord(
            rank=self.stage.rank,
            rounds=self.rounds,
            steps=self.recorded,
            losses=self.losses,
            cpu_s=self.cpu_s,
            peak_bytes=self.peak_bytes,
        )


_Groups = Mapping[tuple[str, tuple[int, ...]], dist.ProcessGroup]


def run_dataset(run: RunSpec, split: str) -> Dataset:
    """The run's data in the shape its model takes."""
    return load_dataset(run.dataset, run.model.sample_shape, target=run.model.target, root=run.data_root, split=split)


def batch_values(
    data: Dataset, indices: object, wanted: Sequence[str], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """The values a stage reads of one microbatch: "input:0" and "target", as far as wanted."""
    inputs, targets = data.batch(indices)
    values = {"input:0": torch.from_numpy(inputs), "target": torch.from_numpy(targets)}
    if values["input:0"].is_floating_point():
        values["input:0"] = values["input:0"].to(dtype)
    return {name: values[name].to(device, non_blocking=True) for name in wanted}


def main(job_path: Path) -> None:
    """The whole life of a rank."""
    job = Job.load(job_path)
    place = read_and_join(job)
    plans = []
    for run in job.runs:
        layout = Layout(run.plan, Model.load(Path(run.model_path)))
        plans.append((run, layout, lower(run.plan, layout.model)))
    needed = list(dict.fromkeys(entry for _, _, graph in plans for entry in required_groups(graph)))
    groups = make_groups(needed)
    own: list[RankRun | None] = [
        RankRun(run, layout, graph, place, groups) if place.rank < run.plan.world_size else None for run, layout, graph in plans
    ]
    if job.mode == "train":
        _train(job, own[0], place)
    else:
        _measure(job, own, place)
    for entry in own:
        if entry is not None:
            entry.record().save(Path(job.output) / entry.run.name)
            entry.streams.close()
    close_group()


def _measure(job: Job, runs: Sequence[RankRun | None], place: Place) -> None:
    """Warm every run up, then rounds in which every run in turn does its steps, so that drift meets all alike."""
    for entry in runs:
        if entry is not None:
            for _ in range(job.warmup_steps):
                entry.step(keep=False)
            entry.measure_memory()
    for number in range(job.rounds):
        for entry in runs:
            dist.barrier()
            if entry is not None:
                entry.timed(job.steps)
        dist.barrier()
        if place.rank == 0:
            _say({"round": number + 1, "rounds": job.rounds})


def _say(event: Mapping[str, object]) -> None:
    """One line of progress for the parent."""
    print("parsim-progress " + json.dumps(event), flush=True)


if __name__ == "__main__":
    worker_main(lambda: main(Path(sys.argv[1])), Path(sys.argv[1]))
