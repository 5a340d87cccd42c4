"""The cases of the record: models, batches and plans, none of which calibration has seen together.

Half of the models are calibrated (their components measured, at other batches and under the one-rank plan alone), the other
half are not: what they cost is told by the operators below their components.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from parsim.hardware.cluster import Cluster
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.layouts import BATCH
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan
from parsim.predict.problem import PlanningProblem
from parsim.search.stages import balanced_plan
from parsim.search.tensor import can_be_cut, uniform_placements

CALIBRATED_BATCHES = (2, 8, 32)
BATCH_SAMPLES = 16
"""Of the cases: microbatches of 16, 8, 4 and 2 samples, of which calibration measures 8 and 2."""

GRANULARITY = "sublayer"
BUCKET_BYTES = 256 * 1024
SMALL = 2
"""Ranks of a launch that leaves every rank a core; more share them."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model of the record. `calibrated`: its components are measured when the machine is calibrated."""

    spec: ModelSpec
    optimizer: str
    calibrated: bool
    dataset: str = "digits"

    @property
    def name(self) -> str:
        return self.spec.name


SUBJECTS = (
    Subject(spec=ModelSpec(name="resnet_small"), optimizer="sgd_momentum", calibrated=True),
    Subject(spec=ModelSpec(name="vit_small"), optimizer="adamw", calibrated=True),
    Subject(spec=ModelSpec(name="mlp", args=(("width", 512),)), optimizer="sgd_momentum", calibrated=True),
    Subject(spec=ModelSpec(name="vgg_small"), optimizer="sgd_momentum", calibrated=False),
    Subject(spec=ModelSpec(name="gpt_small"), optimizer="adamw", calibrated=False, dataset="synthetic"),
    Subject(spec=ModelSpec(name="bert_small"), optimizer="adamw", calibrated=False, dataset="synthetic"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan of one subject. `label` says which, for people."""

    subject: Subject
    label: str
    plan: Plan

    @property
    def name(self) -> str:
        """Names its files."""
        return f"{self.subject.name}-{self.label}".replace(" ", "_").replace(",", "").replace("/", "_")

    @property
    def crowded(self) -> bool:
        """Of the launch with more ranks than cores."""
        return self.plan.world_size > SMALL


def problem_of(subject: Subject, cluster: Cluster, global_batch: int = BATCH_SAMPLES) -> PlanningProblem:
    """The question of a subject on so many devices of this machine."""
    model = load_model(subject.spec, granularity=GRANULARITY)
    return PlanningProblem(
        model=model, cluster=cluster, global_batch=global_batch, numerics=Numerics(optimizer=subject.optimizer)
    )


def cases_of(subject: Subject, problem: PlanningProblem) -> Iterator[Case]:
    """Every plan of a subject that its model and the devices of `problem` allow; those of few ranks if there are few devices.

    Raises CostError where the profile has no price for the model.
    """
    for label, plan in _plans(problem):
        yield Case(subject=subject, label=label, plan=replace(plan, strategy="custom"))


def _plans(problem: PlanningProblem) -> Iterator[tuple[str, Plan]]:
    def plan(
        mesh: Mesh, *, microbatches: int = 1, order: str = "1f1b", cut: bool = False, in_turn: bool = False, zero_stage: int = 0
    ) -> Plan:
        placements = None
        if cut or in_turn:
            placements = uniform_placements(problem, Mesh(tp=mesh.tp))
            if in_turn:
                placements = {name: way if number % 2 else BATCH for number, (name, way) in enumerate(placements.items())}
        return balanced_plan(
            replace(problem, zero_stage=zero_stage),
            "custom",
            mesh,
            microbatches=microbatches,
            pipeline_order=order,
            bucket_bytes=BUCKET_BYTES,
            placements=placements,
        )

    ways = can_be_cut(problem, 2)
    if problem.cluster.size <= SMALL:
        yield "single", plan(Mesh())
        yield "single 4 microbatches", plan(Mesh(), microbatches=4)
        yield "dp 2", plan(Mesh(dp=2))
        yield "dp 2, zero 1", plan(Mesh(dp=2), zero_stage=1)
        yield "pp 2, 1f1b, 4 microbatches", plan(Mesh(pp=2), microbatches=4)
        if ways:
            yield "tp 2", plan(Mesh(tp=2), cut=True)
            yield "tp 2 and batch in turn", plan(Mesh(tp=2), in_turn=True)
        return
    yield "dp 4", plan(Mesh(dp=4))
    yield "dp 2 pp 2, 1f1b, 2 microbatches", plan(Mesh(dp=2, pp=2), microbatches=2)
    yield "pp 3, 1f1b, 4 microbatches", plan(Mesh(pp=3), microbatches=4)
