"""Relaxed plans on many ranks: microbatches are ranked by the plans whose replicas average."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parsim.errors import ScheduleError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.layouts import BATCH, parse_placement
from parsim.plans.synchronisation import parse_synchronisation
from parsim.predict.problem import PlanningProblem
from parsim.search import relaxed as module
from parsim.search.relaxed import relaxed_search


def problem(rule: str) -> PlanningProblem:
    asked = PlanningProblem(
        model=load_model(ModelSpec(name="mlp", args=(("width", 64),))),
        cluster=cluster_from_profile(load_profile("dgx1-v100-32gb"), 8),
        global_batch=256,
        numerics=Numerics(precision="fp32", optimizer="sgd_momentum"),
    )
    return replace(asked, constraints=replace(asked.constraints, synchronisation=parse_synchronisation(rule)))


@pytest.mark.slow
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


@pytest.mark.slow
def test_averaging_and_a_list_of_plans_are_simulated_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCREENED_RANKS", 4)
    assert relaxed_search(problem("average/4"), ("dp",), samples=0).tally.untried == 0
    assert relaxed_search(problem("gossip/1 ring"), ("dp",), samples=0, top=3).tally.untried == 0


def test_pins_that_no_relaxed_plan_keeps_are_not_left_out() -> None:
    """All its components are cut by the batch, and a search with other pins would be answered by a plan without them."""
    asked = problem("average/4")
    head = asked.model.components[-2].name
    kept = relaxed_search(replace(asked, pins=((head, BATCH),)), ("adaptive",), samples=0)
    assert kept.chosen is not None
    for barred in (
        replace(asked, pins=((head, parse_placement("replicate")),)),
        replace(asked, forbids=((head, "batch"),)),
    ):
        with pytest.raises(ScheduleError, match=f"bar placement batch for {head}.*drop them"):
            relaxed_search(barred, ("adaptive",), samples=0)


@pytest.mark.slow
def test_hybrid_replicas_need_a_mesh_that_makes_them() -> None:
    asked = problem("average/4")
    with pytest.raises(ScheduleError, match=r"several ranks: set plan\.mesh with pp or tp above 1"):
        relaxed_search(asked, ("hp",), samples=0)
    two = replace(asked, constraints=replace(asked.constraints, pp=2))
    found = relaxed_search(two, ("hp",), samples=0).chosen
    assert found is not None
    assert (found.result.plan.mesh.pp, found.result.plan.mesh.dp) == (2, 4)
