"""Which parameters should the adaptive controller have? Tuned in simulated training that is disturbed, judged on other seeds.

    python -m experiments.adaptive.adaptive_tuning [--quick] [--seed N] [--json]

Every case is a model on the 8 GPUs of a DGX-1V, a scenario of what happens to the machine, a noise level and a seed. The regret
of a path is its time over the oracle's (which knows the future and pays for its switches), minus 1. Coordinate descent over one
parameter at a time, from the values of the rule as first written, minimises the mean regret over the tuning seeds; the result
is compared with the first values on held-out seeds, pair by pair.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.adaptive.scenario import (
    Disturbance,
    Path,
    PoolCourse,
    TuningScenario,
    best_static,
    course_of,
    disturbed,
    drive,
    oracle,
    stay,
)
from experiments.common.running import part_parser, show
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import PIPELINE_ORDERS
from parsim.plans.plan import Plan
from parsim.predict.evaluate import evaluate
from parsim.predict.problem import PlanningProblem
from parsim.search.adapt.controller import Controller, ControllerConfig, SwitchCost
from parsim.search.adapt.planning import PricedPlan, pool_planner, priced, switch_cost
from parsim.search.families import FAMILIES
from parsim.search.stages import balanced_plan

PROFILE, DEVICES = "dgx1-v100-32gb", 8
QUESTIONS = (("vgg16", 64, 12.0), ("vit_b_16", 64, 30.0), ("resnet50", 256, 100.0))
"""Model, global batch, and by how much its scenarios slow a link: enough that another plan becomes the best."""

REBUILD_S, PLANNING_S, PROBE_S = 10.0, 2.5, 1.0
"""Assumed seconds of a switch beside moving weights, and of a probe; a search took 2 to 5 s here (8 devices, no intervals)."""

NOISE = (0.03, 0.10)
FIRST = ControllerConfig(
    smoothing=0.9,
    threshold=0.15,
    patience=3,
    epoch_threshold=0.05,
    least_improvement=0.05,
    margin=1.0,
    settle_windows=2,
    duration_tail=0.0,
)
"""The rule as first written: average 0.9, 15% for 3 windows, 5% better, saving above the cost, 2 windows of rest; a change
lasts to the end."""

CHOICES: dict[str, tuple[float, ...]] = {
    "smoothing": (0.0, 0.5, 0.9),
    "threshold": (0.1, 0.15, 0.25, 0.4),
    "patience": (1, 2, 3, 4),
    "epoch_threshold": (0.02, 0.05, 0.1, 0.15),
    "least_improvement": (0.02, 0.05, 0.1),
    "margin": (1.0, 2.0, 4.0),
    "settle_windows": (0, 2, 8),
    "duration_tail": (0.0, 0.5, 1.0, 2.0),
}

QUIET = "nothing"
QUIET_WEIGHT = 0.5
"""Assumed: every second run is on a machine to which nothing happens; the other scenarios share the rest."""


@dataclass(frozen=True)
class Case:
    """One course of events with what every policy is compared by."""

    model: str
    course: PoolCourse
    cost_s: SwitchCost
    oracle_s: float
    stay_s: float
    static_s: float

    @property
    def scenario(self) -> str:
        return self.course.scenario.name

    def controlled(self, config: ControllerConfig) -> Path:
        first = self.course.pool[0]
        return drive(
            self.course,
            Controller(
                config=config,
                plan_for=pool_planner(self.course.pool),
                switch_cost_s=self.cost_s,
                plan=first.plan,
                expected=first.expected,
                planning_s=self.course.scenario.planning_s,
            ),
        )


def scenarios(slowdown: float, shift: int, quick: bool) -> list[TuningScenario]:
    """What may happen in 100 windows of 100 steps, 20 windows to an epoch; `shift` windows later, 0 to 19. Quick: four."""
    link = ("gpu0", "gpu3")

    def slow(first: int, end: int | None = None, *, factor: float = slowdown) -> Disturbance:
        return Disturbance(factor=factor, first=first + shift, end=None if end is None else end + shift, link=link)

    def tired(rank: int, factor: float, first: int, end: int | None = None) -> Disturbance:
        return Disturbance(factor=factor, first=first + shift, end=None if end is None else end + shift, rank=rank)

    happenings: dict[str, tuple[Disturbance, ...]] = {
        QUIET: (),
        "link slow from 10": (slow(10),),
        "link half as slow from 10": (slow(10, factor=slowdown / 2),),
        "link slow 10-50": (slow(10, 50),),
        "link slow for 4 windows": (slow(20, 24),),
        "link comes and goes": (slow(10, 22), slow(34, 46), slow(58, 70)),
        "link slow from 75": (slow(75),),
        "all links slow from 30": (Disturbance(factor=slowdown, first=30 + shift),),
        "rank 5 takes 1.2 from 10": (tired(5, 1.2, 10),),
        "rank 5 takes 2.5 from 10": (tired(5, 2.5, 10),),
        "rank 2 takes 2.5 5-45, link slow from 45": (tired(2, 2.5, 5, 45), slow(45)),
    }
    shown = [list(happenings)[place] for place in (0, 3, 4, 9)] if quick else happenings
    return [
        TuningScenario(
            name=name,
            windows=100,
            steps_per_window=100,
            windows_per_epoch=20,
            disturbances=happenings[name],
            planning_s=PLANNING_S,
            probe_s=PROBE_S,
        )
        for name in shown
    ]


def candidates(problem: PlanningProblem) -> Iterator[Plan]:
    """Replicas, and pipelines of every depth with stages balanced for the problem's machine."""
    yield from FAMILIES["dp"](problem)
    orders = [name for name, row in PIPELINE_ORDERS.items() if row.takes(1)]
    for pp, microbatches, order in itertools.product((2, 4, 8), (1, 2, 4, 8, 16, 32, 64), orders):
        mesh = Mesh(pp=pp, dp=DEVICES // pp)
        if problem.global_batch % (mesh.dp * microbatches) == 0:
            yield balanced_plan(problem, "custom", mesh, microbatches=microbatches, pipeline_order=order)


def pool_of(problem: PlanningProblem, courses: Sequence[TuningScenario], top: int) -> list[PricedPlan]:
    """The `top` plans under every state of the machine that occurs; the first is the best on the undisturbed one."""
    states = dict.fromkeys(scenario.active(window) for scenario in courses for window in range(scenario.windows))
    plans: dict[Plan, None] = {}
    for state in dict.fromkeys([(), *states]):
        now = disturbed(problem, state)
        results = [evaluate(now, plan, samples=0).result for plan in candidates(now)]
        leading = sorted((result for result in results if result.fits), key=lambda result: result.step_s.median)
        plans |= dict.fromkeys(result.plan for result in leading[:top])
    return [priced(problem, plan) for plan in plans]


@dataclass(frozen=True)
class Question:
    """A model, how slow its links get, the plans worth having in its scenarios, and what switching costs."""

    problem: PlanningProblem
    slowdown: float
    quick: bool
    pool: tuple[PricedPlan, ...]
    cost_s: SwitchCost


def questions(quick: bool) -> list[Question]:
    made: list[Question] = []
    for name, batch, slowdown in QUESTIONS[: 1 if quick else None]:
        cluster = cluster_from_profile(load_profile(PROFILE), DEVICES)
        problem = PlanningProblem(model=load_model(ModelSpec(name=name)), cluster=cluster, global_batch=batch)
        pool = pool_of(problem, scenarios(slowdown, 0, quick), top=3 if quick else 5)
        cost_s = switch_cost(problem, rebuild_s=REBUILD_S)
        made.append(Question(problem=problem, slowdown=slowdown, quick=quick, pool=tuple(pool), cost_s=cost_s))
    return made


def cases(asked: Sequence[Question], noises: Sequence[float], seeds: Sequence[int]) -> list[Case]:
    made: list[Case] = []
    for question, noise, seed in itertools.product(asked, noises, seeds):
        start = question.pool[0].plan
        shift = int(np.random.default_rng(seed).integers(0, 20))
        for scenario in scenarios(question.slowdown, shift, question.quick):
            course = course_of(question.problem, replace(scenario, noise_sigma=noise), question.pool, seed)
            made.append(
                Case(
                    model=question.problem.model.name,
                    course=course,
                    cost_s=question.cost_s,
                    oracle_s=oracle(course, start, question.cost_s).total_s,
                    stay_s=stay(course, start).total_s,
                    static_s=best_static(course).total_s,
                )
            )
    return made


@dataclass(frozen=True)
class Judged:
    """Attributes: regrets, switches, plannings: per case. weights: of the cases, with sum 1."""

    config: ControllerConfig
    regrets: NDArray[np.float64]
    switches: NDArray[np.int64]
    plannings: NDArray[np.int64]
    weights: NDArray[np.float64]

    @property
    def mean(self) -> float:
        return float(self.weights @ self.regrets)

    def summary(self) -> dict[str, float]:
        """Weighted means over the cases."""
        means = {"switches": float(self.weights @ self.switches), "plannings": float(self.weights @ self.plannings)}
        return {"regret": self.mean, **means}


def weights_of(judged_on: Sequence[Case]) -> NDArray[np.float64]:
    quiet = np.array([case.scenario == QUIET for case in judged_on])
    weights: NDArray[np.float64] = np.where(quiet, QUIET_WEIGHT / quiet.sum(), (1 - QUIET_WEIGHT) / (~quiet).sum())
    return weights


def judge(config: ControllerConfig, judged_on: Sequence[Case]) -> Judged:
    paths = [case.controlled(config) for case in judged_on]
    return Judged(
        config=config,
        regrets=np.array([path.total_s / case.oracle_s - 1 for path, case in zip(paths, judged_on, strict=True)]),
        switches=np.array([path.switches for path in paths]),
        plannings=np.array([path.plannings for path in paths]),
        weights=weights_of(judged_on),
    )


def descend(judged_on: Sequence[Case], rounds: int) -> tuple[Judged, list[dict[str, Any]]]:
    """The best setting found by changing one parameter at a time, and all that was tried."""
    known: dict[ControllerConfig, Judged] = {}

    def ask(config: ControllerConfig) -> Judged:
        if config not in known:
            known[config] = judge(config, judged_on)
        return known[config]

    best = ask(FIRST)
    tried: list[dict[str, Any]] = []
    for round_number in range(rounds):
        before = best
        for name, values in CHOICES.items():
            for value in values:
                judged = ask(replace(best.config, **{name: value}))
                tried.append({"round": round_number, "parameter": name, "value": value, **judged.summary()})
                best = min(best, judged, key=lambda judged: judged.mean)
        if best is before:
            break
    return best, tried


def difference(one: Judged, other: Judged, seed: int) -> dict[str, float]:
    """Weighted mean of one's regret minus the other's, with the 95% interval of a bootstrap over cases."""
    pairs = one.regrets - other.regrets
    draws = np.random.default_rng(seed).choice(len(pairs), (2000, len(pairs)), p=one.weights)
    low, high = np.quantile(pairs[draws].mean(axis=1), (0.025, 0.975))
    return {"mean": one.mean - other.mean, "low": float(low), "high": float(high)}


def by_scenario(judged_on: Sequence[Case], policies: dict[str, Judged]) -> list[dict[str, Any]]:
    """Mean regret per scenario of the policies, of staying, and of the best single plan in hindsight."""
    regrets = {
        "stay": np.array([case.stay_s / case.oracle_s - 1 for case in judged_on]),
        "best static": np.array([case.static_s / case.oracle_s - 1 for case in judged_on]),
        **{policy: judged.regrets for policy, judged in policies.items()},
    }
    rows = []
    for name in dict.fromkeys(case.scenario for case in judged_on):
        there = np.array([case.scenario == name for case in judged_on])
        rows.append({"scenario": name, **{policy: float(values[there].mean()) for policy, values in regrets.items()}})
    weights = weights_of(judged_on)
    return [*rows, {"scenario": "all, weighted", **{policy: float(weights @ values) for policy, values in regrets.items()}}]


def probing(judged_on: Sequence[Case], probe_s: float | None, *, epoch_probes: bool) -> list[Case]:
    """The same cases where communication is timed on purpose otherwise (None: never)."""

    def otherwise(course: PoolCourse) -> PoolCourse:
        return replace(course, scenario=replace(course.scenario, probe_s=probe_s, epoch_probes=epoch_probes))

    return [replace(case, course=otherwise(case.course)) for case in judged_on]


def experiment(quick: bool, seed: int) -> dict[str, Any]:
    started = time.perf_counter()
    asked, noises = questions(quick), NOISE[1:2] if quick else NOISE
    count = 1 if quick else 2
    tuning = cases(asked, noises, range(seed, seed + count))
    held_out = cases(asked, noises, range(seed + 1000, seed + 1000 + count))
    best, tried = descend(tuning, rounds=1 if quick else 2)
    policies = {
        "first values": judge(FIRST, held_out),
        "tuned": judge(best.config, held_out),
        "default": judge(ControllerConfig(), held_out),
        "no probes": judge(replace(ControllerConfig(), ask_probes=False), probing(held_out, None, epoch_probes=False)),
        "probes at epoch ends too": judge(ControllerConfig(), probing(held_out, PROBE_S, epoch_probes=True)),
    }
    return {
        "seed": seed,
        "quick": quick,
        "cases": {"tuning": len(tuning), "held_out": len(held_out)},
        "plans": {question.problem.model.name: len(question.pool) for question in asked},
        "settings": len({(entry["round"], entry["parameter"], entry["value"]) for entry in tried}),
        "tuned": asdict(best.config),
        "default": asdict(ControllerConfig()),
        "sweep": tried,
        "held_out": {name: judged.summary() for name, judged in policies.items()},
        "tuned_minus_first": difference(policies["tuned"], policies["first values"], seed),
        "default_minus_first": difference(policies["default"], policies["first values"], seed),
        "by_scenario": by_scenario(held_out, policies),
        "switches_when_nothing_happens": {
            name: float(judged.switches[[case.scenario == QUIET for case in held_out]].mean())
            for name, judged in policies.items()
        },
        "seconds": time.perf_counter() - started,
    }


def main() -> None:
    parser = part_parser(__doc__, "one model, four scenarios, one noise level")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    show(experiment(options.quick, options.seed), as_json=options.json)


if __name__ == "__main__":
    main()
