"""Hardware by name: GPUs, links, networks and instances of clouds, one JSON file each, every number with its source, as in a
profile. `parsim.hardware.compose` makes a Profile of GPUs and links.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from parsim.errors import MissingDependencyError, ProfileError
from parsim.files import NO_CONTROL, cache_folder, control_character_in, parse_json, read_text, reading, write_text_atomically
from parsim.hardware.profile import DeviceNumbers, LinkNumbers, LinkProtocol, Sourced, SourcedFile, SourceEntry
from parsim.hardware.records import (
    Count,
    HeldOut,
    KernelFit,
    NonNegative,
    Positive,
    ProfileRecord,
    WholeModels,
    is_path,
    load_record,
    parse_record,
    problems_text,
    shipped,
    shipped_text,
    to_text,
)

LinkForm = Literal["switch", "mesh", "pairs", "cube", "host"]
"""How the devices of a node are joined: each to one switch; each to each; two and two; the hybrid cube mesh of eight; over the
host's PCIe switches alone."""


class PartFit(KernelFit):
    """A fit for this GPU in several precisions; with the chip's own numbers it becomes an `OperatorFit` for each.
    transferred_from: other GPUs, where this one has no rows of its own."""

    precisions: Annotated[list[str], Field(min_length=1)]
    transferred_from: list[str] = []


class PartEfficiency(WholeModels):
    precisions: Annotated[list[str], Field(min_length=1)]


class DatedPrice(ProfileRecord):
    """Dollars per hour of one GPU, as one provider asked on demand. as_of: the catalogue and its version."""

    value: Positive
    as_of: str
    source: str


class GpuPart(DeviceNumbers, SourcedFile):
    """One GPU.

    Attributes:
        multiprocessors: units that each run one tile at a time.
        link: the part that joins its GPUs in the usual machine; host_link: the PCIe generation.
        network: between the nodes of the usual machine, as its vendor builds clusters of it; None: there is no usual one.
        gpus_per_node: of the usual machine.
        launch_s: of the usual machine's host, for an operator of eager torch; None: not known.
        busy_power_w: of the board in training or a like load. Prices and watts are left out where nobody published them.
    """

    sources: dict[str, SourceEntry]
    multiprocessors: Sourced
    board_limit_w: Sourced | None = None
    busy_power_w: Sourced | None = None
    idle_power_w: Sourced | None = None
    launch_s: Sourced | None = None
    usd_per_hour: DatedPrice | None = None
    link: str
    host_link: str
    network: str | None = None
    gpus_per_node: Count
    fits: list[PartFit] = []
    efficiencies: list[PartEfficiency] = []

    @model_validator(mode="after")
    def _is_a_gpu(self) -> GpuPart:
        if not 1 <= self.multiprocessors.value <= 10_000:
            raise ValueError(f"multiprocessors = {self.multiprocessors.value:g}: a GPU has 1 to 10000")
        return self


class LinkPart(LinkNumbers, SourcedFile):
    """One way of joining the GPUs of a node.

    Attributes:
        lanes: of one device, and the bandwidth of a lane in one direction that large collectives reach.
        largest: devices that one node can have; relative_sigma: spread of the times over it.
        socket_bytes_per_s: between the two sockets, with form "host".
    """

    sources: dict[str, SourceEntry]
    form: LinkForm
    lanes: Count
    largest: Count
    protocols: Annotated[list[LinkProtocol], Field(min_length=1)]
    point_to_point_base_s: Sourced
    relative_sigma: Sourced
    unmeasured_group_sigma: Sourced
    measured_sizes: list[Count] = []
    min_size_bytes: int
    max_size_bytes: int
    socket_bytes_per_s: Sourced | None = None
    held_out: dict[str, HeldOut] = {}

    @model_validator(mode="after")
    def _joins_sockets(self) -> LinkPart:
        if self.form == "host" and self.socket_bytes_per_s is None:
            raise ValueError('form = "host" needs socket_bytes_per_s, the rate between the two sockets')
        return self


def shipped_gpus() -> list[str]:
    return shipped("parts", "gpus")


def shipped_links() -> list[str]:
    return shipped("parts", "links")


@lru_cache(maxsize=64)
def load_gpu(name_or_path: str) -> GpuPart:
    """A GPU by name ("h100-sxm"), by alias ("h100"), by the driver's name ("NVIDIA H100 PCIe") or by the path of a JSON
    file. Raises ProfileError as `load_record`."""
    try:
        return load_record(GpuPart, ("parts", "gpus"), "GPU", driver_name(name_or_path) or name_or_path, ALIASES["gpus"])
    except ProfileError:
        check_covered(name_or_path)
        raise


@lru_cache(maxsize=64)
def load_link(name_or_path: str) -> LinkPart:
    """A link by name ("nvswitch-4"), by alias or by path. Raises ProfileError as `load_record`."""
    return load_record(LinkPart, ("parts", "links"), "link", name_or_path, ALIASES["links"])


ALIASES: dict[str, dict[str, str]] = {
    "gpus": {
        "h100": "h100-sxm",
        "h100-80gb": "h100-sxm",
        "a100": "a100-sxm-80gb",
        "a100-40gb": "a100-sxm-40gb",
        "a100-80gb": "a100-sxm-80gb",
        "a100-sxm": "a100-sxm-80gb",
        "a100-pcie": "a100-pcie-80gb",
        "h800": "h800-sxm",
        "a800": "a800-sxm-80gb",
        "a6000": "rtx-a6000",
        "v100": "v100-sxm-32gb",
        "v100-sxm": "v100-sxm-32gb",
        "v100-32gb": "v100-sxm-32gb",
        "v100-16gb": "v100-sxm-16gb",
        "v100-pcie": "v100-pcie-32gb",
        "h200-sxm": "h200",
        "b200-sxm": "b200",
    },
    "links": {"nvlink-bridge": "nvlink-bridge-3", "nvswitch": "nvswitch-4"},
}
"""Short names, and what they stand for: the form that most machines have."""


GPU_NAMES: tuple[tuple[str, str], ...] = (
    (r"GB300", "gb300"),
    (r"B300( SXM6)?( AC)?", "b300"),
    (r"GB200", "gb200"),
    (r"B200( SXM6?)?", "b200"),
    (r"H200([ -]SXM5?)?( 141GB)?( HBM3e)?", "h200"),
    (r"H800([ -]SXM5?)?([ -]80GB)?( HBM3)?", "h800-sxm"),
    (r"H20( 96GB)?( HBM3)?", "h20"),
    (r"H100[ -]PCIe([ -]80GB)?", "h100-pcie"),
    (r"H100 80GB HBM3|H100[ -]SXM5?([ -]80GB)?", "h100-sxm"),
    (r"A100 80GB PCIe|A100-PCI-?E-80GB", "a100-pcie-80gb"),
    (r"A100( 40GB)? PCIe|A100-PCI-?E-40GB", "a100-pcie-40gb"),
    (r"A100[ -]SXM4?[ -]80GB", "a100-sxm-80gb"),
    (r"A100[ -]SXM4?[ -]40GB", "a100-sxm-40gb"),
    (r"A800[ -]SXM4?[ -]80GB", "a800-sxm-80gb"),
    (r"V100-SXM3-32GB(-H)?", "v100-sxm3-32gb"),
    (r"V100-SXM2-32GB(-LS)?", "v100-sxm-32gb"),
    (r"V100-SXM2-16GB(-LS|-N)?", "v100-sxm-16gb"),
    (r"V100-PCI-?E-32GB", "v100-pcie-32gb"),
    (r"V100-PCI-?E-16GB", "v100-pcie-16gb"),
    (r"(RTX[ -]?)?4090", "rtx-4090"),
    (r"(RTX[ -]?)?3090", "rtx-3090"),
    (r"RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
    (r"RTX[ -]?A6000", "rtx-a6000"),
    (r"L40S", "l40s"),
    (r"L4", "l4"),
    (r"A40", "a40"),
    (r"A30", "a30"),
    (r"A10G", "a10g"),
    (r"A10", "a10"),
    (r"T4", "t4"),
    (r"MI355X( OAM)?( VF)?", "mi355x"),
    (r"MI325X( OAM)?( VF)?", "mi325x"),
    (r"MI300X( OAM)?( VF)?", "mi300x"),
)
"""Whole names of GPUs without maker and line. Boards that share a name but for a word have other clocks, lanes or memory."""
_MAKERS = re.compile(r"((NVIDIA|AMD|Tesla|GeForce|Instinct|Quadro)[ -])*", re.IGNORECASE)


def driver_name(name: str) -> str | None:
    """The shipped part that a driver names so: "NVIDIA H100 80GB HBM3" is h100-sxm. None: not known."""
    own = _MAKERS.sub("", " ".join(name.replace("_", " ").split()), count=1)
    return next((part for pattern, part in GPU_NAMES if re.fullmatch(pattern, own, re.IGNORECASE)), None)


def gpu_named(name: str) -> GpuPart | None:
    """The shipped GPU of a name that a driver or a trace gives; None: not known."""
    part = driver_name(name)
    return None if part is None else load_gpu(part)


# Machines in one word: `8xh100-sxm` is a node of eight, `8xa100-pcie-80gb@nvlink-bridge-3` names the link as well, and
# `1024xh100-sxm` is as many whole nodes as it takes.

MOST_ON_A_HOST = 8
"""GPUs on the PCIe switches of one machine, however many are usual: "8x4090" means a server, not two workstations."""
FORM = re.compile(r"\s*(?P<count>\d[\d_,]*)\s*x\s*(?P<gpu>[^@\s][^@]*)(@(?P<link>.+))?")


@dataclass(frozen=True, slots=True)
class Machines:
    """Nodes of `gpus_per_node` equal GPUs; link: None for the usual one; instance: of a cloud, which says all of it."""

    gpu: str
    gpus_per_node: int
    nodes: int
    link: str | None = None
    instance: CloudInstance | None = None

    @property
    def node(self) -> str:
        if self.instance is not None:
            return self.instance.node
        return f"{self.gpus_per_node}x{self.gpu}" + (f"@{self.link}" if self.link else "")


def shorthand(text: str) -> tuple[int, str, str | None] | None:
    """Count, GPU and link of a text of the form COUNTxGPU or COUNTxGPU@LINK; None for another form."""
    form = FORM.fullmatch(text)
    return None if form is None else (int(re.sub("[_,]", "", form["count"])), form["gpu"].strip(), form["link"])


def check_counted(text: str) -> None:
    """Raise ProfileError for the name of a GPU without a count: how it is written with one."""
    name = driver_name(text) or ALIASES["gpus"].get(text.lower(), text.lower())
    if name not in shipped_gpus():
        return
    usual = load_gpu(name).gpus_per_node
    counted = f"1x{name}" + (f" or {usual}x{name}" if usual > 1 else "")
    raise ProfileError(f"{text!r} does not say how many GPUs: write {counted}")


def is_shorthand(text: str) -> bool:
    return shorthand(text) is not None or instances_of(text) is not None


def machines_of(text: str, per_node: int | None = None) -> Machines:
    """What a shorthand means: nodes of the usual size, or one smaller node.

    Args:
        text: such as "1024xh100-sxm", or "2xp5.48xlarge", whose number counts the instances. per_node: GPUs of a node; None:
            the usual number.

    Raises:
        ProfileError: another form, an unknown GPU, or a number that is not a whole number of nodes.
    """
    if (rented := instances_of(text)) is not None:
        number, instance = rented
        sizes = instance.sizes
        if per_node not in (None, sizes.gpus):
            raise ProfileError(f"{instance.name} has {sizes.gpus} GPUs, and cluster.gpus_per_node = {per_node}; drop the key")
        return Machines(sizes.gpu or "", sizes.gpus, number, sizes.link, instance)
    parts = shorthand(text)
    if parts is None:
        check_covered(text)
        check_counted(text)
        raise ProfileError(
            f"{text!r} names no GPUs: write COUNTxGPU, for example 8xh100-sxm, or an instance type such as p5.48xlarge"
        )
    count, gpu, link = parts
    part = load_gpu(gpu)
    usual = per_node or part.gpus_per_node
    if not is_path(gpu):
        gpu = part.name
    if count < 1:
        raise ProfileError(f"{text!r}: at least one GPU is needed")
    if per_node is not None and count % per_node:
        raise ProfileError(f"{text!r} are no whole number of nodes of cluster.gpus_per_node = {per_node}; change one of them")
    if count <= usual or (per_node is None and count <= MOST_ON_A_HOST and load_link(link or part.link).form == "host"):
        return Machines(gpu, count, 1, link)
    if count % usual:
        below = count // usual * usual
        raise ProfileError(
            f"{text!r}: {part.name} comes in nodes of {usual}, and {count:,} are no whole number of them; ask for "
            f"{below:,} or {below + usual:,}, or set cluster.gpus_per_node and cluster.nodes"
        )
    return Machines(gpu, usual, count // usual, link)


# --- networks ---------------------------------------------------------------------------------------------------------
#
# A network joins the nodes of a cluster: the bandwidth of one card, the latency of a message, the efficiency of the library's
# protocols, and leaf switches that serve `nodes_per_leaf` nodes each, joined by one spine, which represents all spine switches.


Algorithm = Literal["ring", "tree", "hierarchical"]
CardCount = Annotated[int, Field(strict=True, ge=1, le=1024)]
"""Network cards of a node: each is an object of its own, and a billion of them would take gigabytes."""


class Card(LinkNumbers):
    """One network card (one rail): the bandwidth that a collective reaches, and the latency to its leaf. per_node: None: one
    in each slot of the profile."""

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
    return shipped("networks")


def load_network(name_or_path: str) -> Network:
    """A network by shipped name or by path. Raises ProfileError as `load_record`."""
    return load_record(Network, ("networks",), "network", name_or_path, {})


def save_network(network: Network, path: Path) -> None:
    write_text_atomically(path, to_text(network.model_dump(mode="json")))


def with_cards(network: Network, per_node: int) -> Network:
    """A network with so many cards (>= 1) per node; more than the machine has slots share them."""
    return network.model_copy(update={"card": network.card.model_copy(update={"per_node": per_node})})


# --- instances of clouds ----------------------------------------------------------------------------------------------
#
# Sizes come from the providers' pages, prices from a catalogue that the file names. `refresh` asks gpuhunt for newer prices and
# keeps them for this user; every answer names the date of the price it took.


class InstanceSizes(ProfileRecord):
    """One type, as its file has it.

    Attributes:
        gpu, gpus: the part and how many; or `profile`, a measured machine. link: between them, where it is not the usual one.
        network, cards_per_node: between such instances. no_network: what joins them instead, where no shipped network is.
        usd_per_hour: of one instance on demand; None: not in the catalogue.
    """

    gpus: Count
    gpu: str | None = None
    profile: str | None = None
    link: str | None = None
    network: str | None = None
    cards_per_node: Count | None = None
    no_network: str = ""
    usd_per_hour: Positive | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> InstanceSizes:
        if (self.gpu is None) == (self.profile is None):
            raise ValueError("an instance has either a gpu or a profile")
        if (self.network is None) == (not self.no_network):
            raise ValueError("an instance has either a network, or no_network that says what it has")
        return self


class CloudFile(SourcedFile):
    """The types of one provider. families: other names, such as "p5" for the largest of its family."""

    sources: dict[str, SourceEntry]
    sizes_source: str
    price_source: str | None = None
    priced_as_of: str = ""
    families: dict[str, str] = Field(default_factory=dict)
    instances: Annotated[dict[str, InstanceSizes], Field(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudInstance:
    """A type by name. usd_per_gpu_hour, price_source: None and "" where the catalogue has no price of it."""

    name: str
    cloud: str
    sizes: InstanceSizes
    usd_per_gpu_hour: float | None
    price_source: str

    def table(self, nodes: int) -> dict[str, object]:
        """The keys of [cluster] that it stands for."""
        sizes = self.sizes
        table: dict[str, object] = (
            {"profile": sizes.profile} if sizes.profile else {"gpu": sizes.gpu, "gpus_per_node": sizes.gpus}
        )
        table |= {"link": sizes.link} if sizes.link else {}
        if nodes > 1 and sizes.network is not None:
            table["network"] = sizes.network
            table |= {"cards_per_node": sizes.cards_per_node} if sizes.cards_per_node else {}
        return table

    @property
    def node(self) -> str:
        """One of them, as `parsim.hardware.compose.load_profile` takes it."""
        sizes = self.sizes
        return sizes.profile or f"{sizes.gpus}x{sizes.gpu}" + (f"@{sizes.link}" if sizes.link else "")

    def to_dict(self) -> dict[str, object]:
        sizes = self.sizes
        return {
            "cloud": self.cloud,
            "gpus": sizes.gpus,
            "machine": self.node,
            "network": sizes.network,
            "network_text": sizes.network or sizes.no_network,
            "usd_per_hour": None if self.usd_per_gpu_hour is None else self.usd_per_gpu_hour * sizes.gpus,
            "price_source": self.price_source,
        }


UNCOVERED: tuple[tuple[str, str], ...] = (
    (r"(tpu-?)?v\d+(p|e|lite|litepod|x)?(-\d+)?(-tpu)?|ct\d+(e|p|lp|l)?-.*|tpu.*|ironwood.*", "TPUs of Google"),
    (r"(trn|inf)\d.*|trainium\d*|inferentia\d*", "Trainium and Inferentia of AWS"),
    (r"dl1\..*|dl2q\..*|(hl-?)?gaudi[ -]?\d?.*|hpu.*", "Gaudi of Intel and Qualcomm's cards"),
    (r"(apple[ -]?)?m\d([ -]?(pro|max|ultra))?|mac.*|mps", "GPUs of Apple"),
    (r".*(gb[23]00).*|a4x-.*|p6e-.*", "single trays of a rack of 72 GPUs"),
)
"""Names of accelerators that no part describes, and what they are."""
RACK = "ask for the rack as 72xgb200 or 72xgb300, which its NVLink joins"
COVERED = "parsim prices GPUs of NVIDIA and AMD; describe another device in a JSON file as hardware_profiles/README.md says"


def check_covered(name: str) -> None:
    """Raise ProfileError, in one sentence, for an accelerator by a well-known name that parsim does not cover."""
    kind = next((what for pattern, what in UNCOVERED if re.fullmatch(pattern, name, re.IGNORECASE)), None)
    if kind is not None and name.lower() not in ("gb200", "gb300"):
        raise ProfileError(f"{name}: {kind} are not covered; {RACK if 'rack' in kind else COVERED}")


@lru_cache(maxsize=1)
def clouds() -> Mapping[str, CloudFile]:
    """The shipped files by provider."""
    return {name: parse_record(CloudFile, shipped_text("clouds", name), name, "cloud") for name in shipped("clouds")}


def _key(name: str) -> str:
    """`ml.p5.48xlarge`, `Standard_ND96isr_H100_v5` and `nd96isr_h100_v5` without what may be left out."""
    return re.sub(r"^(ml\.|standard_)", "", name.strip().lower())


@lru_cache(maxsize=1)
def _by_key() -> Mapping[str, tuple[str, str]]:
    """Cloud and name of every type by its key; families too."""
    found = {_key(name): (cloud, name) for cloud, file in clouds().items() for name in file.instances}
    families = {_key(other): (cloud, name) for cloud, file in clouds().items() for other, name in file.families.items()}
    return families | found


def instance_names() -> list[str]:
    return [name for file in clouds().values() for name in file.instances]


def instance_named(name: str) -> CloudInstance | None:
    """A type by name, whatever its case; None: it is none. Prices are those of `refresh` where there are any."""
    if (place := _by_key().get(_key(name))) is None:
        return None
    cloud, known = place
    file = clouds()[cloud]
    sizes = file.instances[known]
    refreshed = _refreshed().get(known)
    usd, source = sizes.usd_per_hour, f"{known}, on demand, {file.priced_as_of}"
    if refreshed is not None:
        usd, source = refreshed.usd_per_hour, f"{known}, on demand in {refreshed.region}, {refreshed.as_of}"
    return CloudInstance(
        name=known,
        cloud=cloud,
        sizes=sizes,
        usd_per_gpu_hour=None if usd is None else usd / sizes.gpus,
        price_source="" if usd is None else source,
    )


def instances_of(text: str) -> tuple[int, CloudInstance] | None:
    """How many of which: of "p5.48xlarge", or of "2xp5.48xlarge"; None: no instance type."""
    if (found := instance_named(text)) is not None:
        return 1, found
    form = re.fullmatch(r"\s*(\d[\d_,]*)\s*x\s*(\S+)\s*", text)
    found = None if form is None else instance_named(form[2])
    if form is None or found is None:
        return None
    if (count := int(re.sub("[_,]", "", form[1]))) < 1:
        raise ProfileError(f"{text!r}: at least one instance is needed")
    return count, found


# Newer prices, kept for this user.


GPUHUNT = {"aws": "aws", "azure": "azure", "gcp": "gcp", "oci": "oci", "lambda": "lambdalabs"}
"""Providers by gpuhunt's names."""
HOME = {"aws": "us-east-1", "azure": "eastus", "gcp": "us-central1"}
"""Regions whose price is taken where they have one; else the lowest."""


class RefreshedPrice(ProfileRecord):
    """One type of `refresh`: dollars of an hour on demand, the region, who told it and when."""

    usd_per_hour: Positive
    region: str
    as_of: str


def _refreshed() -> Mapping[str, RefreshedPrice]:
    file = cache_folder("prices") / "clouds.json"
    if not file.is_file():
        return {}
    fix = "remove it, or write it again with `parsim profile prices --refresh`"
    with reading(f"{file} is damaged", ProfileError, fix):
        rows = parse_json(read_text(file))
        if character := control_character_in(rows):
            raise ValueError(f"{character}: {NO_CONTROL}")
        try:
            return {str(name): RefreshedPrice.model_validate(row) for name, row in rows.items()}
        except ValidationError as error:
            raise ValueError(problems_text(error, "price")) from error


def refresh() -> int:
    """Ask gpuhunt for the prices of all types and keep them. Returns how many it had. Raises MissingDependencyError without
    gpuhunt; ProfileError: no answer from its catalogue."""
    try:
        import gpuhunt  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingDependencyError(
            "--refresh asks the catalogue of gpuhunt: pip install gpuhunt; without it the shipped prices and their dates stay"
        ) from error
    kept: dict[str, dict[str, object]] = {}
    try:
        for cloud, provider in GPUHUNT.items():
            _keep_cheapest(kept, cloud, gpuhunt.query(provider=provider, spot=False))
    except Exception as error:  # whatever a network can answer
        raise ProfileError(f"gpuhunt's catalogue cannot be read: {error}; the shipped prices and their dates stay") from error
    folder = cache_folder("prices")
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomically(folder / "clouds.json", json.dumps(kept, indent=1) + "\n")
    return len(kept)


def _keep_cheapest(kept: dict[str, dict[str, object]], cloud: str, items: list[object]) -> None:
    names = {_key(name): name for name in clouds()[cloud].instances}
    as_of = f"gpuhunt, {date.today().isoformat()}"
    best: dict[str, tuple[bool, float, str]] = {}
    for item in items:
        name = names.get(_key(str(getattr(item, "instance_name", ""))))
        price, region = getattr(item, "price", None), str(getattr(item, "location", ""))
        if name is None or not price:
            continue
        offer = (not region.startswith(HOME.get(cloud, "?")), float(price), region)
        best[name] = min(best.get(name, offer), offer)
    for name, (_, price, region) in best.items():
        kept[name] = {"usd_per_hour": price, "region": region, "as_of": as_of}
