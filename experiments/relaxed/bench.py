"""DBench: training on several graphs side by side, the distance of replicas tensor by tensor, and how it relates to accuracy.

    runs = run_bench(models, ways, scales=(8, 16), shardings=("iid", "label_sorted"), seeds=range(5))
    ranks(runs), relations(runs), tensor_rows(runs)

The profile of a moment is the L2 norm of every parameter tensor on every replica, taken before mixing. Metrics of inequality
over the replicas are the rows of METRICS. Norms can agree while vectors differ, so the consensus distance stands beside them.
A way of training is a row of a dict: name -> the GossipRule of n workers (a graph, Ada, or centralised). Every run of one
(model, n, sharding, seed) begins from the same weights and reads the same samples in the same order.

Source: the summary of arXiv 2509.12213 in this project's specification says that norms before averaging are profiled, and which
questions to ask of them. The formulas are the textbook ones; the paper's own could not be obtained.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from experiments.relaxed.dbench import METRICS, VarianceProfile, mean_ranks
from experiments.relaxed.gossip import GossipRule, train_on_graph
from experiments.relaxed.models import MODELS
from experiments.relaxed.sharded import Partition
from parsim.errors import AlgorithmError
from parsim.plans.mixing import Ada, mixing_graph
from parsim.relaxed.replicas import LocalTraining

ALL_METRICS = ("consensus", *METRICS)
"""The true distance between replicas, and the metrics of the norms of their tensors."""

Row = dict[str, Any]
"""A line of a table: name of a column -> text, number or truth value."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BenchRun:
    """One training run.

    Attributes:
        model, way, n, sharding, seed: which. score: of the averaged model at the end, accuracy or R^2; mean_score: the mean of
            the replicas' own. connections: messages that one replica sends per exchange, the mean over epochs.
        sent_bytes: by one replica in all. consensus: (1/n) sum |x_i - mean|^2 after the last exchange. profile: of every
            recorded exchange.
    """

    model: str
    way: str
    n: int
    sharding: str
    seed: int
    score: float
    mean_score: float
    connections: float
    sent_bytes: float
    consensus: float
    profile: VarianceProfile

    @property
    def setting(self) -> dict[str, Any]:
        """What the ways are compared within."""
        return {"model": self.model, "n": self.n, "sharding": self.sharding}

    def spread(self, metric: str) -> float:
        """Mean of a metric over recorded exchanges and tensors."""
        return float(self.profile.metric(metric).mean())


def run_bench(
    models: Mapping[str, Callable[[int], LocalTraining]],
    ways: Mapping[str, Callable[[int], GossipRule]],
    *,
    scales: Sequence[int],
    shardings: Sequence[str] = ("iid",),
    seeds: Sequence[int] = (0,),
    epochs: int = 20,
    batch: int = 8,
    every: int = 1,
) -> list[BenchRun]:
    """Every model on every scale, sharding and seed, by every way.

    Args:
        models: name -> LocalTraining of a seed. ways: name -> GossipRule of n. scales: numbers of replicas.
        batch: samples per replica and step. every: exchanges from one record of the profile to the next.

    Raises:
        AlgorithmError: nothing to run, or what the partition and the rules say (more workers than samples, a graph of a
            size that it cannot have).
    """
    if not models or not ways or not scales or not shardings or not seeds:
        raise AlgorithmError(
            f"DBench needs at least one model, way, scale, sharding and seed; got {len(models)}, {len(ways)}, {len(scales)}, "
            f"{len(shardings)} and {len(seeds)}"
        )
    runs = []
    for model, n, sharding, seed in product(models, scales, shardings, seeds):
        training = models[model](seed)
        partition = Partition(workers=n, epochs=epochs, batch=batch, sharding=sharding, seed=seed)
        for way, rule in ways.items():
            trained = train_on_graph(training, partition, rule(n), record_every=every)
            assert trained.profile is not None
            run = BenchRun(
                model=model,
                way=way,
                n=n,
                sharding=sharding,
                seed=seed,
                score=trained.score,
                mean_score=trained.replicas.mean_score,
                connections=float(np.mean([epoch.connections for epoch in trained.epochs])),
                sent_bytes=trained.epochs[-1].sent_bytes,
                consensus=trained.epochs[-1].consensus,
                profile=trained.profile,
            )
            runs.append(run)
            print(f"{model:12s} {sharding:13s} n={n:<3d} {way:22s} {run.score:.3f}", file=sys.stderr, flush=True)
    return runs


def summary(runs: Iterable[BenchRun]) -> list[Row]:
    """Per setting and way: mean and deviation of the scores over seeds, connections, bytes, and the mean of every metric."""
    rows = []
    for way, group in _by_way(runs):
        scores = [run.score for run in group]
        rows.append(
            {
                **group[0].setting,
                "way": way,
                "seeds": len(group),
                "score": _mean(scores),
                "score_deviation": float(np.std(scores, ddof=1)) if len(scores) > 1 else 0.0,
                "mean_replica_score": _mean(run.mean_score for run in group),
                "connections": _mean(run.connections for run in group),
                "sent_bytes": _mean(run.sent_bytes for run in group),
                "final_consensus": _mean(run.consensus for run in group),
                **{metric: _mean(run.spread(metric) for run in group) for metric in ALL_METRICS},
            }
        )
    return rows


def tensor_rows(runs: Iterable[BenchRun]) -> list[Row]:
    """Per setting, way and tensor: the mean of every metric of norms over recorded exchanges and seeds."""
    rows = []
    for way, group in _by_way(runs):
        values = {metric: np.mean([run.profile.metric(metric).mean(0) for run in group], axis=0) for metric in METRICS}
        for place, tensor in enumerate(group[0].profile.tensors):
            means = {metric: float(value[place]) for metric, value in values.items()}
            rows.append({**group[0].setting, "way": way, "tensor": tensor, **means})
    return rows


def ranks(runs: Iterable[BenchRun]) -> list[Row]:
    """Per setting and metric: the mean rank of every way (1: least variance) over exchanges, tensors and seeds. Beside it
    Kendall's tau of those ranks with the ways' mean score. -1: less variance goes with a better model."""
    rows = []
    for group in _grouped(runs, lambda run: tuple(run.setting.values())):
        scores = _per_way(group, lambda run: run.score)
        for metric in ALL_METRICS:
            by_seed = [
                mean_ranks({run.way: run.profile for run in seed}, metric) for seed in _grouped(group, lambda run: run.seed)
            ]
            mean = {way: _mean(ranked[way] for ranked in by_seed) for way in scores}
            rows.append({**group[0].setting, "metric": metric, "tau_with_score": kendall_tau(mean, scores), **mean})
    return rows


def relations(runs: Iterable[BenchRun]) -> list[Row]:
    """Per setting: Kendall's tau, over the ways, of the mean score and of the replicas' mean score with the number of
    connections and with the spread by every metric."""
    rows = []
    for group in _grouped(runs, lambda run: tuple(run.setting.values())):
        scores, own = _per_way(group, lambda run: run.score), _per_way(group, lambda run: run.mean_score)
        if len(scores) < 2:
            raise AlgorithmError("relations between ways need at least two of them; add a graph")
        quantities = {"connections": _per_way(group, lambda run: run.connections)}
        quantities |= {metric: _per_way(group, lambda run, metric=metric: run.spread(metric)) for metric in ALL_METRICS}
        for name, values in quantities.items():
            taus = {"tau_with_score": kendall_tau(values, scores), "tau_with_mean_replica_score": kendall_tau(values, own)}
            rows.append({**group[0].setting, "of": name, **taus})
    return rows


def kendall_tau(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """Kendall's tau-b of two values per way, in [-1, 1]: 1 for the same order; 0 where one of the two says nothing."""
    if len(first) < 2 or len(set(first.values())) < 2 or len(set(second.values())) < 2:
        return 0.0
    return float(kendalltau(list(first.values()), list(second.values())).statistic)


def _per_way(group: Sequence[BenchRun], value: Callable[[BenchRun], float]) -> dict[str, float]:
    """The mean of a value per way, in the order in which the ways ran."""
    return {way: _mean(value(run) for run in runs) for way, runs in _by_way(group)}


def _by_way(runs: Iterable[BenchRun]) -> list[tuple[str, list[BenchRun]]]:
    """The runs of every setting and way, which differ in the seed."""
    return [(group[0].way, group) for group in _grouped(runs, lambda run: (*run.setting.values(), run.way))]


def _grouped(runs: Iterable[BenchRun], key: Callable[[BenchRun], Any]) -> list[list[BenchRun]]:
    """Runs of equal key together, in the order in which the keys first came."""
    groups: dict[Any, list[BenchRun]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return list(groups.values())


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


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
    runs = run_bench(MODELS, WAYS, scales=scales, shardings=("iid", "label_sorted"), seeds=seeds, epochs=epochs, every=4)
    return {
        "dbench": summary(runs),
        "dbench_ranks": ranks(runs),
        "dbench_relations": relations(runs),
        "dbench_tensors": tensor_rows(runs),
    }
