"""What the stages of a plan send one another, as the links of its pipeline (`parsim.plans.stage_transfers`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from parsim.graph.placed_model import Reading
from parsim.graph.plan_index import PlanIndex
from parsim.plans.pipeline import PIPELINE_ORDERS
from parsim.plans.stage_transfers import Pipeline, StageLink


class Message(NamedTuple):
    """A value or a gradient that one tp rank of a stage sends the same tp rank of another one, for every microbatch."""

    link: StageLink
    value: str
    reading: Reading


def messages(layout: PlanIndex, names: Iterable[str], shard: int) -> Iterator[Message]:
    """Those of some values.

    Args:
        layout: the plan and its model. names: of values. shard: place on the tp axis.
    """
    tp, halves = layout.plan.mesh.tp, PIPELINE_ORDERS[layout.plan.pipeline_order].halves
    for name in names:
        value, home = layout.model.value[name], layout.stage_of_value[name]
        if home is None or value.producer is None:
            continue
        maker = layout.chunk_of[value.producer]
        for reading in layout.readings[name]:
            if reading.stage == home:
                continue
            if shard in reading.ends.value.holders(tp):
                yield Message(StageLink(maker, layout.chunk_of[reading.components[0]]), name, reading)
            backward = [reader for reader in reading.components if reader in layout.differentiable]
            if value.differentiable and backward and shard in reading.ends.gradient.holders(tp):
                late = halves and not layout.wants_input_gradient(value.producer)
                yield Message(StageLink(layout.chunk_of[backward[0]], maker, late), name, reading)


def pipeline_of(layout: PlanIndex, shard: int, place: int | None = None) -> Pipeline:
    """The pipeline of a plan with the links of one tp rank.

    Args:
        layout: the plan and its model. shard: place on the tp axis.
        place: on the pp axis, if the links that begin or end there are enough.
    """
    plan = layout.plan
    names = [value.name for value in layout.model.values] if place is None else layout.values_at[place]
    links = {message.link for message in messages(layout, names, shard)}
    if place is not None:
        places = plan.stage_places
        links = {link for link in links if place in (places[link.source], places[link.target])}
    return Pipeline(
        order=plan.pipeline_order,
        ranks=plan.mesh.pp,
        microbatches=plan.microbatches,
        chunks=plan.chunks,
        links=tuple(sorted(links)),
    )
