"""The Plan of a row of published runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from experiments.published.blanks import Batch, CannotExpressError, Split, States
from experiments.published.rows import Row
from experiments.published.rules import Framework
from parsim.model.catalogue.sublayers import Shape
from parsim.model.model import Model
from parsim.plans.layouts import BATCH, Placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import BY_OPERATOR, Plan
from parsim.plans.stages import stages_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A row with its blanks filled. ep: ways of expert parallelism. chunks: of an interleaved order, per rank."""

    row: Row
    framework: Framework
    shape: Shape
    split: Split
    batch: Batch
    states: States
    ep: int
    chunks: int


def plan_of(model: Model, given: Given) -> Plan:
    """The plan.

    Raises:
        CannotExpressError: if the layers do not divide over the stages.
    """
    split, framework, zero = given.split, given.framework, given.states.zero
    stages = _stages(model, given)
    mesh = Mesh(pp=split.pp, dp=split.dp, tp=split.tp, cp=split.cp, ep=given.ep)
    copies = mesh.copies
    order = "interleaved" if given.chunks > 1 else "1f1b"
    names = [component.name for component in model.components]
    again, segments = _recomputed(stages, names, given)
    return Plan(
        strategy="custom",
        mesh=mesh,
        stages=stages_of(
            mesh,
            stages,
            partial(_placement, model=model, tp=split.tp) if split.tp > 1 else None,
            order=order,
            chunks=given.chunks,
        ),
        global_batch=given.batch.size,
        microbatches=given.batch.per_replica // given.batch.micro,
        pipeline_order=order,
        bucket_bytes=_bucket_bytes(model, given),
        zero_stage=zero if copies > 1 else 0,
        recompute=again,
        segments=segments,
        blocking_transfers=framework.blocking_transfers and split.pp > 1,
        scatter_gather=framework.scatter_gather and split.pp > 1 and split.tp > 1,
        backward_prefetch=framework.backward_prefetch or zero != 3 or copies == 1,
        tensor_overlap=framework.tensor_overlap and given.states.sequence and split.tp > 1,
        tensor_backward_overlap=framework.tensor_backward_overlap and split.tp > 1,
        clip_gradients=framework.clip,
        gather_ahead=framework.gather_ahead and zero == 1 and copies > 1,
    )


def _recomputed(
    stages: Sequence[Sequence[str]], names: Sequence[str], given: Given
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Components that are recomputed one by one, and segments."""
    recompute, framework = given.states.recompute, given.framework
    every_second = recompute == "half" or (recompute == "selective" and framework.alternate)
    if framework.software.early_stop and given.split.tp == 1 and (recompute == "full" or every_second):
        layers = [name for name in names if name.startswith("h.")]
        return tuple(BY_OPERATOR + name for name in (layers[::2] if every_second else layers)), ()
    if recompute == "full" and framework.repeats_sums:
        return (), _segments(stages)
    if recompute == "full":
        return tuple(name for name in names if name.startswith("h.")), ()
    if every_second:
        return (), _segments(stages)[::2]
    if recompute == "selective":
        return tuple(name for name in names if name.endswith(".core")), ()
    return (), ()


def _bucket_bytes(model: Model, given: Given) -> int:
    """Under ZeRO 3 a bucket per layer."""
    if given.states.zero != 3:
        return given.framework.bucket_bytes
    largest = max(sum(p.size_bytes for p in component.parameters) for component in model.components[1:-1])
    return max(1, largest // max(1, given.split.tp) - 1)


def _segments(stages: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """The components of each layer."""
    found: dict[str, list[str]] = {}
    for stage in stages:
        for name in stage:
            if name.startswith("h."):
                found.setdefault(name.rsplit(".", 1)[0] if name.count(".") > 1 else name, []).append(name)
    return tuple(tuple(names) for names in found.values())


def _placement(name: str, model: Model, tp: int) -> Placement:
    rule = model.component(name).shardings[0].rule if model.component(name).shardings else ""
    return Placement("shard", rule=rule, ways=tp) if rule else BATCH


def _stages(model: Model, given: Given) -> list[tuple[str, ...]]:
    """Stages of equal numbers of layers, embedding and head beside them; or the numbers that the row's notes list.

    Where the layers do not divide, embedding and head count as a layer each, as in models that were sized for that.
    """
    shape, row, pp, chunks = given.shape, given.row, given.split.pp, given.chunks
    number = pp * chunks
    listed = re.search(r"layers per stage \[([\d, ]+)\]", row.notes)
    if listed and chunks == 1 and len(parts := [int(text) for text in listed[1].split(",")]) == pp:
        counts = list(parts)
        extra = sum(counts) - shape.layers
        counts[0] -= extra - extra // 2
        counts[-1] -= extra // 2
    elif shape.layers % number == 0:
        counts = [shape.layers // number] * number
    else:
        whole = shape.layers + (2 if (shape.layers + 2) % number == 0 or shape.layers % number > number // 2 else 0)
        counts = [whole // number + (1 if place < whole % number else 0) for place in range(number)]
        if whole != shape.layers:
            counts[0] -= 1
            counts[-1] -= 1
    if min(counts) < 0 or sum(counts) != shape.layers or (min(counts) == 0 and number > 2 and 0 in counts[1:-1]):
        raise CannotExpressError(f"{shape.layers} layers do not divide over {number} stages: {counts}")
    stages: list[list[str]] = [[] for _ in range(number)]
    for component in model.components:
        name = component.name
        layer = re.match(r"h\.(\d+)", name)
        if name == "embed":
            stages[0].append(name)
        elif layer is None:
            stages[-1].append(name)
        else:
            stages[_place_of(int(layer[1]), counts)].append(name)
    return [tuple(stage) for stage in stages]


def _place_of(layer: int, counts: list[int]) -> int:
    for place, count in enumerate(counts):
        if layer < count:
            return place
        layer -= count
    raise CannotExpressError(f"layer {layer} beyond {sum(counts)}")
