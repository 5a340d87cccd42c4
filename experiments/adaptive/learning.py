"""Five strategies really run on digits: the same 20 seeds, float64, gloo ranks; and the accuracy of each on the way (Figure 4).
What is kept is written run by run.

An MLP of six equal layers, 64 images a step, SGD .1. A finished seed is not run again.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experiments.executor.launching import losses_of, run_plans
from parsim.execute.checkpoint.checkpoint import latest_checkpoint, load_state
from parsim.execute.evaluation import score
from parsim.execute.job import RunSpec
from parsim.execute.rank_run import run_dataset
from parsim.files import write_text_atomically
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan
from parsim.predict.evaluate import evaluate
from parsim.predict.problem import PlanningProblem
from parsim.search.by_hand import custom_plan, parse_placements

SPEC = ModelSpec(name="mlp", args=(("depth", 4), ("width", 32)))
BATCH, STEPS, EPOCHS, RANKS = 64, 440, 20, 4
"""Epochs of 22 full batches."""
SEEDS = range(20)
"""Fixed before the first was run."""
Row = dict[str, Any]


CURVE_STEPS = (22, 44, 88, 154, 220, 330, 440)
"""At which the accuracy on the way is taken: trainings of so many steps of the first seed."""


def problem_here() -> PlanningProblem:
    """The MLP on four V100s of one DGX-1."""
    return PlanningProblem(
        model=load_model(SPEC, granularity="layer"),
        cluster=cluster_from_profile(load_profile("dgx1-v100-32gb"), RANKS),
        global_batch=BATCH,
        numerics=Numerics(optimizer="sgd"),
    )


def strategies() -> dict[str, Plan]:
    """One plan each; adaptive shards two layers, replicates one and cuts the batch for the others."""
    problem = problem_here()
    cut = [component for component in problem.model.components if component.shardings]
    rules = {each.name: f"shard:{each.shardings[-1].rule}/2" for each in cut[:2]} | {cut[2].name: "replicate"}
    texts = {component.name: rules.get(component.name, "batch") for component in problem.model.components}
    placements = parse_placements(texts)
    meshes = {"single": Mesh(), "dp": Mesh(dp=2), "mp": Mesh(pp=2), "hp": Mesh(pp=2, dp=2)}
    plans = {name: custom_plan(problem, mesh, microbatches=1 + (mesh.pp > 1)) for name, mesh in meshes.items()}
    plans["adaptive"] = custom_plan(problem, Mesh(tp=2), placements=placements)
    return {name: replace(plan, strategy="custom") for name, plan in plans.items()}


def learning_rows(kept: Path, seeds: range = SEEDS, steps: int = STEPS) -> list[Row]:
    """A row per seed: test accuracy of every strategy, and how far its losses lie from the single process's."""
    rows = []
    for seed in seeds:
        path = kept / f"{steps}-{seed}.json"
        if not path.is_file():
            kept.mkdir(parents=True, exist_ok=True)
            write_text_atomically(path, json.dumps(_trained(seed, steps)))
        rows.append(json.loads(path.read_text(encoding="utf-8")))
        print(seed, rows[-1]["accuracy"], file=sys.stderr, flush=True)
    return rows


def curve_rows(kept: Path, all_steps: tuple[int, ...] = CURVE_STEPS) -> list[Row]:
    """Per strategy and number of steps: test accuracy of the first seed, and the seconds of so many steps on the V100s."""
    problem = problem_here()
    step_s = {name: evaluate(problem, plan, samples=0).result.step_s.median for name, plan in strategies().items()}
    found = {steps: learning_rows(kept, SEEDS[:1], steps)[0]["accuracy"] for steps in all_steps}
    return [
        {
            "strategy": name,
            "steps": steps,
            "epochs": steps * EPOCHS / STEPS,
            "simulated_s": steps * seconds,
            "accuracy": accuracy[name],
        }
        for name, seconds in step_s.items()
        for steps, accuracy in found.items()
    ]


def _trained(seed: int, steps: int) -> Row:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        load_model(SPEC, granularity="layer").save(folder / "model.json")
        runs = {
            name: RunSpec(
                name=name,
                model=SPEC,
                model_path=str(folder / "model.json"),
                plan=plan,
                optimizer="sgd",
                learning_rate=0.1,
                dataset="digits",
                dtype="float64",
                seed=seed,
            )
            for name, plan in strategies().items()
        }
        failed = run_plans(list(runs.values()), RANKS, folder, steps=steps, timeout_s=600.0)
        if failed:
            raise RuntimeError(f"seed {seed}: {failed}")
        accuracy, losses = {}, {}
        for name, run in runs.items():
            found = latest_checkpoint(folder / name / "checkpoints")
            if found is None:
                raise RuntimeError(f"seed {seed}: {name} left no checkpoint")
            state = load_state(found)
            accuracy[name] = score(run, state, run_dataset(run, "test"), torch.device("cpu"))["test_accuracy"]
            losses[name] = losses_of(folder, run)
    alone = losses["single"]
    apart = {name: max(abs(a - b) for a, b in zip(own, alone, strict=True)) for name, own in losses.items()}
    return {"seed": seed, "steps": steps, "accuracy": accuracy, "loss_difference": apart, "first_epochs_loss": alone[:66:22]}
