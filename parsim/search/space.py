"""What a search is free to choose: meshes, microbatches, pipeline orders, ZeRO stages and bucket sizes under the constraints.

Every key that the question gives has one value here, every other all that make sense.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice, pairwise
from math import comb

import numpy as np
from numpy.typing import NDArray

from parsim.errors import PlanError, ScheduleError
from parsim.model.divided import experts_of, tokens_of
from parsim.numeric import Floats
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import PIPELINE_ORDERS
from parsim.plans.plan import DEFAULT_BUCKET_BYTES, Plan
from parsim.predict.problem import PlanningProblem
from parsim.program.placed import PlanIndex
from parsim.records import once
from parsim.search.placement.problem import Solution
from parsim.units import divisors

MIB = 1024 * 1024
BUCKET_BYTES = (DEFAULT_BUCKET_BYTES, 4 * MIB, 100 * MIB)

SMALL_BUCKET_BYTES = (MIB, MIB // 4, MIB // 16)
"""Tried where the plans with larger ones leave room for a faster step."""

MOST_SMALL_BUCKETS = 128
"""Of a rank. Sizes that make more are not tried."""

MOST_BUCKET_SIZES = 64
"""Of a plan whose parameters have fewer sums than this, every size that makes other buckets is tried."""

FREE_ORDERS = ("1f1b", "gpipe", "interleaved")
"""Not zero-bubble: no calibration has measured a backward's halves yet, so what it would gain over 1f1b rests on an assumed
split. It can be asked for."""

FREE_CHUNKS = (1, 2, 3, 4, 6, 8)
"""Stages per rank that are tried where their number is free."""


def meshes(
    problem: PlanningProblem,
    wanted: Callable[[int, int, int], bool] | None = None,
    shards: Sequence[int] | None = None,
) -> Iterator[Mesh]:
    """Every mesh over the first devices of the cluster that keeps the constraints, most devices and fewest stages first.

    Those that leave devices idle are among them: the batch, or what shards divide by, may not divide over all, and one more
    device must not make the answer slower. Of these, only such whose replicas divide the batch.

    Args:
        wanted: of pp, dp and tp, whether to make the mesh; None: all.
        shards: the values of tp above 1 that divide the model; those of meshes that leave devices idle. None: any.
    """
    asked, size, batch = problem.constraints, problem.cluster.size, problem.global_batch
    context, experts = inner_axes(problem)
    most = size // context

    def kept(pp: int, dp: int, tp: int) -> bool:
        return (
            dp * context % experts == 0
            and all(own in (None, axis) for own, axis in ((asked.pp, pp), (asked.dp, dp), (asked.tp, tp)))
            and (asked.pp is not None or pp <= len(problem.model.components))
            and (wanted is None or wanted(pp, dp, tp))
        )

    replicas = [asked.dp] if asked.dp else [dp for dp in divisors(batch) if dp <= most]
    widths = [asked.tp] if asked.tp else range(1, most + 1) if shards is None else [1, *shards]
    found = {
        (pp, most // (pp * tp), tp) for pp in divisors(most) for tp in divisors(most // pp) if kept(pp, most // (pp * tp), tp)
    }
    for dp in replicas:
        for tp in widths:
            if dp * tp > most:
                break
            stages = [asked.pp] if asked.pp else range(1, min(len(problem.model.components), most // (dp * tp)) + 1)
            found.update((pp, dp, tp) for pp in stages if pp * dp * tp <= most and kept(pp, dp, tp))
    for pp, dp, tp in sorted(found, key=lambda axes: (-math.prod(axes), axes[0], axes[2])):
        yield from _sharded(problem, Mesh(pp=pp, dp=dp, tp=tp, cp=context, ep=experts))


def inner_axes(problem: PlanningProblem) -> tuple[int, int]:
    """cp and ep of the plans of a problem: those that its model is divided by, else those that are asked for."""
    if problem.division is not None:
        return problem.division.cp, problem.division.ep
    return problem.constraints.cp or 1, problem.constraints.ep or 1


FEWEST_TOKENS = 4096
"""Of a piece of the sequence that is tried where cp is free: the shortest of public recipes (NeMo's Llama 3 8B and 70B have
cp = 2 of 8192 tokens; Llama 3 405B had 16 of 131,072)."""


def divided_problems(problem: PlanningProblem) -> list[PlanningProblem]:
    """The problem on every choice of cp and ep that the question leaves free, each with the model of a rank.

    Raises:
        PlanError: the model cannot be divided as the question asks.
    """
    asked, size = problem.constraints, problem.cluster.size
    free = problem.inner_axes and not asked.synchronisation.is_relaxed
    pieces = [cp for cp in divisors(tokens_of(problem.model)) if cp <= size and tokens_of(problem.model) >= cp * FEWEST_TOKENS]
    contexts = [asked.cp] if asked.cp else pieces if free and pieces else [1]
    experts = [asked.ep] if asked.ep else list(divisors(experts_of(problem.model))) if free else [1]
    choices = [(cp, ep) for cp in contexts for ep in experts if math.lcm(cp, ep) <= size or (asked.cp and asked.ep)]
    found, refused = list[PlanningProblem](), list[PlanError]()
    for cp, ep in choices:
        try:
            found.append(problem.on(Mesh(dp=ep, cp=cp, ep=ep), len(experts)))
        except PlanError as error:
            refused.append(error)
    if refused and not found:
        raise refused[0]
    return found


def _sharded(problem: PlanningProblem, mesh: Mesh) -> Iterator[Mesh]:
    """The mesh, and with sharding groups of one node each where replicas span several; with the groups that are asked for."""
    asked, width = problem.constraints.dp_shard, mesh.tp * mesh.cp
    if asked is not None:
        if mesh.dp % asked == 0 and asked * mesh.cp % mesh.ep == 0 and asked * mesh.cp > 1:
            yield replace(mesh, dp_shard=asked)
        return
    yield mesh
    if problem.zero_stages == (0,) or problem.constraints.synchronisation.is_relaxed:
        return
    on_a_node = devices_on_a_node(problem)
    size, rest = divmod(on_a_node, width)
    spans = on_a_node < problem.cluster.size and not rest and 1 < size < mesh.dp
    if spans and mesh.dp % size == 0 and size * mesh.cp % mesh.ep == 0:
        yield replace(mesh, dp_shard=size)


@once
def devices_on_a_node(problem: PlanningProblem) -> int:
    """How many devices every node has, if ranks fill one node after the other; else all, for there are no nodes to speak of."""
    cluster = problem.cluster
    if cluster.profile.communication.link_model is None:
        return cluster.size
    most = cluster.most_on_a_node
    return most if all(node == rank // most for rank, (node, _) in enumerate(cluster.places)) else cluster.size


def microbatch_counts(problem: PlanningProblem, mesh: Mesh) -> list[int]:
    """Every number of microbatches into which a replica's samples divide, ascending.

    Raises:
        ScheduleError: the batch does not divide over the replicas, or not into the microbatches that are asked for.
    """
    return list(_counts_of(problem, mesh.dp))


@once
def _counts_of(problem: PlanningProblem, dp: int) -> Sequence[int]:
    batch, asked = problem.global_batch, problem.constraints.microbatches
    parts, what, multiple = dp, f"dp ({dp})", str(dp)
    if asked is not None and batch % dp == 0:
        parts = dp * asked
        what, multiple = f"dp ({dp}) * microbatches ({asked}) = {parts}", "it"
    if batch % parts:
        raise ScheduleError(
            f"global_batch ({batch}) is not divisible by {what}; use a multiple of {multiple}, e.g. "
            f"{max(1, round(batch / parts)) * parts}"
        )
    if asked is not None:
        return [asked]
    least = max(problem.model.least_samples.values(), default=1)
    counts = [count for count in divisors(batch // dp) if batch // dp // count >= least]
    if not counts:
        raise ScheduleError(
            f"global_batch ({batch}) over dp ({dp}) leaves {batch // dp} sample per replica, and "
            f"{next(iter(problem.model.least_samples))} needs {least} at once (batch norm of one value per channel and "
            f"sample); use a multiple of {least * dp}"
        )
    return counts


def orders(problem: PlanningProblem, mesh: Mesh) -> list[tuple[str, int]]:
    """Pipeline orders with the stages per rank that they take; one of them where there is no pipeline.

    Raises:
        ScheduleError: the model has too few components.
    """
    constraints = problem.constraints
    free = [name for name in FREE_ORDERS if not constraints.orders or name in constraints.orders]
    names = free if constraints.pipeline_order is None else (constraints.pipeline_order,)
    most = len(problem.model.components) // mesh.pp
    if mesh.pp == 1:
        return [(constraints.pipeline_order or "1f1b", 1)]
    possible = []
    for name in names:
        row = PIPELINE_ORDERS[name]
        counts = {row.fewest_chunks, *FREE_CHUNKS} if constraints.chunks is None else {constraints.chunks}
        possible += [(name, count) for count in sorted(counts) if row.takes(count) and count <= most]
    if not possible:
        chunked = "" if constraints.chunks is None else f" with {constraints.chunks} chunks each"
        raise ScheduleError(
            f"{problem.model.name} has {len(problem.model.components)} components for {mesh.pp} ranks of a pipeline{chunked}; "
            'use fewer stages, or granularity "layer" with tp = 1'
        )
    return possible


def bucket_sizes(problem: PlanningProblem) -> tuple[int, ...]:
    """Bucket sizes that differ for this model: of those that hold it whole the first."""
    if problem.constraints.bucket_bytes is not None:
        return (problem.constraints.bucket_bytes,)
    whole = sum(parameter.size_bytes for parameter in problem.model.trainable_parameters)
    holding = [size for size in BUCKET_BYTES if size >= whole]  # the default first
    return (*(size for size in BUCKET_BYTES if size < whole), *holding[:1])


def other_bucket_sizes(problem: PlanningProblem, layout: PlanIndex) -> list[int]:
    """Further bucket sizes worth trying: every one that makes other buckets, or some small ones where these are too many.

    A bucket is closed once it holds `bucket_bytes`. So buckets change only where it passes the sum of a run of parameters.
    """
    if problem.constraints.bucket_bytes is not None:
        return []
    whole = problem.layout(replace(layout.plan, bucket_bytes=2**62))
    runs = [[each.size_bytes for each in bucket.parameters] for bucket in whole.buckets if len(bucket.group) > 1]
    if not runs:
        return []
    if sum(len(run) * (len(run) + 1) // 2 for run in runs) > MOST_BUCKET_SIZES:
        most = max(map(sum, runs))
        return [size for size in SMALL_BUCKET_BYTES if size < most <= size * MOST_SMALL_BUCKETS]
    sums = {sum(run[first:last]) for run in runs for last in range(1, len(run) + 1) for first in range(last)}
    by_closings = {_closings(runs, size): 0 for size in bucket_sizes(problem)}
    for size in sorted(sums - {0}, reverse=True):
        by_closings.setdefault(_closings(runs, size), size)
    return [size for size in by_closings.values() if size]


def _closings(runs: Sequence[Sequence[int]], bucket_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Per run of parameters after which of them a bucket is closed."""
    closings = []
    for run in runs:
        held, closed = 0, []
        for number, size in enumerate(run):
            held += size
            if held >= bucket_bytes or number == len(run) - 1:
                closed.append(number)
                held = 0
        closings.append(tuple(closed))
    return tuple(closings)


def zero_stages(problem: PlanningProblem, layout: PlanIndex) -> tuple[int, ...]:
    """Every stage that is asked for; 0 alone where no two ranks hold the same parameters, and not with sharding groups."""
    mesh = layout.plan.mesh
    stages = problem.zero_stages_on(mesh)
    if isinstance(problem.zero_stage, int) or mesh.dp_shard:
        return stages
    shared = mesh.copies > 1 or any(len(group) > 1 for group in layout.buckets.groups.values())
    return stages if shared else (0,)


# Of large problems, the parts that are opened first: what people choose, on all devices, the most promising first.
#
# Every usual part has an estimate beside its bound (`parsim.search.estimate`). They are opened in the order of the estimates,
# as far as their bounds are below the best plan and the search's allowance lasts. All other parts follow. The answer counts
# what is left then as "not tried". Problems that are not large are searched without this.


LARGE = 4096
"""Devices times components, times the choices of ep, from which a problem is large."""

USUAL_ORDERS = ("1f1b", "interleaved")

MOST_LATE = 2000
"""Parts that refine what was found (other cuts, other bucket sizes), of which so many are opened."""

FEW_COMPONENTS = 6
"""Up to so many, all joint choices of placements may be listed."""

MOST_SINGLES = 500
"""Single plans that are judged beyond these parts, of models of few components: a plan of them is cheap."""

FEWEST_LATE = 20
"""The same of the largest problems, whose parts cost more to open."""

MOST_VISITS, MOST_LATE_VISITS = 120_000, 40_000
"""Components that a search visits, and in parts that refine what was found. What a part costs its `Node.visits` says."""

MICROBATCHES_PER_VISIT = 20
"""A simulation takes as long as visiting its components once for so many microbatches, and once beside."""

ACTIONS_PER_VISIT = 500
"""Of the pipelines of all ranks: the memory of a plan takes as long as visiting its components once for so many, and beside."""

FREE_RANKS, RANKS_PER_COMPONENT = 2**14, 8
"""Of a cluster: every so many beyond the first cost a visit as much as a component, because groups of ranks are listed. Llama 3
70B takes 4 CPU seconds more per plan on 100,000 GPUs than on 512."""

MOST_MISSES = 10
"""So many times the allowance may be spent until any plan fits, and once on refinements."""


@dataclass
class Allowance:
    """What a search may still spend: visits of components. It knows no clock, so one question has one answer.

    Attributes: problem: of which plans are visited. left: visits. misses: how many times `MOST_VISITS` more, until any plan
        fits. memories: of how many plans the memory was known when it was last asked.
    """

    problem: PlanningProblem
    left: float = field(default_factory=lambda: float(MOST_VISITS))
    misses: int = MOST_MISSES
    memories: int = 0

    @property
    def components(self) -> float:
        """Of the model, and what ranks cost beside."""
        ranks = max(0, self.problem.cluster.size - FREE_RANKS)
        return len(self.problem.model.components) + ranks / RANKS_PER_COMPONENT

    @property
    def spent(self) -> float:
        """The share of the allowance that is spent."""
        return 1 - self.left / MOST_VISITS

    def lasts(self, *, known: bool) -> bool:
        """Whether another part may be opened. Without a plan that fits (`known`) the search goes on for longer."""
        remembered = self.problem.with_memory  # however its model is divided
        for plan in islice(remembered, self.memories, None):
            actions = plan.mesh.pp * plan.chunks * plan.microbatches
            self.left -= (REMEMBERED + actions / ACTIONS_PER_VISIT) * self.components
        self.memories = len(remembered)
        return self.left > (0 if known else -self.misses * MOST_VISITS)

    def open(self, visits: int) -> None:
        """A part was opened that costs so many visits of all components."""
        self.left -= visits * self.components

    def simulate(self, plan: Plan) -> None:
        """A plan was simulated."""
        self.left -= self.components * (1 + plan.microbatches / MICROBATCHES_PER_VISIT)


def is_large(problem: PlanningProblem) -> bool:
    """Whether some parts of a search are opened before others."""
    choices = 1 if problem.division is None else problem.division.choices
    return problem.cluster.size * len(problem.model.components) * choices > LARGE


def is_small(problem: PlanningProblem) -> bool:
    """Whether all that a search might open is opened, whatever it takes."""
    return len(problem.model.components) <= FEW_COMPONENTS


def most_late(problem: PlanningProblem) -> int:
    """How many parts are opened that refine what was found."""
    size = problem.cluster.size * len(problem.model.components)
    return max(FEWEST_LATE, int(MOST_LATE * min(1.0, LARGE / size) ** 2))


def most_singles(problem: PlanningProblem) -> int:
    """How many plans are judged that have a bound when no more of these parts may be opened."""
    return MOST_SINGLES if len(problem.model.components) <= FEW_COMPONENTS else 0


def is_usual(problem: PlanningProblem, mesh: Mesh, order: tuple[str, int]) -> bool:
    """Whether a part of a large problem is opened first."""
    constraints = problem.constraints
    within = constraints.tp is not None or problem.cluster.most_on_a_node % mesh.tp == 0
    return within and (
        constraints.pipeline_order is not None or constraints.chunks is not None or mesh.pp == 1 or order[0] in USUAL_ORDERS
    )


# Uneven pipeline stages, chosen by cost: contiguous runs of components whose slowest stage is as fast as can be.
#
# Exact dynamic programme over (stages, components). Ties are broken towards the smaller sum of transfers. Leaves out the
# fill and drain of the pipeline, which the simulator adds when the candidates are judged.


INFINITE = float("inf")


SAME = 1 + 1e-9
"""Sums of equal seconds in another order differ by less than this factor."""


def partition(
    components: int,
    stages: int,
    stage_s: Callable[[int], Floats],
    cut_s: Sequence[float],
) -> tuple[tuple[int, int], ...]:
    """Bounds (first, one past the last) of each stage.

    Args:
        components: n >= stages >= 1.
        stage_s: stage_s(stage) is float64 [n + 1, n + 1]: at [last, first] the time of components first..last-1 on that
            stage's devices, in seconds; infinite where they do not fit its memory, and for first >= last.
        cut_s: cut_s[i] is the transfer across the cut before component i (0 < i < n), in seconds.

    Raises:
        ScheduleError: fewer components than stages, or no partition fits the memory.
    """
    if stages > components:
        raise ScheduleError(f"{components} components cannot fill {stages} pipeline stages; use at most {components} stages")
    transfer_s = np.array([0.0, *cut_s[1:components], 0.0])
    slowest = np.full(components + 1, INFINITE)
    moved = np.zeros(components + 1)
    slowest[0] = 0.0
    cuts: list[NDArray[np.int64]] = []
    for stage in range(stages):
        reached = np.maximum(slowest, stage_s(stage))
        least = reached.min(axis=1)
        sums = np.where(reached <= least[:, None] * SAME, moved + transfer_s, INFINITE)
        fewest = sums.min(axis=1)
        cuts.append((sums <= fewest[:, None] * SAME).argmax(axis=1))  # the first: later stages, which keep less, get more
        slowest, moved = least, fewest
    if slowest[components] == INFINITE:
        raise ScheduleError(f"no cut into {stages} stages fits the devices' memory; use more devices or a smaller batch")
    bounds: list[tuple[int, int]] = []
    end = components
    for starts in reversed(cuts):
        start = int(starts[end])
        bounds.append((start, end))
        end = start
    return tuple(reversed(bounds))


def sums_between(up_to: Floats) -> Floats:
    """float64 [n + 1, n + 1]: at [last, first] the sum of entries first..last-1, from running sums (`up_to[0]` is 0)."""
    sums: Floats = up_to[:, None] - up_to[None, :]
    return sums


# Every cut of a chain into pipeline stages, the one with the least bound first.
#
# Let t_s be the time of one microbatch on stage s, and e_s the least time of what comes before it. No pipeline takes less
# than e_s + M t_s for any s. The largest of these is the bound of a cut. A best-first search over (stage, first component)
# finds the cuts in its order: what the remaining stages take at least is known exactly, by a dynamic programme from the last
# stage on.


Bounds = tuple[tuple[int, int], ...]

MOST_ENTRIES = 2**21
"""Of the tables of all stages together. Beyond, only the cut whose slowest stage is fastest is known."""


def count_cuts(components: int, stages: int) -> int:
    """Cuts of so many components into so many runs, none of them empty."""
    return comb(components - 1, stages - 1)


def every_cut(components: int, stages: int) -> Iterator[Bounds]:
    """All of them, of which `count_cuts` are few."""
    for inner in combinations(range(1, components), stages - 1):
        yield tuple(pairwise((0, *inner, components)))


def are_listed(components: int, stages: int) -> bool:
    """Whether `cuts_by_bound` takes a problem of this size."""
    return (components + 1) ** 2 * stages <= MOST_ENTRIES


def cuts_by_bound(
    components: int, stages: int, stage_s: Callable[[int], Floats], before_s: Floats, microbatches: int
) -> Iterator[tuple[float, Bounds]]:
    """Pairs of bound and cut, bounds ascending.

    Args:
        stage_s: as `partition` takes it. before_s: float64 [n + 1], what comes before a stage at least, by its first component.

    Yields:
        Seconds that no pipeline with the cut goes below, and per stage its first component and one past its last. Cuts with a
        stage that is infinite are left out.
    """
    rounds = [microbatches * stage_s(stage) + before_s[None, :] for stage in range(stages)]
    to_go = [np.full(components + 1, INFINITE) for _ in range(stages + 1)]
    to_go[stages][components] = 0.0
    for stage in range(stages - 1, -1, -1):
        to_go[stage] = np.maximum(rounds[stage], to_go[stage + 1][:, None]).min(axis=0)
    heap: list[tuple[float, int, tuple[int, ...]]] = [(float(to_go[0][0]), 0, (0,))]
    while heap:
        bound, depth, starts = heapq.heappop(heap)
        if bound == INFINITE:
            return
        stage = -depth
        if stage == stages:
            yield bound, tuple(pairwise(starts))
            continue
        decided = (float(rounds[number][last, first]) for number, (first, last) in enumerate(pairwise(starts)))
        reached = np.maximum(max(decided, default=0.0), np.maximum(rounds[stage][:, starts[-1]], to_go[stage + 1]))
        for last in np.flatnonzero(np.isfinite(reached)).tolist():
            heapq.heappush(heap, (float(reached[last]), depth - 1, (*starts, last)))


# A part of a family of plans, with a lower bound of the steps of its plans.


CUT, BOUNDED, REMEMBERED = 2, 3, 2
"""In visits of all components, what parts cost to open: the bound of a cut; those of its ZeRO stages. And the memory of each
plan that is worked out meanwhile."""


@dataclass(frozen=True)
class Node:
    """A part of a family.

    Attributes:
        bound_s: no plan of it is simulated to take less. size: plans in it.
        opened: the parts it consists of; None for a single plan. Raises PlanError or ScheduleError if it has none.
        plan: the single plan. instead: what may be judged in its place if it does not fit.
        missing_bytes: by how much none of its plans can fit; 0 where some might. None: not known.
            Infinite: other parts are closer.
        over_bytes: by how much the single plan is known not to fit; 0 where it might.
        late: to be opened once the best plan of all other parts is known, and only if it may be faster than that one.
        promise_s: what its best plan is likely to take; usual: whether it is opened before all that are not. They decide
            nothing but the order of parts.
        fits: whether the single plan is known to fit.
        covered: whether late parts beside it hold all its plans that may win: it is left out where these are opened.
        instead_of_one: whether it is judged in place of a single plan that does not fit.
        at_once: whether it is opened before all others, as are the parts it consists of: to come to it took long.
        visits: what opening it costs, in visits of all components (`parsim.search.space.Allowance`).
        mesh: of all its plans; None where that is not known, or they have several.
    """

    bound_s: float
    size: int
    opened: Callable[[], list[Node]] | None = None
    plan: Plan | None = None
    instead: Callable[[], Iterator[Node]] | None = None
    missing_bytes: Callable[[], float] | None = None
    over_bytes: float = 0.0
    late: bool = False
    promise_s: float = float("inf")
    usual: bool = True
    fits: bool = False
    covered: bool = False
    instead_of_one: bool = False
    at_once: bool = False
    visits: int = 1
    mesh: Mesh | None = None

    @property
    def expected_s(self) -> float:
        """What it is likely to take, where that is known; else what it takes at least."""
        return self.bound_s if self.promise_s == float("inf") else max(self.bound_s, self.promise_s)

    @property
    def is_one(self) -> bool:
        """Whether it is a single plan, or is judged in place of one."""
        return self.plan is not None or self.instead_of_one


@dataclass(frozen=True, kw_only=True)
class PosedPlacement:
    """A solution of the placement problem, and where it was posed."""

    mesh: Mesh
    microbatches: int
    solution: Solution

    def to_dict(self) -> dict[str, object]:
        mesh = {"pp": self.mesh.pp, "dp": self.mesh.dp, "tp": self.mesh.tp}
        return {**self.solution.to_dict(), "microbatches": self.microbatches, "mesh": mesh}
