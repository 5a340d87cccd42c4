"""Ranks of plans issue their tasks in the simulated order, and they overlap as simulated: with torch's fake process group."""

from __future__ import annotations

import random

import pytest
import torch

from experiments.common.equality import Case
from experiments.common.mixed import random_case
from experiments.one_gpu.fake_peers import Ends, IssuedStep, drawn_durations_s, issued_step, simulated_ends_s, with_rooms
from tests.execute.interpreted import CPU, planned
from tests.execute.test_cuda_races import PLANS
from tests.virtual_cuda import VirtualDriver

ENDS_WITHIN = 1e-9
"""Relative, of sums of the same lengths in another order."""


def steps_of(case: Case, seed: int = 0) -> tuple[Ends, list[IssuedStep]]:
    """The ends of a simulated step, and the step of every rank with its peers as in the simulation."""
    run = planned(case)
    graph = with_rooms(run)
    ends_s = simulated_ends_s(graph, drawn_durations_s(graph, seed))
    ranks = range(case.plan.world_size)
    return ends_s, [issued_step(run, rank, VirtualDriver(clock_s=100.0), CPU, torch.clone, graph, ends_s) for rank in ranks]


def assert_as_simulated(case: Case, seed: int = 0) -> list[IssuedStep]:
    ends_s, steps = steps_of(case, seed)
    for step in steps:
        for task, end_s in step.ends_s.items():
            assert end_s == pytest.approx(ends_s[task], rel=ENDS_WITHIN), f"task {task}"
        assert step.latest_s < ENDS_WITHIN * step.makespan_s
        assert step.hidden == pytest.approx(step.simulated_hidden)
    return steps


@pytest.mark.parametrize("name", PLANS)
def test_every_rank_ends_every_task_when_the_simulator_says(name: str) -> None:
    """The plan's whole step is simulated; no rank knows more of its peers than when their part of a communication ends."""
    steps = assert_as_simulated(PLANS[name]())
    communicates = PLANS[name]().plan.world_size > 1
    assert any(step.hidden > 0.05 for step in steps) == communicates, "some communication runs beside computation"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("processes", [2, 4])
def test_ranks_of_mixed_plans_do_too(seed: int, processes: int) -> None:
    """Tensor parallelism with other axes, conversions, ZeRO and recomputation, drawn at random."""
    rng = random.Random(1000 * processes + seed)
    assert_as_simulated(random_case(rng.choice(["mlp", "vit_small", "gpt_small"]), processes, rng), seed)
