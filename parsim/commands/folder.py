"""What a simulation leaves in a run folder, and the pages drawn from any run folder (`parsim.commands.run_folder` names its files)."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from parsim.commands.run_folder import RunFolder, write_json
from parsim.config import RunConfig, load_config
from parsim.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from parsim.graph.taskgraph import TaskGraph
    from parsim.plan.plan import Plan
    from parsim.report.html import ReportData
    from parsim.schedule.evaluate import Evaluation
    from parsim.schedule.problem import Problem
    from parsim.timeline import Timeline


def save_prediction(folder: RunFolder, config: RunConfig, problem: Problem, evaluation: Evaluation) -> None:
    """The question, the predicted result and the simulated timeline."""
    from parsim.execute.environment import describe_environment

    folder.write_question(config, problem.model, evaluation.result.plan, problem.cluster.profile)
    write_json(folder.result, describe(evaluation))
    write_json(folder.environment, describe_environment())
    evaluation.timeline.save(folder.predicted_timeline)


def describe(evaluation: Evaluation) -> dict[str, Any]:
    """PlanResult.to_dict() with `breakdown` and `memory` per rank."""
    return evaluation.result.to_dict() | {
        "breakdown": [asdict(rank) | {"step_s": rank.step_s} for rank in evaluation.breakdown],
        "memory": [
            {
                "rank": rank.rank,
                "lines": dict(rank.lines),
                "total_bytes": rank.total_bytes,
                "limit_bytes": rank.limit_bytes,
                "fits": rank.fits,
            }
            for rank in evaluation.memory
        ],
    }


def write_pages(folder: RunFolder) -> Path:
    """Draw trace.json and report.html from the folder's files; returns the path of the report.

    Raises:
        ConfigError: the folder is not one that a simulation or a run left, or a file in it is broken.
    """
    from parsim.report.chrome_trace import save_chrome_trace
    from parsim.report.html import write_report

    if not folder.plan.is_file() or not folder.model.is_file():
        raise ConfigError(
            f"{folder.path} holds no {folder.plan.name} and {folder.model.name}, so it is no run folder; give one that "
            "`parsim run` or `parsim simulate --out` left"
        )
    from parsim.graph.lower import lower
    from parsim.model.model import Model
    from parsim.plan.plan import Plan, check_plan

    model, plan = Model.load(folder.model), Plan.load(folder.plan)
    check_plan(plan, model)
    graph = lower(plan, model)
    timelines = _timelines(folder)
    if timelines:
        save_chrome_trace(folder.trace, graph, timelines)
    write_report(_report_data(folder, model.name, plan, graph, timelines), folder.report)
    return folder.report


def _timelines(folder: RunFolder) -> dict[str, Timeline]:
    """ "predicted" and "measured", as far as the folder holds them."""
    from parsim.timeline import Timeline

    found: dict[str, Timeline] = {}
    for path in (folder.predicted_timeline, folder.timeline):
        if path.is_file():
            try:
                timeline = Timeline.load(path)
            except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path} is broken ({error}); remove it, or run again") from error
            found["measured" if timeline.source == "measured" else "predicted"] = timeline
    return found


def _report_data(folder: RunFolder, model: str, plan: Plan, graph: TaskGraph, timelines: dict[str, Timeline]) -> ReportData:
    from parsim.analyze.breakdown import breakdown
    from parsim.execute.environment import machine_line
    from parsim.report.html import ReportData, ReportRun, ReportSection

    result, environment = _json(folder.result), _json(folder.environment)
    comparison = result.get("comparison") or {}
    config = load_config(folder.config) if folder.config.is_file() else None
    predicted, measured = timelines.get("predicted"), timelines.get("measured")
    run = ReportRun(
        label=plan.strategy,
        plan=plan.to_dict(),
        graph=graph if timelines else None,
        predicted=predicted,
        measured=measured,
        predicted_breakdown=result.get("breakdown", ()),
        measured_breakdown=[asdict(rank) for rank in breakdown(graph, measured)] if measured is not None else (),
        memory=result.get("memory", ()),
        measured_memory_bytes=[row["measured_bytes"] for row in comparison.get("memory", ())],
        comparison=comparison or None,
        absent={} if measured is not None else {"measured": "this plan was simulated and not run"},
    )
    where = _json(folder.profile).get("name", "") if config is None else config.cluster.profile
    section = ReportSection(
        model=model,
        title=f"{model} on {where}",
        text=f"{plan.summary()}; global batch {plan.global_batch}.",
        results=[result] if result else (),
        chosen=result or None,
        runs=(run,),
    )
    facts = [("model", model), ("cluster", where), ("plan", plan.summary())]
    if environment:
        facts += [("machine", machine_line(environment)), ("system", str(environment["system"]))]
        facts += [(name, str(version)) for name, version in environment["versions"].items()]
    return ReportData(title=f"{model} under {plan.summary()}", facts=facts, sections=(section,))


def _json(path: Path) -> dict[str, Any]:
    """The document, or {} where the file is absent."""
    if not path.is_file():
        return {}
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}); remove it, or run again") from error
    return document
