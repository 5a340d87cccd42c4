"""Whole epochs as programs in the static engine: every component of every GPU is a task, nothing is unrolled, no noise."""

from __future__ import annotations

import sys
from typing import Any

from experiments.decentralized.times import BATCH, IMAGES, Exchange, all_reduce_s, phase_seconds, resnet50, weight_bytes
from parsim.costs.costs import Costs
from parsim.engines.relaxed.gossip_program import gossip_model, gossip_program
from parsim.engines.repeated import simulate_program
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.plans.mixing import mixing_graph
from parsim.predict.rounds import priced
from parsim.virtual.clock import round_seconds

WAYS = (
    ("all_reduce", "complete"),
    ("adapt_combine", "ring"),
    ("combine_adapt", "ring"),
    ("adapt_combine", "one_peer_exponential"),
    ("combine_adapt", "exponential"),
)


def clock_epoch_s(cluster: Cluster, combination: str, graph: str, rounds: int) -> float:
    """The same by the replicas' clock: a step is one number, an exchange one per receiver, sums over neighbours are free."""
    compute_s = sum(map(sum, phase_seconds(cluster, BATCH)))
    exchange = Exchange(cluster, weight_bytes())
    reduced = all_reduce_s(cluster, weight_bytes())
    return rounds * round_seconds(
        combination,
        mixing_graph(graph, cluster.size),
        lambda t: compute_s,
        (lambda matrix: reduced) if combination == "all_reduce" else exchange,
        n=cluster.size,
        rounds=rounds,
    )


def epoch_rows(nodes: tuple[int, ...]) -> list[dict[str, Any]]:
    """One epoch of ResNet-50 on Summit nodes: by the engine and by the clock, and how much of it was written and simulated."""
    rows = []
    for count in nodes:
        cluster = cluster_from_profile(load_profile("summit-v100"), nodes=count, network="infiniband-100g")
        costs = Costs(model=resnet50(), cluster=cluster)
        rounds = IMAGES // (cluster.size * BATCH)
        for combination, graph in WAYS:
            model = gossip_model(costs.model, BATCH)
            program = gossip_program(combination, mixing_graph(graph, cluster.size), model, workers=cluster.size, rounds=rounds)
            times = simulate_program(program, priced(costs))
            rows.append(
                {
                    "gpus": cluster.size,
                    "way": f"{graph}, {combination}" if combination != "all_reduce" else combination,
                    "rounds": rounds,
                    "rounds_simulated": times.simulated,
                    "tasks_written": program.written_tasks,
                    "tasks_run": program.run_tasks,
                    "step_ms": 1e3 * times.makespan_s / rounds,
                    "epoch_s": times.makespan_s,
                    "epoch_by_clock_s": clock_epoch_s(cluster, combination, graph, rounds),
                }
            )
            print(f"{cluster.size} GPUs, {combination} {graph}: {times.makespan_s:.3f} s", file=sys.stderr, flush=True)
    return rows
