"""`parsim run`: train for real under the plan the file names, and keep everything needed to judge the prediction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from parsim.commands.output import JsonFlag, Overrides, RunFile, print_json, print_tables, progress
from parsim.config import RunConfig, load_config
from parsim.errors import ConfigError


def run(
    file: RunFile,
    nproc: Annotated[int | None, typer.Option(help="Processes; must be as many as the plan has ranks.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; left out: a new one below runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the latest checkpoint in --out.")] = False,
    checkpoint_every: Annotated[int, typer.Option(min=0, help="Steps between checkpoints; 0: at the end only.")] = 0,
    overrides: Overrides = None,
    as_json: JsonFlag = False,
) -> None:
    """Train for real under the chosen plan."""
    from parsim.commands.run_folder import RunFolder, new_folder, write_json
    from parsim.commands.workflow import answer, check_runnable, device_kind, judge, launch_job, measured, run_spec
    from parsim.commands.write_report import write_run_files
    from parsim.execute.job import Job

    config = load_config(file, overrides or [])
    if resume and out is None:
        raise ConfigError("--resume needs --out, the folder of the run to go on with")
    with progress("Planning"):
        asked = answer(config)
    check_runnable(asked, nproc)
    plan = asked.evaluation.result.plan
    folder = RunFolder(out) if resume and out is not None else new_folder(out, file.stem)
    steps = total_steps(config)
    folder.write_question(config, asked.problem.model, plan, asked.problem.cluster.profile)
    job = Job(
        output=str(folder.path.resolve()),
        mode="train",
        runs=(run_spec(asked, "run", folder.model),),
        steps=steps,
        warmup_steps=min(3, max(0, steps - 1)),
        device=device_kind(asked),
        checkpoint_every=checkpoint_every,
        resume=resume,
    )
    with progress(f"Training {steps} steps under {plan.summary()}") as say:
        launch_job(job, folder, say)
    seen = measured(folder, "run", asked.evaluation)
    comparison = judge(asked.problem, asked.evaluation, seen)
    score: dict[str, Any] = json.loads((folder.path / "score.json").read_text())
    document = {
        **asked.evaluation.result.to_dict(),
        "folder": str(folder.path),
        "steps": steps,
        "losses": list(seen.losses),
        **score,
        "comparison": comparison.to_dict(),
    }
    write_json(folder.result, document)
    write_run_files(folder, asked, seen, comparison)
    if as_json:
        print_json(document)
        return
    from parsim.report.tables import validation_table

    print_tables([validation_table([(asked.problem.model.name, plan.summary(), comparison.to_dict())])])
    first, last = (seen.losses[0], seen.losses[-1]) if seen.losses else (float("nan"), float("nan"))
    print(f"loss {first:.4f} -> {last:.4f}, test accuracy {100 * score['test_accuracy']:.1f}%")
    print(f"folder: {folder.path} (report.html, trace.json for Perfetto, checkpoints/)")


def total_steps(config: RunConfig) -> int:
    """training.steps, or as many as training.epochs takes."""
    if config.training.steps is not None:
        return config.training.steps
    from parsim.data import BatchOrder
    from parsim.data.for_model import dataset_for

    training = config.training
    data = dataset_for(config.model_spec, training.dataset, root=training.data_root, seed=training.seed)
    order = BatchOrder(n=len(data), global_batch=training.global_batch, seed=training.seed)
    return training.epochs * order.steps_per_epoch
