"""`parsim simulate`: one plan, one step, task by task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from parsim.commands.folder import describe, save_prediction, write_pages
from parsim.commands.output import JsonFlag, Overrides, RunFile, print_json, print_tables, progress
from parsim.commands.question import fixed_plan, problem_of, search_plans
from parsim.commands.run_folder import new_folder
from parsim.config import RunConfig, load_config
from parsim.units import format_seconds

if TYPE_CHECKING:
    from parsim.schedule.evaluate import Evaluation
    from parsim.schedule.problem import Problem


def simulate(
    run_file: RunFile,
    overrides: Overrides = None,
    strategy: Annotated[str | None, typer.Option(help="Instead of the file's: the same as --set plan.strategy=...")] = None,
    engine: Annotated[Literal["static", "dynamic"], typer.Option(help="numba arrays, or SimPy processes.")] = "static",
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Keep config, plan, timeline, trace and report.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Simulate one step of the best plan of a strategy: step time, breakdown, memory, critical path."""
    from parsim.analyze.critical_path import critical_path
    from parsim.report.chrome_trace import task_label
    from parsim.report.tables import breakdown_table, memory_table, strategy_table

    changes = [*(overrides or []), *([f"plan.strategy={json.dumps(strategy)}"] if strategy else [])]
    config = load_config(run_file, changes)
    folder = None if out is None else new_folder(out, "")
    with progress(f"Loading {config.model.name} and {config.cluster.profile}"):
        problem = problem_of(config)
    with progress(f"Simulating {config.plan.strategy}"):
        evaluation = best_evaluation(problem, config, engine=engine)
    path = critical_path(evaluation.graph, evaluation.timeline)
    labels = [task_label(evaluation.graph.tasks[index]) for index in path]
    document = describe(evaluation) | {"engine": engine, "critical_path": labels}
    if folder is not None:
        save_prediction(folder, config, problem, evaluation)
        write_pages(folder)
    if as_json:
        print_json(document)
        return
    title = f"{problem.model.name} on {problem.cluster.name}, batch {problem.global_batch}"
    print_tables(
        [
            strategy_table([evaluation.result.to_dict()], title=title),
            breakdown_table(document["breakdown"]),
            memory_table(document["memory"]),
        ]
    )
    print(f"Critical path: {len(labels)} of {len(evaluation.graph.tasks)} tasks; first {', '.join(labels[:4])}")
    print(f"One step alone: {format_seconds(evaluation.timeline.makespan_s)}")
    if folder is not None:
        print(f"Report: {folder.report}; trace for Perfetto: {folder.trace}")


def best_evaluation(problem: Problem, config: RunConfig, *, engine: str = "static") -> Evaluation:
    """The plan that [plan] fixes, or the best of the strategy it names; the fastest that does not fit if none fits."""
    from parsim.schedule.evaluate import evaluate

    plan = fixed_plan(problem, config)
    if plan is not None:
        return evaluate(problem, plan, engine=engine, reason="the plan that was asked for")
    found = search_plans(problem, config)
    best = found.chosen or found.candidates[0]
    if engine == "static":
        return best
    return evaluate(problem, best.result.plan, engine=engine, reason=best.result.reason)
