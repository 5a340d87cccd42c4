"""The JSON of every link part: switches fitted to logs, and the other links from what was published about them.

Networks are derived from logs between two nodes and from line rates; all else is as in `infiniband-400g`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parsim.hardware.compose import load_profile
from parsim.hardware.parts import load_network
from parsim.hardware.profile import LinkProtocol, Profile
from tools.parts import collectives
from tools.parts.catalog import LLM_PROF
from tools.parts.gpus import digits
from tools.parts.part_files import expanded
from tools.parts.robust import named

SWITCHES: Mapping[str, tuple[str, int, float, int, bool, tuple[str, ...]]] = {
    "nvswitch-3": (
        "NVSwitch of the A100: 12 lanes of NVLink 3 per GPU.",
        12,
        300e9,
        16,
        False,
        ("azure-a100_v4", "nccl-527", "vidur-net-a100-dgx-all-reduce"),
    ),
    "nvswitch-4": (
        "NVSwitch of the H100 and H200: 18 lanes of NVLink 4 per GPU; the switch adds (NVLS).",
        18,
        450e9,
        8,
        True,
        ("aic-nccl-h200-2.26.2", "azure-h100_v5", "azure-h200_v5", "aws-p5-1n"),
    ),
    "nvswitch-5": (
        "NVSwitch of the B200: 18 lanes of NVLink 5 per GPU; the switch adds (NVLS).",
        18,
        900e9,
        8,
        True,
        ("aic-nccl-b200-2.27.3", "aic-nccl-b200-2.27.5", "aic-nccl-b200-2.28.9", "vultr-b200-poc"),
    ),
    "nvlink-rack-5": (
        "NVLink 5 over a rack of up to 72 GB200 GPUs, 18 lanes per GPU; the switches add (NVLS).",
        18,
        900e9,
        72,
        True,
        ("aic-nccl-gb200-2.23", "aic-nccl-b200-2.28.9", "vultr-b200-poc"),
    ),
}
"""Description, lanes, nominal rate of a device, most devices, whether the switch adds, sources of timings."""

FEWER_LANES: Mapping[str, tuple[str, str, int]] = {
    "nvswitch-3-a800": ("NVSwitch of the A800: 8 lanes of NVLink 3 per GPU.", "nvswitch-3", 8),
    "nvswitch-4-h800": ("NVSwitch of the H800: 8 lanes of NVLink 4 per GPU; the switch adds (NVLS).", "nvswitch-4", 8),
}
"""Description, the switch whose lanes these are, lanes: 200 GB/s per GPU and direction nominally."""

FIT, NOMINAL = "fit", "nominal"
PAIR_RATES: Mapping[str, tuple[str, float, float, str]] = {
    "nvlink-bridge-3": (
        "NVLink 3 bridges between pairs of A100 PCIe.",
        195.3e9,
        12,
        "vidur-net-a100-pairwise-nvlink-all-reduce",
    ),
    "nvlink-bridge-4": (
        "NVLink 4 bridges between pairs of H100 PCIe or NVL.",
        190.7e9,
        12,
        "vidur-net-h100-pairwise-nvlink-all-reduce",
    ),
}
HOSTS: Mapping[str, tuple[str, float, str, str]] = {
    "pcie-4": (
        "PCIe 4 x16.",
        23.73e9,
        "measurement",
        "all_reduce over two bridged pairs of A100 PCIe, vidur-net-a100-pairwise-nvlink-all-reduce",
    ),
    "pcie-5": (
        "PCIe 5 x16.",
        48.79e9,
        "measurement",
        "all_reduce over two bridged pairs of H100 NVL, vidur-net-h100-pairwise-nvlink-all-reduce",
    ),
}
SOCKET_SHARE = 7.2522 / 12.0
"""Between two sockets over one PCIe 3 link, in the machines with V100s that were measured."""


def link_parts(folder: Path) -> dict[str, dict[str, Any]]:
    """Every link part by name. Shipped V100 profiles give those of the V100."""
    table = collectives.read_collectives(folder)
    found = {name: _switch(name, table) for name in SWITCHES}
    found |= {name: _host(name) for name in HOSTS}
    found |= {name: _bridge(name) for name in PAIR_RATES}
    found["nvlink-bridge-ga10x"] = _ga10x_bridge()
    found |= {name: _with_fewer_lanes(name, found) for name in FEWER_LANES}
    found["infinity-fabric-3"] = _infinity_fabric(found["nvswitch-4"])
    found["infinity-fabric-4"] = _infinity_fabric_4(found["infinity-fabric-3"])
    found["nvlink-2-cube"] = _of_profile("nvlink-2-cube", load_profile("dgx1-v100-32gb"), "cube", 6, 8)
    found["nvswitch-2"] = _of_profile("nvswitch-2", load_profile("dgx2-v100"), "switch", 6, 16)
    found["pcie-3"] = _of_profile("pcie-3", load_profile("pcie-8xv100"), "host", 1, 8)
    return found


def _switch(name: str, table: Any) -> dict[str, Any]:
    description, lanes, nominal, largest, nvls, sources = SWITCHES[name]
    rows = collectives.timings_of(table, sources)
    prior = collectives.prior_of(nominal, nvls=nvls)
    told = named(prior.names, collectives.fit_collectives(rows, prior))
    held = collectives.errors_without_sources(rows, prior)
    sigma = max(0.02, sorted(error.median for error in held.values())[len(held) // 2] * 1.4826)
    protocols = [
        _protocol("ring", label, told[f"{key}_base"], told[f"{key}_hop"], told.get(f"{key}_efficiency", 1.0))
        for key, label in (("ll", "LL"), ("ll128", "LL128"), ("simple", "Simple"))
    ]
    if nvls:
        protocols += [
            _protocol("nvls", label, told[f"{key}_base"], 0.0, told[f"{key}_efficiency"])
            for key, label in (("nvls_slow", "NVLS few channels"), ("nvls", "NVLS"))
        ]
    listing = "; ".join(expanded(source) for source in sources)
    return {
        "schema_version": 1,
        "name": name,
        "description": description,
        "sources": {
            FIT: {"kind": "derived", "text": f"fitted by tools.parts to collectives inside a node: {listing}"},
            NOMINAL: {
                "kind": "datasheet",
                "text": f"{nominal / 1e9:g} GB/s per GPU and direction, peaks.csv ({expanded('stas-peaks')})",
            },
            "latency": {"kind": "assumption", "text": "none beside the protocols' own"},
            "library": {"kind": "assumption", "text": "the library is taken to choose the fastest protocol"},
        },
        "form": "switch",
        "lanes": lanes,
        "bandwidth_bytes_per_s": {"value": digits(told["rate"] / lanes), "source": FIT},
        "latency_s": {"value": 0.0, "source": "latency"},
        "largest": largest,
        "protocols": protocols,
        "point_to_point_base_s": {"value": digits(told["ll_base"]), "source": FIT},
        "relative_sigma": {"value": digits(sigma), "source": FIT},
        "unmeasured_group_sigma": {"value": digits(sigma), "source": FIT},
        "measured_sizes": sorted({int(size) for size in rows.ranks}),
        "min_size_bytes": int(rows.size_bytes.min()),
        "max_size_bytes": int(rows.size_bytes.max()),
        "held_out": {
            source: {"rows": error.rows, "median": digits(error.median), "p90": digits(error.p90), "bias": digits(error.bias)}
            for source, error in sorted(held.items())
        },
    }


def _protocol(algorithm: str, label: str, base_s: float, hop_s: float, efficiency: float) -> dict[str, Any]:
    """The library's tuner is given the same numbers, so that the fastest is chosen."""
    base, hop, share = digits(base_s), digits(hop_s), digits(efficiency)
    return {
        "algorithm": algorithm,
        "protocol": label,
        "base_s": base,
        "hop_s": hop,
        "efficiency": share,
        "tuner_base_s": base,
        "tuner_hop_s": hop,
        "tuner_efficiency": share,
        "source": FIT,
        "tuner_source": "library",
    }


def _plain(
    name: str, description: str, form: str, lanes: int, largest: int, rate: float, kind: str, text: str
) -> dict[str, Any]:
    """A link of which only a rate is published; the protocols are those of V100s over PCIe."""
    model = load_profile("pcie-8xv100").communication.link_model
    assert model is not None
    return {
        "schema_version": 1,
        "name": name,
        "description": description,
        "sources": {
            "rate": {"kind": kind, "text": text},
            "latency": {"kind": "assumption", "text": "one microsecond per link; enters no collective"},
            "protocols": {
                "kind": "assumption",
                "text": "fixed costs of NCCL's protocols as fitted over PCIe of V100s (pcie-8xv100)",
            },
            "spread": {
                "kind": "assumption",
                "text": "40%: how a host joins its PCIe switches decides; eight L40S reached a tenth of two",
            },
        },
        "form": form,
        "lanes": lanes,
        "bandwidth_bytes_per_s": {"value": digits(rate / lanes), "source": "rate"},
        "latency_s": {"value": 1e-6, "source": "latency"},
        "largest": largest,
        "protocols": [{**entry.model_dump(), "source": "protocols", "tuner_source": "protocols"} for entry in model.protocols],
        "point_to_point_base_s": {"value": model.point_to_point_base_s, "source": "protocols"},
        "relative_sigma": {"value": 0.4, "source": "spread"},
        "unmeasured_group_sigma": {"value": 0.4, "source": "spread"},
        "min_size_bytes": 1024,
        "max_size_bytes": 2**29,
    }


def _host(name: str) -> dict[str, Any]:
    description, rate, kind, text = HOSTS[name]
    key = text.rsplit(", ", 1)[1]
    part = _plain(name, description, "host", 1, 16, rate, kind, text.replace(key, expanded(key)))
    part["sources"]["sockets"] = {
        "kind": "derived",
        "text": "the share of the PCIe rate that crosses the sockets in machines with V100s (7.25 of 12 GB/s)",
    }
    part["socket_bytes_per_s"] = {"value": digits(rate * SOCKET_SHARE), "source": "sockets"}
    return part


def _bridge(name: str) -> dict[str, Any]:
    description, rate, lanes, key = PAIR_RATES[name]
    part = _plain(name, description, "pairs", int(lanes), 16, rate, "measurement", f"all_reduce over one pair, {expanded(key)}")
    part["sources"]["spread"] = {"kind": "assumption", "text": "15%: one table"}
    part["relative_sigma"]["value"] = part["unmeasured_group_sigma"]["value"] = 0.15
    return part


def _ga10x_bridge() -> dict[str, Any]:
    text = f"56.25 GB/s nominal ({expanded('stas-peaks')}) times the share that an A100's bridge reaches (195 of 300 GB/s)"
    return _plain(
        "nvlink-bridge-ga10x",
        "NVLink 3 bridges between pairs of A40 or RTX 3090.",
        "pairs",
        4,
        16,
        56.25e9 * 195.3 / 300,
        "derived",
        text,
    )


def _like(
    older: Mapping[str, Any], name: str, description: str, sources: Mapping[str, dict[str, str]], sigma: float, why: str
) -> dict[str, Any]:
    """A link of which no timing was published, by the numbers of another one. Args: why: the spread is assumed so large."""
    spread = {"value": sigma, "source": "spread"}
    return {
        **older,
        "name": name,
        "description": description,
        "sources": {**older["sources"], **sources, "spread": {"kind": "assumption", "text": f"{sigma:.0%}: {why}"}},
        "relative_sigma": spread,
        "unmeasured_group_sigma": spread,
    }


def _with_fewer_lanes(name: str, switches: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The lanes of another switch, each as fast as there."""
    description, like, lanes = FEWER_LANES[name]
    older = switches[like]
    fitted = f"rate of a lane and costs of the protocols of {like}, which has {older['lanes']} lanes: "
    nominal = f"200 GB/s per GPU and direction: {LLM_PROF} (interconnect_bandwidth 400, both directions)"
    sources = {
        FIT: {"kind": "derived", "text": fitted + older["sources"][FIT]["text"]},
        NOMINAL: {"kind": "datasheet", "text": nominal},
    }
    part = _like(older, name, description, sources, 0.15, f"the numbers are those of {like}")
    return {**part, "lanes": lanes, "held_out": {}}


def _infinity_fabric_4(older: Mapping[str, Any]) -> dict[str, Any]:
    """As the fabric of the MI300X, by the ratio of the nominal rates."""
    rate = digits(older["bandwidth_bytes_per_s"]["value"] * 535.5 / 448)
    text = f"as the MI300X's (infinity-fabric-3) times 535.5 over 448 GB/s, nominal ({expanded('stas-peaks')})"
    sources = {"rate": {"kind": "derived", "text": text}}
    description = "Infinity Fabric: every MI355X to every other."
    part = _like(older, "infinity-fabric-4", description, sources, 0.3, "no timing was found")
    return {**part, "bandwidth_bytes_per_s": {"value": rate, "source": "rate"}}


def _infinity_fabric(switch: Mapping[str, Any]) -> dict[str, Any]:
    text = f"308.5 of 448 GB/s in an all_gather over eight, in a trace of FSDP ({expanded('tracelens-fsdp-mi300x')})"
    part = _plain(
        "infinity-fabric-3", "Infinity Fabric: every MI300X to every other.", "mesh", 7, 8, 308.5e9, "measurement", text
    )
    part["protocols"] = [
        {**entry, "source": "protocols", "tuner_source": "protocols"}
        for entry in switch["protocols"]
        if entry["algorithm"] == "ring"
    ]
    part["sources"]["protocols"]["text"] = (
        "fixed costs of NCCL's protocols as fitted for the H100's NVSwitch; RCCL's were not found"
    )
    part["sources"]["spread"]["text"] = "25%: one trace"
    part["relative_sigma"]["value"] = part["unmeasured_group_sigma"]["value"] = 0.25
    return part


def _of_profile(name: str, profile: Profile, form: str, lanes: int, largest: int) -> dict[str, Any]:
    """The links of a shipped profile with V100s as a part, with the profile's own sources."""
    model = profile.communication.link_model
    assert model is not None
    kind = profile.link_kinds[model.link_kind]
    protocols = model.protocols
    used = {entry.source for entry in protocols} | {entry.tuner_source for entry in protocols}
    used |= {kind.bandwidth_bytes_per_s.source, kind.latency_s.source, model.source}
    part: dict[str, Any] = {
        "schema_version": 1,
        "name": name,
        "description": {
            "cube": "NVLink 2 hybrid cube mesh of eight V100s.",
            "switch": "NVSwitch of the DGX-2: 6 lanes of NVLink 2 per GPU.",
            "host": "PCIe 3 x16.",
        }[form],
        "sources": {},
        "form": form,
        "lanes": lanes,
        "bandwidth_bytes_per_s": kind.bandwidth_bytes_per_s.model_dump(),
        "latency_s": kind.latency_s.model_dump(),
        "largest": largest,
        "protocols": [_dumped(entry) for entry in protocols],
        "point_to_point_base_s": {"value": model.point_to_point_base_s, "source": model.source},
        "relative_sigma": {"value": model.relative_sigma, "source": model.source},
        "unmeasured_group_sigma": {"value": model.unmeasured_group_sigma, "source": model.source},
        "measured_sizes": [len(group) for group in model.measured_groups],
        "min_size_bytes": model.min_size_bytes,
        "max_size_bytes": model.max_size_bytes,
    }
    if form == "host":
        smp = profile.link_kinds["smp"].bandwidth_bytes_per_s
        part["socket_bytes_per_s"] = smp.model_dump()
        used.add(smp.source)
    part["sources"] = {key: profile.sources[key].model_dump() for key in sorted(used)}
    return part


def _dumped(protocol: LinkProtocol) -> dict[str, Any]:
    return dict(protocol.model_dump())


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
