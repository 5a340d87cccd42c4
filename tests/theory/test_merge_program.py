"""Programs in the dynamic engine against the same in the static one; merging by arrival against its event queue; replays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsim.algorithms.arrivals import merge_events
from parsim.algorithms.periods import every_steps, post_local
from parsim.algorithms.staleness import DECOUPLINGS, ModuleTimes
from parsim.engines import static
from parsim.engines.dynamic import run_program
from parsim.engines.program import Part, durations_by_step_s, unrolled
from parsim.engines.relaxed.decoupled_program import TickModules, tick_durations_s, tick_program
from parsim.engines.relaxed.gossip_program import ROUNDS, GossipModel, gossip_durations_s, gossip_program
from parsim.engines.relaxed.merge_program import merge_program
from parsim.engines.repeated import simulate_program
from parsim.engines.scenario.checkpointing import MERGE
from parsim.errors import AlgorithmError
from parsim.plans.mixing import mixing_graph
from parsim.program.taskgraph import from_text, to_text
from parsim.work import Compute, Mix, Phase

MODEL = GossipModel(elements=100, samples=8)


def merge_seconds(epoch_s: np.ndarray, merge_s: float) -> Callable[[Part, int], np.ndarray]:
    """Seconds of a repeat of merge_program: epoch_s [workers, epochs] in the backward, merge_s in the merge."""

    def seconds(part: Part, epoch: int) -> np.ndarray:
        found = np.zeros(len(part.graph.tasks))
        for task in part.graph.tasks:
            if isinstance(task.work, Compute) and task.work.phase is Phase.BACKWARD:
                found[task.index] = epoch_s[task.origin.replica or 0, epoch]
            elif isinstance(task.work, Mix):
                found[task.index] = merge_s
        return found

    return seconds


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.integers(1, 5), st.integers(0, 9999), st.integers(0, 4))
def test_merges_are_those_of_the_event_queue(workers: int, epochs: int, seed: int, merge: int) -> None:
    epoch_s = np.random.default_rng(seed).uniform(1.0, 4.0, (workers, epochs))
    program = merge_program(MODEL, workers=workers, epochs=epochs)
    seconds = merge_seconds(epoch_s, merge / 8)
    assert program.written_tasks == 4 * workers, "not unrolled"
    run = run_program(program, seconds, varying=True, record=True)
    events = merge_events(lambda worker, epoch: epoch_s[worker, epoch], workers, merge_s=merge / 8, epochs=epochs)
    tasks = program.steps[0].graph.tasks
    assert [(tasks[task].origin.replica, step) for step, task in run.served[MERGE]] == [(it.worker, it.epoch) for it in events]
    ends = run.end_s[[program.first_number[step] + task for step, task in run.served[MERGE]]]
    assert ends == pytest.approx([event.end_s for event in events], rel=1e-12)
    graph, durations = unrolled(program, run.served), np.concatenate(durations_by_step_s(program, seconds, varying=True))
    timeline = static.simulate(graph, durations)
    replayed = np.zeros(len(graph.tasks))
    replayed[timeline.task] = timeline.end_s
    assert replayed == pytest.approx(run.end_s, rel=1e-12), "the recorded order replays"
    assert from_text(to_text(graph)) == graph, "and is in the text"


def test_a_fast_worker_overtakes() -> None:
    written = merge_program(MODEL, workers=2, epochs=3)
    seconds = merge_seconds(np.array([[10.0] * 3, [1.0] * 3]), 0.5)
    run = run_program(written, seconds, varying=True)
    assert [task // 4 for _, task in run.served[MERGE]] == [1, 1, 1, 0, 0, 0]
    assert run.makespan_s == 31.5
    in_order = replace(written, arrival=frozenset())
    assert simulate_program(in_order, seconds, varying=True).makespan_s > 31.5, "as written the fast one waits for the slow"


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(ROUNDS)),
    st.sampled_from(["ring", "one_peer_exponential", "star"]),
    st.integers(2, 7),
    st.integers(1, 12),
    st.integers(0, 999),
    st.integers(1, 3),
)
def test_both_ways_to_run_gossip_agree(combination: str, name: str, n: int, rounds: int, seed: int, steps: int) -> None:
    period = every_steps(1) if combination == "combine_adapt" else post_local(seed % 3, steps)
    program = gossip_program(combination, mixing_graph(name, n), MODEL, workers=n, rounds=rounds, period=period)
    drawn = np.random.default_rng(seed).random((program.repeats, n))

    def seconds(part: Part, t: int) -> np.ndarray:
        return gossip_durations_s(part.graph, step_s=lambda worker, _: drawn[t, worker], exchange_s=0.25, mix_s=0.125)

    found = simulate_program(program, seconds, varying=True)
    run = run_program(program, seconds, varying=True)
    assert run.makespan_s == pytest.approx(found.makespan_s, rel=1e-12)
    assert np.maximum.accumulate(run.step_end_s) == pytest.approx(found.end_s, rel=1e-12)


@pytest.mark.parametrize("schedule", DECOUPLINGS)
@pytest.mark.parametrize("barrier", [True, False])
def test_both_ways_to_run_ticks_agree(schedule: str, barrier: bool) -> None:
    modules = TickModules(names=("a", "b", "c"), elements=(1, 2, 3), boundary_bytes=(4, 5), samples=8)
    times = ModuleTimes(forward_s=(1.0, 2.0, 1.5), backward_s=(2.0, 3.0, 2.5), transfer_s=0.5, reduce_s=0.25)
    program = tick_program(schedule, modules, 40, groups=2, barrier=barrier)

    def seconds(part: Part, t: int) -> np.ndarray:
        return tick_durations_s(part.graph, modules, times)

    assert len(tuple(program.walk_once())) <= 5, "fill, full ticks, drain"
    assert run_program(program, seconds).makespan_s == pytest.approx(simulate_program(program, seconds).makespan_s, rel=1e-12)


def test_bad_input() -> None:
    with pytest.raises(AlgorithmError, match="workers, epochs and steps >= 1"):
        merge_program(MODEL, workers=0, epochs=1)
