"""Questions every lowering pass (and the executor) asks about one plan of one model: who holds, makes and reads what."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from parsim.model.component import Parameter
from parsim.model.model import Model
from parsim.plan.plan import Plan, check_plan


class Bucket(NamedTuple):
    """Gradients reduced together over `group` (all ranks that hold these parameters)."""

    number: int
    stages: tuple[int, ...]
    group: tuple[int, ...]
    parameters: tuple[Parameter, ...]

    @property
    def size_bytes(self) -> int:
        return sum(parameter.size_bytes for parameter in self.parameters)


@dataclass(frozen=True)
class Layout:
    """A plan laid over its model. Raises PlanError if they do not match."""

    plan: Plan
    model: Model

    def __post_init__(self) -> None:
        check_plan(self.plan, self.model)

    def rank(self, stage: int, replica: int) -> int:
        return self.plan.mesh.rank(stage=stage, replica=replica)

    @cached_property
    def stage_of(self) -> dict[str, int]:
        return {name: number for number, stage in enumerate(self.plan.stages) for name in stage.components}

    @cached_property
    def stage_of_value(self) -> dict[str, int | None]:
        """Stage that makes a value; None for the batch itself."""
        return {v.name: None if v.producer is None else self.stage_of[v.producer] for v in self.model.values}

    @cached_property
    def consumers(self) -> dict[str, tuple[str, ...]]:
        """Components that read a value, in execution order."""
        readers: dict[str, list[str]] = {value.name: [] for value in self.model.values}
        for component in self.model.components:
            for value in dict.fromkeys(component.inputs):
                readers[value].append(component.name)
        return {value: tuple(names) for value, names in readers.items()}

    @cached_property
    def differentiable(self) -> frozenset[str]:
        """Components that have a backward: a differentiable output that some backward, or the loss, asks for."""
        needed: set[str] = set()
        for component in reversed(self.model.components):
            outputs = [value for value in component.outputs if self.model.value[value].differentiable]
            final = any(value in self.model.outputs for value in outputs)
            read = any(reader in needed for value in outputs for reader in self.consumers[value])
            if final or read:
                needed.add(component.name)
        return frozenset(needed)

    def backward_consumers(self, value: str) -> tuple[str, ...]:
        """Components whose backward yields a gradient of `value`, in execution order."""
        return tuple(name for name in self.consumers[value] if name in self.differentiable)

    @cached_property
    def remote_stages(self) -> dict[str, tuple[int, ...]]:
        """Other stages that read a value, each of which is sent it once."""
        remote: dict[str, tuple[int, ...]] = {}
        for value, names in self.consumers.items():
            home = self.stage_of_value[value]
            stages = dict.fromkeys(self.stage_of[name] for name in names)
            remote[value] = tuple(stage for stage in stages if home is not None and stage != home)
        return remote

    @cached_property
    def batch_values(self) -> tuple[tuple[str, ...], ...]:
        """Per stage, the values it reads that come from the batch."""
        reads: list[dict[str, None]] = [{} for _ in self.plan.stages]
        for value, names in self.consumers.items():
            if self.stage_of_value[value] is None:
                for name in names:
                    reads[self.stage_of[name]][value] = None
        return tuple(tuple(values) for values in reads)

    def gradients_to_send(self, stage: int, name: str) -> tuple[str, ...]:
        """Values of other stages whose gradient is complete in `stage` once the backward of `name` has run."""
        values = []
        for value in dict.fromkeys(self.model.component(name).inputs):
            home = self.stage_of_value[value]
            if home is None or home == stage or not self.model.value[value].differentiable:
                continue
            here = [reader for reader in self.backward_consumers(value) if self.stage_of[reader] == stage]
            if here and here[0] == name:
                values.append(value)
        return tuple(values)

    @cached_property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """Stages that hold a parameter, by its name: more than one if it is tied across stages."""
        stages: dict[str, dict[int, None]] = {}
        for component in self.model.components:
            for parameter in component.parameters:
                stages.setdefault(parameter.name, {})[self.stage_of[component.name]] = None
        return {name: tuple(numbers) for name, numbers in stages.items()}

    def stage_parameters(self, stage: int) -> tuple[Parameter, ...]:
        """Every parameter the stage holds, once."""
        return tuple(parameter for parameter in self.model.parameters if stage in self.holders[parameter.name])

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Gradient buckets in the order their gradients are complete: backwards through each stage, tied ones last.

        A bucket is closed once it holds `bucket_bytes`. A parameter is ready when the *first* component that uses it
        has run its backward.
        """
        buckets: list[Bucket] = []

        def close(stages: tuple[int, ...], parameters: list[Parameter]) -> None:
            if parameters:
                group = tuple(rank for stage in stages for rank in self.plan.stages[stage].ranks)
                buckets.append(Bucket(len(buckets), stages, group, tuple(parameters)))

        for stage in range(self.plan.mesh.pp):
            held: list[Parameter] = []
            for parameter in reversed(self.stage_parameters(stage)):
                if len(self.holders[parameter.name]) == 1:
                    held.append(parameter)
                    if sum(p.size_bytes for p in held) >= self.plan.bucket_bytes:
                        close((stage,), held)
                        held = []
            close((stage,), held)
        tied: dict[tuple[int, ...], list[Parameter]] = {}
        for parameter in self.model.parameters:
            if len(self.holders[parameter.name]) > 1:
                tied.setdefault(self.holders[parameter.name], []).append(parameter)
        for stages, parameters in tied.items():
            close(stages, parameters)
        return tuple(buckets)

    def completes(self, bucket: Bucket, stage: int) -> str | None:
        """The component whose backward is the last in `stage` to add to the bucket; None if none there has a backward."""
        names = {parameter.name for parameter in bucket.parameters}
        for component in self.model.components:
            if (
                self.stage_of[component.name] == stage
                and component.name in self.differentiable
                and any(parameter.name in names for parameter in component.parameters)
            ):
                return component.name
        return None
