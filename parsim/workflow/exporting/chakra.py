"""Chakra: the predicted step as execution traces, one file per rank, and the groups of ranks that ASTRA-sim asks for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from parsim.errors import ConfigError, GraphError
from parsim.exporters.chakra_trace import GroupNames, NodeCost, rank_trace
from parsim.files import write_atomically, write_text_atomically
from parsim.model.model import Model
from parsim.model.shard.narrow import narrow
from parsim.program.task import Task
from parsim.work import Compute, Phase
from parsim.workflow.exporting.request import Exported, ExportRequest

if TYPE_CHECKING:
    from parsim.predict.evaluate import Evaluation

NAME = "Chakra"
FOLDER, PREFIX = "chakra", "parsim"
MOST_RANKS = 1024
BACKWARD = {"": 2.0, "input": 1.0, "weight": 1.0, "none": 0.0}
"""Times its forward, by what an operator's backward computes."""


def write_chakra(request: ExportRequest) -> Exported:
    """Traces PREFIX.RANK.et and comm_groups.json. Raises ConfigError: more than MOST_RANKS ranks, or an unknown collective."""
    if request.plan.world_size > MOST_RANKS:
        raise ConfigError(
            f"{NAME} traces are written for at most {MOST_RANKS:,} ranks, one file each, and the plan has "
            f"{request.plan.world_size:,}; simulate with fewer replicas: --set cluster.nodes=..."
        )
    evaluation = _unfolded(request)
    graph = evaluation.graph
    spans = {span.task: span.end_s - span.start_s for span in evaluation.timeline}
    costs = [_cost(task, spans.get(task.index, 0.0), request.prediction.problem.model) for task in graph.tasks]
    folder = request.target(FOLDER)
    groups = GroupNames()
    try:
        traces = [
            rank_trace(graph, rank, costs, groups, f"parsim: {request.plan.summary()}") for rank in range(graph.world_size)
        ]
    except GraphError as error:
        raise ConfigError(f"{NAME}: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    for rank, content in enumerate(traces):
        write_atomically(folder / f"{PREFIX}.{rank}.et", lambda handle, content=content: handle.write(content))  # type: ignore[misc]
    write_text_atomically(folder / "comm_groups.json", json.dumps(groups.to_dict(), indent=1) + "\n")
    return Exported(
        format=request.format,
        file=folder,
        summary=(
            f"Chakra traces of {graph.world_size} ranks, {len(graph.tasks)} tasks: {folder}/{PREFIX}.RANK.et; groups of ranks: "
            f"{folder}/comm_groups.json"
        ),
        left_out={
            "memory": "nodes have the bytes that they move, and not those in memory",
            "overlap": "durations are those of the predicted step, in which tasks that overlap slow each other",
            "intervals": "durations are medians",
            "arithmetic": "num_ops and tensor_size are those of whole components; the optimizer, clipping and parts have none",
        },
        found={"ranks": graph.world_size, "tasks": len(graph.tasks), "groups": len(groups.numbers)},
    )


def _unfolded(request: ExportRequest) -> Evaluation:
    """Every rank has a file, so that ranks which do the same are simulated one by one."""
    found = request.prediction.evaluation
    if found.folding.ranks == tuple(range(request.plan.world_size)):
        return found
    from parsim.predict.evaluate import evaluate

    return evaluate(request.prediction.problem, request.plan, samples=0, fold=False)


def _cost(task: Task, seconds: float, model: Model) -> NodeCost:
    """Arithmetic and bytes of the operators behind a whole component; other tasks have their duration alone."""
    work = task.work
    if not isinstance(work, Compute) or work.part:
        return NodeCost(seconds=seconds)
    component = narrow(model.component(work.component), work.rule, work.ways)
    flop = moved = 0.0
    for operator in component.operators:
        times = 1.0 if operator.batch == "none" else float(work.samples)
        both = BACKWARD[operator.gradients]
        passes = {Phase.FORWARD: 1.0, Phase.RECOMPUTE: 1.0, Phase.BACKWARD: both}.get(work.phase, both / 2)
        flop += passes * times * operator.forward_flop * operator.count
        moved += passes * (times * operator.activation_bytes + operator.parameter_bytes) * operator.count
    return NodeCost(seconds=seconds, flop=flop, moved_bytes=moved)
