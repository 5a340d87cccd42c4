"""A part of a family of plans, with a lower bound of the steps of its plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan
from parsim.schedule.placement.objective import Solution

LOOKED_AT, CUT, BOUNDED, REMEMBERED, TRIED = 1, 2, 6, 4, 16
"""What parts cost to open, in visits of all components: a root; the bound of a cut; those of its ZeRO stages; the memory of a
plan; and of several plans."""


@dataclass(frozen=True)
class Node:
    """A part of a family.

    Attributes:
        bound_s: no plan of it is simulated to take less. size: plans in it.
        opened: the parts it consists of; None for a single plan. Raises PlanError or ScheduleError if it has none.
        plan: the single plan. instead: what may be judged in its place if it does not fit.
        missing_bytes: by how much none of its plans can fit; 0 where some might. None: not known.
            Infinite: other parts are closer.
        over_bytes: by how much the single plan is known not to fit; 0 where it might.
        late: to be opened once the best plan of all other parts is known, and only if it may be faster than that one.
        promise_s: what its best plan is likely to take; it decides nothing but the order of the parts of large problems.
        fits: whether the single plan is known to fit.
        covered: whether late parts beside it hold all its plans that may win: it is left out where these are opened.
        instead_of_one: whether it is judged in place of a single plan that does not fit.
        visits: what opening it costs, in visits of all components (`parsim.schedule.parts.usual.Allowance`).
    """

    bound_s: float
    size: int
    opened: Callable[[], list[Node]] | None = None
    plan: Plan | None = None
    instead: Callable[[], Iterator[Node]] | None = None
    missing_bytes: Callable[[], float] | None = None
    over_bytes: float = 0.0
    late: bool = False
    promise_s: float = float("inf")
    fits: bool = False
    covered: bool = False
    instead_of_one: bool = False
    visits: int = 1

    @property
    def is_one(self) -> bool:
        """Whether it is a single plan, or is judged in place of one."""
        return self.plan is not None or self.instead_of_one

    def promising(self, promise_s: float) -> Node:
        """The same with an estimate."""
        return replace(self, promise_s=promise_s)


@dataclass(frozen=True, kw_only=True)
class PosedPlacement:
    """A solution of the placement problem, and where it was posed."""

    mesh: Mesh
    microbatches: int
    solution: Solution

    def to_dict(self) -> dict[str, object]:
        mesh = {"pp": self.mesh.pp, "dp": self.mesh.dp, "tp": self.mesh.tp}
        return {**self.solution.to_dict(), "microbatches": self.microbatches, "mesh": mesh}
