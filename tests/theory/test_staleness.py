"""Delays, storage and seconds of decoupled backpropagation against their closed forms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.relaxed.decoupled import (
    DECOUPLINGS,
    ModuleTimes,
    balanced_speedup,
    decoupling,
    diagonal_versions,
    epoch_s,
    even_cuts,
    stage_seconds,
    tick_s,
)
from parsim.errors import AlgorithmError


def test_fdg_of_three_modules() -> None:
    fdg = decoupling("fdg")
    assert [fdg.delay(k, 3) for k in (1, 2, 3)] == [4, 2, 0]
    assert [fdg.update_delay(k, 3, order="backward_first") for k in (1, 2, 3)] == [3, 1, 0]
    assert [fdg.activations_held(k, 3) for k in (1, 2, 3)] == [5, 3, 1]
    assert fdg.span(3) == 4
    assert diagonal_versions(7, 3) == (7, 8, 9)


@given(st.integers(1, 30))
def test_totals(modules: int) -> None:
    fdg, ddg = decoupling("fdg"), decoupling("ddg")
    every = range(1, modules + 1)
    assert sum(fdg.activations_held(k, modules) for k in every) == modules**2
    assert [fdg.delay(k, modules) for k in every] == [2 * ddg.delay(k, modules) for k in every]
    assert [fdg.weight_copies(k, modules, "stash") for k in every] == [2 * (modules - k) for k in every]
    assert all(fdg.weight_copies(k, modules, mode) == 0 for k in every for mode in ("fresh", "replay"))
    assert all(fdg.update_delay(k, modules, accumulate=2 * modules) <= 1 for k in every)
    assert fdg.span(modules) == 2 * (modules - 1)


@pytest.mark.parametrize("name", DECOUPLINGS)
@given(modules=st.integers(1, 12))
def test_values_arrive_before_they_are_used(name: str, modules: int) -> None:
    """A module forwards no earlier than the one before it, and backwards no earlier than the one after it."""
    entry = decoupling(name)
    for k in range(1, modules):
        assert entry.forward_tick(k, modules) <= entry.forward_tick(k + 1, modules)
        assert entry.backward_tick(k, modules) >= entry.backward_tick(k + 1, modules)
    assert entry.delay(modules, modules) == 0


@given(st.integers(1, 16), st.integers(1, 500), st.floats(0.1, 3.0))
def test_balanced_modules_speed_up_by_the_closed_form(modules: int, batches: int, forward: float) -> None:
    times = ModuleTimes(forward_s=(forward,) * modules, backward_s=(2 * forward,) * modules)
    got = epoch_s("bp", times, batches) / epoch_s("fdg", times, batches)
    assert got == pytest.approx(balanced_speedup(modules, batches), rel=1e-12)
    assert got <= modules


@given(st.lists(st.tuples(st.floats(0.1, 2), st.floats(0.1, 4)), min_size=1, max_size=8))
def test_fdg_is_fastest_then_ddg_then_replay(pairs: list[tuple[float, float]]) -> None:
    times = ModuleTimes(forward_s=tuple(f for f, _ in pairs), backward_s=tuple(b for _, b in pairs))
    fdg, ddg, bp = (tick_s(name, times) for name in ("fdg", "ddg", "bp"))
    replayed = tick_s("ddg", times, replay=True)
    assert fdg <= ddg + 1e-12
    assert ddg <= replayed <= sum(times.forward_s) + bp
    assert ddg <= bp + 1e-12
    assert tick_s("fdg", times, replay=True) >= fdg


def test_seconds_by_hand() -> None:
    times = ModuleTimes(forward_s=(1.0, 2.0, 1.5), backward_s=(2.0, 3.0, 4.0), transfer_s=0.5, reduce_s=0.25)
    assert tick_s("bp", times) == 4.5 + 9.0 + 4 * 0.5 + 0.25
    assert tick_s("ddg", times) == 4.5 + 2 * 0.5 + 0.5 + 4.0 + 0.25
    assert tick_s("ddg", times, replay=True) == 4.5 + 2 * 0.5 + 0.5 + 5.0 + 0.25
    assert tick_s("fdg", times) == 5.5 + 0.5 + 0.25
    assert epoch_s("fdg", times, 10) == 14 * 6.25
    assert epoch_s("fdg", times, 10, drain=False) == 62.5


def test_cuts_and_split_seconds() -> None:
    assert even_cuts(5, 3) == (2, 2, 1)
    assert even_cuts(4, 4) == (1, 1, 1, 1)
    split = stage_seconds([3.0, 6.0])
    assert (split.forward_s, split.backward_s) == ((1.0, 2.0), (2.0, 4.0))


def test_bad_input() -> None:
    with pytest.raises(AlgorithmError, match="3 layers cannot be cut into 4 modules"):
        even_cuts(3, 4)
    with pytest.raises(AlgorithmError, match="numbered 1 to 3, got 0"):
        decoupling("fdg").delay(0, 3)
    with pytest.raises(AlgorithmError, match="each module"):
        ModuleTimes(forward_s=(1.0,), backward_s=(1.0, 2.0))
    with pytest.raises(AlgorithmError, match="known"):
        decoupling("pipedream-xyz")
