"""The files of parts: one JSON per GPU and per kind of link, every number with its source, as in a profile.

Pydantic checks them at the boundary; `parsim.hardware.parts.compose` makes a Profile of them. A network is a part too, with its
own file format (`parsim.hardware.network`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from parsim.errors import near_matches
from parsim.hardware.compute_records import FitForm, HeldOut, KernelPhase
from parsim.hardware.device_kinds import DEVICE_KINDS
from parsim.hardware.profile import LinkProtocol, Sourced, SourceEntry, source_keys
from parsim.hardware.record import Count, NonNegative, Positive, ProfileRecord, check_device, check_latency, check_rate
from parsim.registry import RowOf

SCHEMA_VERSION = 1

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
