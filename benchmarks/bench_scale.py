"""From a Plan to its step time, from 8 to 16,384 GPUs, and where the time goes. Prints, asserts nothing.

python benchmarks/bench_scale.py [--layers 96] [--draws 200] [--quick]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from functools import lru_cache
from pathlib import Path

from deep_gpt import deep_gpt, even_plan
from machine import QUICK_NOTE, add_quick, machine_line, seconds

from parsim.costs.estimate import medians_s
from parsim.engines.static import compile_graph, simulate, step_times_s
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.catalogue.zoo import load_preset
from parsim.model.formats import Numerics
from parsim.model.model import Model
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan
from parsim.predict.breakdown import breakdown
from parsim.predict.evaluate import evaluate
from parsim.predict.folding import folding_of
from parsim.predict.problem import PlanningProblem
from parsim.program.placed import PlanIndex
from parsim.program.templates import lower_columns

PROFILE, NETWORK, PER_NODE = "dgx1-v100-32gb", "infiniband-100g", 8
MICROBATCHES = 64
MESHES = (Mesh(tp=8), Mesh(pp=8, tp=8), Mesh(pp=8, dp=16, tp=8), Mesh(pp=8, dp=64, tp=8), Mesh(pp=8, dp=256, tp=8))
UNFOLDED = Mesh(pp=8, dp=4, tp=8)
"""Of which every rank is lowered."""

PROFILED = 10


@lru_cache
def cluster(ranks: int) -> Cluster:
    """One object per size: what is worked out about a cluster is kept by it."""
    nodes = ranks // PER_NODE
    return cluster_from_profile(load_profile(PROFILE), nodes=nodes, network=NETWORK if nodes > 1 else None)


def problem(model: Model, machine: Cluster, plan: Plan) -> PlanningProblem:
    """One that has been asked nothing yet."""
    return PlanningProblem(
        model=model, cluster=machine, global_batch=plan.global_batch, numerics=Numerics(precision="amp_fp16", optimizer="adam")
    )


def row(what: str, model: Model, plan: Plan, draws: int, base_s: float | None) -> float:
    """One line of the table; returns the seconds of a first question."""
    begun = time.perf_counter()
    machine = cluster(plan.world_size)
    built_s = time.perf_counter() - begun
    done = evaluate(problem(model, machine, plan), plan, samples=1, fold=True)
    first_s = seconds(lambda: evaluate(problem(model, machine, plan), plan, samples=0, fold=True))
    asked = problem(model, machine, plan)
    evaluate(asked, plan, samples=0, fold=True)
    again_s = seconds(lambda: evaluate(asked, plan, samples=0, fold=True))
    drawn_s = seconds(lambda: evaluate(asked, plan, samples=draws, fold=True), repeats=1)
    ratio = "1.0" if base_s is None else f"{first_s / base_s:.1f}"
    print(
        f"| {plan.world_size:,} | {what}{plan.mesh} | {len(done.folding.ranks)} | {done.compiled.size:,} "
        f"| {1e3 * built_s:,.0f} | {1e3 * first_s:,.0f} | {ratio} | {1e3 * again_s:,.0f} | {1e3 * drawn_s:,.0f} |"
    )
    return first_s


def parts(model: Model, plan: Plan) -> None:
    """Where a first question spends its time."""
    machine = cluster(plan.world_size)
    asked = problem(model, machine, plan)
    costs = asked.costs(plan.world_size)
    layout = PlanIndex(plan, model)
    folding = folding_of(layout, costs)
    columns = lower_columns(plan, model, layout, folding)
    estimates = asked.price(columns.units, plan.mesh)
    medians = medians_s(estimates)[columns.unit]
    compiled = compile_graph(columns)
    timeline = simulate(compiled, medians)
    fresh = problem(model, machine, plan)
    times = {
        "plan over model (layout)": seconds(lambda: PlanIndex(plan, model).buckets),
        "which ranks stand for which": seconds(lambda: folding_of(layout, costs)),
        "lowering": seconds(lambda: lower_columns(plan, model, layout, folding)),
        "pricing": seconds(lambda: problem(model, machine, plan).price(columns.units, plan.mesh)),
        "compiling": seconds(lambda: compile_graph(columns)),
        "one timeline": seconds(lambda: simulate(compiled, medians)),
        "four steps": seconds(lambda: step_times_s(compiled, medians[None, :], steps=4)),
        "breakdown": seconds(lambda: breakdown(compiled, timeline, ranks=folding.ranks)),
        "memory": seconds(lambda: fresh.memory(plan), repeats=1),
    }
    total = sum(times.values())
    print(f"\nA first question about {plan.world_size:,} GPUs, part by part ({columns.size:,} tasks):\n\n| part | ms | share |")
    print("|---|---:|---:|")
    for name, elapsed in times.items():
        print(f"| {name} | {1e3 * elapsed:,.1f} | {elapsed / total:.0%} |")


def lowering(model: Model, mesh: Mesh) -> None:
    """Lowering without folding: its rate, and its own profile."""
    plan = even_plan(model, mesh, microbatches=MICROBATCHES)
    layout = PlanIndex(plan, model)
    size = lower_columns(plan, model, layout).size
    elapsed = seconds(lambda: lower_columns(plan, model, layout))
    print(f"\nLowering every rank ({plan.mesh}): {size:,} tasks, {size / elapsed / 1e6:.2f} M tasks/s\n")
    profiler = cProfile.Profile()
    profiler.runcall(lower_columns, plan, model, layout)
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    total = sum(entry[2] for entry in stats.values())
    print("| function | calls | share of its time |\n|---|---:|---:|")
    for (file, _, name), entry in sorted(stats.items(), key=lambda item: -item[1][2])[:PROFILED]:
        where = Path(file).name if file not in ("~", "") else "numpy or builtin"
        print(f"| `{name.strip('<>')}` ({where}) | {entry[1]:,} | {entry[2] / total:.0%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--draws", type=int, default=200)
    add_quick(parser)
    arguments = parser.parse_args()
    meshes, whole = MESHES, UNFOLDED
    if arguments.quick:
        arguments.layers, arguments.draws, meshes, whole = 4, 2, MESHES[:1], Mesh(pp=2, dp=2)
    print(f"{machine_line()}\n")
    small, deep = load_preset("gpt", "block"), deep_gpt(arguments.layers)
    print(f"GPT-2 (12 layers), then a GPT of {arguments.layers} layers with {MICROBATCHES} microbatches, on {PROFILE} nodes:\n")
    print(
        "| GPUs | plan | ranks simulated | tasks | cluster built, ms | first question, ms | against 8 GPUs | again, ms "
        f"| with {arguments.draws} draws, ms |\n|---:|---|---:|---:|---:|---:|---:|---:|---:|"
    )
    row("GPT-2 ", small, even_plan(small, Mesh(pp=2, dp=4), microbatches=4), arguments.draws, None)
    base_s = None
    for mesh in meshes:
        first_s = row("", deep, even_plan(deep, mesh, microbatches=MICROBATCHES), arguments.draws, base_s)
        base_s = base_s or first_s
    parts(deep, even_plan(deep, meshes[-1], microbatches=MICROBATCHES))
    lowering(deep, whole)
    if arguments.quick:
        print(QUICK_NOTE)


if __name__ == "__main__":
    main()
