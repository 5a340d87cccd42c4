"""Epoch-averaged data parallelism: what averaging rarely costs in accuracy, and what it saves when workers are uneven.

python -m experiments.relaxed.epoch_averaging [--quick] [--seeds N] [--json]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from experiments.common.running import part_parser, show
from experiments.relaxed.arrivals import (
    MergedTraining,
    pairwise_merge_s,
    ring_synchronisation_s,
    train_by_arrival,
)
from experiments.relaxed.sharded import Averaged, Partition, train_averaged
from parsim.plans.mixing import MergeRule, arrival_weights, effective_workers
from parsim.plans.synchronisation import Synchronisation
from parsim.relaxed.problems import LearningProblem, load_problem, perceptron
from parsim.relaxed.replicas import LocalOptimizer, LocalTraining

SPECIFIED = {
    ("average", 20): {1: 0.979, 2: 0.976, 4: 0.970, 8: 0.951, 16: 0.917},
    ("half", 20): {1: 0.979, 2: 0.969, 4: 0.965, 8: 0.947, 16: 0.908},
    ("average", 40): {4: 0.981, 8: 0.963, 16: 0.948},
}
"""Accuracies this project was specified with: digits, 64-64-10, batch 16, SGD 0.1."""

MERGES: dict[str, dict[str, float]] = {"half": {}, "running": {}, "staleness": {"rate": 0.6}, "buffered": {"rate": 0.5}}
"""Merges and their numbers; `buffered` waits for half of the workers, so rate .5 moves as far per round as an average."""

WORKERS = 8
"""Of all tables but the first and the last two."""
Row = dict[str, Any]


def task(problem: LearningProblem, seed: int, learning_rate: float = 0.1) -> LocalTraining:
    model = perceptron(problem, (64,), seed=seed, dtype=problem.inputs.dtype)
    return LocalTraining(model, problem, LocalOptimizer(learning_rate=learning_rate))


def partition(workers: int, epochs: int, seed: int, **settings: Any) -> Partition:
    return Partition(workers=workers, epochs=epochs, batch=16, keep_remainder=True, seed=seed, **settings)


def averaged(problem: LearningProblem, part: Partition, learning_rate: float = 0.1, **rule: Any) -> Averaged:
    """Synchronous averaging at every epoch's end, unless `rule` says otherwise."""
    steps = part.order(problem).steps_per_epoch
    if part.workers == 1:  # nobody to average with
        only = Synchronisation(), steps * part.epochs
        return train_averaged(task(problem, part.seed, learning_rate), part, only)
    rule.setdefault("period_steps", steps)
    phase = Synchronisation(kind="average", **rule), steps * part.epochs
    return train_averaged(task(problem, part.seed, learning_rate), part, phase)


def merged(problem: LearningProblem, part: Partition, kind: str, learning_rate: float = 0.1, **settings: Any) -> MergedTraining:
    """Merging in arrival order."""
    rule = MergeRule(kind=kind, workers=part.workers, buffer=max(1, part.workers // 2), **MERGES[kind])
    return train_by_arrival(task(problem, part.seed, learning_rate), part, rule, **settings)


def repeated(run: Callable[[int], Averaged | MergedTraining], seeds: int, **labels: Any) -> Row:
    """Mean and deviation of the final score over seeds, beside `labels`."""
    scores = np.array([run(seed).score for seed in range(seeds)])
    row = {
        **labels,
        "score": round(float(scores.mean()), 4),
        "deviation": round(float(scores.std(ddof=1)) if seeds > 1 else 0.0, 4),
        "seeds": seeds,
        "scores": [round(float(score), 6) for score in scores],
    }
    print(*labels.values(), f"{row['score']:.3f} ± {row['deviation']:.3f}", file=sys.stderr, flush=True)
    return row


def scaling_table(problem: LearningProblem, seeds: int, workers: tuple[int, ...], epochs: tuple[int, ...]) -> list[Row]:
    """Accuracy against workers: a fixed number of epochs over the data, split among more and more of them."""
    rows = []
    for count in workers:
        for length in epochs:
            kinds = ["average", "half"] if count == 1 else ["average", *MERGES]
            for kind in kinds if length == epochs[0] else ["average"]:

                def run(seed: int, kind: str = kind, count: int = count, length: int = length) -> Averaged | MergedTraining:
                    part = partition(count, length, seed)
                    return averaged(problem, part) if kind == "average" else merged(problem, part, kind)

                row = repeated(run, seeds, rule=kind, workers=count, epochs=length)
                row["specified"] = SPECIFIED.get((kind, length), {}).get(count)
                rows.append(row)
    return rows


def period_table(problem: LearningProblem, seeds: int, epochs: int) -> list[Row]:
    """How often to average, and the outer optimizer: accuracy beside the number of exchanges."""
    steps = partition(WORKERS, epochs, 0).order(problem).steps_per_epoch
    every_epoch = {"kind": "average", "period_steps": steps}
    phases: dict[str, list[tuple[dict[str, Any], int]]] = {
        "every step": [({"kind": "average"}, epochs)],
        "every 4 steps": [({"kind": "average", "period_steps": 4}, epochs)],
        "every epoch": [(every_epoch, epochs)],
        "every 2 epochs": [({"kind": "average", "period_steps": 2 * steps}, epochs)],
        "every 5 epochs": [({"kind": "average", "period_steps": 5 * steps}, epochs)],
        "only at the end": [({"kind": "average", "period_steps": epochs * steps}, epochs)],
        "post-local: 5 epochs synchronous, then every epoch": [({"kind": "average"}, 5), (every_epoch, epochs - 5)],
        "every epoch, outer Nesterov .7/.9 (DiLoCo)": [(every_epoch | {"outer_optimizer": "nesterov"}, epochs)],
        "every epoch, outer Nesterov .7/.5": [(every_epoch | {"outer_optimizer": "nesterov", "outer_momentum": 0.5}, epochs)],
    }
    rows = []
    for name, lengths in phases.items():
        rules = [(Synchronisation(**keys), steps * length) for keys, length in lengths if length]

        def run(seed: int, rules: list[tuple[Synchronisation, int]] = rules) -> Averaged:
            return train_averaged(task(problem, seed), partition(WORKERS, epochs, seed), *rules)

        row = repeated(run, seeds, rule=name)
        row["exchanges"] = sum(-(-count // rule.period_steps) for rule, count in rules)
        rows.append(row)
    return rows


def federated_table(problem: LearningProblem, seeds: int, epochs: int) -> list[Row]:
    """Shards that are not alike, averages weighted or not, workers that sit out, all with an average per epoch."""
    uneven = tuple(float(2**place) for place in range(WORKERS // 2)) * 2
    settings: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "iid": ({}, {}),
        "label-sorted": ({"sharding": "label_sorted"}, {}),
        "Dirichlet .1": ({"sharding": "dirichlet", "concentration": 0.1}, {}),
        "Dirichlet .1, weighted by samples": ({"sharding": "dirichlet", "concentration": 0.1}, {"weighted": True}),
        "Dirichlet 1": ({"sharding": "dirichlet", "concentration": 1.0}, {}),
        "sizes 1:2:4:8 twice": ({"proportions": uneven}, {}),
        "sizes 1:2:4:8 twice, weighted by samples": ({"proportions": uneven}, {"weighted": True}),
        "half take part": ({}, {"participation": 0.5}),
        "label-sorted, half take part": ({"sharding": "label_sorted"}, {"participation": 0.5}),
        "label-sorted, every 4 steps": ({"sharding": "label_sorted"}, {"period_steps": 4}),
    }
    rows = []
    for name, (shards, keys) in settings.items():

        def run(seed: int, shards: dict[str, Any] = shards, keys: dict[str, Any] = keys) -> Averaged:
            part, rule = partition(WORKERS, epochs, seed, **shards), dict(keys)
            if rule.pop("weighted", False):
                rule["weights"] = (part.order(problem).sample_weights,)
            if "participation" in rule:
                rule["seed"] = seed
            return averaged(problem, part, **rule)

        rows.append(repeated(run, seeds, setting=name))
    return rows


def straggler_table(problem: LearningProblem, seeds: int, epochs: int) -> list[Row]:
    """One of 8 workers at half speed. All run until the synchronous epochs are over, in units of a fast worker's epoch."""
    steps = partition(WORKERS, epochs, 0).order(problem).steps_per_epoch
    merges = int((WORKERS - 0.5) * 2 * epochs)

    def slow_first(worker: int, _: int) -> float:
        return (2.0 if worker == 0 else 1.0) / steps

    rows = []
    for kind in ("average", *MERGES):

        def run(seed: int, kind: str = kind) -> Averaged | MergedTraining:
            part = partition(WORKERS, epochs, seed)
            if kind == "average":
                return averaged(problem, part)
            return merged(problem, part, kind, step_s=slow_first, total_merges=merges)

        first = run(0)
        # an averaged epoch ends when the slow worker, twice as long as the others, is done
        end_s = 2.0 * len(first.by_epoch) if isinstance(first, Averaged) else first.curve[-1][0]
        local_epochs = WORKERS * epochs if kind == "average" else merges
        rows.append(
            repeated(run, seeds, rule=kind)
            | {
                "simulated_s": round(end_s, 3),
                "local_epochs": local_epochs,
                "epochs_per_s_against_no_straggler": round(local_epochs / end_s / WORKERS, 4),
            }
        )
    return rows


def regression_table(seeds: int, epochs: int) -> list[Row]:
    """R^2 on diabetes against workers, mean squared error, SGD 0.01."""
    problem = load_problem("diabetes", dtype=torch.float64)

    def run(seed: int, workers: int, kind: str) -> Averaged | MergedTraining:
        part = partition(WORKERS, epochs, seed)
        return averaged(problem, part, 0.01) if kind == "average" else merged(problem, part, kind, 0.01)

    return [
        repeated(lambda seed, workers=workers, kind=kind: run(seed, workers, kind), seeds, rule=kind, workers=workers)
        for workers in (1, 4, 16)
        for kind in ("average", "half")
    ]


def time_table() -> list[Row]:
    """Seconds of one synchronisation of ResNet-50's weights (102.2 MB), 12.5 GB/s links with 5 us, 10 GB/s of memory."""
    size, link, memory = 102.2e6, 12.5e9, 10e9
    merge_s = pairwise_merge_s(size, bandwidth_bytes_per_s=link, memory_bytes_per_s=memory)
    rows = []
    for workers in (2, 4, 8, 16, 32, 64):
        half = arrival_weights(MergeRule(kind="half", workers=workers), workers)
        ring_s = ring_synchronisation_s(workers, size, bandwidth_bytes_per_s=link, latency_s=5e-6)
        rows.append(
            {
                "workers": workers,
                "master_s": round(workers * merge_s, 5),
                "ring_s": round(ring_s, 5),
                "one_merge_s": round(merge_s, 5),
                "workers_that_count_under_half": round(effective_workers(half[1:] / half[1:].sum()), 3),
                "speed_up_with_serial_fraction_.035": round(workers / (1.0 + 0.035 * (workers - 1)), 2),
            }
        )
    return rows


def main() -> None:
    parser = part_parser(__doc__, "one seed, few workers")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    problem = load_problem("digits", dtype=torch.float64)
    seeds = 1 if options.quick else options.seeds
    workers, lengths, epochs = ((4, 16), (5,), 5) if options.quick else ((1, 2, 4, 8, 16, 32, 64), (20, 40), 20)
    tables = {
        "scaling": scaling_table(problem, seeds, workers, lengths),
        "periods": period_table(problem, seeds, epochs),
        "federated": federated_table(problem, seeds, epochs),
        "straggler": straggler_table(problem, seeds, epochs),
        "regression": regression_table(seeds, 5 * epochs),
        "times": time_table(),
    }
    show(tables | {"wall_s": time.perf_counter() - began}, as_json=options.json)


if __name__ == "__main__":
    main()
