"""The kinds of device by name, with the properties that depend on the kind alone and not on a profile. A new one is one
row.

A profile names a kind per device type: one of these, or "package.module:ROW". A kind without a backend is planned and
simulated; only those that PyTorch and the executor can drive are run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from parsim.errors import ProfileError
from parsim.hardware.allocator import Allocator, Spread
from parsim.hardware.topology import DEVICE_ROLES
from parsim.registry import Registry
from parsim.units import MIB

if TYPE_CHECKING:
    from parsim.hardware.profile import DeviceTypeEntry, Quantiles


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


def allocator_of(entry: DeviceTypeEntry) -> Allocator:
    """As the profile has it, or as assumed of its kind."""
    if entry.allocator is None:
        return DEVICE_KINDS[entry.kind].allocator
    return Allocator(library_bytes=_spread(entry.allocator.library_bytes), lost_share=_spread(entry.allocator.lost_share))


def _spread(quantiles: Quantiles) -> Spread:
    return Spread(quantiles.p05, quantiles.median, quantiles.p95)
