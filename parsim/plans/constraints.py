"""What a question asks of its plans: every value that is given must be kept, every None is free."""

from __future__ import annotations

from dataclasses import dataclass

from parsim.plans.mesh import Mesh
from parsim.plans.synchronisation import ALL_REDUCE, Synchronisation


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConstraints:
    """Attributes:
    pp, dp, tp: axes of the mesh. cp, ep: likewise, and 1 where they are left out.
    microbatches: per replica. bucket_bytes: of gradient buckets.
    pipeline_order: a key of `PIPELINE_ORDERS`. chunks: stages per rank.
    synchronisation: of every plan; it is never free.
    """

    pp: int | None = None
    dp: int | None = None
    tp: int | None = None
    cp: int | None = None
    ep: int | None = None
    microbatches: int | None = None
    bucket_bytes: int | None = None
    pipeline_order: str | None = None
    chunks: int | None = None
    synchronisation: Synchronisation = ALL_REDUCE

    def allow(self, mesh: Mesh) -> bool:
        """Whether a mesh has the axes that are given."""
        asked = ((self.pp, mesh.pp), (self.dp, mesh.dp), (self.tp, mesh.tp))
        beside = (self.cp or 1) == mesh.cp and (self.ep or 1) == mesh.ep
        return beside and all(given in (None, own) for given, own in asked)

    @property
    def axes(self) -> str:
        """`pp = 2, tp = 4`: the axes that are given."""
        sizes = {name: getattr(self, name) for name in ("pp", "dp", "tp", "cp", "ep")}
        return ", ".join(f"{name} = {size}" for name, size in sizes.items() if size is not None)


FREE = PlanConstraints()
