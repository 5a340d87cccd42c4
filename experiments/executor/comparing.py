"""What a plan ended with against plain training in one process: weights, optimizer state, running statistics, every loss.

Of a model that draws random numbers every mask of the plan's ranks is drawn again. Components run one by one on whole values,
in one autograd graph. Before each the generator begins as on the ranks that work on the same samples. Where shards draw for
pieces of a tensor, the whole component draws piece by piece from the same streams. Such a model has no buffers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from experiments.common.equality import Difference, state_difference
from experiments.common.reference import ReferenceResult, largest_difference, train_reference
from experiments.common.shards import drawing_in_pieces
from experiments.executor.drawing import DrawnPlan
from experiments.executor.launching import losses_of, run_plans
from experiments.executor.models import SUBJECTS
from parsim.data.samples import order_of, part
from parsim.execute.job import RunSpec
from parsim.execute.loading import host_values
from parsim.execute.numerics import ComponentRandomness
from parsim.execute.optimizer import make_optimizer
from parsim.execute.rank_run import run_dataset
from parsim.execute.stage import recorded_programs, seeded_module
from parsim.model.runnable import Runnable
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.program.placed import PlanIndex

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


CPU = torch.device("cpu")


def train_with_masks(drawn: DrawnPlan, run: RunSpec, *, steps: int) -> ReferenceResult:
    """`steps` steps with the masks of the plan."""
    module = seeded_module(run.model, run.seed, torch.float64, CPU)
    named = dict(module.named_parameters())
    optimizer = make_optimizer(drawn.optimizer, named.values(), drawn.learning_rate, recipe=drawn.recipe, exempt=[])
    replay = _Replay(drawn, run, module)
    data = run_dataset(run, "train")
    order, plan = order_of(data, drawn.plan.global_batch, run.seed), drawn.plan
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        with replay.step():
            for replica in range(plan.mesh.dp):
                for number in range(plan.microbatches):
                    own = part(
                        order.indices(step), replica=replica, dp=plan.mesh.dp, microbatch=number, microbatches=plan.microbatches
                    )
                    values = host_values(data, own, None, torch.float64, order.epoch_of(step))
                    loss = replay.loss(values, replica, number) / plan.global_batch
                    loss.backward()  # type: ignore[no-untyped-call]
                    total += float(loss.item())
        if drawn.recipe.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(named.values(), drawn.recipe.clip_norm)
        optimizer.step()
        losses.append(total)
    state = {
        name: {key: value for key, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
        for name, parameter in named.items()
    }
    weights = {name: value.detach() for name, value in named.items()}
    return ReferenceResult(parameters=weights, optimizer_state=state, buffers=({},) * plan.world_size, losses=tuple(losses))


class _Replay:
    """The components of a model, and the generators of the ranks that run them."""

    def __init__(self, drawn: DrawnPlan, run: RunSpec, module: torch.nn.Module) -> None:
        model = SUBJECTS[drawn.subject].model(drawn.granularity)
        self._plan, self._layout = drawn.plan, PlanIndex(drawn.plan, model)
        self._runnables: dict[str, Runnable] = {}
        programs = {}
        for component in model.components:
            samples = self._layout.local_samples(component.name)
            program = recorded_programs(run.model, samples, model.granularity, torch.float64, "cpu")[component.name]
            programs[component.name] = program
            whole, placement = Runnable(program, module), self._layout.placement[component.name]
            if placement.kind == "shard":
                whole = drawing_in_pieces(whole, component.sharding(placement.rule), placement.ways)
            self._runnables[component.name] = whole
        self._ranks = [ComponentRandomness(self._layout, rank, CPU, programs) for rank in range(self._plan.world_size)]

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a step: every rank begins it with the generator in the same state."""
        state = torch.get_rng_state()
        with contextlib.ExitStack() as stack:
            for rank in self._ranks:
                torch.set_rng_state(state)
                stack.enter_context(rank.step())
            yield

    def loss(self, values: dict[str, Tensor], replica: int, microbatch: int) -> Tensor:
        """The sum of the losses of one microbatch."""
        layout, plan = self._layout, self._plan
        for component in layout.model.components:
            size, runnable = layout.local_samples(component.name), self._runnables[component.name]
            made = []
            for group in range(plan.microbatch_samples // size):
                self._ranks[self._rank_of(component.name, replica, group)].begin(component.name, microbatch)
                inputs = [self._samples(values, name, group, size) for name in runnable.input_names]
                made.append(runnable(inputs))
            for place, name in enumerate(component.outputs):
                parts = [outputs[place] for outputs in made]
                values[name] = torch.stack(parts).sum() if parts[0].dim() == 0 else torch.cat(parts)
        return values[layout.model.outputs[0]]

    def _rank_of(self, component: str, replica: int, group: int) -> int:
        """The first rank of the replica that has the component and this group of samples."""
        ways = self._layout.placement[component].batch_ways(self._plan.mesh.tp)
        return next(
            rank
            for rank in range(self._plan.world_size)
            if self._plan.replica_of_rank(rank) == replica
            and component in self._layout.rank_components(rank)
            and (ways == self._plan.mesh.tp or self._plan.shard_of_rank(rank) // ways == group)
        )

    def _samples(self, values: dict[str, Tensor], name: str, group: int, size: int) -> Tensor:
        value = self._layout.model.value[name]
        is_cut = value.batch_first and value.bytes_per_sample > 0 and size < self._plan.microbatch_samples
        return values[name][group * size : (group + 1) * size] if is_cut else values[name]
