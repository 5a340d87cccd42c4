"""Hardware from parts: GPUs, links and networks by name, and machines made of them."""

from __future__ import annotations

import importlib.resources
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, model_validator

from parsim.errors import ProfileError, near_matches
from parsim.files import read_text
from parsim.hardware.devices import DEVICE_KINDS
from parsim.hardware.profile import LinkProtocol, Sourced, SourceEntry
from parsim.hardware.records import (
    Count,
    FitForm,
    HeldOut,
    KernelPhase,
    NonNegative,
    Positive,
    ProfileRecord,
    check_device,
    check_latency,
    check_rate,
    parse_record,
    source_keys,
)
from parsim.registry import RowOf

# The files of parts: one JSON per GPU and per kind of link, every number with its source, as in a profile.
#
# Pydantic checks them at the boundary; `parsim.hardware.compose` makes a Profile of them. A network is a part too, with its own
# file format (`parsim.hardware.network`).


LinkForm = Literal["switch", "mesh", "pairs", "cube", "host"]
"""How the devices of a node are joined: each to one switch; each to each; two and two; the hybrid cube mesh of eight; over the
host's PCIe switches alone."""


class PartFit(ProfileRecord):
    """The fitted time of one kind of kernel on this GPU; with the chip's own numbers it becomes an `OperatorFit`.

    Attributes:
        variant: of several for one kind (the library of an attention): the first listed is the default.
        precisions: for which it holds. form: the formula that the coefficients enter.
        held_out: errors on rows that the fit had not seen, by what was left out.
        transferred_from: other GPUs, where this one has no rows of its own.
    """

    kind: str
    phase: KernelPhase
    form: FitForm
    variant: str = ""
    precisions: Annotated[list[str], Field(min_length=1)]
    coefficients: dict[str, float]
    relative_sigma: NonNegative
    min_flop: NonNegative
    max_flop: NonNegative
    points: int
    held_out: dict[str, HeldOut] = {}
    transferred_from: list[str] = []
    source: str


class PartEfficiency(ProfileRecord):
    """What whole models reach of the throughput of their kernels alone: one factor per precision, as in a profile."""

    precisions: Annotated[list[str], Field(min_length=1)]
    factor: Positive
    spread: NonNegative
    points: int
    source: str


class DatedPrice(ProfileRecord):
    """Dollars per hour of one GPU, as one provider asked on demand. as_of: the catalogue and its version."""

    value: Positive
    as_of: str
    source: str


class GpuPart(ProfileRecord):
    """One GPU.

    Attributes:
        multiprocessors: units that each run one tile at a time.
        link: the part that joins its GPUs in the usual machine; host_link: the PCIe generation.
        gpus_per_node: of the usual machine.
        launch_s: of the usual machine's host, for an operator of eager torch; None: not known.
        busy_power_w: of the board in training or a like load. Prices and watts are left out where nobody published them.
    """

    schema_version: Literal[1]
    name: str
    description: str
    sources: dict[str, SourceEntry]
    kind: Annotated[str, RowOf(DEVICE_KINDS)]
    memory_bytes: Sourced
    memory_bandwidth_bytes_per_s: Sourced
    context_bytes: Sourced
    multiprocessors: Sourced
    peak_flop_per_s: dict[str, Sourced]
    board_limit_w: Sourced | None = None
    busy_power_w: Sourced | None = None
    idle_power_w: Sourced | None = None
    launch_s: Sourced | None = None
    usd_per_hour: DatedPrice | None = None
    link: str
    host_link: str
    gpus_per_node: Count
    fits: list[PartFit] = []
    efficiencies: list[PartEfficiency] = []

    @model_validator(mode="after")
    def _can_be(self) -> GpuPart:
        amounts = ("memory_bytes", "memory_bandwidth_bytes_per_s")
        peaks = {precision: peak.value for precision, peak in self.peak_flop_per_s.items()}
        check_device({name: getattr(self, name).value for name in amounts}, peaks)
        if not 1 <= self.multiprocessors.value <= 10_000:
            raise ValueError(f"multiprocessors = {self.multiprocessors.value:g}: a GPU has 1 to 10000")
        _check_sources(self)
        return self


class LinkPart(ProfileRecord):
    """One way of joining the GPUs of a node.

    Attributes:
        lanes: of one device, and the bandwidth of a lane in one direction that large collectives reach.
        largest: devices that one node can have; spread: relative, of the times over it.
        socket_bytes_per_s: between the two sockets, with form "host".
    """

    schema_version: Literal[1]
    name: str
    description: str
    sources: dict[str, SourceEntry]
    form: LinkForm
    lanes: Count
    bandwidth_bytes_per_s: Sourced
    latency_s: Sourced
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
    def _can_be(self) -> LinkPart:
        check_rate("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s.value)
        check_latency("latency_s", self.latency_s.value)
        if self.form == "host" and self.socket_bytes_per_s is None:
            raise ValueError('form = "host" needs socket_bytes_per_s, the rate between the two sockets')
        _check_sources(self)
        return self


def _check_sources(part: GpuPart | LinkPart) -> None:
    for source in sorted(source_keys(part.model_dump())):
        if source not in part.sources:
            raise ValueError(f"source {source!r} is not listed under sources{near_matches(source, part.sources)}")


# Parts by name or path: GPUs and links, with near matches and how to describe one that is not shipped.


AnyPart = TypeVar("AnyPart", GpuPart, LinkPart)

FOLDERS: dict[type[GpuPart] | type[LinkPart], tuple[str, str]] = {GpuPart: ("gpus", "GPU"), LinkPart: ("links", "link")}
HOW_TO_DESCRIBE = "describe your own in a JSON file as hardware_profiles/README.md says (Parts), and give its path"


def shipped_gpus() -> list[str]:
    """Names of the GPUs that come with the package."""
    return _shipped("gpus")


def shipped_links() -> list[str]:
    """Names of the links that come with the package."""
    return _shipped("links")


@lru_cache(maxsize=64)
def load_gpu(name_or_path: str) -> GpuPart:
    """A GPU by name ("h100-sxm"), by alias ("h100") or by the path of a JSON file.

    Raises:
        ProfileError: an unknown name (with near matches), or a broken file (with the path of the wrong key).
    """
    return _load(GpuPart, name_or_path)


@lru_cache(maxsize=64)
def load_link(name_or_path: str) -> LinkPart:
    """A link by name ("nvswitch-4"), by alias or by path. Raises ProfileError as `load_gpu`."""
    return _load(LinkPart, name_or_path)


def _load(record: type[AnyPart], name_or_path: str) -> AnyPart:
    folder, what = FOLDERS[record]
    path = Path(name_or_path)
    if path.suffix == ".json" or os.sep in name_or_path:
        try:
            return parse_record(record, read_text(path), str(path), what)
        except (OSError, ValueError) as error:
            raise ProfileError(f"cannot read {what} {path}: {error}; {HOW_TO_DESCRIBE}") from error
    names = _names(folder)
    if name_or_path.lower() not in names:
        near, known = near_matches(name_or_path.lower(), names), ", ".join(_shipped(folder))
        near = near if "did you mean" in near else ""
        raise ProfileError(f"unknown {what} {name_or_path!r}{near}; known: {known}; or {HOW_TO_DESCRIBE}")
    name = names[name_or_path.lower()]
    return parse_record(record, _files(folder).joinpath(f"{name}.json").read_text("utf-8"), name, what)


def _files(folder: str) -> importlib.resources.abc.Traversable:
    return importlib.resources.files("hardware_profiles").joinpath("parts", folder)


def _shipped(folder: str) -> list[str]:
    return sorted(entry.name.removesuffix(".json") for entry in _files(folder).iterdir() if entry.name.endswith(".json"))


ALIASES: dict[str, dict[str, str]] = {
    "gpus": {
        "h100": "h100-sxm",
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
        "v100-pcie": "v100-pcie-32gb",
        "h200-sxm": "h200",
        "b200-sxm": "b200",
        "rtx3090": "rtx-3090",
        "rtx4090": "rtx-4090",
    },
    "links": {"nvlink-bridge": "nvlink-bridge-3", "nvswitch": "nvswitch-4"},
}
"""Short names, and what they stand for: the form that most machines have."""


@lru_cache(maxsize=4)
def _names(folder: str) -> dict[str, str]:
    """Every name and alias, and the file it stands for."""
    known = {name: name for name in _shipped(folder)}
    return known | {alias: name for alias, name in ALIASES[folder].items() if name in known}


# Machines in one word: `8xh100-sxm` is a node of eight, `8xa100-pcie-80gb@nvlink-bridge-3` names the link as well, and
# `1024xh100-sxm` is as many whole nodes as it takes.


FORM = re.compile(r"\s*(?P<count>\d[\d_,]*)\s*x\s*(?P<gpu>[^@\s][^@]*)(@(?P<link>.+))?")


@dataclass(frozen=True, slots=True)
class Machines:
    """Nodes of `gpus_per_node` equal GPUs; link: None for the usual one."""

    gpu: str
    gpus_per_node: int
    nodes: int
    link: str | None = None

    @property
    def node(self) -> str:
        """One of the nodes, as a shorthand."""
        return f"{self.gpus_per_node}x{self.gpu}" + (f"@{self.link}" if self.link else "")


def is_shorthand(text: str) -> bool:
    """Whether a text has the form COUNTxGPU."""
    return FORM.fullmatch(text) is not None


def machines_of(text: str, per_node: int | None = None) -> Machines:
    """What a shorthand means: nodes of the usual size, or one smaller node.

    Args:
        text: such as "1024xh100-sxm". per_node: GPUs of a node; None: the usual number.

    Raises:
        ProfileError: another form, an unknown GPU, or a number that is not a whole number of nodes.
    """
    found = FORM.fullmatch(text)
    if found is None:
        raise ProfileError(f"{text!r} names no GPUs: write COUNTxGPU, for example 8xh100-sxm")
    count, gpu, link = int(re.sub("[_,]", "", found["count"])), found["gpu"].strip(), found["link"]
    usual = per_node or load_gpu(gpu).gpus_per_node
    if count < 1:
        raise ProfileError(f"{text!r}: at least one GPU is needed")
    if per_node is not None and count % per_node:
        raise ProfileError(f"{text!r} are no whole number of nodes of cluster.gpus_per_node = {per_node}; change one of them")
    if count <= usual:
        return Machines(gpu, count, 1, link)
    if count % usual:
        whole = count // usual * usual
        raise ProfileError(
            f"{text!r}: {load_gpu(gpu).name} comes in nodes of {usual}, and {count:,} are no whole number of them; ask for "
            f"{whole:,} or {whole + usual:,}, or set cluster.gpus_per_node and cluster.nodes"
        )
    return Machines(gpu, usual, count // usual, link)
