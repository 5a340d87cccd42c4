"""Random but runnable task graphs, from a seeded generator or drawn (and shrunk) by Hypothesis.

One builder serves both: it takes a `random.Random`, and Hypothesis offers one whose choices it records.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from hypothesis import strategies as st

from parsim.program.taskgraph import COMPUTE, HOST, Origin, Resource, Task, TaskGraph
from parsim.work import COLLECTIVES, PACKABLE, Collective, Compute, LoadBatch, Mix, OptimizerStep, Phase, SendRecv, Work

GRID_S = 1 / 1024


def graph_of(world_size: int, *rows: tuple[Work, Sequence[Resource], Sequence[int]]) -> TaskGraph:
    """Tasks in this order, each with its work, its resources and what comes before."""
    tasks = [
        Task(index=index, work=work, resources=tuple(resources), dependencies=tuple(before), origin=Origin(stage=0))
        for index, (work, resources, before) in enumerate(rows)
    ]
    return TaskGraph(tasks=tuple(tasks), world_size=world_size)


def random_work(random: Random, world_size: int) -> tuple[Work, tuple[Resource, ...]]:
    """A piece of work and the resources a lowering pass would give it, with some oddities.

    Odd but legal: computation on two compute streams at once, communication on a compute stream.
    """
    rank = random.randrange(world_size)
    kind = random.choices(("compute", "load", "optimizer", "mix", "collective", "send_recv"), (8, 1, 1, 1, 4, 4))[0]
    if kind == "collective" or (kind == "send_recv" and world_size == 1):
        group = tuple(random.sample(range(world_size), random.randint(1, world_size)))
        stream = random.choice(("dp", "dp", "tp", COMPUTE))
        operation = random.choice(COLLECTIVES)
        packed = operation in PACKABLE and random.random() < 0.5
        work = Collective(operation=operation, group=group, size_bytes=random.randrange(1 << 20), packed=packed)
        return work, tuple(Resource(member, stream) for member in group)
    if kind == "send_recv":
        source, target = random.sample(range(world_size), 2)
        resources = (Resource(source, f"pp>{target}"), Resource(target, f"pp<{source}"))
        return SendRecv(source=source, destination=target, size_bytes=random.randrange(1 << 20)), resources
    if kind == "load":
        return LoadBatch(samples=random.randint(1, 64), size_bytes=random.randrange(1 << 20)), (Resource(rank, HOST),)
    if kind == "optimizer":
        work_done = OptimizerStep(elements=random.randrange(1 << 20), tensors=random.randint(1, 9))
        return work_done, (Resource(rank, COMPUTE),)
    if kind == "mix":
        return Mix(elements=random.randrange(1 << 20), copies=random.randint(1, 9)), (Resource(rank, COMPUTE),)
    phase = random.choice((Phase.FORWARD, Phase.BACKWARD))
    computed = Compute(component=f"layer{random.randrange(4)}.0", phase=phase, samples=random.randint(1, 64))
    both = world_size > 1 and random.random() < 0.1
    ranks = random.sample(range(world_size), 2) if both else [rank]
    return computed, tuple(Resource(member, COMPUTE) for member in ranks)


def random_graph(random: Random, *, most_ranks: int = 6, most_tasks: int = 30) -> TaskGraph:
    """A graph that can run: tasks are made in a hidden order that respects everything, then renumbered at random.

    So dependencies point forward as well as backward, and issue orders differ from the list order.
    """
    world_size, n = random.randint(1, most_ranks), random.randint(0, most_tasks)
    number = list(range(n))
    if random.random() < 0.8:
        random.shuffle(number)
    window = random.choice((3, n + 1))
    issued: dict[Resource, list[int]] = {}
    tasks: list[Task] = []
    for place in range(n):
        work, resources = random_work(random, world_size)
        earlier = range(max(0, place - window), place)
        needs = random.sample(earlier, min(len(earlier), random.choice((0, 1, 1, 2, 3))))
        origin = Origin(
            stage=random.randrange(3),
            replica=random.choice((None, 0, 1)),
            component=random.choice((None, "layer1.0", "head")),
            microbatch=random.choice((None, 0, 7)),
            value=random.choice((None, "input:0", "layer1.0:0")),
            bucket=random.choice((None, 0, 3)),
        )
        dependencies = tuple(number[need] for need in needs)
        tasks.append(Task(index=number[place], work=work, resources=resources, dependencies=dependencies, origin=origin))
        for resource in resources:
            issued.setdefault(resource, []).append(number[place])
    tasks.sort(key=lambda task: task.index)
    order = {resource: tuple(entries) for resource, entries in issued.items()}
    return TaskGraph(tasks=tuple(tasks), world_size=world_size, issue_order=order)


def random_durations_s(random: Random, n: int, *, on_grid: bool) -> list[float]:
    """Seconds: multiples of 1/1024 with many ties and zeros, or arbitrary doubles over six decades with some zeros."""
    if on_grid:
        return [random.choice((0, 1, 1, 2, 3, 5, 1024)) * GRID_S for _ in range(n)]
    return [0.0 if random.random() < 0.1 else 10 ** random.uniform(-5, 1) for _ in range(n)]


@st.composite
def task_graphs(draw: st.DrawFn, *, most_ranks: int = 6, most_tasks: int = 16) -> TaskGraph:
    """Runnable graphs; see `random_graph`."""
    return random_graph(draw(st.randoms(use_true_random=False)), most_ranks=most_ranks, most_tasks=most_tasks)


@st.composite
def timed_graphs(draw: st.DrawFn, *, most_ranks: int = 6, most_tasks: int = 16) -> tuple[TaskGraph, list[float]]:
    """A runnable graph and seconds for each of its tasks (on the grid, or any finite doubles up to 1e6)."""
    graph = draw(task_graphs(most_ranks=most_ranks, most_tasks=most_tasks))
    on_grid = st.integers(0, 8).map(lambda count: count * GRID_S)
    anywhere = st.floats(0, 1e6, allow_nan=False, allow_subnormal=False)
    n = len(graph.tasks)
    return graph, draw(st.one_of(st.lists(on_grid, min_size=n, max_size=n), st.lists(anywhere, min_size=n, max_size=n)))
