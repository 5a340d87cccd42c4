"""Properties of the search that a user calls, over random models, clusters and batches.

The properties and the draws are those of `experiments/search`, which keeps how many problems each compared. Here
each runs on few problems at every change, and on more in the slow set.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from experiments.search.asking import SHAPES, TINY, Shape
from experiments.search.counting import Counts, assert_holds, counted
from experiments.search.problems import ProblemDraw
from experiments.search.properties import PROPERTIES

QUICK, MANY = 2, 40
"""Problems that each property compares: in the tests at every change, and in the slow ones."""

TRIED_ELSEWHERE = "the_papers_optimum_is_certified", "the_papers_optimum_of_real_models_is_certified"
"""In `test_paper_of_model`, at every change."""


def holds_on(name: str, problems: int, shapes: Sequence[Shape]) -> Counts:
    counts = counted(name, PROPERTIES[name], problems, shapes=shapes, patient=False)
    print(counts)
    assert_holds(counts)
    return counts


@pytest.mark.parametrize("name", [name for name in PROPERTIES if name not in TRIED_ELSEWHERE])
def test_property(name: str) -> None:
    holds_on(name, QUICK, TINY)


@pytest.mark.slow  # 10 to 80 CPU-seconds each
@pytest.mark.parametrize("name", list(PROPERTIES))
def test_property_on_many_problems(name: str) -> None:
    counts = holds_on(name, MANY, SHAPES)
    assert counts.compared >= MANY / 2, str(counts)


def test_a_property_that_compares_nothing_is_not_called_met() -> None:
    counts = counted("nothing", lambda draw, random: 0, 2, shapes=TINY)
    assert counts.compared == 0
    assert "NOTHING WAS COMPARED" in str(counts)
    with pytest.raises(AssertionError, match="NOTHING WAS COMPARED"):
        assert_holds(counts)


def test_failures_are_counted_and_told_with_their_problem() -> None:
    def fails(draw: ProblemDraw, random: Random) -> int:
        assert draw.global_batch < 0, "too few samples"
        return 1

    counts = counted("fails", fails, 3, shapes=TINY)
    assert (counts.compared, counts.passed) == (3, 0)
    with pytest.raises(AssertionError, match=r"(?s)0 passed.*too few samples.*ProblemDraw"):
        assert_holds(counts)
