"""Mesh axes as torch's DeviceMesh names them: pp (pipeline stages), dp (replicas), cp (pieces of the sequence), tp (shards).

A group of cp neighbours works on the same samples, each on its piece of the sequence. All of them hold the same parameters,
so they count among the `copies` of a stage, as replicas do. Experts are divided over ep neighbouring copies, which
therefore is not an axis of its own: ep divides dp * cp. Neither is `dp_shard` one (HSDP): ZeRO divides states over the copies
of that many neighbouring replicas, a sharding group, and dp / dp_shard groups hold the same.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from parsim.errors import PlanError
from parsim.units import divisors, nearest_divisors


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Rank = ((stage * dp + replica) * cp + context) * tp + shard: the ranks of a stage are consecutive.

    Attributes: dp_shard: replicas in a sharding group; 0: all. A mesh with `dp_shard` = dp is the one without.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp_shard: int = 0

    def __post_init__(self) -> None:
        if min(self.pp, self.dp, self.tp, self.cp, self.ep) < 1:
            raise PlanError(f"mesh axes must be >= 1, got {self}")
        if self.copies % self.ep:
            nearest = max(ep for ep in divisors(self.copies) if ep <= self.ep)
            raise PlanError(
                f"ep ({self.ep}) must divide dp ({self.dp}) * cp ({self.cp}) = {self.copies}: experts are divided over these "
                f"ranks; the nearest below that does: {nearest}"
            )
        if self.dp_shard:
            self._check_sharding_groups()

    def _check_sharding_groups(self) -> None:
        if self.dp_shard < 0 or self.dp % self.dp_shard:
            raise PlanError(
                f"dp_shard ({self.dp_shard}) must divide dp ({self.dp}): states are divided over groups of dp_shard replicas; "
                f"the nearest that do: {nearest_divisors(self.dp, max(2, self.dp_shard)).removeprefix('1 or ')}"
            )
        if self.dp_shard == self.dp:
            object.__setattr__(self, "dp_shard", 0)
        elif self.group_copies == 1:
            raise PlanError(
                f"dp_shard (1) is a group of one replica, over which nothing is divided, and dp is {self.dp}; use a larger "
                "one, or drop dp_shard and set zero_stage = 0"
            )
        elif self.group_copies % self.ep:
            raise PlanError(
                f"ep ({self.ep}) must divide dp_shard ({self.dp_shard}) * cp ({self.cp}) = {self.group_copies}: every sharding "
                f"group has all experts; the nearest that do: {nearest_divisors(self.group_copies, self.ep)}"
            )

    @property
    def size(self) -> int:
        return self.pp * self.copies * self.tp

    @property
    def copies(self) -> int:
        """How often each parameter of a stage exists (divided experts apart): replicas times pieces of the sequence."""
        return self.dp * self.cp

    @property
    def group_copies(self) -> int:
        """Neighbouring copies of a stage over which ZeRO divides states: those of a sharding group, or all."""
        return (self.dp_shard or self.dp) * self.cp

    @property
    def groups(self) -> int:
        """Sharding groups of a stage, which hold the same."""
        return self.copies // self.group_copies

    @property
    def least_zero_stage(self) -> int:
        """The least ZeRO stage of plans on this mesh: sharding groups are for states that are divided."""
        return 1 if self.dp_shard else 0

    def undivided(self) -> Mesh:
        return replace(self, dp_shard=0) if self.dp_shard else self

    @property
    def team(self) -> int:
        """Neighbouring copies of a stage that communicate inside components: whole groups of cp and of ep."""
        return math.lcm(self.cp, self.ep)

    def __str__(self) -> str:
        more = "".join(f" {name}={size}" for name, size in (("cp", self.cp), ("ep", self.ep)) if size > 1)
        more += f" dp_shard={self.dp_shard}" if self.dp_shard else ""
        return f"pp={self.pp} dp={self.dp} tp={self.tp}{more}"

    def to_dict(self) -> dict[str, int]:
        """Axes by name; cp and ep where they are not 1, dp_shard where it is not all of dp."""
        axes = {name: size for name, size in asdict(self).items() if size > 1 or name in ("pp", "dp", "tp")}
        return axes | ({"dp_shard": self.dp_shard} if self.dp_shard else {})

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """The ranks at place `stage % pp` of the pp axis; a pipeline order's row says at which place each stage runs."""
        return tuple(self.stage_range(stage))

    def stage_range(self, stage: int) -> range:
        """The ranks of a stage, which are in a row."""
        width, place = self.copies * self.tp, stage % self.pp
        return range(place * width, (place + 1) * width)

    def rank(self, *, stage: int, replica: int, shard: int = 0) -> int:
        """`replica`: the number of the copy, replica * cp + context."""
        return (stage % self.pp * self.dp * self.cp + replica) * self.tp + shard


def check_mesh(mesh: Mesh, devices: int) -> None:
    """Raise PlanError unless the axes multiply to the number of devices."""
    if mesh.size != devices:
        context = f" * cp ({mesh.cp})" if mesh.cp > 1 else ""
        raise PlanError(
            f"mesh pp ({mesh.pp}) * dp ({mesh.dp}) * tp ({mesh.tp}){context} = {mesh.size} must equal the devices ({devices}); "
            f"change the axes or ask for devices = {mesh.size}"
        )
