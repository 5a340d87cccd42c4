"""Accuracy over simulated seconds: the same training, on a cluster whose GPUs are now and then slow."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.relaxed.clock import random_stragglers
from experiments.relaxed.gossip import GossipRule, train_on_graph
from experiments.relaxed.models import mlp
from experiments.relaxed.sharded import Partition
from experiments.relaxed.times import Exchange, all_reduce_s
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.plans.mixing import Ada, mixing_graph

NODES, STEP_S, SENT_BYTES = 4, 0.1, 102_228_128
SLOW = {"probability": 0.01, "factor": 3.0}
"""32 V100s on 25 Gb/s Ethernet; a step of 100 ms, one in a hundred takes 300; messages of ResNet-50's size."""


def curve_rows(seed: int, epochs: int) -> list[dict[str, Any]]:
    """Per way and epoch: simulated seconds and accuracy, and the share of time that replicas wait."""
    cluster = cluster_from_profile(load_profile("p3-16xlarge"), nodes=NODES, network="ethernet-25g")
    n = cluster.size
    exchange = Exchange(cluster, SENT_BYTES)
    machines = Exchange(cluster, SENT_BYTES, 8)
    reduced = all_reduce_s(cluster, SENT_BYTES)
    ways = {
        "all_reduce": (GossipRule(graph=mixing_graph("complete", n), centralised=True), lambda matrix: reduced),
        "ring": (GossipRule(graph=mixing_graph("ring", n)), exchange),
        "ring, combine_adapt": (GossipRule(graph=mixing_graph("ring", n), combination="combine_adapt"), exchange),
        "one-peer": (GossipRule(graph=mixing_graph("one_peer_exponential", n)), exchange),
        "exponential": (GossipRule(graph=mixing_graph("exponential", n)), exchange),
        "machine one-peer": (GossipRule(graph=mixing_graph("hierarchical_one_peer", n, per_node=8)), machines),
        "machine one-peer, combine_adapt": (
            GossipRule(graph=mixing_graph("hierarchical_one_peer", n, per_node=8), combination="combine_adapt"),
            machines,
        ),
        "ada": (GossipRule(graph=Ada(n=n, start=14, rate=0.7)), exchange),
    }
    rows = []
    for name, (rule, seconds) in ways.items():
        run = train_on_graph(
            mlp(seed),
            Partition(workers=n, epochs=2 * epochs, batch=8, seed=seed),
            rule,
            step_s=random_stragglers(n, **SLOW, seconds=STEP_S, seed=seed),
            exchange_s=seconds,
        )
        waiting = float(np.mean(run.clock.waiting_s / run.clock.ready_s))
        rows += [
            {
                "way": name,
                "epoch": epoch.epoch,
                "seconds": epoch.seconds,
                "accuracy": epoch.score,
                "waiting_fraction_at_the_end": waiting,
            }
            for epoch in run.epochs
        ]
    return rows
