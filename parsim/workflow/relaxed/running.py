"""Real runs of relaxed plans: what the executor cannot do, and how measured steps are averaged."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from parsim.errors import PlanError
from parsim.model.number_formats import number_format
from parsim.plans.plan import Plan

if TYPE_CHECKING:
    from parsim.execute.records.measurement import Measurement


def check_rounds(plan: Plan, precision: str, *, evaluates: bool = False) -> None:
    """Relaxed replicas and stages hold their weights in the type in which they are updated, and agree on no loss scale.

    Args:
        plan: to run. precision: as in RUN.toml. evaluates: whether the mean weights are validated on the way.

    Raises:
        PlanError: the plan is relaxed, and the precision keeps other copies of the weights, or a loss scale. Or mean weights
            are validated that no rank has whole.
    """
    if evaluates and plan.synchronisation.mixes and plan.mesh.pp * plan.mesh.tp > 1:
        raise PlanError(
            f"[training.evaluation] scores the mean weights of the replicas, and with mesh {plan.mesh} no rank has them whole; "
            "drop training.evaluation, or use a mesh of dp alone"
        )
    kind = number_format(precision)
    if plan.synchronisation.is_relaxed and (kind.scales_loss or kind.weight_bytes < 4):
        raise PlanError(
            f"synchronisation {plan.synchronisation} is run in fp32, tf32 and amp_bf16. training.precision = {precision!r} "
            "keeps a loss scale, or copies of the weights that rounds and stashes do not know; change one of them"
        )


def check_adaptive(plan: Plan) -> None:
    """Raise PlanError for a plan that the adaptive controller cannot change on the way.

    Args:
        plan: to train under.
    """
    if plan.synchronisation.is_relaxed:
        raise PlanError(
            f"--adaptive changes plans of synchronous training, and this one has synchronisation {plan.synchronisation}; "
            "drop --adaptive, or plan.synchronisation"
        )


def steps_per_round(plan: Plan, usual: int) -> int:
    """Steps of a validation that are timed together: at least `usual`, and whole cycles of a plan whose steps differ.

    Args:
        plan: to measure, on one graph (`on_first_graph`). usual: steps.
    """
    rule = plan.synchronisation
    if not rule.mixes:
        return usual
    cycle = len(rule.cycle(plan.mesh.dp)) * rule.period_steps
    return -(-usual // cycle) * cycle


def changes_graph(plan: Plan) -> bool:
    """Whether replicas gossip on one graph after another (Ada): the predicted step is a mean over all of them.

    Args:
        plan: of any synchronisation.
    """
    rule = plan.synchronisation
    return bool(rule.graph) and len(rule.mixing.phases(plan.mesh.dp)) > 1


def on_first_graph(plan: Plan) -> Plan:
    """The plan on its first graph alone, for a plan that changes it; any other as it is.

    Args:
        plan: of any synchronisation.
    """
    if not changes_graph(plan):
        return plan
    rule = plan.synchronisation
    return replace(plan, synchronisation=replace(rule, graph=rule.mixing.phases(plan.mesh.dp)[0][1]))


def rounds_in_words(plan: Plan, steps: int) -> list[str]:
    """What a training of so many steps leaves of the rounds of its plan, where that is not what the plan says.

    Args:
        plan: to train under. steps: of the whole training.
    """
    rule, told = plan.synchronisation, []
    if rule.mixes and steps < rule.period_steps:
        told.append(
            f"plan.synchronisation.period_steps = {rule.period_steps} is beyond the {steps} steps of this training: the "
            f"replicas never meet, and checkpoints hold the mean of {plan.mesh.dp} separate trainings; set {steps} at most"
        )
    if changes_graph(plan):
        phases = rule.mixing.phases(plan.mesh.dp)
        whole = rule.period_steps * sum(rounds for rounds, _ in phases)
        if steps != whole:
            told.append(
                f"the predicted step is the mean over the {whole} steps that {rule.graph} has; this training makes {steps}, "
                "with the graphs in other shares, so its mean step is another"
            )
    return told


def whole_periods(seen: Measurement, plan: Plan) -> NDArray[np.float64]:
    """The measured steps of a training, less the first ones, so that every round comes with all its local steps.

    Of decoupled stages those are left out in which some stage had nothing to work on yet.

    Args:
        seen: of the run. plan: under which it was made.

    Returns:
        float64 [rounds]: seconds, as `Measurement.step_s`.
    """
    step_s, period = seen.step_s, plan.synchronisation.period_steps
    filling = plan.synchronisation.steps_to_fill(plan.mesh.pp)
    if plan.synchronisation.kind == "stale" and seen.steps == len(step_s) > filling:
        return step_s[filling:]
    if not plan.synchronisation.mixes or seen.steps != len(step_s) or len(step_s) < period:
        return step_s
    return step_s[len(step_s) % period :]
