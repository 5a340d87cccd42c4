"""Plans as a GPU rank issues them, under torch's CUDA sanitizer: no access is unordered, and one wait less is found."""

from __future__ import annotations

import random
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch

from experiments.common.equality import Case
from experiments.common.mixed import random_case
from experiments.one_gpu.fake_peers import Ends, IssuedStep, drawn_durations_s, issued_step, simulated_ends_s, with_rooms
from parsim.execute.cuda.driver import alias_of
from parsim.execute.cuda.streams import CudaStreams
from parsim.model.spec import ModelSpec
from parsim.model.trace.memory import LiveBytes
from parsim.plans.mesh import Mesh
from parsim.plans.synchronisation import parse_synchronisation
from parsim.program.taskgraph import COMPUTE
from tests.execute.interpreted import CPU, interpret, planned
from tests.execute.small_plans import GPT, MLP, RESNET, VIT, case
from tests.quick import some_quick
from tests.virtual_cuda import Hazard, VirtualDriver

PLANS = {
    "single": partial(case, MLP, Mesh()),
    "dp": partial(case, VIT, Mesh(dp=2), optimizer="adam"),
    "dp microbatches": partial(case, RESNET, Mesh(dp=2), batch=2, microbatches=2),
    "zero 1": partial(case, VIT, Mesh(dp=2), zero_stage=1),
    "zero 2": partial(case, VIT, Mesh(dp=2), zero_stage=2, microbatches=2),
    "zero 3": partial(case, VIT, Mesh(dp=2), zero_stage=3, microbatches=2, optimizer="adam"),
    "sharding groups": partial(case, VIT, Mesh(dp=4, dp_shard=2), zero_stage=3, microbatches=2, optimizer="adam"),
    "gpipe": partial(case, GPT, Mesh(pp=2), microbatches=4, order="gpipe"),
    "1f1b": partial(case, GPT, Mesh(pp=2, dp=2), microbatches=4, order="1f1b"),
    "interleaved": partial(case, GPT, Mesh(pp=2), microbatches=4, order="interleaved", chunks=2),
    "zero-bubble": partial(case, VIT, Mesh(pp=2), microbatches=4, order="zero-bubble"),
    "recompute": partial(case, VIT, Mesh(pp=2), microbatches=2, recompute="full"),
}


def relaxed(text: str, spec: ModelSpec, mesh: Mesh, **options: object) -> Case:
    of = case(spec, mesh, **options)
    return replace(of, plan=replace(of.plan, synchronisation=parse_synchronisation(text)))


RELAXED = {
    text: partial(relaxed, text, MLP, Mesh(dp=4))
    for text in ("average/1", "average/2 outer=nesterov:0.7:0.9", "gossip/1 ring", "gossip/1 complete", "merge/1")
}
RELAXED["gossip/1 in a pipeline"] = partial(relaxed, "gossip/1 ring", GPT, Mesh(dp=2, pp=2), microbatches=2)
RELAXED["stale"] = partial(relaxed, "stale", MLP, Mesh(pp=3))


def run(of: Case, rank: int, steps: int = 2, **faults: object) -> VirtualDriver:
    driver = VirtualDriver(**faults)  # type: ignore[arg-type]
    torch.manual_seed(0)
    interpret(of, rank, driver, steps=steps)
    return driver


@pytest.mark.parametrize("name", PLANS)
def test_no_access_of_a_plan_is_unordered(name: str) -> None:
    of = PLANS[name]()
    for rank in range(of.plan.world_size):
        driver = run(of, rank)
        assert not driver.errors, f"rank {rank}: {driver.errors[0]}"


@pytest.mark.parametrize("name", RELAXED)
def test_no_access_of_a_relaxed_plan_is_unordered(name: str) -> None:
    """Rounds that mix weights; and decoupled stages, once they are filled."""
    of = RELAXED[name]()
    for rank in range(of.plan.world_size):
        driver = run(of, rank, steps=8 if name == "stale" else 3)
        assert not driver.errors, f"rank {rank}: {driver.errors[0]}"


@pytest.mark.parametrize("seed", some_quick(range(6), 0, 1, 2))
@pytest.mark.parametrize("processes", [2, 4])
def test_no_access_of_a_mixed_plan_is_unordered(seed: int, processes: int) -> None:
    """Tensor parallelism with other axes, conversions, ZeRO and recomputation, drawn at random."""
    rng = random.Random(1000 * processes + seed)
    of = random_case(rng.choice(["mlp", "vit_small", "gpt_small"]), processes, rng)
    for rank in range(processes):
        driver = run(of, rank)
        assert not driver.errors, f"{of}, rank {rank}: {driver.errors[0]}"


@pytest.mark.parametrize("name", ["dp", "zero 1", "zero 3", "1f1b"])
def test_a_stream_that_does_not_wait_is_found(name: str) -> None:
    whole = run(PLANS[name](), 0)
    waiting = sorted({entry[1] for entry in whole.log if entry[0] == "wait"})
    assert len(waiting) > 1
    for stream in waiting:
        assert run(PLANS[name](), 0, careless=frozenset({stream})).errors, f"stream {stream} waits for nobody"


def test_single_waits_that_are_missing_are_found() -> None:
    """Some waits are ordered by others too; those for a microbatch that arrives are not."""
    waits = run(PLANS["gpipe"](), 0).waits
    chosen = random.Random(0).sample(range(waits), 12)
    found = [number for number in chosen if run(PLANS["gpipe"](), 0, skipped_waits=frozenset({number})).errors]
    assert len(found) >= 2, f"{len(found)} of {len(chosen)} of {waits} waits"


@pytest.mark.parametrize("name", ["interleaved", "1f1b"])
def test_memory_that_another_stream_still_reads_is_not_given_back_unsaid(name: str) -> None:
    """Without record_stream the allocator would hand out a buffer that is still read."""
    errors = run(PLANS[name](), 0, forgotten_uses=True).errors
    assert any(isinstance(error, Hazard) for error in errors)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_memory_of_the_computation_is_free_when_the_program_says_so(name: str) -> None:
    """What the allocator was told that another stream reads, it gives back only when the device has come past that. The host is
    far ahead, so every bucket of ZeRO 3 and every message between stages would lie in new memory. Of a pipeline this is left of
    the last message of a step, which no computation waits for."""
    steps, of = 2, PLANS[name]()
    for rank in range(of.plan.world_size):
        assert run(of, rank, steps).deferred <= steps * (of.plan.mesh.pp > 1), f"rank {rank}"


def test_a_transfer_is_given_a_tensor_that_the_allocator_does_not_know() -> None:
    """Whose memory is the same, and stays as long."""
    driver, value = VirtualDriver(), torch.zeros(2, 3)
    alive, bare = weakref.ref(value), CudaStreams(driver).unowned(value)
    assert bare.data_ptr() == value.data_ptr()
    assert bare.untyped_storage()._cdata != value.untyped_storage()._cdata
    del value
    assert alive() is not None
    del bare
    assert alive() is None


def test_what_arrives_is_no_activation_before_it_is_read() -> None:
    """The count of live bytes moves what has arrived to the line of whoever looks at it first."""
    with LiveBytes(moving=["receive_buffers"]) as live:
        live.line = "receive_buffers"
        buffer = torch.zeros(1, 4)
        live.line = "activations"
        bare = alias_of(buffer)
        assert live.by_line() == {"receive_buffers": 16}
        buffer.view(4)
        assert live.by_line() == {"activations": 16}
    assert bare.data_ptr() == buffer.data_ptr()


def test_what_a_communication_borrows_is_held_until_the_computation_comes_behind_it() -> None:
    driver = VirtualDriver()
    streams = CudaStreams(driver)
    value, other = torch.zeros(2), torch.zeros(2)
    alive = [weakref.ref(value), weakref.ref(other)]
    held = {"value": value, "other": other}
    del value, other
    streams.compute(0, COMPUTE, [], lambda: None)
    streams.submit(1, "pp>1", [0], lambda: streams.lent(held.pop("value")))
    streams.submit(2, "tp", [1], lambda: streams.lent(held.pop("other")))
    streams.compute(3, COMPUTE, [0], lambda: None)
    assert all(ref() is not None for ref in alive), "no stream waits for the communication yet"
    streams.compute(4, COMPUTE, [2], lambda: None)
    assert all(ref() is None for ref in alive), "who waits for the second waits for the first too"
    streams.finish()


FIRST_AND_SECOND = {
    "a read after a write": (lambda value: value.add_(1), lambda value: value + 1),
    "a write after a read": (lambda value: value + 1, lambda value: value.add_(1)),
    "a write after a write": (lambda value: value.zero_(), lambda value: value.add_(1)),
}


@pytest.mark.parametrize("communication_first", [True, False])
@pytest.mark.parametrize("kind", FIRST_AND_SECOND)
def test_every_kind_of_planted_race_is_found(kind: str, communication_first: bool) -> None:
    """Two tasks on two streams touch one array: with the event between them, and without it."""
    first, second = FIRST_AND_SECOND[kind]
    for skipped in (False, True):
        driver = VirtualDriver(skipped_waits=frozenset({1 if communication_first else 0} if skipped else ()))
        streams = CudaStreams(driver)
        with driver.watch_tensors():
            value = torch.zeros(4)
            if communication_first:
                streams.compute(0, COMPUTE, [], lambda value=value: value.mul_(2))
                streams.submit(1, "dp", [0], lambda value=value: first(value))
                streams.compute(2, COMPUTE, [1], lambda value=value: second(value))
            else:
                streams.submit(1, "dp", [0], lambda value=value: second(value))
                streams.compute(0, COMPUTE, [], lambda value=value: first(value))
            streams.finish()
        assert len(driver.errors) == int(skipped), f"{kind}: {driver.errors}"


def test_two_reads_are_no_race() -> None:
    driver = VirtualDriver(skipped_waits=frozenset({0}))
    streams = CudaStreams(driver)
    with driver.watch_tensors():
        value = torch.zeros(4)
        streams.submit(1, "dp", [0], lambda value=value: value + 1)
        streams.compute(0, COMPUTE, [], lambda value=value: value + 1)
        streams.finish()
    assert not driver.errors


# Ranks of plans issue their tasks in the simulated order, and they overlap as simulated: with torch's fake process group.

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
