"""The ticks of decoupled backpropagation as task graphs: simulated seconds against the closed forms, and the text form."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsim.algorithms.staleness import ModuleTimes, decoupling, epoch_s, tick_s
from parsim.engines import dynamic, static
from parsim.engines.program import unrolled
from parsim.engines.relaxed.decoupled_program import TickModules, tick_durations_s, tick_program
from parsim.engines.repeated import simulate_program
from parsim.errors import AlgorithmError
from parsim.program.taskgraph import from_text, to_text
from parsim.work import Collective, Compute, Phase

WAYS = [("bp", False), ("ddg", False), ("ddg", True), ("fdg", False), ("fdg", True)]


def modules(count: int) -> TickModules:
    return TickModules(
        names=tuple(f"module{k}" for k in range(1, count + 1)),
        elements=(10,) * count,
        boundary_bytes=(64,) * (count - 1),
        samples=8,
    )


def makespan_s(
    schedule: str, times: ModuleTimes, batches: int, *, replay: bool = False, groups: int = 1, barrier: bool = True
) -> float:
    parts = modules(times.modules)
    program = tick_program(schedule, parts, batches, groups=groups, replay=replay, barrier=barrier)
    return simulate_program(program, lambda part, t: tick_durations_s(part.graph, parts, times)).makespan_s


@pytest.mark.parametrize(("schedule", "replay"), WAYS)
@settings(max_examples=40, deadline=None)
@given(stages=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5))
def test_one_batch_more_takes_one_tick_more(schedule: str, replay: bool, stages: list[tuple[int, int]]) -> None:
    """Once full, and without communication, the program advances by exactly `tick_s`; whole epochs take at most the formula,
    which counts ticks of fill and drain as full ones."""
    times = ModuleTimes(forward_s=tuple(float(f) for f, _ in stages), backward_s=tuple(float(b) for _, b in stages))
    few, many = (makespan_s(schedule, times, batches, replay=replay) for batches in (20, 30))
    assert (many - few) / 10 == pytest.approx(tick_s(schedule, times, replay=replay), rel=1e-12)
    assert many <= epoch_s(schedule, times, 30, replay=replay) + 1e-9
    assert makespan_s(schedule, times, 30, replay=replay, barrier=False) <= many + 1e-9


@pytest.mark.parametrize("schedule", ["bp", "ddg", "fdg"])
def test_exchanges_are_exposed_as_the_formula_says(schedule: str) -> None:
    """Balanced modules, transfers shorter than a forward: the activation hides behind the backward, the gradient does not."""
    times = ModuleTimes(forward_s=(1.0,) * 3, backward_s=(2.0,) * 3, transfer_s=0.5)
    few, many = (makespan_s(schedule, times, batches) for batches in (20, 30))
    assert (many - few) / 10 == pytest.approx(tick_s(schedule, times), rel=1e-12)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_balanced_modules_approach_a_speed_up_of_k(count: int) -> None:
    times = ModuleTimes(forward_s=(1.0,) * count, backward_s=(2.0,) * count)
    batches = 60
    gained = makespan_s("bp", times, batches) / makespan_s("fdg", times, batches)
    assert count * batches / (batches + 2 * (count - 1)) <= gained < count


def test_without_a_barrier_transfers_hide_behind_compute_in_fdg_and_not_in_bp() -> None:
    still = ModuleTimes(forward_s=(1.0,) * 3, backward_s=(2.0,) * 3)
    moving = ModuleTimes(forward_s=(1.0,) * 3, backward_s=(2.0,) * 3, transfer_s=0.5)
    for schedule, wanted in (("fdg", 0.0), ("bp", 4 * 0.5)):
        few, many = (
            makespan_s(schedule, moving, batches, barrier=False) - makespan_s(schedule, still, batches, barrier=False)
            for batches in (40, 60)
        )
        assert (many - few) / 20 == pytest.approx(wanted, abs=1e-9)


def test_averaging_over_groups_is_paid_per_tick() -> None:
    times = ModuleTimes(forward_s=(1.0,) * 2, backward_s=(2.0,) * 2, reduce_s=0.75)
    few, many = (makespan_s("fdg", times, batches, groups=3) for batches in (20, 30))
    assert (many - few) / 10 == pytest.approx(tick_s("fdg", times), rel=1e-12)


@pytest.mark.parametrize(("schedule", "replay"), WAYS)
def test_the_program_is_a_graph_like_any_other(schedule: str, replay: bool) -> None:
    """It prints and reads back, both engines agree on it, and it holds the work the schedule says."""
    parts, batches, groups = modules(3), 5, 2
    program = tick_program(schedule, parts, batches, groups=groups, replay=replay)
    graph = unrolled(program)
    assert from_text(to_text(graph)) == graph
    times = ModuleTimes(forward_s=(1.0, 1.5, 0.5), backward_s=(2.0, 1.0, 3.0), transfer_s=0.25, reduce_s=0.125)
    durations = tick_durations_s(graph, parts, times)
    ends = [{span.task: span.end_s for span in engine.simulate(graph, durations)} for engine in (static, dynamic)]
    assert ends[0] == ends[1]
    repeated = simulate_program(program, lambda part, t: tick_durations_s(part.graph, parts, times))
    assert repeated.makespan_s == max(ends[0].values()), "what is not unrolled ends with what is"
    backwards = [t for t in graph.tasks if isinstance(t.work, Compute) and t.work.phase is Phase.BACKWARD]
    forwards = [t for t in graph.tasks if isinstance(t.work, Compute) and t.work.phase is Phase.FORWARD]
    again = sum(decoupling(schedule).delay(k, 3) > 0 for k in (1, 2, 3)) if replay else 0
    assert len(backwards) == 3 * batches * groups
    assert len(forwards) == (3 + again) * batches * groups
    assert sum(isinstance(task.work, Collective) for task in graph.tasks) == 3 * batches


@pytest.mark.parametrize("schedule", ["bp", "ddg", "fdg"])
def test_an_epoch_is_written_once_however_long(schedule: str) -> None:
    parts, times = modules(4), ModuleTimes(forward_s=(1.0, 2.0, 1.0, 1.0), backward_s=(2.0, 3.0, 2.0, 1.0), transfer_s=0.5)
    short, long = (tick_program(schedule, parts, batches, groups=2) for batches in (20, 20_000))
    assert short.written_tasks == long.written_tasks
    assert long.run_tasks > 900 * short.run_tasks
    seconds = [simulate_program(it, lambda part, t: tick_durations_s(part.graph, parts, times)) for it in (short, long)]
    assert seconds[1].simulated <= 30, "full ticks recur, so the rest follows"
    assert len(seconds[1].end_s) == long.repeats
    whole = static.simulate(unrolled(short), tick_durations_s(unrolled(short), parts, times)).makespan_s
    assert seconds[0].makespan_s == pytest.approx(whole, rel=1e-12)
    tick = (seconds[1].makespan_s - seconds[0].makespan_s) / 19_980
    assert tick == pytest.approx(tick_s(schedule, times), rel=0.2), "transfers may hide"


def test_bad_input() -> None:
    with pytest.raises(AlgorithmError, match="batches >= 1"):
        tick_program("fdg", modules(2), 0)
    with pytest.raises(AlgorithmError, match="one boundary less"):
        TickModules(names=("a", "b"), elements=(1, 2), boundary_bytes=(), samples=1)
