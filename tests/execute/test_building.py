"""A rank builds its module in the memory of the host, and only what it holds of it ever lies on its device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from experiments.common.forked import run_ranks
from parsim.execute import rank_run as build_turns
from parsim.execute.processes.group import ProcessPlace
from parsim.execute.rank_run import built_at_once, in_turns
from parsim.model.build import build_module, example_batch, interface_of, loss_of, move_hollow, record
from parsim.model.spec import ModelSpec
from parsim.model.trace.count import calls_key
from parsim.plans.mesh import Mesh
from tests.execute.module_kinds import LENGTH, WIDTH, Encoder, Recurrent
from tests.execute.rank_states import CPU, GPT, MLP, RESNET, TABLE, VIT, even_plan, rank_of


class ListedWeights(nn.Module):
    """Reads its weights through a list of its own, as nn.LSTM does, through a view, and beside a cache that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(WIDTH))
        self.listed = [self.inner.weight, self.inner.bias]
        self.cache = torch.arange(WIDTH, dtype=torch.float32)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ListedWeights:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.cache = fn(self.cache)
        return self

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.listed
        both = torch.as_strided(weight, (WIDTH, WIDTH), (1, WIDTH)) + weight.view(-1).view(WIDTH, WIDTH)
        return (x @ both + bias) * self.scale + self.cache


def zoo_module(spec: ModelSpec) -> tuple[nn.Module, Sequence[Tensor] | Mapping[str, Tensor], str | None]:
    inputs, _ = example_batch(spec, 2)
    args, kwargs = interface_of(spec).arguments(inputs)
    return build_module(spec), args or kwargs, loss_of(spec)


SEQUENCE = (torch.zeros(2, LENGTH, WIDTH),)
MODULES: dict[str, Callable[[], tuple[nn.Module, Any, str | None]]] = {
    **{spec.name: lambda spec=spec: zoo_module(spec) for spec in (MLP, RESNET, GPT, VIT, TABLE)},  # type: ignore[misc]
    "lstm": lambda: (Recurrent(nn.LSTM, layers=2, bidirectional=True), SEQUENCE, None),
    "encoder": lambda: (Encoder(), SEQUENCE, None),
    "listed": lambda: (ListedWeights(), (torch.zeros(2, WIDTH),), None),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_without_data_is_recorded_like_one_with_data(name: str) -> None:
    module, inputs, loss = MODULES[name]()
    module.train()
    granularity = "layer"
    expected = record(module, inputs, granularity=granularity, loss=loss)
    objects = [*module.parameters(), *module.buffers()]
    move_hollow(module, CPU)
    assert sum(tensor.untyped_storage().nbytes() for tensor in objects) == 0
    assert all(old is new for old, new in zip(objects, [*module.parameters(), *module.buffers()], strict=True))
    found = record(module, inputs, granularity=granularity, loss=loss)
    assert [entry.name for entry in found] == [entry.name for entry in expected]
    for own, other in zip(found, expected, strict=True):
        assert calls_key(own.program) == calls_key(other.program)
        assert own.program.state == other.program.state
        assert own.program.tensors == other.program.tensors


class Moved(TorchFunctionMode):
    """Bytes of the tensors that are moved to a device by `to`, and of arrays of zeros made there; of weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self._moved: dict[int, Tensor] = {}
        self.most_zeros_bytes = 0

    @property
    def moved_bytes(self) -> int:
        """Of tied weights once: the second time they are there already."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._moved.values())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.to and len(args) == 2 and isinstance(args[1], torch.device):
            self._moved[id(args[0])] = args[0]
        if func is torch.zeros and result.dim() == 1:
            self.most_zeros_bytes = max(self.most_zeros_bytes, result.numel() * result.element_size())
        return result


@pytest.mark.parametrize("spec", [MLP, GPT], ids=lambda spec: spec.name)
@pytest.mark.parametrize(("mesh", "zero"), [(Mesh(dp=2), 0), (Mesh(dp=2), 3), (Mesh(pp=2), 0), (Mesh(tp=2), 0)], ids=str)
def test_only_the_own_part_of_a_module_moves_to_the_device(spec: ModelSpec, mesh: Mesh, zero: int) -> None:
    plan = even_plan(spec, mesh, zero=zero)
    for rank in range(plan.world_size):
        rank_of(spec, plan, rank)  # records, and moves example inputs for that
        with Moved() as seen:
            made = rank_of(spec, plan, rank)
        layout = made.layout
        divided = {p.name for bucket in layout.rank_buckets(rank) if layout.is_divided(bucket) for p in bucket.parameters}
        own = sum(8 * held.elements for held in layout.rank_parameters(rank) if held.name not in divided)
        buffers = sum(tensor.numel() * tensor.element_size() for tensor in made.module.buffers())
        assert seen.moved_bytes == own + buffers
        assert (zero == 3) == bool(divided)
        if zero == 3:
            assert own == 0, "a bucket moves its parameters itself, one bucket at a time"
            largest = max(bucket.chunk_elements * len(bucket.group) for bucket in layout.rank_buckets(rank))
            assert seen.most_zeros_bytes == 8 * largest
        if mesh.pp > 1:
            assert own < sum(8 * parameter.elements for parameter in layout.model.parameters)


@given(
    free=st.integers(0, 10**6),
    whole=st.integers(1, 10**5),
    kept=st.integers(0, 10**5),
    ranks=st.integers(1, 16),
)
def test_as_many_build_at_once_as_the_host_holds(free: int, whole: int, kept: int, ranks: int) -> None:
    found = built_at_once(free, whole_bytes=whole, kept_bytes=kept, ranks=ranks)
    assert 1 <= found <= ranks
    assert found == 1 or found * whole + ranks * kept <= free
    assert found == ranks or (found + 1) * whole + ranks * kept > free
    assert built_at_once(None, whole_bytes=whole, kept_bytes=kept, ranks=ranks) == ranks


@pytest.mark.parametrize(
    ("free", "turns"),
    [([10**9] * 4, [{0, 1, 2, 3}]), ([250, 10**9, 10**9, 10**9], [{0, 1}, {2, 3}]), ([0] * 4, [{0}, {1}, {2}, {3}])],
)
def test_ranks_build_in_turns_where_the_host_holds_fewer(
    free: list[int], turns: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks of a host take as many turns as the one that found least memory says; each builds in one of them."""
    told = [[built_at_once(entry, whole_bytes=100, kept_bytes=0, ranks=4), 4] for entry in free]
    events: list[tuple[int, str]] = []
    for rank in range(4):
        monkeypatch.setattr(build_turns, "available_bytes", lambda rank=rank: free[rank])

        def gather(value: Any, rank: int = rank) -> Any:
            assert value == told[rank]
            return told

        monkeypatch.setattr(build_turns, "gather_values", gather)
        monkeypatch.setattr(build_turns, "meet", lambda rank=rank: events.append((rank, "meet")))

        def build(rank: int = rank) -> int:
            events.append((rank, "build"))
            return rank

        place = ProcessPlace(rank=rank, world_size=4, local_rank=rank, local_world_size=4, attempt=0)
        assert in_turns(place, build, whole_bytes=100, kept_bytes=0) == rank
    for rank in range(4):
        own = [what for number, what in events if number == rank]
        turn = next(number for number, members in enumerate(turns) if rank in members)
        meets = len(turns) if len(turns) > 1 else 0
        assert own == ["meet"] * turn + ["build"] + ["meet"] * (meets - turn)


def builds_for_a_while(rank: int) -> tuple[float, float]:
    place = ProcessPlace(rank=rank, world_size=2, local_rank=rank, local_world_size=2, attempt=0)

    def build() -> tuple[float, float]:
        began = time.monotonic()
        time.sleep(0.2)
        return began, time.monotonic()

    return in_turns(place, build, whole_bytes=100, kept_bytes=0)


@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize("free", [0, 10**9])
def test_ranks_of_a_group_wait_for_their_turn(free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_turns, "available_bytes", lambda: free)
    first, second = run_ranks(builds_for_a_while, 2, tmp_path)
    assert (first[1] <= second[0]) == (free == 0)


def test_a_rank_alone_asks_nobody() -> None:
    place = ProcessPlace(rank=0, world_size=1, local_rank=0, local_world_size=1, attempt=0)
    assert in_turns(replace(place), lambda: 3, whole_bytes=1, kept_bytes=0) == 3
