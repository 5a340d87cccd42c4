"""What a copy between a device and its host costs, and an update on the host, where a plan offloads state or activations.

    copy    bytes over the slowest link between the device and the host's memory, and the latency of the links
    update  bytes that the host reads and writes per parameter, over the rank's share of the bandwidth of the host's memory

All ranks of a node copy and update at the same time. So ranks whose paths share a link share its bandwidth, and the ranks of a
node share its memory. Devices of one type are priced alike, by the slowest of their paths.

Per parameter the update reads the gradient, reads and writes the optimizer's state and the weights that it updates, and writes
the parameters to send, as wide as they are sent. That an update on the host is bound by its memory is assumed. Leaves out: the
host's arithmetic, other work of its cores, and copies that slow the update.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from parsim.costs.estimate import Estimate, Term
from parsim.costs.memory.rank_memory import optimizer_bytes
from parsim.errors import CostError
from parsim.hardware.cluster import Cluster
from parsim.hardware.device import Device
from parsim.hardware.device_kinds import DEVICE_KINDS, device_name
from parsim.hardware.topology import Link
from parsim.model.number_formats import number_format
from parsim.units import format_bytes
from parsim.work import HostCopy, HostUpdate

HOST_SIGMA = 0.25
"""Assumed relative spread of copies and updates: they are priced by bandwidth, not measured."""
FULL_BYTES = 4


class HostPath(NamedTuple):
    """Between a device and its host: bytes per second in each direction, seconds, and where the numbers come from."""

    bytes_per_s: float
    latency_s: float
    text: str


def host_path(cluster: Cluster, ranks: int, device: Device) -> HostPath:
    """The slowest way to the host of the devices of one type, on the first node that has some.

    Args:
        cluster: its profile and links. ranks: of the plan, all of which copy at once. device: of the type.

    Raises:
        CostError: the device computes in the host's memory, or no link to the host is known.
    """
    if DEVICE_KINDS[device.type.kind].on_cores:
        raise CostError(
            f"offload to the host needs a device with memory of its own, and {device.type.name} computes in the host's; drop "
            "plan.optimizer_offload and plan.activation_offload"
        )
    own = cluster.profile.host_memory
    if own is not None and own.link_bytes_per_s is not None:
        rate = own.link_bytes_per_s
        return HostPath(rate, 0.0, f"host link of {format_bytes(rate)}/s per device as given ({own.source})")
    used = cluster.devices[:ranks]
    node = next(entry.node for entry in (*used, device) if entry.type.name == device.type.name)
    paths = [(entry, _path(cluster, entry)) for entry in used or (device,) if entry.node == node]
    if not paths:
        paths = [(device, _path(cluster, device))]
    users = Counter(link for _, path in paths for link in set(path))
    found = [
        (min(link.capacity_bytes_per_s / users[link] for link in path), path)
        for entry, path in paths
        if entry.type.name == device.type.name and path
    ]
    if not found or any(not path for entry, path in paths if entry.type.name == device.type.name):
        raise CostError(
            f"no link between {device.type.name} and its host is known: profile {cluster.profile.name} lists none. Set "
            "cluster.host_link_bytes_per_s (of one device, in one direction) or host_memory of the profile, or drop the offload"
        )
    rate, path = min(found, key=lambda pair: pair[0])
    narrowest = min(path, key=lambda link: link.capacity_bytes_per_s / users[link])
    shared = users[narrowest]
    with_others = f", shared by {shared} devices" if shared > 1 else ""
    text = f"{narrowest.kind} at {format_bytes(narrowest.capacity_bytes_per_s)}/s{with_others}"
    return HostPath(rate, sum(link.latency_s for link in path), text)


def _path(cluster: Cluster, device: Device) -> tuple[Link, ...]:
    name = device_name(device.index, device.type.kind)
    socket = cluster.topology.socket_of(name)
    return () if socket is None else cluster.topology.path(socket, name)


def estimate_host_copy(work: HostCopy, path: HostPath) -> Estimate:
    """Price one copy.

    Args:
        work: its bytes. path: between the device and its host.

    Returns:
        An Estimate. Leaves out what a batch takes of the same link, and that copies slow computation.
    """
    return Estimate.of(
        (
            Term("bytes", "start", work.size_bytes / path.bytes_per_s, "published", path.text),
            Term("latency", "plus", path.latency_s, "published", "of the links"),
        ),
        source="published",
        parameters=(("host link", HOST_SIGMA),),
        detail="bytes over the bandwidth of the link to the host, not measured",
    )


def ranks_on_a_node(cluster: Cluster, ranks: int) -> int:
    """Of a plan, on the node that has most."""
    return max(Counter(device.node for device in cluster.devices[:ranks]).values(), default=1)


def update_bytes(optimizer: str, precision: str, *, master_weights: bool, ema: bool) -> int:
    """Bytes that the host reads and writes per parameter.

    Args:
        optimizer: a key of OPTIMIZERS. precision, master_weights, ema: as in RUN.toml.
    """
    state = optimizer_bytes(optimizer, precision, master_weights=master_weights, ema=ema)[0]
    width = number_format(precision).weight_bytes
    has_copies = width < FULL_BYTES and master_weights  # the master weights are among the state
    return width + 2 * state + (width if has_copies else 2 * width)


def estimate_host_update(
    work: HostUpdate, optimizer: str, cluster: Cluster, ranks: int, *, precision: str, master_weights: bool, ema: bool
) -> Estimate:
    """Price an update that the host makes.

    Args:
        work: how many parameters. optimizer: its row. cluster: the bandwidth of its hosts' memory.
        ranks: of the plan; those of a node share it. precision, master_weights, ema: decide how wide state and weights are.

    Returns:
        An Estimate. Leaves out the host's arithmetic.

    Raises:
        CostError: the bandwidth of the host's memory is not known.
    """
    host = cluster.profile.host_memory
    if host is None or host.bandwidth_bytes_per_s is None:
        raise CostError(
            "plan.optimizer_offload updates parameters in the host's memory, and no bandwidth of that memory is known for "
            f"{cluster.profile.name}: set cluster.host_memory_bandwidth_bytes_per_s (of a node, all sockets together), or "
            "host_memory of the profile"
        )
    each, sharing = update_bytes(optimizer, precision, master_weights=master_weights, ema=ema), ranks_on_a_node(cluster, ranks)
    rate = host.bandwidth_bytes_per_s / sharing
    what = f"{each} bytes per parameter over {format_bytes(rate)}/s, a node's memory shared by {sharing} ranks"
    return Estimate.of(
        (Term("bytes", "start", each * work.elements / rate, "published", what),),
        source="published",
        parameters=(("host memory", HOST_SIGMA),),
        detail=f"{what}; not measured",
    )
