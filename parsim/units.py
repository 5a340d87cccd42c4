"""SI units inside, human units only here and in `report/`. Texts that a terminal may print.

Every quantity in the library is in seconds, bytes or flop and says so in its name (`duration_s`, `size_bytes`).
"""

from __future__ import annotations

import math
import re
from functools import lru_cache

DAY_S = 86_400.0
KIB = 1024
MIB = 1024**2
GIB = 1024**3


SHORT = re.compile(r"(\d[\d_,]*(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([kKmMgGbBtT]?)")


def parse_count(text: str, thousand: int = 1000) -> int | float:
    """`"64k"` as 64,000 or, of sizes that are powers of two, 65,536; `"15T"` as 15e12. A float only where it has a fraction.
    `thousand`: what k means; M, G or B, and T are its powers. Raises ValueError: it is no such number."""
    form = SHORT.fullmatch(text.strip())
    if form is None:
        raise ValueError(f"{text!r} is no number such as 4096, 64k or 1.5T")
    exponent = {"": 0, "k": 1, "m": 2, "g": 3, "b": 3, "t": 4}[form[2].lower()]
    value = float(re.sub("[_,]", "", form[1])) * thousand**exponent
    return int(value) if value == int(value) else value


CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that a terminal obeys: all control characters but tab and newline."""


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """The divisors of a positive number, ascending, with 1 and itself; of 10^9 in a millisecond."""
    low = [count for count in range(1, math.isqrt(number) + 1) if number % count == 0]
    return tuple(sorted({*low, *(number // count for count in low)}))


def nearest_divisors(number: int, wanted: int) -> str:
    """`12 or 16`: the divisors of a number next to another one, below and above."""
    below = [count for count in divisors(number) if count <= wanted]
    above = [count for count in divisors(number) if count > wanted]
    return " or ".join(map(str, (*below[-1:], *above[:1])))


def printable(text: str) -> str:
    """The text with control characters other than tab and newline spelled out (`\\x1b`), so that no terminal obeys them."""
    return CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def three_digits(value: float) -> str:
    """Three significant digits, never as a power of ten where the number is below a million: 0.0123, 12.3, 12,345."""
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e6 else f"{value:.3g}"


def format_seconds(seconds: float) -> str:
    """Three significant digits with the fitting unit: 1.23 ms, 45.6 us, 2 h 05 min, 3.5 days."""
    if seconds != seconds:
        return "n/a"
    magnitude = abs(seconds)
    if magnitude >= 2 * DAY_S:
        return f"{three_digits(seconds / DAY_S)} days"
    if magnitude >= 3600:
        hours = int(magnitude // 3600)
        text = f"{hours} h {int((magnitude - 3600 * hours) // 60):02d} min"
        return text if seconds >= 0 else f"-{text}"
    if magnitude >= 60:
        return f"{seconds / 60:.3g} min"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if magnitude >= scale:
            return f"{three_digits(seconds / scale)} {unit}"
    return "0 s" if magnitude == 0 else f"{three_digits(seconds * 1e9)} ns"


def format_bytes(size_bytes: float) -> str:
    """Three significant digits in binary units: 1.5 GiB, 25 MiB, 512 B."""
    for scale, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size_bytes) >= scale:
            value = size_bytes / scale
            return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"
    return f"{size_bytes:.0f} B"


def format_bandwidth(bytes_per_s: float) -> str:
    """Decimal gigabytes per second, as nccl-tests prints them."""
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def format_count(count: float) -> str:
    """Decimal: 25.6 M."""
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= scale:
            return f"{three_digits(count / scale)} {unit}"
    return f"{count:.0f}"


def format_money(amount: float, currency: str = "USD") -> str:
    """0.0123 USD, 45.60 USD, 12,345 USD, 10.95 million USD: cents below a thousand, four digits from a million on."""
    if abs(amount) >= 1e6:
        text = f"{amount / 1e6:,.0f}" if abs(amount) >= 1e9 else f"{amount / 1e6:.4g}"
        return f"{text} million {currency}"
    if abs(amount) >= 1000:
        return f"{amount:,.0f} {currency}"
    return f"{amount:.2f} {currency}" if abs(amount) >= 1 or not amount else f"{amount:.3g} {currency}"


def format_energy(kwh: float) -> str:
    """Three significant digits: 45.6 kWh, 355.7 MWh from a thousand on."""
    return f"{kwh / 1e3:,.1f} MWh" if abs(kwh) >= 1e3 else f"{three_digits(kwh)} kWh"


def format_percent(fraction: float) -> str:
    """0.1234 -> 12.3%. What rounds to nothing has no sign."""
    return f"{round(100 * fraction, 1) + 0.0:.1f}%"
