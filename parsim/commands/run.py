"""`parsim run`: train for real under the plan the file names, and keep everything needed to judge the prediction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from parsim.commands.output import (
    AllowCode,
    Asked,
    BatchOption,
    JsonFlag,
    OnCluster,
    Overrides,
    print_json,
    print_tables,
    print_verdict,
)


def run(
    asked: Asked,
    cluster: OnCluster = None,
    batch: BatchOption = None,
    nproc: Annotated[int | None, typer.Option(help="Number of processes; must equal the ranks of the plan.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. Default: a new one below runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the latest checkpoint in --out.")] = False,
    checkpoint_every: Annotated[int, typer.Option(min=0, help="Steps between checkpoints; 0: at the end only.")] = 0,
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="Measure while training, and change the plan if that saves time.")
    ] = False,
    window: Annotated[int, typer.Option(min=1, help="With --adaptive: steps between two decisions.")] = 20,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds without progress of a process after which the run ends.")] = 30,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="If a rank dies, restart automatically, on fewer devices if needed.")
    ] = False,
    max_restarts: Annotated[int, typer.Option(min=0, help="With --elastic: the most restarts.")] = 3,
    overrides: Overrides = None,
    allow_code: AllowCode = False,
    as_json: JsonFlag = False,
) -> None:
    """Train for real under the chosen plan."""
    from parsim.report.tables import validation_table
    from parsim.workflow.public.functions import run as train

    done = train(
        asked,
        cluster=cluster,
        global_batch=batch,
        nproc=nproc,
        out=out,
        resume=resume,
        checkpoint_every=checkpoint_every,
        adaptive=adaptive,
        window_steps=window,
        timeout_s=timeout,
        elastic=elastic,
        max_restarts=max_restarts,
        overrides=overrides or [],
    )
    document = done.to_dict()
    if as_json:
        print_json(document)
        return
    row = (done.prediction.problem.model.name, done.prediction.plan.summary(), done.comparison.to_dict())
    print_tables([validation_table([row])])
    _print_decisions(document["decisions"])
    print(f"{_data(done.prediction.config.training.dataset, document)}{_moved(document)}, {_scored(document)}")
    print_verdict(document)
    print(f"folder: {done.folder} (report.html, trace.json for Perfetto, checkpoints/)")


def _data(dataset: str, document: dict[str, Any]) -> str:
    """On what was trained: a module of one's own takes the default where the question names no data."""
    return f"trained on {dataset} for {len(document['losses'])} steps: " if document["losses"] else ""


def _moved(document: dict[str, Any]) -> str:
    """The first and the last loss, and from which step on where those of earlier parts are not there any more."""
    losses, first = document["losses"], document.get("losses_from_step", 1)
    if not losses:
        return "no step was left to train"
    return f"loss {losses[0]:.4f} -> {losses[-1]:.4f}" + (f" (from step {first} on)" if first > 1 else "")


def _scored(document: dict[str, Any]) -> str:
    if "test_loss" not in document:
        return str(document.get("not_scored", "no test samples"))
    accuracy = document.get("test_accuracy")
    scored = "no accuracy: the targets are not classes" if accuracy is None else f"test accuracy {100 * accuracy:.1f}%"
    tested = "not finite" if document["test_loss"] is None else f"{document['test_loss']:.4f}"
    return f"test loss {tested}, {scored}"


def _print_decisions(decisions: Sequence[dict[str, Any]]) -> None:
    from parsim.plans.plan import Plan

    for decision in decisions:
        what = "keeps its plan" if decision["plan"] is None else f"changes to {Plan.from_json(decision['plan']).summary()}"
        print(f"after step {decision['step']} ({1e3 * decision['step_s']:.1f} ms a step) {what}: {decision['reason']}")
