"""Which models under which plans, each beside the same plan in PyTorch's own parallel modules."""

from __future__ import annotations

from dataclasses import dataclass

from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage

RANKS, BATCH = 2, 32
BUCKET_MIB = 25
"""DDP's default, given explicitly: then DDP has no small first bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison.

    Attributes:
        model: of the zoo. backend: "ddp", "fsdp2" or "pipelining". optimizer: as in RUN.toml.
        second: the first component of the second stage, of a pipeline. order, microbatches: of a pipeline.
    """

    model: str
    backend: str
    optimizer: str = "sgd_momentum"
    second: str = ""
    order: str = "1f1b"
    microbatches: int = 1

    @property
    def name(self) -> str:
        """`vit_small pipelining 1f1b`."""
        return " ".join([self.model, self.backend, *([self.order] if self.second else [])])

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(name=self.model)

    def plan(self, model: Model) -> Plan:
        """What parsim runs. model: traced at granularity block."""
        names = tuple(component.name for component in model.components)
        if self.backend == "pipelining":
            cut = names.index(self.second)
            stages = (Stage(components=names[:cut], ranks=(0,)), Stage(components=names[cut:], ranks=(1,)))
            return Plan(
                strategy="custom",
                mesh=Mesh(pp=RANKS),
                stages=stages,
                global_batch=BATCH,
                microbatches=self.microbatches,
                pipeline_order=self.order,
            )
        bucket_bytes, zero_stage = BUCKET_MIB * 2**20, 0
        if self.backend == "fsdp2":  # a bucket of one byte less is full with one block, which is what FSDP2 gathers at once
            blocks = (sum(parameter.size_bytes for parameter in component.parameters) for component in model.components)
            bucket_bytes, zero_stage = max(blocks) - 1, 3
        return Plan(
            strategy="custom",
            mesh=Mesh(dp=RANKS),
            stages=(Stage(components=names, ranks=(0, 1)),),
            global_batch=BATCH,
            bucket_bytes=bucket_bytes,
            zero_stage=zero_stage,
        )


CASES = (
    Case(model="mlp", backend="ddp"),
    Case(model="resnet_small", backend="ddp"),
    Case(model="vit_small", backend="ddp", optimizer="adam"),
    Case(model="gpt_small", backend="ddp", optimizer="adam"),
    Case(model="vit_small", backend="fsdp2", optimizer="adam"),
    Case(model="gpt_small", backend="fsdp2", optimizer="adam"),
    Case(model="vit_small", backend="pipelining", optimizer="adam", second="layers.2", order="gpipe", microbatches=4),
    Case(model="vit_small", backend="pipelining", optimizer="adam", second="layers.2", order="1f1b", microbatches=4),
)
QUICK = (CASES[0], CASES[2], CASES[4], CASES[7])
