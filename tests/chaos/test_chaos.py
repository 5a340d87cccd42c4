"""A share of `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.chaos.chaos import AT_ONCE, FAULTS, PLANS, plan_and_faults, play, table


def test_nine_faults_hold_every_kind() -> None:
    for turn in range(8):
        plan, faults = plan_and_faults(1, len(FAULTS) * turn)
        rest, others = plan_and_faults(1, len(FAULTS) * turn + AT_ONCE)
        assert rest == plan
        assert sorted([*faults, *others]) == sorted(FAULTS)
        assert plan_and_faults(1, len(FAULTS) * turn + 2) == (plan, faults[2:])
    assert {plan_and_faults(1, len(FAULTS) * turn)[0] for turn in range(4)} == set(PLANS)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked up in /proc")
@pytest.mark.xdist_group("launch")
def test_trainings_that_every_fault_disturbs_lose_nothing(tmp_path: Path) -> None:
    found = play(tmp_path, len(FAULTS), seed=1)
    assert [outcome for outcome in found if outcome.problems] == [], table(found)
    assert {outcome.fault for outcome in found} == set(FAULTS)
