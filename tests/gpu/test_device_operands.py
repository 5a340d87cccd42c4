"""Operand pools, products and copies: alignment, memory beyond the cache, right results."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calibration.operand_pool import (
    CACHE_MULTIPLE,
    MAX_SETS,
    OperandPool,
    fill_random,
    operand_sets,
    set_count,
)
from parsim.errors import ExecutionError
from tools.gpu.copies import measure_copy
from tools.gpu.device import MeasuredDevice, UnsupportedError, cpu_device
from tools.gpu.products import (
    PRECISIONS,
    TOLERANCES,
    Product,
    matrix_precision,
    measure_product,
    relative_error,
    transformer_products,
)

CPU = torch.device("cpu")


def small_device() -> MeasuredDevice:
    """A CPU with a small cache and little memory, so that pools are small."""
    return replace(cpu_device(), cache_bytes=1 << 20, memory_bytes=1 << 28)


@given(set_bytes=st.integers(256, 1 << 24), cache=st.integers(1 << 16, 1 << 24), limit=st.integers(1 << 20, 1 << 30))
def test_the_sets_are_several_times_the_cache_or_as_many_as_may_be(set_bytes: int, cache: int, limit: int) -> None:
    if limit < 2 * set_bytes:
        with pytest.raises(ExecutionError, match="do not fit"):
            set_count(set_bytes, cache, limit)
        return
    count = set_count(set_bytes, cache, limit)
    assert 2 <= count <= MAX_SETS
    assert count * set_bytes <= limit
    assert count * set_bytes >= CACHE_MULTIPLE * cache or count == MAX_SETS or (count + 1) * set_bytes > limit


@given(sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=4))
def test_every_operand_is_aligned_and_none_overlap(sizes: list[int]) -> None:
    operands = operand_sets(sizes, cache_bytes=1 << 14, limit_bytes=1 << 20, device=CPU)
    spans = []
    for _ in range(operands.sets):
        for size in sizes:
            operand = operands.pool.take((size,), torch.uint8)
            assert operand.data_ptr() % 256 == 0
            spans.append((operand.data_ptr(), operand.data_ptr() + size))
    spans.sort()
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert operands.beyond_cache == (operands.sets * operands.set_bytes >= CACHE_MULTIPLE * (1 << 14))
    assert operands.pool.take((sizes[0],), torch.uint8).data_ptr() == spans[0][0], "the first comes round after the last"


def test_an_operand_larger_than_its_pool_is_refused() -> None:
    pool = OperandPool(1024, CPU)
    with pytest.raises(ExecutionError, match="operand of 2048 bytes does not fit into a pool of 1024"):
        pool.take((512,), torch.float32)


def test_random_operands_are_no_zeros_in_any_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    for precision in PRECISIONS.values():
        tensor = torch.zeros(4096, dtype=precision.operand)
        fill_random(tensor, generator)
        values = tensor.to(torch.float64)
        assert abs(float(values.mean())) < 0.1
        assert float(values.std()) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_a_product_is_right_and_has_a_rate(name: str) -> None:
    row = measure_product(small_device(), Product(rows=96, columns=64, depth=128), PRECISIONS[name], least_s=0.005)
    assert row["flop"] == 2 * 96 * 64 * 128
    assert row["flop_per_s"] == pytest.approx(row["flop"] / row["median_s"])
    assert row["relative_error"] < TOLERANCES[name]
    assert row["beyond_cache"]


def test_a_wrong_product_is_found() -> None:
    left, transposed = torch.randn(70, 40), torch.randn(50, 40)
    right = left @ transposed.t()
    assert relative_error(left, transposed, right) < TOLERANCES["fp32"]
    wrong = right.clone()
    wrong[3, 4] += 10.0
    assert relative_error(left, transposed, wrong) > TOLERANCES["fp32"]
    rounded = left.to(torch.float16).to(torch.float32) @ transposed.to(torch.float16).to(torch.float32).t()
    assert relative_error(left, transposed, rounded) > TOLERANCES["fp32"]  # as tf32 would be, which has as many bits


def test_a_wrong_product_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOLERANCES, "bf16", 1e-9)
    with pytest.raises(ExecutionError, match="its time says nothing"):
        measure_product(small_device(), Product(rows=32, columns=32, depth=32), PRECISIONS["bf16"], least_s=0.001)


@pytest.mark.parametrize("name", ["tf32", "fp8"])
def test_precisions_of_gpus_are_skipped_elsewhere(name: str) -> None:
    with pytest.raises(UnsupportedError, match="need CUDA"):
        measure_product(small_device(), Product(rows=32, columns=32, depth=32), PRECISIONS[name], least_s=0.001)


def test_the_precision_of_products_is_as_it_was_afterwards() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    with matrix_precision(replace(PRECISIONS["tf32"])):
        assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_a_transformer_block_has_the_flop_of_its_layers() -> None:
    tokens, hidden = 512, 64
    block = [product for product in transformer_products(tokens, hidden, 1000) if product.origin in BLOCK]
    assert sum(product.flop for product in block) == 2 * tokens * 12 * hidden**2


BLOCK = ("qkv", "projection", "widen", "narrow")


def test_a_copy_counts_bytes_read_and_written() -> None:
    row = measure_copy(small_device(), "on_device", 1 << 16, least_s=0.002)
    assert row["bytes_per_s"] == pytest.approx(2 * (1 << 16) / row["median_s"])
    assert row["sets"] >= 2
    assert row["beyond_cache"]
    with pytest.raises(UnsupportedError, match="device of its own"):
        measure_copy(small_device(), "to_device", 1 << 16, least_s=0.002)
