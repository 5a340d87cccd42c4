"""Random arrays, grids, owners and indices for the tests of block tensors, and the bitwise comparison with NumPy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from parsim.data import blocks

RANKS = 4
"""Owners in all tests: of one process, or of a process group of four."""

SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=6)


@st.composite
def pieces(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    """A dim of `size` elements cut at random."""
    inner = draw(st.lists(st.integers(1, size - 1), unique=True, max_size=3)) if size > 1 else []
    edges = [0, *sorted(inner), size]
    return tuple(last - first for first, last in itertools.pairwise(edges))


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> blocks.BlockGrid:
    return blocks.BlockGrid(sizes=tuple(draw(pieces(size)) for size in shape))


@st.composite
def owners(draw: st.DrawFn, grid: blocks.BlockGrid) -> list[int]:
    return draw(st.lists(st.integers(0, RANKS - 1), min_size=len(grid), max_size=len(grid)))


@st.composite
def cut_arrays(
    draw: st.DrawFn, shape: tuple[int, ...] | None = None, dtype: Any = np.float64
) -> tuple[np.ndarray[Any, Any], blocks.BlockGrid, list[int]]:
    """An array of small integers (so that sums are exact in any order), a grid and owners."""
    chosen = draw(SHAPES) if shape is None else shape
    array = draw(hnp.arrays(dtype, chosen, elements=st.integers(-9, 9)))
    grid = draw(grids(chosen))
    return array, grid, draw(owners(grid))


@st.composite
def keys(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """An index of ints, slices, None and `...`, or with one list."""
    key = draw(hnp.basic_indices(shape, allow_newaxis=True, max_dims=5))
    entries = key if isinstance(key, tuple) else (key,)
    if draw(st.booleans()):
        return entries
    dim = draw(st.integers(0, len(shape) - 1))
    size = shape[dim]
    chosen: Any = draw(
        st.one_of(
            st.lists(st.integers(-size, size - 1), min_size=1, max_size=8),
            st.lists(st.booleans(), min_size=size, max_size=size),
        )
    )
    return (*(slice(None),) * dim, chosen)


@st.composite
def broadcast_pairs(draw: st.DrawFn) -> tuple[Any, Any]:
    """Two cut arrays whose shapes broadcast."""
    shapes = draw(hnp.mutually_broadcastable_shapes(num_shapes=2, min_dims=1, max_dims=3, max_side=5)).input_shapes
    return draw(cut_arrays(shapes[0])), draw(cut_arrays(shapes[1]))


def made(case: tuple[Any, Any, Any], processes: blocks.Processes | None = None) -> blocks.BlockTensor:
    array, grid, dealt = case
    return blocks.from_array(array, grid=grid, owners=dealt, processes=processes or blocks.in_one_process(RANKS))


def assert_same(got: blocks.BlockTensor, wanted: Any) -> None:
    """Values, shape and dtype as NumPy's."""
    array, expected = got.collect().numpy(), np.asarray(wanted)
    assert array.shape == expected.shape == got.shape
    assert array.dtype == expected.dtype
    assert np.array_equal(array, expected, equal_nan=True)
