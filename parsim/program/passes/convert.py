"""Communication of values and gradients between components: hops on the tp axis, then transfers between stages.

A value is converted in the stage that makes it, into each layout in which it is read. It crosses to another stage in that
layout, tp rank to tp rank. A gradient crosses in the layout in which it was made, and is converted where it is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from parsim.plans.layouts import (
    HOPS,
    LOCAL_HOPS,
    PIECES,
    POINT_TO_POINT_HOPS,
    Hop,
    ValueLayout,
    conversion,
    hop_groups,
    hop_pairs,
)
from parsim.program.placed import PlanIndex, Reading
from parsim.program.taskgraph import COMPUTE, Draft, Origin, Resource, TaskKey
from parsim.work import Collective, Phase, SendRecv

TP_STREAM = "tp"


class Moving(NamedTuple):
    """A value, or the gradient that one reading of it makes, of one microbatch of one replica. again: as recomputed."""

    value: str
    microbatch: int
    replica: int
    reading: Reading | None = None
    again: bool = False

    @property
    def is_gradient(self) -> bool:
        return self.reading is not None

    def key(self, what: str, *rest: Hashable) -> TaskKey:
        made = ("", "") if self.reading is None else (self.reading.stage, self.reading.ends)
        return (
            f"{what} again" if self.again else what,
            self.value,
            self.microbatch,
            self.replica,
            *made,
            *rest,
        )


def value_keys(layout: PlanIndex, moving: Moving, reading: Reading, shard: int) -> list[TaskKey]:
    """What tp rank `shard` of the reader's stage waits for before it has the value in the layout it reads it in."""
    home = layout.stage_of_value[moving.value]
    if home is None:
        return [("load", layout.rank(reading.stage, moving.replica, shard))]
    if home != reading.stage:
        if is_scattered(layout, reading.ends.value):
            return [_join_key(moving, reading, shard)]
        return [moving.key("send", reading.stage, reading.ends.value, shard)]
    return converted_keys(layout, moving, reading, shard)


def converted_keys(layout: PlanIndex, moving: Moving, reading: Reading, shard: int) -> list[TaskKey]:
    """What tp rank `shard` of the maker's stage waits for before it has the value in the layout that a reading asks for."""
    hops = conversion(layout.source[moving.value].value, reading.ends.value, layout.plan.mesh.tp)
    return _after(moving, hops, shard, layout.plan.mesh.tp, _producer(layout, moving))


def gradient_keys(layout: PlanIndex, moving: Moving, shard: int) -> list[TaskKey]:
    """What tp rank `shard` of the maker's stage waits for before it has this reading's gradient as it wants it."""
    assert moving.reading is not None
    hops = conversion(moving.reading.ends.gradient, layout.source[moving.value].gradient, layout.plan.mesh.tp)
    return _after(moving, hops, shard, layout.plan.mesh.tp, _arrived(layout, moving))


def add_value_moves(draft: Draft, layout: PlanIndex, moving: Moving) -> None:
    """Conversions and transfers of a value that has just been made, one reading after the other."""
    home, tp = layout.stage_of_value[moving.value], layout.plan.mesh.tp
    assert home is not None
    for reading in layout.readings[moving.value]:
        hops = conversion(layout.source[moving.value].value, reading.ends.value, tp)
        _add_hops(draft, layout, moving, hops, home, _producer(layout, moving))
        if reading.stage != home:
            for shard in reading.ends.value.holders(tp):
                key = moving.key("send", reading.stage, reading.ends.value, shard)
                if key not in draft and _keeps(draft, layout, moving.replica, shard, home, reading.stage):
                    after = _after(moving, hops, shard, tp, _producer(layout, moving))
                    _add_transfer(draft, layout, moving, key, (home, reading.stage), shard, after, reading.ends.value)


def add_repeated_moves(draft: Draft, layout: PlanIndex, moving: Moving) -> None:
    """Conversions of a value that has been made again. Other stages have kept what they read of it, so nothing crosses."""
    home, tp = layout.stage_of_value[moving.value], layout.plan.mesh.tp
    assert home is not None
    for reading in layout.readings[moving.value]:
        hops = conversion(layout.source[moving.value].value, reading.ends.value, tp)
        _add_hops(draft, layout, moving, hops, home, _producer(layout, moving))


def is_scattered(layout: PlanIndex, how: ValueLayout) -> bool:
    """Whether each tp rank sends a part of what it has to the next stage, since its neighbours have the same. Summands count
    too: a reduce_scatter before the transfer and an all_gather behind it cost what their all_reduce does."""
    return layout.plan.scatter_gather and how.form in ("full", "partial") and how.ways > 1


def add_arriving_value(draft: Draft, layout: PlanIndex, moving: Moving, reading: Reading) -> None:
    """The all_gather of the parts that another stage has sent, issued where the value is read."""
    how, tp = reading.ends.value, layout.plan.mesh.tp
    home = layout.stage_of_value[moving.value]
    if home is None or home == reading.stage or not is_scattered(layout, how):
        return
    value_bytes = layout.model.value[moving.value].size_bytes(layout.plan.microbatch_samples)
    for start in range(0, tp, how.ways):
        key = _join_key(moving, reading, start)
        if key in draft:
            continue
        shards = range(start, start + how.ways)
        ranks = tuple(layout.rank(reading.stage, moving.replica, shard) for shard in shards)
        work = Collective(operation="all_gather", group=ranks, size_bytes=transfer_bytes(value_bytes, how, tp))
        after = [moving.key("send", reading.stage, how, shard) for shard in shards]
        origin = Origin(
            stage=reading.stage, replica=moving.replica, microbatch=moving.microbatch, value=moving.value, layout=how
        )
        draft.add(key, work, [Resource(rank, TP_STREAM) for rank in ranks], after, origin)


def _join_key(moving: Moving, reading: Reading, shard: int) -> TaskKey:
    how = reading.ends.value
    return moving.key("join", reading.stage, how, shard // how.ways)


def add_gradient_moves(draft: Draft, layout: PlanIndex, moving: Moving) -> None:
    """A gradient that has just been completed: its conversion, or its transfer to the stage that made the value."""
    home, reading = layout.stage_of_value[moving.value], moving.reading
    assert home is not None
    assert reading is not None
    if reading.stage == home:
        _add_gradient_hops(draft, layout, moving)
        return
    for shard in reading.ends.gradient.holders(layout.plan.mesh.tp):
        if not _keeps(draft, layout, moving.replica, shard, home, reading.stage):
            continue
        after = _backwards(layout, moving, shard)
        key = moving.key("gradient", shard)
        _add_transfer(draft, layout, moving, key, (reading.stage, home), shard, after, reading.ends.gradient)


def add_arriving_gradient(draft: Draft, layout: PlanIndex, moving: Moving) -> None:
    """The conversion of another stage's gradient, issued where it is wanted: earlier, it would block what comes before."""
    assert moving.reading is not None
    if moving.reading.stage != layout.stage_of_value[moving.value]:
        _add_gradient_hops(draft, layout, moving)


def _add_gradient_hops(draft: Draft, layout: PlanIndex, moving: Moving) -> None:
    home, reading = layout.stage_of_value[moving.value], moving.reading
    assert home is not None
    assert reading is not None
    hops = conversion(reading.ends.gradient, layout.source[moving.value].gradient, layout.plan.mesh.tp)
    _add_hops(draft, layout, moving, hops, home, _arrived(layout, moving))


_Base = Callable[[int], list[TaskKey]]
"""tp rank -> what must have ended before the rank has its part of what is converted."""


def _producer(layout: PlanIndex, moving: Moving) -> _Base:
    name = layout.model.value[moving.value].producer
    assert name is not None

    def made(shard: int) -> list[TaskKey]:
        rank = layout.rank(layout.stage_of[name], moving.replica, shard)
        phase = Phase.RECOMPUTE if moving.again else Phase.FORWARD
        return [(phase, rank, name, moving.microbatch)] if layout.runs_on(rank, name) else []

    return made


def _arrived(layout: PlanIndex, moving: Moving) -> _Base:
    reading, home = moving.reading, layout.stage_of_value[moving.value]
    assert reading is not None

    def there(shard: int) -> list[TaskKey]:
        if reading.stage == home:
            return _backwards(layout, moving, shard)
        return [moving.key("gradient", shard)] if shard in reading.ends.gradient.holders(layout.plan.mesh.tp) else []

    return there


def _backwards(layout: PlanIndex, moving: Moving, shard: int) -> list[TaskKey]:
    assert moving.reading is not None
    rank = layout.rank(moving.reading.stage, moving.replica, shard)
    return [
        (layout.gradient_phase(name), rank, name, moving.microbatch)
        for name in moving.reading.components
        if name in layout.differentiable and layout.runs_on(rank, name)
    ]


def _after(moving: Moving, hops: Sequence[Hop], shard: int, tp: int, base: _Base) -> list[TaskKey]:
    """What tp rank `shard` waits for before it has the result of the last hop."""
    if not hops:
        return base(shard)
    last, before = hops[-1], hops[:-1]
    if last.operation in LOCAL_HOPS:
        return _after(moving, before, shard, tp, base)
    if last.operation in POINT_TO_POINT_HOPS:
        keys = [moving.key("hop", last, *pair) for pair in hop_pairs(last, tp) if pair[1] == shard]
        holds = shard in last.target.holders(tp) and shard in last.source.holders(tp)
        return keys + (_after(moving, before, shard, tp, base) if holds else [])
    return [moving.key("hop", last, number) for number, group in enumerate(hop_groups(last, tp)) if shard in group]


def _add_hops(draft: Draft, layout: PlanIndex, moving: Moving, hops: Sequence[Hop], home: int, base: _Base) -> None:
    """The tasks of every hop that sends anything, unless an earlier reading has asked for the same one."""
    tp = layout.plan.mesh.tp
    size_bytes = layout.model.value[moving.value].size_bytes(layout.plan.microbatch_samples)
    for number, hop in enumerate(hops):
        if hop.operation in LOCAL_HOPS:
            continue
        origin = Origin(
            stage=home if moving.reading is None else moving.reading.stage,
            replica=moving.replica,
            microbatch=moving.microbatch,
            value=moving.value,
            gradient=moving.is_gradient,
            layout=None if moving.reading is None else moving.reading.ends.gradient,
            hop=hop,
        )
        if hop.operation in POINT_TO_POINT_HOPS:
            for pair in hop_pairs(hop, tp):
                source, target = (layout.rank(home, moving.replica, shard) for shard in pair)
                key = moving.key("hop", hop, *pair)
                if key not in draft:
                    after = _after(moving, hops[:number], pair[0], tp, base)
                    work = hop_message(hop, source, target, size_bytes, tp)
                    draft.add(key, work, [Resource(source, TP_STREAM), Resource(target, TP_STREAM)], after, origin)
            continue
        for index, group in enumerate(hop_groups(hop, tp)):
            key = moving.key("hop", hop, index)
            ranks = tuple(layout.rank(home, moving.replica, shard) for shard in group)
            shards = [shard for shard, rank in zip(group, ranks, strict=True) if draft.keeps(rank)]
            if shards and key not in draft:
                after = [before for shard in shards for before in _after(moving, hops[:number], shard, tp, base)]
                collective = hop_collective(hop, ranks, size_bytes, tp)
                draft.add(key, collective, [Resource(rank, TP_STREAM) for rank in ranks], after, origin)


def _keeps(draft: Draft, layout: PlanIndex, replica: int, shard: int, *stages: int) -> bool:
    return any(draft.keeps(layout.rank(stage, replica, shard)) for stage in stages)


def hop_collective(hop: Hop, ranks: tuple[int, ...], size_bytes: int, tp: int) -> Collective:
    """The work of a hop that is a collective; `size_bytes` is the value of the whole microbatch."""
    all_to_all = hop.operation == "all_to_all"  # its S is what one rank holds
    share = (1 / tp if all_to_all else max(hop.source.ways, hop.target.ways) / tp) * hop.padding
    packed = hop.operation in ("all_gather_dim", "reduce_scatter_dim")
    operation = HOPS[hop.operation].collective
    return Collective(operation=operation, group=ranks, size_bytes=round(size_bytes * share), packed=packed)


def hop_message(hop: Hop, source: int, target: int, size_bytes: int, tp: int) -> SendRecv:
    """One message of a hop that is point to point; `size_bytes` is the value of the whole microbatch."""
    return SendRecv(source=source, destination=target, size_bytes=size_bytes // (1 if hop.operation == "move" else tp))


def transfer_bytes(size_bytes: int, how: ValueLayout, tp: int) -> int:
    """What one tp rank sends to the next stage of a value in that layout; `size_bytes` is that of the whole microbatch."""
    return round(size_bytes * how.local_share(tp))


def _add_transfer(
    draft: Draft,
    layout: PlanIndex,
    moving: Moving,
    key: TaskKey,
    stages: tuple[int, int],
    shard: int,
    after: list[TaskKey],
    how: ValueLayout,
) -> None:
    source, target = (layout.rank(stage, moving.replica, shard) for stage in stages)
    value_bytes = layout.model.value[moving.value].size_bytes(layout.plan.microbatch_samples)
    size_bytes = transfer_bytes(value_bytes, how, layout.plan.mesh.tp)
    if is_scattered(layout, how):
        size_bytes = -(-size_bytes // how.ways)
    work = SendRecv(source=source, destination=target, size_bytes=size_bytes)
    origin = Origin(
        stage=stages[0],
        replica=moving.replica,
        microbatch=moving.microbatch,
        value=moving.value,
        gradient=moving.is_gradient,
        layout=None if how == PIECES else how,
    )
    resources = [Resource(source, f"pp>{target}"), Resource(target, f"pp<{source}")]
    if layout.plan.blocking_transfers:
        resources.append(Resource(source, COMPUTE))
    draft.add(key, work, resources, after, origin)
