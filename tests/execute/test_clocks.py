"""Times of ranks on several machines, whose clocks count from a start of their own each."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from experiments.common.forked import run_ranks
from parsim.execute.measurement import Measurement, RankRecord
from parsim.execute.processes import exchange as clocks
from parsim.execute.processes.exchange import ClockLook, look, meet, on_rank_0
from parsim.execute.streams import TaskTime

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
