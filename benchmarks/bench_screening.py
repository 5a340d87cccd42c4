"""Plans per second of the closed form that screens, and whether it orders plans as the simulator does. Prints, asserts nothing.

python benchmarks/bench_screening.py [--simulated 60] [--quick]
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Sequence

from machine import QUICK_NOTE, add_quick, machine_line

from parsim.app.load import problem_of
from parsim.app.question import question_of
from parsim.errors import ParsimError
from parsim.plans.mesh import Mesh
from parsim.predict.evaluate import simulated_step
from parsim.predict.problem import PlanningProblem
from parsim.units import divisors
from screen import Outline, plan_of, screened_s

QUESTIONS = (
    ("llama3-70b", "64xh100-sxm", 512, "model.args.seq=8192"),
    ("llama3-70b", "1024xh100-sxm", 2048, "model.args.seq=8192"),
    ("gpt3-20b", "128xa100-sxm-80gb", 1024, "model.args.seq=2048"),
)
NETWORK = 'cluster.network="infiniband-400g"'
PER_NODE = 8
SEED = 0


def outlines(problem: PlanningProblem) -> list[Outline]:
    """All that divide: every mesh of all devices with tp inside a node, microbatches of at most 16 samples, orders, ZeRO."""
    found = []
    size = problem.cluster.size
    meshes = [Mesh(pp=pp, dp=size // pp // tp, tp=tp) for pp in divisors(size) for tp in divisors(size // pp) if tp <= PER_NODE]
    for mesh in meshes:
        if problem.global_batch % mesh.dp:
            continue
        samples = problem.global_batch // mesh.dp
        counts = [count for count in divisors(samples) if samples // count <= 16]
        orders = [("1f1b", 1)] if mesh.pp == 1 else [("1f1b", 1), ("interleaved", 2), ("interleaved", 4)]
        for count, (order, chunks), stage, again in itertools.product(counts, orders, (0, 1, 3), (False, True)):
            if (chunks > 1 and count % mesh.pp) or (stage and mesh.dp == 1) or (stage == 3 and mesh.pp > 1):
                continue
            outline = Outline(mesh=mesh, microbatches=count, order=order, chunks=chunks, zero_stage=stage, recompute=again)
            if mesh.pp * chunks <= len(problem.model.components):
                found.append(outline)
    return found


def ranks(values: Sequence[float]) -> list[float]:
    """Of distinct values, from 0."""
    order = sorted(range(len(values)), key=lambda number: values[number])
    found = [0.0] * len(values)
    for place, number in enumerate(order):
        found[number] = float(place)
    return found


def rank_correlation(one: Sequence[float], two: Sequence[float]) -> float:
    """Spearman's."""
    n = len(one)
    apart = sum((a - b) ** 2 for a, b in zip(ranks(one), ranks(two), strict=True))
    return 1 - 6 * apart / (n * (n * n - 1))


def row(name: str, gpus: str, batch: int, seq: str, simulated: int) -> None:
    """One line of the table."""
    problem = problem_of(question_of(name, cluster=gpus, global_batch=batch, overrides=[NETWORK, seq]))
    every = outlines(problem)
    begun = time.process_time()
    seconds = screened_s(problem, every)
    cold_s, begun = time.process_time() - begun, time.process_time()
    screened_s(problem, every)
    warm_s = time.process_time() - begun
    sample = random.Random(SEED).sample(range(len(every)), min(simulated, len(every)))
    closed, exact = [], []
    for number in sample:
        try:
            found = simulated_step(problem, plan_of(problem, every[number]), fold=True).step_s
        except ParsimError as error:
            print(f"not simulated: {every[number]}: {error}")
            continue
        closed.append(float(seconds[number]))
        exact.append(found)
    errors = sorted(abs(one / two - 1) for one, two in zip(closed, exact, strict=True))
    best = sorted(zip(closed, exact, strict=True))[: max(1, len(closed) // 10)]
    lost = min(two for _, two in best) / min(exact) - 1
    print(
        f"| {name} | {gpus} | {len(every):,} | {len(every) / cold_s:,.0f} | {len(every) / warm_s:,.0f} | {len(closed)} "
        f"| {rank_correlation(closed, exact):.3f} | {100 * errors[len(errors) // 2]:.1f}% | {100 * lost:.1f}% |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulated", type=int, default=60, help="plans of a question that are simulated too")
    add_quick(parser)
    asked = parser.parse_args()
    print(f"{machine_line()}\n")
    print("| model | cluster | plans | plans/s, first | plans/s, again | simulated | rank correlation | median error | lost |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for question in QUESTIONS[:1] if asked.quick else QUESTIONS:
        row(*question, simulated=6 if asked.quick else asked.simulated)
    print("\nlost: how much slower the fastest simulated plan of the best tenth of the closed form is than the fastest of all.")
    if asked.quick:
        print(QUICK_NOTE)


if __name__ == "__main__":
    main()
