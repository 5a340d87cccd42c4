"""CPU time of one evaluated plan of an 80-layer llama with a Model at hand, part by part. Prints, asserts nothing.

python benchmarks/bench_plan.py [--layers 80] [--repeats 7] [--deep] [--phases] [--only 3] [--quick]

A first question finds on the Model how an earlier one divided it (`parsim.program.placed`); "division new" does not. "Again" is
the same plan once more: its program (`parsim.predict.folding`) and memory are known.
--deep: plans of a narrow llama of 1,024 layers under ZeRO 2 and 3 instead. --phases: where the time of a first question goes.
--only: the plan of that number alone, from 1 on.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from machine import QUICK_NOTE, add_quick, machine_line
from plan_phases import phases_ms, print_phases

from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import profile_from_parts
from parsim.model.catalogue.names import named
from parsim.model.catalogue.sublayers import SamplePart, Shape, Software
from parsim.model.catalogue.transformer import transformer
from parsim.model.formats import Numerics
from parsim.plans.layouts import BATCH, Placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan
from parsim.plans.stages import even_parts, stages_of
from parsim.predict.evaluate import evaluate
from parsim.predict.folding import Programs
from parsim.predict.problem import PlanningProblem
from parsim.program.placed import Divisions

SEQ, PER_NODE = 4096, 8
PLANS = (
    ("layer", Mesh(dp=8), 4),
    ("sublayer", Mesh(tp=8), 8),
    ("sublayer", Mesh(pp=4, dp=2, tp=8), 32),
    ("sublayer", Mesh(pp=8, tp=8), 32),
    ("layer", Mesh(pp=8, dp=4, cp=2), 16),
    ("sequence", Mesh(pp=8, dp=16, tp=8), 32),
)
"""Granularity of the Model, mesh, microbatches of two samples."""

DEEP_LAYERS, DEEP_HIDDEN = 1024, 1024
DEEP_PLANS = (("layer", Mesh(dp=32), 4, 3), ("layer", Mesh(pp=4, dp=8), 8, 2))
"""The same, and the ZeRO stage."""


def milliseconds(call: Callable[[], object], repeats: int, before: Callable[[], object] = bool) -> float:
    """Median of the CPU time, without what comes `before` each call and the collection of what earlier calls left."""
    times = []
    for _ in range(repeats):
        before()
        gc.collect()
        gc.disable()
        begun = time.process_time()
        call()
        times.append(1e3 * (time.process_time() - begun))
        gc.enable()
    return statistics.median(times)


def plan_on(problem: PlanningProblem, mesh: Mesh, microbatches: int, zero_stage: int) -> Plan:
    """Even stages; every component cut in the first way that it can be."""
    placements = {
        component.name: Placement("shard", rule=component.shardings[0].rule, ways=mesh.tp)
        if mesh.tp > 1 and component.shardings
        else BATCH
        for component in problem.model.components
    }
    return Plan(
        strategy="custom",
        mesh=mesh,
        stages=stages_of(mesh, even_parts(list(placements), mesh.pp), placements.__getitem__),
        global_batch=problem.global_batch,
        microbatches=microbatches,
        zero_stage=zero_stage if mesh.copies > 1 else 0,
    )


def row(
    shape: Shape, granularity: str, mesh: Mesh, microbatches: int, repeats: int, zero_stage: int = 1, phases: bool = False
) -> dict[str, float]:
    """Prints one line of the table; milliseconds by part, where asked."""
    model = transformer(shape, Software(flash=True, dropout=False), SamplePart(tokens=SEQ, context=SEQ), granularity)
    nodes, batch = max(1, mesh.size // PER_NODE), 2 * mesh.dp * microbatches
    machine: Cluster = cluster_from_profile(
        profile_from_parts("h100-sxm", PER_NODE), nodes=nodes, network="infiniband-400g" if nodes > 1 else None
    )

    def asked() -> PlanningProblem:
        return PlanningProblem(
            model=model, cluster=machine, global_batch=batch, numerics=Numerics(precision="bf16", optimizer="adamw")
        )

    posed = asked()
    plan = plan_on(posed, mesh, microbatches, zero_stage)
    found = evaluate(posed, plan, samples=0, fold=True)
    divided = posed.layout(plan).model
    programs, divisions = divided.remembered(Programs), divided.remembered(Divisions)

    def forget() -> None:
        programs.forget()
        divisions.forget()

    first = milliseconds(lambda: evaluate(asked(), plan, samples=0, fold=True), repeats, programs.forget)
    new = milliseconds(lambda: evaluate(asked(), plan, samples=0, fold=True), repeats, forget)
    again = milliseconds(lambda: evaluate(posed, plan, samples=0, fold=True), repeats)
    drawn = milliseconds(lambda: evaluate(posed, plan, samples=200, fold=True), max(1, repeats // 3))
    what = f"| {mesh.size:,} | {mesh} | {len(model.components)} | {len(found.folding.ranks)} | {found.compiled.size:,} |"
    print(f"{what} {first:,.1f} | {new:,.1f} | {again:,.1f} | {drawn:,.1f} |", flush=True)
    return phases_ms(lambda: evaluate(asked(), plan, samples=0, fold=True), repeats, programs.forget) if phases else {}


def shape_of(name: str, layers: int, hidden: int = 0) -> Shape:
    known = named(name)
    whole = None if known is None else known.shape
    assert whole is not None, f"{name} has a row with a shape"
    return replace(whole, layers=layers, hidden=hidden or whole.hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--deep", action="store_true")
    parser.add_argument("--phases", action="store_true")
    parser.add_argument("--only", type=int, default=0)
    add_quick(parser)
    arguments = parser.parse_args()
    plans = PLANS
    if arguments.quick:
        arguments.layers, arguments.repeats, plans = 2, 1, (("layer", Mesh(dp=4, cp=2), 2),)
    print(f"{machine_line()}\n")
    what = "1,024 layers, ZeRO 3, then 2" if arguments.deep else f"{arguments.layers} layers, ZeRO 1 where there are replicas"
    print(f"A llama of {what}, on h100-sxm nodes. CPU time:\n")
    heads = "GPUs | mesh | components | ranks simulated | tasks | first question, ms | division new, ms | again, ms"
    print(f"| {heads} | with 200 draws, ms |")
    print("|---:|---|---:|---:|---:|---:|---:|---:|---:|")
    if arguments.deep:
        for granularity, mesh, microbatches, zero_stage in DEEP_PLANS:
            shape = shape_of("llama3-8b", DEEP_LAYERS, DEEP_HIDDEN)
            row(shape, granularity, mesh, microbatches, arguments.repeats, zero_stage)
        return
    plans = plans[arguments.only - 1 : arguments.only] if arguments.only else plans
    found = [
        row(shape_of("llama3-70b", arguments.layers), *plan, repeats=arguments.repeats, phases=arguments.phases)
        for plan in plans
    ]
    if arguments.phases:
        print_phases([f"{mesh.size:,}: {mesh}" for _, mesh, _ in plans], found)
    if arguments.quick:
        print(QUICK_NOTE)


if __name__ == "__main__":
    main()
