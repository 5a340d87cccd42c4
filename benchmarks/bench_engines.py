"""Tasks per second of both engines on a pipeline-with-replicas graph. Prints, asserts nothing.

python benchmarks/bench_engines.py [--tasks 100000] [--samples 256] [--quick]
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import numpy as np
from machine import QUICK_NOTE, add_quick, machine_line, seconds

from parsim.costs.estimate import OverlapFactors
from parsim.engines import dynamic, static
from parsim.engines.static import compile_graph
from parsim.predict.breakdown import breakdown
from parsim.program.taskgraph import COMPUTE, Origin, Resource, Task, TaskGraph
from parsim.work import Collective, Compute, Phase

RANKS = 8
OVERLAP = OverlapFactors(compute=1.2, communication=1.3)


def data_parallel_graph(tasks: int) -> TaskGraph:
    """Chains of computation on 8 ranks; after every fourth layer an all_reduce that the next chain does not wait for."""
    made: list[Task] = []
    layer = 0
    while len(made) < tasks:
        for rank in range(RANKS):
            work = Compute(component=f"layer{layer}", phase=Phase.BACKWARD, samples=1)
            needs = (len(made) - RANKS - (layer % 4 == 0),) if layer else ()
            made.append(
                Task(
                    index=len(made),
                    work=work,
                    resources=(Resource(rank, COMPUTE),),
                    dependencies=needs,
                    origin=Origin(stage=0),
                )
            )
        layer += 1
        if layer % 4 == 0:
            made.append(
                Task(
                    index=len(made),
                    work=Collective(operation="all_reduce", group=tuple(range(RANKS)), size_bytes=1 << 20),
                    resources=tuple(Resource(rank, "dp") for rank in range(RANKS)),
                    dependencies=tuple(range(len(made) - RANKS, len(made))),
                    origin=Origin(stage=0),
                )
            )
    return TaskGraph(tasks=tuple(made), world_size=RANKS)


FRESH = """
import time
begun = time.perf_counter()
import numba
imported = time.perf_counter()
from parsim.program.taskgraph import from_text
from parsim.engines import kernels
from parsim.engines import static
graph = from_text("world_size 1\\n0 r0.compute | forward a x1 | - | stage=0\\n")
began = time.perf_counter()
static.step_times_s(graph, [[1.0]], steps=1)
print(imported - begun, time.perf_counter() - began, sum(kernels.last_ends.stats.cache_misses.values()))
"""


def fresh_process() -> str:
    """What a second process pays before its first answer."""
    run = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True)
    imported, first, compiled = run.stdout.split()
    return (
        f"A second process: {1e3 * float(imported):,.0f} ms to import numba, {1e3 * float(first):,.0f} ms to load the cached "
        f"kernels with the first answer, {compiled} kernels compiled."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--samples", type=int, default=256)
    add_quick(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.tasks, arguments.samples = 1_000, 4
    graph = data_parallel_graph(arguments.tasks)
    n = len(graph.tasks)
    rng = np.random.default_rng(0)
    durations = rng.uniform(1e-4, 1e-3, n)
    rows = durations * np.exp(0.05 * rng.standard_normal((arguments.samples, n)))
    compiled = compile_graph(graph)
    few = data_parallel_graph(min(arguments.tasks, 10_000))
    few_durations = durations[: len(few.tasks)]
    static.step_times_s(compiled, rows[:1])
    static.step_times_s(compiled, rows[:1], overlap=OVERLAP)
    timeline = static.simulate(compiled, durations)
    results = {
        "compile": (n, seconds(lambda: compile_graph(graph))),
        "static, one timeline": (n, seconds(lambda: static.simulate(compiled, durations))),
        f"static, {arguments.samples} samples": (rows.size, seconds(lambda: static.step_times_s(compiled, rows))),
        f"static, {arguments.samples} samples, overlap": (
            rows.size,
            seconds(lambda: static.step_times_s(compiled, rows, overlap=OVERLAP)),
        ),
        "dynamic": (len(few.tasks), seconds(lambda: dynamic.simulate(few, few_durations))),
        "dynamic, overlap": (len(few.tasks), seconds(lambda: dynamic.simulate(few, few_durations, overlap=OVERLAP))),
        "breakdown": (n, seconds(lambda: breakdown(compiled, timeline))),
    }
    print(f"{machine_line()}\n\n{n:,} tasks on {RANKS} ranks (dynamic: {len(few.tasks):,}):\n")
    print("| what | M tasks/s | ms |\n|---|---:|---:|")
    for name, (count, elapsed) in results.items():
        print(f"| {name} | {count / elapsed / 1e6:.3f} | {1e3 * elapsed:,.2f} |")
    print(f"\n{fresh_process()}")
    if arguments.quick:
        print(QUICK_NOTE)


if __name__ == "__main__":
    main()
