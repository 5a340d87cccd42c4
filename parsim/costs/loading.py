"""What reading batches of a dataset of the user's own costs, as it was timed on this machine before the prediction.

A rank reads its part of a step in `parts`, one per microbatch:

    read = first_s + (parts - 1) * again_s + samples * sample_s + global_batch * passing_s

`passing_s` is of an iterable dataset alone: every rank reads all samples of a batch and keeps its own. Who waits for it:

    on a CPU             the rank itself reads, in its turn: the whole of it
    with workers         the rank takes each part over (`handover_s`). W workers give a batch every read / W, except that each
                         of them passes all samples. What they compute takes the ranks' time where no core is left for them
    on a GPU             a thread reads the next batch in every step, which is then copied: a step is no shorter than both.
                         Workers read beside the copy: it is no shorter than a batch of theirs

Leaves out: that workers use the time in which a rank waits for others; the interpreter's lock, for which a reading thread and
the rank compete; samples that become slower later in the training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from parsim.costs.estimate import Estimate, Term, Terms, summed
from parsim.errors import CostError
from parsim.hardware.cluster import Cluster
from parsim.hardware.devices import DEVICE_KINDS, Device
from parsim.model.component import FULL_BYTES
from parsim.model.formats import Numerics
from parsim.records import check_types
from parsim.units import format_bytes, format_seconds
from parsim.work import HostCopy, HostUpdate, LoadBatch

MOST = 1e9
"""Of any number."""
WAIT = "waiting for workers"
"""The term that lifts loading to what workers read meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLoading:
    """Attributes:
    first_s: seconds of a read beside its samples, with caches as computation leaves them. again_s: of one right behind another.
    sample_s: per sample of a rank. passing_s: per sample of the global batch.
    handover_s: of a part that a worker has ready. workers: of each rank. cores: of this machine.
    core_share: of reading, what a core computes; the rest waits for a disk or a network.
    sigma: relative standard deviation of the mean. repeat_sigma: relative spread of one step's read.
    global_batch: samples of a step. batch: samples that were read at once. batches, samples: read, of all readers.
    readers: processes that read at once. taken_s: that they read. prepared_s: to make the dataset. warm_up_s: of its first
        sample.
    """

    first_s: float
    again_s: float
    sample_s: float
    passing_s: float
    handover_s: float
    workers: int
    cores: int
    core_share: float
    sigma: float
    repeat_sigma: float
    global_batch: int
    batch: int
    batches: int
    samples: int
    readers: int
    taken_s: float
    prepared_s: float
    warm_up_s: float

    def __post_init__(self) -> None:
        check_types(self, "loading")
        negative = [name for name, value in asdict(self).items() if not 0 <= value <= MOST]
        counted = ("cores", "global_batch", "batch", "batches", "readers")
        missing = [name for name in counted if getattr(self, name) < 1]
        if negative or missing or self.core_share > 1:
            name = (negative or missing or ["core_share"])[0]
            raise CostError(
                f"loading.{name} = {getattr(self, name)}: seconds are 0 to {MOST:g}, counts >= 1, a share is at most 1"
            )

    def read_s(self, work: LoadBatch) -> float:
        """Seconds that a process takes to read a rank's part of a batch."""
        return self.own_s(work) + self.global_batch * self.passing_s

    def own_s(self, work: LoadBatch) -> float:
        """Seconds of `read_s` without the samples of other ranks."""
        return self.first_s + (work.parts - 1) * self.again_s + work.samples * self.sample_s

    def every_s(self, work: LoadBatch) -> float:
        """Seconds between two batches that are read ahead, by the workers or by one thread."""
        return self.own_s(work) / max(1, self.workers) + self.global_batch * self.passing_s

    def crowding(self, ranks: int) -> float:
        """The share of what workers compute that takes the time of `ranks` ranks with a core each."""
        spare = max(0, self.cores - ranks)
        return max(0.0, 1.0 - spare / max(1, ranks))

    def floor_s(self, work: LoadBatch, *, on_cores: bool) -> float:
        """No mean step is shorter: what is read ahead while a rank computes. 0 where it reads in its turn."""
        return self.every_s(work) if self.workers or not on_cores else 0.0

    def text(self) -> str:
        """`loading measured: 1.9 ms a batch of 16 (24 batches by 2 processes in 0.1 s; first sample 3 ms)`."""
        one = LoadBatch(samples=1, size_bytes=0)
        first = f"; first sample {format_seconds(self.warm_up_s)}" if self.warm_up_s > 5 * self.read_s(one) else ""
        made = f"; made in {format_seconds(self.prepared_s)}" if self.prepared_s > 1 else ""
        by = "" if self.readers == 1 else f" by {self.readers} processes"
        few = "" if self.batches >= FEW * self.readers else ", few of them: a wide interval"
        ahead = f", read ahead by {_count(self.workers, 'worker')} per rank" if self.workers else ""
        seconds = format_seconds(self.read_s(LoadBatch(samples=self.batch, size_bytes=0)))
        return (
            f"loading measured: {seconds} a batch of {self.batch}{ahead} ({self.batches} batches{by} in "
            f"{format_seconds(self.taken_s)}{few}{first}{made})"
        )

    def to_dict(self) -> dict[str, Any]:
        return {"measured": True, **asdict(self), "text": self.text()}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> MeasuredLoading:
        """What `to_dict` gave. Raises CostError for anything else."""
        try:
            return cls(**{key: value for key, value in document.items() if key not in ("measured", "text")})
        except (TypeError, ValueError) as error:
            raise CostError(f"this is not a measurement of loading: {error}") from error


FEW = 6
"""Batches per reader below which an answer says that they are few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmeasuredLoading:
    """Loading of a dataset of the user's own that is priced by its bytes. reason: why it was not measured. tried: it was
    read, in vain."""

    reason: str
    tried: bool = False

    def text(self) -> str:
        return f"loading not measured: {self.reason}; priced by its bytes, and reading samples may take much longer"

    def to_dict(self) -> dict[str, Any]:
        return {"measured": False, **asdict(self), "text": self.text()}


OwnLoading = MeasuredLoading | UnmeasuredLoading


def own_loading_from(document: Mapping[str, Any]) -> OwnLoading:
    """What either `to_dict` gave. Raises CostError for anything else."""
    if document.get("measured") is False and isinstance(document.get("reason"), str):
        return UnmeasuredLoading(reason=document["reason"], tried=document.get("tried") is True)
    return MeasuredLoading.from_dict(document)


def estimate_measured_load(work: LoadBatch, loading: MeasuredLoading, *, ranks: int, on_cores: bool) -> Estimate:
    """Price what a rank's own time goes into while its batch is read.

    Args:
        ranks: of the plan, on this machine. on_cores: the rank computes on a core; else it is a GPU's, and this is the interval
            of a thread that reads ahead.
    """
    terms = _terms(work, loading, ranks, on_cores)
    return Estimate.of(
        terms,
        source="measured",
        parameters=(("load", loading.sigma),),
        repeat_sigma=loading.repeat_sigma,
        detail=f"{_count(loading.batches, 'batch', 'batches')} of the dataset, read before the prediction",
    )


def _terms(work: LoadBatch, loading: MeasuredLoading, ranks: int, on_cores: bool) -> Terms:
    read_s, parts = loading.read_s(work), _count(work.parts, "part")
    if loading.workers and on_cores:
        shared = loading.crowding(ranks)
        return summed(
            (
                ("hand-over", work.parts * loading.handover_s, "measured", f"{parts} from the workers"),
                (
                    "workers on the ranks' cores",
                    shared * loading.core_share * read_s,
                    "measured",
                    f"{shared:.0%} of what they compute: {loading.cores} cores, {ranks} ranks",
                ),
            )
        )
    if not on_cores:
        how = f"{loading.workers} workers" if loading.workers else "a thread"
        return (Term("read ahead", "start", loading.every_s(work), "measured", f"by {how}: no step is shorter"),)
    terms: Terms = summed(
        (
            ("parts", loading.first_s + (work.parts - 1) * loading.again_s, "measured", parts),
            ("samples", work.samples * loading.sample_s, "measured", f"{work.samples} of {format_seconds(loading.sample_s)}"),
        )
    )
    if not loading.passing_s:
        return terms
    passing = Term(
        "samples of all ranks",
        "plus",
        loading.global_batch * loading.passing_s,
        "measured",
        f"{loading.global_batch} of {format_seconds(loading.passing_s)}: every rank reads an iterable dataset whole",
    )
    return (*terms, passing)


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


# What a copy between a device and its host costs, and an update on the host, where a plan offloads state or activations.
#
#     copy    bytes over the slowest link between the device and the host's memory, and the latency of the links
#     update  bytes that the host reads and writes per parameter, over the rank's share of the bandwidth of the host's memory
#
# All ranks of a node copy and update at the same time. So ranks whose paths share a link share its bandwidth, and the ranks of
# a node share its memory. Devices of one type are priced alike, by the slowest of their paths.
#
# Per parameter the update reads the gradient, reads and writes the optimizer's state and the weights that it updates, and
# writes the parameters to send, as wide as they are sent. That an update on the host is bound by its memory is assumed. Leaves
# out: the host's arithmetic, other work of its cores, and copies that slow the update.


HOST_SIGMA = 0.25
"""Assumed relative spread of copies and updates: they are priced by bandwidth, not measured."""


class HostPath(NamedTuple):
    """Between a device and its host: bytes per second in each direction, seconds, and where the numbers come from."""

    bytes_per_s: float
    latency_s: float
    text: str


def host_path(cluster: Cluster, ranks: int, device: Device) -> HostPath:
    """The slowest way to the host of the devices of one type, on the first node that has some, while all ranks of a plan
    copy. Raises CostError if the device computes in the host's memory, or no link to the host is known."""
    if DEVICE_KINDS[device.type.kind].on_cores:
        raise CostError(
            f"offload to the host needs a device with memory of its own, and {device.type.name} computes in the host's; drop "
            "plan.optimizer_offload and plan.activation_offload"
        )
    host = cluster.profile.host_memory
    if host is not None and host.link_bytes_per_s is not None:
        rate = host.link_bytes_per_s
        return HostPath(rate, 0.0, f"host link of {format_bytes(rate)}/s per device as given ({host.source})")
    used = cluster.devices[:ranks]
    node = next(other.node for other in (*used, device) if other.type.name == device.type.name)
    paths = [(other, cluster.host_path(other)[1]) for other in used or (device,) if other.node == node]
    if not paths:
        paths = [(device, cluster.host_path(device)[1])]
    users = Counter(link for _, path in paths for link in set(path))
    alike = [path for other, path in paths if other.type.name == device.type.name]
    if not alike or not all(alike):
        raise CostError(
            f"no link between {device.type.name} and its host is known: profile {cluster.profile.name} lists none. Set "
            "cluster.host_link_bytes_per_s (of one device, in one direction) or host_memory of the profile, or drop the offload"
        )
    rates = [min(link.capacity_bytes_per_s / users[link] for link in path) for path in alike]
    rate, path = min(zip(rates, alike, strict=True), key=lambda pair: pair[0])
    narrowest = min(path, key=lambda link: link.capacity_bytes_per_s / users[link])
    shared = users[narrowest]
    with_others = f", shared by {shared} devices" if shared > 1 else ""
    text = f"{narrowest.kind} at {format_bytes(narrowest.capacity_bytes_per_s)}/s{with_others}"
    return HostPath(rate, sum(link.latency_s for link in path), text)


def estimate_host_copy(work: HostCopy, path: HostPath) -> Estimate:
    """Price one copy. Leaves out what a batch takes of the same link, and that copies slow computation."""
    return Estimate.of(
        (
            Term("bytes", "start", work.size_bytes / path.bytes_per_s, "published", path.text),
            Term("latency", "plus", path.latency_s, "published", "of the links"),
        ),
        source="published",
        parameters=(("host link", HOST_SIGMA),),
        detail="bytes over the bandwidth of the link to the host, not measured",
    )


def update_bytes(numerics: Numerics, optimizer: str = "") -> int:
    """Bytes that the host reads and writes per parameter; `optimizer`: of a group of parameters, "": the usual one."""
    state, width = numerics.optimizer_bytes(optimizer)[0], numerics.format.weight_bytes
    has_copies = width < FULL_BYTES and numerics.master_weights  # the master weights are among the state
    return width + 2 * state + (width if has_copies else 2 * width)


def estimate_host_update(work: HostUpdate, cluster: Cluster, ranks: int, numerics: Numerics) -> Estimate:
    """Price an update that the host makes; the ranks of a node share the bandwidth of its memory.

    Leaves out the host's arithmetic. Raises CostError if the bandwidth of the host's memory is not known.
    """
    host = cluster.profile.host_memory
    if host is None or host.bandwidth_bytes_per_s is None:
        raise CostError(
            "plan.optimizer_offload updates parameters in the host's memory, and no bandwidth of that memory is known for "
            f"{cluster.profile.name}: --set cluster.host_memory_bandwidth_bytes_per_s=400e9 (say) gives it, of a node and all "
            "its sockets together; host_memory of a profile keeps it"
        )
    each = update_bytes(numerics, work.optimizer)
    sharing = max(Counter(device.node for device in cluster.devices[:ranks]).values(), default=1)  # on the fullest node
    rate = host.bandwidth_bytes_per_s / sharing
    what = f"{each} bytes per parameter over {format_bytes(rate)}/s, a node's memory shared by {sharing} ranks"
    return Estimate.of(
        (Term("bytes", "start", each * work.elements / rate, "published", what),),
        source="published",
        parameters=(("host memory", HOST_SIGMA),),
        detail=f"{what}; not measured",
    )
