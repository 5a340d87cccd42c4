"""Seconds of single calls of operators, forward and backward, with a rank busy on every core.

Operands are not hot as in a tight loop. Weights and saved arrays come from a pool that the calls take in turns. So each lies
where a training step would have left it, in the last cache or beyond it. The arrays that the operator before would have written
are rewritten right before the call, untimed. The first call of a visit, on other operands, is not kept. A library prepares
kernels per shape and caches some hundreds, and a training step uses the same few again and again. Calls go through the
framework's dispatcher without autograd, whose work is learned from whole components. Attention, and on a GPU batch
normalisation, go through autograd, because autograd chooses their kernels. Rounds visit every launch once, so that a drift of
the machine falls on all of them and is seen.

On a CPU one call is timed at a time by the clock. On a GPU calls are timed by events behind a hold
(`parsim.execute.cuda.driver`), several small ones between two events. The pool is four times as large as the L2 cache,
and the device works for a second before each round, so that its clocks are those of sustained work.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from calibration.measure.operator_shapes import CPU_REACH, Reach, Sizes, gpu_reach, operator_launches
from calibration.operand_pool import CACHE_MULTIPLE, OperandPool, last_cache_bytes
from calibration.rounds.request import CalibrationRequest
from calibration.rounds.turns import CalibrationSection, Entries, paced
from parsim.costs.compute.launches import Launch
from parsim.execute.cuda.driver import DeviceClock, Group, driver_of, timed_groups, warm_gpu
from parsim.execute.processes.speed_probe import SpeedProbe
from parsim.units import MIB

POOL_BYTES = 32 * MIB
KEPT_CALLS = 2
PACED, GPU_PACED = 12, 64
"""Launches between two looks at the pace of the core, or of the GPU: a tenth of a second. A GPU's look takes half of that."""
GPU_SLICES = 6
"""Rounds in which a GPU visits every launch once. Its libraries plan each of some thousand shapes when they first see it. So a
pass takes minutes, and one that a budget cuts off would be lost."""

LARGEST_ARRAYS = 5
"""The pool holds so many of the largest array of any launch (the input of a pooling alone is four)."""
FREE_SHARE = 0.7
"""Share of the memory left on a GPU once the models are there; their optimizers and activations come later."""
CHAINED, CHAINED_BYTES = 8, 4 * MIB
"""So many calls stand between two events where the operands of one are no larger: an event takes about as long as a small
kernel."""

aten: Any = torch.ops.aten

OperatorCall = Callable[[], object]


class Pool:
    """Arrays of one dtype for the calls of one visit: an `OperandPool` filled with numbers between -1 and 1."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int, size_bytes: int = POOL_BYTES) -> None:
        self.dtype, self.device = dtype, device
        self._operands = OperandPool(size_bytes, device)
        self.written: list[Tensor] = []
        whole = self._operands.whole(dtype)
        if device.type == "cuda":
            whole.uniform_(-1, 1)
        else:
            generator = torch.Generator().manual_seed(seed)
            whole.copy_(2 * torch.rand(len(whole), generator=generator, dtype=torch.float32) - 1)

    @property
    def taken_bytes(self) -> int:
        return self._operands.taken_bytes

    def take(self, *shape: int) -> Tensor:
        """Not touched since the pool was last here."""
        return self._operands.take(shape, self.dtype)

    def fresh(self, *shape: int) -> Tensor:
        """Just written, as the output of the operator before."""
        found = self.take(*shape)
        self.written.append(found)
        return found

    def rewriting(self) -> Callable[[], None]:
        """Rewrites the arrays that were taken as fresh since the last call."""
        written, self.written = self.written, []

        def rewrite() -> None:
            for tensor in written:
                tensor.neg_()

        return rewrite

    def numbers(self, count: int, below: int) -> Tensor:
        """Integers int64 [count] spread over 0 .. below - 1."""
        return (torch.arange(count, device=self.device) * 7919) % below


# --- one visit of a launch: take the operands, return the call --------------------------------------------------------


def _linear(s: Sizes, phase: str, pool: Pool) -> OperatorCall:
    r, c, d = s["rows"], s["columns"], s["depth"]
    if phase == "forward":
        given, weight, bias = pool.fresh(r, d), pool.take(c, d), pool.take(c)
        return lambda: torch.addmm(bias, given, weight.t())
    if phase == "backward_input":
        gradient, weight = pool.fresh(r, d), pool.take(d, c)
        return lambda: torch.mm(gradient, weight)
    gradient, given = pool.fresh(d, r), pool.take(d, c)
    return lambda: torch.mm(gradient.t(), given)


def _batched(s: Sizes, phase: str, pool: Pool) -> OperatorCall:
    left = pool.fresh(s["problems"], s["rows"], s["depth"])
    right = pool.take(s["problems"], s["depth"], s["columns"])
    return lambda: torch.bmm(left, right)


def _convolution(s: Sizes, phase: str, pool: Pool) -> OperatorCall:
    side, height = math.isqrt(s["taps"]), math.isqrt(s["pixels_in"])
    stride = max(1, height // max(1, math.isqrt(s["pixels_out"])))
    padding = 0 if stride == side > 3 else side // 2
    groups = s["groups"]
    weight = pool.take(groups * s["outputs"], s["inputs"], side, side)
    image = (s["images"], groups * s["inputs"], height, height)
    if phase == "forward":
        given = pool.fresh(*image)
        return lambda: torch.conv2d(given, weight, None, stride, padding, 1, groups)
    given = pool.take(*image)
    with torch.no_grad():
        gradient = torch.conv2d(given[:1], weight, None, stride, padding, 1, groups)
    gradient = pool.fresh(s["images"], *gradient.shape[1:])
    mask = [phase == "backward_input", phase == "backward_weight", False]
    pair, ones, zeros = [stride, stride], [1, 1], [0, 0]
    return lambda: aten.convolution_backward(
        gradient, given, weight, None, pair, [padding, padding], ones, False, zeros, groups, mask
    )


def _leaf(tensor: Tensor) -> Tensor:
    """An array of the pool as a leaf of autograd. By `.data`, since arrays of the pool share a counter of versions: rewriting
    one would make autograd refuse another that it saved."""
    return tensor.data.requires_grad_()


def _under_autograd(
    function: Callable[[], Tensor], leaves: Sequence[Tensor], gradient: Callable[[], Tensor] | None
) -> OperatorCall:
    """The call of a forward (no gradient), or of the backward of one that has run; again and again."""

    def forward() -> Tensor:
        with torch.enable_grad():
            return function()

    if gradient is None:
        return forward
    output, given = forward(), gradient()
    return lambda: torch.autograd.grad(output, leaves, given, retain_graph=True)


def _attention(function: str) -> Callable[[Sizes, str, Pool], OperatorCall]:
    causal = function == "causal"

    def visit(s: Sizes, phase: str, pool: Pool) -> OperatorCall:
        heads = math.gcd(s["problems"], 4)
        batch, positions, depth = s["problems"] // heads, s["queries"], s["depth"]
        together = (pool.fresh if phase == "forward" else pool.take)(batch, positions, 3, heads, depth)
        query, key, value = (_leaf(part) for part in together.permute(2, 0, 3, 1, 4))
        return _under_autograd(
            lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal),
            (query, key, value),
            None if phase == "forward" else lambda: pool.fresh(batch, positions, heads, depth).transpose(1, 2),
        )

    return visit


def _embedding(s: Sizes, phase: str, pool: Pool) -> OperatorCall:
    table_rows = max(1, s["rows"] // 4)
    numbers = pool.numbers(s["rows"], table_rows)
    if phase == "forward":
        table = pool.take(table_rows, s["width"])
        return lambda: aten.embedding(table, numbers)
    gradient = pool.fresh(s["rows"], s["width"])
    return lambda: aten.embedding_dense_backward(gradient, numbers, table_rows, -1, False)


def _elementwise(s: Sizes, phase: str, pool: Pool) -> OperatorCall:
    one, other = pool.fresh(s["elements"]), pool.take(s["elements"])
    return lambda: torch.add(one, other)


def _copy(s: Sizes, phase: str, pool: Pool) -> OperatorCall:
    given = pool.fresh(s["elements"])
    return lambda: given.clone()


def _fill(s: Sizes, phase: str, pool: Pool) -> OperatorCall:
    return lambda: torch.zeros(s["elements"], dtype=pool.dtype, device=pool.device)


def _random(s: Sizes, phase: str, pool: Pool) -> OperatorCall:
    given = pool.take(s["elements"]).clone()
    return lambda: given.bernoulli_(0.9)


def _accumulate(s: Sizes, phase: str, pool: Pool) -> OperatorCall:
    total, more = torch.zeros_like(pool.take(s["elements"])), pool.fresh(s["elements"])
    return lambda: total.add_(more)


def _bias_gradient(s: Sizes, phase: str, pool: Pool) -> OperatorCall:
    gradient = pool.fresh(s["elements"] // s["width"], s["width"])
    return lambda: gradient.sum(0, keepdim=True)


def _pointwise(forward: Callable[[Tensor], object], backward: Callable[[Tensor, Tensor], object]) -> Any:
    def visit(s: Sizes, phase: str, pool: Pool) -> OperatorCall:
        if phase == "forward":
            given = pool.fresh(s["elements"])
            return lambda: forward(given)
        gradient, saved = pool.fresh(s["elements"]), pool.take(s["elements"])
        return lambda: backward(gradient, saved)

    return visit


def _layer_norm(s: Sizes, phase: str, pool: Pool) -> OperatorCall:
    width, rows = s["width"], s["elements"] // s["width"]
    weight, bias = pool.take(width), pool.take(width)
    if phase == "forward":
        given = pool.fresh(rows, width)
        return lambda: aten.native_layer_norm(given, [width], weight, bias, 1e-5)
    gradient, given = pool.fresh(rows, width), pool.take(rows, width)
    _, mean, scale = aten.native_layer_norm(given, [width], weight, bias, 1e-5)
    mask = [True, True, True]
    return lambda: aten.native_layer_norm_backward(gradient, given, [width], mean, scale, weight, bias, mask)


def _batch_norm(s: Sizes, phase: str, pool: Pool) -> OperatorCall:
    channels = s["width"]
    each = s["elements"] // channels
    images = math.gcd(each, 16)
    shape = (images, channels, each // images, 1)
    weight, bias, running, variance = (pool.take(channels).abs() for _ in range(4))
    if pool.device.type == "cuda":  # the public function chooses between cuDNN's kernels and torch's own
        given = (pool.fresh if phase == "forward" else pool.take)(*shape)
        leaves = [_leaf(part) for part in (given, weight, bias)]
        return _under_autograd(
            lambda: torch.nn.functional.batch_norm(leaves[0], running, variance, leaves[1], leaves[2], True, 0.1, 1e-5),
            leaves,
            None if phase == "forward" else lambda: pool.fresh(*shape),
        )
    if phase == "forward":
        given = pool.fresh(*shape)
        return lambda: aten.native_batch_norm(given, weight, bias, running, variance, True, 0.1, 1e-5)
    gradient, given = pool.fresh(*shape), pool.take(*shape)
    _, mean, scale = aten.native_batch_norm(given, weight, bias, running, variance, True, 0.1, 1e-5)
    backward = aten.native_batch_norm_backward
    return lambda: backward(gradient, given, weight, running, variance, mean, scale, True, 1e-5, [True, True, True])


def _pool2d(s: Sizes, phase: str, pool: Pool) -> OperatorCall:
    planes = max(1, s["elements"] // 64)
    side = 8 if s["elements"] >= 64 else 2
    two = [2, 2]
    given = (pool.fresh if phase == "forward" else pool.take)(1, planes, 2 * side, 2 * side)
    if phase == "forward":
        return lambda: aten.max_pool2d_with_indices(given, two, two)
    output, places = aten.max_pool2d_with_indices(given, two, two)
    gradient = pool.fresh(*output.shape)
    return lambda: aten.max_pool2d_with_indices_backward(gradient, given, two, two, [0, 0], [1, 1], False, places)


def _mean(s: Sizes, phase: str, pool: Pool) -> OperatorCall:
    given = pool.fresh(max(1, s["elements"] // 16), min(16, s["elements"]))
    if phase == "forward":
        return lambda: given.mean(-1)
    gradient = given[:, :1]
    return lambda: gradient.expand(given.shape).div(16)


def _softmax(s: Sizes, phase: str, pool: Pool) -> OperatorCall:
    rows, width = s["elements"] // s["width"], s["width"]
    given = pool.fresh(rows, width)
    if phase == "forward":
        return lambda: aten._log_softmax(given, -1, False)
    output = pool.take(rows, width)
    return lambda: aten._log_softmax_backward_data(given, output, -1, given.dtype)


def _pick(s: Sizes, phase: str, pool: Pool) -> OperatorCall:
    rows, width = s["elements"] // s["width"], s["width"]
    target = pool.numbers(rows, width)
    given = pool.fresh(rows, width)
    if phase == "forward":
        return lambda: aten.nll_loss_forward(given, target, None, 2, -100)
    one, count = pool.take(1).view(()), torch.tensor(float(rows), dtype=pool.dtype, device=pool.device)
    return lambda: aten.nll_loss_backward(one, given, target, None, 2, -100, count)


VISITS: dict[str, Callable[[Sizes, str, Pool], OperatorCall]] = {
    "linear": _linear,
    "batched": _batched,
    **dict.fromkeys(("pointwise", "3x3", "grouped", "other"), _convolution),
    "plain": _attention("plain"),
    "causal": _attention("causal"),
    "gather": _embedding,
    "elementwise": _elementwise,
    "copy": _copy,
    "relu": _pointwise(torch.relu, lambda gradient, saved: aten.threshold_backward(gradient, saved, 0)),
    "gelu": _pointwise(torch.nn.functional.gelu, lambda gradient, saved: aten.gelu_backward(gradient, saved)),
    "gelu_tanh": _pointwise(
        lambda given: torch.nn.functional.gelu(given, approximate="tanh"),
        lambda gradient, saved: aten.gelu_backward(gradient, saved, approximate="tanh"),
    ),
    "transcendental": _pointwise(torch.tanh, lambda gradient, saved: aten.tanh_backward(gradient, saved)),
    "fill": _fill,
    "random": _random,
    "layer_norm": _layer_norm,
    "batch_norm": _batch_norm,
    "pool": _pool2d,
    "mean": _mean,
    "softmax": _softmax,
    "pick": _pick,
    "accumulate": _accumulate,
    "bias_gradient": _bias_gradient,
}
"""By function: takes the operands of one visit from the pool and returns the call to be timed."""


# --- rounds -----------------------------------------------------------------------------------------------------------


def operator_section(
    group: dist.ProcessGroup | None,
    request: CalibrationRequest,
    dtype: torch.dtype,
    device: torch.device,
    probe: SpeedProbe | None,
) -> CalibrationSection | None:
    """Every launch of `operator_launches` once a round, on a GPU a sixth of them; None where the request leaves operators no
    time. group: of the ranks that compute at once; None on the others, which wait.

    Entries of `operators`: kind, function, phase, sizes, and seconds of the calls that were kept; on a GPU also what
    `by_events` adds, or no seconds and why a launch was `refused`.
    """
    if request.operator_budget_s <= 0:
        return None
    reach = reach_on(device, dtype)
    launches = operator_launches(quick=request.quick, reach=reach)
    seed = request.seed + (0 if group is None else dist.get_rank())
    kept = None if device.type == "cuda" else Pool(dtype, device, seed)
    driver = driver_of(device)
    slices, block = (1, PACED) if driver is None else (GPU_SLICES, GPU_PACED)

    def measure(number: int) -> Entries:
        dist.barrier()
        if group is None:
            return {}
        dist.barrier(group=group)
        pool = kept or Pool(dtype, device, seed, pool_bytes(reach, dtype, device))
        warm_gpu(device, dtype)
        chosen = launches[number % slices :: slices]
        blocks = [partial(_visits, chosen[first : first + block], pool, driver) for first in range(0, len(chosen), block)]
        with torch.no_grad():
            found = list(paced(blocks, probe))
        if kept is None:
            del pool, blocks
            torch.cuda.empty_cache()
        return {"operators": found}

    return CalibrationSection(
        name="operators",
        budget_s=request.budgets_s["operators"],
        min_rounds=request.min_rounds if driver is None else slices,  # a visit keeps two calls
        max_rounds=slices * request.max_rounds,
        measure=measure,
    )


def reach_on(device: torch.device, dtype: torch.dtype) -> Reach:
    """How large the launches are on this device: of a GPU by the memory that is free on the fullest of all ranks. A collective
    call on GPUs, made by every rank."""
    if device.type != "cuda":
        return CPU_REACH
    torch.cuda.empty_cache()
    free = torch.tensor(torch.cuda.mem_get_info(device)[0], device=device)
    dist.all_reduce(free, op=dist.ReduceOp.MIN)
    return gpu_reach(int(FREE_SHARE * int(free)), dtype.itemsize, fused_attention=dtype is not torch.float64)


def pool_bytes(reach: Reach, dtype: torch.dtype, device: torch.device) -> int:
    """Room for the operands of the largest launch, and more than the L2 cache keeps."""
    cache_bytes = last_cache_bytes(device)
    return max(POOL_BYTES, CACHE_MULTIPLE * cache_bytes, LARGEST_ARRAYS * reach.max_elements * dtype.itemsize)


def _visits(launches: Sequence[Launch], pool: Pool, driver: DeviceClock | None) -> list[dict[str, Any]]:
    return [_visit(launch, pool, driver) for launch in launches]


def _visit(launch: Launch, pool: Pool, driver: DeviceClock | None) -> dict[str, Any]:
    named = {"kind": launch.kind, "function": launch.function, "phase": launch.phase}
    sizes = {name: int(size) for name, size in launch.sizes}
    make = partial(VISITS[launch.function], sizes, launch.phase, pool)
    if driver is None:
        _timed(make, pool)
        return {**named, "sizes": sizes, "seconds": [_timed(make, pool) for _ in range(KEPT_CALLS)]}
    try:
        return {**named, "sizes": sizes, **by_events(make, pool, driver)}
    except RuntimeError as error:  # of some thousand shapes a library may refuse one, or memory may be short
        driver.synchronize()  # fails again where the device is lost
        pool.written.clear()
        said = str(error).strip() or type(error).__name__
        return {**named, "sizes": sizes, "seconds": [], "refused": said.splitlines()[0]}


def _timed(make: Callable[[], OperatorCall], pool: Pool) -> float:
    """One call by the clock, its operands taken and its input rewritten before the clock starts."""
    call = make()
    pool.rewriting()()
    begin_s = time.perf_counter()
    kept = call()
    seconds = time.perf_counter() - begin_s
    del kept
    return seconds


def by_events(make: Callable[[], OperatorCall], pool: Pool, driver: DeviceClock) -> dict[str, Any]:
    """Seconds of the device per call, and of the host to queue one (`issue_s`), after one call that is not kept.

    Of small launches several calls, on operands of their own, stand between two events.
    """
    before_bytes = pool.taken_bytes
    call = make()
    pool.rewriting()()
    call()
    chained = CHAINED if pool.taken_bytes - before_bytes <= CHAINED_BYTES else 1
    groups = []
    for _ in range(KEPT_CALLS):
        calls = [make() for _ in range(chained)]
        groups.append(Group(calls, before=pool.rewriting()))
    found = timed_groups(driver, groups)
    return {
        "seconds": [seconds / chained for seconds in found.seconds],
        "issue_s": statistics.median(found.issue_s) / chained,
        "hidden": found.hidden,
    }
