"""The generators of the host on a GPU: one user at a time, and a component that draws on its GPU is no user of them."""

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
from parsim.model.autograd import recompute as recomputing
from parsim.model.autograd.recompute import forward_to_recompute, recompute
from parsim.model.inputs import ModelInput
from parsim.model.runnable import PLAIN, CallProgram, Op, Ref, TensorKind
from parsim.model.shard.propagate import may_draw_on_host
from tests.execute.test_component_randomness import WHOLE, layout, recorded
from tests.execute.test_recompute import DROPPING, given_to
from tests.execute.test_recompute import recorded as recorded_of

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
