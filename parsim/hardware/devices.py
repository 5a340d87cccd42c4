"""The kinds of device by name, with the properties that depend on the kind alone and not on a profile. A new one is one row.

A profile names a kind per device type: one of these, or "package.module:ROW". A kind without a backend is planned and
simulated; only those that PyTorch and the executor can drive are run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, PlainSerializer

from parsim.errors import ProfileError
from parsim.hardware.records import ProfileRecord
from parsim.hardware.topology import DEVICE_ROLES
from parsim.registry import Registry
from parsim.units import MIB


class Spread(NamedTuple):
    """Quantiles of one number."""

    p05: float
    median: float
    p95: float


def _ascending(spread: Spread) -> Spread:
    low, median, high = spread
    if not 0 <= low <= median <= high < math.inf:
        raise ValueError(f"p05 {low:g}, median {median:g}, p95 {high:g} must be finite, >= 0 and in ascending order")
    return spread


Quantiles = Annotated[Spread, AfterValidator(_ascending), PlainSerializer(Spread._asdict)]
"""A Spread that a file holds as a table."""


class Allocator(ProfileRecord):
    """Memory of a rank beyond its tensors and the framework's context. Nobody can count it beforehand, so it is an interval.

    A calibration measures it (`calibration.measure.allocator`) and its profile keeps it, with its source. For profiles
    without, the rows of `DEVICE_KINDS` are assumptions: that of a CPU is read off one machine, that of CUDA rests on no
    measurement.

    Attributes:
        library_bytes: code, pools and scratch memory of the libraries, once they have run.
        lost_share: of the memory that comes and goes within a step, what is lost between blocks.
    """

    library_bytes: Quantiles
    lost_share: Quantiles
    source: str = ""

    def bytes_beside(self, dynamic_bytes: float) -> Spread:
        """Bytes beside so many that come and go; both at the same quantile, so the interval is rather too wide."""
        pairs = zip(self.library_bytes, self.lost_share, strict=True)
        return Spread(*(library + share * dynamic_bytes for library, share in pairs))


NO_ALLOCATOR = Allocator(library_bytes=Spread(0, 0, 0), lost_share=Spread(0, 0, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """One kind of device.

    Attributes:
        endpoint: what its devices are called among a profile's links: "gpu" (gpu3), "cpu" or "xpu" (any other accelerator).
        allocator: what is held beside tensors, for device types whose profile does not say.
        on_cores: it computes on the host's cores, which communication and loading share with it; else batches are loaded
            ahead, while it computes.
        cuda_launches: operators are priced as the kernels CUDA launches for them; else as they were recorded.
        backend: of torch.distributed that its ranks communicate by; "": it cannot be run here.
    """

    endpoint: str
    allocator: Allocator
    on_cores: bool = False
    cuda_launches: bool = False
    backend: str = ""

    def __post_init__(self) -> None:
        if self.endpoint not in DEVICE_ROLES:
            raise ProfileError(f"a device kind's endpoint is {' or '.join(DEVICE_ROLES)}, got {self.endpoint!r}")


# CUDA: cuDNN and cuBLAS scratch around a convolution algorithm's usual upper limit.
DEVICE_KINDS: Registry[DeviceKind] = Registry(
    "device kind",
    DeviceKind,
    {
        "cpu": DeviceKind(
            endpoint="cpu",
            allocator=Allocator(library_bytes=Spread(64 * MIB, 88 * MIB, 112 * MIB), lost_share=Spread(0.0, 0.1, 0.5)),
            on_cores=True,
            backend="gloo",
        ),
        "cuda": DeviceKind(
            endpoint="gpu",
            allocator=Allocator(library_bytes=Spread(32 * MIB, 256 * MIB, 1024 * MIB), lost_share=Spread(0.0, 0.02, 0.1)),
            cuda_launches=True,
            backend="nccl",
        ),
    },
    error=ProfileError,
)


def device_name(index: int, kind: str) -> str:
    """Endpoint of device `index`: gpu3 or cpu0."""
    return f"{DEVICE_KINDS[kind].endpoint}{index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """The rates and memory of one type of device; every number comes from a profile, which keeps its source.

    Attributes:
        peak_flop_per_s: by precision, a row of `parsim.model.formats` ("fp32", "amp_fp16") or "package.module:ROW"; one left
            out cannot be used.
        context_bytes: memory the framework takes before the first tensor. allocator: what it takes beside the tensors.
    """

    name: str
    kind: str
    memory_bytes: int
    peak_flop_per_s: Mapping[str, float]
    memory_bandwidth_bytes_per_s: float
    context_bytes: int
    allocator: Allocator = NO_ALLOCATOR

    @property
    def room_bytes(self) -> int:
        """Memory beside the framework's own."""
        return self.memory_bytes - self.context_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Attributes:
    index: its number in the profile. node: the host it sits in.
    core: of that host, which devices of the same core share (None: a device by itself).
    """

    index: int
    type: DeviceType
    node: int = 0
    core: int | None = None
