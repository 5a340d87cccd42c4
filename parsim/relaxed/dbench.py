"""DBench: training on several graphs side by side, the distance of replicas tensor by tensor, and how it relates to accuracy.

    runs = run_bench(models, graphs, replicas=(8, 16), shards=("iid", "label_sorted"), seeds=range(5))
    ranks(runs), relations(runs), tensor_rows(runs)

The profile of a moment is the L2 norm of every parameter tensor on every replica, taken before mixing. Metrics of inequality
over the replicas are the rows of METRICS. Norms can agree while vectors differ, so the consensus distance stands beside them.
A graph is a rule of a plan (`gossip/1 ring`), trained by the replicas' own programs; `all_reduce` is centralised training,
whose replicas are equal. Every run of one (model, n, shards, seed) begins from the same weights and reads the same samples.

Source: the summary of arXiv 2509.12213 in this project's specification says that norms before averaging are profiled, and which
questions to ask of them. The formulas are the textbook ones; the paper's own could not be obtained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import kendalltau, rankdata
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from parsim.data.shards import ShardedOrder, deal
from parsim.errors import AlgorithmError
from parsim.model.catalogue.networks import VisionTransformer
from parsim.plans.mixing import connections
from parsim.plans.synchronisation import Synchronisation, parse_synchronisation
from parsim.relaxed.problems import load_problem, perceptron
from parsim.relaxed.replicas import LocalOptimizer, LocalTraining, Workers, steps_of

Values = NDArray[np.float64]
ADA = "ada"


GRAPHS = ("all_reduce", "ring", "one_peer_exponential", "torus", "exponential", "complete", ADA)
"""Compared unless others are given."""


def gini(values: Values) -> Values:
    """sum_i sum_j |a_i - a_j| / (2 n^2 mean) over the first axis of [n, ...] >= 0: 0 for equal values (and zeros), (n-1)/n when
    one worker has all."""
    n = len(values)
    ordered = np.sort(values, axis=0)
    place = np.arange(1, n + 1).reshape(-1, *[1] * (values.ndim - 1))
    total = ordered.sum(0)
    return _ratio(2.0 * ((place - (n + 1) / 2) * ordered).sum(0), n * total)


def quartile_coefficient(values: Values) -> Values:
    """(Q3 - Q1)/(Q3 + Q1), quartiles interpolated linearly, over the first axis."""
    low, high = np.quantile(values, [0.25, 0.75], axis=0)
    return _ratio(high - low, high + low)


METRICS: dict[str, Callable[[Values], Values]] = {
    "coefficient_of_variation": lambda values: _ratio(values.std(0), values.mean(0)),
    "dispersion_index": lambda values: _ratio(values.var(0), values.mean(0)),
    "gini": gini,
    "quartile_coefficient": quartile_coefficient,
}
"""Over the first axis, with deviation and variance of the population; the index of dispersion has the unit of the values."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VarianceProfile:
    """What was recorded of one training run: names of tensors [l], the rounds recorded [r], norms before mixing [r, n, l], and
    the distance before mixing and after it [r]."""

    tensors: tuple[str, ...]
    rounds: NDArray[np.int64]
    norms: Values
    consensus: Values
    consensus_after: Values

    @classmethod
    def of(cls, training: LocalTraining, records: Sequence[tuple[int, Values, float, float]]) -> VarianceProfile:
        """From (exchange, norms [n, l], distance before, distance after) of every recorded exchange."""
        rounds, norms, before, after = zip(*records, strict=True)
        return cls(
            tensors=tuple(name for name, _ in training.tensors),
            rounds=np.array(rounds, dtype=np.int64),
            norms=np.stack(norms),
            consensus=np.array(before),
            consensus_after=np.array(after),
        )

    def metric(self, name: str) -> Values:
        """[r, l]: a row of METRICS over the replicas, or `consensus` [r, 1]."""
        if name == "consensus":
            return self.consensus[:, None]
        if name not in METRICS:
            raise AlgorithmError(f"unknown metric {name!r}; known: consensus, {', '.join(METRICS)}")
        measured: Values = METRICS[name](np.moveaxis(self.norms, 1, 0))
        return measured


def mean_ranks(profiles: Mapping[str, VarianceProfile], metric: str) -> dict[str, float]:
    """Per graph its mean rank by a metric: at each recorded round and tensor the graphs are ranked, 1 the least variance; ties
    share the mean of their ranks. Rules that mix at other steps are ranked by each tensor's mean over their own rounds.
    Raises AlgorithmError: profiles of other tensors."""
    names = list(profiles)
    values = [profiles[name].metric(metric) for name in names]
    if len({value.shape for value in values}) != 1:
        values = [value.mean(0, keepdims=True) for value in values]
    if len({value.shape for value in values}) != 1:
        raise AlgorithmError("graphs can be ranked only over the same tensors; record them with the same model")
    ranks = rankdata(np.stack(values).reshape(len(names), -1), axis=0)
    return dict(zip(names, ranks.mean(1).tolist(), strict=True))


ALL_METRICS = ("consensus", *METRICS)
"""The true distance between replicas, and the metrics of the norms of their tensors."""

BenchRow = dict[str, Any]
"""A line of a table: name of a column -> text, number or truth value."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BenchRun:
    """One training run.

    way: the graph. score, mean_score: accuracy or R^2 at the end, of the averaged model and the mean of the replicas' own.
    connections: messages that one replica sends per step. sent_bytes: by one replica in all. consensus: (1/n) sum |x_i -
    mean|^2 at the end.
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
        return {"model": self.model, "n": self.n, "sharding": self.sharding}

    def spread(self, metric: str) -> float:
        """Mean of a metric over recorded exchanges and tensors."""
        return float(self.profile.metric(metric).mean())


def run_bench(
    models: Mapping[str, Callable[[int], LocalTraining]],
    graphs: Sequence[str],
    *,
    replicas: Sequence[int],
    shards: Sequence[str] = ("iid",),
    seeds: Sequence[int] = (0,),
    epochs: int = 20,
    batch: int = 8,
    every: int = 4,
    say: Callable[[str], None] | None = None,
) -> list[BenchRun]:
    """Every model (a LocalTraining by seed) on every number of replicas, kind of shards and seed, by every graph (`rule_of`).

    batch: samples per replica and step. every: exchanges from one record of the profile to the next. say: is told of runs.

    Raises AlgorithmError: nothing to run, or a graph of a size that it cannot have. PlanError: an unknown graph. DataError:
    more replicas than samples, or unknown shards.
    """
    if not models or not graphs or not replicas or not shards or not seeds:
        raise AlgorithmError(
            f"DBench needs at least one model, graph, number of replicas, kind of shards and seed; got {len(models)}, "
            f"{len(graphs)}, {len(replicas)}, {len(shards)} and {len(seeds)}"
        )
    if min(epochs, batch, every, *replicas) < 1:
        raise AlgorithmError(
            f"epochs, batch, every and replicas are at least 1; got {epochs}, {batch}, {every}, {list(replicas)}"
        )
    runs = []
    for model, n, sharding, seed in product(models, replicas, shards, seeds):
        training = models[model](seed)
        targets = training.problem.targets.flatten().numpy()
        order = ShardedOrder(shards=deal(sharding, targets, n, seed=seed), global_batch=n * batch, seed=seed)
        for graph in graphs:
            run = _trained(training, rule_of(graph, n, order.steps_per_epoch, epochs), order, n, epochs, every)
            runs.append(BenchRun(model=model, way=graph, n=n, sharding=sharding, seed=seed, **run))
            if say is not None:
                say(f"{model}, {n} replicas, {sharding}, {graph}, seed {seed}: {runs[-1].score:.3f}")
    return runs


def rule_of(graph: str, replicas: int, steps: int, epochs: int) -> Synchronisation:
    """The rule that a graph stands for: "all_reduce", a graph of a plan that is mixed in every step, or a whole rule. "ada"
    begins with n - 2 neighbours and has n / 16 fewer in every epoch of so many steps. Raises PlanError."""
    if graph == ADA:
        graph = f"ada(start={replicas - 2}, rate={replicas / 16}, rounds={steps}, epochs={epochs})"
    is_rule = graph.split("/")[0].split(" ")[0] in ("all_reduce", "average", "gossip", "merge")
    return parse_synchronisation(graph if is_rule else f"gossip/1 {graph}")


def _trained(
    training: LocalTraining, rule: Synchronisation, order: ShardedOrder, n: int, epochs: int, every: int
) -> dict[str, Any]:
    if rule.kind == "gossip" and rule.graph:
        rule.mixing.check(n)
    mixing = n if rule.mixes else 1
    records: list[tuple[int, Values, float, float]] = []
    seen: list[tuple[int, Values, float]] = []
    sent = 0

    def before_round(number: int, weights: Tensor) -> None:
        if number % every == 0:
            seen.append((number, norms(training, weights), consensus(weights)))

    steps = epochs * order.steps_per_epoch
    states = steps_of(rule, mixing, training, order, before_round=before_round)
    workers, mean, number = Workers.fresh(training.start[None]), training.start, 0
    for step, (workers, kept) in enumerate(islice(states, steps)):
        if not rule.mixes:
            before_round(step, workers.weights)
        mean = kept.mean(workers.weights)
        if seen:
            records.append((*seen.pop(), consensus(workers.weights)))
        if rule.due(step) or not rule.mixes:
            sent += _connections(rule, number, n)
            number = kept.round_of(rule)
    if not records:
        raise AlgorithmError(f"{rule} has no round in {steps} steps, so there is nothing to compare; train more epochs")
    scores = [training.score(row, workers.take([place]).buffers) for place, row in enumerate(workers.weights)]
    return {
        "score": training.score(mean, workers.mean_buffers),
        "mean_score": _mean(scores),
        "connections": sent / steps,
        "sent_bytes": float(sent * training.weight_bytes),
        "consensus": consensus(workers.weights),
        "profile": VarianceProfile.of(training, records),
    }


def _connections(rule: Synchronisation, number: int, n: int) -> int:
    """Messages of one replica in round `number`: of all_reduce and average those to all others."""
    if rule.kind == "gossip":
        return connections(rule.matrix(number, n))
    return 1 if rule.kind == "merge" else n - 1


def norms(training: LocalTraining, weights: Tensor) -> Values:
    """The L2 norm of every parameter tensor on every replica: float64 [n, tensors]."""
    pieces = torch.split(weights, [size for _, size in training.tensors], dim=1)
    return np.stack([piece.double().norm(dim=1).numpy() for piece in pieces], axis=1)


def consensus(weights: Tensor) -> float:
    """(1/n) sum_i |x_i - mean|^2."""
    return float((weights - weights.mean(0)).double().square().sum() / len(weights))


def summary(runs: Iterable[BenchRun]) -> list[BenchRow]:
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


def tensor_rows(runs: Iterable[BenchRun]) -> list[BenchRow]:
    """Per setting, way and tensor: the mean of every metric of norms over recorded exchanges and seeds."""
    rows = []
    for way, group in _by_way(runs):
        values = {metric: np.mean([run.profile.metric(metric).mean(0) for run in group], axis=0) for metric in METRICS}
        for place, tensor in enumerate(group[0].profile.tensors):
            means = {metric: float(value[place]) for metric, value in values.items()}
            rows.append({**group[0].setting, "way": way, "tensor": tensor, **means})
    return rows


def ranks(runs: Iterable[BenchRun]) -> list[BenchRow]:
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


def relations(runs: Iterable[BenchRun]) -> list[BenchRow]:
    """Per setting: Kendall's tau, over the ways, of the mean score and of the replicas' mean score with the number of
    connections and with the spread by every metric."""
    rows = []
    for group in _grouped(runs, lambda run: tuple(run.setting.values())):
        scores, own = _per_way(group, lambda run: run.score), _per_way(group, lambda run: run.mean_score)
        if len(scores) < 2:
            raise AlgorithmError("relations between ways need at least two of them; add a graph")
        quantities = {"connections": _per_way(group, lambda run: run.connections)}
        quantities |= {metric: _per_way(group, partial(BenchRun.spread, metric=metric)) for metric in ALL_METRICS}
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
    groups: dict[Any, list[BenchRun]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return list(groups.values())


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _ratio(above: Values, below: Values) -> Values:
    """above / below, 0 where below is 0."""
    result: Values = np.divide(
        above, below, out=np.zeros_like(np.asarray(above, dtype=np.float64)), where=np.asarray(below) != 0
    )
    return result


def bench_tables(runs: Sequence[BenchRun]) -> dict[str, list[BenchRow]]:
    """Summary per model, number of replicas, shards and graph; ranks; relations; every tensor's metrics."""
    return {
        "dbench": summary(runs),
        "dbench_ranks": ranks(runs),
        "dbench_relations": relations(runs),
        "dbench_tensors": tensor_rows(runs),
    }


# The models that `bench-graphs` trains on scikit-learn's digits.


DTYPE = torch.float32


def mlp(seed: int, *, dtype: torch.dtype = torch.float64) -> LocalTraining:
    """64-64-10, ReLU, He initialisation from NumPy's PCG64, SGD .1: the setting of the specified figures."""
    problem = load_problem("digits", dtype=dtype)
    return LocalTraining(perceptron(problem, (64,), seed=seed, dtype=dtype), problem, LocalOptimizer(learning_rate=0.1))


def logistic(seed: int) -> LocalTraining:
    """64-10: convex; SGD .1."""
    problem = load_problem("digits", dtype=DTYPE)
    return LocalTraining(perceptron(problem, (), seed=seed, dtype=DTYPE), problem, LocalOptimizer(learning_rate=0.1))


def cnn(seed: int) -> LocalTraining:
    """Two convolutions of 8 and 16 channels with stride 2 and a linear layer; SGD .05 with momentum .9."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64, 10),
        )
    optimizer = LocalOptimizer(kind="sgd_momentum", learning_rate=0.05)
    return LocalTraining(model.to(DTYPE), load_problem("digits", dtype=DTYPE), optimizer)


class PlainAttention(nn.Sequential):
    """Modules in turn, attention written out: the fused kernel of a CPU has no rule for many replicas at once."""

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            result: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return result


def transformer(seed: int) -> LocalTraining:
    """A vision transformer of one layer of width 16 on four patches; Adam .01."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        encoder = VisionTransformer(input_shape=(1, 8, 8), patch=4, hidden=16, layers=1, heads=2, num_classes=10, dropout=0.0)
    model = PlainAttention(nn.Unflatten(1, (1, 8, 8)), encoder).to(DTYPE)
    return LocalTraining(model, load_problem("digits", dtype=DTYPE), LocalOptimizer(kind="adam", learning_rate=0.01))


MODELS: dict[str, Callable[[int], LocalTraining]] = {
    "logistic": logistic,
    "mlp": lambda seed: mlp(seed, dtype=DTYPE),
    "cnn": cnn,
    "transformer": transformer,
}
