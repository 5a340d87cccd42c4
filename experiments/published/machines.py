"""The machine of a row, from what its source says of the hardware."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from experiments.published.rows import Row
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import profile_from_parts
from parsim.hardware.parts import Network, load_gpu, load_network
from parsim.hardware.profile import Profile, Sourced


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Attributes:
    gpu: a part. chip: its name where the part is that of another. per_node: GPUs joined by NVLink.
    cards, gbit: network cards per node, and Gb/s of each. memory_gb: of one GPU where it is not the part's.
    bandwidth, clock: of the part's, where it is another board of that chip.
    launch_s: of the host per launch, where it is not the part's; 0: the host is left out.
    guessed: nobody says how many cards the usual machine has."""

    gpu: str
    per_node: int = 8
    cards: int = 8
    gbit: float = 200.0
    memory_gb: float = 0.0
    bandwidth: float = 1.0
    clock: float = 1.0
    chip: str = ""
    launch_s: float | None = None
    guessed: bool = False


def chip_of(machine: Machine) -> str:
    """The name under which a factor is kept: `a100-sxm-80gb` is A100."""
    return machine.chip or machine.gpu.split("-")[0].upper()


GRACE_LAUNCH_S = 33.17e-6
"""Host time of a forward of torch.nn.Linear on a GH200 (NVIDIA/TransformerEngine issue 2053); 13.48e-6 on an H100 DGX."""


def _of_part(gpu: str, **values: Any) -> Machine:
    """A part of which no run was seen, in its usual machine. Nobody says how many network cards that has: one is assumed."""
    usual: dict[str, Any] = {
        "chip": gpu.upper(),
        "per_node": load_gpu(gpu).gpus_per_node,
        "cards": 1,
        "gbit": 200,
        "guessed": True,
    }
    return Machine(gpu=gpu, **usual | values)


def _size(gpu: str, gigabytes: int) -> str:
    """A GPU of that memory: `A100-SXM4-40GB`, `a100_40gb`, `40GB A100`."""
    size = f"{gigabytes} ?Gi?B"
    return rf"{gpu}[-_ (,]*(?:(?:SXM|PCI-?E|DGX|HGX)\d?)?[-_ (,]*{size}|{size}[-_ ]*{gpu}|{gpu}-{gigabytes}\b"


def _pcie(gpu: str) -> str:
    """The board of a GPU for a PCIe slot: `A100-PCIe-80GB`, `H100 80GB PCIe`. `A100 SXM, PCIe 4` is none."""
    return rf"{gpu}[-_ (]*(?:\d+ ?Gi?B)?[-_ (]*PCI-?E|PCI-?E[-_ ]*{gpu}"


GPUS: tuple[tuple[str, Machine], ...] = (
    (r"GB300", Machine(gpu="gb300", per_node=72, cards=72, gbit=800)),
    (r"GB200", Machine(gpu="gb200", per_node=72, cards=72, gbit=400)),
    (r"B300", Machine(gpu="b300", cards=8, gbit=800)),
    (r"B200", Machine(gpu="b200", cards=8, gbit=400)),
    (
        r"GH-?96|GH200",
        Machine(gpu="h100-sxm", per_node=4, cards=4, gbit=200, memory_gb=96, chip="GH200", launch_s=GRACE_LAUNCH_S),
    ),
    (r"H200", Machine(gpu="h200", cards=8, gbit=400)),
    (r"H800(?!.*(?:PCI-?E|NVL\b))", Machine(gpu="h800-sxm", cards=8, gbit=400, chip="H100")),
    (r"\bH20\b", _of_part("h20")),
    (
        _size("H100", 96),
        Machine(gpu="h100-sxm", cards=8, gbit=400, memory_gb=96, bandwidth=2.4 / 3.35, clock=0.85),
    ),
    (_pcie("H100"), _of_part("h100-pcie")),
    (r"H100", Machine(gpu="h100-sxm", cards=8, gbit=400)),
    (rf"(?={_pcie('A100')})(?:{_size('A100', 40)})", _of_part("a100-pcie-40gb")),
    (_pcie("A100"), _of_part("a100-pcie-80gb")),
    (_size("A100", 40), Machine(gpu="a100-sxm-40gb", cards=8, gbit=200)),
    (r"A100", Machine(gpu="a100-sxm-80gb", cards=8, gbit=200)),
    (r"A800(?!.*(?:PCI-?E|40 ?G))", Machine(gpu="a800-sxm-80gb", cards=8, gbit=200, chip="A100")),
    (rf"(?={_pcie('V100')})(?:{_size('V100', 16)})", _of_part("v100-pcie-16gb")),
    (_pcie("V100"), _of_part("v100-pcie-32gb")),
    (_size("V100", 16), _of_part("v100-sxm-16gb")),
    (r"V100.*(?:SXM2|DGX-?1\b)|DGX-?1\b.*V100", _of_part("v100-sxm-32gb")),
    (r"V100", Machine(gpu="v100-sxm3-32gb", per_node=16, cards=8, gbit=100)),
    (r"MI300X", Machine(gpu="mi300x", cards=8, gbit=400)),
    (r"MI325X", Machine(gpu="mi325x", cards=8, gbit=400)),
    (r"MI355X", Machine(gpu="mi355x", cards=8, gbit=400)),
    (r"RTX[- ]?PRO[- ]?6000(?!.*Max-?Q)", _of_part("rtx-pro-6000")),
    (r"(?:RTX[- ]?)?\bA6000\b", _of_part("rtx-a6000")),
    (r"\bA10G\b", _of_part("a10g")),
    (r"L40S", _of_part("l40s")),
    (r"RTX[- ]?4090", _of_part("rtx-4090")),
    (r"RTX[- ]?3090(?! ?Ti)", _of_part("rtx-3090")),
    (r"\bA40\b", _of_part("a40")),
    (r"\bA30\b", _of_part("a30")),
    (r"\bA10\b", _of_part("a10")),
    (r"\bL4\b", _of_part("l4")),
    (r"\bT4\b", _of_part("t4")),
)
"""First match wins. Cards: those of the usual machine of that GPU, where the row does not say."""


NO_PART = r"H100[-_ (]*(?:\d+ ?GB[-_ ]*)?NVL\b|A100[-_ (]*(?:SXM\d?)?[-_ ]*64 ?GB|H100[-_ (]*(?:SXM\d?)?[-_ ]*64 ?GB"
"""Boards of known chips whose rates are others than those of any part."""

NAMES = re.compile(
    r"(?<![A-WYZ0-9])(?:GB300|GB200|GH200|GH-?96|B300|B200|H200|H100|H800|H20|A800|A100|V100|P100|MI\d{3}X?|L40S?|L4|A6000|A40|A30|A10G?|"
    r"T4|RTX[- ]?\w+|Titan[- ]?\w+)(?![0-9])",
    re.IGNORECASE,
)
NETWORKS = re.compile(r"NVLink|NVSwitch|InfiniBand|\bIB\b|[EHNX]DR\b|RoCE|RDMA|EFA|Ethernet|Omni-Path|\d ?Gb", re.IGNORECASE)
INFINIBAND_GBIT = {"EDR": 100.0, "HDR": 200.0, "NDR": 400.0, "XDR": 800.0}
RACK = 72


def machine_of(row: Row) -> Machine | None:
    """The machine that a row describes; None: no GPU that is known, or several kinds."""
    text = row.hardware
    pieces = text.split("(")[0].split("+")
    kinds = {found.upper() for found in NAMES.findall(" ".join(pieces))}
    if len(kinds) > 1 or any(not NAMES.search(piece) and not NETWORKS.search(piece) for piece in pieces[1:]):
        return None
    found = next((machine for pattern, machine in GPUS if re.search(pattern, text, re.IGNORECASE)), None)
    if found is None or re.search(NO_PART, text, re.IGNORECASE):
        return None
    per_node = re.search(r"(\d+)(?: ?GPUs?)?(?: per node|/node)", text)
    in_rack = re.search(r"NVL(\d+)", text)
    changes: dict[str, Any] = {}
    if found.per_node == RACK:  # NVLink joins its hosts, of four GPUs each
        changes["per_node"] = int(in_rack[1]) if in_rack else RACK
    elif per_node:
        changes["per_node"] = int(per_node[1])
    return replace(found, **changes, **_cards(text, replace(found, **changes)))


def _cards(text: str, machine: Machine) -> dict[str, Any]:
    """Number and rate of the network cards of a node, as far as the text states them. `8x 80GB` is memory."""
    several = re.search(r"(\d+) ?x ?(?:[A-Za-z-]+ )?(\d+) ?G(?!i?B)", text)
    named = re.search(r"(\d+) ?x ?([EHNX]DR)\b", text)
    each = re.search(r"(\d+) ?Gb(?:/s|ps)[^,;|]* per GPU", text)
    whole = re.search(r"([\d.]+) ?(G|T)b(?:/s|ps) (?:per node|node-node)", text)
    if several:
        cards, gbit = int(several[1]), float(several[2])
    elif each:
        cards, gbit = machine.per_node, float(each[1])
    elif named:
        cards, gbit = int(named[1]), INFINIBAND_GBIT[named[2]]
    elif whole:
        total = float(whole[1]) * (1000 if whole[2] == "T" else 1)
        cards = max(1, round(total / machine.gbit))
        gbit = total / cards
    else:
        return {}
    return {"cards": cards, "gbit": gbit, "guessed": False}


USABLE = 0.99
"""Of a board's nominal memory that the driver leaves."""

CARD_SHARE = 0.96
"""Of a card's rate that a collective reaches (networks/infiniband-200g.json: 24 GB/s of 25)."""


@lru_cache(maxsize=64)
def network_of(machine: Machine) -> Network:
    """The network of a machine: a shipped one with the cards that it has."""
    base = load_network("infiniband-200g" if machine.gbit <= 200 else "infiniband-400g")
    rate = CARD_SHARE * machine.gbit * 1e9 / 8
    card = base.card.model_copy(
        update={
            "bandwidth_bytes_per_s": base.card.bandwidth_bytes_per_s.model_copy(update={"value": rate}),
            "per_node": machine.cards,
        }
    )
    return base.model_copy(update={"card": card, "name": f"{machine.cards} x {machine.gbit:g} Gb/s"})


@lru_cache(maxsize=256)
def cluster_of(machine: Machine, gpus: int) -> Cluster:
    """So many GPUs of that machine, as many in each node: 256 are four times 64 of 72, so that groups do not straddle nodes."""
    most = min(machine.per_node, gpus)
    per_node = next((number for number in range(most, most // 2, -1) if gpus % number == 0), most)
    profile = profile_of(machine, per_node)
    nodes = -(-gpus // per_node)
    return cluster_from_profile(profile, list(range(gpus)), nodes=nodes, network=network_of(machine) if nodes > 1 else None)


@lru_cache(maxsize=64)
def profile_of(machine: Machine, count: int) -> Profile:
    """One node of it, from parts."""
    part = load_gpu(machine.gpu)
    changes: dict[str, object] = {}
    if machine.memory_gb:
        changes["memory_bytes"] = part.memory_bytes.model_copy(update={"value": USABLE * machine.memory_gb * 1e9})
    if machine.bandwidth != 1.0:
        rate = part.memory_bandwidth_bytes_per_s
        changes["memory_bandwidth_bytes_per_s"] = rate.model_copy(update={"value": machine.bandwidth * rate.value})
    if machine.launch_s is not None:
        known = part.launch_s or Sourced(value=0.0, source="peaks")
        changes["launch_s"] = known.model_copy(update={"value": machine.launch_s})
    peaks, fits = dict(part.peak_flop_per_s), list(part.fits)
    if "bf16" not in peaks:
        peaks["bf16"] = peaks["amp_fp16"]
        fits = [
            fit.model_copy(update={"precisions": sorted({*fit.precisions, "bf16"})}) if "amp_fp16" in fit.precisions else fit
            for fit in fits
        ]
    if "amp_fp16" in peaks:
        peaks["fp16"] = peaks["amp_fp16"]
        fits = [
            fit.model_copy(update={"precisions": sorted({*fit.precisions, "fp16"})}) if "amp_fp16" in fit.precisions else fit
            for fit in fits
        ]
    if machine.clock != 1.0:
        peaks = {name: peak.model_copy(update={"value": machine.clock * peak.value}) for name, peak in peaks.items()}
    part = part.model_copy(update={**changes, "peak_flop_per_s": peaks, "fits": fits})
    return profile_from_parts(part, count)
