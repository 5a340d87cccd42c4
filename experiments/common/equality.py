"""Run many plans for real in one launch and compare each with single-process training."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from experiments.common.forked import run_job
from experiments.common.reference import ReferenceResult, largest_difference, train_reference
from parsim.execute.checkpoint.checkpoint import latest_checkpoint, load_state
from parsim.execute.job import PLAIN, Job, RunSpec, TrainingRecipe, with_update_groups
from parsim.execute.measurement import Measurement, RankRecord
from parsim.execute.numerics import numerics_of
from parsim.execute.processes.launch import launch
from parsim.execute.rank_run import run_dataset
from parsim.model.component import ParameterShard
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.shard.apply import piece
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import rank_of_stage
from parsim.plans.plan import NONE, Plan, Recompute, Stage


@cache
def traced(spec: ModelSpec, granularity: str = "block") -> Model:
    """A Model, traced once for all of its plans."""
    return load_model(spec, granularity=granularity)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model under one plan."""

    spec: ModelSpec
    plan: Plan
    dataset: str = "digits"
    optimizer: str = "sgd_momentum"
    learning_rate: float = 0.02
    dtype: str = "float64"
    granularity: str = "block"
    precision: str = "fp32"
    master_weights: bool = True
    loss_scale: float = 65536.0
    loss_scale_growth_steps: int = 2000
    recipe: TrainingRecipe = PLAIN
    workers: int = 0
    shards: str | None = None

    @property
    def model(self) -> Model:
        return with_update_groups(traced(self.spec, self.granularity), self.recipe.update_groups)

    def __str__(self) -> str:
        return f"{self.spec.name} {self.plan.summary()} {self.optimizer} {self.dtype} {self.precision}"


def even_plan(
    spec: ModelSpec,
    mesh: Mesh,
    *,
    strategy: str,
    batch: int,
    microbatches: int = 1,
    order: str = "1f1b",
    chunks: int = 1,
    bucket_bytes: int = 2**14,
    zero_stage: int = 0,
    recompute: Recompute = NONE,
) -> Plan:
    """Stages of as equal a number of components as can be."""
    names = [component.name for component in traced(spec).components]
    count = mesh.pp * chunks
    cuts = [round(number * len(names) / count) for number in range(count + 1)]
    stages = tuple(
        Stage(components=tuple(names[first:last]), ranks=mesh.stage_ranks(place))
        for place, (first, last) in zip(rank_of_stage(order, mesh.pp, chunks), itertools.pairwise(cuts), strict=True)
    )
    return Plan(
        strategy=strategy,
        mesh=mesh,
        stages=stages,
        global_batch=batch,
        microbatches=microbatches,
        pipeline_order=order,
        bucket_bytes=bucket_bytes,
        zero_stage=zero_stage,
        recompute=recompute,
    )


def launched(job_path: Path) -> None:
    """As `parsim run` starts the ranks of a job: by the launcher, in processes that import everything anew."""
    launch(job_path, Job.load(job_path).world_size, timeout_s=500)


def run_cases(cases: Sequence[Case], folder: Path, *, steps: int, start: Callable[[Path], None] = run_job) -> list[RunSpec]:
    """All cases in one job, `steps` steps each; their states and losses lie under the folder. `start` runs its ranks."""
    runs = []
    models: dict[tuple[object, ...], Path] = {}
    for number, case in enumerate(cases):
        key = (case.spec, case.granularity, case.recipe.update_groups)
        if key not in models:
            models[key] = folder / f"model-{len(models)}.json"
            case.model.save(models[key])
        runs.append(
            RunSpec(
                name=f"case{number}",
                model=case.spec,
                model_path=str(models[key]),
                plan=case.plan,
                optimizer=case.optimizer,
                learning_rate=case.learning_rate,
                dataset=case.dataset,
                dtype=case.dtype,
                seed=number,
                precision=case.precision,
                master_weights=case.master_weights,
                loss_scale=case.loss_scale,
                loss_scale_growth_steps=case.loss_scale_growth_steps,
                recipe=case.recipe,
                workers=case.workers,
                shards=case.shards,
            )
        )
    job = Job(output=str(folder), mode="measure", runs=tuple(runs), steps=steps - 1, rounds=1, warmup_steps=0, keep_state=True)
    path = folder / "job.json"
    job.save(path)
    start(path)
    return runs


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Largest absolute differences from the reference."""

    parameters: float
    optimizer: float
    buffers: float
    losses: float
    loss_scale: float = 0.0

    @property
    def worst(self) -> float:
        return max(self.parameters, self.optimizer, self.buffers, self.losses, self.loss_scale)


def compare_case(case: Case, run: RunSpec, folder: Path, *, steps: int) -> Difference:
    """What the ranks ended with, against plain training in this process."""
    expected = _reference(case, run, steps)
    difference = state_difference(case.model, case.plan, expected, folder / run.name / "checkpoints", steps=steps)
    return replace(difference, losses=_loss_difference(case, run, expected, folder))


def moved_by_rounding(case: Case, run: RunSpec, *, steps: int) -> float:
    """How far one process ends from itself where its first weights are rounded otherwise: the largest of three tries.

    Depends on the model, the samples and the rate alone: small networks with BatchNorm and ReLU amplify rounding.
    """
    plain = _reference(case, run, steps)
    names = trained_names(case.model)
    moved = 0.0
    for seed in range(3):
        other = _reference(case, run, steps, rounded_by=seed)
        states = (
            largest_difference(plain.optimizer_state.get(name, {}), other.optimizer_state.get(name, {})) for name in names
        )
        moved = max(moved, largest_difference(plain.parameters, other.parameters, names), *states)
    return moved


def _reference(case: Case, run: RunSpec, steps: int, rounded_by: int | None = None) -> ReferenceResult:
    numerics = numerics_of(run, torch.device("cpu"))
    return train_reference(
        case.spec,
        case.plan,
        run_dataset(run, "train"),
        optimizer=case.optimizer,
        learning_rate=case.learning_rate,
        dtype=numerics.weights,
        seed=run.seed,
        steps=steps,
        model=case.model,
        numerics=numerics,
        recipe=case.recipe,
        rounded_by=rounded_by,
    )


def state_difference(model: Model, plan: Plan, expected: ReferenceResult, checkpoints: Path, *, steps: int) -> Difference:
    """The latest checkpoint against what plain training ended with; losses are left out."""
    found = latest_checkpoint(checkpoints)
    assert found is not None
    assert found.step == steps
    trained = trained_names(model)
    state = load_state(found)
    held = expected.optimizer_state
    return Difference(
        parameters=largest_difference(expected.parameters, dict(state.weights), trained),
        optimizer=max(
            (largest_difference(held[name], dict(state.optimizer[name])) for name in trained if held.get(name)), default=0.0
        ),
        buffers=_buffer_difference(plan, expected, checkpoints),
        losses=0.0,
        loss_scale=abs(float(state.progress["loss_scale"][0]) - expected.loss_scale) if state.progress else 0.0,
    )


def trained_names(model: Model) -> list[str]:
    return [parameter.name for parameter in model.parameters]


def _buffer_difference(plan: Plan, expected: ReferenceResult, checkpoints: Path) -> float:
    """Each rank's own running statistics; of cut channels its own piece."""
    found = latest_checkpoint(checkpoints)
    assert found is not None
    worst = 0.0
    for rank in range(plan.world_size):
        mine = torch.load(found.folder / f"rank-{rank:04d}.pt", weights_only=True)["buffers"]
        cut = json.loads((found.folder / f"rank-{rank:04d}.json").read_text())["fragments"]["buffers"]
        whole = expected.buffers[rank]
        for name, value in mine.items():
            wanted = whole[name]
            if name in cut:
                dim, blocks, shard, ways = cut[name][:4]
                wanted = piece(wanted, ParameterShard(name=name, dim=dim, blocks=blocks), shard, ways)
            worst = max(worst, largest_difference({name: wanted}, {name: value}))
    return worst


def _loss_difference(case: Case, run: RunSpec, expected: ReferenceResult, folder: Path) -> float:
    """The first step is the one the memory was measured in; its loss is not kept."""
    records = tuple(RankRecord.load(folder / run.name, rank) for rank in range(case.plan.world_size))
    losses = np.array(Measurement(ranks=records).losses)
    return float(np.abs(losses - np.array(expected.losses[1:])).max())
