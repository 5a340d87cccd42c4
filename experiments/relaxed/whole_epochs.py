"""Whole epochs by plans: the step of a plan that gossips, times the rounds of an epoch, beside the replicas' clock."""

from __future__ import annotations

import sys
from typing import Any

from experiments.relaxed.clock import round_seconds
from experiments.relaxed.times import BATCH, IMAGES, Exchange, all_reduce_s, phase_seconds, resnet50, weight_bytes
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.formats import Numerics
from parsim.plans.mesh import Mesh
from parsim.plans.mixing import mixing_graph
from parsim.plans.synchronisation import parse_synchronisation
from parsim.predict.evaluate import simulated_step
from parsim.predict.problem import PlanningProblem
from parsim.search.by_hand import custom_plan

RULES = {
    "all_reduce": "all_reduce",
    "ring": "gossip/1 ring",
    "one_peer_exponential": "gossip/1 one_peer_exponential",
    "exponential": "gossip/1 exponential",
}
"""Graph, and the text of its plan's synchronisation. A plan exchanges after the step (adapt_combine)."""


def clock_epoch_s(cluster: Cluster, graph: str, rounds: int) -> float:
    """The same by the replicas' clock: a step is one number, an exchange one per receiver, sums over neighbours are free."""
    compute_s = sum(map(sum, phase_seconds(cluster, BATCH)))
    exchange, reduced = Exchange(cluster, weight_bytes()), all_reduce_s(cluster, weight_bytes())
    whole = graph == "all_reduce"
    return rounds * round_seconds(
        "all_reduce" if whole else "adapt_combine",
        mixing_graph("complete" if whole else graph, cluster.size),
        lambda t: compute_s,
        (lambda matrix: reduced) if whole else exchange,
        n=cluster.size,
        rounds=rounds,
    )


def epoch_rows(nodes: tuple[int, ...]) -> list[dict[str, Any]]:
    """One epoch of ResNet-50 on Summit nodes: by plans, and by the clock."""
    rows = []
    for count in nodes:
        cluster = cluster_from_profile(load_profile("summit-v100"), nodes=count, network="infiniband-100g")
        problem = PlanningProblem(
            model=resnet50(),
            cluster=cluster,
            global_batch=cluster.size * BATCH,
            numerics=Numerics(precision="fp32", optimizer="sgd"),
        )
        rounds = IMAGES // (cluster.size * BATCH)
        for graph, text in RULES.items():
            plan = custom_plan(problem, Mesh(dp=cluster.size), synchronisation=parse_synchronisation(text))
            step_s = simulated_step(problem, plan).step_s
            rows.append(
                {
                    "gpus": cluster.size,
                    "way": graph,
                    "rounds": rounds,
                    "step_ms": 1e3 * step_s,
                    "epoch_s": rounds * step_s,
                    "epoch_by_clock_s": clock_epoch_s(cluster, graph, rounds),
                }
            )
            print(f"{cluster.size} GPUs, {graph}: {rounds * step_s:.3f} s", file=sys.stderr, flush=True)
    return rows
