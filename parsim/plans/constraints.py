"""What a question asks of its plans: every value that is given must be kept, every None is free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, PlainSerializer, PlainValidator, TypeAdapter

from parsim.errors import PlanError
from parsim.hardware.records import Count, Name, Number
from parsim.plans.layouts import KINDS, Placement, parse_placement
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import PIPELINE_ORDERS
from parsim.plans.plan import AUTO, MOST_MICROBATCHES, ZERO_STAGES, Recompute
from parsim.plans.plan import WORDS as RECOMPUTE_WORDS
from parsim.plans.synchronisation import ALL_REDUCE, Synchronisation
from parsim.registry import RowOf
from parsim.units import nearest_divisors

PartCount = Annotated[Count, Field(le=MOST_MICROBATCHES)]
Layers = Annotated[int, Field(strict=True, ge=0)]
"""Microbatches of a batch, or chunks of a pipeline: no plan may have more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConstraints:
    """The keys of [plan] that a search keeps; None is free.

    Attributes:
        zero_stages, orders: among which the plans' are; no orders: any. stage_layers: layers of each stage, in order.
        cut: a row of `parsim.plans.stages.CUTS`, by which layers are counted out where stage_layers does not; "": by cost.
        layers_alike: all layers are placed alike, and recomputed as a whole or not at all. framework: whose these are.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    pp: Count | None = None
    dp: Count | None = None
    tp: Count | None = None
    cp: Count | None = None
    ep: Count | None = None
    dp_shard: Count | None = None
    microbatches: PartCount | None = None
    bucket_bytes: Count | None = None
    pipeline_order: Annotated[Name, RowOf(PIPELINE_ORDERS)] | None = None
    chunks: PartCount | None = None
    synchronisation: Synchronisation = ALL_REDUCE
    zero_stages: tuple[int, ...] = ZERO_STAGES
    orders: tuple[str, ...] = ()
    stage_layers: tuple[Layers, ...] | None = None
    cut: str = ""
    layers_alike: bool = False
    framework: str = ""

    def allow(self, mesh: Mesh) -> bool:
        axes = all(getattr(self, axis) in (None, getattr(mesh, axis)) for axis in ("pp", "dp", "tp", "cp", "ep"))
        return axes and self.dp_shard in (None, mesh.dp_shard or mesh.dp)

    @property
    def axes(self) -> str:
        """`pp = 2, tp = 4`: the axes that are given."""
        sizes = {name: getattr(self, name) for name in ("pp", "dp", "tp", "cp", "ep", "dp_shard")}
        return ", ".join(f"{name} = {size}" for name, size in sizes.items() if size is not None)


FREE = PlanConstraints()


def check_sharding_groups(
    dp_shard: int | None, zero_stage: int | str, synchronisation: Synchronisation, *, by_hand: bool
) -> None:
    """Raise PlanError unless there are states to divide over the sharding groups that are asked for.

    zero_stage: AUTO is 0 in a plan by hand, which is not searched for.
    """
    if dp_shard is None:
        return
    what = f"dp_shard = {dp_shard} says over how many replicas states are divided, and"
    if synchronisation.is_relaxed:
        raise PlanError(f"{what} with synchronisation {synchronisation} each has its own; drop dp_shard")
    if zero_stage == 0:
        raise PlanError(f"{what} zero_stage = 0 divides none; set zero_stage = 1, 2 or 3, or drop dp_shard")
    if by_hand and zero_stage == AUTO:
        raise PlanError(f"{what} a plan by hand divides none unless it says so; set zero_stage = 1, 2 or 3")


def check_groups_fill(dp_shard: int | None, devices: int) -> None:
    """Raise PlanError unless sharding groups of so many replicas can fill the devices."""
    if dp_shard is not None and devices % dp_shard:
        raise PlanError(
            f"dp_shard ({dp_shard}) must divide mesh.dp, and with it the devices ({devices}); the nearest that do: "
            f"{nearest_divisors(devices, max(2, dp_shard)).removeprefix('1 or ')}"
        )


def _recompute(recompute: Recompute) -> Recompute:
    words = (AUTO, *RECOMPUTE_WORDS)
    if isinstance(recompute, str) and recompute not in words:
        raise PlanError(f"recompute = {recompute!r}: it is {', '.join(words)}, or a list of names")
    return recompute


def _capacity(factor: float) -> float:
    if factor and not 1 <= factor <= 100:
        raise PlanError(f"capacity_factor = {factor}: must be 0, or in [1, 100]")
    return factor


def _kind_or_placement(text: str) -> str:
    return text if text in KINDS else str(parse_placement(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConstraints:
    """All that [plan] of a run file asks of a search, `constraints` of synchronous plans; whoever searches again during a run
    keeps it. zero_stage, recompute, pins, forbids, capacity_factor: as in `parsim.predict.problem.PlanningProblem`."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    strategy: Name = "adaptive"
    constraints: PlanConstraints = FREE
    zero_stage: Annotated[int, Field(strict=True, ge=0, le=max(ZERO_STAGES))] | Literal["auto"] = AUTO
    recompute: Annotated[Name | tuple[Name, ...], AfterValidator(_recompute)] = AUTO
    pins: tuple[tuple[Name, Annotated[Placement, PlainValidator(parse_placement), PlainSerializer(str)]], ...] = ()
    forbids: tuple[tuple[Name, Annotated[Name, AfterValidator(_kind_or_placement)]], ...] = ()
    capacity_factor: Annotated[Number, AfterValidator(_capacity)] = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values. Raises PlanError for a relaxed synchronisation, which no search during a run can keep."""
        self._check()
        document: dict[str, Any] = _document().dump_python(
            self, mode="json", exclude={"constraints": {"synchronisation"}}, warnings=False
        )
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> SearchConstraints:
        """Inverse of `to_dict`. Raises PlanError or ValueError where the document holds something else."""
        constraints = _document().validate_python(dict(document))
        constraints._check()
        return constraints

    def _check(self) -> None:
        rule = self.constraints.synchronisation
        if rule.is_relaxed:
            raise PlanError(f"a search during a run keeps no synchronisation {rule}; leave it out")


@cache
def _document() -> TypeAdapter[SearchConstraints]:
    return TypeAdapter(SearchConstraints)


UNCONSTRAINED = SearchConstraints()
