"""A Plan: intent. Which component on which ranks, in how many microbatches, in which order, synchronised how.

Frozen, JSON, holds no measured number. `check_plan` compares it with a model and a batch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from parsim.errors import PlanError, near_matches
from parsim.model.model import Model
from parsim.plan.mesh import Mesh

SCHEMA_VERSION = 1
STRATEGIES = ("single", "dp", "mp", "hp", "adaptive", "custom")
DEFAULT_BUCKET_BYTES = 25 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Consecutive components on a `dp x tp` grid of ranks (replica-major)."""

    components: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way of training one model on `mesh.size` ranks.

    Attributes:
        strategy: the family it was chosen from.
        global_batch: samples per step over all replicas. microbatches: per replica.
        pipeline_order: a key of `parsim.plan.pipeline.PIPELINE_ORDERS`.
        bucket_bytes: a gradient bucket is closed once it holds this much.
    """

    strategy: str
    mesh: Mesh
    stages: tuple[Stage, ...]
    global_batch: int
    microbatches: int = 1
    pipeline_order: str = "1f1b"
    bucket_bytes: int = DEFAULT_BUCKET_BYTES

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise PlanError(f"unknown strategy {self.strategy!r}{near_matches(self.strategy, STRATEGIES)}")
        if len(self.stages) != self.mesh.pp:
            raise PlanError(f"mesh has pp={self.mesh.pp}, but the plan lists {len(self.stages)} stages")
        for number, stage in enumerate(self.stages):
            if not stage.components:
                raise PlanError(f"stage {number} holds no component; use fewer stages")
            if stage.ranks != self.mesh.stage_ranks(number):
                raise PlanError(f"stage {number} must run on ranks {self.mesh.stage_ranks(number)}, got {stage.ranks}")
        if self.mesh.tp != 1:
            raise PlanError(f"mesh tp={self.mesh.tp}: no component can be tensor-sharded yet; set tp = 1")
        if self.microbatches < 1 or self.bucket_bytes < 1:
            raise PlanError(f"microbatches ({self.microbatches}) and bucket_bytes ({self.bucket_bytes}) must be >= 1")
        parts = self.mesh.dp * self.microbatches
        if self.global_batch < 1 or self.global_batch % parts:
            raise PlanError(
                f"global_batch ({self.global_batch}) must be divisible by dp ({self.mesh.dp}) * microbatches "
                f"({self.microbatches}) = {parts}; the nearest that is: {max(1, round(self.global_batch / parts)) * parts}"
            )

    @property
    def world_size(self) -> int:
        return self.mesh.size

    @property
    def microbatch_samples(self) -> int:
        """Samples of one microbatch on one replica: the local batch every component sees."""
        return self.global_batch // (self.mesh.dp * self.microbatches)

    def stage_of_rank(self, rank: int) -> int:
        return rank // (self.mesh.dp * self.mesh.tp)

    def replica_of_rank(self, rank: int) -> int:
        return rank // self.mesh.tp % self.mesh.dp

    def summary(self) -> str:
        """`hp pp=2 dp=4 tp=1 mb=8x16 1f1b`."""
        order = f" {self.pipeline_order}" if self.mesh.pp > 1 else ""
        return f"{self.strategy} {self.mesh} mb={self.microbatches}x{self.microbatch_samples}{order}"

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def save(self, path: Path) -> None:
        path.write_text(self.to_json())

    @classmethod
    def from_json(cls, text: str, where: str = "plan JSON") -> Plan:
        """Raises PlanError with the place that is wrong."""
        try:
            document = json.loads(text)
            version = document.pop("schema_version", None)
            if version != SCHEMA_VERSION:
                raise PlanError(f"{where}: schema_version must be {SCHEMA_VERSION}, got {version!r}; plan again")
            document["mesh"] = Mesh(**document["mesh"])
            document["stages"] = tuple(
                Stage(components=tuple(stage["components"]), ranks=tuple(stage["ranks"])) for stage in document["stages"]
            )
            return cls(**document)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise PlanError(f"{where} is not a plan: {error}; write it with `parsim plan` or Plan.save") from error

    @classmethod
    def load(cls, path: Path) -> Plan:
        if not path.is_file():
            raise PlanError(f"no plan file {path}; write one with `parsim plan RUN.toml`")
        return cls.from_json(path.read_text(), str(path))


def check_plan(plan: Plan, model: Model) -> None:
    """Raise PlanError unless the stages hold exactly the model's components, in its order."""
    planned = [name for stage in plan.stages for name in stage.components]
    expected = [component.name for component in model.components]
    if planned == expected:
        return
    unknown = [name for name in planned if name not in model.component_index]
    if unknown:
        raise PlanError(
            f"the plan names component {unknown[0]!r}, which {model.name} has not{near_matches(unknown[0], expected)}"
        )
    missing = [name for name in expected if name not in planned]
    if missing:
        raise PlanError(f"the plan leaves out component {missing[0]!r} of {model.name}; every component needs a stage")
    raise PlanError(f"the plan's stages must keep the order of {model.name}'s components: {', '.join(expected)}")
