"""What grows how, measured to the limit of this machine, and carried on to 100,000 GPUs and a million points.

python benchmarks/bench_limits.py [--only folded,given] [--record] [--page] [--quick]

Every case runs in a process of its own, so its memory is its own. `--record` keeps what was measured in `limits.json`; `--page`
writes the table of docs/scale.md from that file and measures nothing. Prints, asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from limits_page import page_of, table_of
from machine import QUICK_NOTE, add_quick, machine_line

HERE = Path(__file__).resolve().parent
RECORD = HERE / "limits.json"
PAGE = HERE.parent / "docs" / "scale.md"
LAYERS, MICROBATCHES = 96, 64
GIVEN = {"plan.strategy": "custom", "plan.mesh": {"dp": 8}}
ON = {"cluster": "dgx1-v100-32gb", "global_batch": 256}
FEATURES, SAMPLES, EPOCHS = 64, 64, 5
LAUNCHES, REPEATS = 3, 6


@dataclass
class Spent:
    """Since it was made: seconds of the processor and of the clock, and memory beyond what was resident then."""

    def __post_init__(self) -> None:
        self.cpu_s, self.wall_s, self.resident = time.process_time(), time.perf_counter(), peak_bytes()

    def told(self, **more: float) -> dict[str, float]:
        return {
            "cpu_s": time.process_time() - self.cpu_s,
            "wall_s": time.perf_counter() - self.wall_s,
            "bytes": float(peak_bytes() - self.resident),
            **more,
        }


def peak_bytes() -> int:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def folded(gpus: int) -> dict[str, float]:
    """A first question about one given plan, the cluster and its look-ups included."""
    from bench_scale import cluster, deep_gpt, even_plan, problem

    from parsim.plans.mesh import Mesh
    from parsim.predict.evaluate import evaluate

    model = deep_gpt(LAYERS)
    small, plan = (even_plan(model, Mesh(pp=8, dp=size // 64, tp=8), microbatches=MICROBATCHES) for size in (64, gpus))
    evaluate(problem(model, cluster(64), small), small, samples=1, fold=True)  # compiled and loaded
    spent = Spent()
    done = evaluate(problem(model, cluster(gpus), plan), plan, samples=0, fold=True)
    return spent.told(tasks=done.compiled.size)


def unfolded(gpus: int) -> dict[str, float]:
    """Lower, compile and simulate every rank."""
    import numpy as np
    from bench_scale import deep_gpt, even_plan

    from parsim.engines.static import compile_graph, simulate
    from parsim.plans.mesh import Mesh
    from parsim.program.placed import PlanIndex
    from parsim.program.templates import lower_columns

    model = deep_gpt(LAYERS)

    def simulated(size: int) -> int:
        """How many tasks it has."""
        plan = even_plan(model, Mesh(pp=8, dp=max(1, size // 64), tp=8), microbatches=MICROBATCHES)
        columns = lower_columns(plan, model, PlanIndex(plan, model))
        compiled = compile_graph(columns)
        simulate(compiled, np.full(compiled.size, 1e-3))
        return compiled.size

    simulated(64)
    spent = Spent()
    return spent.told(tasks=simulated(gpus))


def given(points: int) -> dict[str, float]:
    """A sweep of given plans in one process; the log of its rows."""
    from parsim.app.sweep.sweep import sweep

    with tempfile.TemporaryDirectory() as folder:
        sweep("resnet50", {"training.global_batch": [128]}, settings=GIVEN, jobs=1, out=folder, **ON)
    over = {"training.global_batch": [256 + 8 * number for number in range(points // 2)], "plan.zero_stage": [0, 1]}
    with tempfile.TemporaryDirectory() as folder:
        spent = Spent()
        sweep("resnet50", over, settings=GIVEN, jobs=1, out=folder, **ON)
        return spent.told(row_bytes=(Path(folder) / "points.jsonl").stat().st_size / points)


def searched(points: int) -> dict[str, float]:
    """A sweep of searched points in one process, half of them over all families."""
    from parsim.app.sweep.sweep import sweep

    strategies = {"plan.strategy": ["dp", "adaptive"]}
    sweep("resnet50", {"training.global_batch": [128], **strategies}, jobs=1, **ON)
    batches = [256 + 64 * (number * 50 // (points // 2)) for number in range(points // 2)]
    spent = Spent()
    sweep("resnet50", {"training.global_batch": batches, **strategies}, jobs=1, **ON)
    return spent.told()


def rows(points: int) -> dict[str, float]:
    """A sweep that is read back: all its rows, and its table."""
    from parsim.app.sweep.points import axes_of
    from parsim.app.sweep.sweep import Sweep, sweep

    over = {"training.global_batch": [256]}
    one = sweep("resnet50", over, settings=GIVEN, jobs=1, **ON)
    one.table()  # pandas is loaded
    line = json.dumps(one.answers[0])
    spent = Spent()
    found = Sweep(
        title="rows",
        axes=axes_of(over),
        settings=tuple({"training.global_batch": number} for number in range(points)),
        answers=tuple(json.loads(line) for _ in range(points)),
    )
    found.table()
    return spent.told()


def dask(points: int) -> dict[str, float]:
    """A sweep on two Dask workers: what the scheduler and this process spend on a point, whoever answers it."""
    from distributed import LocalCluster

    from parsim.app.sweep.sweep import sweep

    settings = {"plan.strategy": "custom", "plan.mesh": {"dp": 2}, "cluster.devices": 2}
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as workers:
        address = str(workers.scheduler_address)
        sweep("mlp", {"training.global_batch": [64, 66]}, settings=settings, on=address, **ON)
        spent = Spent()
        over = {"training.global_batch": [128 + 2 * number for number in range(points)]}
        sweep("mlp", over, settings=settings, on=address, **ON)
        return spent.told()


def replicas(count: int, graph: str = "ring") -> dict[str, float]:
    """Virtual replicas that train on a graph."""
    import torch
    from bench_virtual import trained

    from parsim.relaxed.problems import load_problem

    torch.set_num_threads(1)
    problem = load_problem("generated", dtype=torch.float32, samples=count * SAMPLES, features=FEATURES)
    few = load_problem("generated", dtype=torch.float32, samples=18 * SAMPLES, features=FEATURES)
    trained(few, graph, 18, 1)
    spent = Spent()
    trained(problem, graph, count, EPOCHS)
    return spent.told()


def complete(count: int) -> dict[str, float]:
    """The same on a complete graph."""
    return replicas(count, "complete")


def all_reduces(ranks: int, size_bytes: int = 16 * 2**20) -> dict[str, float]:
    """One all_reduce over gloo of so many pinned processes that share the cores: processor seconds of all of them, and the
    wall clock of the slowest; medians of `LAUNCHES`."""
    import multiprocessing

    import torch  # once, before the processes part

    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    launches = []
    for _ in range(LAUNCHES):
        with tempfile.TemporaryDirectory() as folder:
            found = context.Queue()
            every = [context.Process(target=_rank, args=(n, ranks, folder, size_bytes, found)) for n in range(ranks)]
            for process in every:
                process.start()
            told = [found.get(timeout=300) for _ in every]
            for process in every:
                process.join()
        launches.append((sum(cpu_s for cpu_s, _ in told), max(wall_s for _, wall_s in told)))
    cpu_s, wall_s = (statistics.median(values) for values in zip(*launches, strict=True))
    return {"cpu_s": cpu_s, "wall_s": wall_s, "bytes": 0.0}


def _rank(number: int, ranks: int, folder: str, size_bytes: int, found: Any) -> None:
    import torch
    import torch.distributed as dist

    from parsim.execute.processes.setup import prepare_rank

    prepare_rank(number, ranks)
    dist.init_process_group("gloo", rank=number, world_size=ranks, store=dist.FileStore(f"{folder}/store", ranks))
    values = torch.ones(size_bytes // 4)
    for _ in range(2):
        dist.all_reduce(values)
    walls, before = [], time.process_time()
    for _ in range(REPEATS):
        begin = time.perf_counter()
        dist.all_reduce(values)
        walls.append(time.perf_counter() - begin)
    found.put(((time.process_time() - before) / REPEATS, statistics.median(walls)))
    dist.barrier()


def small_all_reduces(ranks: int) -> dict[str, float]:
    """The same of 1 MiB."""
    return all_reduces(ranks, 2**20)


CASES: Mapping[str, tuple[Callable[[int], dict[str, float]], Sequence[int], Sequence[int]]] = {
    "folded": (folded, (1024, 4096, 16_384, 49_152, 102_400), (64, 128)),
    "unfolded": (unfolded, (64, 128, 256, 512), (64,)),
    "given": (given, (50, 100, 200), (4,)),
    "searched": (searched, (10, 20), (2,)),
    "rows": (rows, (2_000, 10_000, 50_000), (10,)),
    "dask": (dask, (250, 500, 1000), (8,)),
    "replicas": (replicas, (252, 1008, 2016), (18,)),
    "complete": (complete, (126, 252, 504), (18,)),
    "all_reduces": (all_reduces, (2, 8, 32, 64), (2,)),
    "small_all_reduces": (small_all_reduces, (2, 8, 32, 64), (2,)),
}
"""Name: what is measured, at which sizes, and at which with --quick."""


def measured(name: str, size: int) -> dict[str, float]:
    """One case, in a process of its own."""
    command = [sys.executable, __file__, "--case", name, str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=HERE.parent)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {"size": size, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--record", action="store_true", help=f"keep what is measured in {RECORD.name}")
    parser.add_argument("--page", action="store_true", help="write docs/scale.md from what is kept, and measure nothing")
    parser.add_argument("--case", nargs=2, metavar=("NAME", "SIZE"), help=argparse.SUPPRESS)
    add_quick(parser)
    asked = parser.parse_args()
    if asked.case:
        name, size = asked.case
        print(json.dumps(CASES[name][0](int(size))))
        return
    known: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.is_file() else {"cases": {}}
    if asked.page:
        PAGE.write_text(page_of(PAGE.read_text(encoding="utf-8"), known), encoding="utf-8")
        return
    found: dict[str, Any] = {}
    print(f"{machine_line()}\n\n| case | size | CPU s | wall s | MiB |\n|---|---:|---:|---:|---:|", flush=True)
    for name in asked.only.split(","):
        _, sizes, quick = CASES[name]
        lines = []
        for size in quick if asked.quick else sizes:
            line = measured(name, size)
            print(
                f"| {name} | {size:,} | {line['cpu_s']:.2f} | {line['wall_s']:.2f} | {line['bytes'] / 2**20:,.0f} |", flush=True
            )
            lines.append(line)
        found[name] = {"measured": lines, "date": str(date.today()), "load": round(os.getloadavg()[0], 1)}
        if asked.record:
            kept = {"machine": machine_line(), "cases": {**known["cases"], **found}}
            RECORD.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    if asked.quick:
        print(QUICK_NOTE)
    else:
        print(table_of({"cases": {**known["cases"], **found}}))


if __name__ == "__main__":
    main()
