"""The program of one training step: tasks, and the order in which every resource issues its own.

Holds no durations. The executor interprets it as it is; the simulator asks Costs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, get_type_hints

from parsim.errors import GraphError, PlanError
from parsim.plans.layouts import Hop, ValueLayout, parse_hop, parse_layout
from parsim.work import (
    ClipGradients,
    Collective,
    Compute,
    HostCopy,
    HostUpdate,
    LoadBatch,
    Mix,
    OptimizerStep,
    Phase,
    SendRecv,
    Work,
)


class Resource(NamedTuple):
    """An in-order queue of one rank: `compute`, `host`, `dp`, `tp` (communication of that mesh axis), `dp_replicas` (sums over
    sharding groups), `pp>3` (sends to rank 3), `pp<1` (receives from rank 1). Prints as "r0.compute"."""

    rank: int
    stream: str

    def __str__(self) -> str:
        return f"r{self.rank}.{self.stream}"


def parse_resource(text: str) -> Resource:
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
    """The way back from a task to the plan: stage, component (or bucket, or value), microbatch. A communication of a value says
    so by `value`, or that it is the value's gradient; a conversion on the tp axis names its `hop`. `layout` is that at the
    consuming end: in which it reads the value (of a transfer), or makes the gradient."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGraph:
    """Tasks numbered 0..n-1, and per resource the indices of its tasks in issue order (left out: the order of `tasks`). A
    task starts when its dependencies have ended and it is at the head of *every* resource it needs; it holds them all until
    it ends."""

    tasks: tuple[Task, ...]
    world_size: int
    issue_order: Mapping[Resource, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        listed: dict[Resource, list[int]] = {}
        for position, task in enumerate(self.tasks):
            if task.index != position:
                raise GraphError(f"task number {task.index} stands at place {position}; number tasks by their place")
            if not task.resources:
                raise GraphError(f"task {position} uses no resource; every task runs somewhere")
            if len(set(task.resources)) != len(task.resources):
                raise GraphError(f"task {position} lists a resource twice: {', '.join(map(str, task.resources))}")
            for dependency in task.dependencies:
                if not 0 <= dependency < len(self.tasks) or dependency == position:
                    raise GraphError(
                        f"task {position} depends on {dependency}; use the numbers 0..{len(self.tasks) - 1} of other tasks"
                    )
            for resource in task.resources:
                if not 0 <= resource.rank < self.world_size:
                    raise GraphError(f"task {position} uses {resource}, but ranks go from 0 to {self.world_size - 1}")
                listed.setdefault(resource, []).append(position)
        if not self.issue_order:
            object.__setattr__(self, "issue_order", {key: tuple(value) for key, value in listed.items()})
            return
        for resource in listed.keys() | self.issue_order.keys():
            issued, needed = self.issue_order.get(resource, ()), listed.get(resource, [])
            if sorted(issued) != sorted(needed):
                raise GraphError(f"{resource} issues tasks {sorted(issued)}, but the tasks that use it are {needed}")

    @property
    def resources(self) -> tuple[Resource, ...]:
        return tuple(self.issue_order)

    def predecessors(self) -> list[list[int]]:
        """Dependencies and, for every resource, the task issued just before; deduplicated, sorted."""
        before: list[set[int]] = [set(task.dependencies) for task in self.tasks]
        for order in self.issue_order.values():
            for earlier, later in itertools.pairwise(order):
                before[later].add(earlier)
        return [sorted(indices) for indices in before]


WORK_FORMS: dict[type[Work], str] = {
    Compute: "{phase} {component}[ {rule!}/{ways}] x{samples}[ {part!}:{parts}]",
    OptimizerStep: "optimizer {elements} elements in {tensors}[ of {update_group!} by {optimizer}]",
    ClipGradients: "clip {part} {elements} elements in {tensors}",
    Collective: "{operation} {size_bytes} B over {group}[ {packed!}][ once of {visits!} visits]",
    SendRecv: "send_recv {size_bytes} B {source}>{destination}",
    LoadBatch: "load x{samples} {size_bytes} B[ in {parts!}]",
    Mix: "mix {elements} elements of {copies}[ in {tensors} by {accesses!}]",
    HostCopy: "copy {size_bytes} B {to_host} host",
    HostUpdate: "host update {elements} elements[ by {optimizer!}]",
}
"""How each kind of work is written, by its fields. What is in brackets is left out where the field with ! has its default."""

_WORDS = {"packed": {True: "packed"}, "to_host": {True: "to", False: "from"}}
"""How fields that are true or false are written."""

_OPTIONAL, _FIELD = re.compile(r"\[(.*?)\]"), re.compile(r"\{(\w+)!?\}")


def work_text(work: Work) -> str:
    """The short text of a piece of work in printed graphs; `parse_work` reads it back."""

    def written(match: re.Match[str]) -> str:
        value = getattr(work, match[1])
        if match[1] in _WORDS:
            return _WORDS[match[1]][value]
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    def optional(match: re.Match[str]) -> str:
        (decisive,) = re.findall(r"(\w+)!", match[1])
        default = type(work).__dataclass_fields__[decisive].default
        return "" if getattr(work, decisive) == default else match[1]

    return _FIELD.sub(written, _OPTIONAL.sub(optional, WORK_FORMS[type(work)]))


def _pattern(kind: type[Work]) -> re.Pattern[str]:
    """The form of a kind of work as an expression with a group for each field."""
    types = get_type_hints(kind)

    def group(match: re.Match[str]) -> str:
        words = _WORDS.get(match[1], {}).values()
        of_type = {int: r"\d+", Phase: "|".join(Phase), tuple[int, ...]: r"[\d,]+"}.get(types[match[1]], r"\S+")
        return f"(?P<{match[1]}>{'|'.join(words) or of_type})"

    return re.compile(_FIELD.sub(group, _OPTIONAL.sub(r"(?:\1)?", WORK_FORMS[kind])))


_PATTERNS = {kind: _pattern(kind) for kind in WORK_FORMS}


def parse_work(text: str) -> Work:
    """The inverse of `work_text`. Raises GraphError for any other text."""
    for kind, pattern in _PATTERNS.items():
        if match := pattern.fullmatch(text):
            types, fields = get_type_hints(kind), dict[str, Any]()
            for name, value in match.groupdict().items():
                if name in _WORDS:
                    fields[name] = value == _WORDS[name][True]
                elif value is not None:
                    of_type = types[name]
                    fields[name] = tuple(map(int, value.split(","))) if of_type == tuple[int, ...] else of_type(value)
            return kind(**fields)
    raise GraphError(f"cannot read work {text!r}; write it as work_text prints it")


_ORIGIN_FIELDS: dict[str, Callable[[str], Any]] = {
    "stage": int,
    "replica": int,
    "component": str,
    "microbatch": int,
    "value": str,
    "bucket": int,
    "gradient": lambda text: text == "True",
    "layout": parse_layout,
    "hop": parse_hop,
}
"""What a printed task says of its origin, and how it is read back; what is None or False is left out."""


def to_text(graph: TaskGraph) -> str:
    """One line per task: `3 r0.compute | forward layer1.0 x16 | 1,2 | stage=0 microbatch=1`. Issue orders that differ from the
    list order follow as lines `order r0.compute 2,1`."""
    lines = [f"world_size {graph.world_size}"]
    listed: dict[Resource, list[int]] = {}
    for task in graph.tasks:
        origin = " ".join(
            f"{name}={getattr(task.origin, name)}"
            for name in _ORIGIN_FIELDS
            if getattr(task.origin, name) is not None and getattr(task.origin, name) is not False
        )
        where = " ".join(map(str, task.resources))
        after = ",".join(map(str, task.dependencies)) or "-"
        lines.append(f"{task.index} {where} | {work_text(task.work)} | {after} | {origin}")
        for resource in task.resources:
            listed.setdefault(resource, []).append(task.index)
    for resource, in_list in listed.items():
        order = graph.issue_order[resource]
        if list(order) != in_list:
            lines.append(f"order {resource} {','.join(map(str, order))}")
    return "\n".join(lines) + "\n"


def from_text(text: str) -> TaskGraph:
    """The inverse of `to_text`. Raises GraphError for a line that cannot be read; the message shows it."""
    tasks: list[Task] = []
    order: dict[Resource, tuple[int, ...]] = {}
    world_size = 0
    for line in text.strip().splitlines():
        try:
            if line.startswith("world_size "):
                world_size = int(line.split()[1])
            elif line.startswith("order "):
                _, resource, listing = line.split()
                order[parse_resource(resource)] = tuple(int(index) for index in listing.split(","))
            else:
                tasks.append(_parse_task(line))
        except (ValueError, TypeError, IndexError, KeyError, PlanError) as error:
            raise GraphError(f"cannot read line {line!r}: {error}; write it as to_text prints it") from error
    graph = TaskGraph(tasks=tuple(tasks), world_size=world_size)
    return replace(graph, issue_order={**graph.issue_order, **order}) if order else graph


def _parse_task(line: str) -> Task:
    parts = [part.strip() for part in line.split("|")]
    if len(parts) != 4:
        raise GraphError(f"cannot read task {line!r}; four parts separated by | are needed")
    head, work, after, origin = parts
    index, *resources = head.split()
    fields: dict[str, Any] = {}
    for item in origin.split():
        name, _, value = item.partition("=")
        fields[name] = _ORIGIN_FIELDS[name](value)
    return Task(
        index=int(index),
        work=parse_work(work),
        resources=tuple(parse_resource(resource) for resource in resources),
        dependencies=() if after == "-" else tuple(int(number) for number in after.split(",")),
        origin=Origin(**fields),
    )


def in_order(before: Sequence[Sequence[int]]) -> list[int]:
    """Sort indices so that all of `before[i]` come earlier than i; those on a cycle, or behind one, are left out."""
    waiting = [len(indices) for indices in before]
    after: list[list[int]] = [[] for _ in before]
    for index, indices in enumerate(before):
        for earlier in indices:
            after[earlier].append(index)
    ready = [index for index, count in enumerate(waiting) if count == 0]
    for index in ready:
        for later in after[index]:
            waiting[later] -= 1
            if waiting[later] == 0:
                ready.append(later)
    return ready


def rank_tasks(graph: TaskGraph, rank: int) -> RankTasks:
    """The tasks of one rank, in issue order."""
    local = [task for task in graph.tasks if rank in task.ranks]
    indices = {task.index for task in local}
    tasks: RankTasks = []
    for task in local:
        stream = next(resource.stream for resource in task.resources if resource.rank == rank)
        tasks.append((task, stream, tuple(index for index in task.dependencies if index in indices)))
    return tasks


# The builder that lowering passes write to: tasks under readable keys, resolved to numbers at the end. A pass may name a task
# that a later pass adds, so passes need no order among themselves beyond the order of issue.


TaskKey = tuple[Hashable, ...]
DraftEntry = tuple[Work, tuple[Resource, ...], tuple[TaskKey, ...]]
"""Work, resources, what comes before."""


@dataclass(slots=True)
class Draft:
    """Tasks in the order they were added, which is the issue order of every resource. `ranks`: the only ranks whose tasks and
    resources are kept (None: all), where these stand for the others."""

    world_size: int
    ranks: frozenset[int] | None = None
    _number: dict[TaskKey, int] = field(default_factory=dict)
    _entries: list[DraftEntry] = field(default_factory=list)
    _origins: list[Origin | Callable[[], Origin]] = field(default_factory=list)
    _waits: list[tuple[TaskKey, TaskKey]] = field(default_factory=list)

    def add(self, key: TaskKey, work: Work, resources: Iterable[Resource], after: Iterable[TaskKey], origin: Origin) -> None:
        if self.ranks is not None:
            resources = [resource for resource in resources if resource.rank in self.ranks]
            if not resources and key not in self._number:
                return
        self.add_alike(key, (work, tuple(resources), tuple(dict.fromkeys(after))), origin)

    def add_alike(self, key: TaskKey, entry: DraftEntry, origin: Origin | Callable[[], Origin]) -> None:
        """A task that has its work, resources (kept ones) or what comes before (each key once) in common with others: they
        should be the same objects. origin: or what makes it when it is asked for."""
        if key in self._number:
            raise GraphError(f"task {key} was added twice")
        self._number[key] = len(self._entries)
        self._entries.append(entry)
        self._origins.append(origin)

    def wait(self, key: TaskKey, before: TaskKey) -> None:
        """A task, of this draft or of one that it continues, waits for another of this draft too."""
        self._waits.append((key, before))

    def waits(self) -> Iterable[tuple[TaskKey, TaskKey]]:
        """Tasks, and what else each waits for."""
        return self._waits

    def keeps(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks

    def keeps_any(self, group: Sequence[int]) -> bool:
        return bool(group) if self.ranks is None else not self.ranks.isdisjoint(group)

    def kept(self, group: Sequence[int]) -> list[int]:
        if self.ranks is None:
            return list(group)
        return [] if self.ranks.isdisjoint(group) else [rank for rank in group if rank in self.ranks]

    def kept_ranks(self) -> Sequence[int]:
        return range(self.world_size) if self.ranks is None else sorted(self.ranks)

    def __contains__(self, key: TaskKey) -> bool:
        return key in self._number

    def __len__(self) -> int:
        return len(self._entries)

    def number(self, key: TaskKey) -> int:
        return self._number[key]

    @property
    def numbers(self) -> Mapping[TaskKey, int]:
        return self._number

    def entries(self) -> Sequence[DraftEntry]:
        return self._entries

    def origins(self) -> Iterator[Origin]:
        """The origins of all tasks, in the order they were added."""
        return (entry if isinstance(entry, Origin) else entry() for entry in self._origins)

    def finish(self) -> TaskGraph:
        """Numbers for keys. Raises GraphError if a key was never added."""
        tasks = []
        more: dict[TaskKey, list[TaskKey]] = {}
        for key, before in self._waits:
            more.setdefault(key, []).append(before)
        keys = list(self._number)
        for index, ((work, resources, after), origin) in enumerate(zip(self._entries, self.origins(), strict=True)):
            after = (*after, *more.get(keys[index], ()))
            missing = [key for key in after if key not in self._number]
            if missing:
                raise GraphError(f"task {index} depends on {missing[0]}, which no pass added")
            numbers = tuple(sorted({self._number[key] for key in after}))
            tasks.append(Task(index=index, work=work, resources=resources, dependencies=numbers, origin=origin))
        return TaskGraph(tasks=tuple(tasks), world_size=self.world_size)
