"""Values that wait on a rank for their readers, and gradients for their makers, in every layout in which they lie there."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from functools import partial

from parsim.costs.memory.waiting import Wait
from parsim.graph.hops import hop_pairs
from parsim.graph.passes.convert import POINT_TO_POINT_HOPS
from parsim.graph.placed_model import Reading
from parsim.graph.plan_index import PlanIndex
from parsim.model.component import Value
from parsim.plans.pipeline import PIPELINE_ORDERS
from parsim.plans.redistribution import LOCAL_HOPS, ValueLayout, conversion
from parsim.plans.stage_transfers import StageLink
from parsim.predict.boundary.alike import AlikeOnRank, CountedKinds
from parsim.predict.boundary.conversions import bytes_here, is_view, storage_of
from parsim.predict.kept_activations import KeptActivations
from parsim.predict.rank_traffic import local_bytes


def waiting_values(
    layout: PlanIndex, values: Mapping[str, Value], rank: int, alike: AlikeOnRank | None = None
) -> dict[str, list[Wait]]:
    """Values that a rank has while it runs forward, before a component there keeps them (`waiting_bytes`).

    Every layout of a value is a storage of its own. It lives from when the value is made to the last component that reads it
    there, or to the first that keeps it. A piece of a dim is cut when it is read, so until then all that it is cut from waits.

    Args:
        layout: the plan and its model. values: by name, as kept under the plan. rank: global number.
        alike: what was counted already on the ranks of this plan; None: nothing.

    Returns:
        By value. Leaves out batches, and values of which the Model does not say who keeps them.
    """
    alike = alike or CountedKinds(layout, values).on(rank)
    names, place = layout.rank_components(rank), alike.place
    order = layout.model.component_index
    numbers = [order[name] for name in names]  # ascending
    here = [layout.model.component(name) for name in names]
    found: dict[str, list[Wait]] = {}
    for name in dict.fromkeys(value for component in here for value in (*component.inputs, *component.outputs)):
        value = values[name]
        if value.producer is not None and value.savers is not None:
            begins = bisect_right(numbers, order[value.producer])
            waits = partial(_waits, layout, value, value.savers, place, rank, begins)
            found[name] = alike.waits("values", value, waits)
    return found


def _waits(
    layout: PlanIndex, value: Value, savers: tuple[str, ...], place: Mapping[str, int], rank: int, begins: int
) -> list[Wait]:
    """`begins`: components of the rank up to the maker of the value."""
    shard, tp = layout.plan.shard_of_rank(rank), layout.plan.mesh.tp
    assert value.producer is not None
    made, here = layout.source[value.name].value, value.producer in place
    if not here and layout.stage_of_value[value.name] == layout.plan.stage_of_rank(rank):
        begins = _room_from(layout, value, rank, begins)
    last: dict[ValueLayout, int] = {}
    kept: dict[ValueLayout, int] = {made: place[value.producer]} if here and value.producer in savers else {}
    cut: list[Wait] = []
    for reading in layout.readings[value.name]:
        for name in reading.components:
            if name not in place:
                continue
            hops = conversion(made, reading.ends.value, tp) if here else ()
            storage = storage_of(hops, made, shard) if here else reading.ends.value
            while hops and hops[-1].operation in LOCAL_HOPS:
                hops = hops[:-1]
            whole = storage_of(hops, made, shard) if here else storage
            if whole != storage and not is_view(conversion(made, reading.ends.value, tp)[-1], shard):
                last[whole] = max(last.get(whole, 0), place[name] - 1)
                cut.append(Wait(place[name], place[name], bytes_here(layout, value, storage, rank)))
            elif name in savers:
                kept[storage] = min(kept.get(storage, place[name]), place[name])
            else:
                last[storage] = max(last.get(storage, 0), place[name])
    ends = {storage: kept.get(storage, last.get(storage, -1)) for storage in dict.fromkeys((*last, *kept))}
    waits = [Wait(begins, end, bytes_here(layout, value, storage, rank)) for storage, end in ends.items()]
    return [wait for wait in (*waits, *cut) if wait.first <= wait.last and wait.size_bytes]


def waiting_gradients(
    layout: PlanIndex, values: Mapping[str, Value], rank: int, alike: AlikeOnRank | None = None
) -> dict[str, list[Wait]]:
    """Gradients that a rank has while other components than their reader and their maker run (`waiting_bytes`).

    One that is a part of a larger gradient keeps all of that, until another reader adds to it. Left out is what another stage
    sends for the half for weights alone: its message is counted until then (`StageLink.late`).

    Args:
        layout: the plan and its model. values: by name, as kept under the plan. rank: global number.
        alike: what was counted already on the ranks of this plan; None: nothing.
    """
    alike = alike or CountedKinds(layout, values).on(rank)
    here = [layout.model.component(name) for name in layout.rank_components(rank)]
    found: dict[str, list[Wait]] = {}
    for value in dict.fromkeys(value for component in here for value in (*component.outputs, *component.inputs)):
        entry = values[value]
        if entry.differentiable and entry.producer is not None:
            waits = alike.waits("gradients", entry, partial(_gradient_waits, layout, values, entry, alike.place, rank))
            if waits:
                found[value] = waits
    return found


def _gradient_waits(
    layout: PlanIndex, values: Mapping[str, Value], entry: Value, place: Mapping[str, int], rank: int
) -> list[Wait]:
    """Of one value that a rank makes or reads."""
    assert entry.producer is not None
    order, names = layout.model.component_index, layout.rank_components(rank)
    halves, home = PIPELINE_ORDERS[layout.plan.pipeline_order].halves, layout.stage_of_value[entry.name]
    late = halves and not layout.wants_input_gradient(entry.producer)
    first_reader = min((place[name] for name in layout.consumers[entry.name] if name in place), default=0)
    ends = place.get(entry.producer, first_reader) + 1
    found: list[Wait] = []
    for reading in layout.readings[entry.name]:
        readers = [name for name in reading.components if name in layout.differentiable]
        local = sorted(place[name] for name in readers if name in place)
        if not readers or not (local or entry.producer in place):
            continue
        if late and not local and reading.stage != home:
            continue
        begins = local[-1] if local else bisect_left(names, min(map(order.__getitem__, readers)), key=order.__getitem__)
        if not local and reading.stage == home:
            begins = _room_until(layout, entry, rank, begins)
        size = _gradient_size(layout, entry, reading)
        whole = 0.0
        if local and not layout.is_halved(names[local[-1]]):  # else what waits between the halves keeps it
            whole = _whole_bytes(layout, values, entry.name, names[local[-1]])
        again = local[-2] if len(local) > 1 else ends
        stays = reading.stage == home and reading.ends.gradient == layout.source[entry.name].gradient
        if whole > size and (stays or len(local) > 1):  # what is sent is copied, and what is converted made anew
            found.append(Wait(max(again, ends), begins - 1, whole))
            begins = max(again, ends)
        found.append(Wait(ends, begins - 1, size))
    return found


def between_chunks(kept: KeptActivations, rank: int) -> dict[StageLink, float]:
    """Bytes of one microbatch that one chunk of a rank makes and another one there reads, by link, ascending.

    Values wait until a component keeps them, or for their last reader; a gradient from the first backward that adds to it.
    In a V the first and the last chunk of a rank are neighbours in the model.

    Args:
        kept: values under the plan. rank: global number.
    """
    layout = kept.layout
    found: dict[StageLink, float] = {}
    if layout.plan.chunks == 1:
        return found
    here = layout.rank_components(rank)
    for name in dict.fromkeys(output for component in here for output in layout.model.component(component).outputs):
        value, source = kept.values[name], layout.source[name]
        maker = layout.chunk_of[layout.model.value[name].producer or ""]
        readers = {reader: layout.chunk_of[reader] for reader in layout.consumers[name] if layout.runs_on(rank, reader)}
        later = [chunk for chunk in readers.values() if chunk != maker]
        savers = [layout.chunk_of[saver] for saver in value.savers or () if layout.runs_on(rank, saver)]
        links = []
        if later and value.savers is not None and maker not in savers:
            links.append((StageLink(maker, min(savers, default=max(later))), source.value))
        back = [chunk for reader, chunk in readers.items() if chunk != maker and reader in layout.differentiable]
        if back and value.differentiable:
            links.append((StageLink(max(back), maker), source.gradient))
        for link, how in links:
            found[link] = found.get(link, 0.0) + bytes_here(layout, value, how, rank)
    return dict(sorted(found.items()))


def _room_from(layout: PlanIndex, value: Value, rank: int, begins: int) -> int:
    """The first component beside which there is room for a value that another tp rank makes.

    A rank that only receives makes room as soon as its communication before has ended, long before the other one sends.

    Args:
        begins: components of the rank before the maker of the value.
    """
    names, order = layout.rank_components(rank), layout.model.component_index
    assert value.producer is not None
    found = 0
    for other in layout.values_at[layout.plan.stage_of_rank(rank)]:
        entry = layout.model.value[other]
        before = entry.producer is not None and order[entry.producer] < order[value.producer]
        if before and _communicates(layout, other, rank, gradient=False):
            assert entry.producer is not None
            found = max(found, sum(order[name] <= order[entry.producer] for name in names))
    return min(found, begins)


def _room_until(layout: PlanIndex, value: Value, rank: int, begins: int) -> int:
    """One more than the last component whose backward runs beside the room for a gradient of another tp rank's making.

    Args:
        begins: components of the rank before the reader whose gradient it is.
    """
    names, order = layout.rank_components(rank), layout.model.component_index
    assert value.producer is not None
    later = [
        sum(order[name] < order[entry.producer] for name in names) + (entry.producer in names)
        for entry in map(layout.model.value.__getitem__, layout.values_at[layout.plan.stage_of_rank(rank)])
        if entry.producer is not None
        and entry.differentiable
        and order[entry.producer] > order[value.producer]
        and _communicates(layout, entry.name, rank, gradient=True)
    ]
    return max(begins, min(later, default=len(names)))


def _communicates(layout: PlanIndex, value: str, rank: int, *, gradient: bool) -> bool:
    """Whether the rank takes part in converting a value of its stage, or its gradient, on the tp axis."""
    shard, tp, stage = layout.plan.shard_of_rank(rank), layout.plan.mesh.tp, layout.plan.stage_of_rank(rank)
    if layout.stage_of_value[value] != stage:
        return False
    source = layout.source[value]
    for reading in layout.readings[value]:
        ends = (reading.ends.gradient, source.gradient) if gradient else (source.value, reading.ends.value)
        for hop in conversion(*ends, tp):
            if hop.operation in POINT_TO_POINT_HOPS:
                if any(shard in pair for pair in hop_pairs(hop, tp)):
                    return True
            elif hop.operation not in LOCAL_HOPS:
                return True
    return False


def _whole_bytes(layout: PlanIndex, values: Mapping[str, Value], value: str, reader: str) -> float:
    """Of the gradient of an output of the reader that its gradient of the value is a part of; 0: of none."""
    output = dict(layout.model.component(reader).gradient_views).get(value)
    return local_bytes(layout, values[output], layout.source[output].gradient) if output else 0.0


def _gradient_size(layout: PlanIndex, value: Value, reading: Reading) -> float:
    """Of the gradient of one reading, converted as far as that sends something: what sends nothing is made when it is read."""
    storage = reading.ends.gradient
    for hop in conversion(storage, layout.source[value.name].gradient, layout.plan.mesh.tp):
        storage = storage if hop.operation in LOCAL_HOPS else hop.target
    return local_bytes(layout, value, storage)
