"""Programs for the dynamic engine, whose resources may serve in order of arrival; commutative merging as such a program.

Everywhere else a resource issues its tasks in a written order. A global model that workers merge into is exclusive and serves
whoever comes first, so its order depends on seconds: the dynamic engine decides it and records it, and the record replays in
the static engine and in an executor (`parsim.engines.program`).

    run = run_program(training_program(merge_program(model, workers=8, epochs=20), durations_s, arrival=[MERGE]))
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from parsim.algorithms.gossip_program import GossipModel
from parsim.algorithms.program import DurationsOf, Part, Program
from parsim.engines.program import Part as TimedPart
from parsim.engines.program import TrainingProgram
from parsim.engines.scenario.asynchronous import MERGE
from parsim.errors import AlgorithmError
from parsim.graph.task import COMPUTE, Origin, Resource, Task
from parsim.graph.taskgraph import TaskGraph
from parsim.work import Compute, Mix, OptimizerStep, Phase, Work

Carries = tuple[tuple[int, int], ...]


def training_program(
    program: Program, durations_s: DurationsOf, *, varying: bool = False, arrival: Collection[Resource] = ()
) -> TrainingProgram:
    """The same run for `parsim.engines.dynamic.run_program`: steps in a row of one part stay one part with repeats.

    Args:
        durations_s, varying: as `simulate_program` takes them. arrival: resources that serve first come, first served.

    Raises:
        AlgorithmError: a value that is read later than in the step after it was made; the dynamic engine carries it one step.
        GraphError: as TrainingProgram does.
    """
    known: dict[int, np.ndarray] = {}
    parts: list[TimedPart] = []
    run: list[tuple[Part, Carries, np.ndarray]] = []
    made: set[str] = set()
    before: Part | None = None
    for step, part in enumerate(program.walk()):
        carries = _carries(part, before, made)
        if varying or id(part) not in known:
            known[id(part)] = np.asarray(durations_s(part, step), dtype=np.float64)
        if run and (run[-1][0] is not part or run[-1][1] != carries):
            parts.append(_joined(run, varying))
            run = []
        run.append((part, carries, known[id(part)]))
        made |= part.makes.keys()
        before = part
    parts.append(_joined(run, varying))
    return TrainingProgram(parts=tuple(parts), arrival=frozenset(arrival))


def _carries(part: Part, before: Part | None, made: Collection[str]) -> Carries:
    """(reader, maker in the step before); in the program's first step, which waits for nothing, those of its own repeats."""
    found: list[tuple[int, int]] = []
    for value, readers in part.reads.items():
        makers = (part if before is None else before).makes.get(value, ())
        if value in made and not makers:
            raise AlgorithmError(
                f"the value {value!r} is read two steps or more after it was made; let the parts between make it again, or use "
                "simulate_program"
            )
        if value in made or before is None:
            found += [(reader, maker) for reader in readers for maker in makers]
    return tuple(found)


def _joined(run: list[tuple[Part, Carries, np.ndarray]], varying: bool) -> TimedPart:
    part, carries, row = run[0]
    rows = np.stack([entry[2] for entry in run]) if varying else row
    return TimedPart(graph=part.graph, durations_s=rows, repeats=len(run), carries=carries)


def merge_program(model: GossipModel, *, workers: int, epochs: int, steps: int = 1) -> Program:
    """Commutative merging: every worker trains an epoch, then merges its weights into the global model, and again.

    A repeat is one epoch of each worker: `steps` batches forward and backward as one task each, the updates, and the merge, a
    Mix of two on MERGE (on rank 0) and on the worker. Serve MERGE by arrival.

    Leaves out: the transfers to and from the global model; put their seconds into the merge's.

    Raises:
        AlgorithmError: fewer than one worker, epoch or step.
    """
    if min(workers, epochs, steps) < 1:
        raise AlgorithmError(f"merging needs workers, epochs and steps >= 1, got {workers}, {epochs} and {steps}")
    tasks: list[Task] = []
    makes: dict[str, tuple[int, ...]] = {}
    reads: dict[str, tuple[int, ...]] = {}
    for worker in range(workers):
        first = len(tasks)
        origin = Origin(stage=0, replica=worker, microbatch=0)
        samples, names = steps * model.samples, model.components
        epoch: list[Work] = [Compute(component=name, phase=Phase.FORWARD, samples=samples) for name in names]
        epoch += [Compute(component=name, phase=Phase.BACKWARD, samples=samples) for name in reversed(names)]
        epoch.append(OptimizerStep(elements=steps * model.elements, tensors=steps * model.tensors))
        epoch.append(Mix(elements=model.elements, copies=2))
        for work in epoch:
            where = (Resource(worker, COMPUTE), *([MERGE] if isinstance(work, Mix) else []))
            needs = (len(tasks) - 1,) if len(tasks) > first else ()
            tasks.append(Task(index=len(tasks), work=work, resources=where, dependencies=needs, origin=origin))
        reads[f"weights {worker}"] = (first,)
        makes[f"weights {worker}"] = (len(tasks) - 1,)
    graph = TaskGraph(tasks=tuple(tasks), world_size=workers)
    return Program(parts=(Part(graph=graph, repeat=epochs, makes=makes, reads=reads),))
