"""How soon a rank notices that rank 0 is ready, on a clock that passes only in sleeps."""

from __future__ import annotations

import gc

import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from parsim.execute.processes import exchange
from parsim.execute.processes.group import ProcessPlace
from parsim.numeric import keep_nothing, keep_what_is_there


class Clock:
    """A store that has what is asked for from `ready_s` on; every question takes 0.1 ms."""

    def __init__(self, ready_s: float) -> None:
        self.ready_s, self.now_s, self.asked = ready_s, 0.0, 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        self.now_s += 1e-4
        return self.now_s >= self.ready_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@given(ready_s=st.floats(0.0, 3600.0))
def test_a_rank_goes_on_a_sixteenth_late_at_most_and_asks_rarely(ready_s: float) -> None:
    clock = Clock(ready_s)
    place = ProcessPlace(rank=1, world_size=2, local_rank=1, local_world_size=2, attempt=0, store=clock)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.get_rank", lambda: 1)
        patch.setattr("parsim.execute.processes.exchange.time.sleep", clock.sleep)
        patch.setattr("parsim.execute.processes.exchange.time.monotonic", lambda: clock.now_s)
        assert exchange.done_by_rank_0(place, lambda: pytest.fail("rank 1 does the work")) is None
    assert clock.now_s - ready_s <= 5e-4 + ready_s / 16
    assert clock.asked <= 20 + 200 + ready_s / 0.5


@pytest.mark.slow
def test_what_is_kept_takes_no_part_in_collections_until_it_is_let_go() -> None:
    before = gc.get_freeze_count()
    try:
        keep_what_is_there()
        assert gc.get_freeze_count() > before
    finally:
        keep_nothing()
    assert gc.get_freeze_count() == 0
