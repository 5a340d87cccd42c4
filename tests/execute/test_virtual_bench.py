"""DBench on small problems: what it records, how it ranks, and that ways of training see the same samples."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import kendalltau

import parsim
from parsim.errors import AlgorithmError, ConfigError, DataError, PlanError
from parsim.relaxed.dbench import ALL_METRICS, METRICS, BenchRun, ranks, relations, run_bench, summary, tensor_rows
from parsim.relaxed.problems import load_problem, perceptron
from parsim.relaxed.replicas import LocalOptimizer, LocalTraining

N = 8
ADA = "ada(start=6, rate=2.0, rounds=8, epochs=3)"
WAYS = ("all_reduce", "ring", "exponential", "complete", ADA)


def training(hidden: tuple[int, ...]) -> object:
    def made(seed: int) -> LocalTraining:
        problem = load_problem("generated", dtype=torch_double(), samples=320, features=6, classes=3)
        model = perceptron(problem, hidden, seed=seed, dtype=torch_double())
        return LocalTraining(model, problem, LocalOptimizer(learning_rate=0.2))

    return made


def torch_double() -> object:
    import torch

    return torch.float64


@pytest.fixture(scope="module")
def runs() -> list[BenchRun]:
    models = {"linear": training(()), "mlp": training((8,))}
    return run_bench(models, WAYS, replicas=(4, N), shards=("iid", "label_sorted"), seeds=(0, 1), epochs=3, batch=5, every=2)


@pytest.mark.slow
def test_every_combination_runs_once(runs: list[BenchRun]) -> None:
    assert len(runs) == len({(*run.setting.values(), run.way, run.seed) for run in runs}) == 2 * 2 * 2 * 2 * len(WAYS)
    assert {len(run.profile.tensors) for run in runs if run.model == "mlp"} == {4}
    assert all(run.profile.norms.shape[1] == (run.n if run.way != "all_reduce" else 1) for run in runs)
    table = summary(runs)
    assert len(table) == 2 * 2 * 2 * len(WAYS)
    assert {row["seeds"] for row in table} == {2}
    tensors = tensor_rows(runs)
    assert len(tensors) == 2 * 2 * len(WAYS) * (2 + 4)
    assert set(METRICS) <= set(tensors[0])


@pytest.mark.slow
def test_centralised_is_the_complete_graph_without_variance(runs: list[BenchRun]) -> None:
    """Plain SGD: averaging gradients is averaging weights, so the scores agree; only the recorded variance differs."""
    found = {(*run.setting.values(), run.seed, run.way): run for run in runs}
    for (*setting, seed, way), run in found.items():
        if way == "all_reduce":
            assert run.score == pytest.approx(found[*setting, seed, "complete"].score, abs=1e-12)
            assert run.mean_score == run.score
            assert all(abs(run.spread(metric)) <= 1e-14 for metric in ALL_METRICS)
            assert found[*setting, seed, "complete"].spread("consensus") > 0.0


@pytest.mark.slow
def test_graphs_are_ranked_and_related(runs: list[BenchRun]) -> None:
    table = {(row["model"], row["n"], row["sharding"], row["metric"]): row for row in ranks(runs)}
    row = table["mlp", N, "label_sorted", "consensus"]
    assert row["all_reduce"] == 1.0
    assert row["complete"] < row["exponential"] < row["ring"] <= len(WAYS)
    assert sum(row[way] for way in WAYS) == pytest.approx(len(WAYS) * (len(WAYS) + 1) / 2)
    setting = {"model": "mlp", "n": N, "sharding": "label_sorted"}
    related = {row["of"]: row for row in relations(runs) if setting.items() <= row.items()}
    group = [run for run in runs if run.setting == setting]
    by_way = {way: [run for run in group if run.way == way] for way in WAYS}
    connections = [np.mean([run.connections for run in found]) for found in by_way.values()]
    scores = [np.mean([run.score for run in found]) for found in by_way.values()]
    assert related["connections"]["tau_with_score"] == pytest.approx(kendalltau(connections, scores).statistic)
    assert set(related) == {"connections", *ALL_METRICS}


@pytest.mark.slow
def test_label_sorted_replicas_are_further_apart(runs: list[BenchRun]) -> None:
    table = {(row["model"], row["n"], row["sharding"], row["way"]): row for row in summary(runs)}
    for model in ("linear", "mlp"):
        apart, alike = (table[model, N, sharding, "ring"] for sharding in ("label_sorted", "iid"))
        assert apart["final_consensus"] > 2 * alike["final_consensus"]
        assert apart["mean_replica_score"] < alike["mean_replica_score"]
        ada = table[model, N, "iid", ADA]
        assert ada["connections"] == pytest.approx((6 + 4 + 2) / 3)


def test_bad_input() -> None:
    models = {"linear": training(())}
    with pytest.raises(
        AlgorithmError, match="at least one model, graph, number of replicas, kind of shards and seed; got 1, 0, 1, 1 and 1"
    ):
        run_bench(models, (), replicas=(4,))
    with pytest.raises(DataError, match="more samples"):
        run_bench(models, ("ring",), replicas=(1000,))
    one = run_bench(models, ("ring",), replicas=(4,), epochs=1, batch=5)
    with pytest.raises(AlgorithmError, match="at least two of them"):
        relations(one)


def test_the_bench_for_users_tells_scores_relations_and_what_cannot_be() -> None:
    found = parsim.bench_graphs(
        ("all_reduce", "ring"), models=("logistic",), replicas=(4,), shards=("iid",), epochs=1, batch=16
    )
    assert [row["way"] for row in found.tables["dbench"]] == ["all_reduce", "ring"]
    assert list(found.table()["n"]) == [4, 4]
    assert found.findings()[-1].startswith("iid: Kendall's tau of accuracy (of the replicas' own accuracy) with connections")
    assert set(found.to_dict()) == {"dbench", "dbench_ranks", "dbench_relations", "dbench_tensors", "findings"}
    with pytest.raises(ConfigError, match=r"unknown model 'mpl' of the graph bench; did you mean mlp\?"):
        parsim.bench_graphs(models=("mpl",))
    with pytest.raises(ConfigError, match="graphs are compared, and ring is one; add another"):
        parsim.bench_graphs(("ring",))
    with pytest.raises(PlanError, match="unknown mixing graph 'rnig'"):
        parsim.bench_graphs(("ring", "rnig"), replicas=(4,), epochs=1)
    with pytest.raises(AlgorithmError, match="has no round in 11 steps"):
        parsim.bench_graphs(("average/100", "ring"), models=("logistic",), epochs=1)
