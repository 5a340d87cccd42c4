"""More memory, faster devices, links and networks, and devices more never make the answer slower.

Prices of the drawn machines are rooflines and ring formulas, so the price of every task falls, or stays, as a rate rises.
Resources serve their tasks in a fixed issue order, and overlap slows nothing on these machines. So the step of any one plan is
a longest path, and falls with every price. Memory changes no price. Hence the best plan of a fixed set gets no slower. List
scheduling would break this (Graham's anomalies); issue order does not. With a measured overlap factor it is no theorem.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from experiments.search.asking import CLOSE, best_s, on
from experiments.search.problems import ProblemDraw, built_cluster, built_profile, network_of
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.parts import Network
from parsim.predict.problem import PlanningProblem

INFINITE = float("inf")
FACTORS = (1.01, 1.3, 3.0, 30.0)


def more_memory_is_never_slower(draw: ProblemDraw, random: Random) -> int:
    """By a thousandth up to four times, on all devices."""
    factor = random.choice((1.001, 1.1, 1.5, 4.0))
    more = tuple(int(factor * size) for size in draw.cluster.memory_bytes)
    return _no_slower(draw, [(f"memory x {factor}", on(draw, memory_bytes=more).problem())])


def faster_links_are_never_slower(draw: ProblemDraw, random: Random) -> int:
    """More bandwidth, or less latency, of the links in a node."""
    factor, cluster = random.choice(FACTORS), draw.cluster
    wider = on(draw, link_bandwidth=factor * cluster.link_bandwidth)
    sooner = on(draw, link_latency_s=cluster.link_latency_s / factor)
    return _no_slower(draw, [(f"bandwidth x {factor}", wider.problem()), (f"latency / {factor}", sooner.problem())])


def a_faster_network_is_never_slower(draw: ProblemDraw, random: Random) -> int:
    """More bandwidth, or less latency, of the cards between two nodes."""
    draw = on_two_nodes(draw)
    factor, network = random.choice(FACTORS), network_of(draw.cluster)
    assert network is not None

    def changed(key: str, by: float) -> PlanningProblem:
        own = getattr(network.card, key)
        card = network.card.model_copy(update={key: own.model_copy(update={"value": own.value * by})})
        return on_network(draw, network.model_copy(update={"card": card}))

    wider, sooner = changed("bandwidth_bytes_per_s", factor), changed("latency_s", 1 / factor)
    return _no_slower(draw, [(f"network x {factor}", wider), (f"its latency / {factor}", sooner)])


def faster_devices_are_never_slower(draw: ProblemDraw, random: Random) -> int:
    """All of them, or those of one type; and their memory's bandwidth."""
    factor, cluster = random.choice(FACTORS), draw.cluster
    faster = (factor * cluster.peak_flop_per_s[0], random.choice((1.0, factor)) * cluster.peak_flop_per_s[1])
    wider = tuple(factor * rate for rate in cluster.memory_bandwidth)
    changes = {"peak": on(draw, peak_flop_per_s=faster), "memory bandwidth": on(draw, memory_bandwidth=wider)}
    return _no_slower(draw, [(f"{name} x {factor}", other.problem()) for name, other in changes.items()])


def an_idle_device_is_never_slower(draw: ProblemDraw, random: Random) -> int:
    """One more at the end, like the last one; or one node more, like the others."""
    cluster = draw.cluster
    if cluster.nodes > 1:
        return _no_slower(draw, [("a node more", on(draw, nodes=cluster.nodes + 1).problem())])
    if cluster.wiring == "sockets" and len(cluster.kinds) % 2 == 0:
        return 0  # the devices would be divided over the two sockets in another way
    return _no_slower(draw, [("a device more", on(draw, kinds=(*cluster.kinds, cluster.kinds[-1])).problem())])


def on_two_nodes(draw: ProblemDraw) -> ProblemDraw:
    """The same devices on two nodes where they are even, else as many again on a second one."""
    cluster = draw.cluster
    if cluster.nodes > 1:
        return draw
    half = max(1, len(cluster.kinds) // 2)
    return on(draw, nodes=2, kinds=cluster.kinds[:half])


def on_network(draw: ProblemDraw, network: Network) -> PlanningProblem:
    """The problem with another network between its nodes."""
    cluster = cluster_from_profile(built_profile(draw.cluster), nodes=draw.cluster.nodes, network=network)
    return replace(draw.problem(), cluster=cluster)


def _no_slower(draw: ProblemDraw, others: list[tuple[str, PlanningProblem]]) -> int:
    """Compare with what is chosen on the cluster as drawn; where nothing fits there is nothing to compare."""
    assert built_cluster(draw.cluster).size
    before = best_s(draw.problem())
    if before == INFINITE:
        return 0
    for what, other in others:
        after = best_s(other)
        assert after <= before * (1 + CLOSE), f"{what}: {before} before, {after} after"
    return len(others)
