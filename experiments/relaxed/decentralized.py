"""Decentralised training: how mixing graphs rank, what Ada buys, and what a step takes on clusters of V100s.

    python -m experiments.relaxed.decentralized [--quick] [--seed N] [--seeds N] [--parts P,...] [--out DIR] [--json]

Parts: figures (the specified accuracies and the spectral gaps); ada (schedules and closed loop); dbench (four models, three
scales, seven ways of training, every tensor); times (clusters of up to 1,008 GPUs); curves (accuracy over simulated seconds).
Tables go to DIR as CSV, figures as HTML; the finding stands in README.md, the verdicts are `judge.py`'s.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from experiments.common.running import add_parts
from experiments.relaxed.curves import curve_rows
from experiments.relaxed.dbench_tables import bench_tables
from experiments.relaxed.figures import draw
from experiments.relaxed.learning import ada_rows, figure_rows, gap_rows
from experiments.relaxed.times import scaling_rows, time_rows
from experiments.relaxed.whole_epochs import epoch_rows
from parsim.files import write_csv

Row = dict[str, Any]
Tables = dict[str, list[Row]]


def learning_part(arguments: argparse.Namespace) -> Tables:
    return {"figures": figure_rows(_seeds(arguments, 10), _epochs(arguments)), "gaps": gap_rows()}


def ada_part(arguments: argparse.Namespace) -> Tables:
    return {"ada": ada_rows(_seeds(arguments, 5), _epochs(arguments))}


def dbench_part(arguments: argparse.Namespace) -> Tables:
    scales = (8,) if arguments.quick else (16, 32, 64)
    return bench_tables(scales=scales, seeds=_seeds(arguments, 3), epochs=3 if arguments.quick else 20)


def times_part(arguments: argparse.Namespace) -> Tables:
    nodes = (1, 4) if arguments.quick else (1, 4, 16, 64, 168)
    return {
        "times": time_rows(nodes),
        "scaling": scaling_rows(),
        "epochs": epoch_rows((4,) if arguments.quick else (16, 168)),
    }


def curves_part(arguments: argparse.Namespace) -> Tables:
    return {"curves": curve_rows(next(iter(_seeds(arguments, 1))), _epochs(arguments))}


PARTS: dict[str, Callable[[argparse.Namespace], Tables]] = {
    "figures": learning_part,
    "ada": ada_part,
    "dbench": dbench_part,
    "times": times_part,
    "curves": curves_part,
}


def _seeds(arguments: argparse.Namespace, usual: int) -> range:
    count = 1 if arguments.quick else arguments.seeds or usual
    return range(arguments.seed, arguments.seed + count)


def _epochs(arguments: argparse.Namespace) -> int:
    return 5 if arguments.quick else 20


def rounded(row: Row) -> Row:
    return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in row.items()}


def show(name: str, rows: list[Row]) -> None:
    """A table of at most 80 lines; the whole is in the CSV file."""
    print(f"\n{name}")
    print(*rows[0], sep="\t")
    for row in rows[:80]:
        print(*(f"{value:.4g}" if isinstance(value, float) else value for value in row.values()), sep="\t")
    if len(rows) > 80:
        print(f"... {len(rows) - 80} more lines in {name}.csv")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, few epochs and scales: a check that all runs")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=0, help="how many; 0 for each part's usual number")
    add_parts(parser, tuple(PARTS))
    parser.add_argument("--out", type=Path, default=Path("runs/decentralized"))
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    tables: Tables = {}
    arguments.out.mkdir(parents=True, exist_ok=True)
    for part in arguments.parts:
        made = PARTS[part](arguments)
        for name, rows in made.items():
            write_csv(arguments.out / f"{name}.csv", [rounded(row) for row in rows])
        tables |= made
    draw(arguments.out, tables)
    result = {**tables, "wall_s": time.perf_counter() - began}
    if arguments.json:
        print(json.dumps(result))
        return
    for name, rows in tables.items():
        show(name, rows)
    print(f"{result['wall_s']:.0f} s; tables and figures in {arguments.out}")


if __name__ == "__main__":
    main()
