"""What a plan ended with against plain training in one process: weights, optimizer state, running statistics, every loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from experiments.common.equality import Difference, state_difference
from experiments.common.reference import ReferenceResult, largest_difference, train_reference
from experiments.executor.drawing import DrawnPlan
from experiments.executor.launching import losses_of, run_plans
from experiments.executor.models import SUBJECTS
from experiments.executor.replaying import train_with_masks
from parsim.execute.job import RunSpec
from parsim.execute.rank_run import run_dataset
from parsim.execute.stage import seeded_module
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage

TOLERANCE = 1e-10
LEAST_MOVED = 1e-3
"""By how much training has to move some weight, so that equality is not that of untouched copies."""


@dataclass
class References:
    """Trainings in one process, each done once.

    Attributes: steps: of each. moved: the least that any of them moved a weight of its model at most.
    """

    steps: int
    moved: float = float("inf")
    _known: dict[object, ReferenceResult] = field(default_factory=dict)

    def of(self, drawn: DrawnPlan, run: RunSpec) -> ReferenceResult:
        """Plain training on the whole batch; where results depend on which samples meet or on masks, with the plan's."""
        subject = SUBJECTS[drawn.subject]
        own = subject.normalises or subject.draws
        key = (subject.name, drawn.optimizer, drawn.recipe, drawn.plan.global_batch, run.seed, drawn.name if own else "")
        if key not in self._known:
            found = self._trained(drawn, run, drawn.plan if own else _whole(drawn.plan))
            start = seeded_module(run.model, run.seed, torch.float64, torch.device("cpu")).named_parameters()
            self.moved = min(self.moved, largest_difference({name: value.detach() for name, value in start}, found.parameters))
            if own:
                return found
            self._known[key] = found
        found = self._known[key]
        return replace(found, buffers=found.buffers * drawn.plan.world_size)

    def _trained(self, drawn: DrawnPlan, run: RunSpec, plan: Plan) -> ReferenceResult:
        spec = run.model
        if SUBJECTS[drawn.subject].draws:
            return train_with_masks(drawn, run, steps=self.steps)
        return train_reference(
            spec,
            plan,
            run_dataset(run, "train"),
            optimizer=drawn.optimizer,
            learning_rate=drawn.learning_rate,
            dtype=torch.float64,
            seed=run.seed,
            steps=self.steps,
            model=SUBJECTS[drawn.subject].model(drawn.granularity),
            recipe=drawn.recipe,
        )


def _whole(plan: Plan) -> Plan:
    """One process, one microbatch."""
    stage = Stage(components=plan.components, ranks=(0,))
    return Plan(strategy="single", mesh=Mesh(), stages=(stage,), global_batch=plan.global_batch)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Attributes: difference: the largest of all kinds; None where the plan did not end. reason: why it did not."""

    drawn: DrawnPlan
    difference: Difference | None
    reason: str = ""

    @property
    def holds(self) -> bool:
        return self.difference is not None and self.difference.worst <= TOLERANCE

    def describe(self) -> str:
        """What differs, and how to see it again."""
        found = self.reason if self.difference is None else str(self.difference)
        return f"{self.drawn.describe()}\n  {found}"


def outcomes_of(
    some: Sequence[DrawnPlan], folder: Path, *, steps: int, timeout_s: float, references: References | None = None
) -> list[Outcome]:
    """Run plans of one subject on one number of processes, in one launch that leaves files in `folder`, and compare each."""
    references = references or References(steps=steps)
    runs = [_run_of(drawn, folder) for drawn in some]
    failed = run_plans(runs, some[0].processes, folder, steps=steps, timeout_s=timeout_s)
    found = []
    for drawn, run in zip(some, runs, strict=True):
        if run.name in failed:
            found.append(Outcome(drawn=drawn, difference=None, reason=failed[run.name]))
            continue
        expected = references.of(drawn, run)
        model = SUBJECTS[drawn.subject].model(drawn.granularity)
        state = state_difference(model, drawn.plan, expected, folder / run.name / "checkpoints", steps=steps)
        losses = losses_of(folder, run)
        assert len(losses) == len(expected.losses) == steps
        apart = max(abs(one - other) for one, other in zip(losses, expected.losses, strict=True))
        found.append(Outcome(drawn=drawn, difference=replace(state, losses=apart)))
    return found


def _run_of(drawn: DrawnPlan, folder: Path) -> RunSpec:
    subject = SUBJECTS[drawn.subject]
    path = folder / f"{drawn.subject}-{drawn.granularity}.json"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        subject.model(drawn.granularity).save(path)
    return RunSpec(
        name=drawn.name,
        model=subject.spec,
        model_path=str(path),
        plan=drawn.plan,
        optimizer=drawn.optimizer,
        learning_rate=drawn.learning_rate,
        dataset=subject.dataset,
        dtype="float64",
        seed=drawn.seed,
        recipe=drawn.recipe,
    )


@contextmanager
def planted_fault() -> Iterator[None]:
    """Every rank scales its gradients by one part in a million too much: the comparison must see it."""
    from parsim.execute.stage import StageReplica

    kept = StageReplica.optimizer_step

    def faulty(self: StageReplica, group: str = "") -> None:
        for flat in self.buckets.values():
            flat.mul_(1 + 1e-6)
        kept(self, group)

    StageReplica.optimizer_step = faulty  # type: ignore[method-assign]
    try:
        yield
    finally:
        StageReplica.optimizer_step = kept  # type: ignore[method-assign]
