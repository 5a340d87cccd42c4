"""One training step four ways, from the same weights on the same samples: executor, eager torch, CUDA graph, torch.compile.

All of them hold the batch on the device, divide the loss by the batch, and step the same foreach optimizer. They differ in how
the step is issued and in nothing else. None loads samples: predictions leave loading out, too.

In every round each program has a turn, the executor two, in an order drawn for the round: one step that is not timed (unless
steps are long), then some that are, between two waits for the device. What the machine does meanwhile falls on all alike, and
the executor's two turns say how far two measurements of one program differ (A/A).
"""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from questions import GRANULARITY, LEARNING_RATE, Question, Scope
from torch import Tensor

from parsim.execute.cuda.driver import DeviceClock
from parsim.execute.job import RunSpec
from parsim.execute.numerics import numerics_of, set_switches
from parsim.execute.operations import StepWatch
from parsim.execute.optimizer import make_optimizer
from parsim.execute.rank_run import make_streams, watching
from parsim.execute.runtime import RankProgram
from parsim.execute.stage import StageReplica, seeded_module
from parsim.execute.streams import TaskTime
from parsim.model.build import example_batch, loss_of
from parsim.model.load import load_model
from parsim.model.objective import LOSSES
from parsim.plans.plan import Plan
from parsim.program.lower import lower
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import work_text
from tools.gpu.device import SpoiledProcessError, UnsupportedError
from tools.gpu.launches import capturing
from tools.gpu.programme import failure

SEED = 0
DTYPE = torch.float32
HALF_TYPES = {"amp_bf16": torch.bfloat16}
"""By precision. amp_fp16 needs a scaled loss, which a plain eager step has not."""

GRAPH_WARM_STEPS = 3
"""Before a capture, on a stream of its own, as PyTorch asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Attributes: step: one training step, which may still run on the device when it returns. loss: of the last step."""

    name: str
    step: Callable[[], None]
    loss: Callable[[], float]
    close: Callable[[], None] = lambda: None


class ExecutorStep:
    """The step as parsim's executor runs it, in this process, with the one rank there is."""

    def __init__(self, question: Question, device: torch.device) -> None:
        set_switches(tf32=question.precision == "tf32")
        model = load_model(question.spec, granularity=GRANULARITY)
        plan = question.plan(tuple(component.name for component in model.components))
        numerics = numerics_of(run_of(question, plan), device)
        self.stage = StageReplica(
            question.spec,
            PlanIndex(plan, model),
            0,
            optimizer=question.optimizer,
            learning_rate=LEARNING_RATE,
            dtype=numerics.weights,
            seed=SEED,
            device=device,
            numerics=numerics,
        )
        self.streams = make_streams(device)
        self.graph = lower(plan, model)
        self.program = RankProgram(self.graph, self.stage, self.streams, {})
        given, target = example_batch(question.spec, question.batch, seed=SEED, dtype=DTYPE, device=device)
        (inputs,) = given.values()
        size = question.batch // question.microbatches
        self.parts: list[Mapping[str, Tensor]] = [
            {"input:0": inputs[first : first + size], "target": target[first : first + size]}
            for first in range(0, question.batch, size)
        ]
        self.batch = question.batch
        self.last_loss = float("nan")
        self.last_times: list[TaskTime] = []

    def step(self) -> None:
        total, self.last_times = self.program.step(lambda microbatch: self.parts[microbatch])
        self.last_loss = total / self.batch

    def task_seconds(self, steps: int = 5) -> list[tuple[str, float]]:
        """Every task of a step with its median seconds, in the order of the graph: what each part of a prediction is compared
        with."""
        seconds: dict[int, list[float]] = {}
        for _ in range(steps):
            self.step()
            for entry in self.last_times:
                seconds.setdefault(entry.task, []).append(entry.end_s - entry.ready_s)
        return [(work_text(self.graph.tasks[task].work), statistics.median(found)) for task, found in sorted(seconds.items())]

    def memory_lines(self) -> dict[str, int]:
        """Bytes per line at the peak of one step, counted operator by operator; the step takes longer meanwhile."""
        with watching(self.stage) as watch:
            self.program.watch = watch
            try:
                self.step()
            finally:
                self.program.watch = StepWatch()
            return watch.peak_lines()

    def as_program(self) -> Program:
        return Program(name="executor", step=self.step, loss=lambda: self.last_loss, close=self.streams.close)


class EagerStep:
    """The same step as a PyTorch user writes it. `run` is the module, or what torch.compile made of it."""

    def __init__(self, question: Question, device: torch.device, *, compiled: bool = False, cache_casts: bool = True) -> None:
        set_switches(tf32=question.precision == "tf32")
        self.cache_casts = cache_casts
        self.module = module = seeded_module(question.spec, SEED, DTYPE, device)
        self.optimizer = make_optimizer(question.optimizer, module.parameters(), LEARNING_RATE)
        self.run: Callable[..., Any] = torch.compile(module) if compiled else module
        self.kind, self.batch = loss_of(question.spec), question.batch
        self.precision, self.device = question.precision, device
        given, self.target = example_batch(question.spec, question.batch, seed=SEED, dtype=DTYPE, device=device)
        self.inputs = tuple(given.values())
        self.last: Tensor | None = None

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(self.precision, self.device, cache=self.cache_casts):
            self.last = LOSSES[self.kind].total(self.run(*self.inputs), self.target) / self.batch
        self.last.backward()
        self.optimizer.step()

    def loss(self) -> float:
        return float("nan") if self.last is None else float(self.last.detach())

    def as_program(self, name: str = "eager") -> Program:
        return Program(name=name, step=self.step, loss=self.loss)


def graphed(question: Question, device: torch.device) -> Program:
    """The eager step, captured whole and replayed.

    Raises: UnsupportedError without CUDA, SpoiledProcessError if the capture fails.
    """
    if device.type != "cuda":
        raise UnsupportedError("CUDA graphs need CUDA")
    eager = EagerStep(question, device, cache_casts=False)  # a cached cast would not be part of the capture
    for group in eager.optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        warm_up(eager)
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    eager.last = None  # with what its backward kept of the side stream
    eager.optimizer.zero_grad(set_to_none=True)
    with capturing(graph):
        eager.step()
    return Program(name="cuda graph", step=graph.replay, loss=eager.loss, close=graph.reset)


def warm_up(eager: EagerStep, steps: int = GRAPH_WARM_STEPS) -> None:
    """Steps that train nothing: weights, buffers and the state of the optimizer are in place what they were before the first.
    Its losses are compared with those of programs that were not warmed up."""
    tensors = [*eager.module.parameters(), *eager.module.buffers()]
    with torch.no_grad():
        kept = [tensor.clone() for tensor in tensors]
    for _ in range(steps):
        eager.step()
    states = [entry for state in eager.optimizer.state.values() for entry in state.values() if isinstance(entry, Tensor)]
    with torch.no_grad():
        for tensor, before in zip(tensors, kept, strict=True):
            tensor.copy_(before)
        for entry in states:
            entry.zero_()  # as they begin


def compiled(question: Question, device: torch.device) -> Program:
    """The eager step through torch.compile with its defaults; compiles at its first step."""
    return EagerStep(question, device, compiled=True).as_program("torch.compile")


def run_of(question: Question, plan: Plan) -> RunSpec:
    """The question as a run of the executor, which knows what its precision means."""
    return RunSpec(
        name="run",
        model=question.spec,
        model_path="",
        plan=plan,
        optimizer=question.optimizer,
        learning_rate=LEARNING_RATE,
        dataset="synthetic",
        precision=question.precision,
    )


def let_go(device: torch.device) -> None:
    """Give memory back before the next program."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def autocast(precision: str, device: torch.device, *, cache: bool) -> contextlib.AbstractContextManager[object]:
    """Around a forward and its loss: autocast to the half-precision type of the precision, where it has one."""
    if precision not in HALF_TYPES:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=HALF_TYPES[precision], cache_enabled=cache)


AGAIN = " again"
WARM_STEPS = 3
LONG_STEP_S, LONG_STEPS = 0.1, 2
"""Steps that take so long: fewer in a turn, and none before them. What another program left in the caches hardly counts."""


def interleaved(
    clock: DeviceClock, programs: Sequence[Program], scope: Scope, *, seed: int, remaining_s: float
) -> dict[str, Any]:
    """`rounds_s` of every program (one mean step per round), and the `losses` of its first steps. As many rounds as fit into
    the scope's budget for a question, or into half of what remains, within its bounds."""
    losses = {program.name: [_stepped(program) for _ in range(WARM_STEPS)] for program in programs}
    step_s = {program.name: _turn(clock, program, 1) for program in programs}
    turns = [*programs, programs[0]]
    long = max(step_s.values()) > LONG_STEP_S
    untimed, steps = (0, min(LONG_STEPS, scope.steps)) if long else (1, scope.steps)
    round_s = (steps + untimed) * (sum(step_s.values()) + step_s[programs[0].name])
    least, most = scope.rounds
    rounds = max(least, min(most, int(min(scope.round_budget_s, remaining_s / 2) / round_s)))
    draw = random.Random(seed)
    found: dict[str, list[float]] = {name: [] for name in (*losses, programs[0].name + AGAIN)}
    for _ in range(rounds):
        order = list(range(len(turns)))
        draw.shuffle(order)
        for place in order:
            program = turns[place]
            name = program.name + (AGAIN if place == len(programs) else "")
            for _ in range(untimed):
                program.step()
            found[name].append(_turn(clock, program, steps))
    return {"rounds": rounds, "steps": steps, "untimed": untimed, "rounds_s": found, "losses": losses}


def _stepped(program: Program) -> float:
    program.step()
    return program.loss()


def _turn(clock: DeviceClock, program: Program, steps: int) -> float:
    """Mean seconds of a step, by the host's clock between two waits."""
    clock.synchronize()
    begin_s = clock.host_s()
    for _ in range(steps):
        program.step()
    clock.synchronize()
    return (clock.host_s() - begin_s) / steps


def build_all(builders: Sequence[tuple[str, Any]]) -> tuple[list[Program], dict[str, Any]]:
    """The programs that could be built, and why the others could not: the first has to be, and none may spoil the process."""
    programs, failed = [], {}
    for number, (name, build) in enumerate(builders):
        try:
            programs.append(build())
        except Exception as error:
            if number == 0 or isinstance(error, SpoiledProcessError):
                raise
            failed[name] = failure(error)
    return programs, failed
