"""Which ranks draw the same random numbers: those that work on the same samples, and no others."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from parsim.execute.numerics import ComponentRandomness  # noqa: E402
from parsim.model import ModelSpec, load_model, record  # noqa: E402
from parsim.model.build import (  # noqa: E402
    build_module,
    example_batch,
    loss_of,
)
from parsim.model.runnable import CallProgram  # noqa: E402
from parsim.plans.layouts import BATCH, REPLICATE, Placement  # noqa: E402
from parsim.plans.mesh import Mesh  # noqa: E402
from parsim.plans.plan import Plan, Stage  # noqa: E402
from parsim.program.placed import PlanIndex  # noqa: E402

SPEC = ModelSpec(name="gpt_small", args=(("dropout", 0.1),))
CUT, WHOLE, SPLIT = "h.0.attn", "h.1.attn", "h.2.attn"


def recorded() -> dict[str, CallProgram]:
    inputs, _ = example_batch(SPEC, 2)
    runnables = record(build_module(SPEC).train(), inputs, granularity="sublayer", loss=loss_of(SPEC))
    return {runnable.name: runnable.program for runnable in runnables}


def layout() -> PlanIndex:
    """Two replicas of two tensor ranks: one attention cut, one replicated, one with its batch split."""
    model = load_model(ModelSpec(name="gpt_small"), granularity="sublayer")
    names = tuple(component.name for component in model.components)
    placed = {CUT: Placement("shard", rule="heads+row", ways=2), SPLIT: BATCH}
    stage = Stage(components=names, ranks=(0, 1, 2, 3), placements=tuple(placed.get(name, REPLICATE) for name in names))
    mesh = Mesh(dp=2, tp=2)
    return PlanIndex(Plan(strategy="custom", mesh=mesh, stages=(stage,), global_batch=8, microbatches=2), model)


def test_seeds() -> None:
    index, programs = layout(), recorded()
    drawn: dict[tuple[int, str, int, int], float] = {}
    after = []
    for rank in range(4):
        torch.manual_seed(0)
        own = ComponentRandomness(index, rank, torch.device("cpu"), programs)
        for step in range(2):
            with own.step():
                for name in (CUT, WHOLE, SPLIT):
                    for microbatch in range(2):
                        own.begin(name, microbatch)
                        drawn[rank, name, microbatch, step] = float(torch.rand(()))
        after.append(torch.get_rng_state())
    assert all(torch.equal(state, after[0]) for state in after), "the CPU's generator goes on alike everywhere"
    for name in (CUT, WHOLE, SPLIT):
        for microbatch in range(2):
            numbers = [drawn[rank, name, microbatch, 0] for rank in range(4)]
            pairs = {(one, other) for one in range(4) for other in range(one) if numbers[one] == numbers[other]}
            assert pairs == (set() if name == SPLIT else {(1, 0), (3, 2)}), name
    assert len(set(drawn.values())) == 2 * 2 * (2 + 2 + 4), "components, microbatches and steps differ"


def test_what_draws_nothing_is_left_alone() -> None:
    index, programs = layout(), recorded()
    own = ComponentRandomness(index, 0, torch.device("cpu"), programs)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    own.begin("head", 0) if "head" in programs else own.begin("loss", 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_that_are_read_beside_a_step_change_no_draw() -> None:
    """On a GPU a thread reads the next batch meanwhile. A dataset of one's own draws from the generators of the process, which
    are seeded for each of its samples. Ranks that drew from them in between would mask differently what they share."""
    index, programs = layout(), recorded()
    found = []
    for reads in (False, True):
        torch.manual_seed(0)
        own = ComponentRandomness(index, 0, torch.device("cpu"), programs)
        for sample in range(3):
            if reads:
                torch.manual_seed(sample)
            with own.step():
                found.append(own.draw)
    assert found[:3] == found[3:]
    assert len(set(found)) == 3


def test_a_step_on_a_gpu_leaves_the_generator_of_the_host_to_who_reads_samples() -> None:
    own = ComponentRandomness(layout(), 0, torch.device("cuda", 0), recorded())
    with own.step():
        torch.manual_seed(7)
        reading = torch.get_rng_state()
    assert torch.equal(torch.get_rng_state(), reading)
