"""A folding: which ranks of a plan are simulated, and for whom each stands. `parsim.predict.folding` finds it by prices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from parsim.plans.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class Folding:
    """Attributes:
    replica_of: per replica the one that stands for it (the first of its kind).
    shards: the tp ranks that are simulated: all, or the first for all.
    is_exact: False where copies that communicate inside components (cp, ep) do not pay alike: these kinds of replicas are no
        program, and serve `parsim.predict.folding` alone. So do replicas that gossip where leaf switches differ.
    """

    mesh: Mesh
    replica_of: tuple[int, ...]
    shards: tuple[int, ...]
    is_exact: bool = True

    @property
    def is_folded(self) -> bool:
        return len(self.replicas) < self.mesh.copies or len(self.shards) < self.mesh.tp

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """The simulated ones, ascending."""
        return tuple(sorted(set(self.replica_of)))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The simulated ones, ascending."""
        return tuple(
            self.mesh.rank(stage=stage, replica=replica, shard=shard)
            for stage in range(self.mesh.pp)
            for replica in self.replicas
            for shard in self.shards
        )

    @property
    def has_whole_teams(self) -> bool:
        """Whether copies that communicate inside components are simulated as one, or there are none."""
        team = self.mesh.team
        return all(len(set(self.replica_of[first : first + team])) == 1 for first in range(0, self.mesh.copies, team))

    def stands_for(self, rank: int) -> int:
        """The simulated rank that stands for `rank`."""
        mesh = self.mesh
        shard, replica, stage = rank % mesh.tp, rank // mesh.tp % mesh.copies, rank // (mesh.tp * mesh.copies)
        return mesh.rank(stage=stage, replica=self.replica_of[replica], shard=shard if len(self.shards) == mesh.tp else 0)

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """For how many ranks each of `ranks` stands, itself included."""
        copies = {replica: self.replica_of.count(replica) for replica in self.replicas}
        shards = self.mesh.tp // len(self.shards)
        return tuple(copies[rank // self.mesh.tp % self.mesh.copies] * shards for rank in self.ranks)


def unfolded(mesh: Mesh) -> Folding:
    """Every rank stands for itself."""
    return Folding(mesh=mesh, replica_of=tuple(range(mesh.copies)), shards=tuple(range(mesh.tp)))
