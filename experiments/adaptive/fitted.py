"""The paper's own constants, solved from its rows, and what they say of the rows that were not used.

Three constants per model. Seconds per image on one GPU come from its hours. How much longer computation takes under data
parallelism than an eighth of that comes from the hours and the share. The bus bandwidth of its all_reduce comes from the share.
Shared by both models: four stages at module borders, 16 microbatches, and the bandwidth between stages, all three chosen by the
ResNet-50 rows of model parallelism. Nine constants in all, seven of them of a continuous kind. Everything else is predicted:

    mp        four stages by gpipe: (M + 3) / M of the slowest stage; boundary activations over the stage bandwidth
    hp        two such pipelines, each with half of the images; a sum of gradients over two ranks per stage
    adaptive  the paper's objective as printed: per component the least t_comp + t_comm of dp, mp and hp, with these constants

The rows for adaptive are the test of the paper's claim, since none of them was used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from experiments.adaptive.honest import traced
from experiments.adaptive.paper import BATCH_PER_GPU, GPUS, IMAGES, MODELS, PaperModel
from parsim.model.model import Model

STAGES, MICROBATCHES, LINK_FROM = 4, 16, "ResNet-50"
GLOBAL_BATCH = GPUS * BATCH_PER_GPU
STEPS = IMAGES / GLOBAL_BATCH
CONSTANTS = 9
HOUR_S = 3600.0
BUS_GB_PER_S = (0.03, 0.065, 0.125, 0.25, 0.5, 1.0, 10.0, 130.0)
STAGE_GB_PER_S = (0.1, 0.4, 1.6, 6.5, 25.0, 130.0)
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Of one model, from its rows: hours on one GPU, what computation takes longer under dp, bytes per second."""

    single_h: float
    inflation: float
    bus_bytes_per_s: float
    stage_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A component as the paper's problem sees it: its share of the work, weights, and bytes per image that it hands on."""

    name: str
    share: float
    weight_bytes: int
    output_bytes: int


def parts_of(model: Model) -> list[Part]:
    """The components but the loss, with what they hand on to the next one."""
    work = {each.name: sum(entry.forward_flop * entry.count for entry in each.operators) for each in model.components}
    total = sum(work.values())
    return [
        Part(
            name=each.name,
            share=work[each.name] / total,
            weight_bytes=sum(parameter.size_bytes for parameter in each.parameters),
            output_bytes=sum(model.value[name].bytes_per_sample for name in each.outputs),
        )
        for each in model.components
        if each.name != "loss"
    ]


def stages_of(paper: PaperModel, parts: list[Part]) -> list[list[Part]]:
    """Cut before the first component of every later stage; what comes before the first stage's belongs to it."""
    found: list[list[Part]] = [[]]
    borders = list(paper.stages[1:])
    for part in parts:
        if borders and borders[0] in part.name.split("."):
            borders.pop(0)
            found.append([])
        found[-1].append(part)
    if len(found) != STAGES:
        raise ValueError(f"{paper.spec} has no components at {paper.stages}; it has {[part.name for part in parts]}")
    return found


def crossing_bytes(stages: list[list[Part]]) -> int:
    """Of all images, forward and backward over all borders."""
    return 2 * sum(stage[-1].output_bytes for stage in stages[:-1]) * IMAGES


def solved(name: str) -> Constants:
    """The constants of one model; the bandwidth between stages is that of ResNet-50's row."""
    paper = MODELS[name]
    single, data, share = paper.hours[0], paper.hours[1], paper.communication[1]
    weights = sum(part.weight_bytes for part in parts_of(traced(name)))
    moved = 2 * (GPUS - 1) / GPUS * weights * STEPS
    other = MODELS[LINK_FROM]
    crossing = crossing_bytes(stages_of(other, parts_of(traced(LINK_FROM))))
    return Constants(
        single_h=single,
        inflation=data * (1 - share) * GPUS / single,
        bus_bytes_per_s=moved / (data * share * HOUR_S),
        stage_bytes_per_s=crossing / (other.printed("hours", "mp") * other.printed("communication", "mp") * HOUR_S),
    )


def fitted_rows() -> list[Row]:
    """Hours and shares by these constants. `used`: the row went into them."""
    rows = []
    for name in MODELS:
        used = ("single", "dp", "mp") if name == LINK_FROM else ("single", "dp")
        for strategy, (computed_h, moved_h) in hours_by(name, solved(name)).items():
            hours = computed_h + moved_h
            for quantity, value in (("hours", hours), ("communication", moved_h / hours)):
                if (quantity, strategy) != ("communication", "single"):
                    row = {"model": name, "strategy": strategy, "quantity": quantity, "value": round(value, 4)}
                    rows.append(row | {"used": strategy in used})
    return rows


def _pipeline(constants: Constants, stages: list[list[Part]], *, replicas: int) -> tuple[float, float]:
    """Hours of computation, filling included, and of communication, of `replicas` pipelines of four stages."""
    slowest = max(sum(part.share for part in stage) for stage in stages)
    compute = constants.single_h * slowest * (MICROBATCHES + STAGES - 1) / MICROBATCHES / replicas
    between = crossing_bytes(stages) / replicas / constants.stage_bytes_per_s / HOUR_S
    heaviest = max(sum(part.weight_bytes for part in stage) for stage in stages)
    sums = 2 * (replicas - 1) / replicas * heaviest * STEPS / constants.bus_bytes_per_s / HOUR_S
    return compute, between + sums


def printed_objective(name: str, constants: Constants) -> tuple[float, float, dict[str, str]]:
    """The paper's objective with its own constants: hours of computation and communication, and the choice by component.

    t_comp does not depend on the strategy, as printed. Model parallelism hands a component's output on, forward and backward,
    for every image; hybrid does so for half of the images in each of two replicas, and sums gradients over these two.
    """
    total, moved, choice = 0.0, 0.0, {}
    for part in parts_of(traced(name)):
        gradients = part.weight_bytes * STEPS / constants.bus_bytes_per_s / HOUR_S
        activations = 2 * part.output_bytes * IMAGES / constants.stage_bytes_per_s / HOUR_S
        ways = {
            "dp": 2 * (GPUS - 1) / GPUS * gradients,
            "mp": activations,
            "hp": gradients + activations / 2,
        }
        best = min(ways, key=lambda way: ways[way])
        total += part.share * constants.single_h / GPUS * constants.inflation
        moved += ways[best]
        choice[part.name] = best
    return total, moved, choice


def hours_by(name: str, constants: Constants) -> dict[str, tuple[float, float]]:
    """Hours of computation and of communication of every strategy, for a name of MODELS."""
    parts = parts_of(traced(name))
    stages = stages_of(MODELS[name], parts)
    weights = sum(part.weight_bytes for part in parts)
    sums_h = 2 * (GPUS - 1) / GPUS * weights * STEPS / constants.bus_bytes_per_s / HOUR_S
    return {
        "single": (constants.single_h, 0.0),
        "dp": (constants.single_h / GPUS * constants.inflation, sums_h),
        "mp": _pipeline(constants, stages, replicas=1),
        "hp": _pipeline(constants, stages, replicas=2),
        "adaptive": printed_objective(name, constants)[:2],
    }


def bandwidth_rows() -> list[Row]:
    """The same by other bandwidths, from those solved up to NVLink's: where do the paper's order and its 18% hold?"""
    rows = []
    for name in MODELS:
        constants = solved(name)
        for bus in BUS_GB_PER_S:
            for stage in STAGE_GB_PER_S:
                other = replace(constants, bus_bytes_per_s=bus * 1e9, stage_bytes_per_s=stage * 1e9)
                hours = {strategy: sum(parts) for strategy, parts in hours_by(name, other).items()}
                order = [hours[strategy] for strategy in ("adaptive", "hp", "dp", "mp", "single")]
                rows.append(
                    {
                        "model": name,
                        "bus_gb_per_s": bus,
                        "stage_gb_per_s": stage,
                        **{strategy: round(value, 3) for strategy, value in hours.items()},
                        "papers_order": all(a < b for a, b in pairwise(order)),
                        "gain_over_hp": round(hours["hp"] / hours["adaptive"] - 1, 4),
                    }
                )
    return rows


def choice_rows() -> list[Row]:
    """What the paper's objective chooses for every component with the paper's own constants: its Figure 6."""
    return [
        {"model": name, "component": component, "choice": choice}
        for name in MODELS
        for component, choice in printed_objective(name, solved(name))[2].items()
    ]


def constants_rows() -> list[Row]:
    """The nine constants, in units that can be compared with a data sheet."""
    return [
        {
            "model": name,
            "images_per_s_on_one_gpu": round(IMAGES / found.single_h / HOUR_S, 1),
            "inflation_under_dp": round(found.inflation, 3),
            "bus_gb_per_s": round(found.bus_bytes_per_s / 1e9, 4),
            "stage_gb_per_s": round(found.stage_bytes_per_s / 1e9, 3),
            "stages": STAGES,
            "microbatches": MICROBATCHES,
        }
        for name in MODELS
        for found in (solved(name),)
    ]
