"""What the shipped profile of eight V100s says, with nothing fitted to the paper: Table I, and speed over GPUs."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from experiments.adaptive.paper import BATCH_PER_GPU, GPUS, IMAGES, MODELS, STRATEGIES
from parsim.costs.adjustments import AS_IT_IS, HardwareScale
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.predict.evaluate import evaluate
from parsim.predict.problem import PlanningProblem
from parsim.predict.result import PlanResult
from parsim.search.by_hand import custom_plan
from parsim.search.search import search

PROFILE = "dgx1-v100-32gb"
Row = dict[str, Any]


@cache
def traced(name: str) -> Model:
    """The model with CIFAR-100's classes, at 224 x 224."""
    paper = MODELS[name]
    return load_model(ModelSpec(name=paper.spec, args=(("num_classes", 100),)), granularity=paper.granularity)


def problem_of(name: str, devices: int, batch: int, *, scale: HardwareScale = AS_IT_IS) -> PlanningProblem:
    """The paper's question on V100s of one DGX-1, with a batch over all; scale: of hardware that would be faster or slower."""
    return PlanningProblem(
        model=traced(name),
        cluster=cluster_from_profile(load_profile(PROFILE), devices),
        global_batch=batch,
        numerics=Numerics(optimizer=MODELS[name].optimizer),
        scale=scale,
    )


def hours_of(result: PlanResult) -> float:
    """100 epochs of CIFAR-100."""
    return IMAGES / result.throughput_samples_per_s.median / 3600


def best_of_each(name: str, devices: int) -> dict[str, PlanResult]:
    """The fastest plan of each family that fits, 128 images per GPU. Adaptive chooses among all of them, and mixes."""
    found = search(problem_of(name, devices, devices * BATCH_PER_GPU), ("adaptive",), samples=0)
    best: dict[str, PlanResult] = {}
    for candidate in found.candidates:
        if candidate.result.fits:
            best.setdefault(candidate.result.strategy, candidate.result)
    return best


def scaling_rows(sizes: tuple[int, ...]) -> list[Row]:
    """Every strategy on so many GPUs, with the speed-up over one GPU at 128 images."""
    rows = []
    for name in MODELS:
        single = best_of_each(name, 1)["single"]
        for devices in sizes:
            best = {"single": single} if devices == 1 else best_of_each(name, devices) | {"single": single}
            for strategy in STRATEGIES:
                result = best.get(strategy)
                if result is not None and (strategy == "single") == (devices == 1):
                    row = {
                        "model": name,
                        "strategy": strategy,
                        "gpus": devices,
                        "hours": round(hours_of(result), 4),
                        "speedup": round(hours_of(single) / hours_of(result), 3),
                        "communication": round(result.communication_fraction, 5),
                        "communication_busy": round(result.communication_busy_fraction, 5),
                        "memory_gb": round(max(result.peak_memory_bytes) / 1e9, 3),
                        "plan": result.plan.summary(),
                    }
                    rows.append(row)
                    print(*list(row.values())[:5], file=sys.stderr, flush=True)
    return rows


WAYS = {"DDP": 25, "Horovod": 128}
"""MiB of gradients that one all_reduce sums: torch's bucket_cap_mb, and Horovod's fusion buffer since 0.21, by default."""


def reduction_rows() -> list[Row]:
    """Data parallelism on eight GPUs as DDP and as Horovod sum gradients, beside the fastest dp plan and the adaptive one."""
    rows = []
    for name in MODELS:
        problem = problem_of(name, GPUS, GPUS * BATCH_PER_GPU)
        ways = {
            way: evaluate(problem, custom_plan(problem, Mesh(dp=GPUS), bucket_bytes=size << 20), samples=0).result
            for way, size in WAYS.items()
        }
        best = best_of_each(name, GPUS)
        for way, result in (ways | {"fastest dp": best["dp"], "adaptive": best["adaptive"]}).items():
            rows.append(
                {
                    "model": name,
                    "way": way,
                    "hours": round(hours_of(result), 4),
                    "communication": round(result.communication_fraction, 5),
                    "communication_busy": round(result.communication_busy_fraction, 5),
                    "memory_gb": round(max(result.peak_memory_bytes) / 1e9, 3),
                    "plan": result.plan.summary(),
                }
            )
    return rows


def table_rows(scaling: list[Row], fitted: list[Row]) -> list[Row]:
    """Table I, a row per cell: printed, honest from `scaling_rows` of eight GPUs, and fitted by `fitted.fitted_rows`."""
    honest = {(row["model"], row["strategy"]): row for row in scaling if row["gpus"] == GPUS or row["strategy"] == "single"}
    fits = {(row["model"], row["strategy"], row["quantity"]): row for row in fitted}
    return [
        {
            "model": name,
            "strategy": strategy,
            "quantity": quantity,
            "paper": paper.printed(quantity, strategy),
            "honest": honest[name, strategy][quantity],
            "fit": fits.get((name, strategy, quantity), {}).get("value"),
            "fit_uses_it": fits.get((name, strategy, quantity), {}).get("used"),
        }
        for name, paper in MODELS.items()
        for quantity in ("hours", "communication", "memory_gb")
        for strategy in STRATEGIES
        if (name, strategy) in honest and not (quantity == "communication" and strategy == "single")
    ]
