"""Room for what stages send one another: bounded, without a deadlock in any shipped order, and by hand for one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsim.plans.pipeline import PIPELINE_ORDERS, pipeline_actions, rank_of_stage
from parsim.program.lifetimes import Pipeline, StageLink, ends, held_moments, message_groups


def chain_links(order: str, ranks: int, chunks: int, skips: frozenset[tuple[int, int]] = frozenset()) -> tuple[StageLink, ...]:
    """Neighbouring stages, and `skips`, in both directions; none within a rank."""
    place = rank_of_stage(order, ranks, chunks)
    pairs = {(stage, stage + 1) for stage in range(ranks * chunks - 1)} | skips
    return tuple(sorted(StageLink(*ends) for a, b in pairs if place[a] != place[b] for ends in ((a, b), (b, a))))


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    order = draw(st.sampled_from(sorted(PIPELINE_ORDERS)))
    row, ranks = PIPELINE_ORDERS[order], draw(st.integers(2, 5))
    chunks = draw(st.sampled_from([count for count in (1, 2, 3) if row.takes(count)]))
    microbatches = draw(st.integers(1, 4)) * (ranks if chunks > 1 else 1)
    stages = ranks * chunks
    pairs = st.tuples(st.integers(0, stages - 2), st.integers(1, stages - 1)).filter(lambda pair: pair[0] < pair[1])
    skips = draw(st.frozensets(pairs, max_size=3))
    return Pipeline(
        order=order, ranks=ranks, microbatches=microbatches, chunks=chunks, links=chain_links(order, ranks, chunks, skips)
    )


@given(pipelines())
@settings(max_examples=30)
def test_every_shipped_order_ends_with_room_for_one_group_ahead(pipeline: Pipeline) -> None:
    assert ends(pipeline, sends_wait=False)
    if pipeline.chunks == 1:
        assert ends(pipeline), "and where sends wait for one another too"


@pytest.mark.parametrize("order", ["interleaved", "zero-bubble-v"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_orders_with_chunks_end_where_sends_wait(order: str, ranks: int) -> None:
    for microbatches in (ranks, 2 * ranks):
        links = chain_links(order, ranks, 2)
        assert ends(Pipeline(order=order, ranks=ranks, microbatches=microbatches, chunks=2, links=links))


def test_an_order_in_which_sends_would_wait_for_ever_is_recognised() -> None:
    order = "zero-bubble"
    stuck = Pipeline(order=order, ranks=5, microbatches=10, chunks=3, links=chain_links(order, 5, 3))
    assert ends(stuck, sends_wait=False)
    assert not ends(stuck)


@given(pipelines(), st.data())
@settings(max_examples=30)
def test_of_every_stream_at_most_one_group_lies_ahead_where_reads_are_in_order(pipeline: Pipeline, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, pipeline.ranks - 1))
    for other in range(pipeline.ranks):
        if other == rank:
            continue
        found = message_groups(pipeline, other, rank)
        assert all(group.room <= group.read for group in found), "there is room before the action that waits for it"
        rooms = [group.room for group in found]
        assert rooms == sorted(rooms), "in the order of the stream"
        if [group.read for group in found] == sorted(group.read for group in found):
            actions = pipeline_actions(pipeline.order, rank, pipeline.ranks, pipeline.microbatches, pipeline.chunks)
            for number in range(len(actions)):
                assert sum(group.room <= number < group.read for group in found) <= 1


def beside(pipeline: Pipeline, rank: int) -> list[tuple[str, list[int], list[int]]]:
    """By moment of a rank what runs, and the messages for which there is room, and that are held."""
    moments = held_moments(pipeline, rank)
    runs = [phase.value for _, phase, _ in moments.kinds]
    return list(zip(runs, moments.arriving.tolist(), moments.leaving.tolist(), strict=True))


def test_the_last_stage_of_1f1b_by_hand() -> None:
    """F0 B0 F1 B1: while F0 runs there is room for the value of F1, and its gradient is held while F1 runs."""
    pipeline = Pipeline(order="1f1b", ranks=2, microbatches=2, links=(StageLink(0, 1), StageLink(1, 0)))
    assert beside(pipeline, 1) == [
        ("forward", [1], [0]),
        ("backward", [1], [0]),
        ("forward", [0], [1]),
        ("backward", [0], [1]),
    ]
    assert beside(pipeline, 0) == [  # F0 F1 B0 B1
        ("forward", [1], [0]),
        ("forward", [1], [1]),
        ("backward", [1], [1]),
        ("backward", [0], [0]),
    ]


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_one_microbatch_has_room_for_its_gradient_and_holds_its_value_to_the_backward(order: str) -> None:
    pipeline = Pipeline(order=order, ranks=2, microbatches=1, links=(StageLink(0, 1), StageLink(1, 0)))
    assert beside(pipeline, 0) == [("forward", [1], [0]), ("backward", [0], [0])]
