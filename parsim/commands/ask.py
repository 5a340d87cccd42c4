"""`parsim plan`: ranked plans with intervals and memory, the choice, and why the others lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from parsim.app.config import Granularity
from parsim.app.config_text import parse_numbers, scalar_pairs
from parsim.app.run_folder import new_folder, write_json
from parsim.commands.output import (
    AllowCode,
    Asked,
    BatchOption,
    GpusOption,
    JsonFlag,
    NetworkOption,
    OnCluster,
    Overrides,
    PlotOption,
    SamplesOption,
    SeqOption,
    TokensOption,
    TuneOption,
    complete_model,
    on_gpus,
    page_path,
    tell,
)
from parsim.costs.loading import MeasuredLoading
from parsim.errors import ScheduleError
from parsim.files import write_text_atomically
from parsim.plans.plan import plan_in_words
from parsim.report.tables import alone, breakdown_table, cost_table, memory_table, price_tables, strategy_table


def plan(
    asked: Asked = "",
    cluster: OnCluster = None,
    gpus: GpusOption = None,
    network: NetworkOption = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    tokens: TokensOption = None,
    samples: SamplesOption = None,
    tune: TuneOption = None,
    overrides: Overrides = None,
    allow_code: AllowCode = False,
    top: Annotated[int | None, typer.Option(min=1, help="Show the K fastest plans instead of each family's best.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="PLAN.json", help="Write the chosen plan here.")] = None,
    certify: Annotated[
        bool, typer.Option("--certify", help="Solve the placement problem with a MILP solver too, and show both optima.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Plan a config or script of a framework (docs/readers.md)."),
    ] = None,
    faster: Annotated[
        str | None,
        typer.Option("--faster", metavar="20%", help="Search for changes of the cluster that make a step this much faster."),
    ] = None,
    target_accuracy: Annotated[
        float | None,
        typer.Option(
            "--target-accuracy", metavar="A", help="Rank synchronous and relaxed training by time to this accuracy, e.g. 0.95."
        ),
    ] = None,
    rules: Annotated[
        list[str] | None,
        typer.Option("--rule", metavar="RULE", help='With --target-accuracy: compare these, e.g. "average/8". Repeatable.'),
    ] = None,
    most_steps: Annotated[
        int | None,
        typer.Option("--most-steps", min=5, metavar="N", help="With --target-accuracy: stop a training after N (2000)."),
    ] = None,
    curves: Annotated[
        Path | None,
        typer.Option(
            "--curves",
            metavar="FILE.html",
            callback=page_path,
            help="With --target-accuracy: draw accuracy over simulated seconds.",
        ),
    ] = None,
    plot: PlotOption = None,
    largest: Annotated[
        Literal["batch", "seq", "model"] | None,
        typer.Option("--largest", help="Find the largest batch, sequence or model (layers) that fits with 95%."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say where every millisecond of the chosen plan comes from.")
    ] = False,
    must_fit: Annotated[
        bool,
        typer.Option("--fail-if-nothing-fits", help="End with exit status 3 if no plan fits, 4 if none fits with 95%."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Rank plans, choose one, and say why the others lost."""
    from parsim.app.check import EXIT_STATUS, parse_faster, verdict_of, what_would
    from parsim.app.functions import plan as find_plan

    aim = None if faster is None else parse_faster(faster)
    if target_accuracy is None and (rules or curves or most_steps):
        raise typer.BadParameter("--rule, --most-steps and --curves go with --target-accuracy")
    if target_accuracy is not None:
        from parsim.app.relaxed import MOST_STEPS, asked_rules

        asked_rules(target_accuracy, rules or ())  # before minutes of planning
    where, changes = on_gpus(cluster, gpus, network, overrides, seq=seq, tokens=tokens, samples=samples, tune=tune)
    if (config is None) == (not asked):
        raise typer.BadParameter("give one question: a model and --gpus COUNTxGPU, a run file, or --config FILE of a framework")
    answer = find_plan(
        asked if config is None else config, cluster=where, global_batch=batch, overrides=changes, top=top, largest=largest
    )
    document = answer.to_dict()
    if certify:
        document["certificate"] = answer.certificate()
    ranking = None
    if target_accuracy is not None:
        ranking = answer.to_target(target_accuracy, rules=rules or None, most_steps=most_steps or MOST_STEPS)
        document["to_target"] = ranking.to_dict()
        if curves is not None:
            curves.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(curves, ranking.figure().to_html(include_plotlyjs=True))
    would = None if aim is None else what_would(answer, aim)
    if would is not None:
        document["what_would"] = would.to_dict()
    if out is not None:
        if document["chosen"] is None:
            raise ScheduleError(f"no plan fits, so {out} is not written; {document['candidates'][0]['reason']}")
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(out, json.dumps(document["chosen"]["plan"], indent=1) + "\n")
    if plot is not None:
        answer.plot(plot)
    explanation = answer.prediction.explain() if explain else None
    if explanation is not None:
        document["explanation"] = explanation.to_dict()
    status = EXIT_STATUS[verdict_of(answer.prediction.fit_probability)] if must_fit else 0
    lines = [line for part in (answer, would, ranking) if part is not None for line in part.lines()]
    if certify:
        from parsim.search.placement.certificate import certificate_text

        lines.append(certificate_text(document["certificate"]))
    if explanation is not None:
        lines.append(f"\n{explanation}")
    tell(as_json, document, *answer.heading(), "", answer.report(), *lines, picture=plot)
    raise typer.Exit(status)


# `parsim check`: fits or not, how fast, and what would help; the exit status says it to a script.


def check(
    asked: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG|RUN.toml|MODEL...",
            autocompletion=complete_model,
            help="Configs of a framework, run files, or models by name; those that name no cluster take --gpus.",
        ),
    ],
    cluster: OnCluster = None,
    gpus: GpusOption = None,
    network: NetworkOption = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    tune: TuneOption = None,
    overrides: Overrides = None,
    allow_code: AllowCode = False,
    as_json: JsonFlag = False,
) -> None:
    """Check a training before it is launched: does it fit, how fast is it, and what would help.

    Exit status: 0 all fit with 95%, 3 one does not fit, 4 for one it is uncertain; 1 and 2 are errors.
    """
    from parsim.app.check import worst_status
    from parsim.app.functions import check as checked

    where, changes = on_gpus(cluster, gpus, network, overrides, seq=seq, tune=tune)
    found = [checked(name, cluster=where, global_batch=batch, overrides=changes) for name in asked]
    documents = [each.to_dict() for each in found]
    tell(as_json, documents[0] if len(found) == 1 else {"checks": documents}, "\n\n".join(map(str, found)))
    raise typer.Exit(worst_status(found))


# `parsim simulate`: one plan, one step, task by task.


def simulate(
    asked: Asked,
    cluster: OnCluster = None,
    gpus: GpusOption = None,
    network: NetworkOption = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    tokens: TokensOption = None,
    samples: SamplesOption = None,
    tune: TuneOption = None,
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
    plot: PlotOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Simulate one step of the best plan of a strategy: step time, breakdown, memory, critical path."""
    from parsim.app.ask import scenario_tables
    from parsim.app.functions import simulate as predict
    from parsim.app.question import assumed_text, loss_note, loss_text
    from parsim.app.write_folder import write_prediction

    folder = None if out is None else new_folder(out, "")
    where, changes = on_gpus(cluster, gpus, network, overrides, seq=seq, tokens=tokens, samples=samples, tune=tune)
    prediction = predict(
        asked,
        cluster=where,
        global_batch=batch,
        strategy=strategy,
        engine=engine,
        scenario=scenario,
        whole_run=whole_run,
        overrides=changes,
    )
    problem, evaluation, played = prediction.problem, prediction.evaluation, prediction.scenario
    document, labels = prediction.to_dict(), prediction.critical_path()
    document |= {"engine": engine, "critical_path": labels, "assumed": prediction.assumed}
    document |= {"loss": problem.model.loss or None, "loss_note": loss_note(problem.model) or None}
    if played is not None:
        document["scenario"] = played
    if folder is not None:
        write_prediction(folder, prediction)
        if played is not None:
            write_json(folder.path / "scenario.json", dict(played))
    if plot is not None:
        prediction.plot(plot)
    question = f"{problem.model.name} on {problem.cluster.name}, global batch {problem.global_batch}"
    quoted = (prediction.quoted, prediction.samples_run, prediction.step_size)
    tell(
        as_json,
        document,
        f"{question}: {plan_in_words(prediction.plan)}, {prediction.headline()}.\n",
        strategy_table([alone(prediction.result.to_dict())], title=""),
        breakdown_table(document["breakdown"]),
        memory_table(document["memory"]),
        *([] if played is None else scenario_tables(dict(played))),
        f"Critical path: {len(labels)} of {evaluation.compiled.size} tasks, from {', '.join(labels[:3])}",
        evaluation.alone_text(),
        *(line for figures in quoted if figures is not None for line in figures.lines()),
        *([problem.loading.text()] if isinstance(problem.loading, MeasuredLoading) else []),
        loss_text(problem.model),
        *([assumed_text(prediction.assumed)] if prediction.assumed else []),
        *([] if folder is None else [f"Report: {folder.report}; trace for Perfetto: {folder.trace}"]),
        picture=plot,
    )


# `parsim cost`: seconds of a collective, or of every component of a model, on a profile.


def cost(
    profile: Annotated[str, typer.Argument(help="A shipped profile by name, or the path of one.")],
    collective: Annotated[str | None, typer.Option(help="all_reduce, all_gather, reduce_scatter, ..., or send_recv.")] = None,
    size_bytes: Annotated[int | None, typer.Option(help="Bytes of the whole array, as nccl-tests counts them.")] = None,
    ranks: Annotated[
        str | None, typer.Option(help="Devices of the group, e.g. 0,1,2, numbered over all nodes. Default: all.")
    ] = None,
    nodes: Annotated[int, typer.Option(help="Number of machines of the profile, connected by --network.")] = 1,
    network: Annotated[str | None, typer.Option(help="A shipped network by name, or the path of one.")] = None,
    model: Annotated[str | None, typer.Option(help="Price every component of this model instead.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples per rank.")] = None,
    args: Annotated[list[str] | None, typer.Option("--arg", metavar="KEY=VALUE", help="An argument of the model.")] = None,
    input_shape: Annotated[str | None, typer.Option(help="Shape of one sample, e.g. 3,224,224.")] = None,
    granularity: Annotated[Granularity, typer.Option(help="Size of the model's components.")] = "block",
    ways: Annotated[int | None, typer.Option(help="Price one of N tensor-parallel shards of each component too.")] = None,
    precision: Annotated[str, typer.Option(help="Precision of the computation.")] = "fp32",
    optimizer: Annotated[str, typer.Option(help="Optimizer to price.")] = "sgd_momentum",
    explain: Annotated[bool, typer.Option("--explain", help="Print the terms of every price and their sources too.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Price a collective, or every component of a model."""
    from parsim.app.prices import cost as price

    if (collective is None) == (model is None):
        raise typer.BadParameter("give either --collective with --size-bytes, or --model with --batch")
    if collective is not None and size_bytes is None:
        raise typer.BadParameter("--collective needs --size-bytes")
    if model is not None and batch is None:
        raise typer.BadParameter("--model needs --batch")
    if ways is not None and model is None:
        raise typer.BadParameter("--ways needs --model")
    prices = price(
        profile,
        collective=collective,
        size_bytes=size_bytes,
        ranks=None if ranks is None else parse_numbers("--ranks", ranks),
        nodes=nodes,
        network=network,
        model=model,
        batch=batch,
        args=dict(scalar_pairs(args or [])),
        input_shape=None if input_shape is None else parse_numbers("--input-shape", input_shape),
        granularity=granularity,
        ways=ways,
        precision=precision,
        optimizer=optimizer,
    )
    table = cost_table(prices.rows, title=prices.title)
    tell(as_json, prices.to_dict(), table, *(price_tables(prices.rows) if explain else ()))
