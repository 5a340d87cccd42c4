"""Matrix products per precision: squares to 8192, and the shapes of transformers.

fp32   IEEE single precision        tf32   fp32 arrays, products of 10-bit mantissas
bf16, fp16                          fp8    e4m3 operands, bf16 result (`torch._scaled_mm`)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from calibration.operand_pool import fill_random, operand_sets
from parsim.errors import ExecutionError
from parsim.execute.cuda.driver import QueuedCall
from parsim.execute.numerics import TF32
from tools.gpu.device import MeasuredDevice, UnsupportedError
from tools.gpu.timing import time_calls

POOL_SHARE = 0.25
"""Of the device's memory that rotating operands may take."""

SIDES = (256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductPrecision:
    """Attributes: operand, result: types of the arrays. tf32: whether products of fp32 arrays may use it."""

    name: str
    operand: torch.dtype
    result: torch.dtype
    tf32: bool = False


PRECISIONS = {
    precision.name: precision
    for precision in (
        ProductPrecision(name="fp32", operand=torch.float32, result=torch.float32),
        ProductPrecision(name="tf32", operand=torch.float32, result=torch.float32, tf32=True),
        ProductPrecision(name="bf16", operand=torch.bfloat16, result=torch.bfloat16),
        ProductPrecision(name="fp16", operand=torch.float16, result=torch.float16),
        ProductPrecision(name="fp8", operand=torch.float8_e4m3fn, result=torch.bfloat16),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """[rows, depth] times [depth, columns]; `origin` says which model asks for the shape."""

    rows: int
    columns: int
    depth: int
    origin: str = "square"

    @property
    def flop(self) -> int:
        return 2 * self.rows * self.columns * self.depth

    def array_bytes(self, precision: ProductPrecision) -> tuple[int, int, int]:
        """Of both operands and the result."""
        operand, result = precision.operand.itemsize, precision.result.itemsize
        return self.rows * self.depth * operand, self.depth * self.columns * operand, self.rows * self.columns * result

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.depth}"


def squares(sides: tuple[int, ...]) -> tuple[Product, ...]:
    return tuple(Product(rows=side, columns=side, depth=side) for side in sides)


def transformer_products(tokens: int, hidden: int, vocab: int) -> tuple[Product, ...]:
    """The linear layers of one transformer block, the output matrix, and the backward of the wide layer."""
    return (
        Product(rows=tokens, columns=3 * hidden, depth=hidden, origin="qkv"),
        Product(rows=tokens, columns=hidden, depth=hidden, origin="projection"),
        Product(rows=tokens, columns=4 * hidden, depth=hidden, origin="widen"),
        Product(rows=tokens, columns=hidden, depth=4 * hidden, origin="narrow"),
        Product(rows=4 * hidden, columns=hidden, depth=tokens, origin="gradient of narrow"),
        Product(rows=tokens, columns=vocab, depth=hidden, origin="vocabulary"),
    )


@contextlib.contextmanager
def matrix_precision(precision: ProductPrecision) -> Iterator[None]:
    """Whether fp32 products may use tf32, while it is open; as it was afterwards."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision == TF32  # reading the older setting fails where somebody has used the newer
    matmul.allow_tf32 = precision.tf32
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def measure_product(
    device: MeasuredDevice, product: Product, precision: ProductPrecision, *, least_s: float, seed: int = 0
) -> dict[str, Any]:
    """The shape, flop and bytes, the timing, flop_per_s, and the largest relative error against float64 on a part, of one
    product on random operands from beyond the cache.

    Raises UnsupportedError for a precision that this device cannot multiply in, ExecutionError for a result that is wrong.
    """
    if precision.name in ("tf32", "fp8") and device.device.type != "cuda":
        raise UnsupportedError(f"{precision.name} products need CUDA")
    sizes = product.array_bytes(precision)
    operands = operand_sets(
        sizes, cache_bytes=device.cache_bytes, limit_bytes=int(POOL_SHARE * device.memory_bytes), device=device.device
    )
    take = operands.pool.take
    generator = torch.Generator(device.device).manual_seed(seed)
    calls: list[QueuedCall] = []
    for number in range(operands.sets):
        left = take((product.rows, product.depth), precision.operand)
        # fp8 kernels take the second operand by columns
        transposed = take((product.columns, product.depth), precision.operand)
        result = take((product.rows, product.columns), precision.result)
        fill_random(left, generator)
        fill_random(transposed, generator)
        calls.append(_call(precision, left, transposed.t(), result))
        if number == 0:
            first = left, transposed, result
    with matrix_precision(precision), torch.no_grad():
        calls[0]()
        error = relative_error(*first)
        if not error < TOLERANCES[precision.name]:
            raise ExecutionError(
                f"the {precision.name} product {product} is off by {error:.2g} of its norm, more than "
                f"{TOLERANCES[precision.name]:.2g}; its time says nothing"
            )
        timing = time_calls(device.clock, calls, least_s=least_s)
    return {
        "rows": product.rows,
        "columns": product.columns,
        "depth": product.depth,
        "origin": product.origin,
        "precision": precision.name,
        "flop": product.flop,
        "bytes": sum(sizes),
        "sets": operands.sets,
        "beyond_cache": operands.beyond_cache,
        "relative_error": error,
        "flop_per_s": product.flop / timing.median_s,
        **timing.to_dict(),
    }


TOLERANCES = {"fp32": 1e-4, "tf32": 3e-3, "bf16": 3e-2, "fp16": 1e-2, "fp8": 1e-1}
"""Of the norm of the difference to float64, over the norm of the result."""

CHECKED_ROWS = 64


def relative_error(left: torch.Tensor, transposed: torch.Tensor, result: torch.Tensor) -> float:
    """|result - exact| / |exact| over the first rows and columns, in float64."""
    rows, columns = min(CHECKED_ROWS, len(left)), min(CHECKED_ROWS, len(transposed))
    exact = left[:rows].to(torch.float64) @ transposed[:columns].to(torch.float64).t()
    difference = result[:rows, :columns].to(torch.float64) - exact
    return float(difference.norm() / exact.norm())


def _call(precision: ProductPrecision, left: torch.Tensor, right: torch.Tensor, result: torch.Tensor) -> QueuedCall:
    if precision.name == "fp8":
        one = torch.ones((), device=left.device)
        scaled: Any = torch._scaled_mm
        return partial(scaled, left, right, scale_a=one, scale_b=one, out_dtype=precision.result, out=result)
    return partial(torch.mm, left, right, out=result)
