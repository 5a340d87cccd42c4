"""Divisors, of sizes that somebody gave by mistake too."""

from __future__ import annotations

import pytest

from parsim.errors import PlanError
from parsim.plans.mesh import Mesh
from parsim.units import divisors


def test_divisors_are_those_of_trial_division() -> None:
    for number in range(1, 200):
        assert divisors(number) == tuple(one for one in range(1, number + 1) if number % one == 0)


def test_those_of_large_numbers_take_no_time() -> None:
    assert len(divisors(10**9)) == 100
    with pytest.raises(PlanError, match="the nearest below that does: 500000000"):
        Mesh(dp=10**9, ep=10**9 - 1)
