"""How far are predictions for V100s from what was published?

    python -m experiments.published.v100_published --data DIR [--json]

DIR holds throughput.csv and collectives.csv. Tables: single-GPU training throughput from operators alone (no row of a whole
model enters the prediction) and with the shipped efficiency; eight GPUs through plan, graph and simulator with and without
communication; published collectives by size.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from experiments.common.running import show
from parsim.costs.estimate import medians_s
from parsim.engines.program import mean_step_s
from parsim.errors import DataError
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import Profile
from parsim.predict.evaluate import REPEATED_STEPS
from parsim.units import MIB
from tools.published.v100_collectives import CollectiveRow, read_collective_rows
from tools.published.v100_throughput import (
    PublishedRow,
    medians,
    predicted_samples_per_s,
    read_rows,
    simulated,
    without_efficiency,
)

PROFILE = "dgx1-v100-32gb"
OPERATORS, DEFAULT = "operators alone", "with the efficiency"
SIZE_BANDS = (("< 512 KiB", MIB // 2), ("512 KiB - 8 MiB", 8 * MIB + 1), ("8 - 16 MiB", 16 * MIB), (">= 16 MiB", None))

Case = tuple[str, str, int, int]
Line = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with throughput.csv and collectives.csv")
    parser.add_argument("--json", action="store_true", help="the tables as one JSON document")
    options = parser.parse_args()
    try:
        rows, _ = read_rows(options.data)
        collectives, _ = read_collective_rows(options.data)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    shipped = load_profile(PROFILE)
    single = single_gpu(rows, shipped)
    tables = {
        "single_gpu": single,
        "single_gpu_summary": summary(single),
        "eight_gpus": [line for profile in (without_efficiency(shipped), shipped) for line in eight_gpus(rows, profile)],
        "collectives": by_band(collectives),
    }
    show(tables, as_json=options.json)
    return 0


def single_gpu(rows: Sequence[PublishedRow], profile: Profile) -> list[Line]:
    """Per case of one GPU: the median published, predicted from operators alone, and as the shipped profile predicts."""
    lines = []
    for case, published in medians(rows).items():
        if case[3] != 1:
            continue
        ids = [row.id for row in rows if row.case == case]
        alone, default = (predicted_samples_per_s(case, each) for each in (without_efficiency(profile), profile))
        lines.append(
            {
                "model": case[0],
                "precision": case[1],
                "batch": case[2],
                "rows": len(ids),
                "published_per_s": round(published, 2),
                OPERATORS: round(alone, 2),
                "error": percent(alone / published - 1),
                DEFAULT: round(default, 2),
                "error with it": percent(default / published - 1),
                "ids": " ".join(ids),
            }
        )
    return lines


def summary(lines: Sequence[Line]) -> list[Line]:
    """Median and worst of the absolute errors, per model and precision and over all."""
    groups = dict.fromkeys((line["model"], line["precision"]) for line in lines)
    found = []
    for group in [*groups, ("all", "")]:
        own = [line for line in lines if group[0] == "all" or (line["model"], line["precision"]) == group]
        alone, default = ([abs(float(line[key].rstrip("%"))) for line in own] for key in ("error", "error with it"))
        found.append(
            {
                "model": group[0],
                "precision": group[1],
                "cases": len(own),
                f"median, {OPERATORS}": f"{median(alone):.1f}%",
                "worst": f"{max(alone):.1f}%",
                f"median, {DEFAULT}": f"{median(default):.1f}%",
                "worst with it": f"{max(default):.1f}%",
            }
        )
    return found


def eight_gpus(rows: Sequence[PublishedRow], profile: Profile) -> list[Line]:
    """Throughput and scaling efficiency, simulated; the same program with communication that takes no time.

    Published efficiency: over the fastest row of the case on one GPU, which is that of the same program in the same report.
    """
    published = medians(rows)
    lines = []
    for case in published:
        model, precision, batch, gpus = case
        if gpus == 1:
            continue
        problem, evaluation = simulated(case, profile)
        one = predicted_samples_per_s((model, precision, batch, 1), profile)
        predicted = evaluation.result.throughput_samples_per_s.median
        columns = evaluation.compiled.columns
        seconds = medians_s(evaluation.estimates)[columns.unit]
        seconds[columns.communicates] = 0.0
        silent_s = mean_step_s(evaluation.compiled, seconds[None, :], evaluation.overlap, steps=REPEATED_STEPS)[0]
        silent = problem.global_batch / float(silent_s)
        base = max(row.samples_per_s for row in rows if row.case == (model, precision, batch, 1))
        lines.append(
            {
                "profile": DEFAULT if profile.compute.efficiencies else OPERATORS,
                "model": f"{model} {precision} x {batch}",
                "gpus": gpus,
                "published_per_s": published[case],
                "predicted_per_s": round(predicted, 1),
                "error": percent(predicted / published[case] - 1),
                "no communication_per_s": round(silent, 1),
                "published efficiency": f"{100 * published[case] / (gpus * base):.1f}%",
                "predicted efficiency": f"{100 * predicted / (gpus * one):.1f}%",
                "no communication": f"{100 * silent / (gpus * one):.1f}%",
                "all_reduce_ms": round(1e3 * evaluation.breakdown[0].communication_busy_s, 2),
                "exposed_ms": round(1e3 * evaluation.breakdown[0].exposed_communication_s, 2),
            }
        )
    return lines


def by_band(rows: Sequence[CollectiveRow]) -> list[Line]:
    """Errors by machine, operation, group size and band of sizes."""
    groups: dict[tuple[str, str, int, str], list[float]] = {}
    for row in rows:
        band = next(name for name, end in SIZE_BANDS if end is None or row.size_bytes < end)
        key = (row.machine.what, row.operation, len(row.group), band)
        groups.setdefault(key, []).append(row.error)
    return [
        {
            "rows": len(errors),
            "operation": operation,
            "gpus": gpus,
            "size": size,
            "median error": percent(float(np.median(errors))),
            "median |error|": percent(float(np.median(np.abs(errors))), signed=False),
            "worst": percent(max(errors, key=abs)),
            "where": what,
        }
        for (what, operation, gpus, size), errors in groups.items()
    ]


def percent(value: float, signed: bool = True) -> str:
    return f"{100 * value:+.1f}%" if signed else f"{100 * value:.1f}%"


if __name__ == "__main__":
    raise SystemExit(main())
