"""A Cluster: the devices a plan runs on, their links, and the profile that prices them. Rank r runs on `devices[r]`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parsim.errors import ProfileError
from parsim.hardware.device import Device, DeviceType
from parsim.hardware.profile import Profile
from parsim.hardware.topology import Link, Topology


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Attributes: devices (by rank), topology (of the whole machine), profile (measurements and fits)."""

    name: str
    devices: tuple[Device, ...]
    topology: Topology
    profile: Profile

    @property
    def size(self) -> int:
        return len(self.devices)


def cluster_from_profile(profile: Profile, devices: int | Sequence[int] | None = None) -> Cluster:
    """The first `devices` devices of the profile, or the listed ones, or all.

    Raises ProfileError if the profile has not that many, or not those.
    """
    types = {
        name: DeviceType(
            name=name,
            kind=entry.kind,
            memory_bytes=int(entry.memory_bytes.value),
            peak_flop_per_s={precision: number.value for precision, number in entry.peak_flop_per_s.items()},
            memory_bandwidth_bytes_per_s=entry.memory_bandwidth_bytes_per_s.value,
            context_bytes=int(entry.context_bytes.value),
        )
        for name, entry in profile.device_types.items()
    }
    known = {entry.index: Device(index=entry.index, type=types[entry.type], node=entry.node) for entry in profile.devices}
    wanted = list(known) if devices is None else list(known)[:devices] if isinstance(devices, int) else list(devices)
    if isinstance(devices, int) and not 1 <= devices <= len(known):
        raise ProfileError(
            f"profile {profile.name} has {len(known)} devices, {devices} were asked for; ask for 1 to {len(known)}"
        )
    for index in wanted:
        if index not in known:
            raise ProfileError(f"profile {profile.name} has no device {index}; it has {sorted(known)}")
    if len(set(wanted)) != len(wanted):
        raise ProfileError(f"cluster.devices lists a device twice: {wanted}")
    links = tuple(
        Link(
            a=link.a,
            b=link.b,
            kind=link.kind,
            lanes=link.lanes,
            bandwidth_bytes_per_s=profile.link_kinds[link.kind].bandwidth_bytes_per_s.value,
            latency_s=profile.link_kinds[link.kind].latency_s.value,
        )
        for link in profile.links
    )
    return Cluster(
        name=profile.name, devices=tuple(known[index] for index in wanted), topology=Topology(links=links), profile=profile
    )
