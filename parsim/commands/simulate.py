"""`parsim simulate`: one plan, one step, task by task."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from parsim.commands.output import JsonFlag, Overrides, RunFile, print_json, print_tables, progress
from parsim.units import format_seconds
from parsim.workflow.config import load_config


def simulate(
    run_file: RunFile,
    overrides: Overrides = None,
    strategy: Annotated[str | None, typer.Option(help="Instead of the file's: the same as --set plan.strategy=...")] = None,
    engine: Annotated[Literal["static", "dynamic"], typer.Option(help="numba arrays, or SimPy processes.")] = "static",
    scenario: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Stragglers, links, failures; with --engine dynamic. See the README.")
    ] = None,
    whole_run: Annotated[bool, typer.Option("--whole-run", help="To the end of training, by the scenario's [run].")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep config, plan, timeline, trace and report.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Simulate one step of the best plan of a strategy: step time, breakdown, memory, critical path."""
    from parsim.analyze.critical_path import critical_path
    from parsim.commands.scenario import check_options, play, scenario_tables
    from parsim.predict.evaluate import MANY_RANKS, evaluate
    from parsim.report.chrome_trace import task_label
    from parsim.report.tables import breakdown_table, memory_table, strategy_table
    from parsim.workflow.ask import answer, with_every_rank
    from parsim.workflow.run_folder import new_folder, write_json
    from parsim.workflow.write_prediction import describe, write_prediction

    check_options(engine, scenario, whole_run)
    changes = [*(overrides or []), *([f"plan.strategy={json.dumps(strategy)}"] if strategy else [])]
    config = load_config(run_file, changes)
    folder = None if out is None else new_folder(out, run_file.stem)
    with progress(f"Simulating {config.model.name} on {config.cluster.profile}"):
        asked = answer(config)
        if engine != "static":
            result = asked.evaluation.result
            asked = replace(asked, evaluation=evaluate(asked.problem, result.plan, engine=engine, reason=result.reason))
        elif asked.evaluation.result.plan.world_size <= MANY_RANKS:
            asked = with_every_rank(asked)
        happening = None
        if scenario is not None:
            asked, happening = play(asked, scenario, whole_run)
    evaluation = asked.evaluation
    path = critical_path(evaluation.graph, evaluation.timeline)
    labels = [task_label(evaluation.graph.tasks[index]) for index in path]
    document = describe(evaluation) | {"engine": engine, "critical_path": labels}
    if happening is not None:
        document["scenario"] = happening
    if folder is not None:
        write_prediction(folder, asked)
        if happening is not None:
            write_json(folder.path / "scenario.json", happening)
    if as_json:
        print_json(document)
        return
    problem = asked.problem
    title = f"{problem.model.name} on {problem.cluster.name}, batch {problem.global_batch}"
    print_tables(
        [
            strategy_table([evaluation.result.to_dict()], title=title),
            breakdown_table(document["breakdown"]),
            memory_table(document["memory"]),
            *([] if happening is None else scenario_tables(happening)),
        ]
    )
    print(f"Critical path: {len(labels)} of {len(evaluation.graph.tasks)} tasks, from {', '.join(labels[:3])}")
    print(f"One step alone: {format_seconds(evaluation.timeline.makespan_s)}; in a row, steps overlap")
    if folder is not None:
        print(f"Report: {folder.report}; trace for Perfetto: {folder.trace}")
