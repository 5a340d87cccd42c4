"""The hardware profile: one JSON per machine, every number with its unit in the key and its source next to it.

A profile has four parts: the machine (device types, devices, links), measured or published points, fits to those points,
and the sources and provenance of everything. Refitting needs the profile alone. Pydantic checks it at the boundary;
inside the library `parsim.hardware.cluster.Cluster` is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from parsim.errors import near_matches
from parsim.files import write_text_atomically
from parsim.hardware.devices import DEVICE_KINDS, Allocator, device_name
from parsim.hardware.records import (
    ComputeRecords,
    NonNegative,
    Positive,
    ProfileRecord,
    parse_record,
    shipped,
    source_keys,
    to_text,
)
from parsim.hardware.topology import DEVICE_ROLES, role_of
from parsim.registry import RowOf

LEAST_BYTES_PER_S = 1e6
"""Of a link, a network card or a memory: what is slower was meant in GB/s, or in MB/s."""
LEAST_FLOP_PER_S = 1e6
"""Of a device: what is slower was meant in TFLOP/s."""
LEAST_MEMORY_BYTES = 2**16
"""Of a device: what is less was meant in GiB."""
LONGEST_LATENCY_S = 1.0
"""Of a link: what is longer was meant in microseconds."""


class Sourced(ProfileRecord):
    """A number and the key of its source in the `sources` of its file."""

    value: NonNegative
    source: str


class SourceEntry(ProfileRecord):
    kind: Literal["measurement", "datasheet", "paper", "derived", "assumption"]
    text: str


class SourcedFile(ProfileRecord):
    """What a profile, a part and a network file have in common: every source that a number names is listed under sources."""

    schema_version: Literal[1]
    name: str
    description: str

    @model_validator(mode="after")
    def _sources_are_listed(self) -> SourcedFile:
        document = self.model_dump()
        for source in sorted(source_keys(document)):
            if source not in document["sources"]:
                raise ValueError(f"source {source!r} is not listed under sources{near_matches(source, document['sources'])}")
        return self


class LinkNumbers(ProfileRecord):
    """A link of the host, of the GPUs or of the network: bandwidth of one lane (or card) and latency, both in one direction."""

    bandwidth_bytes_per_s: Sourced
    latency_s: Sourced

    @model_validator(mode="after")
    def _can_be(self) -> LinkNumbers:
        _check_rate("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s)
        if (latency := self.latency_s.value) > LONGEST_LATENCY_S:
            raise ValueError(f"latency_s = {latency:g} s: must be <= {LONGEST_LATENCY_S:g}{_meant(latency, 'us', 1e-6)}")
        return self


class DeviceNumbers(ProfileRecord):
    """The rates and memory of a type of device."""

    kind: Annotated[str, RowOf(DEVICE_KINDS)]
    memory_bytes: Sourced
    memory_bandwidth_bytes_per_s: Sourced
    context_bytes: Sourced
    peak_flop_per_s: dict[str, Sourced]

    @model_validator(mode="after")
    def _can_be(self) -> DeviceNumbers:
        if (memory := self.memory_bytes.value) < LEAST_MEMORY_BYTES:
            raise ValueError(f"memory_bytes = {memory:g}: must be >= {LEAST_MEMORY_BYTES}{_meant(memory, 'GiB', 2**30)}")
        _check_rate("memory_bandwidth_bytes_per_s", self.memory_bandwidth_bytes_per_s)
        for precision, peak in self.peak_flop_per_s.items():
            if peak.value < LEAST_FLOP_PER_S:
                fix = _meant(peak.value, "TFLOP/s", 1e12) or f"; leave {precision} out if the device cannot compute in it"
                raise ValueError(f"peak_flop_per_s.{precision} = {peak.value:g} FLOP/s: must be >= {LEAST_FLOP_PER_S:g}{fix}")
        return self


def _check_rate(key: str, rate: Sourced) -> None:
    if rate.value < LEAST_BYTES_PER_S:
        fix = _meant(rate.value, "GB/s", 1e9)
        raise ValueError(f"{key} = {rate.value:g} bytes/s: must be >= {LEAST_BYTES_PER_S:g}{fix}")


def _meant(value: float, unit: str, factor: float) -> str:
    """The likely slip: a number in another unit, and how to write it."""
    return f"; {unit} meant? then write {value * factor:g}" if value else ""


class Provenance(ProfileRecord):
    """Who made this profile, when, with what.

    Attributes:
        environment: settings and load of the machine during the measurement: threads, cores of the ranks, clocks,
            governor, load, steal. Plain JSON without host, user or path. Empty if nothing was measured.
        warnings: implausible measurements that were discarded, and doubts about the rest.
    """

    created: str
    command: str
    machine: str
    versions: dict[str, str] = {}
    environment: dict[str, JsonValue] = {}
    warnings: list[str] = []


class DeviceTypeEntry(DeviceNumbers):
    """`allocator`: None if it was not measured; the assumed value of the device kind holds then."""

    allocator: Allocator | None = None


class DeviceEntry(ProfileRecord):
    """`core`: CPU devices (ranks) of one core share it; None: a device by itself."""

    index: Annotated[int, Field(ge=0)]
    type: str
    node: int = 0
    core: int | None = None


class LinkEntry(ProfileRecord):
    a: str
    b: str
    kind: str
    lanes: Annotated[int, Field(ge=1)] = 1


class CollectivePoint(ProfileRecord):
    """One measured collective (or "send_recv" with group [source, destination]).

    `spread` is the relative standard deviation over repeats (None: unknown). `measured_on` names another machine that
    stands in for this one (empty: this machine); such a point shapes a fit and is never taken for a measurement of `group`.
    """

    operation: str
    group: list[int]
    size_bytes: Annotated[int, Field(ge=0)]
    seconds: Positive
    spread: NonNegative | None = None
    repeats: int = 1
    measured_on: str = ""
    source: str


class Regime(ProfileRecord):
    """seconds = latency_s + seconds_per_byte * size_bytes for sizes up to max_size_bytes (None: no end)."""

    max_size_bytes: int | None
    latency_s: NonNegative
    seconds_per_byte: NonNegative


class CollectiveFit(ProfileRecord):
    """Piecewise alpha-beta of one operation over groups of `group_size` ranks of this machine.

    Regimes are sorted by size; a size costs at least what the end of every earlier regime costs, so the time never falls
    with the size. `groups` are the devices it was measured on. Empty: it holds wherever the ranks sit (gloo over shared
    memory or loopback). Beside a link model it prices these groups and those that the links join alike.
    `relative_sigma` is the spread of the points around the fit, `repeat_sigma` that of one repetition around its median;
    sizes outside min_size_bytes..max_size_bytes were not measured.
    """

    operation: str
    group_size: Annotated[int, Field(ge=2)]
    algorithm: str
    regimes: Annotated[list[Regime], Field(min_length=1)]
    relative_sigma: NonNegative
    repeat_sigma: NonNegative = 0.0
    min_size_bytes: int
    max_size_bytes: int
    groups: list[list[int]] = []
    source: str


class LinkProtocol(ProfileRecord):
    """One algorithm under one protocol of the library: how long it takes, and how the library's own tuner rates it.

    seconds = base_s + steps * hop_s + traffic / (efficiency * rings * bandwidth of a lane); for the steps and the traffic
    of each operation see `parsim.costs.communication.collectives`. With "nvls" the switch adds and copies (`algorithms` there).
    The tuner_ numbers enter the same formula and only decide which protocol is used: the one with the least tuner time.
    """

    algorithm: Literal["ring", "tree", "nvls"]
    protocol: str
    base_s: NonNegative
    hop_s: NonNegative
    efficiency: Positive
    tuner_base_s: NonNegative
    tuner_hop_s: NonNegative
    tuner_efficiency: Positive
    source: str
    tuner_source: str


class LinkModel(ProfileRecord):
    """Collectives derived from the links themselves (NCCL on NVLink): rings packed on the link graph, or trees.

    Attributes:
        link_kind: the links rings are packed on. protocols: over these rings.
        relay_protocols: one ring that crosses other links (PCIe, the sockets), for a group without a ring of direct
        links.
        tuner_bandwidth_bytes_per_s: of one lane, as the tuner counts it.
        point_to_point_base_s: latency of one send_recv. measured_groups: the groups of devices that the points cover.
        point_sources: sources of the profile's points that the model was fitted to; all others price their own groups.
        relative_sigma: spread of the measured points around the fit, from min_size_bytes to max_size_bytes.
        unmeasured_group_sigma: further spread for a group unlike any measured one (from leaving one group out).
    """

    link_kind: str
    protocols: Annotated[list[LinkProtocol], Field(min_length=1)]
    relay_protocols: list[LinkProtocol] = []
    tuner_bandwidth_bytes_per_s: Sourced
    point_to_point_base_s: NonNegative
    relative_sigma: NonNegative
    unmeasured_group_sigma: NonNegative
    measured_groups: list[list[int]]
    point_sources: list[str] = []
    min_size_bytes: int
    max_size_bytes: int
    source: str


class Communication(ProfileRecord):
    backend: Literal["nccl", "gloo"]
    uses_cores: bool = False
    points: list[CollectivePoint] = []
    fits: list[CollectiveFit] = []
    link_model: LinkModel | None = None


class OverlapPoint(ProfileRecord):
    """The factors of `Overlap` beside one operation of one size over `group_size` ranks; medians over models and repeats."""

    operation: str
    group_size: Annotated[int, Field(ge=2)]
    size_bytes: Annotated[int, Field(ge=0)]
    compute_factor: Annotated[float, Field(ge=1)]
    communication_factor: Annotated[float, Field(ge=1)]
    repeats: int
    source: str


class Overlap(ProfileRecord):
    """While computation and communication of one rank run together, each takes `factor` times as long as alone.

    The two factors cover all measurements; `points` hold them by size of the message.
    """

    compute_factor: Annotated[float, Field(ge=1)]
    communication_factor: Annotated[float, Field(ge=1)]
    points: list[OverlapPoint] = []
    source: str


class ProbePace(ProfileRecord):
    """Seconds of the probe (`parsim.execute.processes.speed_probe`): of one rank alone, and with a rank on every core."""

    alone: Positive
    together: Positive


class ProbeSeconds(ProbePace):
    """The probe's seconds at the speed for which the profile's seconds hold. rank_sigma: the part of `Noise.rank_sigma`
    that the speed measured next to each step does not explain.
    """

    rank_sigma: NonNegative = 0.0


class PaceToday(ProbePace):
    """The speed that `parsim calibrate --refresh` found later; all times scale with it."""

    created: str


class Noise(ProfileRecord):
    """How unsteady the machine is.

    Attributes:
        drift_sigma: relative spread from run to run, shared by all computation.
        measured_drift_sigma: the part that the calibration measured from round to round (None: not measured); the rest is
        assumed.
        rank_sigma: relative spread of one rank's step against the other ranks' in the same step. Ranks that wait for
            one another wait for the slowest, so it lengthens the mean step.
        device_sigma: relative spread of devices of one type at the same work, step after step; None: unknown, taken as none.
        probe: speed of the cores while the profile was measured; None: not measured.
    """

    drift_sigma: NonNegative
    measured_drift_sigma: NonNegative | None = None
    rank_sigma: NonNegative = 0.0
    device_sigma: Sourced | None = None
    probe: ProbeSeconds | None = None
    source: str


class HostOverhead(ProfileRecord):
    """Seconds that the interpreter adds to each task and to each step of a rank.

    Attributes:
        post_wait_s: seconds that computation takes longer after its rank has waited for communication, because caches
            hold other data.
        core_sharing: processor seconds of computation where all ranks of the profile share its cores, over those with one
            rank on each core; 1 where none is shared.
        load_s, load_seconds_per_byte: of bringing a batch from the data in memory to the rank; None: not measured.
        load_part_s: of each further part of a batch that comes right after the first, instead of load_s; None: as much.
        launch_s: of the host per launch of a component on a GPU that was not measured; 0: not known.
    """

    task_s: NonNegative
    step_s: NonNegative
    post_wait_s: NonNegative = 0.0
    core_sharing: Annotated[float, Field(ge=1)] = 1.0
    load_s: NonNegative | None = None
    load_seconds_per_byte: NonNegative | None = None
    load_part_s: NonNegative | None = None
    launch_s: NonNegative = 0.0
    source: str


class HostMemory(ProfileRecord):
    """The memory of a node's host, which offloaded state and activations take; each number None where it is not known.

    Attributes:
        memory_bytes: of a node. bandwidth_bytes_per_s: of a node, all sockets together: reads and writes of a large loop.
        link_bytes_per_s: between a device and its host, in each direction; None: by the links of the machine.
    """

    memory_bytes: Positive | None = None
    bandwidth_bytes_per_s: Positive | None = None
    link_bytes_per_s: Positive | None = None
    source: str


class NicSlot(ProfileRecord):
    """Where one network card sits: the endpoint it is plugged into ("pcie0", "socket1") and the kind of that link."""

    at: str
    kind: str
    lanes: Annotated[int, Field(ge=1)] = 1


class DeviceFactor(ProfileRecord):
    """All computation of one device takes `factor` times as long."""

    device: Annotated[int, Field(ge=0)]
    factor: Positive


class PhaseFactor(ProfileRecord):
    """All computation of one phase (`parsim.work.Phase`) takes `factor` times as long."""

    phase: str
    factor: Positive


class CommunicationFactor(ProfileRecord):
    """One collective over devices (ascending), or send_recv from one device to another, takes `factor` times as long."""

    operation: str
    devices: Annotated[list[int], Field(min_length=2)]
    factor: Positive


class Update(ProfileRecord):
    """Errors of this profile that a validation showed: factors on its numbers as measured.

    Factors are never relative to an earlier update: the latest update holds, whole, and earlier ones are a record.

    Attributes:
        run, plan, steps: the measurement behind it. aa_floor: relative difference of the halves of that measurement;
            smaller effects on the step are not learnt.
    """

    created: str
    run: str
    plan: str
    steps: Annotated[int, Field(ge=1)]
    aa_floor: NonNegative
    devices: list[DeviceFactor] = []
    phases: list[PhaseFactor] = []
    communication: list[CommunicationFactor] = []


class Profile(SourcedFile):
    """The whole file. today: how fast the machine was since the calibration (`parsim.hardware.speed_factor`); None: nobody
    looked."""

    provenance: Provenance
    sources: dict[str, SourceEntry]
    device_types: dict[str, DeviceTypeEntry]
    devices: list[DeviceEntry]
    link_kinds: dict[str, LinkNumbers] = {}
    links: list[LinkEntry] = []
    nics: list[NicSlot] = []
    nics_source: str | None = None
    communication: Communication
    compute: ComputeRecords = ComputeRecords()
    overlap: Overlap | None = None
    noise: Noise | None = None
    host: HostOverhead | None = None
    host_memory: HostMemory | None = None
    updates: list[Update] = []
    today: PaceToday | None = None

    @model_validator(mode="after")
    def _references_exist(self) -> Profile:
        for device in self.devices:
            if device.type not in self.device_types:
                near = near_matches(device.type, self.device_types)
                raise ValueError(f"device {device.index} has type {device.type!r}{near}")
        if not self.devices:
            raise ValueError("devices is empty; a machine has at least one")
        indices = [device.index for device in self.devices]
        if len(set(indices)) != len(indices):
            raise ValueError(f"device numbers must be unique, got {indices}")
        model = self.communication.link_model
        kinds = [(f"link {link.a}-{link.b} has kind", link.kind) for link in self.links]
        kinds += [(f"nics.{number} has kind", slot.kind) for number, slot in enumerate(self.nics)]
        kinds += [] if model is None else [("link_model has link_kind", model.link_kind)]
        for where, kind in kinds:
            if kind not in self.link_kinds:
                raise ValueError(f"{where} {kind!r}{near_matches(kind, self.link_kinds)}")
        devices = {device_name(device.index, self.device_types[device.type].kind) for device in self.devices}
        ends = {end for link in self.links for end in (link.a, link.b)}
        for end in sorted(ends):
            if role_of(end) in DEVICE_ROLES and end not in devices:
                raise ValueError(f"a link ends at {end!r}, which is not a device of the profile{near_matches(end, devices)}")
        for number, slot in enumerate(self.nics):
            if slot.at not in ends:
                raise ValueError(f"nics.{number} sits at {slot.at!r}, where no link ends{near_matches(slot.at, ends)}")
        return self


def shipped_profiles() -> list[str]:
    return shipped()


def parse_profile(text: str, where: str) -> Profile:
    """Check a profile's JSON text; `where` names it in messages. Raises ProfileError: the first wrong keys and their values."""
    return parse_record(Profile, text, where, "profile", otherwise="calibrate again")


def save_profile(profile: Profile, path: Path) -> None:
    write_text_atomically(path, to_text(profile.model_dump(mode="json")))
