"""What a rank holds beyond its tensors and the framework's context: lost between an allocator's blocks, and taken by libraries.

Nobody can count it beforehand, so it is an interval. A calibration measures it (`calibration.measure.allocator`); for profiles
without, the rows below are assumptions: that of a CPU is read off one machine, that of CUDA rests on no measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from parsim.hardware.profile import DeviceTypeEntry, Quantiles
from parsim.units import MIB


class Spread(NamedTuple):
    """Quantiles of one number."""

    p05: float
    median: float
    p95: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocator:
    """Attributes:
    library_bytes: code, pools and scratch memory of the libraries, once they have run.
    lost_share: of the memory that comes and goes within a step, what is lost between blocks.
    """

    library_bytes: Spread
    lost_share: Spread

    def bytes_beside(self, dynamic_bytes: float) -> Spread:
        """Bytes beside so many that come and go; both at the same quantile, so the interval is rather too wide."""
        pairs = zip(self.library_bytes, self.lost_share, strict=True)
        return Spread(*(library + share * dynamic_bytes for library, share in pairs))


NO_ALLOCATOR = Allocator(library_bytes=Spread(0, 0, 0), lost_share=Spread(0, 0, 0))

ALLOCATORS: Mapping[str, Allocator] = {
    "cpu": Allocator(library_bytes=Spread(64 * MIB, 88 * MIB, 112 * MIB), lost_share=Spread(0.0, 0.1, 0.5)),
    "cuda": Allocator(library_bytes=Spread(32 * MIB, 256 * MIB, 1024 * MIB), lost_share=Spread(0.0, 0.02, 0.1)),
}
"""By the kind of device. CUDA: cuDNN and cuBLAS scratch around a convolution algorithm's usual upper limit."""


def allocator_of(entry: DeviceTypeEntry) -> Allocator:
    """As the profile has it, or as assumed of its kind."""
    if entry.allocator is None:
        return ALLOCATORS[entry.kind]
    return Allocator(library_bytes=_spread(entry.allocator.library_bytes), lost_share=_spread(entry.allocator.lost_share))


def _spread(quantiles: Quantiles) -> Spread:
    return Spread(quantiles.p05, quantiles.median, quantiles.p95)
