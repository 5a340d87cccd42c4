"""What a search says while it runs, and what it answers after Ctrl-C."""

from __future__ import annotations

from typing import Any

import pytest

from parsim.app.load import problem_of
from parsim.app.question import question_of
from parsim.predict.problem import PlanningProblem
from parsim.search import search as module
from parsim.search.search import search
from tests.machines import machine
from tests.models import chain_model


def problem() -> PlanningProblem:
    return problem_of(question_of("vit_small", cluster="dgx1-v100-32gb", global_batch=64, overrides=["cluster.devices=2"]))


def test_a_search_says_what_is_searched_what_is_left_and_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**6, 3))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    lines: list[str] = []
    found = search(problem(), ("adaptive",), say=lines.append)
    assert any("parts left, nothing fits so far" in line for line in lines)
    assert any("parts left, best so far " in line for line in lines)
    assert not found.cut_short


def test_after_ctrl_c_the_best_plan_so_far_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = search(problem(), ("adaptive",))
    early = module._Opening.early
    opened = 0

    def interrupted(self: Any, *arguments: Any) -> None:
        nonlocal opened
        if self.judged:
            raise KeyboardInterrupt
        opened += 1
        early(self, *arguments)

    monkeypatch.setattr(module._Opening, "early", interrupted)
    found = search(problem(), ("adaptive",))
    assert found.cut_short
    assert found.chosen is not None
    assert whole.chosen is not None
    assert found.chosen.result.step_s.median >= whole.chosen.result.step_s.median
    assert found.to_dict()["cut_short"] is True


def test_a_search_that_opens_all_it_has_to_says_so_and_can_be_ended_within_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lines = iter(range(0, 10**6, 3)), list[str]()
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))

    def ended(line: str) -> None:
        lines.append(line)
        if line.startswith("hp") and "best so far" in line and len(lines) > 40:
            raise KeyboardInterrupt

    few = PlanningProblem(model=chain_model((4e9, 2e9, 6e9, 2e9)), cluster=machine(4), global_batch=16)
    found = search(few, ("hp",), say=ended)
    assert found.cut_short
    assert found.chosen is not None
    assert lines[-1].startswith("hp: ")


def test_ctrl_c_before_any_plan_was_simulated_stops_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Any, *arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module._Opening, "early", interrupted)
    with pytest.raises(KeyboardInterrupt):
        search(problem(), ("adaptive",))
