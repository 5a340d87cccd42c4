"""`parsim run`: train for real under the plan the file names, and keep everything needed to judge the prediction."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parsim.commands.output import JsonFlag, Overrides, RunFile, print_json, print_tables, progress
from parsim.errors import ConfigError
from parsim.workflow.config import RunConfig, load_config

if TYPE_CHECKING:
    from parsim.execute.job import AdaptiveSpec


def run(
    file: RunFile,
    nproc: Annotated[int | None, typer.Option(help="Processes; must be as many as the plan has ranks.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; left out: a new one below runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the latest checkpoint in --out.")] = False,
    checkpoint_every: Annotated[int, typer.Option(min=0, help="Steps between checkpoints; 0: at the end only.")] = 0,
    adaptive: Annotated[bool, typer.Option("--adaptive", help="Measure on the way; change plan where that pays.")] = False,
    window: Annotated[int, typer.Option(min=1, help="With --adaptive: steps between two looks.")] = 20,
    overrides: Overrides = None,
    as_json: JsonFlag = False,
) -> None:
    """Train for real under the chosen plan."""
    from parsim.execute.job import Job
    from parsim.plans.plan import Plan
    from parsim.predict.evaluate import evaluate
    from parsim.workflow.ask import (
        answer,
        check_launchable,
        check_runnable,
        device_kind,
        judge,
        launch_job,
        levels_of,
        measured,
        run_spec,
        warn_of_profile,
        with_every_rank,
    )
    from parsim.workflow.run_folder import RunFolder, new_folder, write_json
    from parsim.workflow.write_report import write_run_files

    config = load_config(file, overrides or [])
    if adaptive and resume:
        raise ConfigError("--adaptive starts a training and cannot go on with one; drop --resume")
    if resume and out is None:
        raise ConfigError("--resume needs --out, the folder of the run to go on with")
    check_launchable(config)
    with progress("Planning"):
        asked = answer(config)
    check_runnable(asked, nproc)
    changed_since = warn_of_profile(asked)
    asked = with_every_rank(asked)
    plan = asked.evaluation.result.plan
    folder = RunFolder(out) if resume and out is not None else new_folder(out, file.stem)
    steps = total_steps(config)
    folder.write_question(config, asked.problem.model, plan, asked.problem.cluster.profile, asked.problem.history)
    job = Job(
        output=str(folder.path.resolve()),
        mode="train",
        runs=(run_spec(asked, "run", folder.model),),
        steps=steps,
        warmup_steps=min(3, max(0, steps - 1)),
        device=device_kind(asked),
        checkpoint_every=checkpoint_every,
        resume=resume,
        adaptive=adaptive_spec(config, window) if adaptive else None,
    )
    with progress(f"Training {steps} steps under {plan.summary()}") as say:
        launch_job(job, folder, say, asked)
    decisions: list[dict[str, Any]] = json.loads((folder.path / "decisions.json").read_text()) if adaptive else []
    changed = [decision for decision in decisions if decision["plan"] is not None]
    if changed:
        plan = Plan.from_json(changed[-1]["plan"])
        asked = replace(asked, evaluation=evaluate(asked.problem, plan, fold=False))
        plan.save(folder.plan)
    seen = measured(folder, "run", asked.evaluation)
    comparison = judge(asked.problem, asked.evaluation, seen)
    score: dict[str, Any] = json.loads((folder.path / "score.json").read_text())
    document = {
        **asked.evaluation.result.to_dict(),
        "folder": str(folder.path),
        "steps": steps,
        "losses": list(seen.losses),
        **score,
        "decisions": decisions,
        "comparison": comparison.to_dict(),
        "memory_levels": levels_of(asked, seen),
        "warnings": [*asked.evaluation.result.warnings, *changed_since],
    }
    write_json(folder.result, document)
    write_run_files(folder, asked, seen, comparison)
    if as_json:
        print_json(document)
        return
    from parsim.report.tables import validation_table

    print_tables([validation_table([(asked.problem.model.name, plan.summary(), comparison.to_dict())])])
    _print_decisions(decisions)
    _print_outcome(seen.losses, score["test_accuracy"], folder.path)


def _print_outcome(losses: Sequence[float], accuracy: float, folder: Path) -> None:
    first, last = (losses[0], losses[-1]) if losses else (float("nan"), float("nan"))
    print(f"loss {first:.4f} -> {last:.4f}, test accuracy {100 * accuracy:.1f}%")
    print(f"folder: {folder} (report.html, trace.json for Perfetto, checkpoints/)")


def _print_decisions(decisions: list[dict[str, Any]]) -> None:
    from parsim.plans.plan import Plan

    for decision in decisions:
        what = "keeps its plan" if decision["plan"] is None else f"goes on with {Plan.from_json(decision['plan']).summary()}"
        print(f"after step {decision['step']} ({1e3 * decision['step_s']:.1f} ms a step) {what}: {decision['reason']}")


def adaptive_spec(config: RunConfig, window: int) -> AdaptiveSpec:
    """What the ranks need in order to plan again."""
    from parsim.execute.job import AdaptiveSpec

    devices = config.devices
    chosen = tuple(range(devices)) if isinstance(devices, int) else None if devices is None else tuple(devices)
    return AdaptiveSpec(
        profile=config.cluster.profile,
        devices=chosen,
        precision=config.training.precision,
        window_steps=window,
        epoch_steps=steps_per_epoch(config),
    )


def total_steps(config: RunConfig) -> int:
    """training.steps, or as many as training.epochs takes."""
    if config.training.steps is not None:
        return config.training.steps
    return config.training.epochs * steps_per_epoch(config)


def steps_per_epoch(config: RunConfig) -> int:
    """Steps of one pass over the data."""
    from parsim.data import BatchOrder
    from parsim.data.for_model import dataset_for

    training = config.training
    data = dataset_for(config.model_spec, training.dataset, root=training.data_root, seed=training.seed)
    order = BatchOrder(n=len(data), global_batch=training.global_batch, seed=training.seed)
    return order.steps_per_epoch
