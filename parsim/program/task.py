"""One task of a program: its work, resources, dependencies, and its origin in the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from parsim.plans.layouts import Hop, ValueLayout
from parsim.work import Work


class Resource(NamedTuple):
    """An in-order queue of one rank: `compute`, `host`, `dp`, `tp` (communication of that mesh axis), `dp_replicas` (sums over
    sharding groups), `pp>3` (sends to rank 3), `pp<1` (receives from rank 1). Prints as "r0.compute"."""

    rank: int
    stream: str

    def __str__(self) -> str:
        return f"r{self.rank}.{self.stream}"


def parse_resource(text: str) -> Resource:
    """Inverse of `str(resource)`."""
    rank, _, stream = text.partition(".")
    return Resource(int(rank[1:]), stream)


COMPUTE = "compute"
HOST = "host"
TO_HOST, FROM_HOST = "to_host", "from_host"
"""The two directions of a device's link to its host, which copies of offloaded state and activations occupy."""
HOST_CORES = "host_cores"
"""The share of the host's cores and memory that updates a rank's parameters."""
TURN = "turn"
"""Streams turn>3 and turn<1 carry a global model from replica to replica. A step does not end with them: see `outlasts`."""


def outlasts(resource: Resource) -> bool:
    """Whether what a resource has begun may go on while its rank begins the next step."""
    return resource.stream.startswith((f"{TURN}>", f"{TURN}<"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The way back from a task to the plan: stage, component (or bucket, or value), microbatch.

    A communication of a value says so by `value`, or that it is the value's gradient; a conversion on the tp axis names its
    `hop`. `layout` is that at the consuming end: in which it reads the value (of a transfer), or makes the gradient.
    """

    stage: int
    replica: int | None = None
    component: str | None = None
    microbatch: int | None = None
    value: str | None = None
    bucket: int | None = None
    gradient: bool = False
    layout: ValueLayout | None = None
    hop: Hop | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """`index` is the task's place in the graph; `dependencies` are indices of tasks that must have ended."""

    index: int
    work: Work
    resources: tuple[Resource, ...]
    dependencies: tuple[int, ...]
    origin: Origin

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(resource.rank for resource in self.resources))


RankTasks = list[tuple[Task, str, tuple[int, ...]]]
"""Of one rank in issue order: a task, its stream on the rank, and the tasks of the rank that it waits for."""
