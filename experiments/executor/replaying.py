"""Training in one process of a model that draws random numbers: every mask that the ranks of a plan draw, drawn here again.

Components run one by one on whole values, in one autograd graph. Before each the generator begins as on the ranks that work on
the same samples. Where shards draw for their pieces of a tensor, the whole component draws piece by piece from the same
streams. The model has no buffers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from experiments.common.reference import ReferenceResult
from experiments.common.shards import drawing_in_pieces
from experiments.executor.drawing import DrawnPlan
from experiments.executor.models import SUBJECTS
from parsim.data.samples import order_of, part
from parsim.execute.job import RunSpec
from parsim.execute.loading import host_values
from parsim.execute.numerics import ComponentRandomness
from parsim.execute.optimizer import make_optimizer
from parsim.execute.rank_run import run_dataset
from parsim.execute.stage import recorded_programs, seeded_module
from parsim.model.runnable import Runnable
from parsim.program.placed import PlanIndex

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
