"""Synthetic but realistic material for the report tests: real TaskGraphs and Timelines of data-parallel and pipeline steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parsim.engines import static
from parsim.execute.cuda.gpu import MemoryUse
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.predict.compare import compare
from parsim.predict.memory import RankMemory
from parsim.predict.result import Interval, PlanResult
from parsim.program.lower import lower
from parsim.program.taskgraph import TaskGraph
from parsim.report.page import ReportData, ReportRun, ReportSection
from parsim.report.tables import memory_levels
from parsim.timeline import Timeline
from parsim.work import Collective, Compute, LoadBatch, OptimizerStep, SendRecv
from tests.models import bare_chain

MIB = 2**20
RESNET = (
    "stem",
    *(f"layer{stage}.{block}" for stage, count in ((1, 3), (2, 4), (3, 6), (4, 3)) for block in range(count)),
    "head",
    "loss",
)
VIT = ("embed", *(f"encoder.{block}" for block in range(12)), "head", "loss")
HOSTILE = "block<script>alert('x')</script>&\"quoted\""


def step_graph(components: Sequence[str], *, pp: int = 1, dp: int = 1, microbatches: int = 1, samples: int = 16) -> TaskGraph:
    """A gpipe step of a chain on pp stages times dp replicas, with a gradient bucket per four components."""
    model = bare_chain(components, elements=3 * MIB // 8, bytes_per_sample=4 * MIB // samples)
    batch = samples * microbatches * dp
    plan = plan_of("hp", components, pp=pp, dp=dp, microbatches=microbatches, batch=batch)
    return lower(replace(plan, pipeline_order="gpipe", bucket_bytes=6 * MIB), model)


def durations_s(graph: TaskGraph, scale_s: float) -> NDArray[np.float64]:
    """float64 [tasks]: `scale_s` is one component's forward; later components cost a little more."""
    base = {"forward": 1.0, "backward": 2.1, "optimizer": 1.5, "load": 0.6}
    seconds = []
    for task in graph.tasks:
        match task.work:
            case Compute() as work:
                seconds.append(base[work.phase.value] * scale_s * (1 + sum(map(ord, work.component)) % 7 / 10))
            case Collective() as work:
                seconds.append(scale_s * (0.5 + work.size_bytes / (8 * MIB)))
            case SendRecv():
                seconds.append(scale_s * 0.7)
            case OptimizerStep():
                seconds.append(scale_s * base["optimizer"])
            case LoadBatch():
                seconds.append(scale_s * base["load"])
    return np.array(seconds)


def run_in_order(graph: TaskGraph, seconds: NDArray[np.float64], source: str = "simulated") -> Timeline:
    """Start each task when its dependencies have ended and its resources are free, in issue order."""
    return replace(static.simulate(graph, seconds), source=source)


def measured_steps(graph: TaskGraph, seconds: NDArray[np.float64], steps: int, seed: int, bias: float = 1.05) -> list[Timeline]:
    """The same program with noise per task and step, `bias` slower on average."""
    rng = np.random.default_rng(seed)
    return [
        run_in_order(graph, seconds * bias * np.exp(rng.normal(0, 0.08, len(seconds)) + rng.normal(0, 0.04)), "measured")
        for _ in range(steps)
    ]


def breakdown_of(timeline: Timeline, world_size: int) -> list[dict[str, Any]]:
    """Categories per rank, simply: busy compute, exposed communication of the own dp stream, the rest idle."""
    rows = []
    for rank in range(world_size):
        compute = sum(span.duration_s for span in timeline if span.resource == f"r{rank}.compute")
        rest = timeline.makespan_s - compute
        rows.append(
            {
                "rank": rank,
                "compute_s": compute,
                "load_s": 0.04 * rest,
                "host_s": 0.02 * rest,
                "exposed_communication_s": 0.5 * rest,
                "bubble_s": 0.3 * rest,
                "idle_s": 0.14 * rest,
            }
        )
    return rows


def memory_of(world_size: int, limit_bytes: int, scale: float = 1.0) -> list[dict[str, Any]]:
    lines = {
        "parameters": 98, "gradients": 98, "optimizer_state": 98, "buffers": 1, "activations": 1400, "boundary_values": 160,
        "inputs": 20, "communication": 260, "context": 450, "workspace": 300,
    }  # fmt: skip
    return [
        {
            "rank": rank,
            "lines": [(name, int(size * MIB * scale * (1 + 0.03 * rank))) for name, size in lines.items()],
            "limit_bytes": limit_bytes,
        }
        for rank in range(world_size)
    ]


def plan_of(
    strategy: str, components: Sequence[str], *, pp: int = 1, dp: int = 1, microbatches: int = 1, batch: int = 256
) -> Plan:
    mesh = Mesh(pp=pp, dp=dp)
    parts = np.array_split(np.array(components, dtype=object), pp)
    stages = tuple(Stage(components=tuple(part), ranks=mesh.stage_ranks(number)) for number, part in enumerate(parts))
    return Plan(strategy=strategy, mesh=mesh, stages=stages, global_batch=batch, microbatches=microbatches)


def result_of(plan: Plan, step_s: float, *, fits: bool = True, reason: str = "", warnings: tuple[str, ...] = ()) -> PlanResult:
    interval = Interval(median=step_s, p05=0.94 * step_s, p95=1.08 * step_s)
    communication = 0.02 * (plan.mesh.size - 1)
    return PlanResult(
        strategy=plan.strategy,
        step_s=interval,
        throughput_samples_per_s=interval.inverse(plan.global_batch),
        communication_fraction=communication,
        communication_busy_fraction=min(1.0, 2 * communication),
        exposed_communication_s=communication * step_s,
        bubble_fraction=(plan.mesh.pp - 1) / (plan.microbatches + plan.mesh.pp - 1),
        peak_memory_bytes=tuple(int((3 + 28 / plan.mesh.pp) * 2**30 * (1 if fits else 2)) for _ in range(plan.mesh.size)),
        fits=fits,
        fit_probability=float(fits),
        cost_sources={"fitted": 1.0},
        plan=plan,
        warnings=warnings,
        reason=reason,
    )


def results(components: Sequence[str], *, devices: int = 8, scale: float = 1.0) -> list[dict[str, Any]]:
    dp = result_of(
        plan_of("dp", components, dp=devices),
        0.412 * scale,
        reason="fastest: gradients are exchanged while backward still runs",
    )
    hp = plan_of("hp", components, pp=2, dp=devices // 2, microbatches=8)
    mp = plan_of("mp", components, pp=devices, microbatches=16)
    candidates = [
        replace(
            dp, strategy="adaptive", plan=replace(dp.plan, strategy="adaptive"), reason="best of all families: the dp plan"
        ),
        dp,
        result_of(
            hp, 0.467 * scale, reason="13% slower than dp: the pipeline's bubble costs more than the smaller all_reduce saves"
        ),
        result_of(mp, 0.731 * scale, reason="77% slower than dp: bubble of 7 of 23 slots, uneven stages"),
        result_of(
            plan_of("single", components),
            3.01 * scale,
            fits=False,
            reason="one device holds all activations",
            warnings=(
                "does not fit: rank 0 needs 62 GiB of 32 GiB (30 GiB too much); its largest line is activations, 55 GiB",
            ),
        ),
    ]
    return [candidate.to_dict() for candidate in candidates]


def predicted_run(label: str, components: Sequence[str], *, pp: int, dp: int, microbatches: int) -> ReportRun:
    graph = step_graph(components, pp=pp, dp=dp, microbatches=microbatches)
    timeline = run_in_order(graph, durations_s(graph, 1.5e-3))
    return ReportRun(
        label=label,
        plan=plan_of(label, components, pp=pp, dp=dp, microbatches=microbatches).to_dict(),
        graph=graph,
        predicted=timeline,
        predicted_breakdown=breakdown_of(timeline, graph.world_size),
        memory=memory_of(graph.world_size, 32 * 2**30, 9.0),
    )


def measured_run(
    label: str, components: Sequence[str], *, pp: int, dp: int, microbatches: int, seed: int, steps: int = 20
) -> ReportRun:
    graph = step_graph(components, pp=pp, dp=dp, microbatches=microbatches)
    seconds = durations_s(graph, 2e-3)
    predicted = run_in_order(graph, seconds)
    measured = measured_steps(graph, seconds, steps, seed)
    memory = memory_of(graph.world_size, 16 * 2**30, 0.25)
    ranks = [RankMemory(rank=r["rank"], lines=(*r["lines"], ("allocator", 0)), limit_bytes=r["limit_bytes"]) for r in memory]
    peaks = [sum(rank.tensor_lines.values()) for rank in ranks]
    seen = [int(peak * 1.03) for peak in peaks]
    levels = memory_levels(ranks, [MemoryUse(live_bytes=peak) for peak in seen])
    interval = Interval(median=predicted.makespan_s, p05=0.93 * predicted.makespan_s, p95=1.09 * predicted.makespan_s)
    comparison = compare(
        graph,
        predicted,
        measured,
        predicted_step=interval,
        predicted_memory_bytes=peaks,
        measured_memory_bytes=seen,
    )
    return ReportRun(
        label=label,
        plan=plan_of(label, components, pp=pp, dp=dp, microbatches=microbatches).to_dict(),
        graph=graph,
        predicted=predicted,
        measured=measured[0],
        predicted_breakdown=breakdown_of(predicted, graph.world_size),
        measured_breakdown=breakdown_of(measured[0], graph.world_size),
        memory=memory,
        memory_levels=[row.to_dict() for row in levels],
        comparison=comparison.to_dict(),
    )


@cache
def report_data() -> ReportData:
    """Two what-if models on eight V100s, and two small ones run here, one of them with a hostile component name."""
    resnet_small, vit_small = RESNET[:7], (*VIT[:5], HOSTILE, "loss")
    sections = [
        ReportSection(
            model="resnet50",
            title="resnet50 on dgx1-v100-32gb",
            text="Global batch 256, fp32, SGD with momentum, eight V100s. Predicted only.",
            results=results(RESNET),
            chosen="adaptive",
            runs=[predicted_run("dp", RESNET, pp=1, dp=8, microbatches=1)],
        ),
        ReportSection(
            model="vit_b_16",
            title="vit_b_16 on dgx1-v100-32gb",
            text="Global batch 256, fp32, AdamW, eight V100s. Predicted only.",
            results=results(VIT, scale=2.3),
            chosen="adaptive",
            runs=[predicted_run("hp", VIT, pp=4, dp=2, microbatches=8)],
        ),
        ReportSection(
            model="resnet_small",
            title="resnet_small on this machine",
            text="Digits as 1x32x32 images, global batch 64, two processes on two cores.",
            results=results(resnet_small, devices=2, scale=0.2)[:4],
            chosen="adaptive",
            runs=[
                measured_run("dp", resnet_small, pp=1, dp=2, microbatches=1, seed=1),
                measured_run("mp", resnet_small, pp=2, dp=1, microbatches=4, seed=2),
                measured_run("single", resnet_small, pp=1, dp=1, microbatches=1, seed=3),
            ],
        ),
        ReportSection(
            model="vit_small",
            title="vit_small on this machine",
            text="",
            results=results(vit_small, devices=2)[:1],
            chosen=None,
            runs=[measured_run("hp", vit_small, pp=2, dp=2, microbatches=4, seed=4)],
        ),
    ]
    return ReportData(
        title="parsim demo: which way of training is fastest, and was the prediction right?",
        facts=(
            ("Machine", "2 cores, Linux, 8 GiB"),
            ("Date", "2026-01-01 12:00 UTC"),
            ("Versions", "parsim 0.1.0, torch 2.13.0+cpu, Python 3.11.9"),
            ("Command", "parsim demo"),
        ),
        summary=(
            "On eight V100s plain data parallelism is fastest for both models.",
            "On this machine the predicted steps were 1.2% to 7.9% off the measured ones.",
        ),
        sections=sections,
    )
