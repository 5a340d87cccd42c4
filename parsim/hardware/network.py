"""The network between the nodes of a cluster: one JSON per network, every number with its source, as in a profile.

A network file holds the bandwidth of one network card, the latency of a message, and the efficiency of the library's
protocols. It also holds the switches: leaf switches that serve `nodes_per_leaf` nodes each, joined by one spine, which
represents all spine switches. Pydantic checks the file at the boundary.
"""

from __future__ import annotations

import importlib.resources
import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from parsim.errors import ProfileError, near_matches
from parsim.files import read_text
from parsim.hardware.profile import Sourced, SourceEntry
from parsim.hardware.records import NonNegative, Positive, ProfileRecord, check_latency, check_rate, parse_record, source_keys

Algorithm = Literal["ring", "tree", "hierarchical"]
CardCount = Annotated[int, Field(strict=True, ge=1, le=1024)]
"""Network cards of a node: each is an object of its own, and a billion of them would take gigabytes."""


class Card(ProfileRecord):
    """One network card (one rail).

    Attributes:
        bandwidth_bytes_per_s: what a collective reaches, in each direction. latency_s: one way, from the card to its leaf.
        per_node: cards per node; None: one in each slot of the profile.
    """

    bandwidth_bytes_per_s: Sourced
    latency_s: Sourced
    per_node: CardCount | None = None

    @model_validator(mode="after")
    def _can_be(self) -> Card:
        check_rate("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s.value)
        check_latency("latency_s", self.latency_s.value)
        return self


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


class Network(ProfileRecord):
    """The whole file.

    Attributes:
        algorithms: which all_reduces the library has here. relative_sigma: spread of the times over it.
    """

    schema_version: Literal[1]
    name: str
    description: str
    sources: dict[str, SourceEntry]
    card: Card
    fabric: Fabric
    protocols: Annotated[list[NetworkProtocol], Field(min_length=1)]
    algorithms: list[Algorithm] = Field(default=["ring", "tree", "hierarchical"], min_length=1)
    relative_sigma: Sourced

    @model_validator(mode="after")
    def _holds_together(self) -> Network:
        for source in source_keys(self.model_dump()):
            if source not in self.sources:
                raise ValueError(f"source {source!r} is not listed under sources{near_matches(source, self.sources)}")
        if self.fabric.oversubscription.value < 1:
            raise ValueError(f"a fabric needs an oversubscription >= 1, got {self.fabric.oversubscription.value:g}")
        if not any(entry.algorithm == "ring" for entry in self.protocols):
            raise ValueError("protocols must hold at least one of the ring, on which every collective can run")
        return self


def shipped_networks() -> list[str]:
    """Names of the networks that come with the package."""
    folder = importlib.resources.files("hardware_profiles").joinpath("networks")
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def load_network(name_or_path: str) -> Network:
    """A network by shipped name or by path.

    Args:
        name_or_path: a name of `shipped_networks`, or the path of a JSON file.

    Raises:
        ProfileError: an unknown name (with near matches), or a broken file (with the path of the wrong key).
    """
    path = Path(name_or_path)
    if path.suffix == ".json" or os.sep in name_or_path:
        try:
            return parse_network(read_text(path), str(path))
        except (OSError, ValueError) as error:
            raise ProfileError(f"cannot read network {path}: {error}; give a JSON file or one of {_listing()}") from error
    if name_or_path not in shipped_networks():
        near = near_matches(name_or_path, shipped_networks())
        raise ProfileError(
            f"unknown network {name_or_path!r}{near}{'' if near.startswith('; known') else f'; known: {_listing()}'}; or "
            "describe your own in a JSON file as hardware_profiles/README.md says, and give its path"
        )
    file = importlib.resources.files("hardware_profiles").joinpath("networks", f"{name_or_path}.json")
    return parse_network(file.read_text("utf-8"), name_or_path)


def parse_network(text: str, where: str) -> Network:
    """Check a network's JSON text. Raises ProfileError as `parse_record`.

    Args:
        text: the JSON. where: its name in messages.
    """
    return parse_record(Network, text, where, "network")


def with_cards(network: Network, per_node: int) -> Network:
    """The same network with so many cards per node.

    Args:
        network: of the cluster. per_node: >= 1; more than the machine has slots share them.
    """
    return network.model_copy(update={"card": network.card.model_copy(update={"per_node": per_node})})


def _listing() -> str:
    return ", ".join(shipped_networks())
