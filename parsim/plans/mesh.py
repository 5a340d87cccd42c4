"""Mesh axes as torch's DeviceMesh names them: pp (pipeline stages), dp (replicas), tp (tensor shards)."""

from __future__ import annotations

from dataclasses import dataclass

from parsim.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Rank = (stage * dp + replica) * tp + shard: the ranks of a stage are consecutive."""

    pp: int = 1
    dp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        if min(self.pp, self.dp, self.tp) < 1:
            raise PlanError(f"mesh axes must be >= 1, got {self}")

    @property
    def size(self) -> int:
        return self.pp * self.dp * self.tp

    def __str__(self) -> str:
        return f"pp={self.pp} dp={self.dp} tp={self.tp}"

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """The ranks at place `stage % pp` of the pp axis; a pipeline order's row says at which place each stage runs."""
        width, place = self.dp * self.tp, stage % self.pp
        return tuple(range(place * width, (place + 1) * width))

    def rank(self, *, stage: int, replica: int, shard: int = 0) -> int:
        return (stage % self.pp * self.dp + replica) * self.tp + shard


def check_mesh(mesh: Mesh, devices: int) -> None:
    """Check that the axes multiply to the number of devices.

    Args:
        mesh: pp, dp and tp. devices: of the cluster.

    Raises:
        PlanError: they do not.
    """
    if mesh.size != devices:
        raise PlanError(
            f"mesh pp ({mesh.pp}) * dp ({mesh.dp}) * tp ({mesh.tp}) = {mesh.size} must equal the devices ({devices}); "
            f"change the axes or ask for devices = {mesh.size}"
        )
