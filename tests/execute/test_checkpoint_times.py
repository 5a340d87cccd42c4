"""When checkpoints are written where nobody says: how much is lost at most, and what they cost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsim.execute.train import CheckpointTimes

STEPS = 3000


def written(monkeypatch: pytest.MonkeyPatch, step_s: float, save_s: float, state_bytes: int = 0) -> tuple[list[float], float]:
    """The seconds at which a training of one rank with steps and checkpoints of these lengths wrote, and its whole length."""
    now = [100.0]
    monkeypatch.setattr("parsim.execute.train.time.monotonic", lambda: now[0])
    monkeypatch.setattr("parsim.execute.train.gather_values", lambda value: [value])
    times = CheckpointTimes(7, state_bytes)
    saves = []
    for done in range(8, 8 + STEPS):
        now[0] += step_s
        if times.due(done, step_s):
            now[0] += save_s
            saves.append(now[0] - 100.0)
            assert f"after step {done}, in " in times.written(done, step_s, save_s)
    return saves, now[0] - 100.0


@settings(max_examples=60, deadline=None)
@given(step_s=st.floats(1e-3, 5.0), save_s=st.floats(1e-3, 3.0))
def test_little_is_lost_and_little_is_spent(step_s: float, save_s: float) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        saves, whole_s = written(monkeypatch, step_s, save_s)
    cheap_s = save_s / CheckpointTimes.SHARE
    for before, after in zip([0.0, *saves], [*saves, whole_s], strict=True):
        most_s = max(cheap_s, min(60.0, max(5.0, 0.25 * before)))
        assert after - before <= most_s + save_s + 2 * step_s + 5 * step_s * (not before)
    assert sum(save_s for _ in saves[1:]) <= 0.021 * whole_s + save_s


def test_short_steps_make_one_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    saves, _ = written(monkeypatch, 1.0, 0.05)
    gaps = [after - before for before, after in pairwise(saves[20:])]
    assert gaps
    assert all(60 <= gap <= 62 for gap in gaps)


def test_the_first_one_of_a_large_model_waits_for_a_slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 GB take 20 s at 200 MB/s, which is 2% of 1,000 s."""
    saves, _ = written(monkeypatch, 1.0, 0.5, 4_000_000_000)
    assert saves[0] == pytest.approx(1005, abs=3)
    assert saves[1] - saves[0] == pytest.approx(60, abs=2)
