"""Machines and networks with round numbers, so that times can be worked out by hand."""

from __future__ import annotations

import json
from typing import Any

from parsim.hardware.compose import load_profile
from parsim.hardware.parts import Network
from parsim.hardware.profile import DeviceEntry, LinkEntry, LinkProtocol, NicSlot, Profile, Sourced
from parsim.hardware.records import parse_record

BASE_S, HOP_S, NVLINK = 10e-6, 2e-6, 20e9
CARD, CARD_HOP_S, CARD_LATENCY_S, UPLINK_LATENCY_S = 5e9, 6e-6, 1e-6, 3e-6


def pair_machine(pcie: float = 50e9) -> Profile:
    """Two GPUs joined by one lane of 20 GB/s and behind one PCIe switch (50 GB/s links) with a slot for one card. One protocol:
    10 us for the launch, 2 us per hop, the whole rate."""
    base = load_profile("p3-16xlarge")
    (device_type,) = base.device_types
    kinds = {
        "nvlink": base.link_kinds["nvlink"].model_copy(update={"bandwidth_bytes_per_s": Sourced(value=NVLINK, source="p3")}),
        "pcie": base.link_kinds["pcie"].model_copy(update={"bandwidth_bytes_per_s": Sourced(value=pcie, source="p3")}),
    }
    assert base.communication.link_model is not None
    protocol = LinkProtocol(
        algorithm="ring",
        protocol="Simple",
        base_s=BASE_S,
        hop_s=HOP_S,
        efficiency=1.0,
        tuner_base_s=BASE_S,
        tuner_hop_s=HOP_S,
        tuner_efficiency=1.0,
        source="p3",
        tuner_source="p3",
    )
    model = base.communication.link_model.model_copy(
        update={"protocols": [protocol], "relay_protocols": [], "measured_groups": [], "point_to_point_base_s": BASE_S}
    )
    return base.model_copy(
        update={
            "name": "pair",
            "devices": [DeviceEntry(index=index, type=device_type) for index in range(2)],
            "link_kinds": kinds,
            "links": [
                LinkEntry(a="gpu0", b="gpu1", kind="nvlink", lanes=1),
                LinkEntry(a="gpu0", b="pcie0", kind="pcie"),
                LinkEntry(a="gpu1", b="pcie0", kind="pcie"),
                LinkEntry(a="pcie0", b="socket0", kind="pcie"),
            ],
            "nics": [NicSlot(at="pcie0", kind="pcie")],
            "communication": base.communication.model_copy(update={"link_model": model, "points": []}),
        }
    )


def network_dict(**changes: Any) -> dict[str, Any]:
    """A network file: a card of 5 GB/s and 1 us, two nodes per leaf, uplinks of 3 us; 6 us per hop, ring and tree."""

    def number(value: float) -> dict[str, Any]:
        return {"value": value, "source": "made"}

    def protocol(algorithm: str) -> dict[str, Any]:
        return {"algorithm": algorithm, "protocol": "Simple", "hop_s": CARD_HOP_S, "efficiency": 1.0, "source": "made"}

    document = {
        "schema_version": 1,
        "name": "round",
        "description": "round numbers",
        "sources": {"made": {"kind": "assumption", "text": "chosen for the test"}},
        "card": {"bandwidth_bytes_per_s": number(CARD), "latency_s": number(CARD_LATENCY_S), "per_node": None},
        "fabric": {
            "nodes_per_leaf": changes.pop("nodes_per_leaf", 1000),
            "oversubscription": number(changes.pop("oversubscription", 1.0)),
            "uplink_latency_s": number(UPLINK_LATENCY_S),
        },
        "protocols": [protocol("ring"), protocol("tree")],
        "algorithms": ["ring", "tree", "hierarchical"],
        "relative_sigma": number(0.1),
    }
    if "bandwidth" in changes:
        document["card"]["bandwidth_bytes_per_s"] = number(changes.pop("bandwidth"))
    return {**document, **changes}


def network(**changes: Any) -> Network:
    return parse_record(Network, json.dumps(network_dict(**changes)), "test", "network")
