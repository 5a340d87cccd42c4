"""Costs: the one place that turns a piece of Work into an Estimate, for one model on one cluster."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from parsim.costs.adjustments import AS_IT_IS, HardwareScale, PriceContext, adjusted, price_context
from parsim.costs.communication.closed_forms import overlap_of
from parsim.costs.communication.collectives import estimate_collective, estimate_send_recv
from parsim.costs.compute.compute import ComputeCosts, compute_costs
from parsim.costs.estimate import Estimate, OverlapFactors, Term, Terms
from parsim.costs.loading import (
    HostPath,
    MeasuredLoading,
    estimate_host_copy,
    estimate_host_update,
    estimate_measured_load,
    host_path,
)
from parsim.costs.observed import NO_RUN_CORRECTIONS, RunCorrections
from parsim.costs.published import NOTHING_LEARNT, Learnt
from parsim.errors import CostError, near_matches
from parsim.hardware.cluster import Cluster
from parsim.hardware.devices import DEVICE_KINDS, Device
from parsim.model.component import Component
from parsim.model.formats import DEFAULT_NUMERICS, Numerics
from parsim.model.model import Model
from parsim.work import (
    BY_OPERATOR_PART,
    ClipGradients,
    Collective,
    Compute,
    HostCopy,
    HostUpdate,
    LoadBatch,
    Mix,
    OptimizerStep,
    Phase,
    SendRecv,
    Work,
)

LOAD_SIGMA = 0.25
"""Assumed relative spread of a batch's copy: it is priced by bandwidth, not measured."""


@dataclass(frozen=True)
class Costs:
    """Prices work of `model` on `cluster`. Rank r runs on cluster.devices[r].

    Attributes:
        update_calls: of the optimizer's operations in an update; 2 where some parameters have no weight decay.
        ranks_active: how many ranks compute at once; measurements under that load are preferred (None: the heaviest load).
        ranks: of the plan (None: all of the cluster); where they outnumber the cores, their computation is crowded.
        corrections: what a run has shown the profile to be wrong by, on top of what the profile's own updates say.
        scale: how many times as fast computation and links would be.
        loading: of a dataset of the user's own, as it was timed; None: the profile prices it.
        learnt: of published runs.
    """

    model: Model
    cluster: Cluster
    numerics: Numerics = DEFAULT_NUMERICS
    update_calls: int = 1
    ranks_active: int | None = None
    ranks: int | None = None
    corrections: RunCorrections = NO_RUN_CORRECTIONS
    scale: HardwareScale = AS_IT_IS
    loading: MeasuredLoading | None = None
    learnt: Learnt = NOTHING_LEARNT
    _unlike_ranks: dict[range, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _device_kinds: dict[int, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    _host_paths: dict[str, HostPath] = field(default_factory=dict, init=False, repr=False, compare=False)
    _computed: dict[tuple[object, ...], Estimate] = field(default_factory=dict, init=False, repr=False, compare=False)
    _pieces: dict[tuple[object, ...], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def estimate(
        self, work: Work, rank: int, concurrent: tuple[tuple[int, ...], ...] = (), *, after_wait: bool = False
    ) -> Estimate:
        """Price `work` of `rank`: as the profile knows the work, then the adjustments of `parsim.costs.adjustments`.

        Args:
            rank: of computation and loading; a collective or transfer names its own ranks.
            concurrent: the groups (or the source and destination) of those that run at the same time.
            after_wait: computation whose rank has just waited for communication.

        Raises CostError: no cost is known for it, or the rank or component does not exist.
        """
        context = replace(self._context, after_wait=True) if after_wait else self._context
        return adjusted(self._by_profile(work, rank, concurrent), work, rank, context)

    @property
    def shares_links(self) -> bool:
        """Whether groups that run at once slow one another: only where communication is priced by links."""
        return self.cluster.profile.communication.link_model is not None

    def device_kind(self, rank: int) -> str:
        """Ranks of one kind do the same work in the same time: the device's type, and how much slower it is than that."""
        if rank not in self._device_kinds:
            slowness = (f" x{each.rank_factor(rank)!r}" for each in (self._context.updates, self.corrections) if each)
            self._device_kinds[rank] = self._device(rank).type.name + "".join(slowness)
        return self._device_kinds[rank]

    def unlike_ranks(self, ranks: range) -> tuple[int, ...]:
        """The last of these ranks of each kind of device, the kinds in the order of their first ranks."""
        if ranks not in self._unlike_ranks:
            self._unlike_ranks[ranks] = tuple({self.device_kind(rank): rank for rank in ranks}.values())
        return self._unlike_ranks[ranks]

    @property
    def differ_by_rank(self) -> bool:
        """Whether ranks and links that are alike cost what a run has shown of each."""
        return bool(self.corrections or self._context.updates)

    @property
    def between_steps_s(self) -> float:
        """Seconds of a rank between its steps, which belong to no task."""
        host = self.cluster.profile.host
        return 0.0 if host is None else self._context.speed * host.step_s

    @property
    def post_wait_s(self) -> float:
        return self._context.post_wait_s

    def priced_alike(self, other: Costs) -> bool:
        """Whether costs of the same problem for another number of ranks have the same prices."""
        crowds = self.loading is not None and self.loading.workers > 0  # workers take what the ranks leave of the cores
        if crowds and self.ranks != other.ranks:
            return False
        return self._context == other._context and self._computation.loads_alike(self.ranks_active, other.ranks_active)

    @cached_property
    def _context(self) -> PriceContext:
        return price_context(
            self.cluster,
            ranks=self.ranks,
            ranks_active=self.ranks_active,
            corrections=self.corrections,
            scale=self.scale,
            loading_is_current=self.loading is not None,
            learnt=self.learnt,
        )

    def _by_profile(self, work: Work, rank: int, concurrent: tuple[tuple[int, ...], ...]) -> Estimate:
        """Price work as the profile knows it, before any adjustment."""
        match work:
            case Compute():
                return self._compute(work, self._device(rank))
            case OptimizerStep():
                return self._computation.optimizer(work, self._device(rank), calls=self.update_calls)
            case ClipGradients() | Mix():
                return self._computation.arithmetic(work, self._device(rank))
            case Collective():
                return estimate_collective(work, self.cluster, concurrent)
            case SendRecv():
                return estimate_send_recv(work, self.cluster, concurrent)
            case LoadBatch():
                return self._load(work, self._device(rank))
            case HostCopy() | HostUpdate():
                return self._on_host(work, rank)

    def _on_host(self, work: HostCopy | HostUpdate, rank: int) -> Estimate:
        """Price work that no adjustment concerns, but that links may be as fast as one asks."""
        path = self.host_path_of(rank)  # refuses a device that has no memory of its own
        if isinstance(work, HostCopy):
            copy, factor = estimate_host_copy(work, path), self.scale.communication
            return copy if factor == 1.0 else copy.then(Term("scale", "over", factor, "assumed", "links as they would be"))
        return estimate_host_update(work, self.cluster, self.ranks or self.cluster.size, self.numerics)

    def host_path_of(self, rank: int) -> HostPath:
        """Between a rank's device and its host. Raises CostError as `host_path`."""
        device = self._device(rank)
        if device.type.name not in self._host_paths:
            self._host_paths[device.type.name] = host_path(self.cluster, self.ranks or self.cluster.size, device)
        return self._host_paths[device.type.name]

    def _load(self, work: LoadBatch, device: Device) -> Estimate:
        """On a GPU workers read beside the copy. A thread does not: between two steps it reads nothing, so within each of them
        it reads the next batch, which is copied behind that."""
        on_cores = DEVICE_KINDS[device.type.kind].on_cores
        copy = estimate_load(work, device, self.cluster)
        if self.loading is None:
            return copy
        read = estimate_measured_load(work, self.loading, ranks=self.ranks or self.cluster.size, on_cores=on_cores)
        if on_cores:
            return read
        if self.loading.workers or not read.median_s:
            return read if read.median_s > copy.median_s else copy
        return read.then(Term("copy", "plus", copy.median_s, copy.terms[0].origin, copy.detail))

    def reading_floor_s(self, works: Iterable[tuple[Work, int]]) -> float:
        """No mean step is shorter: as long as workers read a rank's batch; 0 where ranks read in their turn."""
        if self.loading is None:
            return 0.0
        kinds = ((work, DEVICE_KINDS[self._device(rank).type.kind]) for work, rank in works if isinstance(work, LoadBatch))
        return max((self.loading.floor_s(work, on_cores=kind.on_cores) for work, kind in kinds), default=0.0)

    @property
    def shared_cores(self) -> tuple[int, ...]:
        """The core of every rank, where some share one; else none."""
        cores = self.cluster.core_of_rank(self.cluster.size)
        return cores if len(set(cores)) < len(cores) else ()

    def overlap(self, works: Sequence[Work], seconds: Iterable[float]) -> OverlapFactors:
        """How much computation and communication slow each other while both run (not at all if it was not measured).

        What communicates longest counts most. Also which ranks share a core, and whether loading and communication take turns
        at it.
        """
        measured = self.cluster.profile.overlap
        factors = OverlapFactors() if measured is None else overlap_of(measured, works, seconds)
        on_cores = any(DEVICE_KINDS[device.type.kind].on_cores for device in self.cluster.devices)
        return replace(factors, core_of_rank=self.shared_cores, communications_share=on_cores, loads_ahead=not on_cores)

    def _compute(self, work: Compute, device: Device) -> Estimate:
        """Components that do the same work share their estimates. Recomputing is priced as the forward that it repeats."""
        if work.phase is Phase.RECOMPUTE:
            work = replace(work, phase=Phase.FORWARD)
        component = self._component(work.component)
        key = (self.same_computation(work), device.type.name)
        if key not in self._computed:
            if work.part:
                every_part = self._compute(replace(work, part="", parts=1), device)
                self._computed[key] = self._computation.part(work, component, device, every_part)
            else:
                wants_gradient = self.model.has_input_gradient(component)
                self._computed[key] = self._computation.estimate(work, component, device, input_gradient=wants_gradient)
        return self._computed[key]

    def in_pieces(self, work: Compute, rank: int, pieces: int) -> float:
        """How many times as long a shard takes on a rank if its products run in pieces beside communication."""
        device = self._device(rank)
        work = replace(work, phase=Phase.FORWARD) if work.phase is Phase.RECOMPUTE else work
        key = (self.same_computation(work), device.type.name, pieces)
        if key not in self._pieces:
            self._pieces[key] = self._computation.in_pieces(work, self._component(work.component), device, pieces)
        return self._pieces[key]

    def same_computation(self, work: Compute) -> tuple[object, ...]:
        """Equal for computation that takes as long on the same device: of components that do the same work in the same
        shards. Raises CostError for a component that the model has not."""
        component = self._component(work.component)
        selective = component.selective if work.part == BY_OPERATOR_PART else None
        operators = () if selective is None else selective.operators
        alike = self.model.work_kind[work.component]
        return alike, work.phase, work.samples, work.rule, work.ways, work.part, work.parts, operators

    @cached_property
    def _computation(self) -> ComputeCosts:
        return compute_costs(self.cluster, self.numerics, self.ranks_active)

    def _component(self, name: str) -> Component:
        index = self.model.component_index
        if name not in index:
            raise CostError(
                f"no cost is known for component {name!r}: {self.model.name} has no such component{near_matches(name, index)}"
            )
        return self.model.components[index[name]]

    def _device(self, rank: int) -> Device:
        if not 0 <= rank < self.cluster.size:
            raise CostError(f"rank {rank} is outside the cluster's ranks 0 to {self.cluster.size - 1}; use more devices")
        return self.cluster.devices[rank]


def estimate_load(work: LoadBatch, device: Device, cluster: Cluster) -> Estimate:
    """Price the copy of a batch to the device, part by part: as measured, or host seconds per part plus bytes over
    bandwidth.

    Without measurements, the bandwidth is that of the slowest link from the device's socket if the topology names one (PCIe),
    otherwise the device's memory bandwidth. Leaves out decoding and augmentation (data is assumed ready in host memory), and
    other devices that load through the same switch at the same time.
    """
    host = cluster.profile.host
    if host is not None and host.load_s is not None:
        part_s = host.load_s if host.load_part_s is None else host.load_part_s
        rate = host.load_seconds_per_byte or 0.0
        terms: Terms = (
            Term("first part", "start", host.load_s, "measured"),
            Term("further parts", "plus", (work.parts - 1) * part_s, "measured", f"{work.parts - 1} of {part_s:.4g} s"),
            Term("bytes", "plus", rate * work.size_bytes, "measured", f"{work.size_bytes:.4g} B at {rate:.4g} s/B"),
        )
        return Estimate.of(
            terms,
            source="measured",
            parameters=(("load", LOAD_SIGMA),),
            detail="a line through the measured batches",
        )
    socket, path = cluster.host_path(device)
    if path:
        bandwidth = min(link.lanes * link.bandwidth_bytes_per_s for link in path)
        latency, what = sum(link.latency_s for link in path), f"copy from {socket}"
    else:
        bandwidth, latency, what = device.type.memory_bandwidth_bytes_per_s, 0.0, "copy in host memory"
    start_s = (host.task_s if host is not None else 0.0) + latency
    terms = (
        Term("parts", "start", work.parts * start_s, "published", f"{work.parts} of {start_s:.4g} s"),
        Term("bytes", "plus", work.size_bytes / bandwidth, "published", f"{work.size_bytes:.4g} B over {bandwidth:.4g} B/s"),
    )
    return Estimate.of(
        terms,
        source="published",
        parameters=(("load", LOAD_SIGMA),),
        detail=f"{what}: bytes over bandwidth, not measured",
    )


# --- prices of a whole graph ------------------------------------------------------------------------------------------

Priced = tuple[Work, int] | tuple[Work, int, bool]
Concurrent = Callable[[Work], tuple[tuple[int, ...], ...]]
"""The groups (or transfers) that communicate at the same time as a collective (or transfer)."""


def price(
    work_of_ranks: Iterable[Priced],
    costs: Costs,
    known: dict[Hashable, Estimate] | None = None,
    concurrent: Concurrent | None = None,
) -> list[Estimate]:
    """Estimates in the order given, memoised per distinct work and device type. Communication is kept per work, which names
    its ranks, and loading per device, whose path to the host it takes. Computation: components that do the same are one.

    Args:
        work_of_ranks: (work, rank) per task; for communication any rank of it will do. A third entry says whether it is
            computation that resumes after its rank has waited for communication (`parsim.program.columns.Unit`).
        known: estimates of earlier calls with the same `costs`, read and added to; None starts anew.
        concurrent: None: every collective and transfer runs alone. Raises CostError as `Costs.estimate`.
    """
    known = {} if known is None else known
    estimates: list[Estimate] = []
    waits, asks = bool(costs.post_wait_s), concurrent is not None and costs.shares_links
    for work, rank, *resumes in work_of_ranks:
        others: tuple[tuple[int, ...], ...] = ()
        if isinstance(work, Collective | SendRecv):
            key: Hashable = work
            if asks and concurrent is not None:
                others = concurrent(work)
                key = key, others
        else:
            key = _key(work, rank, costs)
        after_wait = waits and any(resumes)
        if after_wait:
            key = key, "after a wait"
        if key not in known:
            known[key] = costs.estimate(work, rank, others, after_wait=after_wait)
        estimates.append(known[key])
    return estimates


def _key(work: Work, rank: int, costs: Costs) -> Hashable:
    """What makes the price of work that no link carries."""
    if not 0 <= rank < costs.cluster.size:
        return work, rank
    if isinstance(work, Compute) and not costs.differ_by_rank:
        return costs.same_computation(work), costs.device_kind(rank)
    device = costs.cluster.devices[rank]
    return (work, device.index) if isinstance(work, LoadBatch) else (work, costs.device_kind(rank))
