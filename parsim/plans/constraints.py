"""What a question asks of its plans: every value that is given must be kept, every None is free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from parsim.errors import PlanError
from parsim.plans.layouts import KINDS, Placement, parse_placement
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import PIPELINE_ORDERS
from parsim.plans.plan import AUTO, MOST_MICROBATCHES, ZERO_STAGES, ZERO_STAGES_TEXT, Recompute
from parsim.plans.plan import WORDS as RECOMPUTE_WORDS
from parsim.plans.synchronisation import ALL_REDUCE, Synchronisation
from parsim.records import check_types
from parsim.units import nearest_divisors


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConstraints:
    """Attributes:
    pp, dp, tp: axes of the mesh. cp, ep: likewise, and 1 where they are left out. dp_shard: replicas in a sharding group.
    microbatches: per replica. bucket_bytes: of gradient buckets.
    pipeline_order: a key of `PIPELINE_ORDERS`. chunks: stages per rank.
    synchronisation: of every plan; it is never free.
    """

    pp: int | None = None
    dp: int | None = None
    tp: int | None = None
    cp: int | None = None
    ep: int | None = None
    dp_shard: int | None = None
    microbatches: int | None = None
    bucket_bytes: int | None = None
    pipeline_order: str | None = None
    chunks: int | None = None
    synchronisation: Synchronisation = ALL_REDUCE

    def allow(self, mesh: Mesh) -> bool:
        """Whether a mesh has the axes that are given."""
        asked = ((self.pp, mesh.pp), (self.dp, mesh.dp), (self.tp, mesh.tp))
        beside = (self.cp or 1) == mesh.cp and (self.ep or 1) == mesh.ep
        groups = self.dp_shard in (None, mesh.dp_shard or mesh.dp)
        return beside and groups and all(given in (None, own) for given, own in asked)

    @property
    def axes(self) -> str:
        """`pp = 2, tp = 4`: the axes that are given."""
        sizes = {name: getattr(self, name) for name in ("pp", "dp", "tp", "cp", "ep", "dp_shard")}
        return ", ".join(f"{name} = {size}" for name, size in sizes.items() if size is not None)


FREE = PlanConstraints()


def check_sharding_groups(
    dp_shard: int | None, zero_stage: int | str, synchronisation: Synchronisation, *, by_hand: bool
) -> None:
    """Check that there are states to divide over sharding groups.

    Args:
        dp_shard: that is asked for. zero_stage: likewise; AUTO is 0 in a plan by hand. synchronisation: of replicas.
        by_hand: the plan is not searched for.

    Raises:
        PlanError: there are none.
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
    """Check that sharding groups of so many replicas can fill the devices. Raises PlanError.

    Args:
        dp_shard: that is asked for.
    """
    if dp_shard is not None and devices % dp_shard:
        raise PlanError(
            f"dp_shard ({dp_shard}) must divide mesh.dp, and with it the devices ({devices}); the nearest that do: "
            f"{nearest_divisors(devices, max(2, dp_shard)).removeprefix('1 or ')}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConstraints:
    """All that [plan] of a run file asks of a search. Whoever searches again during a run must keep it, too.

    Attributes:
        strategy: the family that is searched. constraints: of synchronous plans.
        zero_stage, recompute, pins, forbids, capacity_factor: as in `parsim.predict.problem.PlanningProblem`.
    """

    strategy: str = "adaptive"
    constraints: PlanConstraints = FREE
    zero_stage: int | Literal["auto"] = AUTO
    recompute: Recompute = AUTO
    pins: tuple[tuple[str, Placement], ...] = ()
    forbids: tuple[tuple[str, str], ...] = ()
    capacity_factor: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values.

        Raises:
            PlanError: the synchronisation is relaxed, which no search during a run can keep.
        """
        if self.constraints.synchronisation.is_relaxed:
            raise PlanError(f"a search during a run keeps no synchronisation {self.constraints.synchronisation}; leave it out")
        given = {key: value for key, value in asdict(self.constraints).items() if key != "synchronisation"}
        return {
            "strategy": self.strategy,
            "constraints": given,
            "zero_stage": self.zero_stage,
            "recompute": self.recompute if isinstance(self.recompute, str) else list(self.recompute),
            "pins": [[name, str(placement)] for name, placement in self.pins],
            "forbids": [list(entry) for entry in self.forbids],
            "capacity_factor": self.capacity_factor,
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> SearchConstraints:
        """Inverse of `to_dict`. Raises PlanError, TypeError, ValueError: the document holds something else."""
        recompute = document.get("recompute", AUTO)
        found = cls(
            **{
                **document,
                "constraints": PlanConstraints(**document.get("constraints", {})),
                "recompute": recompute if isinstance(recompute, str) else tuple(recompute),
                "pins": tuple((name, parse_placement(text)) for name, text in document.get("pins", ())),
                "forbids": tuple((name, text) for name, text in document.get("forbids", ())),
            }
        )
        check_types(found, "search constraints")
        found._check()
        return found

    def _check(self) -> None:
        """The bounds of the run file."""
        asked = self.constraints
        for name in ("pp", "dp", "tp", "cp", "ep", "dp_shard", "microbatches", "bucket_bytes", "chunks"):
            value, most = getattr(asked, name), MOST_MICROBATCHES if name in ("microbatches", "chunks") else None
            if value is not None and (value < 1 or (most is not None and value > most)):
                raise PlanError(f"{name} = {value}: must be >= 1" + ("" if most is None else f" and <= {most}"))
        if asked.pipeline_order is not None:
            PIPELINE_ORDERS[asked.pipeline_order]  # raises for an unknown one
        if self.zero_stage not in (AUTO, *ZERO_STAGES):
            raise PlanError(f'zero_stage = {self.zero_stage}: {ZERO_STAGES_TEXT}; or "auto"')
        if isinstance(self.recompute, str) and self.recompute not in (AUTO, *RECOMPUTE_WORDS):
            raise PlanError(f"recompute = {self.recompute!r}: it is {', '.join((AUTO, *RECOMPUTE_WORDS))}, or a list of names")
        if self.capacity_factor and not 1 <= self.capacity_factor <= 100:
            raise PlanError(f"capacity_factor = {self.capacity_factor}: must be 0, or in [1, 100]")
        for _, text in self.forbids:
            if text not in KINDS:
                parse_placement(text)


UNCONSTRAINED = SearchConstraints()
