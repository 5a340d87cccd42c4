"""What a simulation leaves in a run folder, and how any run folder's pages are drawn again."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from parsim.commands.run_folder import RunFolder, write_json
from parsim.errors import ConfigError

if TYPE_CHECKING:
    from parsim.commands.workflow import Answer
    from parsim.schedule.evaluate import Evaluation


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


def write_prediction(folder: RunFolder, asked: Answer) -> None:
    """The question, result.json, predicted-timeline.json.gz, trace.json and report.html of a plan that was not run."""
    from parsim.execute.environment import describe_environment

    evaluation, problem = asked.evaluation, asked.problem
    folder.write_question(asked.config, problem.model, evaluation.result.plan, problem.cluster.profile)
    write_json(folder.result, describe(evaluation))
    write_json(folder.environment, describe_environment())
    draw_prediction(folder, asked)


def draw_prediction(folder: RunFolder, asked: Answer) -> None:
    """predicted-timeline.json.gz, trace.json and report.html."""
    from parsim.commands.write_report import report_facts, report_run
    from parsim.report.chrome_trace import chrome_trace
    from parsim.report.html import ReportData, ReportSection, write_report
    from parsim.report.tables import calibration_table

    evaluation, problem = asked.evaluation, asked.problem
    evaluation.timeline.save(folder.predicted_timeline)
    write_json(folder.trace, chrome_trace(evaluation.graph, {"predicted": evaluation.timeline}))
    candidates = [evaluation] if asked.search is None else list(asked.search.candidates)
    section = ReportSection(
        model=problem.model.name,
        title=f"{problem.model.name} on {problem.cluster.name}",
        text=f"Global batch {problem.global_batch}, {problem.optimizer}, {problem.precision}.",
        results=[candidate.result.to_dict() for candidate in candidates],
        chosen=evaluation.result.to_dict(),
        runs=(report_run(evaluation, None, None),),
    )
    data = ReportData(
        title=f"{problem.model.name}: predicted",
        facts=report_facts(),
        summary=(f"Plan {evaluation.result.plan.summary()}.",),
        sections=(section,),
        extra_tables=(calibration_table(problem.cluster.profile),),
    )
    write_report(data, folder.report)


def redraw(folder: RunFolder) -> None:
    """trace.json and report.html of a run or a simulation, priced anew from the profile and plan that lie in the folder.

    Raises:
        ConfigError: it is no run folder.
    """
    if not folder.job.is_file():
        draw_prediction(folder, _asked_again(folder))
        return
    from parsim.commands.workflow import judge, measured, reopen
    from parsim.commands.write_report import write_run_files

    folder, asked, name = reopen(folder.path)
    seen = measured(folder, name, asked.evaluation)
    write_run_files(folder, asked, seen, judge(asked.problem, asked.evaluation, seen))


def _asked_again(folder: RunFolder) -> Answer:
    from parsim.commands.workflow import Answer
    from parsim.hardware.cluster import cluster_from_profile
    from parsim.model.model import Model
    from parsim.plan.plan import Plan
    from parsim.schedule.evaluate import evaluate
    from parsim.schedule.problem import Problem

    config = folder.read_config()
    for path in (folder.model, folder.plan, folder.profile):
        if not path.is_file():
            raise ConfigError(f"{folder.path} holds no {path.name}, so it is no whole run folder; simulate or run again")
    plan = Plan.load(folder.plan)
    problem = Problem(
        model=Model.load(folder.model),
        cluster=cluster_from_profile(folder.read_profile(), config.devices),
        global_batch=plan.global_batch,
        precision=config.training.precision,
        optimizer=config.training.optimizer,
    )
    return Answer(config=config, problem=problem, evaluation=evaluate(problem, plan), search=None)
