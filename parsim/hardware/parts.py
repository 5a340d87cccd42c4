"""Hardware from parts: GPUs and links by name, one JSON file each, every number with its source, as in a profile.

Pydantic checks them at the boundary; `parsim.hardware.compose` makes a Profile of them. A network is a part too, with its own
file format (`parsim.hardware.network`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field, model_validator

from parsim.errors import ProfileError
from parsim.hardware.instances import CloudInstance, check_covered, instances_of
from parsim.hardware.profile import DeviceNumbers, LinkNumbers, LinkProtocol, Sourced, SourcedFile, SourceEntry
from parsim.hardware.records import (
    Count,
    HeldOut,
    KernelFit,
    Positive,
    ProfileRecord,
    WholeModels,
    is_path,
    load_record,
    shipped,
)

LinkForm = Literal["switch", "mesh", "pairs", "cube", "host"]
"""How the devices of a node are joined: each to one switch; each to each; two and two; the hybrid cube mesh of eight; over the
host's PCIe switches alone."""


class PartFit(KernelFit):
    """A fit for this GPU in several precisions; with the chip's own numbers it becomes an `OperatorFit` for each.

    Attributes:
        transferred_from: other GPUs, where this one has no rows of its own.
    """

    precisions: Annotated[list[str], Field(min_length=1)]
    transferred_from: list[str] = []


class PartEfficiency(WholeModels):
    """`WholeModels` on this GPU, in several precisions."""

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
    """Names of the GPUs that come with the package."""
    return shipped("parts", "gpus")


def shipped_links() -> list[str]:
    """Names of the links that come with the package."""
    return shipped("parts", "links")


@lru_cache(maxsize=64)
def load_gpu(name_or_path: str) -> GpuPart:
    """A GPU by name ("h100-sxm"), by alias ("h100"), by the driver's name ("NVIDIA H100 PCIe") or by the path of a JSON file.

    Raises:
        ProfileError: an unknown name (with near matches), or a broken file (with the path of the wrong key).
    """
    try:
        return load_record(GpuPart, ("parts", "gpus"), "GPU", driver_name(name_or_path) or name_or_path, ALIASES["gpus"])
    except ProfileError:
        check_covered(name_or_path)
        raise


@lru_cache(maxsize=64)
def load_link(name_or_path: str) -> LinkPart:
    """A link by name ("nvswitch-4"), by alias or by path. Raises ProfileError as `load_gpu`."""
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
        """One of the nodes, as a shorthand."""
        if self.instance is not None:
            return self.instance.node
        return f"{self.gpus_per_node}x{self.gpu}" + (f"@{self.link}" if self.link else "")


def shorthand(text: str) -> tuple[int, str, str | None] | None:
    """Count, GPU and link of a text of the form COUNTxGPU or COUNTxGPU@LINK; None for another form."""
    form = FORM.fullmatch(text)
    return None if form is None else (int(re.sub("[_,]", "", form["count"])), form["gpu"].strip(), form["link"])


def is_shorthand(text: str) -> bool:
    """Whether a text has the form COUNTxGPU, or names instances of a cloud."""
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
