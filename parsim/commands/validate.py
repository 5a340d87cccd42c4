"""`parsim validate`: was the prediction right? Of a run that is there, or of a new one measured in rounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from parsim.commands.output import JsonFlag, Overrides, print_json, print_tables, progress
from parsim.workflow.config import RunConfig, load_config

if TYPE_CHECKING:
    from parsim.workflow.ask import Answer
    from parsim.workflow.run_folder import RunFolder

ROUNDS = 10
STEPS_PER_ROUND = 4


def validate(
    target: Annotated[Path, typer.Argument(metavar="RUN_DIR|RUN.toml", help="A folder that `parsim run` left, or a run file.")],
    out: Annotated[Path | None, typer.Option(help="Where to keep the new run of a RUN.toml.")] = None,
    rounds: Annotated[int, typer.Option(min=4, help="Rounds measured of a RUN.toml; the A/A floor splits them.")] = ROUNDS,
    tasks: Annotated[bool, typer.Option("--tasks", help="List every task in the JSON, not only the largest errors.")] = False,
    history: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Record the validation here instead of beside the profile.")
    ] = None,
    session: Annotated[
        str | None, typer.Option(help="Name of measurements made together; none of them tests what another one taught.")
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Write into the profile what the run shows it to be wrong by, without calibrating.")
    ] = False,
    overrides: Overrides = None,
    as_json: JsonFlag = False,
) -> None:
    """Predicted against measured: the step, every kind of task, peak memory; recorded in the profile's history."""
    from parsim.workflow.ask import judge, measured, reopen, speed_of, warn_of_profile
    from parsim.workflow.record_validation import record_of, remember, updatable, update_profile
    from parsim.workflow.run_folder import write_json
    from parsim.workflow.write_report import write_run_files

    if target.is_dir():
        folder, asked, name = reopen(target)
        if history is not None:
            asked = replace(asked, config=with_history(asked.config, history))
        changed_since = warn_of_profile(asked)
    else:
        config = load_config(target, overrides or [])
        config = config if history is None else with_history(config, history)
        if update:
            updatable(config)
        name = "run"
        folder, asked, changed_since = measured_anew(config, name, out, target.stem, rounds)
    seen = measured(folder, name, asked.evaluation)
    comparison = judge(asked.problem, asked.evaluation, seen)
    document = {"folder": str(folder.path), "plan": asked.evaluation.result.plan.summary(), **comparison.to_dict(tasks=tasks)}
    speed = speed_of(asked.problem.cluster.profile, comparison.at_pace)
    document["at_pace"] = speed
    document["warnings"] = [*changed_since, *([speed["warning"]] if speed and speed["warning"] else [])]
    record = record_of(asked, seen, comparison, session)
    document["history"] = remember(asked, record)
    if update:
        document["update"] = update_profile(asked, seen, comparison, record)
    write_json(folder.path / "validation.json", document)
    write_run_files(folder, asked, seen, comparison)
    if as_json:
        print_json(document)
        return
    from parsim.report.tables import kind_table, validation_table

    summary = asked.evaluation.result.plan.summary()
    print_tables(
        [validation_table([(asked.problem.model.name, summary, comparison.to_dict())]), kind_table(comparison.to_dict())]
    )
    if speed is not None:
        print(f"speed: {speed['text']}")
        if speed["warning"]:
            print(f"warning: {speed['warning']}")
    print(f"history: {document['history']['text']}")
    if update:
        print(f"update: {document['update']['text']}")
    print(f"folder: {folder.path} (report.html, trace.json for Perfetto)")


def measured_anew(
    config: RunConfig, name: str, out: Path | None, stem: str, rounds: int
) -> tuple[RunFolder, Answer, list[str]]:
    """Answer the run file and run its plan in rounds: the folder, the answer, and what has changed since the calibration."""
    from parsim.execute.job import Job
    from parsim.workflow.ask import (
        answer,
        check_launchable,
        check_runnable,
        device_kind,
        launch_job,
        run_spec,
        warn_of_profile,
        with_every_rank,
    )
    from parsim.workflow.run_folder import new_folder

    check_launchable(config)
    with progress("Planning"):
        asked = answer(config)
    check_runnable(asked, None)
    changed_since = warn_of_profile(asked)
    asked = with_every_rank(asked)
    folder = new_folder(out, f"{stem}-validation")
    plan = asked.evaluation.result.plan
    folder.write_question(config, asked.problem.model, plan, asked.problem.cluster.profile, asked.problem.history)
    job = Job(
        output=str(folder.path.resolve()),
        mode="measure",
        runs=(run_spec(asked, name, folder.model),),
        steps=STEPS_PER_ROUND,
        rounds=rounds,
        device=device_kind(asked),
    )
    with progress(f"Measuring {rounds} rounds under {plan.summary()}") as say:
        launch_job(job, folder, say)
    return folder, asked, changed_since


def with_history(config: RunConfig, path: Path) -> RunConfig:
    """The same run file with another place for its profile's history."""
    cluster = config.cluster.model_copy(update={"history": str(path.resolve())})
    return config.model_copy(update={"cluster": cluster})
