"""One run of a job on one rank: its program, its data, where it stands, and what it contributes to a checkpoint."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from parsim.data import dataset_for
from parsim.data.blocks.exchange import available_bytes
from parsim.data.samples import Samples, train_and_validation
from parsim.data.shards import training_order
from parsim.errors import DivergedError, ExecutionError
from parsim.execute.checkpoint import checkpoint
from parsim.execute.checkpoint.reshard import reshard
from parsim.execute.cuda.driver import TorchCudaDriver
from parsim.execute.cuda.faults import (
    as_the_device_says,
    checkpoint_text,
    failed_assertion,
    is_failed_assertion,
    is_lost_device,
    is_out_of_memory,
    lost_device,
    out_of_memory,
)
from parsim.execute.cuda.gpu import STAGED, MemoryUse, counters_of, sharing
from parsim.execute.cuda.streams import CudaStreams
from parsim.execute.job import RunSpec
from parsim.execute.loading import Loader
from parsim.execute.measurement import RankRecord
from parsim.execute.mixing import MixingRounds, StaleStage, is_message, mean_groups
from parsim.execute.numerics import numerics_of
from parsim.execute.operations import StepWatch
from parsim.execute.optimizer import LearningRates
from parsim.execute.processes.exchange import default_device, gather_values, meet
from parsim.execute.processes.group import ProcessPlace, Stream, StreamLink, make_groups, open_links
from parsim.execute.processes.heartbeat import Doing, pulse
from parsim.execute.runtime import RankProgram, required_groups, required_links
from parsim.execute.stage import LOSS_SCALE, StageReplica, recorded_programs
from parsim.execute.streams import Streams, TaskTime, ThreadStreams
from parsim.model.formats import number_format
from parsim.model.trace.memory import LiveBytes
from parsim.plans.plan import Plan
from parsim.program.lower import lower, step_graphs
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import Task, TaskGraph
from parsim.work import Compute, Phase

MOVING = ("inputs", "receive_buffers")
"""Lines of tensors that wait to be read: read by a forward, they are among its activations."""

PASSING = ("workspace", "unsharded")
"""Lines that are predicted for the fullest moment, not for the end of a forward; here both are called workspace."""


class LineWatch(StepWatch):
    """Counts the peak of live tensors, in the lines in which `parsim.predict.memory` predicts it: those alive at the end of
    that forward at which most is alive, what a step keeps before a backward lets go of it. `workspace` is by how much the
    fullest moment of the step exceeds that, whenever it comes.

    live: counts while it is open. lines: bytes per line at the fullest end of a forward so far.
    """

    def __init__(self) -> None:
        self.live = LiveBytes(moving=MOVING)
        self.lines: dict[str, int] = {}

    def begins(self, task: Task) -> None:
        self.live.line = "activations" if _is_forward(task) else "workspace"

    def ends(self, task: Task) -> None:
        if _is_forward(task) and self.live.current_bytes > sum(self.lines.values()):
            self.lines = self.live.by_line()

    def loading(self) -> None:
        self.live.line = "inputs"

    def loaded(self, tensor: Tensor) -> None:
        self.live.track(tensor, "inputs")

    def receiving(self) -> None:
        self.live.line = "receive_buffers"

    def received(self, tensor: Tensor) -> None:
        self.live.track(tensor, "receive_buffers")

    def resized(self, tensor: Tensor) -> None:
        self.live.track(tensor, "unsharded")

    def peak_lines(self) -> dict[str, int]:
        """Bytes per line; they add up to the peak."""
        lines = {line: size for line, size in self.lines.items() if line not in PASSING}
        return {**lines, "workspace": self.live.peak_bytes - sum(lines.values())}


@contextmanager
def watching(stage: StageReplica) -> Iterator[LineWatch]:
    """A watch that counts, with what is alive on a CPU rank between steps."""
    watch = LineWatch()
    with watch.live:
        for line, tensors in stage.resident_tensors().items():
            for tensor in tensors:
                watch.live.track(tensor, line)
        yield watch


def _is_forward(task: Task) -> bool:
    return isinstance(task.work, Compute) and task.work.phase is Phase.FORWARD


T = TypeVar("T")


def built_at_once(free_bytes: int | None, *, whole_bytes: int, kept_bytes: int, ranks: int) -> int:
    """How many of the ranks of a host may build at once; at least one, which is all that can be tried. free_bytes: of the host;
    None: unknown. whole_bytes: of the whole module, which a rank has while it builds. kept_bytes: what a rank keeps of it
    there."""
    if free_bytes is None or whole_bytes <= 0:
        return ranks
    return max(1, min(ranks, (free_bytes - ranks * kept_bytes) // whole_bytes))


def in_turns(place: ProcessPlace, build: Callable[[], T], *, whole_bytes: int, kept_bytes: int) -> T:
    """What `build` returns: ranks of a host build at once, or in turns where its memory does not hold all of their modules
    (`built_at_once`). Every rank calls it; `build` calls no collective."""
    if place.world_size == 1:
        return build()
    ranks = place.local_world_size
    here = built_at_once(available_bytes(), whole_bytes=whole_bytes, kept_bytes=kept_bytes, ranks=ranks)
    everyone = gather_values([here, ranks])
    at_once = min(count for count, _ in everyone)
    turns = -(-max(count for _, count in everyone) // at_once)
    if turns == 1:
        return build()
    built: list[T] = []
    for turn in range(turns):
        if place.local_rank // at_once == turn:
            built.append(build())
        meet()
    return built[0]


RATE = "learning_rate"
"""Name of a schedule's state in a checkpoint."""
OTHERS = (RATE, LOSS_SCALE)
"""Names of progress in a checkpoint that are read where they belong; the rest are notes of the training."""
RECORDED_STEPS = 64
"""Task times are kept of fewer steps than this per run, spread evenly over it."""


FILLING = 2
"""Steps in which the allocator of a GPU takes from the driver what a step needs, once it has given back all that it had."""


class ProcessGroups:
    """The process groups of this launch, made as plans ask for them; `mine` are this rank's. Every rank asks for the same ones
    in the same order."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.mine: dict[Stream, dist.ProcessGroup] = {}
        self._made: set[Stream] = set()
        self._opened: set[StreamLink] = set()

    def make(self, graph: TaskGraph, precision: str, layout: PlanIndex | None = None) -> None:
        """Make the groups that the graph needs in that precision and that do not exist yet. Links of NCCL are open then.
        layout: of the plan, whose steps may need more than the one of `graph`."""
        needed, links = required_groups(graph), required_links(graph)
        if layout is not None and layout.plan.synchronisation.mixes:
            for other in step_graphs(layout):
                needed += required_groups(other)
                links += required_links(other)
            needed = list(dict.fromkeys([*needed, *mean_groups(layout)]))
        if dist.get_backend() == "gloo":
            needed = [stream for stream in needed if not is_message(stream)]
        if number_format(precision).scales_loss:
            needed.append(agreement(graph.world_size))
        new = [stream for stream in needed if stream not in self._made]
        self._made.update(new)
        self.mine.update(make_groups(new, timeout_s=self._timeout_s))
        if dist.get_backend() == "nccl":
            closed = [link for link in dict.fromkeys(links) if link not in self._opened]
            self._opened.update(closed)
            open_links(closed, self.mine, default_device())


def agreement(world_size: int) -> Stream:
    """The stream on which all ranks of a plan agree whether any gradient has overflowed."""
    return "scale", tuple(range(world_size))


def agreeing(group: dist.ProcessGroup) -> Callable[[Tensor], None]:
    """How the ranks of a group find the largest of their flags. The host waits for all of them, and for its device."""

    def agree(flag: Tensor) -> None:
        with pulse().waiting():
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
            flag.item()

    return agree


def built(
    run: RunSpec, layout: PlanIndex, graph: TaskGraph, place: ProcessPlace, groups: ProcessGroups, *, steps: int
) -> RankRun | None:
    """One run of the job on this rank; None where its plan has no such rank. Every rank calls it. Ranks of a host build in
    turns where its memory does not hold the whole module once for each of them."""
    has_part = place.rank < run.plan.world_size
    widening = max(1, numerics_of(run, torch.device(place.device)).weights.itemsize // torch.float32.itemsize)
    on_host = layout.rank_parameters(place.rank) if has_part and place.device == "cpu" else ()
    held_bytes = sum(parameter.size_bytes for parameter in on_host)

    def build() -> RankRun | None:
        pulse().begin(Doing.PREPARING, "building the model")
        return RankRun(run, layout, graph, place, groups.mine, steps=steps) if has_part else None

    gradients_too = 2
    kept_bytes = gradients_too * widening * held_bytes
    return in_turns(place, build, whole_bytes=widening * layout.model.parameter_bytes, kept_bytes=kept_bytes)


class RankRun:
    """One run of the job on this rank: its program, its data, and where it stands. own_loss: of the last step, the sum over
    this rank's samples as a part of the whole batch; None: it had none."""

    def __init__(
        self,
        run: RunSpec,
        layout: PlanIndex,
        graph: TaskGraph,
        place: ProcessPlace,
        groups: Mapping[Stream, dist.ProcessGroup],
        *,
        steps: int,
    ) -> None:
        began = time.perf_counter()
        device = torch.device(place.device)
        numerics = numerics_of(run, device)
        self.run = run
        self.checkpoints: Path | None = None
        self.layout = layout
        self.stage = StageReplica(
            run.model,
            layout,
            place.rank,
            optimizer=run.optimizer,
            learning_rate=run.learning_rate,
            dtype=numerics.weights,
            seed=run.seed,
            device=device,
            numerics=numerics,
            recipe=run.recipe,
        )
        self.steps = steps
        self.notes: dict[str, Tensor] = {}
        if numerics.loss_scale is not None:
            self.stage.agree = agreeing(groups[agreement(run.plan.world_size)])
        self.streams = make_streams(device)
        self.mixing: MixingRounds | None = None
        if run.plan.synchronisation.mixes:
            self.mixing = MixingRounds(
                self.stage, groups, lambda buffer: self.program.watch.received(buffer), self.streams.used
            )
            self.stage.also_resident["outer_state"] = self.mixing.resident_tensors
        self.stale: StaleStage | None = None
        if run.plan.synchronisation.is_stale:
            self.stale = StaleStage(self.stage)
            self.stage.also_resident["stashed_weights"] = self.stale.copies
        self.program = RankProgram(graph, self.stage, self.streams, groups, self.mixing, self.stale)
        self.data = run_dataset(run, "train")
        self.order = order = training_order(
            self.data, run.plan.global_batch, run.seed, shards=run.shards, replicas=run.plan.mesh.dp
        )
        self.rate: LearningRates | None = None
        if run.recipe.schedule is not None:
            self.rate = LearningRates(run.optimizer, run.learning_rate, run.recipe, steps=steps, order=order)
        self.loader = Loader(
            self.data,
            order,
            layout,
            place.rank,
            dtype=numerics.weights,
            device=device,
            pin=(Tensor.pin_memory if run.pin_memory else torch.clone) if self.streams.loads_ahead else None,
            workers=run.workers,
        )
        self.step_number = 0
        self.own_loss: float | None = None
        self._seen, self._every = 0, 1
        self.record = RankRecord(rank=place.rank)
        self.counters = counters_of(device)
        self.built_s = time.perf_counter() - began

    def switched(self, plan: Plan, place: ProcessPlace, groups: ProcessGroups) -> RankRun:
        """Go on under another plan: weights, optimizer state, buffers, random state, data order and records stay. Every rank
        calls it at the same step."""
        pulse().begin(Doing.PREPARING, "changing the plan")
        layout = PlanIndex(plan, self.layout.model)
        graph = lower(plan, layout.model)
        groups.make(graph, self.run.precision, layout)
        random = checkpoint.rng_state(str(self.stage.device))
        after = built(replace(self.run, plan=plan), layout, graph, place, groups, steps=self.steps)
        assert after is not None, "a change of plan keeps the ranks"
        if self.rate is not None and after.rate is not None:
            after.rate.load(self.rate.state())
        reshard(self.stage, after.stage)
        checkpoint.restore_rng(random, str(self.stage.device))
        after.stage.randomness.go_on(self.stage.randomness.state)
        after.checkpoints, after.notes = self.checkpoints, self.notes
        after.step_number, after.own_loss = self.step_number, self.own_loss
        after.record = replace(self.record, steps=[])
        if after.stale is not None:
            after.stale.restart(after.step_number)
        self.close()
        return after

    def rebuilt_s(self, place: ProcessPlace, groups: ProcessGroups) -> float:
        """Seconds to build this again with warm libraries: what a switch takes beside the moving of weights. A GPU may not hold
        it twice: there it is the seconds of the first build, which warmed libraries up, too."""
        if self.stage.device.type != "cpu":
            return self.built_s
        random = checkpoint.rng_state(str(self.stage.device))
        recorded_programs.cache_clear()  # another plan has other microbatches, whose programs are recorded anew
        again = RankRun(self.run, self.layout, lower(self.run.plan, self.layout.model), place, groups.mine, steps=self.steps)
        again.close()
        checkpoint.restore_rng(random, str(self.stage.device))
        return again.built_s

    def close(self) -> None:
        self.loader.close()
        self.streams.close()
        if self.mixing is not None:
            self.mixing.settle()

    @property
    def learning_rates(self) -> dict[str, float]:
        """Rates of the next step, by group of parameters; "" for those in none."""
        if self.rate is not None:
            return self.rate.of(min(self.step_number, self.steps - 1))
        return {"": self.run.learning_rate, **{group.name: group.learning_rate for group in self.run.recipe.update_groups}}

    def step(self, *, keep: bool) -> None:
        """One training step on the next global batch; `keep` its task times and its loss."""
        pulse().begin(Doing.WORKING, "training", self.step_number + 1)
        if self.rate is not None:
            self.rate.apply(min(self.step_number, self.steps - 1), self.stage.updates.optimizers)
        if self.stale is not None:
            self.stale.begin_step(self.step_number)
        batch = self.loader.batch(self._batch(self.step_number))
        following = self.loader.following(self._batch(self.step_number + 1)) if self.streams.loads_ahead else None
        try:
            script = self.program.script(self.step_number)
            loss, times = self.program.step(batch, following, script=script)
            self.loader.settle()
        except RuntimeError as error:
            explained = self._explained(error)
            if explained is error:
                raise
            raise explained from error
        self.step_number += 1
        counts = self.stage.loss_counts and script.computes and (self.stale is None or self.stale.forward is not None)
        self.own_loss = loss / self.run.plan.global_batch if counts else None
        mean = None if self.own_loss is None else self.own_loss / script.share
        if mean is not None and self.checkpoints is not None and not math.isfinite(mean):
            raise self._diverged(f"the loss of step {self.step_number} is {mean} on rank {self.stage.rank}")
        if keep:
            self.record.losses.append(mean)
            if script.is_first:
                self._sample(times)

    def _sample(self, times: list[TaskTime]) -> None:
        """Keep the task times of every step, then of every second one, of every fourth, ..., as they become too many."""
        if self._seen % self._every == 0:
            self.record.steps.append(times)
        self._seen += 1
        if len(self.record.steps) >= RECORDED_STEPS:
            del self.record.steps[1::2]
            self._every *= 2

    def forget_times(self) -> None:
        self.record.steps.clear()
        self._seen, self._every = 0, 1

    def _batch(self, step: int) -> int:
        """The batch that this rank loads in a step; a decoupled stage that fills loads none, whatever is named."""
        return step if self.stale is None else max(0, self.stale.batch_of(step))

    def save(self, folder: Path, *, keep: int = 2) -> None:
        """Write this rank's part of a checkpoint. Raises DivergedError instead if what it would hold is not finite."""
        pulse().begin(Doing.PREPARING, "writing a checkpoint")
        state = self.state()
        if self.checkpoints is not None:
            trained = {parameter.name for parameter in self.layout.model.parameters if parameter.trainable}
            if problem := checkpoint.not_finite(state, trained):
                raise self._diverged(f"{problem} on rank {self.stage.rank} after step {self.step_number}")
        if self.checkpoints is not None and not self.checkpoints.parent.is_dir():  # writing would make another in its place
            raise ExecutionError(
                f"{self.checkpoints.parent}, the folder of this run, is not there any more: it was moved or removed meanwhile"
            )
        world_size = self.layout.plan.world_size
        checkpoint.save_checkpoint(
            folder, self.step_number, state, seed=self.run.seed, rank=self.stage.rank, world_size=world_size, keep=keep
        )

    def _diverged(self, what: str) -> DivergedError:
        rate = f"{self.run.learning_rate:g}"
        return DivergedError(
            f"training diverged: {what}. Lower training.learning_rate ({rate}), or look at the data and the loss."
        )

    def _explained(self, error: RuntimeError) -> RuntimeError | ExecutionError:
        """What a GPU's failure means for the run; any other error as it is."""
        error = as_the_device_says(error, str(self.stage.device))
        short, asserted = is_out_of_memory(error), is_failed_assertion(error)
        if not short and not asserted and not is_lost_device(error):
            return error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # others wait for the message, so the checkpoint is not read for it
            last = None if self.checkpoints is None else checkpoint.latest_checkpoint(self.checkpoints, digests=False)
        kept = checkpoint_text(None if last is None else last.step)
        rank, device = self.stage.rank, self.stage.device
        if asserted:
            return failed_assertion(rank, f"in step {self.step_number}", error, kept)
        if not short:
            return lost_device(rank, str(device), self.step_number, error, kept)
        held = {}
        for line, tensors in self.stage.resident_tensors().items():
            storages = [tensor.untyped_storage() for tensor in tensors]
            held[line] = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        return out_of_memory(
            rank=rank,
            step=self.step_number,
            predicted=self.run.predicted_memory[rank] if self.run.predicted_memory else {},
            held=held,
            allocated_bytes=sum(held.values()) if self.counters is None else self.counters.allocated_bytes(),
            kept=kept,
        )

    def timed(self, steps: int) -> None:
        cpu, start = time.process_time(), time.perf_counter()
        for _ in range(steps):
            self.step(keep=True)
        self.record.rounds.append((start, time.perf_counter(), steps))
        self.record.cpu_s.append(time.process_time() - cpu)

    def measure_memory(self) -> None:
        """One step under the eyes of the live-bytes counter, and on a GPU some more under those of allocator and driver; their
        times are not kept."""
        with watching(self.stage) as watch:
            self.program.watch = watch
            for _ in range(1 if self.stale is None else 1 + self.stale.filling):  # what waits was made under no watch
                self.step(keep=False)
            self.record.peak_bytes, self.record.memory_lines = watch.live.peak_bytes, watch.peak_lines()
        self.program.watch = StepWatch()
        self.record.memory = MemoryUse(live_bytes=self.record.peak_bytes)
        if self.counters is not None:
            self.counters.forget_peaks()
            for _ in range(FILLING):
                self.step(keep=False)
            self.record.memory = replace(
                self.record.memory,
                allocated_bytes=self.counters.allocated_bytes(),
                reserved_bytes=self.counters.reserved_bytes(),
                driver_bytes=self.counters.driver_bytes(),
            )

    def state(self) -> checkpoint.RankState:
        state = self.stage.state()
        rate = None if self.rate is None else self.rate.state()
        progress = {**state.progress, **self.notes, **({} if rate is None else {RATE: rate})}
        random = {**checkpoint.rng_state(str(self.stage.device)), "cpu": self.stage.randomness.state}
        state = replace(state, progress=progress, rng=random)
        waiting = {} if self.stale is None else self.stale.own_state()
        if self.mixing is None:
            return replace(state, own=waiting) if waiting else state
        mean = self.mixing.mean_weights()
        weights = {name: mean.get(name, value) for name, value in state.weights.items()}
        return replace(state, weights=weights, own={**self.mixing.own_state(), **waiting})

    def resume(self, saved: checkpoint.Checkpoint) -> None:
        """Go on from a checkpoint of any plan of the same model."""
        same = saved.world_size == self.layout.plan.world_size
        names = [*self.stage.parameters, *self.stage.buffers()]
        state = checkpoint.load_state(saved, names, rank=self.stage.rank if same else None)
        self.stage.load(state)
        if self.mixing is not None:
            self.mixing.load_own(state.own)
        if self.stale is not None:
            self.stale.load_own(state.own, saved.step, self.program.run_forward_again, self.loader.batch)
        checkpoint.restore_rng(state.rng, str(self.stage.device))
        if "cpu" in state.rng:
            self.stage.randomness.go_on(state.rng["cpu"])
        self.step_number = saved.step
        self.notes = {name: value for name, value in state.progress.items() if name not in OTHERS}
        if self.rate is not None:
            self.rate.load(state.progress.get(RATE))


def run_dataset(run: RunSpec, split: str) -> Samples:
    """The run's data in the shape its model takes. split: "train", "validation" (with an evaluation) or "test"."""

    def load(name: str) -> Samples:
        return dataset_for(run.model, run.dataset, root=run.data_root, split=name, seed=run.seed)

    looks = run.recipe.evaluation
    if looks is None or split == "test":
        return load(split)
    train, validation = train_and_validation(load, looks.validation, run.seed)
    return validation if split == "validation" else train


def make_streams(device: torch.device) -> Streams:
    if device.type != "cuda" or sharing() == STAGED:  # staged communication blocks whoever asks for it
        return ThreadStreams()
    return CudaStreams(TorchCudaDriver(device))
