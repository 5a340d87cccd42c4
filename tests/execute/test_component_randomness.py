"""Which ranks draw the same random numbers: those that work on the same samples, and no others."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the torch extra")

import torch
from torch import Tensor

from parsim.data.samples import Described, MapSamples, alone
from parsim.execute import numerics as randomness
from parsim.execute.numerics import ComponentRandomness
from parsim.model import ModelSpec, load_model, record
from parsim.model.autograd import recompute as recomputing
from parsim.model.autograd.recompute import forward_to_recompute, recompute
from parsim.model.build import build_module, example_batch, loss_of
from parsim.model.inputs import ModelInput
from parsim.model.runnable import PLAIN, CallProgram, Op, Ref, TensorKind
from parsim.model.shard.propagate import may_draw_on_host
from parsim.plans.layouts import BATCH, REPLICATE, Placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.program.placed import PlanIndex
from tests.execute.test_recompute import DROPPING, given_to
from tests.execute.test_recompute import recorded as recorded_of

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


# The generators of the host on a GPU: one user at a time, and a component that draws on its GPU is no user of them.

CUDA = torch.device("cuda", 0)
KIND = TensorKind((3,), (1,), torch.float32, False)


class UnseenNoise(torch.autograd.Function):
    """What torch does not see."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value + torch.from_numpy(np.ones(3, dtype=np.float32))


def one_call(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> CallProgram:
    op = Op(function, arguments, tuple(keywords.items()), (((), 1),), PLAIN, ())
    return CallProgram(
        name="one",
        ops=(op,),
        slots=2,
        inputs=(("x", 0, False),),
        outputs=(("y", 1, False),),
        state=(),
        constants=(),
        buffer_writes=(),
        tensors=(KIND, KIND),
    )


CALLS = {
    "noise like a value of the GPU": (one_call(torch.rand_like, Ref(0)), False),
    "noise on the GPU": (one_call(torch.rand, 3, device=CUDA), False),
    "dropout": (one_call(torch.nn.functional.dropout, Ref(0), 0.5), False),
    "no noise": (one_call(torch.relu, Ref(0)), False),
    "noise without a device": (one_call(torch.rand, 3), True),
    "noise on the host": (one_call(torch.rand, 3, device="cpu"), True),
    "a permutation on the host": (one_call(torch.randperm, 3), True),
    "what torch does not see": (one_call(UnseenNoise.apply, Ref(0)), True),
}


@pytest.mark.parametrize("name", CALLS)
def test_draws_on_the_host_are_told_from_those_on_the_gpu(name: str) -> None:
    program, wanted = CALLS[name]
    assert may_draw_on_host(program) == wanted


def on_gpu(monkeypatch: pytest.MonkeyPatch, *, draws_on_host: bool) -> ComponentRandomness:
    """The seeds of a rank with a GPU, one component of which draws on the host, or none."""
    programs = recorded()
    if draws_on_host:
        own = programs[WHOLE]
        noise = Op(torch.rand, (3,), (), (((), own.slots),), PLAIN, ())
        programs[WHOLE] = replace(own, ops=(*own.ops, noise), slots=own.slots + 1)
    gpu = torch.Generator()
    monkeypatch.setattr(randomness, "generator_of", lambda _: gpu)
    return ComponentRandomness(layout(), 0, CUDA, programs)


class Noisy:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.rand(3), index


def read() -> np.ndarray[Any, Any]:
    entries = ModelInput(name="x", shape=(3,)), ModelInput(name="target", shape=(), dtype="int64")
    described = Described(name="noisy", inputs=entries[:1], target=entries[1])
    return MapSamples(Noisy(), described, split="train", seed=0).values(np.arange(4))["input:0"]


def test_who_reads_samples_waits_for_a_component_that_draws_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a sample read meanwhile was made of the component's numbers, and the component drew from the sample's seed."""
    own, expected = on_gpu(monkeypatch, draws_on_host=True), read()
    drawn, states = [], []
    for _ in range(2):
        with own.step(7), own.around(WHOLE):
            own.begin(WHOLE, 0)
            found: list[np.ndarray[Any, Any]] = []
            reader = threading.Thread(target=lambda found=found: found.append(read()))
            reader.start()
            reader.join(0.3)
            assert not found, "the generator is the component's"
            drawn.append(torch.rand(3))
        reader.join(20)
        assert np.array_equal(found[0], expected)
        states.append(torch.get_rng_state())
        torch.rand(5)  # somebody else draws between two steps
    assert torch.equal(drawn[0], drawn[1]), "what it draws follows from the step alone"
    assert not torch.equal(states[0], states[1])


def test_a_component_that_draws_on_its_gpu_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    own = on_gpu(monkeypatch, draws_on_host=False)
    assert own.draws(WHOLE)
    assert not own.draws_on_host(WHOLE)
    with own.step(7), own.around(WHOLE):
        own.begin(WHOLE, 0)
        reader = threading.Thread(target=read)
        reader.start()
        reader.join(20)
        assert not reader.is_alive()


@pytest.mark.parametrize("on_host", [True, False])
def test_a_second_forward_on_a_gpu_takes_the_generator_of_the_host_only_if_it_draws_there(
    on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread reads samples meanwhile, whose random transformations would follow from the moment."""
    touched: set[torch.device] = set()

    def state(place: torch.device) -> Tensor:
        touched.add(place)
        return torch.get_rng_state()

    monkeypatch.setattr(recomputing, "generator_state", state)
    monkeypatch.setattr(recomputing, "set_generator_state", lambda _, place: touched.add(place))
    dropping = next(entry for entry in recorded_of(DROPPING["mlp"]) if entry.parameters())
    _, kept = forward_to_recompute(dropping, given_to(dropping), CUDA, by_operator=False, on_host=on_host)
    recompute(dropping, kept)
    assert touched == ({CUDA, torch.device("cpu")} if on_host else {CUDA})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_may_use_the_generators_whoever_held_them() -> None:
    """Workers that read samples are forked while another thread may hold them."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with alone():
            held.set()
            done.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(20)
    child = os.fork()
    if not child:
        status = 1
        try:
            status = 0 if alone().acquire(timeout=5) else 2  # type: ignore[attr-defined]
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    done.set()
    holder.join()
