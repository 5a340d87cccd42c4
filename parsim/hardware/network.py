"""The network between the nodes of a cluster: one JSON per network, every number with its source, as in a profile.

A network file holds the bandwidth of one network card, the latency of a message, and the efficiency of the library's
protocols. It also holds the switches: leaf switches that serve `nodes_per_leaf` nodes each, joined by one spine, which
represents all spine switches. Pydantic checks the file at the boundary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from parsim.files import write_text_atomically
from parsim.hardware.profile import LinkNumbers, Sourced, SourcedFile, SourceEntry
from parsim.hardware.records import NonNegative, Positive, ProfileRecord, load_record, parse_record, shipped, to_text

Algorithm = Literal["ring", "tree", "hierarchical"]
CardCount = Annotated[int, Field(strict=True, ge=1, le=1024)]
"""Network cards of a node: each is an object of its own, and a billion of them would take gigabytes."""


class Card(LinkNumbers):
    """One network card (one rail): the bandwidth that a collective reaches, and the latency to its leaf.

    Attributes:
        per_node: cards per node; None: one in each slot of the profile.
    """

    per_node: CardCount | None = None


class Fabric(ProfileRecord):
    """Two levels of switches.

    Attributes:
        oversubscription: capacity of a leaf's cards over that of its uplinks; 1 never blocks.
        uplink_latency_s: one way, from a leaf to the spine.
    """

    nodes_per_leaf: Annotated[int, Field(ge=1)]
    oversubscription: Sourced
    uplink_latency_s: Sourced


class NetworkProtocol(ProfileRecord):
    """One algorithm under one protocol of the library between nodes.

    Attributes:
        hop_s: per step over the network, beside the latency of the links. efficiency: of the card's bandwidth.
        inside_efficiency: of the rate that rings reach inside a node under the same protocol; inside_source says why.
    """

    algorithm: Literal["ring", "tree"]
    protocol: str
    hop_s: NonNegative
    efficiency: Positive
    inside_efficiency: Positive = 1.0
    source: str
    inside_source: str | None = None


class NetworkPoint(ProfileRecord):
    """One collective that was measured between nodes (or "send_recv", from the first device to the last).

    Attributes:
        machine: a node, in the form of --on or as a profile's path. hosts: per node the numbers of its devices.
    """

    operation: str
    machine: str
    hosts: Annotated[list[list[int]], Field(min_length=2)]
    size_bytes: Annotated[int, Field(gt=0)]
    seconds: Positive
    source: str


class Network(SourcedFile):
    """The whole file.

    Attributes:
        algorithms: which all_reduces the library has here. relative_sigma: spread of the times over it.
        points: that the protocols were fitted to. measured_sigma: the spread of groups of their operation and shape.
    """

    sources: dict[str, SourceEntry]
    card: Card
    fabric: Fabric
    protocols: Annotated[list[NetworkProtocol], Field(min_length=1)]
    algorithms: list[Algorithm] = Field(default=["ring", "tree", "hierarchical"], min_length=1)
    relative_sigma: Sourced
    points: list[NetworkPoint] = Field(default=[])
    measured_sigma: Sourced | None = None

    def sigma(self, operation: str, members: list[int]) -> float:
        """Relative spread of an operation over nodes with so many members each."""
        alike = any(point.operation == operation and [len(host) for host in point.hosts] == members for point in self.points)
        return self.measured_sigma.value if self.measured_sigma is not None and alike else self.relative_sigma.value

    @model_validator(mode="after")
    def _holds_together(self) -> Network:
        if self.fabric.oversubscription.value < 1:
            raise ValueError(f"a fabric needs an oversubscription >= 1, got {self.fabric.oversubscription.value:g}")
        if not any(entry.algorithm == "ring" for entry in self.protocols):
            raise ValueError("protocols must hold at least one of the ring, on which every collective can run")
        return self


def shipped_networks() -> list[str]:
    """Names of the networks that come with the package."""
    return shipped("networks")


def load_network(name_or_path: str) -> Network:
    """A network by shipped name or by path.

    Raises:
        ProfileError: an unknown name (with near matches), or a broken file (with the path of the wrong key).
    """
    return load_record(Network, ("networks",), "network", name_or_path, {})


def parse_network(text: str, where: str) -> Network:
    """Check a network's JSON text, named `where` in messages. Raises ProfileError as `parse_record`."""
    return parse_record(Network, text, where, "network")


def save_network(network: Network, path: Path) -> None:
    """Write a network atomically: a stopped process leaves the old file or the new one."""
    write_text_atomically(path, to_text(network.model_dump(mode="json")))


def with_cards(network: Network, per_node: int) -> Network:
    """A network with so many cards (>= 1) per node; more than the machine has slots share them."""
    return network.model_copy(update={"card": network.card.model_copy(update={"per_node": per_node})})
