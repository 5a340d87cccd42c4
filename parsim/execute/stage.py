"""The part of a model that one rank holds under a plan: its components, their parameters, gradient buckets and optimizer.

Every process builds the whole model on its host and moves its own part to its device, a divided bucket at a time, so a
model may exceed one GPU. A recording runs on fakes with a shape on the device and no memory. Gradients are views into flat
buckets. Under ZeRO 3 gathered parameters always use one place, so tensors that autograd saved of them stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parsim.execute.checkpoint.checkpoint import RankState, check_shape, restore_tensors
from parsim.execute.checkpoint.fragments import Fragment, check_names, fragment_of, is_per_element, piece_of
from parsim.execute.job import PLAIN, TrainingRecipe
from parsim.execute.numerics import ComponentRandomness, TorchNumerics, overflow_flag
from parsim.execute.optimizer import (
    EMA,
    MASTER,
    GroupUpdates,
    Stepped,
    exempt_names,
    flat_gradients,
    scale_to_norm,
    squared_norm,
)
from parsim.model.build import (
    build_module,
    check_real,
    example_batch,
    follows_example,
    interface_of,
    loss_of,
    move_hollow,
    record,
)
from parsim.model.component import LOSS
from parsim.model.runnable import CallProgram, Runnable
from parsim.model.shard.apply import piece, shard_runnable
from parsim.model.spec import ModelSpec
from parsim.plans.layouts import ValueLayout
from parsim.program.buckets import Bucket, HeldParameter, by_family
from parsim.program.passes.gradients import counted_by, updates_of
from parsim.program.placed import PlanIndex

# ZeRO: the parameters of a bucket in one flat array, of which each rank of the group updates its part.
#
# Gradients lie in a second flat array of the same order. Both are padded with zeros to equal parts. Every optimizer here works
# element by element, so updating a part of the flat array is updating that part of the parameters.
#
#     stage 1    both arrays are always whole.
#     stage 2    the gradients are whole from `begin_gradients` to `end_gradients` of a microbatch; this rank's part of their
#                sum (`gradients`) stays.
#     stage 3    the parameters are whole from `begin_parameters` to `end_parameters`; this rank's part of them stays. In
#                between the flat array has no memory, while its views, and the tensors that autograd saved of them, stay valid.
#
# Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), stages 1 to 3.


class ChunkRun(NamedTuple):
    """Neighbours in a rank's part of a bucket that are updated alike: with weight decay, or `exempt` from it. `tensor` is a
    parameter of the optimizer: the elements `start` to `stop` of the chunk."""

    tensor: nn.Parameter
    exempt: bool
    start: int
    stop: int


class DividedBucket:
    """A bucket whose optimizer state, or frozen parameters, are spread over its group; this rank is `place` in it.

    Attributes:
        parameters: the flat padded array. chunk: this rank's part as a parameter; its `.grad` is its part of the gradients.
        gradients: what stays of the gradients between microbatches: the flat padded array, from stage 2 on this rank's part;
            nothing of frozen parameters.
        parts: the parameters the chunk reaches into, by name: what of each, and where in the chunk that lies.
        runs: what the optimizer steps: the chunk, or pieces of it where some of its parameters are `exempt` from weight decay.
    """

    def __init__(
        self,
        bucket: Bucket,
        held: Mapping[str, Tensor],
        place: int,
        *,
        stage: int,
        device: torch.device,
        exempt: frozenset[str] = frozenset(),
    ) -> None:
        """`held`: the parameters, on any device. They become views of the flat array on `device`."""
        first = held[bucket.parameters[0].name]
        size = bucket.chunk_elements
        self.bucket = bucket
        self.stage = stage
        self.group = bucket.first[0].group
        self._held = {entry.name: held[entry.name] for entry in bucket.parameters}
        self.parameters = torch.zeros(size * len(bucket.group), dtype=first.dtype, device=device)
        self.parts: dict[str, tuple[Fragment, slice]] = {}
        start, stop = place * size, (place + 1) * size
        for entry, offset in self._offsets():
            parameter = held[entry.name]
            view = self.parameters[offset : offset + parameter.numel()].view_as(parameter)
            view.copy_(parameter.data)
            parameter.data = view
            begin, end = max(start, offset), min(stop, offset + entry.elements)
            if begin < end:
                spread = fragment_of(entry)._replace(start=begin - offset, stop=end - offset, shape=tuple(parameter.shape))
                self.parts[entry.name] = spread, slice(begin - start, end - start)
        own = self.parameters[start:stop].clone() if stage >= 3 else self.parameters[start:stop]
        self.chunk = nn.Parameter(own, requires_grad=bucket.trainable)
        if not bucket.trainable:
            self.gradients = self.chunk.new_empty(0)
        elif stage >= 2:
            self.gradients = torch.zeros_like(self.chunk.data)
            self.chunk.grad = self.gradients
        else:
            self.gradients = torch.zeros_like(self.parameters)
            self._show(self.gradients)
            self.chunk.grad = self.gradients[start:stop]
        self.runs = self._cut(exempt) if bucket.trainable else ()
        self._whole: Tensor | None = None
        self._elements = len(self.parameters)
        if stage >= 3:
            self.end_parameters()

    def _offsets(self) -> Iterator[tuple[HeldParameter, int]]:
        offset = 0
        for entry in self.bucket.parameters:
            yield entry, offset
            offset += entry.elements

    def _cut(self, exempt: frozenset[str]) -> tuple[ChunkRun, ...]:
        """The chunk in as few pieces as weight decay needs; padding belongs to the last."""
        kinds = [(place.start, name in exempt) for name, (_, place) in self.parts.items()]
        begins = [entry for number, entry in enumerate(kinds) if not number or entry[1] != kinds[number - 1][1]]
        if len(begins) < 2:
            return (ChunkRun(self.chunk, bool(begins) and begins[0][1], 0, self.chunk.numel()),)
        ends = [start for start, _ in begins[1:]] + [self.chunk.numel()]
        runs = []
        for (start, without), stop in zip(begins, ends, strict=True):
            tensor = nn.Parameter(self.chunk.data[start:stop])
            assert self.chunk.grad is not None
            tensor.grad = self.chunk.grad[start:stop]
            runs.append(ChunkRun(tensor, without, start, stop))
        return tuple(runs)

    @property
    def summed(self) -> Tensor:
        """This rank's part of the gradients."""
        gradients = self.chunk.grad
        assert gradients is not None
        return gradients

    def run_of(self, name: str) -> int:
        first = self.parts[name][1].start
        return next(number for number, run in enumerate(self.runs) if run.start <= first < run.stop)

    def _in_run(self, name: str) -> tuple[ChunkRun, slice]:
        run, place = self.runs[self.run_of(name)], self.parts[name][1]
        return run, slice(place.start - run.start, place.stop - run.start)

    def _show(self, gradients: Tensor) -> None:
        for entry, offset in self._offsets():
            parameter = self._held[entry.name]
            parameter.grad = gradients[offset : offset + parameter.numel()].view_as(parameter)

    def begin_gradients(self) -> None:
        """Room for the gradients of a microbatch, unless there is some."""
        if self._whole is None:
            self._whole = torch.zeros(self._elements, dtype=self.chunk.dtype, device=self.chunk.device)
            self._show(self._whole)

    def end_gradients(self) -> Tensor:
        """The flat gradients of a microbatch, which are forgotten here."""
        whole, self._whole = self._whole, None
        assert whole is not None, "a backward has begun these gradients"
        for parameter in self._held.values():
            parameter.grad = None
        return whole

    def begin_parameters(self) -> Tensor:
        """Room for all parameters: the flat array, for the parts of all ranks."""
        self.parameters.untyped_storage().resize_(self._elements * self.chunk.element_size())
        return self.parameters

    def end_parameters(self) -> None:
        self.parameters.untyped_storage().resize_(0)

    def load_weight(self, name: str, weight: Tensor) -> None:
        """Take this rank's part of one whole parameter, or of its piece, if it is cut (stage 3). Raises as `check_shape`."""
        check_shape(name, weight, self._held[name])
        if name in self.parts:
            fragment, place = self.parts[name]
            self.chunk.data[place] = weight.reshape(-1)[fragment.start : fragment.stop].to(self.chunk.data)

    def state_of(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """What the state of a parameter's run says of it: views into its arrays, and its step counter."""
        place = self._in_run(name)[1]
        return {key: value[place] if is_per_element(value, key) else value for key, value in state.items()}

    def add_state(self, run_state: MutableMapping[str, Any], name: str, state: Mapping[str, Any]) -> None:
        """Put this rank's part of the state of one whole parameter (of its piece, if it is cut) into that of its run."""
        fragment = self.parts[name][0]
        run, place = self._in_run(name)
        for key, value in state.items():
            if is_per_element(value, key):
                flat = run_state.setdefault(key, torch.zeros_like(run.tensor.data, dtype=value.dtype))
                flat[place] = value.reshape(-1)[fragment.start : fragment.stop].to(flat)
            else:
                run_state.setdefault(key, value)


class StageReplica:
    """What `rank` has of its stage, with weights from `seed` (equal on every rank), ready to run.

    Components are recorded with the samples of a microbatch on this rank, in training mode, on `device`. Of a sharded component
    the rank has its shard, whose pieces of parameters and buffers keep their names. Parameters that the rank does not hold are
    emptied on the host, so that only its own ever lie on `device`.

    Attributes:
        runnables: by component name. updates: the optimizers, by group of parameters.
        buckets: flat gradients by bucket number, of all buckets this rank takes part in (from ZeRO 2 on its part of them).
        divided: of these the ones whose optimizer state is spread over their group (ZeRO), and those of frozen parameters.
        gradient_norm: of all gradients of the last step, before they were clipped; None: they are not.
        loss_scale: of the step at hand, with fp16. agree: then, how the ranks find out whether the gradients of any have
            overflowed.
        also_resident: lines of memory that others keep between steps for this rank, and their tensors.
        loss_counts: whether this rank's losses are to be added up: false where another rank has the same ones, or it has none.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layout: PlanIndex,
        rank: int,
        *,
        optimizer: str,
        learning_rate: float,
        dtype: torch.dtype,
        seed: int,
        device: torch.device,
        numerics: TorchNumerics | None = None,
        recipe: TrainingRecipe = PLAIN,
    ) -> None:
        self.recipe = recipe
        self.numerics = numerics if numerics is not None else TorchNumerics(weights=dtype)
        self.layout = layout
        self.rank = rank
        self.number = layout.plan.stage_of_rank(rank)
        self.device = device
        components = layout.rank_components(rank)
        self._shapes, programs = _recordings(spec, layout, components, self.numerics, device)
        self.module = seeded_module(spec, seed, dtype, HOST)
        self.randomness = ComponentRandomness(layout, rank, device, programs)
        shard = layout.plan.shard_of_rank(rank)
        self.runnables: dict[str, Runnable] = {}
        for name in components:
            placement, runnable = layout.placement[name], Runnable(programs[name], self.module)
            if placement.kind == "shard":
                sharding = layout.model.component(name).sharding(placement.rule)
                runnable = shard_runnable(runnable, sharding, shard % placement.ways, placement.ways)
            self.runnables[name] = runnable
        self._loaded: dict[str, dict[str, Any]] = {}
        self._hold(layout.rank_parameters(rank))
        divided = [bucket for bucket in layout.gathered_buckets(rank) if layout.is_divided(bucket)]
        self._move(stays=[self.parameters[p.name] for bucket in divided for p in bucket.parameters])
        self._exempt = exempt_names(self.module, recipe.no_weight_decay)
        self.divided = {
            bucket.number: DividedBucket(
                bucket,
                self.parameters,
                bucket.group.index(rank),
                stage=layout.zero_stage_of(bucket),
                device=device,
                exempt=self._exempt,
            )
            for bucket in divided
        }
        self._divided_in = {p.name: bucket.number for bucket in divided for p in bucket.parameters}
        self.buckets: dict[int, Tensor] = {
            bucket.number: self.divided[bucket.number].gradients
            if bucket.number in self.divided
            else flat_gradients([self.parameters[p.name] for p in bucket.parameters])
            for bucket in layout.rank_buckets(rank)
        }
        self._trained = by_family(layout.rank_buckets(rank))
        groups = [step.update_group for step in updates_of(layout, rank)]
        self._zeroed = {
            group: [flat for number, flat in self.buckets.items() if layout.buckets[number].first[0].group == group]
            for group in groups
        }
        self.updates = GroupUpdates(
            optimizer,
            learning_rate,
            recipe,
            {group: self._stepped(group) for group in groups},
            master_weights=self.numerics.master_weights,
        )
        self._skipped = False
        self.loss_counts = LOSS in components and (layout.placement[LOSS].kind != "replicate" or shard == 0)
        self.gradient_norm: Tensor | None = None
        self._counts = counted_by(layout, rank) if layout.plan.clip_gradients else []
        self.loss_scale = self.numerics.loss_scale
        self.agree: Callable[[Tensor], object] = lambda flag: None
        self.also_resident: dict[str, Callable[[], list[Tensor]]] = {}
        self._loss_type = dtype
        if LOSS in components:
            _, slot, _ = programs[LOSS].outputs[0]
            self._loss_type = programs[LOSS].tensors[slot].dtype
        self._loss_gradient: tuple[float, Tensor] | None = None

    def _hold(self, held: Sequence[HeldParameter]) -> None:
        """Keep this rank's parts of parameters and buffers in the module, and no other parameter."""
        everything = dict(self.module.named_parameters(remove_duplicate=False))
        self._held = {parameter.name: parameter for parameter in held}
        self.parameters: dict[str, Tensor] = {name: everything[name] for name in self._held}
        for name, parameter in self.parameters.items():
            entry = self._held[name]
            if not entry.trainable:
                parameter.requires_grad_(False)  # also where no gradient of the loss reaches it: no backward leaves one
            if entry.part is not None:
                parameter.data = piece(parameter.data, entry.part, entry.shard, entry.ways)
        for name, fragment in self._buffer_fragments().items():  # running statistics of cut channels
            path, _, key = name.rpartition(".")
            buffers = self.module.get_submodule(path)._buffers
            buffer = buffers[key]
            assert buffer is not None
            buffers[key] = piece(buffer, fragment.part, fragment.shard, fragment.ways)
        kept = {id(parameter) for parameter in self.parameters.values()}
        for parameter in self.module.parameters():
            if id(parameter) not in kept:
                parameter.data = torch.empty(0, dtype=parameter.dtype)

    def _move(self, stays: Sequence[Tensor]) -> None:
        """Move what is left of the module to the device, all but what `stays`: a divided bucket moves its own parameters.
        Tensors that a module keeps outside its parameters and buffers follow where its own `_apply` moves them."""
        kept = {id(tensor) for tensor in stays}
        self.module._apply(lambda tensor: tensor if id(tensor) in kept else tensor.to(self.device))  # type: ignore[no-untyped-call]

    @property
    def loss_gradient(self) -> Tensor:
        """d(mean loss over the global batch, scaled) / d(sum of losses) = scale / global_batch. Replicas that mix their weights
        in rounds train each on the mean over its own samples."""
        plan = self.layout.plan
        samples = plan.global_batch // (plan.mesh.dp if plan.synchronisation.mixes else 1)
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        if self._loss_gradient is None or self._loss_gradient[0] != scale:
            value = torch.tensor(scale / samples, dtype=self._loss_type, device=self.device)
            self._loss_gradient = scale, value
        return self._loss_gradient[1]

    def computing(self) -> AbstractContextManager[object]:
        """Around every forward of a component: autocast, where the precision asks for it."""
        return self.numerics.computing(self.device)

    def local_shape(self, value: str, layout: ValueLayout) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of one microbatch of a value, in that layout, on a rank that holds any of it."""
        samples, tp = self.layout.plan.microbatch_samples, self.layout.plan.mesh.tp
        entry = self.layout.model.value[value]
        if not (entry.batch_first and entry.bytes_per_sample):  # such a value is never cut: here it is as recorded here
            return self._shapes[samples * layout.ways // tp][value]
        whole, dtype = self._shapes[samples][value]
        shape = list(whole)
        shape[0] = shape[0] * layout.ways // tp
        if layout.form == "shard":
            shape[layout.dim] //= layout.ways
        return tuple(shape), dtype

    def own_bucket(self, bucket: int) -> int:
        """The bucket of this rank that holds what `bucket` does: its own, or that of its sharding group."""
        if bucket in self.buckets or bucket in self.divided:
            return bucket
        family = self.layout.buckets[bucket].family
        first = family.begin + family.first_alike(bucket - family.begin)
        return next(number for number in range(first, first + family.replicas) if number in self.buckets)

    def summed_gradient(self, bucket: int) -> Tensor:
        """What an all_reduce sums of a bucket: its gradients, or this rank's part of them where they are divided."""
        return self.divided[bucket].summed if bucket in self.divided else self.buckets[bucket]

    def unsharded_of(self, component: str) -> tuple[int, ...]:
        """The buckets of the component's parameters whose gradients come and go with every microbatch (ZeRO 2)."""
        return tuple(bucket.number for bucket in self.layout.unsharded_buckets(component, self._trained))

    def _stepped(self, group: str) -> list[Stepped]:
        """What the optimizer of a group steps: its trainable parameters, or its parts of divided buckets."""
        parameters = [Stepped(parameter, name in self._exempt) for name, parameter in self._undivided(group).items()]
        divided = (bucket for bucket in self.divided.values() if bucket.group == group)
        return parameters + [Stepped(run.tensor, run.exempt) for bucket in divided for run in bucket.runs]

    def _undivided(self, group: str) -> dict[str, Tensor]:
        """The trainable parameters of a group that no divided bucket holds."""
        return {
            name: parameter
            for name, parameter in self.parameters.items()
            if name not in self._divided_in and self._held[name].trainable and self._held[name].group == group
        }

    def squared_norm(self) -> Tensor:
        """The sum of the squares of the gradients that this rank counts (`counted_by`), as one float64."""
        parts = []
        for part in self._counts:
            number, first = part.bucket.number, 0
            if number in self.divided:
                first = part.bucket.group.index(self.rank) * part.bucket.chunk_elements
            parts.append(self.summed_gradient(number)[part.start - first : part.stop - first])
        return squared_norm(parts, self.device)

    def clip_gradients(self, squared: Tensor) -> None:
        """Scale the gradients that this rank updates with, where the norm of all is above the recipe's `clip_norm`."""
        assert self.recipe.clip_norm is not None, "the plan clips gradients, and the recipe gives no norm"
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        self.gradient_norm = squared.sqrt() / scale
        scale_to_norm([self.summed_gradient(number) for number in self.buckets], self.gradient_norm, self.recipe.clip_norm)

    def optimizer_step(self, group: str = "") -> None:
        """Update one group of parameters, then zero its buckets for the next step. The first group looks for an overflow."""
        if group == next(iter(self.updates.optimizers)):
            self._skipped = self.overflowed()
        if not self._skipped:
            self.updates.step(group)
        for flat in self._zeroed[group]:
            flat.zero_()

    def overflowed(self) -> bool:
        """With a scaled loss: divide the gradients by the scale, and agree with all ranks of the plan on whether this step is
        skipped and on the next scale. Every rank calls it once per step, those without parameters too."""
        if self.loss_scale is None:
            return False
        flag = overflow_flag(self.buckets.values(), self.device)
        self.agree(flag)
        skipped = bool(flag.item() > 0)
        if not skipped:
            for flat in self.buckets.values():
                flat.mul_(1.0 / self.loss_scale.scale)
        self.loss_scale = self.loss_scale.after(skipped)
        return skipped

    def buffers(self) -> dict[str, Tensor]:
        names = {name for entry in self.runnables.values() for name in entry.buffer_names}
        return {name: tensor for name, tensor in self.module.named_buffers() if name in names}

    def state(self) -> RankState:
        """This rank's part of the whole state: what it is the first to hold of weights and optimizer state; all its buffers."""
        weights: dict[str, Tensor] = {}
        optimizer: dict[str, Mapping[str, Any]] = {}
        fragments: dict[str, dict[str, Fragment]] = {"weights": {}, "buffers": self._buffer_fragments(), "optimizer": {}}

        def add(name: str, fragment: Fragment, weight: Tensor | None, state: Mapping[str, Any]) -> None:
            if weight is not None:
                weights[name], fragments["weights"][name] = weight, fragment
            if state:
                optimizer[name], fragments["optimizer"][name] = state, fragment

        for bucket in self.layout.gathered_buckets(self.rank):
            if bucket.family.first_alike(place := bucket.number - bucket.family.begin) != place:
                continue  # the first sharding group contributes it
            divided = self.divided.get(bucket.number)
            if bucket.group[0] == self.rank and (divided is None or divided.stage < 3):
                for held in bucket.parameters:
                    state = self.held_state(held.name)[1] if divided is None else {}
                    add(held.name, fragment_of(held), self.parameters[held.name].data, state)
            if divided is not None:
                states = [self.updates.state_of(run.tensor, divided.group) for run in divided.runs]
                for name, (fragment, span) in divided.parts.items():
                    state = states[divided.run_of(name)] if states else {}
                    weight_part = divided.chunk.data[span] if divided.stage >= 3 else None
                    add(name, fragment, weight_part, divided.state_of(name, state) if state else {})
        for held in self.layout.frozen[self.rank]:
            add(held.name, fragment_of(held), self.parameters[held.name].data, {})
        progress = {} if self.loss_scale is None else {LOSS_SCALE: self.loss_scale.to_tensor()}
        return RankState(weights=weights, buffers=self.buffers(), optimizer=optimizer, fragments=fragments, progress=progress)

    def load(self, state: RankState) -> None:
        """Take this rank's parts of *whole* weights, buffers and optimizer state, by name; a name without state starts anew.
        Raises ExecutionError where a name is missing or has another shape."""
        restore_tensors({name: self.parameters[name] for name in self.parameters if name not in state.weights}, {})
        for name in self.parameters:
            self.load_parameter(name, state.weights[name], state.optimizer.get(name, {}))
        self.load_buffers(state.buffers)
        if self.loss_scale is not None and LOSS_SCALE in state.progress:
            self.loss_scale = self.loss_scale.from_tensor(state.progress[LOSS_SCALE])
        self.finish_loading()

    def load_parameter(self, name: str, weight: Tensor, state: Mapping[str, Any]) -> None:
        """Take this rank's part of one whole parameter and of its optimizer state; `finish_loading` hands the latter on. The
        arrays of the state may become the optimizer's own. Step counters are copied: of parameters that were updated together
        they can be one tensor, which would then be counted up once for each."""
        held = self._held[name]
        state = dict(state)
        master = state.pop(MASTER, None)
        if self.recipe.ema is None:
            state.pop(EMA, None)
        if self.updates.has_masters and held.trainable:
            state[MASTER] = (weight if master is None else master).float()
        elif master is not None:
            weight = master  # finer than what was rounded
        state = {
            key: value.clone() if isinstance(value, Tensor) and not is_per_element(value, key) else value
            for key, value in state.items()
        }
        if held.part is not None:
            part, shard, ways = held.part, held.shard, held.ways
            weight = piece(weight, part, shard, ways)
            state = {
                key: piece(value, part, shard, ways) if is_per_element(value, key) else value for key, value in state.items()
            }
        number = self._divided_in.get(name)
        if number is not None and self.divided[number].stage >= 3:
            self.divided[number].load_weight(name, weight)
        else:
            restore_tensors({name: self.parameters[name]}, {name: weight})
        if number is None:
            self._loaded[name] = state
        elif held.trainable and name in self.divided[number].parts:
            divided = self.divided[number]
            divided.add_state(self._loaded.setdefault(_chunk_name(number, divided.run_of(name)), {}), name, state)

    def load_buffers(self, whole: Mapping[str, Tensor]) -> None:
        buffers = dict(whole)
        for name, fragment in self._buffer_fragments().items():
            buffers[name] = piece(buffers[name], fragment.part, fragment.shard, fragment.ways)
        restore_tensors(self.buffers(), buffers)

    def finish_loading(self) -> None:
        states, self._loaded = self._loaded, {}
        for group in self.updates.optimizers:
            named = self._undivided(group)
            for number, divided in self.divided.items():
                if divided.group == group:
                    named.update({_chunk_name(number, place): run.tensor for place, run in enumerate(divided.runs)})
            self.updates.restore(group, named, states)

    def held_state(self, name: str) -> tuple[Tensor, dict[str, Any]]:
        """The weight and optimizer state of a parameter that this rank holds undivided, whoever contributes it. The state is
        empty before the first step and of a frozen parameter."""
        held, parameter = self._held[name], self.parameters[name]
        return parameter.data, self.updates.state_of(parameter, held.group) if held.trainable else {}

    def _buffer_fragments(self) -> dict[str, Fragment]:
        """Which of this rank's buffers are pieces, and of what."""
        fragments: dict[str, Fragment] = {}
        shard = self.layout.plan.shard_of_rank(self.rank)
        for name in self.runnables:
            placement = self.layout.placement[name]
            if placement.kind == "shard":
                for part in self.layout.model.component(name).sharding(placement.rule).buffers:
                    fragments[part.name] = piece_of(part, shard % placement.ways, placement.ways)
        return fragments

    def resident_tensors(self) -> dict[str, list[Tensor]]:
        parts = [divided.chunk for divided in self.divided.values()]
        return {
            "parameters": [*self.parameters.values(), *parts],
            "gradients": list(self.buckets.values()),
            "optimizer_state": self.updates.resident_tensors(),
            "buffers": list(self.buffers().values()),
            **{line: tensors() for line, tensors in self.also_resident.items()},
        }


HOST = torch.device("cpu")
"""Where modules are built: their code runs there whatever device trains them, and a GPU may be smaller than the model."""

LOSS_SCALE = "loss_scale"
"""Name of the loss scale in a checkpoint."""


def _chunk_name(bucket: int, run: int) -> str:
    """A name no parameter has: the optimizer knows a run of a divided bucket's part as one parameter."""
    return f"bucket {bucket} run {run}"


def seeded_module(spec: ModelSpec, seed: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The module in training mode with weights that depend on the seed alone. Raises ModelError: complex parameters."""
    torch.manual_seed(seed)
    module = build_module(spec)
    check_real(module)

    def cast(tensor: Tensor) -> Tensor:
        """Cast like `Module.double`: `Module.to` would drop the imaginary part of complex buffers."""
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else tensor.dtype)

    module._apply(cast)  # type: ignore[no-untyped-call]
    return module.train()


Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def _recordings(
    spec: ModelSpec, layout: PlanIndex, components: Sequence[str], numerics: TorchNumerics, device: torch.device
) -> tuple[dict[int, Shapes], dict[str, CallProgram]]:
    """Shape and dtype of every value, by samples: of the whole microbatch and of what `components` see; and their programs."""
    microbatch = layout.plan.microbatch_samples
    granularity = layout.model.granularity
    programs = {
        samples: recorded_programs(spec, samples, granularity, numerics.weights, str(device), numerics.autocast)
        for samples in dict.fromkeys([microbatch, *(layout.local_samples(name) for name in components)])
    }
    check_names(layout.model, programs[microbatch])
    shapes = {
        samples: {
            value: (program.tensors[slot].shape, program.tensors[slot].dtype)
            for program in recorded.values()
            for value, slot, _ in (*program.inputs, *program.outputs)
        }
        for samples, recorded in programs.items()
    }
    return shapes, {name: programs[layout.local_samples(name)][name] for name in components}


@lru_cache(maxsize=32)
def recorded_programs(
    spec: ModelSpec, samples: int, granularity: str, dtype: torch.dtype, device: str, autocast: torch.dtype | None = None
) -> dict[str, CallProgram]:
    """The recorded components of a model in training mode; recorded once per set of arguments. The weights take no memory of
    `device`, unless control flow follows an example: that one is computed there. samples: of one microbatch."""
    place, flow = torch.device(device), spec.control_flow
    module = seeded_module(spec, 0, dtype, place if follows_example(flow) else HOST)
    if not follows_example(flow) and place != HOST:
        move_hollow(module, place)
    inputs, _ = example_batch(spec, samples, dtype=dtype, device=device)
    args, kwargs = interface_of(spec).arguments(inputs)
    with TorchNumerics(autocast=autocast).computing(place):
        runnables = record(module, args or kwargs, granularity=granularity, loss=loss_of(spec), control_flow=flow)
    return {entry.name: entry.program for entry in runnables}
