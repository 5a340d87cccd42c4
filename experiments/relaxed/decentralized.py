"""Decentralised training: how mixing graphs rank, what Ada buys, and what a step takes on clusters of V100s.

    python -m experiments.relaxed.decentralized [--quick] [--seed N] [--seeds N] [--parts P,...] [--json]

Parts: figures (the specified accuracies and the spectral gaps); ada (schedules and closed loop); dbench (four models, three
scales, seven ways of training); normalised (the same of a residual net with BatchNorm on images in CIFAR-10's format); times
(clusters of up to 1,008 GPUs); curves (accuracy over simulated seconds).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from experiments.common.running import part_parser, show
from experiments.relaxed.coloured_digits import SIDE, coloured_digits
from experiments.relaxed.learning import ada_rows, curve_rows, figure_rows, gap_rows
from experiments.relaxed.times import epoch_rows, scaling_rows, time_rows
from parsim.app.learners import module_of
from parsim.model.spec import ModelSpec
from parsim.relaxed.dbench import GRAPHS, MODELS, bench_tables, run_bench
from parsim.relaxed.replicas import LocalOptimizer, LocalTraining

Tables = dict[str, Any]
PARTS = ("figures", "ada", "dbench", "normalised", "times", "curves")
NARROW = ModelSpec(name="resnet_small", args={"width": 4}, input_shape=(3, SIDE, SIDE))


def residual(seed: int) -> LocalTraining:
    """Eight residual blocks of 4 to 32 channels with BatchNorm; SGD .05 with momentum .9."""
    optimizer = LocalOptimizer(kind="sgd_momentum", learning_rate=0.05)
    return LocalTraining(module_of(NARROW, seed), coloured_digits(8192, 2000), optimizer)


def rounded(tables: Tables) -> Tables:
    """Figures of six digits."""
    return {
        name: [{key: float(f"{cell:.6g}") if isinstance(cell, float) else cell for key, cell in row.items()} for row in rows]
        for name, rows in tables.items()
    }


def bench(name: str, models: Mapping[str, Callable[[int], LocalTraining]], **sizes: Any) -> Tables:
    """Tables of DBench under a name, without those of every tensor."""
    say = partial(print, file=sys.stderr, flush=True)
    tables = bench_tables(run_bench(models, GRAPHS, shards=("iid", "label_sorted"), say=say, **sizes))
    return rounded({key.replace("dbench", name): rows for key, rows in tables.items() if key != "dbench_tensors"})


def made(part: str, options: argparse.Namespace) -> Tables:
    """The tables of one part."""
    quick, epochs = options.quick, 5 if options.quick else 20

    def seeds(usual: int) -> range:
        return range(options.seed, options.seed + (1 if quick else options.seeds or usual))

    if part == "figures":
        return {"figures": figure_rows(seeds(10), epochs), "gaps": gap_rows()}
    if part == "ada":
        return {"ada": ada_rows(seeds(5), epochs)}
    if part == "dbench":
        replicas, epochs = ((8,), 3) if quick else ((16, 32, 64), 20)
        return bench(part, MODELS, replicas=replicas, seeds=seeds(3), epochs=epochs)
    if part == "normalised":
        replicas, epochs = ((64,), 1) if quick else ((16, 64), 8)
        return bench(part, {"residual": residual}, replicas=replicas, seeds=seeds(1), epochs=epochs)
    if part == "times":
        times = time_rows((1, 4) if quick else (1, 4, 16, 64, 168))
        return {"times": times, "scaling": scaling_rows(), "epochs": epoch_rows((4,) if quick else (16, 168))}
    return {"curves": curve_rows(options.seed, epochs)}


def main() -> None:
    parser = part_parser(__doc__, "one seed, few epochs and scales", parts=PARTS)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=0, help="how many; 0 for each part's usual number")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    tables: Tables = {}
    for part in options.parts:
        tables |= made(part, options)
    show(tables | {"wall_s": time.perf_counter() - began}, as_json=options.json)


if __name__ == "__main__":
    main()
