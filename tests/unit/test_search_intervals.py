"""The intervals of what a search shows: every program is drawn once, and large ones less often."""

from __future__ import annotations

import pytest

from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.plans.constraints import PlanConstraints
from parsim.predict.evaluate import Evaluation, with_interval
from parsim.predict.problem import PlanningProblem
from parsim.search import search as module
from parsim.search.search import search
from tests.models import chain_model


@pytest.fixture
def problem() -> PlanningProblem:
    """Little of it is free, so that a search takes no time."""
    return PlanningProblem(
        model=chain_model(),
        cluster=cluster_from_profile(load_profile("dgx1-v100-32gb"), 2),
        global_batch=64,
        zero_stage=0,
        recompute="none",
        constraints=PlanConstraints(microbatches=1, bucket_bytes=2**25, tp=1),
    )


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of draws that were asked for."""
    asked: list[int] = []

    def counted(problem: PlanningProblem, evaluation: Evaluation, *, samples: int, reason: str) -> Evaluation:
        asked.append(samples)
        return with_interval(problem, evaluation, samples=samples, reason=reason)

    monkeypatch.setattr(module, "with_interval", counted)
    return asked


def test_a_program_of_several_names_is_drawn_once(problem: PlanningProblem, draws: list[int]) -> None:
    found = search(problem, ("adaptive",), samples=50)
    first, *others = found.candidates
    twins = [entry for entry in others if entry.result.plan.program == first.result.plan.program]
    assert twins
    assert len(draws) == len(found.candidates) - len(twins)
    for twin in twins:
        assert twin.result.step_s == first.result.step_s
        assert twin.result.interval_correction == first.result.interval_correction
        assert twin.result.reason.startswith("the same plan as")
    assert first.result.step_s.p05 < first.result.step_s.median < first.result.step_s.p95


def test_large_programs_are_drawn_less_often(
    problem: PlanningProblem, draws: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_DRAWN", 1)
    search(problem, ("adaptive",), samples=200)
    assert draws[0] == module.FEWEST_DRAWS
    assert set(draws[1:]) == {module.OF_A_LOSER}


def test_no_interval_is_drawn_where_none_is_asked_for(problem: PlanningProblem) -> None:
    result = search(problem, ("adaptive",), samples=0).candidates[0].result
    assert result.interval_correction is None
