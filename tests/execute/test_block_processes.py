"""Block tensors on a process group of four gloo ranks: the same values as NumPy, through the same calls as in one process."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from parsim.data import blocks
from parsim.data.blocks import exchange
from parsim.data.blocks import exchange as room
from parsim.data.blocks.tensor import ORDERS, reduce_blocks
from parsim.errors import DataError
from tests.block_cases import RANKS, broadcast_pairs, cut_arrays, grids, keys, made, owners
from tests.execute.block_ranks import RankPool

FEW = settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
ROOM = 24
"""Bytes of a message in these tests: three numbers, so that everything takes many rounds."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    ranks = RankPool(RANKS, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def here() -> blocks.Processes:
    return blocks.on_process_group()


def assert_equal_on_all(answers: list[np.ndarray[Any, Any]], wanted: Any) -> None:
    for answer in answers:
        expected = np.asarray(wanted)
        assert (answer.shape, answer.dtype) == (expected.shape, expected.dtype)
        assert np.array_equal(answer, expected, equal_nan=True)


def indexed(case: Any, key: Any) -> Any:
    return made(case, here())[key].collect().numpy()


@FEW
@given(cut_arrays(), st.data())
def test_indexing(pool: RankPool, case: Any, data: st.DataObject) -> None:
    key = data.draw(keys(case[0].shape))
    assert_equal_on_all(pool.call(indexed, case, key), case[0][key])


def combined(pair: Any, operation: Any) -> Any:
    left, right = (made(case, here()) for case in pair)
    return operation(left, right).collect().numpy()


@FEW
@given(broadcast_pairs(), st.sampled_from([operator.add, operator.mul, operator.lt]))
def test_arithmetic(pool: RankPool, pair: Any, operation: Any) -> None:
    assert_equal_on_all(pool.call(combined, pair, operation), operation(pair[0][0], pair[1][0]))


def reduced(case: Any, kind: str, dims: Any, keepdim: bool) -> Any:
    return reduce_blocks(made(case, here()), kind, dims, keepdim=keepdim, room_bytes=ROOM).collect().numpy()


@FEW
@given(cut_arrays(), st.data(), st.booleans(), st.sampled_from(["sum", "min", "max", "any", "all"]))
def test_reductions(pool: RankPool, case: Any, data: st.DataObject, keepdim: bool, kind: str) -> None:
    dims = data.draw(st.one_of(st.none(), st.sets(st.integers(0, case[0].ndim - 1)).map(tuple)))
    wanted = getattr(np, kind)(case[0], axis=dims, keepdims=keepdim)
    assert_equal_on_all(pool.call(reduced, case, kind, dims, keepdim), wanted)


def rechunked(case: Any, grid: blocks.BlockGrid, dealt: list[int]) -> Any:
    got = made(case, here()).rechunk(grid, owners=dealt, room_bytes=ROOM)
    return {number: block.numpy() for number, block in got.blocks.items()}


@FEW
@given(st.one_of(cut_arrays(), cut_arrays(dtype=np.int16), cut_arrays(dtype=np.complex64)), st.data())
def test_rechunk(pool: RankPool, case: Any, data: st.DataObject) -> None:
    """Each rank has exactly the blocks that it owns."""
    grid = data.draw(grids(case[0].shape))
    dealt = data.draw(owners(grid))
    for rank, held in enumerate(pool.call(rechunked, case, grid, dealt)):
        assert sorted(held) == [number for number, owner in enumerate(dealt) if owner == rank]
        for number, block in held.items():
            assert np.array_equal(block, case[0][grid.extent(grid.place(number))])


def shuffled(case: Any, seed: int, kind: str) -> Any:
    return blocks.shuffle(made(case, here()), seed=seed, kind=kind, room_bytes=ROOM)[0].collect().numpy()


@FEW
@given(cut_arrays(), st.sampled_from(sorted(ORDERS)), st.integers(0, 9))
def test_a_shuffle_is_the_same_as_in_one_process(pool: RankPool, case: Any, kind: str, seed: int) -> None:
    assert_equal_on_all(pool.call(shuffled, case, seed, kind), made(case).shuffle(seed, kind=kind).collect().numpy())


def inexact(grid: Any) -> Any:
    x = blocks.random((64, 40), seed=3, grid=grid, distribution="normal", processes=here())
    return x.collect().numpy(), ((x - x.mean(0)) / 3).sum().item(), x.apply(torch.exp).mean(1).collect().numpy()


def test_random_arithmetic_and_sums_are_bitwise_those_of_one_process(pool: RankPool) -> None:
    x = blocks.random((64, 40), seed=3, grid=(16, 4), distribution="normal")
    for values, total, means in pool.call(inexact, (16, 4)):
        assert np.array_equal(values, x.collect().numpy())
        assert total == ((x - x.mean(0)) / 3).sum().item()
        assert np.array_equal(means, x.apply(torch.exp).mean(1).collect().numpy())


def from_one_and_to_one() -> Any:
    array = np.arange(30.0).reshape(10, 3) if dist.get_rank() == 2 else None
    x = blocks.from_array(array, grid=(5,), processes=here(), source=2)
    whole = x.collect_on(1)
    return None if whole is None else whole.numpy()


def test_one_rank_may_read_and_one_may_write(pool: RankPool) -> None:
    answers = pool.call(from_one_and_to_one)
    assert [answer is None for answer in answers] == [True, False, True, True]
    assert np.array_equal(answers[1], np.arange(30.0).reshape(10, 3))


def dtensors(rows: int) -> Any:
    x = blocks.random((rows, 6), seed=1, grid=blocks.BlockGrid.balanced((rows, 6), (min(3, rows), 2)), processes=here())
    line, square = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (2, 2))
    whole, equal = x.collect(), []
    for mesh, placements in [
        (line, (Shard(0),)),
        (line, (Shard(1),)),
        (square, (Shard(0), Shard(1))),
        (square, (Shard(1), Replicate())),
    ]:
        got, wanted = x.to_dtensor(mesh, placements), distribute_tensor(whole, mesh, placements)
        back = blocks.from_dtensor(got)
        equal += [torch.equal(got.to_local(), wanted.to_local()), torch.equal(got.full_tensor(), whole)]
        equal += [torch.equal(back.collect(), whole), torch.equal(blocks.from_dtensor(wanted).collect(), whole)]
    return equal


@pytest.mark.parametrize("rows", [8, 2, 5, 1])
def test_dtensors_round_trip_and_are_torchs_own(pool: RankPool, rows: int) -> None:
    """Uneven and empty shards too: local tensors equal those of `distribute_tensor`."""
    assert pool.call(dtensors, rows) == [[True] * 16] * RANKS


def failing() -> list[str]:
    x = blocks.full((8, 2), 1.0, grid=(4,), processes=here())
    messages = []

    def third_only(block: Tensor) -> Tensor:
        if dist.get_rank() == 2:
            raise ValueError("not here")
        return block

    if dist.get_rank() == 1:
        room.available_bytes, kept = lambda device="cpu": 2**20, room.available_bytes
    for wrong in (
        lambda: x.apply(third_only),
        lambda: blocks.full((2**24,), 1.0, grid=(4,), processes=here()),
        lambda: x.to_dtensor(init_device_mesh("cpu", (RANKS,)), (Shard(2),)),
    ):
        try:
            wrong()
        except DataError as error:
            messages.append(str(error))
    if dist.get_rank() == 1:
        room.available_bytes = kept
    dist.barrier()
    return messages


def test_an_error_on_one_rank_is_raised_on_all(pool: RankPool) -> None:
    """So no rank waits for one that has given up."""
    answers = pool.call(failing)
    assert answers == [answers[0]] * RANKS
    assert len(answers[0]) == 3
    assert "failed on rank 2 at block [2, 0]: ValueError: not here" in answers[0][0]
    assert "(ranks 0, 1, 2, 3), where 1 MiB are free" in answers[0][1]


def largest_messages(side: int) -> Any:
    """The largest buffers that a transposed rechunk and a shuffle hand to torch, and whether the values are right."""
    seen: list[int] = []
    real = dist.batch_isend_irecv

    def watched(operations: list[Any]) -> Any:
        for kind in (dist.isend, dist.irecv):
            seen.append(sum(entry.tensor.numel() for entry in operations if entry.op is kind))
        return real(operations)

    x = blocks.random((side, side), seed=0, grid=(64,), dtype=torch.float64, processes=here())
    exchange.dist.batch_isend_irecv = watched
    try:
        columns = x.rechunk((1, 64), room_bytes=8192)
        rows = x.shuffle(1, room_bytes=8192)
    finally:
        exchange.dist.batch_isend_irecv = real
    whole = blocks.random((side, side), seed=0, grid=(1,), dtype=torch.float64)
    right = torch.equal(columns.collect(), whole.collect()), torch.equal(rows.collect(), whole.shuffle(1).collect())
    return max(seen), len(seen) // 2, right


def test_64_blocks_on_4_processes_in_messages_of_8_kib(pool: RankPool) -> None:
    """An array of 128 KiB, 32 KiB per rank, is never gathered: no buffer exceeds 8 KiB."""
    for largest, rounds, right in pool.call(largest_messages, 128):
        assert largest <= 8192
        assert 6 <= rounds <= 20
        assert right == (True, True)
