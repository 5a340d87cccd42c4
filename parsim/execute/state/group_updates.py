"""The optimizers of one rank: one per group of parameters, each with its copies in fp32 if it has some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parsim.execute.state.checkpoint import restore_optimizer
from parsim.execute.state.master_weights import MASTER, MasterWeights
from parsim.execute.state.optimizer import make_optimizer
from parsim.execute.state.weight_averages import update_averages
from parsim.execute.training.recipe import TrainingRecipe


class Stepped(NamedTuple):
    """A parameter, or a part of a divided bucket, that an optimizer steps. `exempt`: without weight decay."""

    tensor: Tensor
    exempt: bool


class GroupUpdates:
    """What a rank updates, by group of parameters; "" is the group of those that the recipe names in none.

    Args:
        optimizer, learning_rate: of the parameters in no group. recipe: of the groups, and what goes with their updates.
        stepped: by group, in the order in which groups are updated; a rank without parameters has none.
        master_weights: the optimizers update copies in fp32.

    Attributes:
        optimizers: by group.
    """

    def __init__(
        self,
        optimizer: str,
        learning_rate: float,
        recipe: TrainingRecipe,
        stepped: Mapping[str, Sequence[Stepped]],
        *,
        master_weights: bool,
    ) -> None:
        self._recipe = recipe
        self._stepped = dict(stepped)
        self._masters = {
            group: MasterWeights([entry.tensor for entry in entries])
            for group, entries in (stepped.items() if master_weights else ())
        }
        rules = {group.name: (group.optimizer, group.learning_rate) for group in recipe.groups}
        self.optimizers = {group: self._made(*rules.get(group, (optimizer, learning_rate)), group) for group in stepped}

    @property
    def has_masters(self) -> bool:
        return bool(self._masters)

    def another(self, name: str, learning_rate: float) -> torch.optim.Optimizer | None:
        """Another optimizer of the parameters in no group, with separate state; None where the rank has none of them."""
        return self._made(name, learning_rate, "") if "" in self._stepped else None

    def _made(self, name: str, learning_rate: float, group: str) -> torch.optim.Optimizer:
        entries = self._stepped[group]
        tensors = [self._updated(entry.tensor, group) for entry in entries]
        exempt = [tensor for tensor, entry in zip(tensors, entries, strict=True) if entry.exempt]
        return make_optimizer(name, tensors, learning_rate, recipe=self._recipe.of(group), exempt=exempt)

    def _updated(self, tensor: Tensor, group: str) -> Tensor:
        """What the optimizer has in place of a parameter: its copy in fp32, if there is one."""
        return self._masters[group].of(tensor) if group in self._masters else tensor

    def step(self, group: str) -> None:
        """One update of a group."""
        optimizer = self.optimizers[group]
        if group in self._masters:
            self._masters[group].step(optimizer)
        else:
            optimizer.step()
        if self._recipe.ema is not None:
            update_averages(optimizer, self._recipe.ema.decay)

    def state_of(self, tensor: Tensor, group: str) -> dict[str, Any]:
        """The optimizer's state of a parameter or a part of a bucket, with its copy in fp32 where there is one."""
        own = self._updated(tensor, group)
        state = dict(self.optimizers[group].state.get(own) or {})
        return {**state, MASTER: own.data} if group in self._masters else state

    def restore(self, group: str, named: Mapping[str, Tensor], states: Mapping[str, dict[str, Any]]) -> None:
        """Give the optimizer of a group the states of its parameters; one without state starts anew.

        Args:
            named: parameters and parts of buckets by name. states: by the same names; copies are taken out of them.
        """
        own = {name: self._updated(tensor, group) for name, tensor in named.items()}
        with torch.no_grad():
            for name, tensor in own.items():
                if MASTER in states.get(name, {}):  # else nothing but padding
                    tensor.copy_(states[name].pop(MASTER))
        restore_optimizer(self.optimizers[group], own, {name: states[name] for name in own if states.get(name)})

    def resident_tensors(self) -> list[Tensor]:
        """What is alive of all groups between steps."""
        held = [state for optimizer in self.optimizers.values() for state in optimizer.state.values()]
        tensors = [entry for state in held for entry in state.values() if isinstance(entry, Tensor)]
        return [*tensors, *(copy for masters in self._masters.values() for copy in masters.copies)]
