"""A Cluster: the devices a plan runs on, their links, and the profile that prices them. Rank r runs on `devices[r]`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache

from parsim.errors import ProfileError
from parsim.hardware.device import Device, DeviceType
from parsim.hardware.device_kinds import allocator_of, device_name
from parsim.hardware.fabric import cluster_links, node_links
from parsim.hardware.network import Network, load_network, shipped_networks
from parsim.hardware.nodes import Nodes, nodes_of
from parsim.hardware.profile import Profile
from parsim.hardware.topology import Topology

MOST_DEVICES = 2**17
"""Of a cluster: more than any machine of today has, and a few seconds to build."""

NodeSpread = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Attributes: devices (by rank), topology (of all nodes), profile (measurements and fits of one node), network (that
    joins several nodes; None for one)."""

    name: str
    devices: tuple[Device, ...]
    topology: Topology
    profile: Profile
    network: Network | None = None

    def __repr__(self) -> str:
        """`Cluster(dgx1-v100-32gb: 8 x V100-SXM2-32GB)`."""
        types = Counter(device.type.name for device in self.devices)
        devices = ", ".join(f"{count} x {name}" for name, count in types.items())
        return f"Cluster({self.name}: {devices})"

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, tuple(device.index for device in self.devices), self.topology))

    @property
    def size(self) -> int:
        return len(self.devices)

    def core_of_rank(self, world_size: int) -> tuple[int, ...]:
        """Cores of the first `world_size` ranks, numbered from 0: ranks with the same number share one. Devices without a
        core share nothing."""
        seen: dict[tuple[int, int | None, int], int] = {}
        return tuple(
            seen.setdefault((device.node, device.core, rank if device.core is None else -1), len(seen))
            for rank, device in enumerate(self.devices[:world_size])
        )

    @property
    def nodes(self) -> Nodes:
        """The nodes of the topology (of the whole machine, whatever devices are used)."""
        return nodes_of(self.topology)

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Per rank its node and the number of its device there. Raises ProfileError for a device that no link joins."""
        places = self.nodes.place
        names = [device_name(device.index, device.type.kind) for device in self.devices]
        if lost := [name for name in names if name not in places]:
            raise ProfileError(
                f"profile {self.profile.name} has no link to {', '.join(lost)}, but prices communication by links; list them"
            )
        return tuple(places[name] for name in names)

    @cached_property
    def most_on_a_node(self) -> int:
        """The largest number of ranks on one node."""
        return max(Counter(node for node, _ in self.places).values())

    def spread(self, group: tuple[int, ...]) -> NodeSpread:
        """Devices of a group's ranks: per node, in order, the sorted numbers of their devices there."""
        if group not in self._spreads:
            members: dict[int, list[int]] = {}
            for rank in group:
                node, number = self.places[rank]
                members.setdefault(node, []).append(number)
            self._spreads[group] = tuple((node, tuple(sorted(numbers))) for node, numbers in sorted(members.items()))
        return self._spreads[group]

    @cached_property
    def _spreads(self) -> dict[tuple[int, ...], NodeSpread]:
        return {}


def cluster_from_profile(
    profile: Profile,
    devices: int | Sequence[int] | None = None,
    *,
    nodes: int = 1,
    network: str | Network | None = None,
) -> Cluster:
    """The first `devices` devices of each of `nodes` such machines, or the listed ones, or all.

    Args:
        devices: listed numbers count through the nodes: device d of node k is k * (devices per node) + d.
        network: between the nodes: a shipped network by name, the path of one, or a Network. Needed for nodes > 1; with one
            node it prices nothing.

    Raises:
        ProfileError: the profile lacks that many devices, or these; the topology is not connected; no network, an
            unknown one, or a machine that cannot be multiplied.
    """
    if nodes < 1:
        raise ProfileError(f"a cluster needs nodes >= 1, got {nodes}")
    if nodes * len(profile.devices) > MOST_DEVICES:
        raise ProfileError(
            f"nodes = {nodes:,} of profile {profile.name} are {nodes * len(profile.devices):,} devices, and a cluster may have "
            f"{MOST_DEVICES:,} at most; use nodes <= {MOST_DEVICES // len(profile.devices):,}"
        )
    if nodes > 1 and network is None:
        raise ProfileError(f"nodes = {nodes} needs a network between them: one of {', '.join(shipped_networks())}")
    joined = load_network(network) if isinstance(network, str) else network
    if nodes > 1 and joined is not None:
        links, name = cluster_links(profile, nodes, joined), f"{nodes} x {profile.name} on {joined.name}"
    else:
        links, name, joined = node_links(profile), profile.name, None
    known = _devices(profile, nodes)
    per_node = len(profile.devices)
    if isinstance(devices, int) and not 1 <= devices <= per_node:
        each = "" if nodes == 1 else " per node"
        raise ProfileError(
            f"profile {profile.name} has {per_node} devices, {devices} were asked for{each}; ask for 1 to {per_node}"
        )
    wanted = (
        [index for place, index in enumerate(known) if place % per_node < devices]
        if isinstance(devices, int)
        else list(known if devices is None else devices)
    )
    for index in wanted:
        if index not in known:
            raise ProfileError(f"{_whose(profile, nodes)} no device {index}; it has {_range(known)}")
    if len(set(wanted)) != len(wanted):
        raise ProfileError(f"cluster.devices lists a device twice: {wanted}")
    topology = Topology(links=links)
    if profile.communication.link_model is not None:
        _check_connected(profile, Topology(links=node_links(profile)))
    return _first_equal(
        Cluster(name=name, devices=tuple(known[index] for index in wanted), topology=topology, profile=profile, network=joined)
    )


@lru_cache(maxsize=8)
def _first_equal(cluster: Cluster) -> Cluster:
    """The first of equal clusters. Caches find it by identity, instead of comparing thousands of links."""
    return cluster


def _devices(profile: Profile, nodes: int) -> dict[int, Device]:
    """By number; node by node, each in the order of the profile."""
    types = {
        name: DeviceType(
            name=name,
            kind=entry.kind,
            memory_bytes=int(entry.memory_bytes.value),
            peak_flop_per_s={precision: number.value for precision, number in entry.peak_flop_per_s.items()},
            memory_bandwidth_bytes_per_s=entry.memory_bandwidth_bytes_per_s.value,
            context_bytes=int(entry.context_bytes.value),
            allocator=allocator_of(entry),
        )
        for name, entry in profile.device_types.items()
    }
    if nodes == 1:
        return {
            entry.index: Device(index=entry.index, type=types[entry.type], node=entry.node, core=entry.core)
            for entry in profile.devices
        }
    per_node = len(profile.devices)
    return {
        node * per_node + place: Device(index=node * per_node + place, type=types[entry.type], node=node, core=entry.core)
        for node in range(nodes)
        for place, entry in enumerate(profile.devices)
    }


def _check_connected(profile: Profile, topology: Topology) -> None:
    """All devices of a machine hang together; whatever hangs on no device is a slip of the file too."""
    names = [device_name(entry.index, profile.device_types[entry.type].kind) for entry in profile.devices]
    if len(names) == 1:
        return
    parts = [sorted(part) for part in topology.parts()]
    parts += [[name] for name in names if not topology.at(name)]
    if len(parts) > 1:
        listing = " | ".join(", ".join(part[:6]) + (", ..." if len(part) > 6 else "") for part in parts[:4])
        raise ProfileError(
            f"the topology of profile {profile.name} falls into {len(parts)} parts that no link connects: {listing}; "
            "add the missing link"
        )


def _whose(profile: Profile, nodes: int) -> str:
    return f"profile {profile.name} has" if nodes == 1 else f"{nodes} nodes of profile {profile.name} have"


def _range(known: dict[int, Device]) -> str:
    numbers = sorted(known)
    return str(numbers) if len(numbers) <= 32 else f"{numbers[0]} to {numbers[-1]}"
