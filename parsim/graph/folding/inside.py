"""What replicas pay for the communication inside them: every kind of it, and its price for the tp shards side by side."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from parsim.costs.communication.equivalent_groups import alike_collectives, alike_transfers
from parsim.costs.costs import Costs
from parsim.graph.hops import hop_groups, hop_pairs
from parsim.graph.passes.convert import COLLECTIVE_OF_HOP, POINT_TO_POINT_HOPS, hop_collective, hop_message, transfer_bytes
from parsim.graph.passes.inside import CONTEXT_STREAM, inner_steps
from parsim.graph.plan_index import PlanIndex
from parsim.plans.concurrent import concurrent_groups, concurrent_transfers
from parsim.plans.redistribution import LOCAL_HOPS, Hop, conversion
from parsim.work import Collective, Phase, SendRecv, Work


class Exchange(NamedTuple):
    """A kind of communication of a replica: a hop at place `source`, or (hop None) a transfer from it to `target`.

    `inside`: the axis and the operation of an exchange inside components.
    """

    source: int
    target: int
    hop: Hop | None
    size_bytes: int
    inside: tuple[str, str] | None = None


def exchanges_of(layout: PlanIndex) -> tuple[Exchange, ...]:
    """Every kind once. Of a hop the bytes are those of the value in a microbatch, of other kinds those that are sent."""
    tp, samples = layout.plan.mesh.tp, layout.plan.microbatch_samples
    found: dict[Exchange, None] = {}
    for value in layout.model.values:
        home = layout.stage_of_value[value.name]
        if home is None:
            continue
        size_bytes, made = value.size_bytes(samples), layout.source[value.name]
        for reading in layout.readings[value.name]:
            ways = [(home, reading.stage, made.value, reading.ends.value, reading.ends.value)]
            if value.differentiable:
                ways.append((reading.stage, home, reading.ends.gradient, made.gradient, reading.ends.gradient))
            for source, target, begin, end, moved in ways:
                if source != target:
                    found[Exchange(source, target, None, transfer_bytes(size_bytes, moved, tp))] = None
                for hop in conversion(begin, end, tp):
                    if hop.operation not in LOCAL_HOPS:
                        found[Exchange(home, home, hop, size_bytes)] = None
    exchange = layout.plan.context_exchange
    for component in layout.model.components:
        inside, home = layout.inside(component.name), layout.stage_of[component.name]
        if inside is None:
            continue
        steps = (*inner_steps(inside, Phase.FORWARD, exchange), *inner_steps(inside, Phase.BACKWARD, exchange))
        for step in (step for step in steps if step.operation):
            whole = inside.context_bytes * step.share if step.what == CONTEXT_STREAM else inside.expert_bytes
            size_bytes = round(whole * layout.local_samples(component.name))
            found[Exchange(home, home, None, size_bytes, (step.what, step.operation))] = None
    return tuple(found)


WorkSeconds = Callable[[Sequence[Work]], list[float]]
"""What communications cost."""


class InsideSeconds:
    """Per kind of communication inside a replica the seconds of those that its tp shards do side by side.

    Groups of ranks whose links are as fast and as busy pay the same for the same bytes, so only one of them is priced.

    Args:
        layout, exchanges: of the plan. costs: prices of the cluster. price: medians of communications.
    """

    def __init__(self, layout: PlanIndex, exchanges: Sequence[Exchange], costs: Costs, price: WorkSeconds) -> None:
        self._layout = layout
        self._exchanges = exchanges
        self._costs = costs
        self._price = price
        self._of_replica: dict[int, list[list[float]]] = {}
        self._paths: dict[tuple[object, ...], list[_Path]] = {}
        self._kinds: dict[Hashable, int] = {}
        self._seconds: dict[tuple[int, int], float] = {}

    def __call__(self, replica: int) -> list[list[float]]:
        """By kind of communication, then by tp shard."""
        if replica not in self._of_replica:
            numbers = range(len(self._exchanges))
            self._of_replica[replica] = [self._side_by_side(number, replica) for number in numbers]
        return self._of_replica[replica]

    def _side_by_side(self, number: int, replica: int) -> list[float]:
        exchange = self._exchanges[number]
        route = (replica, exchange.source, exchange.target, exchange.hop, exchange.inside)
        if route not in self._paths:
            groups = _groups_of(self._layout, exchange, replica)
            self._paths[route] = [_Path(group, self._kind(exchange, group)) for group in groups]
        paths = self._paths[route]
        new = {path.kind: path for path in paths if (number, path.kind) not in self._seconds}
        if new:
            works = [_work(self._layout, exchange, path.group) for path in new.values()]
            self._seconds.update(zip([(number, kind) for kind in new], self._price(works), strict=True))
        return [self._seconds[number, path.kind] for path in paths]

    def _kind(self, exchange: Exchange, group: tuple[int, ...]) -> int:
        """A number, equal for groups that pay the same for the same bytes; where nothing says so, the group's own."""
        mesh = self._layout.plan.mesh
        if exchange.inside is None and (exchange.hop is None or exchange.hop.operation in POINT_TO_POINT_HOPS):
            kind = alike_transfers(self._costs.cluster, (group[0], group[1]), concurrent_transfers(mesh, (group[0], group[1])))
        else:
            kind = alike_collectives(self._costs.cluster, self._operation(exchange), group, concurrent_groups(mesh, group))
        return self._kinds.setdefault(group if kind is None else kind, len(self._kinds))

    def _operation(self, exchange: Exchange) -> str:
        """Of a collective."""
        if exchange.inside is not None:
            return exchange.inside[1]
        assert exchange.hop is not None
        return COLLECTIVE_OF_HOP[exchange.hop.operation]


class _Path(NamedTuple):
    """The ranks of a communication, and a number that is equal for those that pay the same."""

    group: tuple[int, ...]
    kind: int


def _groups_of(layout: PlanIndex, exchange: Exchange, replica: int) -> list[tuple[int, ...]]:
    """The ranks of a communication, as each of the tp shards that do it side by side has them."""
    tp = layout.plan.mesh.tp
    source, target, hop = exchange.source, exchange.target, exchange.hop
    if exchange.inside is not None:
        axis, _ = exchange.inside
        return [layout.inner_group(layout.rank(source, replica, shard), axis) for shard in range(tp)]
    if hop is None:
        return [(layout.rank(source, replica, s), layout.rank(target, replica, s)) for s in range(tp)]
    groups = hop_pairs(hop, tp) if hop.operation in POINT_TO_POINT_HOPS else hop_groups(hop, tp)
    return [tuple(layout.rank(source, replica, shard) for shard in group) for group in groups]


def _work(layout: PlanIndex, exchange: Exchange, group: tuple[int, ...]) -> Collective | SendRecv:
    """What a group of ranks does."""
    tp, size_bytes, hop = layout.plan.mesh.tp, exchange.size_bytes, exchange.hop
    if exchange.inside is not None:
        return Collective(operation=exchange.inside[1], group=group, size_bytes=size_bytes)
    if hop is None:
        return SendRecv(source=group[0], destination=group[1], size_bytes=size_bytes)
    if hop.operation in POINT_TO_POINT_HOPS:
        return hop_message(hop, group[0], group[1], size_bytes, tp)
    return hop_collective(hop, group, size_bytes, tp)
