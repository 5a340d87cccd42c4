"""One rank of `run.py`, started by parsim's launcher: `python -m rank JOB.json`.

All runs of the job train in one launch and take turns, so drift of the machine affects all alike, and processes start once. A
run ends its last turn when the mean weights of its replicas score the target. Ranks keep copies of their weights every
`SCORED_EVERY` steps and score them behind the turn, so nothing but training is between the times of a turn.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parsim.execute.checkpoint.checkpoint import RankState
from parsim.execute.evaluation import score
from parsim.execute.job import Job
from parsim.execute.processes.exchange import gather_values, meet, value_of_rank_0
from parsim.execute.processes.group import close_group, init_group, read_place, worker_main
from parsim.execute.processes.heartbeat import Doing, pulse
from parsim.execute.processes.output import write_progress
from parsim.execute.processes.setup import prepare_rank
from parsim.execute.rank_run import ProcessGroups, RankRun, run_dataset
from parsim.execute.stage import seeded_module
from parsim.files import read_json, write_json_atomically
from parsim.model.model import Model
from parsim.program.lower import lower
from parsim.program.placed import PlanIndex
from parsim.relaxed.replicas import SCORED_EVERY

GOAL = "goal.json"
"""Beside the job: what the ranks of this experiment need in addition."""
FOUND = "found.json"
"""Beside the job: a row per run."""
TURN = 4
"""Scores per turn."""
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Attributes: target: test accuracy. most_steps: per run, after which it is given up."""

    target: float
    most_steps: tuple[int, ...]

    def save(self, folder: Path) -> None:
        write_json_atomically(folder / GOAL, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> Goal:
        document = read_json(folder / GOAL)
        return cls(target=document["target"], most_steps=tuple(document["most_steps"]))


@dataclass(slots=True, kw_only=True)
class Training:
    """One run until it scores the target. seconds: so far, of every rank by its own clock, so ranks that drift apart are not
    charged for their distance. steps, score: so far, of its last score. over: it needs no more turns."""

    entry: RankRun
    most_steps: int
    seconds: list[float] = field(default_factory=list)
    steps: int = 0
    score: float = 0.0
    reached: bool = False
    over: bool = False
    _names: tuple[tuple[str, torch.Size], ...] = field(default=())

    def turn(self, target: float) -> None:
        """Train `TURN` times `SCORED_EVERY` steps, then score each; seconds and steps stop at the first score that reaches."""
        copies, ends = [], []
        meet()
        start = time.perf_counter()
        for _ in range(TURN):
            for _ in range(SCORED_EVERY):
                self.entry.step(keep=False)
            ends.append(time.perf_counter())
            copies.append({name: value.detach().clone() for name, value in self.entry.stage.parameters.items()})
        meet()
        spans = gather_values([start, *ends])
        before = self.seconds or [0.0] * len(spans)
        for number, copy in enumerate(copies, 1):
            self.score = value_of_rank_0(self._score(copy))
            self.steps += SCORED_EVERY
            self.seconds = [before_s + own[number] - own[0] for before_s, own in zip(before, spans, strict=True)]
            self.reached = self.score >= target
            if self.reached:
                break
        self.over = self.reached or self.steps >= self.most_steps

    def _score(self, own: dict[str, Tensor]) -> float | None:
        """Accuracy of the mean weights on the test samples; None where another rank scores them."""
        mean = self._mean(own)
        if dist.get_rank():
            return None
        run = self.entry.run
        return score(run, RankState(weights=mean), run_dataset(run, "test"), torch.device("cpu"))["test_accuracy"]

    def _mean(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """Every parameter's mean over the ranks that hold it, whether they are replicas or stages."""
        if not self._names:
            module = seeded_module(self.entry.run.model, self.entry.run.seed, torch.float32, torch.device("cpu"))
            self._names = tuple((name, value.shape) for name, value in module.named_parameters())
        sizes = [shape.numel() for _, shape in self._names]
        held = torch.tensor([float(name in own) for name, _ in self._names])
        zeros = [torch.zeros(size) for size in sizes]
        flat = torch.cat(
            [own[name].flatten() if name in own else zero for (name, _), zero in zip(self._names, zeros, strict=True)]
        )
        dist.all_reduce(flat)
        dist.all_reduce(held)
        parts = zip(self._names, torch.split(flat, sizes), held.tolist(), strict=True)
        return {name: (part / holders).view(shape) for (name, shape), part, holders in parts}

    def row(self) -> dict[str, Any]:
        return {"reached": self.reached, "steps": self.steps, "seconds": max(self.seconds), "score": self.score}


def main(path: Path) -> None:
    """Train all runs of the job in turns, each until it scores the target."""
    pulse().begin(Doing.PREPARING, "starting")
    job, goal = Job.load(path), Goal.load(path.parent)
    started = read_place()
    prepare_rank(started.local_rank, started.local_world_size)
    place = init_group("cpu", timeout_s=TIMEOUT_S)
    groups = ProcessGroups(TIMEOUT_S)
    trainings = []
    for run, most in zip(job.runs, goal.most_steps, strict=True):
        layout = PlanIndex(run.plan, Model.load(Path(run.model_path)))
        graph = lower(run.plan, layout.model)
        groups.make(graph, run.precision, layout)
        trainings.append(Training(entry=RankRun(run, layout, graph, place, groups.mine, steps=most), most_steps=most))
    while left := [training for training in trainings if not training.over]:
        for training in left:
            training.turn(goal.target)
        if place.rank == 0:
            write_progress({"trained": f"{len(trainings) - len(left)} of {len(trainings)}"})
    if place.rank == 0:
        write_json_atomically(path.parent / FOUND, {training.entry.run.name: training.row() for training in trainings})
    meet()
    for training in trainings:
        training.entry.close()
    close_group(place)


if __name__ == "__main__":
    worker_main(main)
