"""The terms of a collective or a transfer in the alpha-beta model: bytes, contention, latency.

    seconds = bytes * seconds_per_byte alone * contention + latency

Contention is what the busiest link takes per byte beside the groups that run at once, over what it takes alone. It stretches the
bytes and not the latency; therefore the bytes come first.
"""

from __future__ import annotations

from parsim.costs.estimate import Origin, Term, Terms
from parsim.units import format_bytes, format_seconds


def moving_terms(
    size_bytes: float,
    seconds_per_byte: float,
    latency_s: float,
    *,
    alone_seconds_per_byte: float | None = None,
    groups: int = 0,
    latency: str = "",
    origin: Origin = "fitted",
) -> Terms:
    """Bytes, contention where there is some, latency.

    Args:
        seconds_per_byte: of the whole array, beside whatever runs at once. alone_seconds_per_byte: alone (None: nothing else
            runs). groups: how many run at once. latency: what its seconds consist of.
    """
    alone = seconds_per_byte if alone_seconds_per_byte is None else alone_seconds_per_byte
    what = f"{format_bytes(size_bytes)} at {alone:.4g} s/B"
    terms = [Term("bytes", "start", alone * size_bytes, origin, what)]
    if alone not in (seconds_per_byte, 0.0):
        terms.append(Term("contention", "times", seconds_per_byte / alone, "fitted", f"{groups} groups share links"))
    terms.append(Term("latency", "plus", latency_s, origin, latency))
    return tuple(terms)


def hops_text(base_s: float, *hops: tuple[int, float]) -> str:
    """`10 us + 14 hops of 1.2 us`."""
    return " + ".join(
        [format_seconds(base_s), *(f"{count} hops of {format_seconds(seconds)}" for count, seconds in hops if count)]
    )
