"""Programs of a real model priced by Costs on a cluster of V100s, against closed forms and the replicas' clock."""

from __future__ import annotations

import numpy as np
import pytest

from parsim.costs.communication.internode import exchange_seconds
from parsim.costs.costs import Costs
from parsim.engines.relaxed.gossip_program import gossip_model, gossip_program
from parsim.engines.repeated import ProgramTimes, simulate_program
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.mixing import mixing_graph
from parsim.predict.rounds import priced
from parsim.virtual.clock import ReplicaClock
from parsim.work import Collective, Compute, Mix, OptimizerStep, Phase

BATCH, ROUNDS = 32, 300


@pytest.fixture(scope="module")
def costs() -> Costs:
    cluster = cluster_from_profile(load_profile("summit-v100"), nodes=4, network="infiniband-100g")
    return Costs(model=load_model(ModelSpec(name="resnet50")), cluster=cluster)


def step_s(costs: Costs) -> float:
    """Forward, backward and update of one rank."""
    work = [
        Compute(component=component.name, phase=phase, samples=BATCH)
        for component in costs.model.components
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    ]
    return sum(costs.estimate(entry, 0).median_s for entry in [*work, update_of(costs)])


def update_of(costs: Costs) -> OptimizerStep:
    return OptimizerStep(elements=costs.model.parameter_count, tensors=len(costs.model.parameters))


def simulated(costs: Costs, combination: str, name: str) -> ProgramTimes:
    n = costs.cluster.size
    model = gossip_model(costs.model, BATCH)
    program = gossip_program(combination, mixing_graph(name, n), model, workers=n, rounds=ROUNDS)
    times = simulate_program(program, priced(costs))
    assert times.simulated < 60, "rounds recur, so the rest follows"
    return times


def test_synchronous_rounds_are_their_closed_form(costs: Costs) -> None:
    everyone = tuple(range(costs.cluster.size))
    reduced = Collective(operation="all_reduce", group=everyone, size_bytes=4 * costs.model.parameter_count)
    wanted = ROUNDS * (step_s(costs) + costs.estimate(reduced, 0).median_s)
    assert simulated(costs, "all_reduce", "complete").makespan_s == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("combination", ["adapt_combine", "combine_adapt"])
@pytest.mark.parametrize("name", ["ring", "one_peer_exponential", "exponential"])
def test_rounds_take_at_most_what_the_clock_says(costs: Costs, combination: str, name: str) -> None:
    """The clock lets a replica wait for all its neighbours before the slowest message begins; a graph starts each message
    when its two ends are there. The two agree where all messages take as long. Combine-then-adapt updates after the sum."""
    n, size = costs.cluster.size, 4 * costs.model.parameter_count
    graph, clock = mixing_graph(name, n), ReplicaClock.begin(n)
    step, update = step_s(costs), costs.estimate(update_of(costs), 0).median_s
    slowest = ReplicaClock.begin(n)
    for t in range(ROUNDS):
        links = (graph(t) != 0) & ~np.eye(n, dtype=bool)
        to, sender = np.nonzero(links)
        seconds = exchange_seconds(list(zip(sender.tolist(), to.tolist(), strict=True)), size, costs.cluster)
        arrived = np.zeros(n)
        np.maximum.at(arrived, to, seconds)
        mix = costs.estimate(Mix(elements=costs.model.parameter_count, copies=1 + int(links.sum(1).max())), 0).median_s
        if combination == "adapt_combine":
            clock = clock.round(combination, step, links, arrived + mix)
        else:
            clock = clock.round(combination, step + mix, links, arrived + mix + update)
        slowest = slowest.compute(step + (mix if combination == "combine_adapt" else 0.0))
    makespan = simulated(costs, combination, name).makespan_s
    assert slowest.now_s * (1 - 1e-9) <= makespan <= clock.now_s * (1 + 1e-9)
    assert makespan > 0.9 * clock.now_s, "and little less"
