"""What torch and gloo do that a good guess misses, where parsim relies on it or protects from it."""

from __future__ import annotations

import threading
import weakref
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parsim.execute.numerics import overflow_flag
from parsim.model.optimizers import OPTIMIZERS

CPU = torch.device("cpu")


def reduced_by_gloo(values: list[torch.Tensor], operation: Any) -> list[torch.Tensor]:
    """all_reduce of one array per rank; the ranks are threads, each with its own end of the group."""
    store = dist.HashStore()

    def rank(number: int) -> None:
        group = dist.ProcessGroupGloo(store, number, len(values), timedelta(seconds=20))
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        group.allreduce([values[number]], options).wait()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(values))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return values


@pytest.mark.parametrize("operation", ["MAX", "MIN"])
def test_gloo_loses_a_nan_in_half_of_the_places(operation: str) -> None:
    """torch 2.13, gloo: MAX and MIN keep a NaN of one rank or lose it by its place, 500 of 1,000; SUM keeps all."""
    for kept, name in ((500, operation), (1000, "SUM")):
        values = reduced_by_gloo([torch.full((1000,), value) for value in (0.0, torch.nan)], getattr(dist.ReduceOp, name))
        assert [int(value.isnan().sum()) for value in values] == [kept, kept]


def test_ranks_agree_on_an_overflow_whatever_its_place() -> None:
    """torch 2.13, gloo: a count that is reduced by MAX arrives, so ranks agree on an overflow whatever its place; the
    gradients themselves do not go through MAX."""
    for place in (0, 499, 500, 999):
        broken = torch.zeros(1000)
        broken[place] = torch.nan
        flags = [overflow_flag([gradient], CPU) for gradient in (torch.zeros(1000), broken)]
        assert [float(flag) for flag in reduced_by_gloo(flags, dist.ReduceOp.MAX)] == [1.0, 1.0]


class Storages(TorchDispatchMode):
    """The most bytes that an optimizer's step holds of arrays that it made itself."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if torch.is_tensor(leaf) and (key := (storage := leaf.untyped_storage())._cdata) not in given | self.alive.keys():
                self.alive[key] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, key, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return made


@pytest.mark.parametrize(("implementation", "whole", "largest"), [("foreach", 4, 0), ("for-loop", 0, 8), ("fused", 0, 0)])
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_temporary_bytes_of_adam_by_implementation(kind: str, implementation: str, whole: int, largest: int) -> None:
    """torch 2.13: foreach Adam holds 4 bytes per element of all parameters; for-loop Adam at least 8 per element of the one
    that it updates; fused Adam none. parsim runs the first and the last."""
    for count in (1, 4):
        parameters = [torch.nn.Parameter(torch.zeros(1000)) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.ones(1000)
        switches = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
        optimizer = getattr(torch.optim, kind)(parameters, **switches)
        optimizer.step()
        with Storages() as seen:
            optimizer.step()
        least = 1000 * (whole * count + largest)
        assert least <= seen.peak <= (least if implementation != "for-loop" else least + 4000)
    if implementation != "for-loop":
        row = OPTIMIZERS[kind.lower() + ("_fused" if implementation == "fused" else "")]
        assert row.temporary_bytes_per_element == whole


class Gathers(TorchDispatchMode):
    """How often parameters are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "allgather_base" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def fake_ranks() -> Any:
    """Two ranks of which one is there: collectives leave their outputs as they are."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize(("evaluated", "gathers"), [(False, [7, 7, 7]), (True, [10, 10, 10])])
def test_fsdp2_gathers_the_root_once_and_every_layer_twice(fake_ranks: Any, evaluated: bool, gathers: list[int]) -> None:
    """torch 2.13: FSDP2 gathers the root once per step and every layer twice. An evaluation before the step adds the layers
    alone, and the first step gathers as often as later ones."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))))
    for layer in module[1]:
        fully_shard(layer, mesh=fake_ranks)
    fully_shard(module, mesh=fake_ranks)
    seen = []
    for _ in gathers:
        with Gathers() as counted:
            if evaluated:
                with torch.no_grad():
                    module(torch.ones(2, 8))
            module(torch.ones(2, 8, requires_grad=True)).clone().sum().backward()
        seen.append(counted.count)
    assert seen == gathers
