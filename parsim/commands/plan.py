"""`parsim plan`: ranked plans with intervals and memory, the choice, and why the others lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from parsim.errors import ScheduleError
from parsim.files import write_text_atomically

if TYPE_CHECKING:
    from parsim.workflow.relaxed.to_target import TargetRanking


def plan(
    asked: Asked = "",
    cluster: OnCluster = None,
    gpus: GpusOption = None,
    network: NetworkOption = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    tokens: TokensOption = None,
    samples: SamplesOption = None,
    overrides: Overrides = None,
    allow_code: AllowCode = False,
    top: Annotated[int | None, typer.Option(min=1, help="Show the K fastest plans instead of each family's best.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="PLAN.json", help="Write the chosen plan here.")] = None,
    certify: Annotated[
        bool, typer.Option("--certify", help="Solve the placement problem with a MILP solver too, and show both optima.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Plan a config or script of Megatron-LM, NeMo or torchtitan."),
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
        typer.Option("--curves", metavar="FILE.html", help="With --target-accuracy: draw accuracy over simulated seconds."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Rank plans, choose one, and say why the others lost."""
    from parsim.workflow.large.faster import parse_faster
    from parsim.workflow.public.functions import plan as find_plan

    aim = None if faster is None else parse_faster(faster)
    if target_accuracy is None and (rules or curves or most_steps):
        raise typer.BadParameter("--rule, --most-steps and --curves go with --target-accuracy")
    if target_accuracy is not None:
        from parsim.workflow.relaxed.to_target import MOST_STEPS, asked_rules

        asked_rules(target_accuracy, rules or ())  # before minutes of planning
    where, changes = on_gpus(cluster, gpus, network, overrides, seq=seq, tokens=tokens, samples=samples)
    if (config is None) == (not asked):
        raise typer.BadParameter("give one question: a run file, a model, or --config FILE of Megatron-LM, NeMo or torchtitan")
    answer = find_plan(asked if config is None else config, cluster=where, global_batch=batch, overrides=changes, top=top)
    document = answer.to_dict()
    if certify:
        document["certificate"] = answer.certificate()
    ranking = None
    if target_accuracy is not None:
        ranking = answer.to_target(target_accuracy, rules=rules or None, most_steps=most_steps or MOST_STEPS)
        _keep(ranking, document, curves)
    would = None if aim is None else answer.what_would(aim)
    if would is not None:
        document["what_would"] = would.to_dict()
    if out is not None:
        if document["chosen"] is None:
            raise ScheduleError(f"no plan fits, so {out} is not written; {document['candidates'][0]['reason']}")
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(out, json.dumps(document["chosen"]["plan"], indent=1) + "\n")
    if as_json:
        print_json(document)
        return
    print("\n".join(answer.heading()), end="\n\n")
    print_tables([answer.report()])
    for told in (answer, would, ranking):
        for line in [] if told is None else told.lines():
            print(line)
    if certify:
        from parsim.schedule.placement.certificate import certificate_text

        print(certificate_text(document["certificate"]))


def _keep(ranking: TargetRanking, document: dict[str, Any], curves: Path | None) -> None:
    """Put a ranking by time to accuracy into the document, and its curves into a page."""
    document["to_target"] = ranking.to_dict()
    if curves is not None:
        curves.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(curves, ranking.figure().to_html(include_plotlyjs=True))
