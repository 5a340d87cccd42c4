"""Networks that were derived from logs between two nodes and from line rates; all else is as in `infiniband-400g`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parsim.hardware.network import load_network

BASE = "infiniband-400g"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What one card of a network reaches, and where that was read. per_node: cards; None: one for each slot."""

    description: str
    bytes_per_s: float
    kind: str
    text: str
    sigma: float
    sigma_text: str
    per_node: int | None = None
    latency_s: float = 5e-7


P4D = (
    "nccl-tests all_reduce over two p4de.24xlarge, github aws-samples/awsome-distributed-training: 78.33 GB/s of bus bandwidth"
)
NETWORKS: Mapping[str, Rate] = {
    "infiniband-800g": Rate(
        description="InfiniBand XDR, 800 Gb/s per card, one card in each slot of the machine, fat tree.",
        bytes_per_s=96e9,
        kind="derived",
        text="the share of the line rate that a 200 Gb/s card reaches (24 of 25 GB/s) times 100 GB/s; no log of it was found",
        sigma=0.3,
        sigma_text="30%: derived from slower cards",
    ),
    "roce-200g": Rate(
        description="200 Gb/s Ethernet with RDMA, one card in each slot of the machine.",
        bytes_per_s=24.2e9,
        kind="derived",
        text="the share of the line rate that a 100 Gb/s card reaches (12.1 of 12.5 GB/s, network roce-100g) times 25 GB/s",
        sigma=0.25,
        sigma_text="25%: derived from a slower card",
    ),
    "roce-400g": Rate(
        description="400 Gb/s Ethernet with RDMA, one card in each slot of the machine.",
        bytes_per_s=45.8e9,
        kind="measurement",
        text="nccl-tests all_gather over two nodes of eight B200 (GKE A4): 366.3 GB/s of bus bandwidth over eight cards; two "
        "nodes of eight H200 (a3-ultragpu, github GoogleCloudPlatform/cluster-toolkit) reached 328.8",
        sigma=0.15,
        sigma_text="15%: two logs, 10% apart",
    ),
    "efa-400g": Rate(
        description="AWS EFA of p4d and p4de: four cards of 100 Gb/s per node.",
        bytes_per_s=10.4e9,
        kind="derived",
        text=f"{P4D} over 16 GPUs, as a tree of two nodes over four cards",
        sigma=0.3,
        sigma_text="30%: the log of p4d in github NVIDIA/nccl issue 527 is a quarter slower",
        per_node=4,
        latency_s=1e-5,
    ),
    "efa-3200g": Rate(
        description="AWS EFA of p5: 32 cards of 100 Gb/s per node.",
        bytes_per_s=10.4e9,
        kind="derived",
        text=f"as a card of efa-400g ({P4D}); two p5 reached 487 GB/s in all_reduce, which the switches inside limit",
        sigma=0.3,
        sigma_text="30%: no log of p5 is limited by its cards",
        per_node=32,
        latency_s=1e-5,
    ),
    "tcpxo-200g": Rate(
        description="Google GPUDirect-TCPXO of a3-megagpu: eight cards of 200 Gb/s per node.",
        bytes_per_s=23.6e9,
        kind="measurement",
        text="nccl-tests all_gather over two nodes of eight H100 (github GoogleCloudPlatform/cluster-toolkit): 188.7 GB/s over "
        "eight cards",
        sigma=0.15,
        sigma_text="15%: two logs that agree (188.5 and 188.7 GB/s)",
        per_node=8,
        latency_s=5e-6,
    ),
    "omnipath-100g": Rate(
        description="Omni-Path, 100 Gb/s per card, one card in each slot of the machine; cards_per_node says otherwise.",
        bytes_per_s=12.2e9,
        kind="derived",
        text="as a 100 Gb/s InfiniBand card (network infiniband-100g); no measurement of collectives over Omni-Path was found",
        sigma=0.3,
        sigma_text="30%: taken from another network of the same line rate",
    ),
}


def network_parts() -> dict[str, dict[str, Any]]:
    """The JSON of every network by name."""
    base = load_network(BASE).model_dump(mode="json")
    return {name: _document(name, rate, base) for name, rate in NETWORKS.items()}


def _document(name: str, rate: Rate, base: Mapping[str, Any]) -> dict[str, Any]:
    sources = {key: entry for key, entry in base["sources"].items() if key not in ("card-rate", "spread")}
    latency = dict(sources["card-latency"])
    if rate.latency_s != base["card"]["latency_s"]["value"]:
        latency = {
            "kind": "assumption",
            "text": "chosen so that small messages take about as long as in the logs; within a factor of two",
        }
    return {
        **base,
        "name": name,
        "description": rate.description,
        "sources": {
            "card-rate": {"kind": rate.kind, "text": rate.text},
            **sources,
            "card-latency": latency,
            "spread": {"kind": "assumption", "text": rate.sigma_text},
        },
        "card": {
            "bandwidth_bytes_per_s": {"value": rate.bytes_per_s, "source": "card-rate"},
            "latency_s": {"value": rate.latency_s, "source": "card-latency"},
            "per_node": rate.per_node,
        },
        "relative_sigma": {"value": rate.sigma, "source": "spread"},
    }
