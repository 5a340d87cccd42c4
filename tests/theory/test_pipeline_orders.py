"""Pipeline orders against what defines them, against PyTorch's own, and against one another."""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Sequence
from graphlib import TopologicalSorter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parsim.errors import DeadlockError, PlanError
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import (
    PIPELINE_ORDERS,
    check_actions,
    check_order,
    check_torch_schedule,
    in_flight,
    moments,
    parse_action,
    pipeline_actions,
    rank_of_stage,
    stages_by_rank,
)
from parsim.plans.plan import Plan, Stage
from parsim.program.lifetimes import Pipeline, StageLink, ends, held_moments, message_groups, message_rooms
from parsim.program.lower import lower
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import rank_tasks
from parsim.work import Compute, Phase, SendRecv
from tests.models import chain_model
from tests.plans import MODEL, plans

shapes = st.tuples(st.integers(1, 8), st.integers(1, 12)).flatmap(
    lambda pair: st.tuples(st.integers(0, pair[0] - 1), st.just(pair[0]), st.just(pair[1]))
)
WITH_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="compares with torch's schedules")


def chunks_of(order: str) -> tuple[int, ...]:
    return tuple(chunks for chunks in (1, 2, 3) if PIPELINE_ORDERS[order].takes(chunks))


@pytest.mark.parametrize("order", sorted(PIPELINE_ORDERS))
@given(rounds=st.integers(1, 4), ranks=st.integers(1, 6), data=st.data())
def test_every_microbatch_runs_all_phases_of_every_chunk_once_in_order(
    order: str, rounds: int, ranks: int, data: st.DataObject
) -> None:
    chunks = data.draw(st.sampled_from(chunks_of(order)))
    microbatches = rounds * ranks
    backward = [Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT] if PIPELINE_ORDERS[order].halves else [Phase.BACKWARD]
    check_order(order, ranks, microbatches, chunks)
    for rank in range(ranks):
        actions = pipeline_actions(order, rank, ranks, microbatches, chunks)
        assert len(actions) == len(set(actions)) == (1 + len(backward)) * microbatches * chunks
        for stage, number in itertools.product(stages_by_rank(order, ranks, chunks)[rank], range(microbatches)):
            mine = [action.phase for action in actions if (action.stage, action.microbatch) == (stage, number)]
            assert mine == [Phase.FORWARD, *backward]


@given(shape=shapes)
def test_in_flight_is_m_for_gpipe_and_min_m_s_minus_s_for_1f1b(shape: tuple[int, int, int]) -> None:
    rank, ranks, microbatches = shape
    assert in_flight("gpipe", rank, ranks, microbatches) == microbatches
    assert in_flight("1f1b", rank, ranks, microbatches) == min(microbatches, ranks - rank)


@given(shape=shapes)
def test_zero_bubble_holds_no_more_than_the_first_rank_of_1f1b(shape: tuple[int, int, int]) -> None:
    """ZB-H1 keeps the peak of 1F1B, S microbatches."""
    rank, ranks, microbatches = shape
    assert in_flight("zero-bubble", rank, ranks, microbatches) == min(microbatches, ranks)


@given(ranks=st.integers(2, 6), rounds=st.integers(2, 4), chunks=st.integers(2, 4))
def test_interleaved_holds_the_warm_up_and_one_more(ranks: int, rounds: int, chunks: int) -> None:
    """(V - 1) S + 2 (S - 1 - rank) + 1 chunks of a microbatch, where there are as many: Narayanan et al., section 2.2."""
    for rank in range(ranks):
        wanted = min((chunks - 1) * ranks + 2 * (ranks - 1 - rank) + 1, chunks * ranks * rounds)
        assert in_flight("interleaved", rank, ranks, ranks * rounds, chunks) == wanted
        for moment in moments("interleaved", rank, ranks, ranks * rounds, chunks):
            assert sum(moment) <= wanted


@pytest.mark.parametrize("order", sorted(PIPELINE_ORDERS))
@given(rounds=st.integers(1, 9), ranks=st.integers(1, 6), chunks=st.integers(1, 4))
def test_moments_are_those_of_all_actions(order: str, rounds: int, ranks: int, chunks: int) -> None:
    """Orders that repeat a pattern are counted over few of its rounds."""
    row = PIPELINE_ORDERS[order]
    chunks = max(row.fewest_chunks, min(chunks, row.most_chunks or chunks))
    for rank, stages in enumerate(stages_by_rank(order, ranks, chunks)):
        held, seen = dict.fromkeys(stages, 0), set[tuple[int, ...]]()
        for stage, phase, _ in pipeline_actions(order, rank, ranks, rounds * ranks, chunks):
            held[stage] += {Phase.FORWARD: 1, Phase.BACKWARD_INPUT: 0}.get(phase, -1)
            seen.add(tuple(held.values()))
        most = {
            moment
            for moment in seen
            if not any(other != moment and all(a >= b for a, b in zip(other, moment, strict=True)) for other in seen)
        }
        found = moments(order, rank, ranks, rounds * ranks, chunks)
        assert set(found) == most
        assert len(found) == len(most)
        assert in_flight(order, rank, ranks, rounds * ranks, chunks) == max(map(sum, most)) == sum(found[-1])


def test_printed_orders() -> None:
    def text(order: str, rank: int, ranks: int = 3, microbatches: int = 4, chunks: int = 1) -> str:
        return " ".join(map(str, pipeline_actions(order, rank, ranks, microbatches, chunks)))

    assert text("gpipe", 1) == "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"
    assert text("1f1b", 0) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert text("1f1b", 1) == "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"
    assert text("1f1b", 2) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    assert text("interleaved", 1, 2, 2, 2) == "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    assert text("zero-bubble", 0, 2, 3) == "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2"
    assert text("zero-bubble", 1, 2, 3) == "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"


@given(shape=shapes, order=st.sampled_from(sorted(PIPELINE_ORDERS)))
def test_actions_round_trip_through_their_text(shape: tuple[int, int, int], order: str) -> None:
    for action in pipeline_actions(order, *shape, chunks=PIPELINE_ORDERS[order].fewest_chunks):
        assert parse_action(str(action)) == action


@pytest.mark.parametrize(
    ("order", "chunks", "words"),
    [
        ("1f1", 1, "1f1b"),
        ("1f1b", 2, "only interleaved, zero-bubble, zero-bubble-v, dualpipe-v have more than one chunk"),
        ("interleaved", 0, "chunks = 0"),
        ("zero-bubble-v", 1, "it takes 2 stages per rank; set chunks = 2"),
        ("zero-bubble-v", 3, "it takes 2 stages per rank; set chunks = 2"),
    ],
)
def test_what_no_order_is_says_what_to_write(order: str, chunks: int, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        pipeline_actions(order, 0, 2, 2, chunks)


def test_microbatches_that_make_no_equal_rounds_are_refused() -> None:
    with pytest.raises(PlanError, match=r"microbatches \(11\) run in 2 equal rounds on pp = 4.*use 8 or 12 microbatches"):
        pipeline_actions("interleaved", 0, 4, 11, 2)
    with pytest.raises(PlanError, match="1F0"):
        parse_action("F0")


def test_an_order_that_deadlocks_prints_the_grid() -> None:
    """Rank 0 wants its backward before the forward that rank 1 needs for it."""
    texts = ["0F0 0B1 0F1 0B0", "1F0 1B0 1F1 1B1"]
    with pytest.raises(DeadlockError) as caught:
        check_actions([[parse_action(entry) for entry in text.split()] for text in texts], 2)
    assert str(caught.value).splitlines() == [
        "deadlock: 5 of 8 actions of this pipeline order can never start; by rank",
        "0     0F0 *0B1 0F1 0B0 waits for 0F1, 1B1",
        "1 1F0 1B0 *1F1 1B1     waits for 0F1",
        "(* = blocked action; what stands before it has run)",
        "order each rank's actions so that what they wait for on other ranks comes first there",
    ]


def torch_actions(order: str, schedule: str, ranks: int, microbatches: int, chunks: int) -> list[list[str]]:
    """What torch's own schedule runs on each rank, as its actions print: computation alone, bubbles dropped.

    The schedules read nothing of their stages but these numbers before a step is run.
    """
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining.stage import _PipelineStageBase

    places = rank_of_stage(order, ranks, chunks)

    class Numbers(_PipelineStageBase):
        def __init__(self, stage: int) -> None:
            self.stage_index, self.num_stages = stage, ranks * chunks
            self.group_size, self.group_rank = ranks, 0
            self.has_backward = False
            self.device, self.submod = None, None
            self.stage_index_to_group_rank = dict(enumerate(places))

    Numbers.__abstractmethods__ = frozenset()  # those are for running it
    own = [Numbers(stage) for stage in stages_by_rank(order, ranks, chunks)[0]]
    single = issubclass(made := getattr(schedules, schedule), schedules.PipelineScheduleSingle)
    scheduled = made(own[0] if single else own, microbatches)
    listed = scheduled._get_pipeline_order() if single else scheduled.pipeline_order
    texts = [[str(action) for action in listed[rank] if action is not None] for rank in range(ranks)]
    return [[text for text in own if "REDUCE" not in text] for own in texts]


TORCHS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zero-bubble-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}


def most_held(actions: Sequence[str]) -> int:
    """The most forwards of torch's actions whose backward has not ended; halves for inputs free nothing yet."""
    held = most = 0
    for part in (part for action in actions for part in re.findall(r"\d+([FBIW])\d+", action)):
        held += {"F": 1, "I": 0}.get(part, -1)
        most = max(most, held)
    return most


@WITH_TORCH
@pytest.mark.parametrize("order", sorted(TORCHS))
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 10), (3, 12)])
def test_memory_in_flight_is_that_of_torchs_list(order: str, ranks: int, microbatches: int) -> None:
    """torch 2.13: the most forwards without a backward in the list of every schedule. A pair of DualPipeV counts as its two
    actions, one after the other."""
    chunks = chunks_of(order)[-1] if PIPELINE_ORDERS[order].most_chunks is not None else 2
    theirs = torch_actions(order, TORCHS[order], ranks, microbatches, chunks)
    assert [most_held(own) for own in theirs] == [in_flight(order, rank, ranks, microbatches, chunks) for rank in range(ranks)]


def test_interleaved_1f1b_holds_more_with_6_microbatches_than_with_8() -> None:
    """torch 2.13: interleaved 1F1B on 4 ranks holds more with 6 microbatches than with 8: 6 do not divide into rounds of 4,
    and one round of 6 has a longer first phase."""
    held = {count: [in_flight("interleaved", rank, 4, count, 2) for rank in range(4)] for count in (6, 8)}
    assert held == {6: [12, 11, 9, 7], 8: [11, 9, 7, 5]}


@WITH_TORCH
@pytest.mark.parametrize("order", sorted(TORCHS))
def test_what_torch_refuses_is_what_the_rule_refuses(order: str) -> None:
    """torch 2.13: constructors of schedules raise ValueError exactly where `check_torch_schedule` raises."""
    refused = []
    for ranks, microbatches in itertools.product((2, 3, 4), range(1, 12)):
        chunks = chunks_of(order)[-1]
        try:
            torch_actions(order, TORCHS[order], ranks, microbatches, chunks)
        except ValueError:
            refused.append((ranks, microbatches))
            with pytest.raises(PlanError, match="torch's schedule"):
                check_torch_schedule(order, ranks, microbatches, chunks)
        else:
            check_torch_schedule(order, ranks, microbatches, chunks)
    assert bool(refused) == (order not in ("gpipe", "zero-bubble-v"))


@WITH_TORCH
@pytest.mark.parametrize(
    ("order", "schedule"),
    [("interleaved", "ScheduleInterleaved1F1B"), ("zero-bubble", "ScheduleInterleavedZeroBubble")],
)
@pytest.mark.parametrize(
    ("ranks", "microbatches", "chunks"),
    [(2, 2, 2), (2, 4, 3), (4, 4, 2), (4, 8, 1), (4, 10, 2), (4, 16, 3), (3, 2, 2), (8, 32, 2)],
)
def test_the_order_of_actions_is_torchs_own(order: str, schedule: str, ranks: int, microbatches: int, chunks: int) -> None:
    """torch 2.13: interleaved 1F1B and ZB-H1 run microbatches in rounds of at least as many as there are ranks."""
    theirs = torch_actions(order, schedule, ranks, microbatches, chunks)
    ours = [[str(action) for action in pipeline_actions(order, rank, ranks, microbatches, chunks)] for rank in range(ranks)]
    assert ours == theirs


@WITH_TORCH
@pytest.mark.parametrize(
    ("ranks", "microbatches"), [(1, 1), (2, 1), (2, 2), (2, 3), (2, 8), (3, 5), (4, 3), (4, 7), (4, 16), (8, 32)]
)
def test_zb_v_and_its_placement_are_torchs_own(ranks: int, microbatches: int) -> None:
    """torch 2.13: ZB-V runs with fewer than 2 pp - 1 microbatches, the missing ones left out of its list."""
    from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

    theirs = torch_actions("zero-bubble-v", "ScheduleZBVZeroBubble", ranks, microbatches, 2)
    ours = [list(map(str, pipeline_actions("zero-bubble-v", rank, ranks, microbatches, 2))) for rank in range(ranks)]
    assert ours == theirs
    assert dict(enumerate(rank_of_stage("zero-bubble-v", ranks, 2))) == generate_stage_to_rank_mapping(
        ranks, 2 * ranks, style="v"
    )


@WITH_TORCH
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 4), (2, 9), (3, 6), (3, 7), (4, 8), (4, 16), (5, 11), (8, 32)])
def test_dualpipe_v_is_torchs_own_with_its_pairs_one_after_another(ranks: int, microbatches: int) -> None:
    """torch 2.13: DualPipeV pairs a forward of one chunk with a backward of the other, and its late backwards run in
    halves."""
    theirs = torch_actions("dualpipe-v", "ScheduleDualPipeV", ranks, microbatches, 2)
    flat = [[part for action in row for part in re.findall(r"\d+[FBIW]\d+", action)] for row in theirs]
    halves = [[half for part in row for half in _in_halves(part)] for row in flat]
    ours = [list(map(str, pipeline_actions("dualpipe-v", rank, ranks, microbatches, 2))) for rank in range(ranks)]
    assert ours == halves


def _in_halves(action: str) -> list[str]:
    """`2B0` as `2I0`, `2W0`."""
    return [action.replace("B", "I"), action.replace("B", "W")] if "B" in action else [action]


@pytest.mark.parametrize(("order", "more"), [("zero-bubble-v", 0), ("dualpipe-v", 1)])
@given(ranks=st.integers(1, 6), microbatches=st.integers(1, 16))
def test_orders_in_a_v_end_and_hold_so_many_chunks(order: str, more: int, ranks: int, microbatches: int) -> None:
    """ZB-V holds the peak of 1F1B, S microbatches of two chunks each (Qi et al., section 6); DualPipeV one chunk more
    (DeepSeek-V3, table 2: PP + 1 pairs)."""
    check_order(order, ranks, microbatches, 2)
    for rank in range(ranks):
        assert in_flight(order, rank, ranks, microbatches, 2) <= min(2 * ranks + more, 2 * microbatches)


@WITH_TORCH
@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 5), (8, 16)])
def test_orders_of_one_stage_per_rank_are_torchs_own(order: str, ranks: int, microbatches: int) -> None:
    """torch 2.13: 1F1B numbers the forwards of the last stage from 1 in its list (`_get_pipeline_order`), and runs them from
    0 (`_step_microbatches`); the list is for pictures."""
    theirs = torch_actions(order, TORCHS[order], ranks, microbatches, 1)
    if order == "1f1b":
        assert [own for own in theirs[-1] if "F" in own] == [f"{ranks - 1}F{number + 1}" for number in range(microbatches)]
        theirs[-1] = [re.sub(r"F(\d+)", lambda found: f"F{int(found[1]) - 1}", own) for own in theirs[-1]]
    assert theirs == [list(map(str, pipeline_actions(order, rank, ranks, microbatches))) for rank in range(ranks)]


# Room for what stages send one another: bounded, without a deadlock in any shipped order, and by hand for one.


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


# What ranks wait for so that their messages lie at most one group ahead adds no cycle to the program of a step.


@settings(max_examples=40, deadline=None)
@given(plans())
def test_room_for_messages_adds_no_cycle(plan: Plan) -> None:
    """Placed components, conversions, halves, chunks and ZeRO included: a value may be sent by a rank that did not make it."""
    assume(plan.mesh.pp > 1 and plan.mesh.cp == 1)
    try:
        layout = PlanIndex(plan, MODEL)
    except PlanError:
        assume(False)
    graph = lower(plan, MODEL)
    after = {task.index: set(task.dependencies) for task in graph.tasks}
    last: dict[tuple[int, str], int] = {}
    for task in graph.tasks:
        for resource in task.resources:
            place = (resource.rank, resource.stream)
            if place in last:
                after[task.index].add(last[place])
            last[place] = task.index
    for rank in range(plan.world_size):
        rooms = message_rooms(rank_tasks(graph, rank), layout, rank)
        for index, before in rooms.awaited.items():
            after[index].update(before)
    assert len(list(TopologicalSorter(after).static_order())) == len(graph.tasks)  # raises CycleError for a cycle


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_every_receive_has_room_once(data: st.DataObject) -> None:
    plan = data.draw(plans().filter(lambda plan: plan.mesh.pp > 1 and plan.mesh.cp == 1))
    layout, graph = PlanIndex(plan, MODEL), lower(plan, MODEL)
    for rank in range(plan.world_size):
        tasks = rank_tasks(graph, rank)
        rooms = message_rooms(tasks, layout, rank)
        given_room = [task.index for task in (*rooms.first, *(task for some in rooms.behind.values() for task in some))]
        received = [task.index for task, stream, _ in tasks if stream.startswith("pp<")]
        assert sorted(given_room) == sorted(received)


def test_a_second_forward_waits_until_the_value_is_sent_that_is_given_up_before_it() -> None:
    """Else it would still be there where the link is slow, and to the end of the step if it was sent later still."""
    model = chain_model((1e6,) * 4)
    names, mesh = tuple(component.name for component in model.components), Mesh(pp=2)
    plan = Plan(
        strategy="custom",
        mesh=mesh,
        stages=(
            Stage(components=names[:2], ranks=mesh.stage_ranks(0)),
            Stage(components=names[2:], ranks=mesh.stage_ranks(1)),
        ),
        global_batch=8,
        pipeline_order="gpipe",
        recompute="full",
    )
    layout = PlanIndex(plan, model)
    tasks = rank_tasks(lower(plan, model), 0)
    rooms = message_rooms(tasks, layout, 0)
    again = next(task for task, _, _ in tasks if isinstance(task.work, Compute) and task.work.phase is Phase.RECOMPUTE)
    sent = [task.index for task, _, _ in tasks if isinstance(task.work, SendRecv) and task.work.source == 0]
    assert rooms.forgotten[again.index] == sent
    assert rooms.awaited[again.index] == sent
