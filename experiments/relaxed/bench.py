"""DBench: centralised and decentralised training side by side, over graphs, scales, models and shards, and what it shows.

    runs = run_bench(models, ways, scales=(8, 16), shardings=("iid", "label_sorted"), seeds=range(5))
    ranks(runs), relations(runs), tensor_rows(runs)

A way of training is a row of a dict: name -> the GossipRule of n workers (a graph, Ada, or centralised). Every run of one
(model, n, sharding, seed) begins from the same weights and reads the same samples in the same order.

Source of the questions (rank graphs by the variance of tensors over replicas; relate it and the number of connections to the
accuracy): the summary of arXiv 2509.12213 in this project's specification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from typing import Any

import numpy as np

from experiments.relaxed.dbench import METRICS, VarianceProfile, kendall_tau, mean_ranks
from experiments.relaxed.gossip import GossipRule, GossipRun, train_on_graph
from experiments.relaxed.sharded import Partition
from parsim.errors import AlgorithmError
from parsim.relaxed.replicas import LocalTraining

ALL_METRICS = ("consensus", *METRICS)
"""The true distance between replicas, and the metrics of the norms of their tensors."""

BenchRow = dict[str, Any]
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
    def setting(self) -> tuple[str, int, str]:
        """What the ways are compared within."""
        return self.model, self.n, self.sharding

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
    on_run: Callable[[BenchRun], None] | None = None,
) -> list[BenchRun]:
    """Every model on every scale, sharding and seed, by every way.

    Args:
        models: name -> LocalTraining of a seed. ways: name -> GossipRule of n. scales: numbers of replicas.
        batch: samples per replica and step. every: exchanges from one record of the profile to the next.
        on_run: sees each run as it ends.

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
            runs.append(_finished(trained, model, way, n, sharding, seed))
            if on_run is not None:
                on_run(runs[-1])
    return runs


def _finished(trained: GossipRun, model: str, way: str, n: int, sharding: str, seed: int) -> BenchRun:
    assert trained.profile is not None
    return BenchRun(
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


def summary(runs: Iterable[BenchRun]) -> list[BenchRow]:
    """Per setting and way: mean and deviation of the scores over seeds, connections, bytes, and the mean of every metric."""
    return [
        {
            **_labels(group[0]),
            "way": group[0].way,
            "seeds": len(group),
            "score": _mean(run.score for run in group),
            "score_deviation": _deviation([run.score for run in group]),
            "mean_replica_score": _mean(run.mean_score for run in group),
            "connections": _mean(run.connections for run in group),
            "sent_bytes": _mean(run.sent_bytes for run in group),
            "final_consensus": _mean(run.consensus for run in group),
            **{metric: _mean(run.spread(metric) for run in group) for metric in ALL_METRICS},
        }
        for group in _grouped(runs, lambda run: (run.setting, run.way))
    ]


def tensor_rows(runs: Iterable[BenchRun]) -> list[BenchRow]:
    """Per setting, way and tensor: the mean of every metric of norms over recorded exchanges and seeds."""
    rows = []
    for group in _grouped(runs, lambda run: (run.setting, run.way)):
        values = {metric: np.mean([run.profile.metric(metric).mean(0) for run in group], axis=0) for metric in METRICS}
        for place, tensor in enumerate(group[0].profile.tensors):
            means = {metric: float(value[place]) for metric, value in values.items()}
            rows.append({**_labels(group[0]), "way": group[0].way, "tensor": tensor, **means})
    return rows


def ranks(runs: Iterable[BenchRun]) -> list[BenchRow]:
    """Per setting and metric: the mean rank of every way (1: least variance) over exchanges, tensors and seeds. Beside it
    Kendall's tau of those ranks with the ways' mean score. -1: less variance goes with a better model."""
    rows = []
    for group in _grouped(runs, lambda run: run.setting):
        ways, scores = _scores(group)
        for metric in ALL_METRICS:
            by_seed = [
                mean_ranks({run.way: run.profile for run in seed}, metric) for seed in _grouped(group, lambda run: run.seed)
            ]
            mean = {way: _mean(entry[way] for entry in by_seed) for way in ways}
            tau = kendall_tau(list(mean.values()), scores) if len(ways) > 1 else 0.0
            rows.append({**_labels(group[0]), "metric": metric, "tau_with_score": tau, **mean})
    return rows


def relations(runs: Iterable[BenchRun]) -> list[BenchRow]:
    """Per setting: Kendall's tau, over the ways, of the mean score and of the replicas' mean score with the number of
    connections and with the spread by every metric."""
    rows = []
    for group in _grouped(runs, lambda run: run.setting):
        ways, scores = _scores(group)
        if len(ways) < 2:
            raise AlgorithmError("relations between ways need at least two of them; add a graph")
        own = _per_way(group, lambda run: run.mean_score)
        for name in ("connections", *ALL_METRICS):
            values = _per_way(group, partial(_quantity, name))
            taus = {"tau_with_score": kendall_tau(values, scores), "tau_with_mean_replica_score": kendall_tau(values, own)}
            rows.append({**_labels(group[0]), "of": name, **taus})
    return rows


def _quantity(name: str, run: BenchRun) -> float:
    """Connections, or the spread by a metric."""
    return run.connections if name == "connections" else run.spread(name)


def _scores(group: Sequence[BenchRun]) -> tuple[list[str], list[float]]:
    return list(dict.fromkeys(run.way for run in group)), _per_way(group, lambda run: run.score)


def _per_way(group: Sequence[BenchRun], value: Callable[[BenchRun], float]) -> list[float]:
    """The mean of a value per way, in the order in which the ways ran."""
    found: dict[str, list[float]] = {}
    for run in group:
        found.setdefault(run.way, []).append(value(run))
    return [_mean(values) for values in found.values()]


def _grouped(runs: Iterable[BenchRun], key: Callable[[BenchRun], Any]) -> list[list[BenchRun]]:
    """Runs of equal key together, in the order in which the keys first came."""
    listed = list(runs)
    order = {found: place for place, found in reversed(list(enumerate(map(key, listed))))}
    return [list(group) for _, group in groupby(sorted(listed, key=lambda run: order[key(run)]), key)]


def _labels(run: BenchRun) -> BenchRow:
    return {"model": run.model, "n": run.n, "sharding": run.sharding}


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _deviation(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
