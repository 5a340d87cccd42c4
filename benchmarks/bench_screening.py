"""Plans per second of the estimate that orders a search's outlines, and whether it orders them as their best plans come out.

python benchmarks/bench_screening.py [--opened 40] [--quick]

An outline is a mesh, a number of microbatches and a pipeline order; a plan is counted per ZeRO stage. Prints, asserts nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import time

from machine import QUICK_NOTE, add_quick, machine_line
from scipy.stats import spearmanr

from parsim.app.load import problem_of
from parsim.app.question import question_of
from parsim.errors import ScheduleError
from parsim.predict.evaluate import simulated_step
from parsim.predict.problem import PlanningProblem
from parsim.search.space import Allowance, Node, meshes
from parsim.search.tree import Incumbents, Members, judged_best_first

QUESTIONS = (
    ("llama3-8b", "8xh100-sxm", 64, "model.args.seq=8192"),
    ("llama3-70b", "64xh100-sxm", 512, "model.args.seq=8192"),
    ("llama3-70b", "1024xh100-sxm", 2048, "model.args.seq=8192"),
)
NETWORK = 'cluster.network="infiniband-400g"'
ZERO_STAGES = 4
WITHIN = 1.5
"""Of the least estimate: beyond, outlines are not of interest."""
SEED = 0


def outlines(members: Members) -> list[Node]:
    """The usual outlines on all devices."""
    problem, found = members.problem, list[Node]()
    for mesh in meshes(problem):
        if mesh.size < problem.cluster.size:
            break
        with contextlib.suppress(ScheduleError):
            found += [node for node in members.of_mesh(mesh) if not node.late]
    return found


def best_s(problem: PlanningProblem, outline: Node) -> float:
    """The step of the best plan of an outline that fits; infinite where none does."""
    best = Incumbents()
    judged_best_first(
        [outline],
        excess_bytes=lambda plan: max((size for _, size in problem.unsafe_bytes(plan)), default=0),
        judge=lambda plan: simulated_step(problem, plan, fold=True).step_s,
        incumbents=best,
        late=[],
        spare=Allowance(problem=problem, memories=len(problem.with_memory)),
    )
    return best.best_s


def row(name: str, gpus: str, batch: int, seq: str, opened: int) -> None:
    """One line of the table."""
    network = [NETWORK] if not gpus.startswith("8x") else []
    problem = problem_of(question_of(name, cluster=gpus, global_batch=batch, overrides=[*network, seq]))
    members = Members(problem, "hp")
    begun = time.process_time()
    every = outlines(members)
    cold_s, begun = time.process_time() - begun, time.process_time()
    outlines(members)
    warm_s = time.process_time() - begun
    least_s = min(node.promise_s for node in every)
    near = [node for node in every if node.promise_s < WITHIN * least_s]
    some = random.Random(SEED).sample(near, min(opened, len(near)))
    pairs = [(node.promise_s, found) for node in some if (found := best_s(problem, node)) < float("inf")]
    closed, exact = zip(*pairs, strict=True)
    errors = sorted(abs(one / two - 1) for one, two in pairs)
    plans = ZERO_STAGES * len(every)
    print(
        f"| {name} | {gpus} | {plans:,} | {plans / cold_s:,.0f} | {plans / warm_s:,.0f} | {len(some)} | {len(pairs)} "
        f"| {spearmanr(closed, exact).statistic:.3f} | {100 * errors[len(errors) // 2]:.1f}% "
        f"| {100 * (min(pairs)[1] / min(exact) - 1):.1f}% |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--opened", type=int, default=40, help="outlines of a question that are opened and simulated too")
    add_quick(parser)
    asked = parser.parse_args()
    print(f"{machine_line()}\n")
    print(
        "| model | cluster | plans | plans/s, first | plans/s, again | opened | fit | rank correlation | median error | lost |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for question in QUESTIONS[:1] if asked.quick else QUESTIONS:
        row(*question, opened=4 if asked.quick else asked.opened)
    print("\nlost: how much slower the best plan of the first outline is than the best of all that were opened.")
    if asked.quick:
        print(QUICK_NOTE)


if __name__ == "__main__":
    main()
