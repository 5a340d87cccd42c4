"""Under which hardware, batch and memory would the paper's order and its 18% hold? Predicted over a grid.

Links are made slower by a factor, everything else stays the profile's. Per point: the fastest that fits of a fixed list of
plans of each family. For adaptive also the best placement of every component, which an exact solver finds anew for every point.
The fixed lists stand for the search, which would take hours over the grid; they can only make a family slower.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from experiments.adaptive.honest import problem_of
from experiments.adaptive.paper import GPUS, MODELS
from parsim.costs.adjustments import HardwareScale
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan
from parsim.predict.evaluate import simulated_step
from parsim.predict.problem import PlanningProblem
from parsim.search.by_hand import custom_plan
from parsim.search.tensor import best_placement, can_be_cut, uniform_placements
from parsim.units import GIB

LINKS = (1.0, 1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 1024)
BATCHES = (128, 256, 1024)
MEMORY_GIB = (32.0, 16.0, 8.0, 4.0)
ORDER = ("adaptive", "hp", "dp", "mp", "single")
"""Fastest first, in both columns of Table I."""

Row = dict[str, Any]


def region_rows(links: tuple[float, ...] = LINKS, batches: tuple[int, ...] = BATCHES) -> list[Row]:
    """A row per model, batch, speed of links and memory of a device."""
    rows = []
    for name in MODELS:
        for batch in batches:
            for link in links:
                found = list(timed_plans(name, batch, link))
                rows += [_row(name, batch, link, memory, found) for memory in MEMORY_GIB]
                print(rows[-len(MEMORY_GIB)], file=sys.stderr, flush=True)
    return rows


Timed = tuple[str, float, float]
"""Family, seconds of a step, GiB of the fullest rank."""


def timed_plans(name: str, batch: int, link: float) -> Iterator[Timed]:
    """Every plan of the lists, where links are `link` times as fast."""
    scale = HardwareScale(communication=link)
    alone = problem_of(name, 1, batch, scale=scale)
    for family, problem, plan in [*_alone(alone), *_together(problem_of(name, GPUS, batch, scale=scale))]:
        memory = max(entry.total_bytes for entry in problem.memory(plan)) / GIB
        yield family, simulated_step(problem, plan).step_s, memory


Listed = tuple[str, PlanningProblem, Plan]


def _alone(problem: PlanningProblem) -> Iterator[Listed]:
    for parts in (1, 4, 16, 64):
        yield "single", problem, custom_plan(problem, Mesh(), microbatches=parts)


def _together(problem: PlanningProblem) -> Iterator[Listed]:
    for parts in (1, 4, 16):
        if problem.global_batch % (GPUS * parts) == 0:
            plan = custom_plan(problem, Mesh(dp=GPUS), microbatches=parts)
            yield from (("dp", problem, replace(plan, zero_stage=stage)) for stage in (0, 1, 3))
    for family, mesh in (("mp", Mesh(pp=8)), ("hp", Mesh(pp=4, dp=2)), ("hp", Mesh(pp=2, dp=4))):
        for parts in (8, 16, 32):
            if problem.global_batch % (mesh.dp * parts) == 0:
                yield family, problem, custom_plan(problem, mesh, microbatches=parts)
    for family, mesh in (("mp", Mesh(tp=8)), ("hp", Mesh(tp=4, dp=2)), ("hp", Mesh(tp=2, dp=4))):
        if can_be_cut(problem, mesh.tp):
            placements = uniform_placements(problem, mesh, divides=True)
            yield family, problem, custom_plan(problem, mesh, placements=placements)
    best = best_placement(problem, 1)
    if best.placements is not None:
        yield "adaptive", problem, custom_plan(problem, Mesh(tp=GPUS), placements=best.placements)


def _row(name: str, batch: int, link: float, memory_gib: float, found: list[Timed]) -> Row:
    best: dict[str, float] = {}
    for family, seconds, gib in found:
        if gib <= memory_gib:
            best[family] = min(seconds, best.get(family, seconds))
    if best:
        best["adaptive"] = min(best.values())
    uniform = [best[family] for family in ("dp", "mp", "hp", "single") if family in best]
    row: Row = {"model": name, "batch": batch, "link": link, "memory_gib": memory_gib}
    row |= {family: round(best[family], 6) if family in best else None for family in ORDER}
    times = [best.get(family, float("inf")) for family in ORDER]
    row["papers_order"] = len(best) == len(ORDER) and all(a < b for a, b in pairwise(times))
    row["fastest_uniform"] = min((f for f in ORDER[1:] if f in best), key=lambda f: best[f], default=None)
    row["gain_over_hp"] = round(best["hp"] / best["adaptive"] - 1, 5) if "hp" in best else None
    row["gain_over_uniform"] = round(min(uniform) / best["adaptive"] - 1, 5) if uniform else None
    return row
