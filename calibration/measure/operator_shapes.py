"""Which operators are measured: launches spread over the shapes that models ask of one device.

Sizes are drawn evenly in their logarithms from a Halton sequence, so every run measures the same shapes. Widths are those that
networks have (powers of two and halfway between), but no model's own shapes are sought. The range of sizes depends on the
device (`Reach`). On a CPU core a launch takes a few milliseconds at most. On a GPU it may be as large as those of GPT with
12288 channels over 8192 tokens, or of ResNet-50 over 256 images. The memory of the device limits it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from scipy.stats.qmc import Halton

from parsim.costs.compute.launches import ELEMENTWISE, Launch, convolution_family

QUICK_SHARE = 0.4

CONVOLUTIONS = ((3, 1, 0.48), (3, 2, 0.15), (1, 1, 0.13), (1, 2, 0.1), (4, 4, 0.05), (8, 8, 0.03), (5, 1, 0.03), (7, 2, 0.03))
"""Side of the filter, stride, share of the shapes."""

SIDES = (1, 2, 4, 7, 8, 14, 16, 28, 32, 56)
POSITIONS = (16, 32, 49, 50, 64, 65, 96, 128, 192, 197, 256, 384, 512)
"""Output pixels along one side, and lengths of sequences, that networks have (with and without a class token)."""

GPU_CONVOLUTIONS = (
    *((3, 1, 0.4), (3, 2, 0.1), (1, 1, 0.2), (1, 2, 0.1), (4, 4, 0.03), (8, 8, 0.01)),
    *((14, 14, 0.03), (16, 16, 0.03), (5, 1, 0.02), (7, 2, 0.08)),
)
GPU_SIDES = (*SIDES, 112, 128)
GPU_POSITIONS = (*POSITIONS, 577, 1024, 2048, 4096, 8192)

GROUPED_SHARE = 0.1
PRODUCT_PHASES = ("forward", "backward_input", "backward_weight")
BOTH = ("forward", "backward")

MEMORY_BOUND = {
    ELEMENTWISE: BOTH,
    "copy": BOTH,
    "relu": BOTH,
    "gelu": BOTH,
    "gelu_tanh": BOTH,
    "transcendental": BOTH,
    "fill": ("forward",),
    "random": ("forward",),
    "layer_norm": BOTH,
    "batch_norm": BOTH,
    "pool": BOTH,
    "mean": BOTH,
    "softmax": BOTH,
    "pick": BOTH,
    "accumulate": ("backward",),
    "bias_gradient": ("backward",),
}
"""Phases measured of each function; all but the first six have rows of some width."""

WIDE = ("layer_norm", "batch_norm", "softmax", "pick", "bias_gradient")

COUNTS = {"linear": 110, "batched": 30, "convolution": 150, "attention": 36, "embedding": 14, "memory_bound": 16, "wide": 28}
"""Shapes per function (of memory-bound ones per function and phase)."""

UNALIGNED_LEAST = 256
"""Outputs of a layer from which rows that are not aligned matter."""

QUICK_LEAST = 10
"""Shapes of a surface in a quick calibration, where there are so many."""

Sizes = dict[str, int]
Powers = tuple[int, int]
"""Powers of 2: the least and the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How far the sizes of the launches reach on one kind of device. The defaults are those of a CPU core.

    Attributes:
        max_flop: of one launch. max_elements: of one array. scores_stored: an attention keeps the scores of all pairs, as
            kernels do that are not fused.
        unaligned_every: of so many linear layers one also has an output whose rows are not aligned, as over a vocabulary, and
            the gradient of weights has their widths; 0: nothing of both.
    """

    max_flop: float = 3e8
    max_elements: int = 2**21
    linear_rows: Powers = (0, 12)
    linear_widths: Powers = (3, 12)
    unaligned_every: int = 0
    batched_problems: Powers = (1, 8)
    batched_sides: Powers = (3, 9)
    images: Powers = (1, 6)
    channels: Powers = (3, 8)
    filters: tuple[tuple[int, int, float], ...] = CONVOLUTIONS
    pixel_sides: tuple[int, ...] = SIDES
    attention_problems: Powers = (0, 6)
    head_widths: Powers = (4, 7)
    positions: tuple[int, ...] = POSITIONS
    scores_stored: bool = True
    embedding_rows: Powers = (3, 12)
    embedding_widths: Powers = (4, 10)
    flat: Powers = (0, 19)
    row_counts: Powers = (2, 14)
    row_widths: Powers = (3, 10)


CPU_REACH = Reach()
GPU_MAX_FLOP = 1e13
"""A product of 8192 x 12288 by 12288 x 49152: 0.2 s at 50 Tflop/s."""
GPU_MOST_ELEMENTS = 2**30
ARRAYS_PER_LAUNCH = 12
"""Arrays of the largest size that measuring one launch holds: the pool, what it makes, and what its backward saved."""


def gpu_reach(free_bytes: int, element_bytes: int, *, fused_attention: bool = True) -> Reach:
    """Sizes that models reach on a GPU with so much memory left; arrays of a power of two, so that equal GPUs measure equal
    shapes."""
    most = max(CPU_REACH.max_elements, free_bytes // (ARRAYS_PER_LAUNCH * element_bytes))
    return Reach(
        max_flop=GPU_MAX_FLOP,
        max_elements=min(GPU_MOST_ELEMENTS, 1 << (most.bit_length() - 1)),
        linear_rows=(0, 16),
        linear_widths=(3, 16),
        unaligned_every=4,
        batched_problems=(1, 12),
        batched_sides=(3, 12),
        images=(0, 9),
        channels=(3, 11),
        filters=GPU_CONVOLUTIONS,
        pixel_sides=GPU_SIDES,
        attention_problems=(0, 12),
        head_widths=(4, 7),
        positions=GPU_POSITIONS,
        scores_stored=not fused_attention,
        embedding_rows=(3, 17),
        embedding_widths=(4, 14),
        flat=(0, 28),
        row_counts=(2, 20),
        row_widths=(3, 16),
    )


def operator_launches(*, quick: bool, reach: Reach = CPU_REACH) -> tuple[Launch, ...]:
    """Every launch to measure, the same for every run; quick: fewer, but enough to fit every surface."""
    everything = tuple(dict.fromkeys(_all(reach, quick=False)))
    if not quick:
        return everything
    found = dict.fromkeys(_all(reach, quick=True))
    count = Counter(_surface_of(launch) for launch in found)
    for launch in everything:
        if launch not in found and count[_surface_of(launch)] < QUICK_LEAST:
            found[launch] = None
            count[_surface_of(launch)] += 1
    return tuple(found)


def _all(reach: Reach, *, quick: bool) -> Iterator[Launch]:
    yield from _products(reach, quick)
    yield from _convolutions(reach, quick)
    yield from _attentions(reach, quick)
    yield from _embeddings(reach, quick)
    yield from _memory_bound(reach, quick)


def _surface_of(launch: Launch) -> tuple[str, str, str]:
    return launch.kind, launch.function, launch.phase


def _products(reach: Reach, quick: bool) -> Iterator[Launch]:
    def linear(u: Sequence[float]) -> Sizes:
        return {
            "problems": 1,
            "rows": _any(u[0], *reach.linear_rows),
            "columns": _usual(u[1], *reach.linear_widths),
            "depth": _usual(u[2], *reach.linear_widths),
        }

    def batched(u: Sequence[float]) -> Sizes:
        names = ("rows", "columns", "depth")
        sides = {name: _usual(value, *reach.batched_sides) for name, value in zip(names, u[1:], strict=True)}
        return {"problems": _any(u[0], *reach.batched_problems), **sides}

    def affordable(s: Sizes) -> bool:
        r, c, d, p = s["rows"], s["columns"], s["depth"], s["problems"]
        return 2 * p * r * c * d <= reach.max_flop and p * max(r * c, r * d, c * d) <= reach.max_elements

    for number, sizes in enumerate(_drawn(linear, 3, affordable, _count("linear", quick))):
        if not reach.unaligned_every:
            yield from (_launch("matmul", "linear", phase, sizes) for phase in PRODUCT_PHASES)
            continue
        yield from _linear_layer(sizes)
        unaligned = {**sizes, "columns": max(UNALIGNED_LEAST, sizes["columns"]) + 1 + number % 3}
        if number % reach.unaligned_every == 0 and affordable(unaligned):
            yield from _linear_layer(unaligned)
    for sizes in _drawn(batched, 4, affordable, _count("batched", quick)):
        yield _launch("matmul", "batched", "forward", sizes)


def _linear_layer(forward: Sizes) -> Iterator[Launch]:
    """The three products of one layer: its rows, which may be of any number, are the depth of the gradient of its weights."""
    rows, columns, depth = forward["rows"], forward["columns"], forward["depth"]
    for phase, (r, c, d) in zip(
        PRODUCT_PHASES, ((rows, columns, depth), (rows, depth, columns), (columns, depth, rows)), strict=True
    ):
        yield _launch("matmul", "linear", phase, {"problems": 1, "rows": r, "columns": c, "depth": d})


def _convolutions(reach: Reach, quick: bool) -> Iterator[Launch]:
    def convolution(u: Sequence[float]) -> Sizes:
        bounds = list(itertools.accumulate(share for _, _, share in reach.filters))
        side, stride, _ = reach.filters[min(bisect.bisect(bounds, u[5]), len(reach.filters) - 1)]
        out = reach.pixel_sides[int(u[3] * len(reach.pixel_sides))]
        groups = _usual(u[6] / GROUPED_SHARE, *reach.channels) if u[6] < GROUPED_SHARE and side > 1 else 1
        # one shape in twelve has the channels of an image
        inputs = (1 if u[1] < 1 / 24 else 3) if u[1] < 1 / 12 else _usual((u[1] - 1 / 12) * 12 / 11, *reach.channels)
        outputs = _usual(u[2], *reach.channels)
        if groups > 1:
            inputs, outputs = 1, 1 + (u[2] > 0.8)
        return {
            "images": _any(u[0], *reach.images),
            "inputs": inputs,
            "outputs": outputs,
            "groups": groups,
            "taps": side * side,
            "pixels_in": (out * stride) ** 2,
            "pixels_out": out * out,
        }

    def affordable(s: Sizes) -> bool:
        flop = 2 * s["images"] * s["pixels_out"] * s["taps"] * s["groups"] * s["inputs"] * s["outputs"]
        arrays = s["images"] * s["groups"] * max(s["inputs"] * s["pixels_in"], s["outputs"] * s["pixels_out"])
        return flop <= reach.max_flop and arrays <= reach.max_elements

    for sizes in _drawn(convolution, 7, affordable, _count("convolution", quick)):
        side = math.isqrt(sizes["taps"])
        family = convolution_family(sizes["groups"], side, side)
        yield from (_launch("convolution", family, phase, sizes) for phase in PRODUCT_PHASES)


def _attentions(reach: Reach, quick: bool) -> Iterator[Launch]:
    def attention(u: Sequence[float]) -> Sizes:
        positions = reach.positions[int(u[1] * len(reach.positions))]
        problems = 4 * _any(u[0], *reach.attention_problems)
        return {"problems": problems, "queries": positions, "keys": positions, "depth": _usual(u[2], *reach.head_widths)}

    def affordable(s: Sizes) -> bool:
        flop = 4 * s["problems"] * s["queries"] * s["keys"] * s["depth"]
        per_query = max(s["keys"], s["depth"]) if reach.scores_stored else 3 * s["depth"]
        return flop <= reach.max_flop and s["problems"] * s["queries"] * per_query <= reach.max_elements

    for function in ("plain", "causal"):
        for sizes in _drawn(attention, 3, affordable, _count("attention", quick)):
            yield from (_launch("attention", function, phase, sizes) for phase in BOTH)


def _embeddings(reach: Reach, quick: bool) -> Iterator[Launch]:
    def embedding(u: Sequence[float]) -> Sizes:
        return {"rows": _any(u[0], *reach.embedding_rows), "width": _usual(u[1], *reach.embedding_widths)}

    for sizes in _drawn(embedding, 2, lambda s: s["rows"] * s["width"] <= reach.max_elements, _count("embedding", quick)):
        yield from (_launch("embedding", "gather", phase, sizes) for phase in BOTH)


def _memory_bound(reach: Reach, quick: bool) -> Iterator[Launch]:
    def rows(u: Sequence[float]) -> Sizes:
        width = _usual(u[1], *reach.row_widths)
        return {"elements": width * _any(u[0], *reach.row_counts), "width": width}

    def flat(u: Sequence[float]) -> Sizes:
        return {"elements": max(4, 4 * _any(u[0], *reach.flat)), "width": 1}

    for function, phases in MEMORY_BOUND.items():
        wide = function in WIDE
        shapes = _drawn(
            rows if wide else flat,
            2,
            lambda s: s["elements"] <= reach.max_elements,
            _count("wide" if wide else "memory_bound", quick),
        )
        for sizes in shapes:
            yield from (_launch("memory_bound", function, phase, sizes) for phase in phases)


def _count(name: str, quick: bool) -> int:
    return math.ceil(COUNTS[name] * (QUICK_SHARE if quick else 1.0))


def _drawn(make: Callable[[Sequence[float]], Sizes], dims: int, affordable: Callable[[Sizes], bool], count: int) -> list[Sizes]:
    """The first `count` affordable shapes of the sequence, each once."""
    sequence = Halton(dims, scramble=False)
    sequence.fast_forward(1)
    found: dict[tuple[int, ...], Sizes] = {}
    while len(found) < count:
        sizes = make(sequence.random(1)[0].tolist())
        if affordable(sizes):
            found.setdefault(tuple(sizes.values()), sizes)
    return list(found.values())


def _any(u: float, low: float, high: float) -> int:
    """2^low to 2^high, as samples and positions are."""
    return round(2 ** (low + u * (high - low)))


def _usual(u: float, low: int, high: int) -> int:
    """2^low, 1.5 times that, 2^(low + 1), ... 2^high, as the widths of networks are: other widths leave registers idle."""
    doublings, between = divmod(round(2 * u * (high - low)), 2)
    return (2 << (low + doublings)) * (2 + between) // 4


def _launch(kind: str, function: str, phase: str, sizes: Sizes) -> Launch:
    return Launch(kind=kind, function=function, phase=phase, sizes=tuple((name, float(size)) for name, size in sizes.items()))
