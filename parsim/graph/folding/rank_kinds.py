"""Where ranks sit, up to the names of nodes and switches: which of them do alone what others do."""

from __future__ import annotations

from collections.abc import Hashable

from parsim.costs.costs import Costs
from parsim.hardware.device_kinds import device_name
from parsim.plans.mesh import Mesh


def ranks_of_replica(mesh: Mesh, replica: int) -> list[int]:
    """Its ranks, stage by stage. Args: mesh: of the plan. replica: a copy."""
    return [mesh.rank(stage=stage, replica=replica, shard=shard) for stage in range(mesh.pp) for shard in range(mesh.tp)]


class RankKinds:
    """Where ranks sit, up to the names of nodes and switches."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        cluster = costs.cluster
        self._linked = cluster.profile.communication.link_model is not None
        self.share_links = costs.shares_links
        self._paths: dict[Hashable, Hashable] = {}
        self._device = [costs.device_kind(rank) for rank in range(cluster.size)]
        if self._linked:
            shapes: dict[int, int] = {}
            self._shape = [shapes.setdefault(id(shape), len(shapes)) for shape in cluster.nodes.shapes]
            leaves: dict[Hashable, int] = {}
            self._leaf_kind = {name: leaves.setdefault(leaf, len(leaves)) for name, leaf in cluster.nodes.leaves.items()}

    def of_replica(self, mesh: Mesh, replica: int) -> Hashable:
        """Per rank its kind of device, and by number of first appearance its node and its leaf switch, with what these are.

        Replicas of which this is equal cost the same in whatever they do alone.
        """
        ranks = ranks_of_replica(mesh, replica)
        devices = tuple(self._device[rank] for rank in ranks)
        if not self._linked:  # priced by the size of the group alone; loading by the device's own path
            return devices, tuple(self.path(rank) for rank in ranks)
        cluster = self._costs.cluster
        nodes, leaves = cluster.nodes, dict[str, int]()
        seen: dict[int, int] = {}
        places = []
        for rank in ranks:
            node, number = cluster.places[rank]
            leaf = nodes.leaf[node]
            places.append(
                (
                    seen.setdefault(node, len(seen)),
                    number,
                    self._shape[node],
                    leaves.setdefault(leaf, len(leaves)),
                    self._leaf_kind.get(leaf),
                )
            )
        return devices, tuple(places)

    def device(self, rank: int) -> str:
        return self._device[rank]

    def path(self, rank: int) -> Hashable:
        """What a batch passes on its way to the rank's device."""
        cluster = self._costs.cluster
        key = (id(cluster.nodes.shapes[cluster.places[rank][0]]), cluster.places[rank][1]) if self._linked else rank
        if key not in self._paths:
            self._paths[key] = self._path(rank)
        return self._paths[key]

    def _path(self, rank: int) -> Hashable:
        cluster = self._costs.cluster
        device = cluster.devices[rank]
        if self._linked:
            node, number = cluster.places[rank]
            name, topology = cluster.nodes.shapes[node].devices[number], cluster.nodes.shapes[node].topology
        else:
            name, topology = device_name(device.index, device.type.kind), cluster.topology
        socket = topology.socket_of(name)
        path = () if socket is None else topology.path(socket, name)
        return tuple((link.lanes, link.bandwidth_bytes_per_s, link.latency_s) for link in path)
