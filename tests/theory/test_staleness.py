"""Delays and seconds of decoupled backpropagation against their closed forms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.relaxed.decoupled import DECOUPLINGS, balanced_speedup, decoupling, epoch_by_ticks_s, even_cuts
from parsim.errors import AlgorithmError


@given(st.integers(1, 30))
def test_delays(modules: int) -> None:
    fdg, ddg = decoupling("fdg"), decoupling("ddg")
    every = range(1, modules + 1)
    assert [fdg.delay(k, modules) for k in every] == [2 * (modules - k) for k in every]
    assert [ddg.delay(k, modules) for k in every] == [modules - k for k in every]
    assert fdg.span(modules) == 2 * (modules - 1)
    assert sum(fdg.delay(k, modules) + 1 for k in every) == modules**2, "batches held"


@pytest.mark.parametrize("name", DECOUPLINGS)
@given(modules=st.integers(1, 12))
def test_values_arrive_before_they_are_used(name: str, modules: int) -> None:
    """A module forwards no earlier than the one before it, and backwards no earlier than the one after it."""
    entry = decoupling(name)
    for k in range(1, modules):
        assert entry.forward_tick(k, modules) <= entry.forward_tick(k + 1, modules)
        assert entry.backward_tick(k, modules) >= entry.backward_tick(k + 1, modules)
    assert entry.delay(modules, modules) == 0


@given(st.lists(st.tuples(st.floats(0.1, 2), st.floats(0.1, 4)), min_size=1, max_size=8))
def test_fdg_is_fastest_then_ddg_then_replay(pairs: list[tuple[float, float]]) -> None:
    """Seconds of a tick once all modules are full: what one batch more takes."""
    forward, backward = zip(*pairs, strict=True)

    def tick_s(name: str, replay: bool = False) -> float:
        more, less = (epoch_by_ticks_s(name, forward, backward, count, replay=replay) for count in (41, 40))
        return more - less

    fdg, ddg, bp, replayed = tick_s("fdg"), tick_s("ddg"), tick_s("bp"), tick_s("ddg", replay=True)
    assert bp == pytest.approx(sum(forward) + sum(backward))
    assert fdg == pytest.approx(max(map(sum, pairs)))
    assert ddg == pytest.approx(sum(forward) + max(backward))
    assert ddg <= replayed + 1e-9 <= sum(forward) + bp + 2e-9
    assert tick_s("fdg", replay=True) >= fdg - 1e-9


@given(st.integers(1, 16), st.integers(1, 100))
def test_balanced_modules_speed_up_by_at_least_the_closed_form(modules: int, batches: int) -> None:
    """Which counts ticks that fill and drain as whole ones."""
    times = [1.0] * modules, [2.0] * modules
    got = epoch_by_ticks_s("bp", *times, batches) / epoch_by_ticks_s("fdg", *times, batches)
    assert balanced_speedup(modules, batches) - 1e-9 <= got <= modules + 1e-9


def test_cuts() -> None:
    assert even_cuts(5, 3) == (2, 2, 1)
    assert even_cuts(4, 4) == (1, 1, 1, 1)


def test_bad_input() -> None:
    with pytest.raises(AlgorithmError, match="3 layers cannot be cut into 4 modules"):
        even_cuts(3, 4)
    with pytest.raises(AlgorithmError, match="numbered 1 to 3, got 0"):
        decoupling("fdg").delay(0, 3)
    with pytest.raises(AlgorithmError, match="unknown decoupling"):
        decoupling("pipedream-xyz")
