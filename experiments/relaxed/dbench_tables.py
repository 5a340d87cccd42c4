"""DBench on four models: which ways of training, at which scales, and its tables."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from experiments.relaxed.bench import BenchRun, ranks, relations, run_bench, summary, tensor_rows
from experiments.relaxed.gossip import GossipRule
from experiments.relaxed.models import MODELS
from parsim.plans.mixing import Ada, mixing_graph

Row = dict[str, Any]


def on_graph(name: str, **settings: int) -> Callable[[int], GossipRule]:
    return lambda n: GossipRule(graph=mixing_graph(name, n, **settings))


WAYS: dict[str, Callable[[int], GossipRule]] = {
    "centralised": lambda n: GossipRule(graph=mixing_graph("complete", n), centralised=True),
    "ring": on_graph("ring"),
    "one_peer_exponential": on_graph("one_peer_exponential"),
    "torus": on_graph("torus"),
    "exponential": on_graph("exponential"),
    "complete": on_graph("complete"),
    "ada": lambda n: GossipRule(graph=Ada(n=n, start=n - 2, rate=n / 16)),
}


def bench_tables(*, scales: tuple[int, ...], seeds: range, epochs: int) -> dict[str, list[Row]]:
    """Summary per model, scale, shards and way; ranks; relations; every tensor's metrics."""

    def show(run: BenchRun) -> None:
        print(f"{run.model:12s} {run.sharding:13s} n={run.n:<3d} {run.way:22s} {run.score:.3f}", file=sys.stderr, flush=True)

    runs = run_bench(
        MODELS, WAYS, scales=scales, shardings=("iid", "label_sorted"), seeds=seeds, epochs=epochs, every=4, on_run=show
    )
    return {
        "dbench": summary(runs),
        "dbench_ranks": ranks(runs),
        "dbench_relations": relations(runs),
        "dbench_tensors": tensor_rows(runs),
    }
