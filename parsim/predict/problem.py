"""The question a scheduler answers: this model, on this cluster, with this batch, precision and optimizer."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

from parsim.costs.adjustments import AS_IT_IS, HardwareScale
from parsim.costs.costs import Costs, Priced, price
from parsim.costs.estimate import Estimate
from parsim.costs.history import NO_HISTORY, History
from parsim.costs.loading import MeasuredLoading, OwnLoading
from parsim.costs.observed import NO_RUN_CORRECTIONS, RunCorrections
from parsim.costs.published import NOTHING_LEARNT, Learnt
from parsim.hardware.cluster import Cluster
from parsim.model.divided import BALANCED, ExpertRouting, divided_model
from parsim.model.formats import DEFAULT_NUMERICS, Numerics, check_recorded, model_in
from parsim.model.model import Model
from parsim.plans.constraints import FREE, PlanConstraints
from parsim.plans.layouts import Placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import AUTO, ActivationOffload, Plan, Recompute
from parsim.plans.stages import concurrent_with
from parsim.predict.memory import FIT_PROBABILITY, RankMemory, Scored, of_every_rank, unlike_memory, with_offloaded
from parsim.program.columns import Units
from parsim.program.placed import PlanIndex
from parsim.records import Remembering


@dataclass
class _Divided:
    """Models of one rank, made of a whole one by what divides it."""

    models: dict[tuple[object, ...], Model] = field(default_factory=dict)


class InnerAxes(NamedTuple):
    """What a model is divided by inside components (`Mesh.cp`, `Mesh.ep`), and among how many of ep a search chooses."""

    cp: int
    ep: int
    choices: int = 1


@dataclass
class PlanCache:
    """What was worked out of plans and does not depend on prices.

    Attributes: memories: of every rank of a plan; unlike: of the first of all ranks that hold as much as one another.
    state_bytes: of an element, by optimizer.
    """

    layouts: dict[Plan, PlanIndex] = field(default_factory=dict)
    memories: dict[Plan, tuple[RankMemory, ...]] = field(default_factory=dict)
    unlike: dict[Plan, tuple[RankMemory, ...]] = field(default_factory=dict)
    state_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PlanningProblem(Remembering):
    """Attributes:
    model: its values are as wide as the precision sends them. global_batch: samples per step.
    update_calls: of the optimizer's operations in an update; 2 where some parameters have no weight decay.
    scored: what is validated during the training. fit_probability: with which the memory of a plan must suffice.
    safe_probability: with which that of a plan must that a search prefers; where no plan is so safe, `fit_probability` counts.
    corrections: learnt from a run. scale: of hardware that would be faster. learnt: of published runs of such models.
    zero_stage: that plans are to have; "auto": any. recompute: likewise; "auto": where a plan would not fit, as little as
        makes it fit. segments: whether plans may recompute layers as a whole (`Plan.segments`), which only the simulator can.
        constraints: what else plans must keep.
    loading: of a dataset of the user's own, measured or not; None: of another one, which the profile prices.
    history: of the profile's validations, by which intervals are corrected.
    routing: how tokens reach experts, and what the framework hides of it.
    division: of which the model is already that of a rank (`on`); None: the model is whole.
    inner_axes: whether a search is free to choose cp and ep where the constraints leave them open: only the simulator has them.
    clip_gradients: that plans are to clip by the global norm. switches: (name of a switch, how every plan has it).
    optimizer_offload, activation_offload: what plans are to keep in the host's memory.
    pins: (component, the placement it must have). forbids: (component, a placement or kind of placement it must not have).
    """

    model: Model
    cluster: Cluster
    global_batch: int
    numerics: Numerics = DEFAULT_NUMERICS
    update_calls: int = 1
    scored: Scored = ""
    fit_probability: float = FIT_PROBABILITY
    safe_probability: float = FIT_PROBABILITY
    corrections: RunCorrections = NO_RUN_CORRECTIONS
    scale: HardwareScale = AS_IT_IS
    learnt: Learnt = NOTHING_LEARNT
    loading: OwnLoading | None = None
    history: History = NO_HISTORY
    zero_stage: int | Literal["auto"] = AUTO
    recompute: Recompute = AUTO
    segments: bool = False
    constraints: PlanConstraints = FREE
    pins: tuple[tuple[str, Placement], ...] = ()
    routing: ExpertRouting = BALANCED
    forbids: tuple[tuple[str, str], ...] = ()
    division: InnerAxes | None = None
    inner_axes: bool = False
    clip_gradients: bool = False
    switches: tuple[tuple[str, bool], ...] = ()
    optimizer_offload: bool = False
    activation_offload: ActivationOffload = False
    _cache: PlanCache = field(default_factory=PlanCache, init=False, repr=False, compare=False)
    _known: dict[int, dict[Hashable, Estimate]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _costs: dict[tuple[int, int, int], tuple[int, Costs]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "safe_probability", max(self.safe_probability, self.fit_probability))
        check_recorded(self.model, self.numerics.precision)
        object.__setattr__(self, "model", model_in(self.model, self.numerics.precision))

    @property
    def fixed_zero_stage(self) -> int:
        """The ZeRO stage of a plan that is not searched for: 0 where it is left open."""
        return self.zero_stage if isinstance(self.zero_stage, int) else 0

    @property
    def plan_settings(self) -> dict[str, Any]:
        """Keys of Plan that every plan has alike."""
        return {
            "clip_gradients": self.clip_gradients,
            "optimizer_offload": self.optimizer_offload,
            "activation_offload": self.activation_offload,
            **dict(self.switches),
        }

    @property
    def zero_stages(self) -> tuple[int, ...]:
        return (self.zero_stage,) if isinstance(self.zero_stage, int) else self.constraints.zero_stages

    def zero_stages_on(self, mesh: Mesh) -> tuple[int, ...]:
        """Of `zero_stages` those that a plan on the mesh may have: sharding groups divide something."""
        if isinstance(self.zero_stage, int):
            return self.zero_stages
        return tuple(stage for stage in self.zero_stages if stage >= mesh.least_zero_stage)

    def state_bytes_per_element(self, optimizer: str = "") -> int:
        """What the optimizer of a `Parameter` ("": the problem's) keeps of it."""
        state_bytes = self._cache.state_bytes
        if optimizer not in state_bytes:
            state_bytes[optimizer] = self.numerics.optimizer_bytes(optimizer)[0]
        return state_bytes[optimizer]

    @property
    def offloads(self) -> bool:
        return self.optimizer_offload or bool(self.activation_offload)

    def device_bytes_per_element(self, optimizer: str = "") -> int:
        """The part of `state_bytes_per_element` that lies on a device."""
        return 0 if self.optimizer_offload else self.state_bytes_per_element(optimizer)

    def allows(self, component: str, placement: Placement) -> bool:
        """Whether pins and forbids leave the component this placement."""
        if self._pinned.get(component, placement) != placement:
            return False
        return not self._forbidden.intersection({(component, placement.kind), (component, str(placement))})

    @cached_property
    def _pinned(self) -> dict[str, Placement]:
        return dict(self.pins)

    @cached_property
    def _forbidden(self) -> frozenset[tuple[str, str]]:
        return frozenset(self.forbids)

    def layout(self, plan: Plan) -> PlanIndex:
        """The plan over this model; made once. Raises PlanError if they do not match."""
        layouts = self._cache.layouts
        if plan not in layouts:
            index = PlanIndex(plan, self.model_on(plan.mesh, plan.context_exchange))
            layouts[plan] = with_offloaded(index, self.numerics.precision)
        return layouts[plan]

    def model_on(self, mesh: Mesh, exchange: str = "ring") -> Model:
        """The model as one rank of a mesh has it: a piece of the sequence (cp), its part of the experts (ep).

        `exchange` (`Plan.context_exchange`) changes what is held of keys and values, and no price. Raises PlanError if the
        model has no sequence or experts that parsim knows, or sizes do not divide.
        """
        return self._divided_by(mesh.cp, mesh.ep, exchange)

    def _divided_by(self, cp: int, ep: int, exchange: str = "ring") -> Model:
        if self.division is not None:
            return self.model
        kind, ring = self.numerics.format, exchange == "ring" or cp == 1
        element_bytes = kind.element_bytes if kind.autocast else kind.weight_bytes
        key = (cp, ep, element_bytes, ring, self.routing)
        models = self.model.remembered(_Divided).models
        if key not in models:
            models[key] = divided_model(self.model, cp=cp, ep=ep, element_bytes=element_bytes, ring=ring, routing=self.routing)
        return models[key]

    def on(self, mesh: Mesh, choices: int = 1) -> PlanningProblem:
        """The problem with the model that a rank of this mesh has: for whoever compares plans of the same cp and ep.

        Layouts and memory of plans are shared with the whole problem.
        """
        if self.division is not None or (mesh.cp == mesh.ep == choices == 1):
            return self
        return self._sharing(model=self.model_on(mesh), division=InnerAxes(mesh.cp, mesh.ep, choices))

    def corrected(self, corrections: RunCorrections) -> PlanningProblem:
        """The problem where the machine runs otherwise. What does not depend on it, layouts and memory, is shared."""
        return self._sharing(corrections=corrections)

    def knowing(self, learnt: Learnt) -> PlanningProblem:
        """The problem of which published runs say something else; likewise."""
        return self._sharing(learnt=learnt)

    def _sharing(self, **changes: Any) -> PlanningProblem:
        problem = replace(self, **changes)
        object.__setattr__(problem, "_cache", self._cache)
        return problem

    def memory(self, plan: Plan) -> tuple[RankMemory, ...]:
        memories = self._cache.memories
        if plan not in memories:
            memories[plan] = of_every_rank(self.layout(plan), self.cluster, self.unlike_memory(plan))
        return memories[plan]

    def unlike_memory(self, plan: Plan) -> tuple[RankMemory, ...]:
        """Peak memory of the first of all ranks that hold as much as one another: what to ask whether a plan fits."""
        unlike = self._cache.unlike
        if plan not in unlike:
            unlike[plan] = unlike_memory(
                self.layout(plan),
                self.cluster,
                self.numerics,
                scored=self.scored,
                fit_probability=self.fit_probability,
            )
        return unlike[plan]

    @property
    def with_memory(self) -> Collection[Plan]:
        """The plans of which the memory was worked out, in that order."""
        return self._cache.unlike.keys()

    def unsafe_bytes(self, plan: Plan) -> list[tuple[int, int]]:
        """(rank, bytes) of all such ranks whose memory does not suffice with `safe_probability`, and by how much."""
        excess = ((memory.rank, memory.excess_at(self.safe_probability)) for memory in self.unlike_memory(plan))
        return [(rank, size) for rank, size in excess if size]

    def costs(self, ranks: int) -> Costs:
        """Prices under the load of `ranks` ranks that compute at once, but of at most one rank per core. The engines
        model how ranks on one core take turns.
        """
        return self._costs_of(ranks)[1]

    def cost_group(self, ranks: int) -> int:
        """A number that is equal for numbers of ranks that have the same prices."""
        return self._costs_of(ranks)[0]

    def _costs_of(self, ranks: int, cp: int = 1, ep: int = 1) -> tuple[int, Costs]:
        key = (ranks, cp, ep)
        if key not in self._costs:
            costs = Costs(
                model=self._divided_by(cp, ep),
                cluster=self.cluster,
                numerics=self.numerics,
                update_calls=self.update_calls,
                ranks_active=len(set(self.cluster.core_of_rank(ranks))),
                ranks=ranks,
                corrections=self.corrections,
                scale=self.scale,
                learnt=self.learnt,
                loading=self.loading if isinstance(self.loading, MeasuredLoading) else None,
            )
            alike = (
                group
                for other, group in self._costs.items()  # the ranks of a node share its links to the host
                if other[1:] == key[1:] and costs.priced_alike(group[1]) and (group[1].ranks == ranks or not self.offloads)
            )
            self._costs[key] = next(alike, (len(self._costs), costs))
        return self._costs[key]

    def price(self, work_of_ranks: Iterable[Priced], mesh: Mesh, beside: Mesh | None = None) -> list[Estimate]:
        """Estimates in order, for a plan on a mesh whose groups slow one another where they share links; what one plan has
        asked is known for the next. Raises CostError.

        `beside`: a smaller mesh whose groups alone are counted, which is quicker; None: the mesh.
        """
        group, costs = self._costs_of(mesh.size, mesh.cp, mesh.ep)
        return price(work_of_ranks, costs, self._known.setdefault(group, {}), partial(concurrent_with, beside or mesh))

    def price_units(self, units: Units, mesh: Mesh) -> list[Estimate]:
        """Estimates of the units of a plan's program, in their order. Of those that are alike one is priced. Raises
        CostError."""
        return units.each(self.price(units.kinds, mesh))
