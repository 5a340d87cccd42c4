"""Commutative merging as a program: a global model that workers merge into, one at a time, whoever comes first.

The order depends on seconds, so the dynamic engine decides and records it:

    program = merge_program(model, workers=8, epochs=20)
    run = run_program(program, durations_s)
"""

from __future__ import annotations

from parsim.engines.program import Part, Program
from parsim.engines.relaxed.gossip_program import GossipModel
from parsim.engines.scenario.checkpointing import MERGE
from parsim.errors import AlgorithmError
from parsim.program.task import COMPUTE, Origin, Resource, Task
from parsim.program.taskgraph import TaskGraph
from parsim.work import Compute, Mix, OptimizerStep, Phase, Work


def merge_program(model: GossipModel, *, workers: int, epochs: int, steps: int = 1) -> Program:
    """Commutative merging: every worker trains an epoch, then merges its weights into the global model, and again.

    A repeat is one epoch of each worker: `steps` batches forward and backward as one task each, the updates, and the merge. The
    merge is a Mix of two on the worker and on MERGE (on rank 0), which serves by arrival.

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
    part = Part(graph=graph, repeat=epochs, makes=makes, reads=reads)
    return Program(parts=(part,), arrival=frozenset({MERGE}))
