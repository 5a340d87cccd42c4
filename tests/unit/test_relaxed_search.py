"""Relaxed plans on many ranks: microbatches are ranked by the plans whose replicas average."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.profile import load_profile
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.synchronisation import parse_synchronisation
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.relaxed import relaxed_search as module
from parsim.schedule.relaxed.relaxed_search import relaxed_search


def problem(rule: str) -> PlanningProblem:
    asked = PlanningProblem(
        model=load_model(ModelSpec(name="mlp", args=(("width", 64),))),
        cluster=cluster_from_profile(load_profile("dgx1-v100-32gb"), 8),
        global_batch=256,
        precision="fp32",
        optimizer="sgd_momentum",
    )
    return replace(asked, constraints=replace(asked.constraints, synchronisation=parse_synchronisation(rule)))


@pytest.mark.parametrize("rule", ["gossip/1 ring", "gossip/4 ada(start=7, rate=1.0, rounds=2, epochs=3)", "merge/2"])
def test_one_simulated_plan_is_the_best_of_all(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every = relaxed_search(problem(rule), ("dp",), samples=0)
    monkeypatch.setattr(module, "SCREENED_RANKS", 4)
    screened = relaxed_search(problem(rule), ("dp",), samples=0)
    assert every.chosen is not None
    assert screened.chosen is not None
    assert screened.chosen.result.plan == every.chosen.result.plan
    assert screened.chosen.result.step_s.median == every.chosen.result.step_s.median
    assert every.tally.simulated > 3
    assert (screened.tally.simulated, screened.tally.untried) == (1, every.tally.simulated - 1)


def test_averaging_and_a_list_of_plans_are_simulated_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCREENED_RANKS", 4)
    assert relaxed_search(problem("average/4"), ("dp",), samples=0).tally.untried == 0
    assert relaxed_search(problem("gossip/1 ring"), ("dp",), samples=0, top=3).tally.untried == 0
