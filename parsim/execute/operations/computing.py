"""Loading, forwards and backwards of a rank's components.

What does not change from step to step is looked up once per task, when its operation is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from parsim.execute.operations.values import StepValues, component_of
from parsim.execute.records.task_time import Operation
from parsim.execute.relaxed.stale import StaleStage
from parsim.execute.state.store import Instance, ValueKey
from parsim.graph.placed_model import Reading
from parsim.graph.task import Task
from parsim.model.autograd.cut import Saved, backward_component, forward_component
from parsim.model.autograd.halves import BackwardHalf, backward_inputs, backward_weights
from parsim.model.autograd.recompute import RecomputeInputs, forward_keeping_calls, forward_keeping_inputs, recompute
from parsim.model.component import LOSS
from parsim.plans.redistribution import ValueLayout
from parsim.work import Compute, LoadBatch, Phase

BatchSource = Callable[[int], Mapping[str, Tensor]]
"""Microbatch number -> the batch values (model inputs, "target") this rank reads: its `Layout.batch_ways` share."""

GATHERED = 3
"""The ZeRO stage from which parameters come and go."""

_Key = tuple[str, int]
"""(component, microbatch)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Instances:
    """Of one component: what it reads, each once, and where each of its inputs is among them; what it makes; per output the
    gradients that its backward adds up; the gradients of its inputs, and which are complete behind its backward, each with
    whether another stage wants it."""

    reads: tuple[Instance, ...]
    places: tuple[int, ...]
    outputs: tuple[Instance, ...]
    arriving: tuple[tuple[Instance, ...], ...]
    growing: tuple[ValueKey, ...]
    completed: tuple[tuple[Instance, bool], ...]


class Computing:
    """The computations of one rank, and what lies between them in a step.

    Args:
        values: of the step. stale: where stages are decoupled, what waits on this one between steps.

    Attributes:
        losses: of the step, as far as they count on this rank. batch: of the step, until it is loaded.
    """

    def __init__(self, values: StepValues, stale: StaleStage | None) -> None:
        self._values, self._stage, self._stale = values, values.stage, stale
        stage, layout = values.stage, values.stage.layout
        self._reading: dict[tuple[str, str], Reading] = {
            (name, value): reading
            for value, readings in layout.readings.items()
            for reading in readings
            for name in reading.components
        }
        self._of = {name: self._instances(name) for name in stage.runnables}
        self._batch_layout = ValueLayout("full", layout.batch_ways(stage.rank))
        self.batch: BatchSource | None = None
        self.reset()

    def _instances(self, name: str) -> _Instances:
        stage, layout = self._stage, self._stage.layout
        runnable = stage.runnables[name]
        inputs = [Instance(ValueKey(value), layout.reads_in(name, value).value) for value in runnable.input_names]
        reads = tuple(dict.fromkeys(inputs))
        return _Instances(
            reads=reads,
            places=tuple(reads.index(instance) for instance in inputs),
            outputs=tuple(Instance(ValueKey(value), layout.source[value].value) for value in runnable.output_names),
            arriving=tuple(tuple(self._values.store.gradients(value)) for value in runnable.output_names),
            growing=tuple(ValueKey(value, self._reading[name, value]) for value in runnable.input_names),
            completed=tuple(
                (Instance(ValueKey(value, reading), reading.ends.gradient), layout.stage_of_value[value] != stage.number)
                for value, reading in layout.completed_readings(stage.number, name)
            ),
        )

    def reset(self) -> None:
        """A new step begins."""
        self._records: dict[_Key, Saved] = {}
        self._made = self._records
        if self._stale is not None:
            self._made = {} if self._stale.forward is None else self._stale.forward.records
            self._records = {} if self._stale.due is None else self._stale.due.records
        self._kept: dict[_Key, RecomputeInputs] = {}
        self._halves: dict[_Key, BackwardHalf] = {}
        self._growing: dict[tuple[ValueKey, int], Tensor] = {}
        self.losses: list[Tensor] = []

    def operation(self, task: Task) -> Operation:
        """What a task of loading or computing runs."""
        match task.work:
            case Compute(phase=Phase.FORWARD):
                return self._forward(task)
            case Compute(phase=Phase.RECOMPUTE):
                return self._recompute(task)
            case Compute(phase=Phase.BACKWARD_WEIGHT):
                return self._backward_weights(task)
            case Compute():
                return self._backward(task)
            case LoadBatch():
                return self._load
        raise AssertionError(f"{task.work} computes nothing")

    # --- loading ------------------------------------------------------------------------------------------------------

    def read(self, batch: BatchSource) -> list[Mapping[str, Tensor]]:
        """The values of all microbatches."""
        return [batch(microbatch) for microbatch in range(self._stage.layout.plan.microbatches)]

    def _load(self) -> None:
        batch, self.batch = self.batch, None
        assert batch is not None
        for microbatch in range(self._stage.layout.plan.microbatches):
            self.keep(microbatch, batch(microbatch))

    def keep(self, microbatch: int, values: Mapping[str, Tensor]) -> None:
        """The values of one microbatch are there."""
        for value, tensor in values.items():
            self._values.watch.loaded(tensor)
            self._values.store.put(Instance(ValueKey(value), self._batch_layout), microbatch, tensor)

    # --- forwards -----------------------------------------------------------------------------------------------------

    def _forward(self, task: Task) -> Operation:
        name, microbatch = key = component_of(task)
        own, stage, stale, layout = self._of[name], self._stage, self._stale, self._stage.layout
        take, put = self._values.take, self._values.store.put
        whole, counts = stage.runnables[name], name == LOSS and stage.loss_counts
        again = forward_keeping_calls if layout.recomputes_by_operator(name) else forward_keeping_inputs
        recomputes, differentiable = layout.recomputes(name), name in layout.differentiable
        draws, on_host = stage.randomness.draws(name), stage.randomness.draws_on_host(name)
        # a value that is a view of a parameter outlives the component, and gathered parameters do not
        gathered = _storages(whole.parameters()) if layout.plan.zero_stage >= GATHERED else frozenset[int]()

        def run() -> None:
            runnable = whole if stale is None or stale.forward is None else stale.forward.runnables[name]
            found = [take(instance, microbatch) for instance in own.reads]
            given = [found[place] for place in own.places]
            with stage.randomness.around(name), stage.computing():
                if draws:
                    stage.randomness.begin(name, microbatch)
                if recomputes:
                    outputs, self._kept[key] = again(runnable, given, stage.device, draws=draws, on_host=on_host)
                else:
                    outputs, record = forward_component(runnable, given)
                    if differentiable:
                        self._made[key] = record
            if counts:
                self.losses.append(outputs[0])
            for instance, tensor in zip(own.outputs, outputs, strict=True):
                put(instance, microbatch, tensor.clone() if gathered & _storages([tensor]) else tensor, computed=True)

        return run

    def _recompute(self, task: Task) -> Operation:
        name, _ = key = component_of(task)
        stage = self._stage

        def run() -> None:
            kept = self._kept.pop(key)
            with stage.randomness.around(name), stage.computing():
                self._records[key] = recompute(stage.runnables[name], kept)

        return run

    # --- backwards ----------------------------------------------------------------------------------------------------

    def _backward(self, task: Task) -> Operation:
        """Gradients of a value from readers that make it alike add up inside the backwards, see `backward_component`."""
        assert isinstance(task.work, Compute)
        name, microbatch = key = component_of(task)
        own, stage, stale = self._of[name], self._stage, self._stale
        put, unsharded = self._values.store.put, stage.unsharded_of(name)
        halved, completes = task.work.phase is Phase.BACKWARD_INPUT, task.work.phase is stage.layout.weight_phase(name)
        begins = completes and bool(unsharded)

        def run() -> None:
            record = self._records.pop(key)
            if name == LOSS:
                outputs: list[Tensor | None] = [stage.loss_gradient]
            else:
                outputs = [self._sum(instances, microbatch) for instances in own.arriving]
            so_far = [self._growing.pop((item, microbatch), None) for item in own.growing]
            if begins:
                stage.begin_gradients(unsharded)
            if halved:
                runnable = stage.runnables[name] if stale is None or stale.due is None else stale.due.runnables[name]
                gradients, self._halves[key] = backward_inputs(record, runnable.parameters(), outputs, so_far)
            else:
                gradients = backward_component(record, outputs, so_far)
            for item, gradient in zip(own.growing, gradients, strict=True):
                if gradient is not None:
                    self._growing[item, microbatch] = gradient
            for instance, leaves in own.completed:
                total = self._growing.pop((instance.item, microbatch), None)
                if total is not None:  # a piece of a larger gradient would keep all of that until it is sent
                    put(instance, microbatch, total.contiguous() if leaves else total, computed=True)

        return run

    def _backward_weights(self, task: Task) -> Operation:
        name, _ = key = component_of(task)
        stage, unsharded = self._stage, self._stage.unsharded_of(name)

        def run() -> None:
            stage.begin_gradients(unsharded)
            backward_weights(self._halves.pop(key))

        return run

    def _sum(self, instances: tuple[Instance, ...], microbatch: int) -> Tensor | None:
        """Gradient of a value from all its readers, later ones first, as autograd would add them."""
        total: Tensor | None = None
        for instance in instances:
            tensor = self._values.store.take(instance, microbatch)
            if tensor is not None:
                total = tensor if total is None else total + tensor
        return total


def _storages(tensors: Iterable[Tensor]) -> frozenset[int]:
    """Equal entries for tensors that share memory."""
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors)
