"""Decentralised training: how mixing graphs rank, what Ada buys, and what a step takes on clusters of V100s.

    python -m experiments.relaxed.decentralized [--quick] [--seed N] [--seeds N] [--parts P,...] [--json]

Parts: figures (the specified accuracies and the spectral gaps); ada (schedules and closed loop); dbench (four models, three
scales, seven ways of training, every tensor); times (clusters of up to 1,008 GPUs); curves (accuracy over simulated seconds).
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from typing import Any

import torch

from experiments.common.running import part_parser, show
from experiments.relaxed.learning import ada_rows, curve_rows, figure_rows, gap_rows
from experiments.relaxed.times import epoch_rows, scaling_rows, time_rows
from parsim.relaxed.dbench import GRAPHS, MODELS, bench_tables, run_bench

Tables = dict[str, Any]
PARTS = ("figures", "ada", "dbench", "times", "curves")


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
        replicas, shards = (8,) if quick else (16, 32, 64), ("iid", "label_sorted")
        say = partial(print, file=sys.stderr, flush=True)
        epochs = 3 if quick else 20
        return bench_tables(run_bench(MODELS, GRAPHS, replicas=replicas, shards=shards, seeds=seeds(3), epochs=epochs, say=say))
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
