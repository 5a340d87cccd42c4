"""Write a simulation into a run folder, and draw any run folder's pages again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parsim.workflow.folders.run_folder import RunFolder, write_json
from parsim.workflow.public.prediction import describe

if TYPE_CHECKING:
    from parsim.workflow.public.prediction import Prediction


def write_prediction(folder: RunFolder, asked: Prediction) -> None:
    """The question, result.json, predicted-timeline.json.gz, trace.json and report.html of a plan that was not run."""
    from parsim.execute.processes.environment import describe_environment
    from parsim.workflow.folders.write_report import write_run_files

    evaluation, problem = asked.evaluation, asked.problem
    folder.write_question(
        asked.config, problem.model, evaluation.result.plan, problem.cluster.profile, problem.history, problem.loading
    )
    write_json(folder.result, describe(evaluation))
    write_json(folder.environment, describe_environment())
    write_run_files(folder, asked)


def redraw(folder: RunFolder) -> None:
    """trace.json and report.html of a run or a simulation, priced anew from the profile and plan that lie in the folder.

    Raises:
        ConfigError: it is not a run folder.
    """
    from parsim.workflow.ask import ask_again, judge, measured, reopen
    from parsim.workflow.folders.record_validation import diagnosed
    from parsim.workflow.folders.write_report import write_run_files

    if not folder.job.is_file():
        write_run_files(folder, ask_again(folder))
        return
    folder, asked, name = reopen(folder.path)
    seen = measured(folder, name, asked.evaluation)
    comparison = judge(asked.problem, asked.evaluation, seen)
    write_run_files(folder, asked, seen, comparison, diagnosed(asked, seen, comparison))
