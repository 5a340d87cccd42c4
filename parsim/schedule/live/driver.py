"""The adaptive controller as the simulator takes it: windows in, changes of the plan out."""

from __future__ import annotations

from collections.abc import Sequence

from parsim.costs.observed import NO_RUN_CORRECTIONS, CommunicationClass, RunCorrections, learn
from parsim.engines.scenario.controlled import Change, Probe, RunnableStep, WindowSeen
from parsim.errors import ScheduleError
from parsim.numeric import Floats
from parsim.plans.plan import Plan
from parsim.search.adapt.controller import Controller, Keep, Replan
from parsim.search.adapt.planning import PricedPlan, observation_of


def runnable_of(entry: PricedPlan) -> RunnableStep:
    """A priced plan as the simulator runs it."""
    return RunnableStep(
        name=entry.plan.summary(),
        columns=entry.compiled.columns,
        durations_s=entry.durations_s(NO_RUN_CORRECTIONS),
        overlap=entry.overlap,
    )


class AdaptiveWindows:
    """A `WindowController` around the pure state machine of `schedule.adaptive`, over plans priced before.

    Attributes: decisions: its decision after every window.
    """

    def __init__(
        self, controller: Controller, pool: Sequence[PricedPlan], *, planning_s: float = 0.0, probe_s: float = 0.0
    ) -> None:
        """`planning_s`: seconds of a planning that ends in a change, part of its cost. probe_s: of probing the pool's plans.

        Raises ScheduleError if the controller's plan is not in the pool.
        """
        self.decisions: list[Keep | Replan] = []
        self._controller = controller
        self._pool: dict[Plan, RunnableStep] = {entry.plan: runnable_of(entry) for entry in pool}
        self._priced = {entry.plan.summary(): entry for entry in pool}
        self._planning_s, self._probe_s = planning_s, probe_s
        if controller.plan not in self._pool:
            raise ScheduleError(f"{controller.plan.summary()} is not in the pool of {len(pool)} plans; add it")

    @property
    def running(self) -> RunnableStep:
        """What the controller's plan runs."""
        return self._pool[self._controller.plan]

    def observe(self, seen: WindowSeen) -> Change | Probe | None:
        """As the state machine decides. Raises ScheduleError as it does, or for a plan that the pool has not."""
        observation = observation_of(
            seen.running.columns.graph,
            seen.task_s,
            window=seen.number,
            step_s=seen.step_s,
            steps_left=seen.steps_left,
            epoch_ended=seen.epoch_ended,
            probes=self._corrections(seen.probed),
        )
        self._controller, decision = self._controller.observe(observation)
        self.decisions.append(decision)
        if isinstance(decision, Keep):
            return Probe(of=tuple(self._pool.values()), cost_s=self._probe_s) if decision.probe else None
        if decision.plan not in self._pool:
            raise ScheduleError(f"{decision.plan.summary()} is not in the pool; plan among the pool's plans")
        return Change(to=self._pool[decision.plan], cost_s=decision.cost_s + self._planning_s, reason=decision.reason)

    def _corrections(self, probed: Sequence[tuple[RunnableStep, Floats]]) -> RunCorrections:
        """Factors of the communication of all that was probed."""
        found: dict[CommunicationClass, float] = {}
        for entry, task_s in probed:
            seen = observation_of(entry.columns.graph, task_s, window=0, step_s=1.0, steps_left=0).seconds
            found.update(learn(seen, self._priced[entry.name].expected).communication)
        return RunCorrections(communication=tuple(found.items()))
