"""`parsim simulate`: one plan, one step, task by task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from parsim.commands.output import (
    AllowCode,
    Asked,
    BatchOption,
    GpusOption,
    JsonFlag,
    NetworkOption,
    OnCluster,
    Overrides,
    SamplesOption,
    SeqOption,
    TokensOption,
    on_gpus,
    print_json,
    print_tables,
)


def simulate(
    asked: Asked,
    cluster: OnCluster = None,
    gpus: GpusOption = None,
    network: NetworkOption = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    tokens: TokensOption = None,
    samples: SamplesOption = None,
    overrides: Overrides = None,
    allow_code: AllowCode = False,
    strategy: Annotated[str | None, typer.Option(help="Strategy, or a plan.json: the same as --set plan.strategy=...")] = None,
    engine: Annotated[
        Literal["static", "dynamic"], typer.Option(help="static: fast, arrays; dynamic: SimPy, takes a --scenario.")
    ] = "static",
    scenario: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Stragglers, links, failures; needs --engine dynamic (docs/scenarios.md)."),
    ] = None,
    whole_run: Annotated[
        bool, typer.Option("--whole-run", help="Simulate the whole training, by the table \\[run] of the scenario.")
    ] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep config, plan, timeline, trace and report.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Simulate one step of the best plan of a strategy: step time, breakdown, memory, critical path."""
    from parsim.costs.loading import MeasuredLoading
    from parsim.plans.words import plan_in_words
    from parsim.report.tables import alone, breakdown_table, memory_table, strategy_table
    from parsim.workflow.folders.run_folder import new_folder, write_json
    from parsim.workflow.folders.write_prediction import write_prediction
    from parsim.workflow.public.functions import simulate as predict
    from parsim.workflow.question import assumed_text, loss_note, loss_text
    from parsim.workflow.simulation import scenario_tables

    folder = None if out is None else new_folder(out, "")
    where, changes = on_gpus(cluster, gpus, network, overrides, seq=seq, tokens=tokens, samples=samples)
    found = predict(
        asked,
        cluster=where,
        global_batch=batch,
        strategy=strategy,
        engine=engine,
        scenario=scenario,
        whole_run=whole_run,
        overrides=changes,
    )
    problem = found.problem
    document, labels, happening = found.to_dict(), found.critical_path(), found.scenario
    document |= {"engine": engine, "critical_path": labels, "assumed": dict(found.assumed)}
    document |= {"loss": problem.model.loss or None, "loss_note": loss_note(problem.model) or None}
    if happening is not None:
        document["scenario"] = happening
    if folder is not None:
        write_prediction(folder, found)
        if happening is not None:
            write_json(folder.path / "scenario.json", dict(happening))
    if as_json:
        print_json(document)
        return
    question = f"{problem.model.name} on {problem.cluster.name}, global batch {problem.global_batch}"
    print(f"{question}: {plan_in_words(found.plan)}, {found.headline()}.", end="\n\n")
    print_tables(
        [
            strategy_table([alone(found.result.to_dict())], title=""),
            breakdown_table(document["breakdown"]),
            memory_table(document["memory"]),
            *([] if happening is None else scenario_tables(dict(happening))),
        ]
    )
    evaluation = found.evaluation
    print(f"Critical path: {len(labels)} of {len(evaluation.graph.tasks)} tasks, from {', '.join(labels[:3])}")
    print(evaluation.alone_text())
    for line in [] if found.quoted is None else found.quoted.lines():
        print(line)
    for line in [] if found.samples_run is None else found.samples_run.lines():
        print(line)
    if isinstance(problem.loading, MeasuredLoading):
        print(problem.loading.text())
    print(loss_text(problem.model))
    if found.assumed:
        print(assumed_text(found.assumed))
    if folder is not None:
        print(f"Report: {folder.report}; trace for Perfetto: {folder.trace}")
