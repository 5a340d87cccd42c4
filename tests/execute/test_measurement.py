"""From what ranks wrote down to one Timeline, and the bytes that are alive."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parsim.app.launch import whole_periods
from parsim.errors import ExecutionError
from parsim.execute.measurement import Measurement, RankRecord, load_measurement, merge_times
from parsim.execute.streams import TaskTime, ThreadStreams
from parsim.model.trace.memory import LiveBytes
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.plans.synchronisation import parse_synchronisation
from parsim.program.lower import lower
from tests.models import chain_model

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from experiments.common.forked import run_ranks
from parsim.execute.processes import exchange as clocks
from parsim.execute.processes.exchange import ClockLook, look, meet, on_rank_0


def test_a_collective_starts_when_its_last_rank_is_ready() -> None:
    timeline = merge_times(
        [
            [TaskTime(0, "compute", 10.0, 11.0), TaskTime(2, "dp", 11.0, 14.5)],
            [TaskTime(1, "compute", 10.5, 13.0), TaskTime(2, "dp", 13.0, 14.25)],
        ]
    )
    spans = {(span.task, span.resource): (span.start_s, span.end_s) for span in timeline}
    assert spans[2, "r0.dp"] == (3.0, 4.5)
    assert spans[2, "r1.dp"] == (3.0, 4.25)
    assert spans[0, "r0.compute"] == (0.0, 1.0)
    assert timeline.source == "measured"


def record(rank: int) -> RankRecord:
    return RankRecord(
        rank=rank,
        rounds=[(1.0 + rank, 5.0 + rank, 4), (10.0, 12.0, 2)],
        steps=[[TaskTime(0, "compute", 1.0, 2.0)]],
        losses=[0.5, 0.25],
        cpu_s=[3.0, 1.0],
        peak_bytes=100 + rank,
    )


def test_records_round_trip_and_merge(tmp_path: Path) -> None:
    plan = Plan(
        strategy="dp",
        mesh=Mesh(dp=2),
        stages=(Stage(components=("c0", "loss"), ranks=(0, 1)),),
        global_batch=4,
    )
    graph = lower(plan, chain_model((1e6,)))
    record(0).save(tmp_path)
    with pytest.raises(ExecutionError, match="rank 1 left no record"):
        load_measurement(tmp_path, graph)
    record(1).save(tmp_path)
    assert RankRecord.load(tmp_path, 1) == record(1)
    seen = load_measurement(tmp_path, graph)
    assert seen.step_s.tolist() == [1.0, 1.0]  # each rank's own: rank 1 begins its first round a second later
    assert seen.skew_s == pytest.approx(0.5)
    assert seen.losses == (1.0, 0.5)  # each replica holds its part of the mean
    assert seen.peak_bytes == (100, 101)
    assert seen.mean_step_s == pytest.approx(1.0)


def drifting(steps: int, period: int, *, local_s: tuple[float, float], round_s: float) -> Measurement:
    """Two ranks without a barrier: each makes local steps of its own, and at a period's end they leave a round together."""
    ranks = (RankRecord(rank=0), RankRecord(rank=1))
    began = 0.0
    for first in range(0, steps, period):
        local = range(min(period, steps - first) - 1)
        met = began + round_s + len(local) * max(local_s)
        for record, own_s in zip(ranks, local_s, strict=True):
            now = began
            for _ in local:
                record.rounds.append((now, now + own_s, 1))
                now += own_s
            record.rounds.append((now, met, 1))
        began = met
    return Measurement(ranks=ranks)


@pytest.mark.parametrize("period", [1, 4, 22, 200])
def test_a_relaxed_step_is_a_period_over_its_steps_and_not_the_distance_between_ranks(period: int) -> None:
    """Local steps of 3 and 4 ms, a round of 6: (6 + 4 (H - 1)) / H ms, whatever the first rank waits."""
    plan = Plan(
        strategy="dp",
        mesh=Mesh(dp=2),
        stages=(Stage(components=("c0", "loss"), ranks=(0, 1)),),
        global_batch=4,
        synchronisation=parse_synchronisation(f"average/{period}"),
    )
    seen = drifting(3 * period + period // 2, period, local_s=(0.003, 0.004), round_s=0.006)
    left_out, together = whole_periods(seen, plan)
    assert (left_out, together) == (period // 2, period)
    whole = drifting(3 * period, period, local_s=(0.003, 0.004), round_s=0.006)
    step_s = (0.006 + 0.004 * (period - 1)) / period
    assert replace(whole, together=period).step_s == pytest.approx([step_s] * 3)
    assert whole.skew_s == pytest.approx(0.001 * (period - 1) / 2)
    rounds = zip(*(record.rounds for record in whole.ranks), strict=True)
    ends = [max(end for _, end, _ in spans) - min(start for start, _, _ in spans) for spans in rounds]
    assert (sum(ends) / len(ends) > 1.5 * step_s) == (period > 4), "what the distance would add"


def test_streams_keep_dependencies_and_issue_order() -> None:
    streams, seen = ThreadStreams(), []
    streams.submit(2, "dp", [0], lambda: seen.append(2))
    streams.submit(3, "dp", [], lambda: seen.append(3))
    streams.compute(0, "compute", [], lambda: seen.append(0))
    streams.compute(1, "compute", [2, 3], lambda: seen.append(1))
    times = {entry.task: entry for entry in streams.finish()}
    streams.close()
    assert seen == [0, 2, 3, 1]
    assert times[0].end_s <= times[2].ready_s <= times[2].end_s <= times[3].ready_s
    assert times[3].end_s <= times[1].ready_s
    assert times[2].ready_s == times[0].end_s, "a communication is ready when what it needs has ended, awake or not"
    assert times[3].ready_s == times[2].end_s, "and when its stream is free"


def test_streams_wait_for_one_another_in_whatever_order_they_were_submitted() -> None:
    """2 and 3 wait for the other stream, 1 for a computation; 3 could begin before 2 and keeps behind it."""
    streams, seen = ThreadStreams(), []
    for task, stream, before in ((2, "dp", [1]), (3, "dp", []), (1, "tp", [0]), (4, "tp", [3])):
        streams.submit(task, stream, before, lambda task=task: seen.append(task))
    streams.compute(0, "compute", [], lambda: seen.append(0))
    streams.compute(5, "compute", [4], lambda: seen.append(5))
    times = {entry.task: entry for entry in streams.finish()}
    streams.close()
    assert seen == [0, 1, 2, 3, 4, 5]
    assert times[2].ready_s == times[1].end_s
    assert times[4].ready_s == times[3].end_s


def test_what_waits_for_a_failed_communication_neither_runs_nor_hangs() -> None:
    """The failure ends the step, be it a computation or nothing that waits for it."""

    def fail() -> None:
        raise RuntimeError("the peer is gone")

    for waits_in_step in (False, True):
        streams, seen = ThreadStreams(), list[int]()
        streams.submit(0, "dp", [], fail)
        streams.submit(1, "tp", [0], lambda seen=seen: seen.append(1))  # type: ignore[misc]
        with pytest.raises(RuntimeError, match="peer is gone"):
            streams.compute(2, "compute", [0], lambda: None) if waits_in_step else streams.finish()
        streams.close()
        assert seen == []


def test_a_communication_may_be_issued_behind_a_computation_that_has_ended() -> None:
    streams, seen = ThreadStreams(), []
    streams.compute(0, "compute", [], lambda: seen.append(0))
    streams.submit(1, "dp", [0], lambda: seen.append(1))
    streams.compute(2, "compute", [1], lambda: seen.append(2))
    assert [entry.task for entry in streams.finish()] == seen == [0, 1, 2]
    streams.close()


def test_live_bytes_counts_births_and_deaths() -> None:
    """x (4 kB) -> y = 2 x (4 kB); y dies; z is a view and costs nothing."""
    with LiveBytes() as live:
        x = torch.ones(1000)
        y = x * 2
        assert live.current_bytes == 8000
        del y
        z = x.view(10, 100)
        assert live.current_bytes == 4000
        assert live.peak_bytes == 8000
        live.track(z)
        assert live.current_bytes == 4000


def test_live_bytes_by_line() -> None:
    """A buffer that is received (4 kB) is among the activations once an operator there has looked at it; its sum is one too."""
    received, waiting = torch.ones(1000), torch.ones(500)
    with LiveBytes(moving=("receive_buffers",)) as live:
        live.track(received, "receive_buffers")
        live.track(waiting, "receive_buffers")
        assert live.by_line() == {"receive_buffers": 6000}
        live.line = "activations"
        view = received.detach()
        made = view + 1
        assert live.by_line() == {"receive_buffers": 2000, "activations": 8000}
        del made
        assert live.by_line() == {"receive_buffers": 2000, "activations": 4000}


def test_live_bytes_sees_what_autograd_keeps() -> None:
    weight = torch.ones(100, 100, requires_grad=True)
    with LiveBytes() as live:
        live.track(weight)
        hidden = torch.relu(torch.ones(50, 100) @ weight)
        loss = (hidden * hidden).sum()
        del hidden
        kept = live.current_bytes
        assert kept >= 40_000 + 20_000  # the weight, and relu's output that its backward needs
        loss.backward()
        del loss
        assert live.current_bytes == 80_000  # the weight and its gradient


def test_a_run_that_recorded_nothing_can_be_loaded_for_its_comparison_to_say_so(tmp_path: Path) -> None:
    stage = Stage(components=("c0", "loss"), ranks=(0,))
    graph = lower(Plan(strategy="single", mesh=Mesh(), stages=(stage,), global_batch=4), chain_model((1e6,)))
    replace(record(0), rounds=[], steps=[], losses=[], cpu_s=[]).save(tmp_path)
    seen = load_measurement(tmp_path, graph)
    assert len(seen.step_s) == len(seen.timelines) == 0
    assert seen.pace_s.shape == (0, 0)


# Times of ranks on several machines, whose clocks count from a start of their own each.

AHEAD_S = 86_400.0
ROUND_S = 0.05


@given(ahead_s=st.floats(-1e6, 1e6), drift=st.floats(-1e-4, 1e-4), passed_s=st.floats(1.0, 1e5), share=st.floats(0.0, 1.0))
def test_a_clock_that_runs_ahead_evenly_is_read_as_rank_0_s(
    ahead_s: float, drift: float, passed_s: float, share: float
) -> None:
    def own(rank_0_s: float) -> float:
        return rank_0_s * (1 + drift) + ahead_s

    looks = [ClockLook(own(moment), own(moment) - moment) for moment in (5.0, 5.0 + passed_s)]
    moment = 5.0 + share * passed_s
    assert on_rank_0(looks[0], looks[1])(own(moment)) == pytest.approx(moment, abs=1e-6)


def _round(rank: int, machines: list[str]) -> list[tuple[float, float, int]]:
    """A round of all ranks, as a record of this one says it. Each machine's clock is a day ahead of the one before."""
    ahead_s = AHEAD_S * machines.index(machines[rank])
    clocks._machine = lambda: machines[rank]
    clocks._now_s = lambda: time.perf_counter() + ahead_s
    before = look()
    meet()
    start_s = clocks._now_s()
    time.sleep(ROUND_S)
    end_s = clocks._now_s()
    meet()
    after = look()
    record = RankRecord(
        rank=rank,
        rounds=[(start_s, end_s, 1)],
        steps=[[TaskTime(0, "compute", start_s, end_s)]],
        losses=[],
        cpu_s=[],
        peak_bytes=0,
    ).on_clock(on_rank_0(before, after))
    assert [(entry.ready_s, entry.end_s) for times in record.steps for entry in times] == [record.rounds[0][:2]]
    return record.rounds


@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize("machines", [["a", "b"], ["a", "a"]])
def test_a_round_of_two_machines_lasts_as_long_as_it_does(tmp_path: Path, machines: list[str]) -> None:
    """Before, it lasted as long as one machine had been running longer than the other."""
    rounds = run_ranks(_round, 2, tmp_path, machines)
    records = tuple(RankRecord(rank=rank, rounds=own) for rank, own in enumerate(rounds))
    assert ROUND_S <= Measurement(ranks=records).step_s[0] < ROUND_S + 5.0
