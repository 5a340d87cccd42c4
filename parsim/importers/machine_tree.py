"""How the GPUs and network cards of a machine hang together, and a profile with these links.

Readers of topologies (`topo_matrix`, `lstopo`) return a MachineTree. It says what joins what; how fast a lane is stays what
the profile says, since neither tool knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parsim.errors import ImportedFileError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.devices import device_name
from parsim.hardware.profile import LinkEntry, NicSlot, Profile, SourceEntry

DIRECT, HOST, SOCKETS = "nvlink", "pcie", "smp"
SWITCH = "nvswitch0"
MOST_LANES = 18
"""NVLinks of one GPU. A matrix that shows more in one row shows what goes through switches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineTree:
    """Attributes:
    lanes: direct lanes between GPUs i < j (empty: the tool does not show them, or there are none).
    shows_lanes: whether the tool would have shown direct lanes.
    switch: per GPU the number of its PCIe switch. socket: per PCIe switch the number of its socket.
    cards: names of network cards, each with the end it is plugged into ("pcie0", "socket1").
    """

    lanes: Mapping[tuple[int, int], int]
    shows_lanes: bool
    switch: tuple[int, ...]
    socket: tuple[int, ...]
    cards: tuple[tuple[str, str], ...]

    @property
    def gpus(self) -> int:
        return len(self.switch)

    @property
    def switched_lanes(self) -> int | None:
        """Lanes of each GPU to a switch, where all pairs show the same and too many to be direct; else None."""
        pairs = self.gpus * (self.gpus - 1) // 2
        values = set(self.lanes.values())
        if len(self.lanes) < pairs or len(values) != 1 or not pairs:
            return None
        (each,) = values
        return each if each * (self.gpus - 1) > MOST_LANES else None

    def direct_links(self) -> list[LinkEntry]:
        """NVLinks, lane by lane."""
        if (each := self.switched_lanes) is not None:
            return [LinkEntry(a=f"gpu{gpu}", b=SWITCH, kind=DIRECT, lanes=each) for gpu in range(self.gpus)]
        return [LinkEntry(a=f"gpu{a}", b=f"gpu{b}", kind=DIRECT, lanes=lanes) for (a, b), lanes in sorted(self.lanes.items())]

    def host_links(self) -> list[LinkEntry]:
        """The PCIe tree and the links between sockets."""
        links = [LinkEntry(a=f"gpu{gpu}", b=f"pcie{switch}", kind=HOST) for gpu, switch in enumerate(self.switch)]
        links += [LinkEntry(a=f"pcie{switch}", b=f"socket{socket}", kind=HOST) for switch, socket in enumerate(self.socket)]
        sockets = sorted({*self.socket, *(int(end[6:]) for _, end in self.cards if end.startswith("socket"))})
        links += [
            LinkEntry(a=f"socket{a}", b=f"socket{b}", kind=SOCKETS)
            for place, a in enumerate(sockets)
            for b in sockets[place + 1 :]
        ]
        return links

    def summary(self) -> dict[str, Any]:
        """Counts for the report."""
        each = self.switched_lanes
        return {
            "gpus": self.gpus,
            "direct": (
                f"{each} lanes of each GPU to a switch"
                if each is not None
                else f"{sum(self.lanes.values())} lanes between {len(self.lanes)} pairs"
                if self.shows_lanes
                else "not shown by the tool; kept"
            ),
            "pcie_switches": len(self.socket),
            "sockets": len(set(self.socket)),
            "cards": [f"{name} at {end}" for name, end in self.cards],
        }


def with_links(profile: Profile, tree: MachineTree, digest: str, what: str) -> Profile:
    """The profile with the links and card slots of a tree.

    Groups that the link model was measured on keep that standing only if the direct links stay what they were.

    Args:
        profile: of the same GPUs. tree: what joins them. digest: of the file. what: tool and file, for the source.

    Raises:
        ImportedFileError: another number of GPUs, or a kind of link whose speed the profile does not tell.
    """
    names = [device_name(entry.index, profile.device_types[entry.type].kind) for entry in profile.devices]
    if names != [f"gpu{number}" for number in range(tree.gpus)]:
        raise ImportedFileError(
            f"the file shows {tree.gpus} GPUs, and profile {profile.name} has {len(names)} devices ({names[0]}, ...); import "
            f"into a profile of {tree.gpus} GPUs: --on {tree.gpus}xGPU"
        )
    old_direct = [link for link in profile.links if link.kind == DIRECT]
    direct = tree.direct_links() if tree.shows_lanes else old_direct
    links = [*direct, *tree.host_links()]
    if lost := sorted({link.kind for link in links} - set(profile.link_kinds)):
        raise ImportedFileError(
            f"the file shows links of kind {lost[0]!r}, and profile {profile.name} does not say how fast they are (it knows "
            f"{', '.join(sorted(profile.link_kinds))}); start from a machine that has them: --on {tree.gpus}xGPU"
        )
    model = profile.communication.link_model
    if model is not None and model.link_kind == DIRECT and not direct:
        raise ImportedFileError(
            f"the file shows no NVLink, and profile {profile.name} prices collectives by NVLink; start from a machine on PCIe: "
            "--on 4xa40"
        )
    communication = profile.communication
    if model is not None and {_key(link) for link in direct} != {_key(link) for link in old_direct}:
        communication = communication.model_copy(update={"link_model": model.model_copy(update={"measured_groups": []})})
    key = f"topology-{digest}"
    made = profile.model_copy(
        update={
            "links": links,
            "nics": [NicSlot(at=end, kind=HOST) for _, end in tree.cards],
            "nics_source": key if tree.cards else profile.nics_source,
            "communication": communication,
            "sources": {**profile.sources, key: SourceEntry(kind="measurement", text=what)},
        }
    )
    cluster_from_profile(made)  # connected, or it says what is missing
    return made


def _key(link: LinkEntry) -> tuple[frozenset[str], str, int]:
    return frozenset((link.a, link.b)), link.kind, link.lanes


def classes(count: int, joined: list[tuple[int, int]]) -> tuple[int, ...]:
    """Per member the number of its class, in order of first appearance; `joined` pairs are of one class."""
    parent = list(range(count))

    def root(member: int) -> int:
        while parent[member] != member:
            parent[member] = parent[parent[member]]
            member = parent[member]
        return member

    for a, b in joined:
        parent[max(root(a), root(b))] = min(root(a), root(b))
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(root(member), len(numbers)) for member in range(count))
