"""What must not matter: names, the order of equal devices and of links, and the unit in which seconds are counted."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from experiments.search.asking import CLOSE, answered, best_s, chosen_of, on
from experiments.search.more_never_hurts import on_network
from experiments.search.problems import (
    ClusterDraw,
    ProblemDraw,
    built_cluster,
    built_model,
    built_profile,
    network_of,
)
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.profile import Profile
from parsim.hardware.topology import role_of
from parsim.predict.problem import PlanningProblem

INFINITE = float("inf")


def names_do_not_matter(draw: ProblemDraw, random: Random) -> int:
    """Of components, device types, kinds of links, switches and sockets."""
    problem, cluster = draw.problem(), draw.cluster
    names = tuple(random.sample(["zeta", "mid", "a0", "loss_like", "b.1", "c"], len(draw.model.flop)))
    swapped = replace(
        cluster,
        kinds=tuple(1 - kind for kind in cluster.kinds),
        peak_flop_per_s=cluster.peak_flop_per_s[::-1],
        memory_bandwidth=cluster.memory_bandwidth[::-1],
        memory_bytes=cluster.memory_bytes[::-1],
    )
    others = {
        "components": replace(problem, model=built_model(draw.model, names=names)),
        "device types": replace(problem, cluster=built_cluster(swapped)),
        "links": replace(problem, cluster=of_profile(cluster, renamed(built_profile(cluster), random))),
    }
    return _equal(problem, others)


def the_order_of_equal_devices_and_of_links_does_not_matter(draw: ProblemDraw, random: Random) -> int:
    """On one switch, or where every pair has a link of its own, devices of one type are interchangeable."""
    cluster, problem = draw.cluster, draw.problem()
    profile = built_profile(cluster)
    links = profile.model_copy(update={"links": random.sample(profile.links, len(profile.links))})
    others = {"links": replace(problem, cluster=of_profile(cluster, links))}
    if cluster.nodes == 1 and cluster.wiring != "sockets" and len(cluster.kinds) > 1:
        order = list(range(len(cluster.kinds)))
        for kind in (0, 1):
            places = [place for place, own in enumerate(cluster.kinds) if own == kind]
            for place, device in zip(places, random.sample(places, len(places)), strict=True):
                order[place] = device
        others["devices"] = replace(problem, cluster=cluster_from_profile(profile, order))
    return _equal(problem, others)


def all_costs_scale_the_answer(draw: ProblemDraw, random: Random) -> int:
    """By a power of two, which floating-point numbers carry exactly: the same plan, so many times as slow."""
    factor, cluster = random.choice((0.25, 4.0, 64.0)), draw.cluster
    slower = on(
        draw,
        peak_flop_per_s=tuple(rate / factor for rate in cluster.peak_flop_per_s),
        memory_bandwidth=tuple(rate / factor for rate in cluster.memory_bandwidth),
        link_bandwidth=cluster.link_bandwidth / factor,
        link_latency_s=cluster.link_latency_s * factor,
    )
    other = chosen_of(slower.problem() if cluster.nodes == 1 else _on_slower_network(slower, factor))
    one = chosen_of(draw.problem())
    assert (one is None) == (other is None)
    if one is None or other is None:
        return 1
    expected, found = factor * one.result.step_s.median, other.result.step_s.median
    assert abs(found - expected) <= CLOSE * expected, f"x {factor}: {found}, expected {expected}"
    assert other.result.plan == one.result.plan, f"x {factor}: {other.result.plan.summary()}, not {one.result.plan.summary()}"
    return 2


def the_same_question_has_the_same_answer(draw: ProblemDraw, random: Random) -> int:
    """Asked twice, of problems that remember nothing of one another."""
    first, second = (answered(draw.problem()).to_dict() for _ in range(2))
    assert first == second
    return 1


def of_profile(draw: ClusterDraw, profile: Profile) -> Cluster:
    """The drawn cluster on another profile."""
    return cluster_from_profile(profile, len(draw.kinds), nodes=draw.nodes, network=network_of(draw))


def renamed(profile: Profile, random: Random) -> Profile:
    """The profile with other names for kinds of links, and other numbers of switches and sockets."""
    kinds = dict(
        zip(profile.link_kinds, random.sample(["k1", "wire", "aaa", "zz", "pcie2"], len(profile.link_kinds)), strict=True)
    )
    numbers = dict(enumerate(random.sample(range(9), 2)))

    def end(name: str) -> str:
        role = role_of(name)
        return name if role == "gpu" else f"{role}{numbers[int(name[len(role) :])]}"

    links = [each.model_copy(update={"a": end(each.a), "b": end(each.b), "kind": kinds[each.kind]}) for each in profile.links]
    model = profile.communication.link_model
    assert model is not None
    update = {"link_model": model.model_copy(update={"link_kind": kinds[model.link_kind]})}
    return profile.model_copy(
        update={
            "links": links,
            "link_kinds": {kinds[name]: entry for name, entry in profile.link_kinds.items()},
            "nics": [nic.model_copy(update={"at": end(nic.at), "kind": kinds[nic.kind]}) for nic in profile.nics],
            "communication": profile.communication.model_copy(update=update),
        }
    )


def _equal(problem: PlanningProblem, others: dict[str, PlanningProblem]) -> int:
    """As fast as the problem as drawn, and feasible where that is."""
    expected = best_s(problem)
    for what, other in others.items():
        found = best_s(other)
        same = found == expected or abs(found - expected) <= CLOSE * expected
        assert same, f"{what}: {found}, expected {expected}"
    return len(others)


def _on_slower_network(draw: ProblemDraw, factor: float) -> PlanningProblem:
    """Every second of the network between nodes, so many times as long."""
    network = network_of(draw.cluster)
    assert network is not None

    def times(own: object, by: float) -> object:
        return own.model_copy(update={"value": own.value * by})  # type: ignore[attr-defined]

    card, fabric = network.card, network.fabric
    changed = {
        "card": card.model_copy(
            update={
                "bandwidth_bytes_per_s": times(card.bandwidth_bytes_per_s, 1 / factor),
                "latency_s": times(card.latency_s, factor),
            }
        ),
        "fabric": fabric.model_copy(update={"uplink_latency_s": times(fabric.uplink_latency_s, factor)}),
        "protocols": [each.model_copy(update={"hop_s": each.hop_s * factor}) for each in network.protocols],
    }
    return on_network(draw, network.model_copy(update=changed))
