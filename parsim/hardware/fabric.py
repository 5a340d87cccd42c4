"""Several nodes of one machine, joined by leaf and spine switches: the links of the whole cluster as one topology."""

from __future__ import annotations

from collections.abc import Sequence

from parsim.errors import ProfileError
from parsim.hardware.device_kinds import device_name
from parsim.hardware.network import Network
from parsim.hardware.profile import LinkEntry, NicSlot, Profile
from parsim.hardware.topology import HOST_ROLES, NIC_ROLE, Link, role_of


def node_links(profile: Profile) -> tuple[Link, ...]:
    """The links of the machine as the profile lists them."""
    return tuple(_link(profile, entry.a, entry.b, entry) for entry in profile.links)


def cluster_links(profile: Profile, nodes: int, network: Network) -> tuple[Link, ...]:
    """The links of `nodes` copies of the machine, of their network cards, and of the switches that join them.

    Device d of node k is number k * (devices of the profile) + its place in the profile; every other end of node k is
    called "node<k>/<end>". Card i of a node is "node<k>/nic<i>", plugged into slot i of the profile. Slots are reused if
    the network has more cards than the profile has slots. Without slots in the profile, cards are plugged into host
    memory. All cards of a node reach leaf k // nodes_per_leaf; with more than one leaf, each is joined to spine0 by
    uplinks that carry its cards' bandwidth over the oversubscription. A leaf that serves fewer nodes has fewer uplinks.

    Leaves out how single flows are routed over several spine switches: those that collide share less than this.

    Raises ProfileError if the machine has no place for a card, or is several nodes itself.
    """
    _check_machine(profile)
    slots = _slots(profile, network)
    local = {
        device_name(entry.index, profile.device_types[entry.type].kind): place for place, entry in enumerate(profile.devices)
    }
    per_node = len(profile.devices)
    card, fabric = network.card, network.fabric
    leaves = -(-nodes // fabric.nodes_per_leaf)
    links: list[Link] = []
    for node in range(nodes):

        def name(end: str, node: int = node) -> str:
            if end in local:
                return f"{role_of(end)}{node * per_node + local[end]}"
            return f"node{node}/{end}"

        links += [_link(profile, name(entry.a), name(entry.b), entry) for entry in profile.links]
        for number, slot in enumerate(slots):
            nic = f"node{node}/{NIC_ROLE}{number}"
            links.append(_link(profile, name(slot.at), nic, slot))
            links.append(
                Link(
                    a=nic,
                    b=f"leaf{node // fabric.nodes_per_leaf}",
                    kind=network.name,
                    lanes=1,
                    bandwidth_bytes_per_s=card.bandwidth_bytes_per_s.value,
                    latency_s=card.latency_s.value,
                )
            )
    if leaves > 1:
        for leaf in range(leaves):
            served = min(fabric.nodes_per_leaf, nodes - leaf * fabric.nodes_per_leaf)
            cards = served * len(slots)
            links.append(
                Link(
                    a=f"leaf{leaf}",
                    b="spine0",
                    kind=network.name,
                    lanes=cards,
                    bandwidth_bytes_per_s=card.bandwidth_bytes_per_s.value / fabric.oversubscription.value,
                    latency_s=fabric.uplink_latency_s.value,
                )
            )
    return tuple(links)


def _check_machine(profile: Profile) -> None:
    if len({entry.node for entry in profile.devices}) > 1:
        raise ProfileError(f"profile {profile.name} has several nodes itself; use it with nodes = 1, or a profile of one node")
    if profile.communication.link_model is None:
        raise ProfileError(
            f"profile {profile.name} prices communication by group of ranks as measured, not by links, so nothing is known of "
            "several of it. Set nodes = 1, or choose a profile with a link model"
        )


def _slots(profile: Profile, network: Network) -> Sequence[NicSlot]:
    """Where the cards of one node go."""
    slots: list[NicSlot] = list(profile.nics)
    if not slots:
        hosts = sorted({end for link in profile.links for end in (link.a, link.b) if role_of(end) in HOST_ROLES})
        if not hosts:
            raise ProfileError(
                f"profile {profile.name} names no slot for a network card and no host memory; add "
                'nics = [{"at": ..., "kind": ...}] to it'
            )
        kind = next(link.kind for link in profile.links if hosts[0] in (link.a, link.b))
        slots = [NicSlot(at=host, kind=kind) for host in hosts]
        return [slots[number % len(slots)] for number in range(network.card.per_node or 1)]
    return [slots[number % len(slots)] for number in range(network.card.per_node or len(slots))]


def _link(profile: Profile, a: str, b: str, entry: LinkEntry | NicSlot) -> Link:
    kind = profile.link_kinds[entry.kind]
    return Link(
        a=a,
        b=b,
        kind=entry.kind,
        lanes=entry.lanes,
        bandwidth_bytes_per_s=kind.bandwidth_bytes_per_s.value,
        latency_s=kind.latency_s.value,
    )
