"""Efficiency surfaces: the time of one launch as a sum of costs that grow with its sizes.

    t = sum over the terms of  seconds_term * term(sizes),   seconds_term >= 0

The term "launch" is 1: its seconds are the floor. The others are products of sizes (arithmetic, arrays read and written,
rows, problems) and what such a product exceeds a cache by. Every term grows with every size (of a normalisation: with its
rows and their width). No coefficient is negative, so t is monotone in every size. Far outside the data the terms of
arithmetic and arrays dominate, as they do in a real kernel.

How far a question lies from the data is the distance to the nearest measured shape: the largest ratio of any size, in
doublings. Up to the surface's reach (the distance at which its own held-out points lie) nothing widens; beyond it sigma grows
per doubling.

A GPU has terms of its own (`GPU_TERMS`), which no CPU is fitted to: its matrix units load and store rows that begin at
multiples of 16 bytes, and a product of other rows, as over a vocabulary of 50257 tokens, runs by another kernel. By these alone
a size can grow and the time fall, from one row that is not aligned to the next that is.

Leaves out: steps of tile sizes and changes of algorithm (they are in sigma), and what happens between launches
(`parsim.costs.compute.composition`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from parsim.costs.compute.launches import Launch
from parsim.hardware.compute_records import OperatorPoint, OperatorSurface
from parsim.hardware.profile import Profile

LAUNCH = "launch"
SMALL_CACHE, LARGE_CACHE = 1e5, 1e6
"""Elements from which an array is slower to reach: a core's own cache and the shared one hold about so many."""

CHANNEL_BLOCK = 8
"""Libraries lay channels out in blocks; an image of one or three channels is padded to one."""

SurfaceKey = tuple[str, str, str]
"""Kind, function and phase of a launch."""


def _product(s: Mapping[str, float]) -> dict[str, float]:
    p, r, c, d = s["problems"], s["rows"], s["columns"], s["depth"]
    return {
        "arithmetic": p * r * c * d,
        "output": p * r * c,
        "left": p * r * d,
        "right": p * c * d,
        "output_beyond": _beyond(p * r * c, SMALL_CACHE),
        "left_beyond": _beyond(p * r * d, SMALL_CACHE),
        "right_beyond": _beyond(p * c * d, SMALL_CACHE),
        "right_far": _beyond(p * c * d, LARGE_CACHE),
        "rows": p * r,
        "columns": p * c,
        "depth": p * d,
        "problems": p,
    }


def _convolution(s: Mapping[str, float]) -> dict[str, float]:
    names = ("images", "inputs", "outputs", "groups", "taps", "pixels_in", "pixels_out")
    n, i, o, g, taps, before, after = (s[name] for name in names)
    weights = g * i * o * taps
    padded_in, padded_out = CHANNEL_BLOCK * np.ceil(i / CHANNEL_BLOCK), CHANNEL_BLOCK * np.ceil(o / CHANNEL_BLOCK)
    return {
        "arithmetic_padded": n * after * g * padded_in * padded_out * taps,
        "input_padded": n * g * padded_in * before,
        "output_padded": n * g * padded_out * after,
        "arithmetic": n * after * weights,
        "arithmetic_in": n * before * weights,
        "arithmetic_rows": n * np.sqrt(after) * weights,
        "image_weights": n * weights,
        "unfolded": n * after * g * i * taps,
        "input": n * g * i * before,
        "output": n * g * o * after,
        "weights": weights,
        "input_beyond": _beyond(n * g * i * before, SMALL_CACHE),
        "output_beyond": _beyond(n * g * o * after, SMALL_CACHE),
        "weights_beyond": _beyond(weights, SMALL_CACHE),
        "pixels": n * before,
        "images": n,
    }


def _attention(s: Mapping[str, float]) -> dict[str, float]:
    p, q, k, d = s["problems"], s["queries"], s["keys"], s["depth"]
    return {
        "arithmetic": p * q * k * d,
        "scores": p * q * k,
        "arrays": p * (q + k) * d,
        "rows": p * q,
        "problems": p,
    }


def _embedding(s: Mapping[str, float]) -> dict[str, float]:
    elements = s["rows"] * s["width"]
    return {"elements": elements, "rows": s["rows"], "beyond": _beyond(elements, SMALL_CACHE)}


def _memory_bound(s: Mapping[str, float]) -> dict[str, float]:
    elements, width = s["elements"], s["width"]
    return {
        "elements": elements,
        "rows": elements / width,
        "width": width,
        "beyond": _beyond(elements, SMALL_CACHE / 3),
        "far": _beyond(elements, LARGE_CACHE / 4),
    }


TERMS: Mapping[str, Callable[[Mapping[str, float]], dict[str, float]]] = {
    "matmul": _product,
    "convolution": _convolution,
    "attention": _attention,
    "embedding": _embedding,
    "memory_bound": _memory_bound,
}
"""By kind of operator: what a launch of these sizes has of each term."""


ALIGNED_ELEMENTS = 8
"""Of a row of a half-precision operand: 16 bytes. Rows of fp32 need half as many, which widths of networks hardly tell
apart."""


def _unaligned_product(s: Mapping[str, float], phase: str) -> dict[str, float]:
    """Arithmetic over rows that are not aligned. Of the gradient of weights the rows of the result are the operand's
    columns."""
    lengths = (s["rows"] if phase == "backward_weight" else s["depth"], s["columns"])
    arithmetic = s["problems"] * s["rows"] * s["columns"] * s["depth"]
    return {
        "unaligned": arithmetic * any(length % ALIGNED_ELEMENTS for length in lengths),
        "odd": arithmetic * any(length % 2 for length in lengths),
    }


GPU_TERMS: Mapping[str, Callable[[Mapping[str, float], str], dict[str, float]]] = {"matmul": _unaligned_product}
"""By kind of operator: the terms of a launch of these sizes in a phase that GPUs have besides."""


def terms_of(kind: str, sizes: Mapping[str, float]) -> dict[str, float]:
    """Every term of a launch, the floor among them, but those of GPUs alone.

    Args:
        kind: of launch, a key of `TERMS`. sizes: of the launch.
    """
    return {LAUNCH: 1.0, **TERMS[kind](sizes)}


def gpu_terms_of(kind: str, sizes: Mapping[str, float], phase: str) -> dict[str, float]:
    """The same with those of GPUs.

    Args:
        kind, sizes: as for `terms_of`. phase: of the launch.
    """
    own = GPU_TERMS[kind](sizes, phase) if kind in GPU_TERMS else {}
    return {**terms_of(kind, sizes), **own}


def surface_seconds(surface: OperatorSurface, sizes: Mapping[str, float]) -> float:
    """Seconds of one launch.

    Args:
        surface: fitted seconds per term. sizes: of the launch.

    Returns:
        Seconds. Leaves out steps of tile sizes and changes of algorithm.
    """
    terms = terms_of(surface.kind, sizes)
    if not surface.seconds_per_term.keys() <= terms.keys():
        terms = gpu_terms_of(surface.kind, sizes, surface.phase)
    return sum(seconds * terms[name] for name, seconds in surface.seconds_per_term.items())


def log_sizes(sizes: Mapping[str, float]) -> NDArray[np.float64]:
    """The position of a launch among sizes, in doublings.

    Args:
        sizes: of the launch.

    Returns:
        float64 [sizes].
    """
    return np.log2(np.maximum(np.array(list(sizes.values()), dtype=np.float64), 1.0))


def distances(wanted: NDArray[np.float64], known: NDArray[np.float64]) -> NDArray[np.float64]:
    """Distance from each wanted launch to the nearest known one, by the size that differs most.

    Args:
        wanted: float64 [n, sizes], doublings. known: float64 [m, sizes].

    Returns:
        float64 [n] doublings.
    """
    nearest: NDArray[np.float64] = np.abs(wanted[:, None, :] - known[None, :, :]).max(axis=2).min(axis=1)
    return nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Seconds of a launch (all its occurrences), the surface's relative sigma, and the sigma added beyond its reach."""

    seconds: float
    sigma: float
    widening: float


@dataclass(frozen=True)
class SurfaceModel:
    """The surfaces of one device type and precision, and where their points lie."""

    surfaces: tuple[OperatorSurface, ...]
    points: tuple[OperatorPoint, ...]

    def price(self, launch: Launch) -> Price | None:
        """None where no surface covers that kind, function and phase."""
        key = (launch.kind, launch.function, launch.phase)
        surface = self._by_key.get(key)
        if surface is None:
            return None
        sizes = dict(launch.sizes)
        known = self._shapes.get(key)
        beyond = 0.0
        if known is not None:
            distance = float(distances(log_sizes(sizes)[None, :], known)[0])
            beyond = max(0.0, distance - surface.reach_doublings)
        return Price(
            seconds=launch.count * surface_seconds(surface, sizes),
            sigma=surface.relative_sigma,
            widening=surface.sigma_per_doubling * beyond,
        )

    @cached_property
    def _by_key(self) -> dict[SurfaceKey, OperatorSurface]:
        return {(surface.kind, surface.function, surface.phase): surface for surface in self.surfaces}

    @cached_property
    def _shapes(self) -> dict[SurfaceKey, NDArray[np.float64]]:
        found: dict[SurfaceKey, list[NDArray[np.float64]]] = {}
        for point in self.points:
            found.setdefault((point.kind, point.function, point.phase), []).append(log_sizes(point.shape))
        return {key: np.array(shapes) for key, shapes in found.items()}


def surface_models(profile: Profile) -> dict[tuple[str, str], SurfaceModel]:
    """The surfaces of a profile, by device type and precision.

    Args:
        profile: with operator surfaces and their points.
    """
    keys = {(entry.device_type, entry.precision) for entry in profile.compute.operator_surfaces}
    return {
        key: SurfaceModel(
            surfaces=tuple(entry for entry in profile.compute.operator_surfaces if (entry.device_type, entry.precision) == key),
            points=tuple(entry for entry in profile.compute.operator_points if (entry.device_type, entry.precision) == key),
        )
        for key in sorted(keys)
    }


def stacked_terms(
    kind: str, shapes: Sequence[Mapping[str, float]], *, gpu_phase: str = ""
) -> tuple[list[str], NDArray[np.float64]]:
    """Names of the terms, and their values for several launches.

    Args:
        kind: of launch. shapes: sizes of each launch. gpu_phase: of launches on a GPU, their phase; "": they are a CPU's.

    Returns:
        The names, and float64 [shapes, terms].
    """
    rows = [gpu_terms_of(kind, shape, gpu_phase) if gpu_phase else terms_of(kind, shape) for shape in shapes]
    return list(rows[0]), np.array([list(row.values()) for row in rows], dtype=np.float64)


def _beyond(elements: float, cache: float) -> float:
    return max(0.0, elements - cache)
