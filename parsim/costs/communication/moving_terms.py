"""The terms of a collective or a transfer in the alpha-beta model: bytes, contention, latency.

    seconds = bytes * seconds_per_byte alone + contention + latency

Contention is what the bytes take longer while other groups use the same links: bytes times the difference between the seconds
per byte beside them and alone. Latency is not stretched.
"""

from __future__ import annotations

from parsim.costs.estimate import Term, TermOrigin, Terms
from parsim.units import format_bytes, format_seconds


def moving_terms(
    size_bytes: float,
    seconds_per_byte: float,
    latency_s: float,
    *,
    alone_seconds_per_byte: float | None = None,
    groups: int = 0,
    latency: str = "",
    origin: TermOrigin = "fitted",
) -> Terms:
    """Terms for the bytes, for contention if there is some, and for latency.

    Args:
        size_bytes: of the whole array. seconds_per_byte: of the whole array, while other groups run.
        alone_seconds_per_byte: alone (None: nothing else runs). groups: how many run at once.
        latency_s: of the operation. latency: what it consists of, as text. origin: of the numbers.

    Returns:
        The terms, in seconds. Leaves out that contention may end before the transfer does.
    """
    alone = seconds_per_byte if alone_seconds_per_byte is None else alone_seconds_per_byte
    alone_s, seconds = alone * size_bytes, seconds_per_byte * size_bytes
    terms = [Term("bytes", "start", alone_s, origin, f"{format_bytes(size_bytes)} at {alone:.4g} s/B")]
    if seconds != alone_s:
        what = f"{groups} groups share links: {seconds_per_byte / alone:.3g} times as long as alone"
        terms.append(Term("contention", "plus", seconds - alone_s, "fitted", what))
    terms.append(Term("latency", "plus", latency_s, origin, latency))
    return tuple(terms)


def hops_text(base_s: float, *hops: tuple[int, float]) -> str:
    """Describe a latency, e.g. `10 us + 14 hops of 1.2 us`.

    Args:
        base_s: seconds before the hops. hops: (count, seconds of one).
    """
    return " + ".join(
        [format_seconds(base_s), *(f"{count} hops of {format_seconds(seconds)}" for count, seconds in hops if count)]
    )
