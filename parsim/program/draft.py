"""The builder that lowering passes write to: tasks under readable keys, resolved to numbers at the end.

A pass may name a task that a later pass adds, so passes need no order among themselves beyond the order of issue.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from parsim.errors import GraphError
from parsim.program.task import Origin, Resource, Task
from parsim.program.taskgraph import TaskGraph
from parsim.work import Work

TaskKey = tuple[Hashable, ...]
DraftEntry = tuple[Work, tuple[Resource, ...], tuple[TaskKey, ...]]
"""Work, resources, what comes before."""


@dataclass(slots=True)
class Draft:
    """Tasks in the order they were added, which is the issue order of every resource.

    `ranks`: the only ranks whose tasks and resources are kept (None: all), where these stand for the others.
    """

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
        """A task that has its work, resources or what comes before in common with others: they should be the same objects.

        Args:
            key: of the task. entry: of kept resources, and without a key twice. origin: or what makes it when it is asked for.
        """
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
        """Whether some rank of a group is kept."""
        return bool(group) if self.ranks is None else not self.ranks.isdisjoint(group)

    def kept(self, group: Sequence[int]) -> list[int]:
        """The ranks of a group that are kept, in its order."""
        if self.ranks is None:
            return list(group)
        return [] if self.ranks.isdisjoint(group) else [rank for rank in group if rank in self.ranks]

    def kept_ranks(self) -> Sequence[int]:
        """Ascending."""
        return range(self.world_size) if self.ranks is None else sorted(self.ranks)

    def __contains__(self, key: TaskKey) -> bool:
        return key in self._number

    def __len__(self) -> int:
        return len(self._entries)

    def number(self, key: TaskKey) -> int:
        return self._number[key]

    @property
    def numbers(self) -> Mapping[TaskKey, int]:
        """The numbers of all tasks, in the order they were added."""
        return self._number

    def entries(self) -> Sequence[DraftEntry]:
        """What was added, in its order."""
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
