"""`parsim run`: train for real under the plan the file names, and keep everything needed to judge the prediction."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parsim.app.doctor import progress
from parsim.app.run_folder import RunFolder
from parsim.commands.output import (
    AllowCode,
    Asked,
    BatchOption,
    JsonFlag,
    OnCluster,
    Overrides,
    PageOption,
    PlotOption,
    tell,
    verdict,
)
from parsim.costs.history import coverage_by, coverage_of, history_lines, history_path, judged_split, read_history, remove_lines
from parsim.errors import ConfigError, MissingDependencyError
from parsim.hardware.compose import load_profile
from parsim.plans.plan import Plan
from parsim.report.tables import coverage_tables, history_table, kind_table, validation_table

if TYPE_CHECKING:
    from parsim.app.answer import Answer
    from parsim.costs.history import History


def run(
    asked: Asked,
    cluster: OnCluster = None,
    batch: BatchOption = None,
    nproc: Annotated[int | None, typer.Option(help="Number of processes; must equal the ranks of the plan.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. Default: a new one below runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the latest checkpoint in --out.")] = False,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Steps between checkpoints; 0: at the end only. Default: about one a minute, for less than 2% of the time.",
        ),
    ] = None,
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
    from parsim.app.train import run as train

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
    row = (done.prediction.problem.model.name, done.prediction.plan.summary(), done.comparison.to_dict())
    decisions = []
    for decision in document["decisions"]:
        what = "keeps its plan" if decision["plan"] is None else f"changes to {Plan.from_json(decision['plan']).summary()}"
        took = f"{1e3 * decision['step_s']:.1f} ms a step"
        decisions.append(f"after step {decision['step']} ({took}) {what}: {decision['reason']}")
    trained = training_text(done.prediction.question.training.dataset, document)
    folder = f"folder: {done.folder} (report.html, trace.json for Perfetto, checkpoints/)"
    tell(as_json, document, validation_table([row]), *decisions, trained, *verdict(document), folder)


def training_text(dataset: str, document: dict[str, Any]) -> str:
    """The data (a module of one's own takes the default where none are named), the first and the last loss, and the score."""
    losses, first = document["losses"], document.get("losses_from_step", 1)
    text = "no step was left to train"
    if losses:
        text = f"trained on {dataset} for {len(losses)} steps: loss {losses[0]:.4f} -> {losses[-1]:.4f}"
        text += f" (from step {first} on)" if first > 1 else ""  # the losses of earlier parts are not there any more
    if "test_loss" not in document:
        return f"{text}, {document.get('not_scored', 'no test samples')}"
    accuracy, loss = document.get("test_accuracy"), document["test_loss"]
    score = "no accuracy: the targets are not classes" if accuracy is None else f"test accuracy {100 * accuracy:.1f}%"
    return f"{text}, test loss {'not finite' if loss is None else f'{loss:.4f}'}, {score}"


# `parsim coverage`: how often the intervals of a profile held, by model and by run, and how new ones are corrected.


def coverage(
    profile: Annotated[str, typer.Argument(metavar="PROFILE", help="A shipped profile by name, or the path of one.")],
    history: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its validations. Default: PROFILE.history.jsonl beside the profile.")
    ] = None,
    out: PageOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Count how often a profile's prediction intervals held in its validations, and show how new ones are corrected."""
    from parsim.app.write_folder import report_facts
    from parsim.report.figures import coverage_figures
    from parsim.report.page import ReportData, write_report

    loaded = load_profile(profile)
    path = history_path(profile, None if history is None else str(history))
    if path is None:
        raise ConfigError(f"{profile} is a shipped profile and has no history of its own; name one: --history FILE")
    validations = read_history(path, loaded)
    tables = coverage_tables(validations.records)
    if out is not None:
        data = ReportData(
            title=f"Coverage of {loaded.name}",
            facts=report_facts(),
            summary=(validations.correction.describe(), *validations.notes),
            extra_tables=tables,
            extra_figures=coverage_figures(validations.records),
        )
        write_report(data, out)
    lines = [f"warning: {note}" for note in validations.notes]
    if not validations.records:
        lines.append(f"No validation of {loaded.name} in {path}: run `parsim validate` on a RUN.toml of this profile first")
    lines += [] if out is None else [f"Report: {out}"]
    tell(as_json, coverage_document(validations) | {"profile": loaded.name}, *tables, *lines)


def coverage_document(history: History) -> dict[str, Any]:
    """A History as JSON: how new intervals are corrected, and coverage in all, by model and by run (None without records)."""
    rows = judged_split(history.records)
    return {
        "history": None if history.path is None else str(history.path),
        "records": len(history.records),
        "interval_correction": history.correction.to_dict(),
        "coverage": coverage_of(rows).to_dict() if rows else None,
        "models": {name: held.to_dict() for name, held in coverage_by(rows, lambda record: record.model).items()},
        "runs": {name: held.to_dict() for name, held in coverage_by(rows, lambda record: record.run).items()},
        "left_out": list(history.left_out),
        "warnings": list(history.notes),
    }


# `parsim history`: every validation of a profile, whether it is used, and how to be rid of one.


def history(
    profile: Annotated[str, typer.Argument(metavar="PROFILE", help="A shipped profile by name, or the path of one.")],
    file: Annotated[
        Path | None,
        typer.Option("--history", metavar="FILE", help="Its validations. Default: PROFILE.history.jsonl beside the profile."),
    ] = None,
    remove: Annotated[list[int] | None, typer.Option(metavar="LINE", help="Remove this line of the file. Repeatable.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the validations of a profile, and why some are not used; or remove some of them."""
    path = history_path(profile, None if file is None else str(file))
    if path is None:
        raise ConfigError(f"{profile} is a shipped profile and has no history of its own; name one: --history FILE")
    if not path.is_file():
        raise ConfigError(f"there is no history {path}; `parsim validate` on a RUN.toml of this profile begins it")
    if remove:
        remove_lines(path, remove)
    lines = history_lines(path, load_profile(profile))
    rows = [
        {"line": line.number, "used": not line.why, "why_not": line.why, **({} if line.record is None else asdict(line.record))}
        for line in lines
    ]
    document = {"history": str(path), "removed": sorted(remove or []), "lines": rows}
    tell(as_json, document, history_table(lines, str(path)))


# `parsim validate`: was the prediction right? For an existing run, or for a new one measured in rounds.


def validate(
    target: Annotated[Path, typer.Argument(metavar="RUN_DIR|RUN.toml", help="A folder of `parsim run`, or a run file.")],
    out: Annotated[Path | None, typer.Option(help="With a RUN.toml: folder of the new run.")] = None,
    rounds: Annotated[
        int, typer.Option(min=4, help="With a RUN.toml: rounds to measure. Halves of them give the A/A floor (noise).")
    ] = 10,
    tasks: Annotated[bool, typer.Option("--tasks", help="List every task in the JSON, not only the largest errors.")] = False,
    history: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Record the validation here instead of beside the profile.")
    ] = None,
    session: Annotated[
        str | None, typer.Option(help="Name of measurements made together: one of them never corrects the interval of another.")
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Correct the profile by the measured run, without a calibration.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds without progress of a process after which the run ends.")] = 30,
    overrides: Overrides = None,
    allow_code: AllowCode = False,
    plot: PlotOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare predicted with measured: step, every kind of task, peak memory. Record it in the profile's history."""
    from parsim.app.train import validate as judge

    done = judge(
        target,
        out=out,
        rounds=rounds,
        tasks=tasks,
        history=history,
        session=session,
        update=update,
        timeout_s=timeout,
        overrides=overrides or [],
    )
    document, asked = done.to_dict(), done.prediction
    speed = document["at_pace"]
    if plot is not None:
        done.plot(plot)
    comparison = done.comparison.to_dict()
    row = (asked.problem.model.name, asked.plan.summary(), comparison)
    lines = [] if speed is None else [f"speed: {speed['text']}"]
    lines += [f"warning: {speed['warning']}"] if speed is not None and speed["warning"] else []
    lines += [*verdict(document), *([f"update: {document['update']['text']}"] if update else [])]
    lines.append(f"folder: {done.folder} (report.html, trace.json for Perfetto)")
    tell(as_json, document, validation_table([row]), kind_table(comparison), *lines, picture=plot)


# `parsim report`: draw report.html and trace.json of a run folder again.


def report(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A folder of `run` or `simulate --out`.")],
    allow_code: AllowCode = False,
    as_json: JsonFlag = False,
) -> None:
    """Draw report.html and trace.json of a run folder again."""
    from parsim.app.write_folder import redraw

    folder = RunFolder(run_folder)
    with progress(f"Drawing {run_folder}"):
        redraw(folder)
    document = {"report": str(folder.report), "trace": str(folder.trace)}
    tell(as_json, document, f"Report: {folder.report}; trace for Perfetto: {folder.trace}")


# `parsim demo`: the main job, end to end, on whatever this machine has.


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the profile, the runs and report.html.")] = Path("parsim-demo"),
    nproc: Annotated[
        int | None,
        typer.Option(min=1, max=8, help="Ranks of the real runs. Default: one per GPU, or 2 processes on a CPU."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Calibrate and measure longer: five minutes instead of two.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Plan, calibrate, train and compare on this machine, and write a report: everything once, in two minutes."""
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("the demo trains for real and needs torch; pip install 'parsim[torch]'")
    from parsim.app.demo import run_demo

    def show(answer: Answer) -> None:
        if not as_json:
            tell(False, None, answer.sentence(), answer.report(), f"{answer.runners_up()}\n")

    result = run_demo(out, nproc, full=full, show=show)
    tell(as_json, result.to_dict(), result.table(), *result.lines())
