"""Block tensors in one process against NumPy, and the messages for what cannot be."""

from __future__ import annotations

import math
import operator
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs the torch extra")

import torch

from parsim.data import blocks
from parsim.data.blocks import exchange as room
from parsim.data.blocks import tensor as dtensors
from parsim.data.blocks.exchange import (
    normal_at,
    rounds_of,
    splitmix64,
    uniform_at,
)
from parsim.data.blocks.tensor import ORDERS, overlaps
from parsim.errors import DataError
from tests.block_cases import RANKS, assert_same, broadcast_pairs, cut_arrays, grids, keys, made, owners

QUICK = settings(max_examples=60)


@QUICK
@given(cut_arrays(), st.data())
def test_indexing(case: Any, data: st.DataObject) -> None:
    key = data.draw(keys(case[0].shape))
    assert_same(made(case)[key], case[0][key])


@QUICK
@given(broadcast_pairs(), st.sampled_from([operator.add, operator.sub, operator.mul, operator.lt, operator.ge, operator.mod]))
def test_arithmetic_broadcasts(pair: Any, operation: Any) -> None:
    left, right = pair
    if operation is operator.mod:
        right = (np.abs(right[0]) + 1, *right[1:])
    wanted = operation(left[0], right[0])
    assert_same(operation(made(left), made(right)), wanted)
    assert_same(operation(made(left), right[0]), wanted)
    assert_same(operation(left[0], made(right)), wanted)


@QUICK
@given(cut_arrays(), st.data(), st.booleans(), st.sampled_from(["sum", "mean", "min", "max", "prod", "any", "all"]))
def test_reductions(case: Any, data: st.DataObject, keepdim: bool, kind: str) -> None:
    """Exact: the values are small integers in float64."""
    dims = data.draw(st.one_of(st.none(), st.sets(st.integers(0, case[0].ndim - 1)).map(tuple)))
    got = getattr(made(case), kind)(dims, keepdim=keepdim)
    wanted = getattr(np, kind)(case[0], axis=dims, keepdims=keepdim)
    if kind in ("prod", "mean"):
        assert np.allclose(got.collect().numpy(), wanted, rtol=1e-14, atol=0)
    else:
        assert_same(got, wanted)


@QUICK
@given(cut_arrays(), st.data())
def test_rechunk_keeps_the_array(case: Any, data: st.DataObject) -> None:
    grid = data.draw(grids(case[0].shape))
    got = made(case).rechunk(grid, owners=data.draw(owners(grid)))
    assert got.grid == grid
    assert_same(got, case[0])
    assert all(np.array_equal(got.block(*place).numpy(), case[0][grid.extent(place)]) for place in grid.places())


@QUICK
@given(cut_arrays(), st.sampled_from(sorted(ORDERS)), st.integers(0, 2**40), st.data())
def test_shuffle_keeps_the_pairs(case: Any, kind: str, seed: int, data: st.DataObject) -> None:
    """Samples and targets that are cut and dealt differently stay together, and every pair stays once."""
    x, rows = made(case), len(case[0])
    numbers = np.arange(rows)
    grid = data.draw(grids((rows,)))
    y = blocks.from_array(numbers, grid=grid, owners=data.draw(owners(grid)), processes=blocks.in_one_process(RANKS))
    got_x, got_y = blocks.shuffle(x, y, seed=seed, kind=kind)
    order = got_y.collect().numpy()
    assert sorted(order) == list(range(rows))
    assert_same(got_x, case[0][order])
    assert (got_x.grid, got_x.owners, got_y.grid) == (x.grid, x.owners, y.grid)


def test_a_full_shuffle_is_uniform_and_knows_no_grid() -> None:
    """All 24 orders of four rows, 2,400 seeds: chi-square with 23 degrees of freedom below its 99.9% quantile, 49.7."""
    counts = Counter(tuple(ORDERS["full"]([1, 1, 1, 1], seed)) for seed in range(2400))
    assert len(counts) == 24
    assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 49.7
    assert np.array_equal(ORDERS["full"]([4], 5), ORDERS["full"]([1, 3], 5))


def test_pairs_stay_in_their_two_blocks_and_mix_in_rounds() -> None:
    order = ORDERS["pairs"]([10] * 8, 3)
    came_from = [set(order[place : place + 10] // 10) for place in range(0, 80, 10)]
    assert max(map(len, came_from)) == 2
    for seed in range(4, 9):
        order = order[ORDERS["pairs"]([10] * 8, seed)]
    assert min(len(set(order[place : place + 10] // 10)) for place in range(0, 80, 10)) >= 3


@QUICK
@given(st.data(), st.sampled_from(["uniform", "normal"]), st.integers(0, 2**32))
def test_random_blocks_know_neither_grid_nor_owners(data: st.DataObject, distribution: str, seed: int) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    one = blocks.random(shape, seed=seed, grid=(1,), distribution=distribution).collect()
    grid = data.draw(grids(shape))
    cut = blocks.random(
        shape,
        seed=seed,
        grid=grid,
        owners=data.draw(owners(grid)),
        distribution=distribution,
        processes=blocks.in_one_process(RANKS),
    )
    assert torch.equal(one, cut.collect())


def test_random_numbers_are_those_of_splitmix64() -> None:
    """The first outputs of its author's code from state 1234567, and moments of the two distributions."""
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert splitmix64(1234567, np.arange(5, dtype=np.uint64)).tolist() == wanted
    places = np.arange(200_000, dtype=np.uint64)
    uniform, normal = uniform_at(1, places), normal_at(1, places)
    assert (uniform.min() >= 0, uniform.max() < 1) == (True, True)
    assert abs(uniform.mean() - 0.5) < 4 / math.sqrt(12 * len(places))
    assert abs(normal.mean()) < 4 / math.sqrt(len(places))
    assert abs(normal.var() - 1) < 4 * math.sqrt(2 / len(places))
    assert abs(np.corrcoef(uniform_at(1, places), uniform_at(2, places))[0, 1]) < 4 / math.sqrt(len(places))


@QUICK
@given(cut_arrays(), st.data(), st.integers(8, 100))
def test_no_round_exceeds_its_room(case: Any, data: st.DataObject, room_bytes: int) -> None:
    """Every element is moved once, and no rank sends or receives more than the room in any round."""
    grid = data.draw(grids(case[0].shape))
    moves = overlaps(made(case), grid, [(owner,) for owner in data.draw(owners(grid))])
    assert sum(math.prod(move.shape) for move in moves) == case[0].size
    rounds = rounds_of(moves, room_bytes, 8)
    sent = [Counter[int]() for _ in rounds]
    received = [Counter[int]() for _ in rounds]
    for number, messages in enumerate(rounds):
        for move in messages:
            sent[number][move.sender] += 8 * math.prod(move.shape)
            received[number][move.receiver] += 8 * math.prod(move.shape)
    assert all(max([*out.values(), *into.values()]) <= room_bytes for out, into in zip(sent, received, strict=True))
    total = sum(math.prod(move.shape) for move in moves if move.sender != move.receiver)
    assert sum(out.total() for out in sent) == 8 * total


def test_apply_may_change_shape_and_type() -> None:
    x = blocks.from_array(np.arange(24.0).reshape(6, 4), grid=(3, 2))
    got = x.apply(lambda block: block.sum(1, keepdim=True).to(torch.int64))
    assert (got.shape, got.dtype) == ((6, 2), torch.int64)
    weighted = blocks.apply(torch.maximum, x, x.max(0))
    assert_same(weighted, np.maximum(np.arange(24.0).reshape(6, 4), [20, 21, 22, 23]))


def test_concatenate_and_nan() -> None:
    x = np.arange(12.0).reshape(4, 3)
    cut = blocks.from_array(x, grid=(2, 1))
    assert_same(blocks.concatenate([cut, cut[1:]], 0), np.concatenate([x, x[1:]], 0))
    assert_same(blocks.concatenate([cut, blocks.from_array(x[:, :2], grid=(4, 2))], 1), np.concatenate([x, x[:, :2]], 1))
    x[2, 1] = np.nan
    assert_same(blocks.from_array(x, grid=(2, 3)).max(1), x.max(1))
    assert_same(blocks.from_array(x, grid=(2, 3))[4:], x[4:])


X = blocks.full((6, 4), 1.0, grid=(3, 2))
BAD = {
    "3 equal blocks need dim 0 to be a multiple of 3, and it has 10 elements; use 2 or 5 blocks, or BlockGrid.balanced": (
        lambda: blocks.full((10,), 0, grid=(3,))
    ),
    r"shapes \[6, 4\] and \[5\] do not broadcast: .* equal or 1; add a dim with x\[:, None\]": lambda: X + np.ones(5),
    "the grid cuts an array of shape .5., and this one has shape .6.": lambda: blocks.full(
        (6,), 0, grid=blocks.BlockGrid(sizes=((2, 3),))
    ),
    "position 6 is outside dim 0, which has 6": lambda: X[6],
    "position -7 is outside dim 0": lambda: X[[0, -7]],
    r"an index of 3 dims \(and 0 times": lambda: X[0, 0, 0],
    "index in two steps": lambda: X[:, None][[0, 1], :, 0],
    "blocks need as many owners from 0 to 0": lambda: blocks.full((4,), 0, grid=(2,), owners=[0, 1]),
    r"the max over dims \[0\] of shape \[0, 4\] is over no elements": lambda: X[6:].max(0),
    "unknown kind of shuffle 'pair'; did you mean pairs": lambda: X.shuffle(0, kind="pair"),
    "equally many rows": lambda: blocks.shuffle(X, X[1:], seed=0),
    r"applied function failed at block \[0, 0\]: ZeroDivisionError": lambda: X.apply(lambda block: block + 1 // 0),
    "keep reduced dims with keepdim=True": lambda: X.apply(lambda block: block.sum(0)),
    "torch has no type for numpy's <U1": lambda: blocks.from_array(np.array(["a"]), grid=(1,)),
    "block .0, 9. in a grid": lambda: X.block(0, 9),
    "the sizes .2, 3. sum to 5, and 6 rows are taken": lambda: X.take(range(6), sizes=(2, 3)),
    "room_bytes must hold at least one element": lambda: rounds_of([], 4, 8),
    "shares must be at least 0": lambda: blocks.shared_owners(4, [0, 0]),
    "block tensors are on different processes": (
        lambda: X + blocks.full((6, 4), 1.0, grid=(1,), processes=blocks.in_one_process(2))
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message: str) -> None:
    with pytest.raises(DataError, match=message):
        BAD[message]()


def test_blocks_beyond_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule, the values and the fix, before anything is allocated."""
    message = "needs 131072 GiB on .*, where .* are free; at most .* rows fit; use fewer rows, a smaller dtype, or at least"
    with pytest.raises(DataError, match=message):
        blocks.full((2**45,), 0, grid=(4,))
    x = blocks.full((1000, 8192), 1.0, grid=(10,), processes=blocks.in_one_process(3))
    monkeypatch.setattr(room, "available_bytes", lambda device="cpu": 2**20)
    with pytest.raises(DataError, match=r"collecting .* needs 31.2 MiB .*rank.*1 MiB are free; at most 32 of 1000 rows fit"):
        x.collect()
    with pytest.raises(DataError, match="rechunk to shape"):
        x.rechunk((5,))


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The first example of docs/blocks.md; the second one needs processes."""
    page = (Path(__file__).parents[2] / "docs" / "blocks.md").read_text()
    exec(page.split("```python\n")[1].split("```")[0], {})
    shape, total = capsys.readouterr().out.splitlines()
    assert shape == "(12, 4) ((4, 4, 4), (4,))"
    assert abs(float(total.split()[0])) < 1e-9


def test_owners_by_share() -> None:
    assert blocks.shared_owners(8, [1, 3]) == (0, 0, 1, 1, 1, 1, 1, 1)
    assert blocks.contiguous_owners(5, 2) == (0, 0, 0, 1, 1)
    assert blocks.round_robin_owners(5, 2) == (0, 1, 0, 1, 0)
    assert blocks.BlockGrid.of_blocks((10, 4), (4,)).sizes == ((4, 4, 2), (4,))
    assert blocks.BlockGrid.balanced((10,), (4,)).sizes == ((3, 3, 2, 2),)


def test_rows_and_truth_are_those_of_numpy() -> None:
    array = np.arange(12.0).reshape(4, 3)
    x = blocks.from_array(array, grid=blocks.BlockGrid(sizes=((1, 3), (2, 1))))
    rows = list(x)
    assert len(rows) == 4
    assert all(np.array_equal(row.collect().numpy(), wanted) for row, wanted in zip(rows, array, strict=True))
    assert np.array_equal(np.asarray(x), array)
    assert np.asarray(x, dtype=np.float32).dtype == np.float32
    assert (7.0 in x, 12.5 in x) == (True, False)
    assert bool((x < 12).all())
    assert not (x > 12).any()
    with pytest.raises(DataError, match=r"shape \[4, 3\] is neither true nor false; use x.any\(\) or x.all\(\)"):
        bool(x < 5)
    with pytest.raises(TypeError, match="iteration over a block tensor without dims"):
        iter(x.sum())


def test_an_array_without_dims_is_a_position() -> None:
    array = np.arange(12.0).reshape(4, 3)
    x = blocks.from_array(array, grid=(2, 3))
    assert_same(x[np.array(2)], array[2])
    assert_same(x[torch.tensor(-1), 1:], array[-1, 1:])
    axis: Any = np.int64(1)
    assert_same(x.sum(axis), array.sum(axis))
    with pytest.raises(DataError, match="an index is an int"):
        x[np.array(1.5)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniform_numbers_are_below_one_in_every_type(dtype: Any) -> None:
    """Rounding up to 1 happens to one number in 2^(digits + 1): in bfloat16 to one in 512."""
    drawn = blocks.random((1 << 16,), seed=0, grid=(4,), dtype=dtype).collect()
    assert drawn.min() >= 0
    assert drawn.max() < 1
    if dtype in (torch.float16, torch.bfloat16):
        assert drawn.max() == 1 - torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_half_precision_are_those_of_torch(dtype: Any) -> None:
    """400,000 is more than float16 holds, and 65,536 + 200 is 65,536 in bfloat16."""
    x = blocks.full((100_000, 2), 2.0, grid=(1000, 1), dtype=dtype)
    assert x.sum().dtype == x.mean().dtype == dtype
    assert x.sum().item() == torch.full((100_000, 2), 2.0, dtype=dtype).sum().item()
    assert x[:4].prod().item() == 2.0**8
    assert x.mean().item() == 2.0
    assert torch.equal(x.mean(0).collect(), torch.full((2,), 2.0, dtype=dtype))


def test_integers_divided_by_zero_are_refused_on_every_rank() -> None:
    """One rank has the zero, and all learn of it: none goes on to the next exchange alone."""
    gathered: list[str] = []

    class Group(blocks.Processes):
        def gather(self, value: Any) -> list[Any]:
            gathered.append(value)
            return [value, "", "an integer on rank 2"]

    ranks = Group(ranks=3, rank=0)
    x = blocks.from_array(np.arange(6), grid=(3,), processes=ranks)
    y = blocks.from_array(np.arange(6) + 1, grid=(3,), processes=ranks)
    with pytest.raises(DataError, match=r"cannot divide these integers \(an integer on rank 2\)"):
        x // y
    assert gathered == [""]
    alone = blocks.from_array(np.arange(6), grid=(3,))
    for divide in (operator.floordiv, operator.mod):
        with pytest.raises(DataError, match="cannot divide these integers"):
            divide(alone + 1, alone)
        assert_same(divide(alone + 1, alone + 2), divide(np.arange(6) + 1, np.arange(6) + 2))


def test_the_other_ranks_hear_of_an_array_that_the_source_cannot_send() -> None:
    told: list[Any] = []

    class Group(blocks.Processes):
        def gather(self, value: Any) -> list[Any]:
            told.append(value)
            return [(None, ""), value]

    with pytest.raises(DataError, match="torch has no type for numpy's <U1"):
        blocks.from_array(np.array(["a"]), grid=(1,), processes=Group(ranks=2, rank=1), source=1)
    with pytest.raises(DataError, match="rank 0 is the source and passed no array"):
        blocks.from_array(np.array(["a"]), grid=(1,), processes=Group(ranks=2, rank=1), source=0)
    assert len(told) == 2


@pytest.mark.parametrize("name", [">f8", ">i4", "<i2"])
def test_numbers_in_the_byte_order_of_another_machine(name: str) -> None:
    array = np.arange(6, dtype=name)
    for source in (None, 0):
        got = blocks.from_array(array, grid=(3,), source=source).collect().numpy()
        assert np.array_equal(got, array)
        assert got.dtype.isnative


@pytest.mark.parametrize("shape", [(1, 4), (3, 1), (5, 2), (2, 2), (1, 1)])
def test_shards_that_are_empty_along_one_dim_keep_the_other(shape: tuple[int, int]) -> None:
    """torch 2.13: DTensor's local shapes on a mesh of 4 x 2 are those of torch.chunk, and its collectives count on them."""

    class Square:
        ndim, shape = 2, (4, 2)

        def size(self, dim: int) -> int:
            return self.shape[dim]

    for chosen in ((0, 1), (1, 0)):
        grid = dtensors._chunked(shape, Square(), chosen)  # type: ignore[arg-type]
        for coordinate in np.ndindex(4, 2):
            wanted = torch.empty(shape)
            for dim, index, ranks in zip(chosen, coordinate, Square.shape, strict=True):
                chunks = wanted.chunk(ranks, dim)
                wanted = chunks[index] if index < len(chunks) else wanted.narrow(dim, 0, 0)
            assert dtensors._shard(grid, chosen, coordinate)[1] == tuple(wanted.shape)
