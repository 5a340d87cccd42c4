"""Training that may change its plan on the way: the real executor drives the controller the simulator's scenarios drive.

After every window of steps all ranks send rank 0 their task times. Rank 0 passes them to the controller and broadcasts
its decision. Every rank changes plan at the same step, or none does (Algorithm 1 of the paper, with hysteresis). A decision
may ask for an early look: then the next one is due before the window ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from parsim.costs.observed import task_durations_s
from parsim.errors import ExecutionError
from parsim.execute.job import AdaptiveSpec, RunSpec
from parsim.execute.measurement import merge_times
from parsim.execute.processes.exchange import done_by_rank_0, gather_values, value_of_rank_0
from parsim.execute.processes.group import ProcessPlace
from parsim.execute.processes.heartbeat import Doing, pulse
from parsim.execute.streams import TaskTime
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.divided import ExpertRouting
from parsim.model.formats import Numerics
from parsim.model.model import Model
from parsim.plans.plan import AUTO, Plan
from parsim.predict.problem import PlanningProblem
from parsim.program.lower import lower
from parsim.program.taskgraph import TaskGraph
from parsim.search.adapt.controller import Controller, ControllerConfig, Keep
from parsim.search.adapt.planning import controller_for, observation_of, prepared_planner, side_by_side


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision after `step` steps.

    plan: to go on with; None if the plan was kept. step_s: mean of the window. planning_s: that a planner took; 0 if it was not
    asked. switch_s, predicted_switch_s: seconds that a change of plan took on this rank, and should have taken. look_after:
    steps until an early look; 0: none was asked for.
    """

    step: int
    reason: str
    plan: str | None
    step_s: float
    planning_s: float = 0.0
    predicted_switch_s: float | None = None
    switch_s: float | None = None
    look_after: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Steering:
    """The controller on rank 0, and everyone's part in asking it."""

    def __init__(self, spec: AdaptiveSpec, run: RunSpec, steps: int, place: ProcessPlace, *, built_s: float) -> None:
        """`built_s`: that this rank takes to build what runs a plan."""
        self._spec = spec
        self._place = place
        self._steps = steps
        self._windows = 0
        self._shown = 0
        self._early = 0
        self.decisions: list[Decision] = []
        self._graph: tuple[Plan, TaskGraph] | None = None
        self._controller: Controller | None = None
        if place.rank == 0:
            pulse().begin(Doing.PREPARING, "pricing plans to change to")
            problem = problem_of(spec, run)
            planner = prepared_planner(problem, run.plan, spec.asked.strategy)
            controller = controller_for(
                problem,
                run.plan,
                config=ControllerConfig(ask_probes=False),  # a run times no communication beside its own
                plan_for=side_by_side(problem, planner.plan_for),
                rebuild_s=built_s,
                planning_s=planner.planning_s,
            )
            by_hand = run.plan.strategy == "custom"  # no search has stood behind it yet
            self._controller = replace(controller, question="the plan was written by hand") if by_hand else controller

    def due(self, step: int) -> bool:
        return 0 < step < self._steps and (step == self._early or self.ends(step))

    def ends(self, step: int) -> bool:
        return step % self._spec.window_steps == 0 or step % self._spec.epoch_steps == 0

    def decide(self, plan: Plan, model: Model, step: int, times: Sequence[Sequence[TaskTime]], step_s: float) -> Plan | None:
        """Every rank calls it with its own task times of the window; all get the same answer: a plan to change to, or None."""
        gathered = [
            [[TaskTime(*entry) for entry in recorded] for recorded in rank]
            for rank in gather_values([list(step) for step in times])
        ]

        def decided() -> dict[str, Any]:
            pulse().begin(Doing.PREPARING, "deciding on the plan")
            return self._ask(plan, model, step, gathered, step_s).to_dict()

        decision = Decision(**value_of_rank_0(done_by_rank_0(self._place, decided)))
        self.decisions.append(decision)
        self._early = step + decision.look_after if decision.look_after else 0
        return None if decision.plan is None else Plan.from_json(decision.plan)

    def _ask(
        self, plan: Plan, model: Model, step: int, gathered: Sequence[Sequence[Sequence[TaskTime]]], step_s: float
    ) -> Decision:
        assert self._controller is not None
        if self._graph is None or self._graph[0] != plan:
            self._graph = plan, lower(plan, model)
        graph = self._graph[1]
        recorded, shown = min(len(times) for times in gathered), self._shown
        self._shown = 0 if self.ends(step) else recorded
        if not recorded:
            return Decision(step=step, reason="no step of this window was recorded", plan=None, step_s=step_s)
        timelines = [merge_times([times[number] for times in gathered]) for number in range(recorded)]
        seconds = np.array([task_durations_s(len(graph.tasks), timeline) for timeline in timelines])
        self._windows += 1
        seen = observation_of(
            graph,
            seconds,
            window=self._windows,
            step_s=step_s,
            steps_left=self._steps - step,
            epoch_ended=step % self._spec.epoch_steps == 0,
            since_look=max(0, recorded - shown),
            early=not self.ends(step),
        )
        began = time.monotonic()
        self._controller, decided = self._controller.observe(seen)
        planning_s = 0.0
        if decided.planned:
            planning_s = time.monotonic() - began
            self._controller = replace(self._controller, planning_s=planning_s)
        decision = Decision(step=step, reason=decided.reason, plan=None, step_s=step_s, planning_s=planning_s)
        if isinstance(decided, Keep):
            return replace(decision, look_after=decided.look_after)
        self._shown = 0
        return replace(decision, plan=decided.plan.to_json(), predicted_switch_s=decided.cost_s)

    def has_switched(self, seconds: float) -> None:
        """The last decision is carried out, which took so many seconds on this rank."""
        self.decisions[-1] = replace(self.decisions[-1], switch_s=seconds)


def problem_of(spec: AdaptiveSpec, run: RunSpec) -> PlanningProblem:
    """The scheduler's question of this run, under the constraints of the run file. Where they leave the ZeRO stage or
    recomputation open, those of the running plan are kept. Raises ExecutionError: a constraint is about a component that the
    model does not have."""
    devices = None if spec.devices is None else list(spec.devices)
    asked, recipe, model = spec.asked, run.recipe, Model.load(Path(run.model_path))
    names = {component.name for component in model.components}
    for name in (*(name for name, _ in asked.pins), *(name for name, _ in asked.forbids)):
        if name not in names:
            raise ExecutionError(
                f"the job pins or forbids a placement of {name!r}, which {model.name} does not have; run the run file again"
            )
    averaged = recipe.ema is not None and recipe.ema.evaluate
    return PlanningProblem(
        model=model,
        cluster=cluster_from_profile(load_profile(spec.profile), devices),
        global_batch=run.plan.global_batch,
        numerics=Numerics(
            precision=spec.precision, optimizer=run.optimizer, master_weights=run.master_weights, ema=run.recipe.ema is not None
        ),
        fit_probability=spec.fit_probability,
        update_calls=2 if recipe.no_weight_decay else 1,
        scored="" if recipe.evaluation is None else "averages" if averaged else "weights",
        zero_stage=run.plan.zero_stage if asked.zero_stage == AUTO else asked.zero_stage,
        recompute=run.plan.recompute if asked.recompute == AUTO else asked.recompute,
        constraints=asked.constraints,
        pins=asked.pins,
        forbids=asked.forbids,
        routing=ExpertRouting(capacity_factor=asked.capacity_factor),
        clip_gradients=run.plan.clip_gradients,
        loading=spec.loading,
    )
