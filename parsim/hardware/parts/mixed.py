"""A cluster of nodes with different GPUs: every node has GPUs of one kind, and all nodes have as many.

Links inside nodes are those of one group for all: of the link that was asked for, else of the group with the slowest one.
So collectives inside a node of faster links are priced too slow. The host's time per launch is that of the slowest host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from parsim.errors import ProfileError
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compute_records import ComputeRecords
from parsim.hardware.network import Network
from parsim.hardware.parts.compose import profile_from_parts
from parsim.hardware.parts.load import load_gpu, load_link
from parsim.hardware.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """So many nodes of one GPU; gpus_per_node None: as many as the usual machine has."""

    gpu: str
    nodes: int = 1
    gpus_per_node: int | None = None


def mixed_cluster(
    groups: Sequence[NodeGroup],
    network: Network | None,
    *,
    devices: int | Sequence[int] | None = None,
    link: str | None = None,
    profile: Profile | None = None,
) -> Cluster:
    """The nodes of all groups, one after another.

    Args:
        groups: at least one. network: that joins all nodes. devices: as of `cluster_from_profile`. link: inside every node.
        profile: of a cluster of these groups, such as a run folder keeps; None: made of the parts.

    Raises:
        ProfileError: an unknown part, groups with different numbers of GPUs per node, or no network for several nodes.
    """
    counts = [group.gpus_per_node or load_gpu(group.gpu).gpus_per_node for group in groups]
    if len(set(counts)) > 1:
        told = ", ".join(f"{group.gpu} {count}" for group, count in zip(groups, counts, strict=True))
        raise ProfileError(f"groups have different numbers of GPUs per node ({told}); give all the same gpus_per_node")
    made_of = [profile_from_parts(group.gpu, count, link) for group, count in zip(groups, counts, strict=True)]
    slowest = min(range(len(groups)), key=lambda number: _rate(groups[number].gpu))
    base = made_of[slowest if link is None else 0]
    nodes = sum(group.nodes for group in groups)
    inside = (
        ""
        if link is not None or len({load_gpu(group.gpu).link for group in groups}) == 1
        else (f", links inside all nodes as of {groups[slowest].gpu}")
    )
    parts = " + ".join(
        f"{group.nodes} x {count}x{load_gpu(group.gpu).name}" for group, count in zip(groups, counts, strict=True)
    )
    made = cluster_from_profile(profile or _merged(base, made_of, parts), devices, nodes=nodes, network=network)
    kinds = [
        cluster_from_profile(own).devices[0].type
        for own, group in zip(made_of, groups, strict=True)
        for _ in range(group.nodes)
    ]
    joined = "" if made.network is None else f" on {made.network.name}"
    mixed = tuple(replace(device, type=kinds[device.node]) for device in made.devices)
    return replace(made, name=f"{parts}{joined}{inside}", devices=mixed)


def _rate(gpu: str) -> float:
    """Bytes per second that a GPU's links to its node carry."""
    link = load_link(load_gpu(gpu).link)
    return link.lanes * link.bandwidth_bytes_per_s.value


def _merged(base: Profile, profiles: Sequence[Profile], name: str) -> Profile:
    """One profile that knows the GPUs of all groups, with the links of one."""
    unlike = {next(iter(profile.device_types)): profile for profile in profiles}.values()
    hosts = [profile.host for profile in unlike if profile.host is not None]
    compute = ComputeRecords(
        operator_fits=[fit for profile in unlike for fit in profile.compute.operator_fits],
        efficiencies=[entry for profile in unlike for entry in profile.compute.efficiencies],
    )
    return base.model_copy(
        update={
            "name": name,
            "sources": {key: entry for profile in unlike for key, entry in profile.sources.items()},
            "device_types": {key: entry for profile in unlike for key, entry in profile.device_types.items()},
            "compute": compute,
            "host": max(hosts, key=lambda host: host.launch_s or 0.0) if hosts else None,
        }
    )
