"""Which operators are measured: launches spread over the shapes that small and middling models ask of one device.

Sizes are drawn evenly in their logarithms from a Halton sequence, so every run measures the same shapes; widths are those that
networks have (powers of two and halfway between), but no model's own shapes are sought. A launch is kept if its arithmetic and
its arrays stay below a few milliseconds of a CPU core.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from scipy.stats.qmc import Halton

from parsim.costs.compute.launches import ELEMENTWISE, Launch, convolution_family

MAX_FLOP = 3e8
MAX_ELEMENTS = 2**21
QUICK_SHARE = 0.4

CONVOLUTIONS = ((3, 1, 0.48), (3, 2, 0.15), (1, 1, 0.13), (1, 2, 0.1), (4, 4, 0.05), (8, 8, 0.03), (5, 1, 0.03), (7, 2, 0.03))
"""Side of the filter, stride, share of the shapes."""

SIDES = (1, 2, 4, 7, 8, 14, 16, 28, 32, 56)
POSITIONS = (16, 32, 49, 50, 64, 65, 96, 128, 192, 197, 256, 384, 512)
"""Output pixels along one side, and lengths of sequences, that networks have (with and without a class token)."""

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

QUICK_LEAST = 10
"""Shapes of a surface in a quick calibration, where there are so many."""

Sizes = dict[str, int]


def operator_launches(*, quick: bool) -> tuple[Launch, ...]:
    """Every launch to measure, the same for every run; quick: fewer, but enough to fit every surface."""
    everything = tuple(dict.fromkeys(_all(quick=False)))
    if not quick:
        return everything
    found = dict.fromkeys(_all(quick=True))
    count = Counter(_surface_of(launch) for launch in found)
    for launch in everything:
        if launch not in found and count[_surface_of(launch)] < QUICK_LEAST:
            found[launch] = None
            count[_surface_of(launch)] += 1
    return tuple(found)


def _all(*, quick: bool) -> Iterator[Launch]:
    yield from _products(quick)
    yield from _convolutions(quick)
    yield from _attentions(quick)
    yield from _embeddings(quick)
    yield from _memory_bound(quick)


def _surface_of(launch: Launch) -> tuple[str, str, str]:
    return launch.kind, launch.function, launch.phase


def _products(quick: bool) -> Iterator[Launch]:
    def linear(u: Sequence[float]) -> Sizes:
        return {"problems": 1, "rows": _any(u[0], 0, 12), "columns": _usual(u[1], 3, 12), "depth": _usual(u[2], 3, 12)}

    def batched(u: Sequence[float]) -> Sizes:
        sides = {name: _usual(value, 3, 9) for name, value in zip(("rows", "columns", "depth"), u[1:], strict=True)}
        return {"problems": _any(u[0], 1, 8), **sides}

    def affordable(s: Sizes) -> bool:
        r, c, d, p = s["rows"], s["columns"], s["depth"], s["problems"]
        return 2 * p * r * c * d <= MAX_FLOP and p * max(r * c, r * d, c * d) <= MAX_ELEMENTS

    for sizes in _drawn(linear, 3, affordable, _count("linear", quick)):
        yield from (_launch("matmul", "linear", phase, sizes) for phase in PRODUCT_PHASES)
    for sizes in _drawn(batched, 4, affordable, _count("batched", quick)):
        yield _launch("matmul", "batched", "forward", sizes)


def _convolutions(quick: bool) -> Iterator[Launch]:
    def convolution(u: Sequence[float]) -> Sizes:
        bounds = list(itertools.accumulate(share for _, _, share in CONVOLUTIONS))
        side, stride, _ = CONVOLUTIONS[min(bisect.bisect(bounds, u[5]), len(CONVOLUTIONS) - 1)]
        out = SIDES[int(u[3] * len(SIDES))]
        groups = _usual(u[6] / GROUPED_SHARE, 3, 8) if u[6] < GROUPED_SHARE and side > 1 else 1
        # one shape in twelve has the channels of an image
        inputs = (1 if u[1] < 1 / 24 else 3) if u[1] < 1 / 12 else _usual((u[1] - 1 / 12) * 12 / 11, 3, 8)
        outputs = _usual(u[2], 3, 8)
        if groups > 1:
            inputs, outputs = 1, 1 + (u[2] > 0.8)
        return {
            "images": _any(u[0], 1, 6),
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
        return flop <= MAX_FLOP and arrays <= MAX_ELEMENTS

    for sizes in _drawn(convolution, 7, affordable, _count("convolution", quick)):
        side = math.isqrt(sizes["taps"])
        family = convolution_family(sizes["groups"], side, side)
        yield from (_launch("convolution", family, phase, sizes) for phase in PRODUCT_PHASES)


def _attentions(quick: bool) -> Iterator[Launch]:
    def attention(u: Sequence[float]) -> Sizes:
        positions = POSITIONS[int(u[1] * len(POSITIONS))]
        return {"problems": 4 * _any(u[0], 0, 6), "queries": positions, "keys": positions, "depth": _usual(u[2], 4, 7)}

    def affordable(s: Sizes) -> bool:
        flop = 4 * s["problems"] * s["queries"] * s["keys"] * s["depth"]
        return flop <= MAX_FLOP and s["problems"] * s["queries"] * max(s["keys"], s["depth"]) <= MAX_ELEMENTS

    for function in ("plain", "causal"):
        for sizes in _drawn(attention, 3, affordable, _count("attention", quick)):
            yield from (_launch("attention", function, phase, sizes) for phase in BOTH)


def _embeddings(quick: bool) -> Iterator[Launch]:
    def embedding(u: Sequence[float]) -> Sizes:
        return {"rows": _any(u[0], 3, 12), "width": _usual(u[1], 4, 10)}

    for sizes in _drawn(embedding, 2, lambda s: s["rows"] * s["width"] <= MAX_ELEMENTS, _count("embedding", quick)):
        yield from (_launch("embedding", "gather", phase, sizes) for phase in BOTH)


def _memory_bound(quick: bool) -> Iterator[Launch]:
    def rows(u: Sequence[float]) -> Sizes:
        width = _usual(u[1], 3, 10)
        return {"elements": width * _any(u[0], 2, 14), "width": width}

    def flat(u: Sequence[float]) -> Sizes:
        return {"elements": max(4, 4 * _any(u[0], 0, 19)), "width": 1}

    for function, phases in MEMORY_BOUND.items():
        wide = function in WIDE
        shapes = _drawn(
            rows if wide else flat,
            2,
            lambda s: s["elements"] <= MAX_ELEMENTS,
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
