"""Real runs of relaxed plans: what the executor cannot do, and how measured steps are averaged."""

from __future__ import annotations

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
        plan: to measure. Of Ada the first graph is measured, because a whole schedule would take too long. usual: steps.
    """
    rule = plan.synchronisation
    if not rule.mixes:
        return usual
    rounds = 1 if rule.graph.startswith("ada") else len(rule.cycle(plan.mesh.dp))
    cycle = rounds * rule.period_steps
    return -(-usual // cycle) * cycle


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
