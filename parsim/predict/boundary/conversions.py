"""What a rank holds of a value or a gradient while it is converted from one layout to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parsim.graph.plan_index import PlanIndex
from parsim.model.component import Value
from parsim.plans.redistribution import Hop, ValueLayout, conversion
from parsim.predict.kept_activations import VIEWS
from parsim.predict.rank_traffic import local_bytes


def bytes_here(layout: PlanIndex, value: Value, how: ValueLayout, rank: int) -> float:
    """Bytes of one microbatch of a value on a rank; 0 where the rank holds nothing in that layout.

    Args:
        layout: the plan and its model. value: of the model. how: the layout of the value. rank: global number.
    """
    if how.form == "placed" and how.rank != layout.plan.shard_of_rank(rank):
        return 0.0
    return local_bytes(layout, value, how)


def is_view(hop: Hop, shard: int) -> bool:
    """Whether what a tp rank has after the hop lies in what it had before. That holds for pieces of the batch, and for the
    whole of which a rank has sent pieces or copies to the others.

    Args:
        hop: of a conversion. shard: the tp rank.
    """
    return hop.operation in VIEWS or (hop.operation in ("scatter", "broadcast") and shard == hop.source.rank)


def storage_of(hops: Sequence[Hop], made: ValueLayout, shard: int) -> ValueLayout:
    """The layout whose memory the result of the hops lies in on a tp rank.

    Args:
        hops: a conversion. made: what it starts from. shard: the tp rank.
    """
    for hop in reversed(hops):
        if not is_view(hop, shard):
            return hop.target
    return made


def gradient_bytes(layout: PlanIndex, values: Mapping[str, Value], name: str, rank: int) -> tuple[float, float]:
    """Gradients of a component's outputs on a rank as it wants them; and at most, in the fullest step of a conversion to that.

    Args:
        layout: the plan and its model. values: by name, as kept under the plan. name: of the component. rank: global number.
    """
    total = all_wanted = 0.0
    for output in layout.model.component(name).outputs:
        value, wanted = values[output], layout.source[output].gradient
        if value.differentiable:
            steps = [
                _step_bytes(layout, value, hop, rank)
                for reading in layout.readings[output]
                for hop in conversion(reading.ends.gradient, wanted, layout.plan.mesh.tp)
            ]
            all_wanted += local_bytes(layout, value, wanted)
            total += max(local_bytes(layout, value, wanted), *steps, 0.0)
    return all_wanted, total


def converted_for_others(
    layout: PlanIndex, values: Mapping[str, Value], rank: int, waiting: Mapping[str, float]
) -> dict[str, float]:
    """Bytes of gradients that a rank helps to convert for a maker on another tp rank, and of what waits beside them.

    They follow the backward of their reader, so they are there right before that of the component which runs backward next.

    Args:
        layout: the plan and its model. values: by name, as kept under the plan. rank: global number.
        waiting: by component the gradients that wait beside its backward.
    """
    found: dict[str, float] = {}
    if layout.shards_alike:  # every maker is on the rank too, or on another stage
        return found
    names = layout.rank_components(rank)
    for number, name in enumerate(names):
        for value in dict.fromkeys(layout.model.component(name).inputs):
            entry = values[value]
            elsewhere = entry.producer is not None and not layout.runs_on(rank, entry.producer)
            here = layout.stage_of_value[value] == layout.plan.stage_of_rank(rank)
            if entry.differentiable and elsewhere and here and name in layout.differentiable:
                hops = conversion(layout.reads_in(name, value).gradient, layout.source[value].gradient, layout.plan.mesh.tp)
                most = max((_step_bytes(layout, entry, hop, rank) for hop in hops), default=0.0)
                beside = names[max(0, number - 1)]
                found[beside] = max(found.get(beside, 0.0), most + waiting.get(name, 0.0))
    return found


def handed_bytes(layout: PlanIndex, values: Mapping[str, Value], name: str) -> float:
    """Gradients of a component's inputs on a rank that runs it, as it makes them.

    Args:
        layout: the plan and its model. values: by name, as kept under the plan. name: of the component.
    """
    total = 0.0
    for number, value in enumerate(layout.model.component(name).inputs):
        entry = values[value]
        if entry.differentiable and entry.producer is not None and value not in layout.model.component(name).inputs[:number]:
            total += local_bytes(layout, entry, layout.reads_in(name, value).gradient)
    return total


def _step_bytes(layout: PlanIndex, value: Value, hop: Hop, rank: int) -> float:
    """What the rank holds of a value at the fullest moment of a hop: what it had and what it has then.

    A rank that gathers has the pieces of all before it joins them.
    """
    before, after = (bytes_here(layout, value, how, rank) for how in (hop.source, hop.target))
    if is_view(hop, layout.plan.shard_of_rank(rank)):
        return max(before, after)
    return 2 * after if hop.operation == "gather" and after else before + after
