"""Memory of a rank beyond its tensors and the framework's context: lost in an allocator's blocks, or taken by libraries.

Nobody can count it beforehand, so it is an interval. A calibration measures it (`calibration.measure.allocator`); for profiles
without, the rows of `parsim.hardware.device_kinds` are assumptions: that of a CPU is read off one machine, that of CUDA rests
on no measurement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


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
