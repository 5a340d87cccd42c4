"""Seconds of thousands of plans in closed form: a first look before any of them is lowered. It proves nothing.

An outline is a mesh, microbatches, a pipeline order, a ZeRO stage and whether every component is recomputed. All components
are cut over all tp ranks, and stages hold equal numbers of components. With t_r the seconds of a microbatch on rank r of the
pipeline and v chunks per rank,

    step = microbatches * max t_r + (sum t_r - max t_r) / v + transfers + exposed sums and gathers + optimizer

A microbatch on one stage is `parsim.search.bound`, worked out once per (tp, cp, ep, samples). What is exposed of sums
and gathers follows `parsim.search.estimate`. `bench_screening.py` compares the order with the simulator's.

Leaves out: memory, copies of activations to the host, contention that depends on where the shards of other stages lie, and
overlap that slows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from parsim.errors import PlanError
from parsim.numeric import Floats
from parsim.plans.layouts import BATCH, Placement
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import PIPELINE_ORDERS, rank_of_stage
from parsim.plans.plan import DEFAULT_BUCKET_BYTES, FULL, NONE, Plan
from parsim.plans.stages import even_cuts, even_parts, stages_of
from parsim.predict.problem import PlanningProblem
from parsim.search.bound import chain_seconds
from parsim.search.estimate import UNCOVERED, Sent, sent_s, transfer_s, update_s
from parsim.search.prices import Prices
from parsim.work import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What a closed form knows of a plan. recompute: every component runs its forward again. chunks: stages per rank."""

    mesh: Mesh
    microbatches: int
    order: str = "1f1b"
    chunks: int = 1
    zero_stage: int = 0
    recompute: bool = False

    def check(self, problem: PlanningProblem) -> None:
        """Raises PlanError if the batch, the components or the order do not divide so."""
        per_replica, rest = divmod(problem.global_batch, self.mesh.dp)
        if rest or per_replica % self.microbatches:
            raise PlanError(
                f"global_batch ({problem.global_batch}) does not divide over dp ({self.mesh.dp}) * microbatches "
                f"({self.microbatches}); use a multiple of {self.mesh.dp * self.microbatches}"
            )
        stages, components = self.mesh.pp * self.chunks, len(problem.model.components)
        if stages > components:
            raise PlanError(f"{stages} stages want as many components, {problem.model.name} has {components}; use fewer stages")
        if not PIPELINE_ORDERS[self.order].takes(self.chunks):
            raise PlanError(f"order {self.order} does not take {self.chunks} chunks per rank; use another number")


@dataclass
class _Known:
    """Of one problem. chains: by (tp, cp, ep, samples) running totals of the components' forward and backward seconds, and of
    what their second forward adds."""

    chains: dict[tuple[int, int, int, int], tuple[Floats, Floats, Floats]] = field(default_factory=dict)
    placements: dict[int, dict[str, Placement]] = field(default_factory=dict)
    sent: dict[tuple[Mesh, int], Sent] = field(default_factory=dict)
    trained_bytes: int | None = None


def screened_s(problem: PlanningProblem, outlines: Sequence[Outline]) -> Floats:
    """Seconds of a step of each outline.

    Args:
        problem: model, cluster and batch. outlines: of plans for it.

    Returns:
        float64 [outlines]. Leaves out memory: an outline may not fit.

    Raises:
        PlanError: an outline does not divide. CostError: a component without a price.
    """
    return np.array([_step_s(problem, outline) for outline in outlines])


def plan_of(problem: PlanningProblem, outline: Outline) -> Plan:
    """The plan that an outline stands for.

    Args:
        problem: model and batch. outline: of a plan for it.

    Raises:
        PlanError: the outline does not divide.
    """
    outline.check(problem)
    names, mesh = [component.name for component in problem.model.components], outline.mesh
    placement = _placements(problem, mesh.tp).__getitem__ if mesh.tp > 1 else None
    parts = even_parts(names, mesh.pp * outline.chunks)
    return Plan(
        strategy="custom",
        mesh=mesh,
        stages=stages_of(mesh, parts, placement, order=outline.order, chunks=outline.chunks),
        global_batch=problem.global_batch,
        microbatches=outline.microbatches,
        pipeline_order=outline.order,
        zero_stage=max(outline.zero_stage, mesh.least_zero_stage) if mesh.copies > 1 else 0,
        recompute=FULL if outline.recompute else NONE,
        optimizer_offload=problem.optimizer_offload,
        activation_offload=problem.activation_offload,
    )


def _placements(problem: PlanningProblem, tp: int) -> dict[str, Placement]:
    """Every component cut in the first way that it can be."""
    known = problem.remembered(_Known).placements
    if tp not in known:
        known[tp] = {
            component.name: Placement("shard", rule=component.shardings[0].rule, ways=tp)
            if tp > 1 and component.shardings
            else BATCH
            for component in problem.model.components
        }
    return known[tp]


def _step_s(problem: PlanningProblem, outline: Outline) -> float:
    outline.check(problem)
    mesh, count = outline.mesh, outline.microbatches
    samples = problem.global_batch // (mesh.dp * count)
    forward_s, backward_s, again_s = _running_s(problem, mesh, count, samples)
    cuts = np.array(even_cuts(len(forward_s) - 1, mesh.pp * outline.chunks))
    own = np.diff(forward_s[cuts]) + np.diff(backward_s[cuts])
    if outline.recompute:
        own += np.diff(again_s[cuts])
    by_rank = np.bincount(np.array(rank_of_stage(outline.order, mesh.pp, outline.chunks)), weights=own, minlength=mesh.pp)
    longest, whole = float(by_rank.max()), float(by_rank.sum())
    step_s = count * longest + (whole - longest) / outline.chunks
    if mesh.pp > 1:
        step_s += 2 * (mesh.pp * outline.chunks - 1) * transfer_s(problem, mesh, samples)
    return (
        step_s
        + _exposed_s(problem, outline, longest, float(np.diff(backward_s[cuts]).max()))
        + update_s(problem, mesh, outline.zero_stage)
    )


def _running_s(problem: PlanningProblem, mesh: Mesh, count: int, samples: int) -> tuple[Floats, Floats, Floats]:
    known, key = problem.remembered(_Known).chains, (mesh.tp, mesh.cp, mesh.ep, samples)
    if key not in known:
        placed = _placements(problem, mesh.tp)
        chain = chain_seconds(problem, mesh, count, placed if mesh.tp > 1 else {})
        prices = Prices(problem=problem, mesh=mesh, samples=samples, bucket_bytes=DEFAULT_BUCKET_BYTES)
        alike: dict[str, tuple[float, float]] = {}
        for component in problem.model.components:
            if component.fingerprint not in alike:
                one, two = (
                    prices.compute_s(component, placed[component.name], phase, fastest=True)
                    for phase in (Phase.FORWARD, Phase.BACKWARD)
                )
                alike[component.fingerprint] = one, two if component.name in prices.differentiable else 0.0
        own = np.array([alike[component.fingerprint] for component in problem.model.components])
        again = np.maximum(0.0, own[:, 0] - (chain.backward_s - own[:, 1]))  # it runs while the gradient is on its way
        forward_s, backward_s, again_s = (
            np.concatenate([[0.0], np.cumsum(part)]) for part in (chain.forward_s, chain.backward_s, again)
        )
        known[key] = forward_s, backward_s, again_s
    return known[key]


def _exposed_s(problem: PlanningProblem, outline: Outline, stage_s: float, backward_s: float) -> float:
    """Of the sums of gradients and of gathered parameters."""
    mesh, count, stage = outline.mesh, outline.microbatches, outline.zero_stage
    if mesh.copies == 1:
        return 0.0
    summed_s, gathered_s, across_s = _sent_s(problem, mesh, stage)
    if stage == 3:
        return UNCOVERED * (count * (summed_s + 2 * gathered_s) + across_s)
    hidden_s = count * stage_s if stage == 2 else backward_s
    return max(0.0, (count if stage == 2 else 1) * summed_s + across_s - hidden_s) + gathered_s


def _sent_s(problem: PlanningProblem, mesh: Mesh, stage: int) -> Sent:
    known, key = problem.remembered(_Known).sent, (mesh, min(stage, 1))
    if key not in known:
        known[key] = sent_s(problem, mesh, max(1, round(_trained_bytes(problem) / (mesh.pp * mesh.tp))), stage)
    return known[key]


def _trained_bytes(problem: PlanningProblem) -> int:
    known = problem.remembered(_Known)
    if known.trained_bytes is None:
        known.trained_bytes = sum(entry.size_bytes for entry in problem.model.trainable_parameters)
    return known.trained_bytes
