"""What a simulation leaves in a run folder, and how any run folder's pages are drawn again."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from parsim.workflow.run_folder import RunFolder, write_json

if TYPE_CHECKING:
    from parsim.predict.evaluate import Evaluation
    from parsim.workflow.ask import Answer


def describe(evaluation: Evaluation) -> dict[str, Any]:
    """PlanResult.to_dict() with `breakdown` and `memory` per rank."""
    return evaluation.result.to_dict() | {
        "breakdown": [asdict(rank) | {"step_s": rank.step_s} for rank in evaluation.breakdown],
        "memory": [
            {
                "rank": rank.rank,
                "lines": dict(rank.lines),
                "spreads": {name: {"p05_bytes": low, "p95_bytes": high} for name, low, high in rank.spreads},
                "total_bytes": rank.total_bytes,
                "p05_bytes": rank.low_bytes,
                "p95_bytes": rank.high_bytes,
                "limit_bytes": rank.limit_bytes,
                "fits": rank.fits,
            }
            for rank in evaluation.memory
        ],
    }


def write_prediction(folder: RunFolder, asked: Answer) -> None:
    """The question, result.json, predicted-timeline.json.gz, trace.json and report.html of a plan that was not run."""
    from parsim.execute.processes.environment import describe_environment
    from parsim.workflow.write_report import write_run_files

    evaluation, problem = asked.evaluation, asked.problem
    folder.write_question(asked.config, problem.model, evaluation.result.plan, problem.cluster.profile, problem.history)
    write_json(folder.result, describe(evaluation))
    write_json(folder.environment, describe_environment())
    write_run_files(folder, asked)


def redraw(folder: RunFolder) -> None:
    """trace.json and report.html of a run or a simulation, priced anew from the profile and plan that lie in the folder.

    Raises:
        ConfigError: it is no run folder.
    """
    from parsim.workflow.ask import ask_again, judge, measured, reopen
    from parsim.workflow.write_report import write_run_files

    if not folder.job.is_file():
        write_run_files(folder, ask_again(folder))
        return
    folder, asked, name = reopen(folder.path)
    seen = measured(folder, name, asked.evaluation)
    write_run_files(folder, asked, seen, judge(asked.problem, asked.evaluation, seen))
