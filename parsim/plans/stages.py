"""Which groups of a mesh communicate at the same time, because the plan has them do the same thing in step.

The ranks of one stage run the same program on other samples and shards. So every shift of a group along the dp and tp
axes of its stages does the same at the same time. For a group inside one replica, these are the groups of other replicas.
For a group that does not span the tp axis, these are the neighbouring groups of shards.

Leaves out: other stages, which are at other points of the program, and different collectives that overlap (a conversion
on tp with a gradient sum on dp).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import pairwise

from parsim.plans.layouts import Placement
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import rank_of_stage
from parsim.plans.plan import Plan, Stage
from parsim.work import Collective, SendRecv, Work


class Groups(tuple[tuple[int, ...], ...]):
    """Groups of ranks, as a key that is hashed once however large it is, and in which a group is found at once."""

    def __new__(cls, groups: Iterable[tuple[int, ...]] = ()) -> Groups:
        made = super().__new__(cls, groups)
        made._hash = tuple.__hash__(made)
        return made

    _hash: int

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _each(self) -> frozenset[tuple[int, ...]]:
        return frozenset(self)

    def __contains__(self, group: object) -> bool:
        return group in self._each


def concurrent_with(mesh: Mesh, work: Work) -> Groups:
    """The groups of a collective, or the transfers, that run at the same time as `work` in a plan on this mesh; none for
    what does not communicate."""
    match work:
        case Collective():
            return concurrent_groups(mesh, work.group)
        case SendRecv():
            return concurrent_transfers(mesh, (work.source, work.destination))
    return Groups()


@lru_cache(maxsize=65536)
def concurrent_groups(mesh: Mesh, group: tuple[int, ...]) -> Groups:
    """The group and its shifts along dp and tp that share no rank with it or one another; each in ascending order. A group that
    is not a grid of stages, replicas and shards (there is none in plans of today) comes back alone."""
    copies = {rank // mesh.tp for rank in group}
    axes = {copy // mesh.copies for copy in copies}, {copy % mesh.copies for copy in copies}, {rank % mesh.tp for rank in group}
    grid = [sorted(axis) for axis in axes]
    size = len(grid[0]) * len(grid[1]) * len(grid[2])
    if size != len(group):
        return Groups([tuple(sorted(group))])
    return _shifted(mesh, tuple(grid[0]), _shifts(tuple(grid[1]), mesh.copies), _shifts(tuple(grid[2]), mesh.tp))


@lru_cache(maxsize=65536)
def concurrent_transfers(mesh: Mesh, pair: tuple[int, int]) -> Groups:
    """The (source, destination) of all replicas and shards that send at the same time as `pair`: between stages every rank to
    its own counterpart, inside a stage (a value moved between shards) all replicas. Another transfer comes back alone."""
    source, destination = _place(mesh, pair[0]), _place(mesh, pair[1])
    if source[1] != destination[1]:
        return Groups([pair])
    if source[0] == destination[0]:
        moved = [(source[2], destination[2])]
    elif source[2] == destination[2]:
        moved = [(shard, shard) for shard in range(mesh.tp)]
    else:
        return Groups([pair])
    return _transfers(mesh, source[0], destination[0], tuple(moved))


@lru_cache(maxsize=4096)
def _transfers(mesh: Mesh, source: int, destination: int, shards: tuple[tuple[int, int], ...]) -> Groups:
    return Groups(
        (
            mesh.rank(stage=source, replica=replica, shard=a),
            mesh.rank(stage=destination, replica=replica, shard=b),
        )
        for replica in range(mesh.copies)
        for a, b in shards
    )


@lru_cache(maxsize=4096)
def _shifted(mesh: Mesh, stages: tuple[int, ...], replicas: Groups, shards: Groups) -> Groups:
    """One value for all groups that run together, so caches find it by identity."""
    return Groups(
        tuple(
            mesh.rank(stage=stage, replica=replica, shard=shard)
            for stage in stages
            for replica in some_replicas
            for shard in some_shards
        )
        for some_replicas in replicas
        for some_shards in shards
    )


def _shifts(members: tuple[int, ...], size: int) -> Groups:
    """The members and their shifts within 0..size-1, none overlapping another, in order: a partition where one exists."""
    return _singles(size) if len(members) == 1 else _shifts_of_several(members, size)


@lru_cache(maxsize=256)
def _singles(size: int) -> Groups:
    return Groups((member,) for member in range(size))


@lru_cache(maxsize=4096)
def _shifts_of_several(members: tuple[int, ...], size: int) -> Groups:
    first = _shifts_from(tuple([member - members[0] for member in members]), size)
    # the shifts that make a partition are the same from any of them: the lowest place that is left begins the next
    is_partition = len(first) * len(members) == size
    return first if is_partition and members in first else _shifts_from(members, size)


@lru_cache(maxsize=4096)
def _shifts_from(members: tuple[int, ...], size: int) -> Groups:
    """One after the other from the lowest, each that shares no place with the members or those before."""
    pattern = [member - members[0] for member in members]
    shifts: list[tuple[int, ...]] = []
    taken = set(members)
    for start in range(size - pattern[-1]):  # later ones do not end within
        shift = tuple([start + step for step in pattern])
        if shift == members:
            shifts.append(members)
        elif taken.isdisjoint(shift):
            shifts.append(shift)
            taken.update(shift)
    return Groups(shifts)


def _place(mesh: Mesh, rank: int) -> tuple[int, int, int]:
    above, shard = divmod(rank, mesh.tp)
    return (*divmod(above, mesh.copies), shard)


# Components of a model as the stages of a pipeline.


def even_cuts(components: int, stages: int) -> list[int]:
    """Where stages of as equal a number of components as can be begin, and where the last one ends."""
    return [round(components * number / stages) for number in range(stages + 1)]


def even_parts(names: Sequence[str], stages: int) -> list[tuple[str, ...]]:
    """The names in order, cut by `even_cuts`."""
    return [tuple(names[first:last]) for first, last in pairwise(even_cuts(len(names), stages))]


def with_ends(layers: int, stages: int, first: int = 1, last: int = 1) -> list[int] | None:
    """Layers of each stage, as even as can be where the embedding counts as `first` layers and the head as `last`, the earliest
    with one more; None: an end alone would fill a stage. Source: torchtitan 0.2.2, pipeline_parallel.py,
    generate_llm_fqn_per_model_part."""
    each, more = divmod(layers + first + last, stages)
    if each < max(1, first, last):
        return None
    counts = [each + (stage < more) for stage in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    return counts


def as_megatron(layers: int, stages: int) -> list[int] | None:
    """Equally many layers in each stage, or one fewer in the last or in both ends; None: no such cut is equal. Source:
    Megatron-LM, transformer_block.py, get_num_layers_to_build, with account_for_loss_ and _embedding_in_pipeline_split."""
    for first, last in ((0, 0), (0, 1), (1, 1)):
        if not (layers + first + last) % stages:
            return with_ends(layers, stages, first, last)
    return None


def rest_in_last(layers: int, stages: int) -> list[int] | None:
    """As many layers in each stage, and the rest in the last. Where none would be left for it: the rest in the first, and the
    loss alone in the last. None: that leaves none for the first either.

    Source: pipeline_model_parallel_layout in Megatron-Bridge's recipes for DeepSeek-V3 (61 layers as 16, 16, 16, 13; as 15
    times 4 and 1; as "Et|(tt|)*30mL": 1, 30 times 2, and 0).
    """
    each = -(-layers // stages)
    rest = layers - each * (stages - 1)
    if rest > 0:
        return [each] * (stages - 1) + [rest]
    rest += each
    return [rest, *[each] * (stages - 2), 0] if rest > 0 else None


CUTS: dict[str, Callable[[int, int], list[int] | None]] = {"megatron": as_megatron, "torchtitan": with_ends}
"""How frameworks count out layers into stages, from layers and stages; None: they have no such cut."""


UNEVEN_CUTS: dict[str, Callable[[int, int], list[int] | None]] = {"megatron": rest_in_last}
"""What recipes of these frameworks list where `CUTS` has none."""


def counted_out(cut: str, layers: int, stages: int) -> list[int] | None:
    """Layers of each stage by a row of `CUTS`; None: there is none ("" is no row), or fewer layers than stages."""
    return CUTS[cut](layers, stages) if cut and layers >= stages else None


def stages_of(
    mesh: Mesh,
    parts: Iterable[Sequence[str]],
    placement: Callable[[str], Placement] | None = None,
    *,
    order: str = "1f1b",
    chunks: int = 1,
) -> tuple[Stage, ...]:
    """Each part (names of components) on the ranks of its place in the pipeline, which its order gives the stages. placement:
    of a component by name; None: none is given. Raises PlanError: the order gives ranks different numbers of stages."""
    places = rank_of_stage(order, mesh.pp, chunks)
    return tuple(
        Stage(
            components=tuple(names),
            ranks=mesh.stage_ranks(places[number]),
            placements=() if placement is None else tuple(placement(name) for name in names),
        )
        for number, names in enumerate(parts)
    )


WHOLE = ("replicate", "place")
"""Kinds of placement under which a rank does all of a component or nothing."""


def without_idle_ranks(plan: Plan) -> Plan:
    """The plan on tp = 1 where its tp axis divides nothing: every stage is on one tp rank, or every rank does all of it. With
    ZeRO the axis divides the states, so the plan stays as it is."""
    placed = [{placement for _, placement in stage.placed()} for stage in plan.stages]
    if plan.mesh.tp == 1 or plan.zero_stage or any(len(own) > 1 or next(iter(own)).kind not in WHOLE for own in placed):
        return plan
    mesh = replace(plan.mesh, tp=1)
    parts = [stage.components for stage in plan.stages]
    return replace(plan, mesh=mesh, stages=stages_of(mesh, parts, order=plan.pipeline_order, chunks=plan.chunks))
