"""Seconds of every component, forward and backward, and of the optimizer, taken inside whole training steps of the executor.

Each rank runs the one-rank plan of each model and local batch through the executor's own interpreter, so that caches,
allocator and interpreter are in the state of real training. Visits to (model, batch, active ranks) are interleaved in
rounds, so that a drift of the machine falls on all of them and is seen.

On a GPU a visit begins with steps in a row on one batch, until power and clocks are those of training. Of the last of them the
wall time counts, and the seconds of each computation that was queued before the device began with it. Then come steps in which
each computation is held until it is queued (`calibration.measure.delayed_streams`). They give the seconds of the host that
queues, and those of the device for the computations that it had to wait for in training. The device is idle between them, so
its clocks are higher: these seconds are used only where training leaves it idle, too.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from calibration.measure.delayed_streams import Pausing
from calibration.measure.device import DTYPES, numerics
from calibration.rounds.request import CalibrationRequest
from calibration.rounds.turns import CalibrationSection, Entries, paced
from parsim.data import dataset_for
from parsim.data.samples import BatchOrder, Samples
from parsim.errors import DataError
from parsim.execute.cuda.driver import driver_of, warm_gpu
from parsim.execute.loading import batch_values
from parsim.execute.optimizer import flat_gradients, make_optimizer
from parsim.execute.processes.speed_probe import SpeedProbe
from parsim.execute.rank_run import make_streams
from parsim.execute.runtime import RankProgram
from parsim.execute.stage import StageReplica
from parsim.execute.streams import TaskTime
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.program.lower import lower
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import COMPUTE, TaskGraph

WARM_STEPS, KEPT_STEPS = 1, 2
SUSTAINED_S = 0.4
"""Seconds of steps in a row on a GPU before any counts: several times as long as it takes a power limit to lower the clocks."""
HELD_TRIES = 3
LEARNING_RATE = 1e-5


class StepTimes(NamedTuple):
    """Times of the tasks of one step, and its wall and processor seconds as a whole.

    issue_s: of the host in each computation, by task. hidden: every computation was queued before the device began with it.
    between_s: of the host, from the end of each computation to the beginning of the next. ahead: computations that were queued
        before the device began with them, in a step that was watched.
    """

    tasks: list[TaskTime]
    wall_s: float
    cpu_s: float
    issue_s: Mapping[int, float] = MappingProxyType({})
    hidden: bool = False
    between_s: Sequence[float] = ()
    ahead: frozenset[int] = frozenset()


class GpuStep(NamedTuple):
    """One step thrice: plain, for its wall time; watched, for what the device takes of what is queued ahead; and held."""

    plain: StepTimes
    watched: StepTimes
    held: StepTimes


@dataclass(kw_only=True)
class Case:
    """One model at one local batch on this rank, ready to train step after step.

    Attributes:
        number: of the model in the request. graph: of the one-rank plan. data, order: of the samples, read as in training.
        optimizers: by name, each with separate state over the same parameters; the stage steps with one at a time.
    """

    number: int
    samples: int
    graph: TaskGraph
    program: RankProgram
    stage: StageReplica
    streams: Pausing
    data: Samples
    order: BatchOrder
    dtype: torch.dtype
    optimizers: dict[str, torch.optim.Optimizer | None]
    steps: int = 0

    def batch(self) -> dict[str, Tensor]:
        """The samples of the next step, read as in training."""
        wanted = tuple(self.stage.layout.batch_layouts(0))
        return batch_values(self.data, self.order.indices(self.steps), wanted, self.dtype, self.stage.device)

    @property
    def on_gpu(self) -> bool:
        return self.stage.device.type == "cuda"

    def step(self, *, held: bool = False, watched: bool = False, batch: Mapping[str, Tensor] | None = None) -> StepTimes:
        """One training step on a batch that is on the device, or else reads the next samples. held: each computation is queued
        before the device begins with it, of a GPU alone. watched: see whether it was."""
        streams = self.streams
        streams.holding, streams.watching = held, watched
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        try:
            _, times = self.program.step(lambda _: self.batch() if batch is None else batch)
        finally:
            streams.holding = streams.watching = False
        self.steps += 1
        return StepTimes(
            tasks=times,
            wall_s=time.perf_counter() - start_s,
            cpu_s=time.process_time() - start_cpu_s,
            issue_s=dict(streams.issue_s),
            hidden=held and streams.hidden,
            between_s=tuple(streams.between_s),
            ahead=frozenset(streams.ahead),
        )

    def steps_in_a_row(self, kept: int) -> list[GpuStep]:
        """Times of a GPU: steps as in training, sustained, on one batch, and behind them as many held ones."""
        batch = self.batch()
        begin_s = time.perf_counter()
        while time.perf_counter() - begin_s < SUSTAINED_S:
            self.step(batch=batch)
        plain = [self.step(batch=batch) for _ in range(kept)]
        watched = [self.step(batch=batch, watched=True) for _ in range(kept)]
        held = [self.step(held=True) for _ in range(WARM_STEPS + kept)][WARM_STEPS:]
        return [GpuStep(*steps) for steps in zip(plain, watched, held, strict=True)]

    def load_again_s(self) -> float:
        """Seconds of a load that comes right after another, until its arrays are there."""
        self.batch()
        self._settle()
        begin_s = time.perf_counter()
        self.batch()
        self._settle()
        return time.perf_counter() - begin_s

    def _settle(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.stage.device)


def one_rank_plan(model: Model, samples: int) -> Plan:
    stage = Stage(components=tuple(component.name for component in model.components), ranks=(0,))
    return Plan(strategy="single", mesh=Mesh(), stages=(stage,), global_batch=samples)


def make_case(
    number: int, spec: ModelSpec, model: Model, samples: int, request: CalibrationRequest, device: torch.device
) -> Case:
    """Build and record the model as the executor would for rank 0 of the one-rank plan."""
    plan, dtype = one_rank_plan(model, samples), DTYPES[request.precision]
    stage = StageReplica(
        spec,
        PlanIndex(plan, model),
        0,
        optimizer=request.optimizers[0],
        learning_rate=LEARNING_RATE,
        dtype=dtype,
        seed=request.seed,
        device=device,
        numerics=numerics(request.precision),
    )
    graph, streams = lower(plan, model), pausing_streams(device)
    data = samples_for(spec, request.seed)
    return Case(
        number=number,
        samples=samples,
        graph=graph,
        program=RankProgram(graph, stage, streams, {}),
        stage=stage,
        streams=streams,
        data=data,
        dtype=dtype,
        optimizers={
            request.optimizers[0]: stage.updates.optimizers.get(""),
            **{name: stage.updates.another(name, LEARNING_RATE) for name in request.optimizers[1:]},
        },
        order=BatchOrder(n=len(data), global_batch=samples, seed=request.seed),
    )


def pausing_streams(device: torch.device) -> Pausing:
    """Streams of this device on which computation can be held."""
    return Pausing(make_streams(device), driver_of(device))


def samples_for(spec: ModelSpec, seed: int) -> Samples:
    """Digits, which are resized as they are read, for a model that takes them; else made-up samples."""
    try:
        return dataset_for(spec, "digits", root=None, seed=seed)
    except DataError:
        return dataset_for(spec, "synthetic", root=None, seed=seed)


def sweep_record(case: Case, step: StepTimes) -> dict[str, Any]:
    """Seconds of every task of the graph, the median gap between tasks, and what else the step took."""
    seconds = _task_seconds(case, step)
    computed = sorted((entry for entry in step.tasks if entry.stream == COMPUTE), key=lambda entry: entry.ready_s)
    gaps = [later.ready_s - earlier.end_s for earlier, later in itertools.pairwise(computed)]
    gap_s = max(0.0, statistics.median(gaps)) if gaps else 0.0
    rest_s = max(0.0, step.wall_s - sum(seconds) - gap_s * len(gaps))
    return {"seconds": seconds, "gap_s": gap_s, "rest_s": rest_s, "wall_s": step.wall_s, "cpu_s": step.cpu_s}


def gpu_sweep_record(case: Case, steps: GpuStep) -> dict[str, Any]:
    """The sweep of a GPU, and beside it `issue_s`, the host's seconds of each computation.

    A computation takes what the device took in training if it was queued ahead there, else what it took when it was held. Gaps
    are the host's: a device with computations in its queue goes on without one. So of a step a computation takes its seconds,
    or what the host takes for it with the gap, whichever is longer; the rest of the wall time is neither. The batch of that
    step is on the device, and reading one is timed in the held step.
    """
    plain, watched, held = steps
    seconds, sustained = _task_seconds(case, held), _task_seconds(case, watched)
    for task in watched.ahead:
        seconds[task] = sustained[task]
    issue_s = [held.issue_s.get(task, 0.0) for task in range(len(seconds))]
    gap_s = max(0.0, statistics.median(plain.between_s)) if plain.between_s else 0.0
    taken = (max(own, host_s + gap_s) for own, host_s in zip(seconds, issue_s, strict=True) if host_s)
    rest_s = max(0.0, plain.wall_s - sum(taken))
    times = {"seconds": seconds, "gap_s": gap_s, "rest_s": rest_s, "wall_s": plain.wall_s, "cpu_s": plain.cpu_s}
    return {**times, "issue_s": issue_s, "hidden": held.hidden, "ahead": sorted(watched.ahead)}


def _task_seconds(case: Case, step: StepTimes) -> list[float]:
    """By task; 0 of one that did not run here."""
    seconds = [0.0] * len(case.graph.tasks)
    for entry in step.tasks:
        seconds[entry.task] = entry.end_s - entry.ready_s
    return seconds


# --- optimizers over parts of a model ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCase:
    """An optimizer over some of a model's arrays, as a pipeline stage holds them; `step` updates and zeroes."""

    optimizer: str
    elements: int
    tensors: int
    step: Callable[[], None]


def optimizer_cases(stage: StageReplica, optimizers: Sequence[str]) -> list[OptimizerCase]:
    """Every optimizer over all arrays, the first third of them, the others, and half the elements in one flat array (ZeRO).

    Four different steps tell what each takes from what each array and each element does.
    """
    shapes: list[tuple[int, ...]] = [tuple(parameter.shape) for parameter in stage.parameters.values()]
    example = next(iter(stage.parameters.values()), None)
    if example is None:
        return []
    third, elements = len(shapes) // 3, sum(parameter.numel() for parameter in stage.parameters.values())
    parts = [part for part in (shapes, shapes[:third], shapes[third:] if third else [], [(-(-elements // 2),)]) if part]
    return [_optimizer_case(name, part, example) for name in optimizers for part in parts]


def _optimizer_case(name: str, shapes: Sequence[tuple[int, ...]], example: Tensor) -> OptimizerCase:
    parameters = [torch.nn.Parameter(torch.ones(shape, dtype=example.dtype, device=example.device)) for shape in shapes]
    flat = flat_gradients(parameters)
    optimizer = make_optimizer(name, parameters, LEARNING_RATE)

    def step() -> None:
        optimizer.step()
        flat.zero_()

    elements = sum(parameter.numel() for parameter in parameters)
    return OptimizerCase(optimizer=name, elements=elements, tensors=len(parameters), step=step)


# --- rounds -----------------------------------------------------------------------------------------------------------


def component_section(
    cases: Sequence[Case],
    levels: Mapping[int, dist.ProcessGroup | None],
    request: CalibrationRequest,
    device: torch.device,
    probe: SpeedProbe | None,
    host: SpeedProbe | None = None,
) -> CalibrationSection:
    """Whole steps of every case, and optimizers over parts of its model. levels: group by the number of ranks that compute at
    once (ranks 0..k-1), None on the others, which wait in a barrier."""
    parts = {number: optimizer_cases(stage, request.optimizers) for number, stage in _stages(cases).items()}

    def measure(number: int) -> Entries:
        found: Entries = {"sweeps": [], "optimizers": []}
        warm_gpu(device, DTYPES[request.precision])
        with contextlib.closing(pausing_streams(device)) as streams:
            for turn, case in enumerate(cases, start=number + 1):
                choices = parts[case.number]
                chosen = choices[turn % len(choices)] if choices else None
                inside = request.optimizers[turn % len(request.optimizers)]
                chosen_optimizer = case.optimizers[inside]
                if chosen_optimizer is not None:
                    case.stage.updates.optimizers[""] = chosen_optimizer
                for entry in _visit(case, levels, chosen, streams, probe, host):
                    what = {"model": case.number, "samples": case.samples}
                    found[entry.pop("kind")].append({**what, "optimizer": inside, **entry})
        return found

    return CalibrationSection(
        name="components",
        budget_s=request.budgets_s["components"],
        min_rounds=request.min_rounds,
        max_rounds=request.max_rounds,
        measure=measure,
    )


def _stages(cases: Sequence[Case]) -> dict[int, StageReplica]:
    return {case.number: case.stage for case in reversed(cases)}


def _visit(
    case: Case,
    levels: Mapping[int, dist.ProcessGroup | None],
    chosen: OptimizerCase | None,
    streams: Pausing,
    probe: SpeedProbe | None,
    host: SpeedProbe | None,
) -> Iterator[dict[str, Any]]:
    """Steps of one case: with every rank active, then one at each lower level."""
    for active in sorted(levels, reverse=True):
        dist.barrier()
        group = levels[active]
        if group is not None:
            kept = KEPT_STEPS if active == max(levels) else 1
            dist.barrier(group=group)
            yield from paced([partial(_steps, case, active, group, chosen, streams, kept)], probe, host)


def _steps(
    case: Case,
    active: int,
    group: dist.ProcessGroup,
    chosen: OptimizerCase | None,
    streams: Pausing,
    kept: int,
) -> list[dict[str, Any]]:
    """Those that are kept, after some that warm the caches, then the chosen part of an optimizer; `kind` says which."""
    found = []
    if case.on_gpu:
        dist.barrier(group=group)
        for steps in case.steps_in_a_row(kept):
            record = gpu_sweep_record(case, steps)
            found.append({"kind": "sweeps", "ranks_active": active, **record, "load_again_s": case.load_again_s()})
    else:
        for number in range(WARM_STEPS + kept):
            dist.barrier(group=group)
            step = case.step()
            if number >= WARM_STEPS:
                record = sweep_record(case, step)
                found.append({"kind": "sweeps", "ranks_active": active, **record, "load_again_s": case.load_again_s()})
    if chosen is not None:
        what = {"optimizer": chosen.optimizer, "elements": chosen.elements, "tensors": chosen.tensors}
        found.append({"kind": "optimizers", "ranks_active": active, **what, **_timed(streams, chosen, group)})
    dist.barrier(group=group)
    return found


def _timed(streams: Pausing, chosen: OptimizerCase, group: dist.ProcessGroup) -> dict[str, float]:
    """Seconds of one step right after training steps of the same model have displaced its arrays from the caches. On a GPU also
    those of the host (`issue_s`), once it has queued the step before the device began with it, or never can."""
    dist.barrier(group=group)
    for _ in range(HELD_TRIES):
        streams.holding = True
        streams.compute(0, COMPUTE, [], chosen.step)
        (entry,) = streams.finish()
        if streams.hidden:
            break
    seconds = {"seconds": entry.end_s - entry.ready_s}
    return {**seconds, "issue_s": streams.issue_s[0]} if streams.holds else seconds
