"""Pipeline orders against what defines them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsim.errors import PlanError
from parsim.plan.pipeline import PIPELINE_ORDERS, in_flight, parse_action, pipeline_actions
from parsim.work import Phase

shapes = st.tuples(st.integers(1, 8), st.integers(1, 12)).flatmap(
    lambda pair: st.tuples(st.integers(0, pair[0] - 1), st.just(pair[0]), st.just(pair[1]))
)


@pytest.mark.parametrize("order", sorted(PIPELINE_ORDERS))
@given(shape=shapes)
def test_every_microbatch_runs_forward_then_backward_once(order: str, shape: tuple[int, int, int]) -> None:
    stage, stages, microbatches = shape
    actions = pipeline_actions(order, stage, stages, microbatches)
    assert len(actions) == 2 * microbatches
    for microbatch in range(microbatches):
        mine = [action.phase for action in actions if action.microbatch == microbatch]
        assert mine == [Phase.FORWARD, Phase.BACKWARD]


@given(shape=shapes)
def test_in_flight_is_m_for_gpipe_and_min_m_s_minus_s_for_1f1b(shape: tuple[int, int, int]) -> None:
    stage, stages, microbatches = shape
    assert in_flight("gpipe", stage, stages, microbatches) == microbatches
    assert in_flight("1f1b", stage, stages, microbatches) == min(microbatches, stages - stage)


def test_printed_orders() -> None:
    def text(order: str, stage: int) -> str:
        return " ".join(map(str, pipeline_actions(order, stage, 3, 4)))

    assert text("gpipe", 1) == "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"
    assert text("1f1b", 0) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert text("1f1b", 1) == "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"
    assert text("1f1b", 2) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"


@given(shape=shapes, order=st.sampled_from(sorted(PIPELINE_ORDERS)))
def test_actions_round_trip_through_their_text(shape: tuple[int, int, int], order: str) -> None:
    for action in pipeline_actions(order, *shape):
        assert parse_action(str(action)) == action


def test_an_unknown_order_names_the_near_one() -> None:
    with pytest.raises(PlanError, match="1f1b"):
        pipeline_actions("1f1", 0, 2, 2)
    with pytest.raises(PlanError, match="1F0"):
        parse_action("F0")
