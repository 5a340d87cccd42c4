"""ZeRO 2 and 3: the buckets that lie whole on a rank for a while only, and come and go with every microbatch.

A bucket's gradients are whole from the first backward that adds to them to the last one of the microbatch. Then one
reduce_scatter leaves every rank its part of the sum, which it accumulates over the microbatches. At most one lot of
buckets is being sent while the next fills: a backward that begins a bucket waits until those closed before the last ones
are gone.

With ZeRO 3 a bucket's parameters, frozen ones too, are whole from an all_gather before the first forward or backward that
needs them to the last one before others are needed. They are gathered while the previous computation runs on other
parameters, and not earlier. The all_gather waits for the computation before that one, so at most two sets of parameters are
whole. Without `backward_prefetch` it waits, in the backward, for all computation before, and stands behind the last
reduce_scatter.

Why it cannot deadlock: all ranks of a place on the pp axis have the same list of computation, and all_gathers and
reduce_scatters follow one order along it. Whatever one of them waits for comes earlier in both, and a computation waits
only for those that stand before it.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), stages 2 and 3.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from parsim.plans.pipeline import Action, pipeline_actions
from parsim.program.buckets import Bucket, BucketsByFamily, by_family
from parsim.program.passes.compute import computations
from parsim.program.passes.gradients import DP_STREAM, bucket_work, gathering_work, microbatch_sum_key
from parsim.program.passes.inside import first_key
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import Draft, Origin, Resource, TaskKey
from parsim.work import Collective, Phase


class Use(NamedTuple):
    """A computation on the ranks of a place on the pp axis."""

    phase: Phase
    component: str
    microbatch: int

    def key(self, rank: int) -> TaskKey:
        return (self.phase, rank, self.component, self.microbatch)


class Window(NamedTuple):
    """The uses, by number, during which the gradients of a bucket, or its `parameters`, lie whole on its ranks: from the first
    to the last that needs it. `ahead`: the one at which parameters may be gathered; `freed`: the last during which gradients
    may still be being sent."""

    bucket: Bucket
    parameters: bool
    ahead: int
    first: int
    last: int
    freed: int

    @property
    def place(self) -> tuple[int, int, int]:
        """Where its collective stands along the computation, and among its like."""
        return (2 * self.ahead if self.parameters else 2 * self.last + 1, self.first, self.bucket.number)


def uses_of(layout: PlanIndex, place: int, actions: Sequence[Action] | None = None) -> tuple[Use, ...]:
    """All computations at a place on the pp axis, in order; those of some actions, where these are given."""
    plan = layout.plan
    if actions is None:
        actions = pipeline_actions(plan.pipeline_order, place, plan.mesh.pp, plan.microbatches, plan.chunks)
    in_action: dict[tuple[int, Phase], list[tuple[Phase, str]]] = {}
    uses: list[Use] = []
    for stage, phase, microbatch in actions:
        if (stage, phase) not in in_action:
            in_action[stage, phase] = list(computations(layout, stage, phase))
        uses += [Use(task_phase, name, microbatch) for task_phase, name in in_action[stage, phase]]
    return tuple(uses)


def gradient_windows(layout: PlanIndex, uses: Sequence[Use], buckets: BucketsByFamily) -> list[Window]:
    """When gradients are whole, in the uses of a place. `buckets`: those that are asked for, with all others of their
    groups."""
    spans: dict[tuple[int, int], tuple[Bucket, int, int]] = {}
    weights: dict[str, tuple[Phase, list[Bucket]]] = {}
    for number, (phase, name, microbatch) in enumerate(uses):
        if name not in weights:
            here = [bucket for bucket in layout.unsharded_buckets(name, buckets) if bucket.trainable]
            weights[name] = layout.weight_phase(name), here
        weight_phase, ready = weights[name]
        if phase is weight_phase:
            for bucket in ready:
                key = (bucket.number, microbatch)
                span = spans.get(key)
                spans[key] = (bucket, number if span is None else span[1], number)
    ends: dict[int, list[int]] = {}
    begins: dict[int, list[int]] = {}
    for bucket, first, last in spans.values():  # buckets of the same ranks share one tuple: thousands are not compared
        begins.setdefault(id(bucket.group), []).append(first)
        ends.setdefault(id(bucket.group), []).append(last)
    ends = {group: sorted(set(numbers)) for group, numbers in ends.items()}
    begins = {group: sorted(set(numbers)) for group, numbers in begins.items()}
    windows = []
    for bucket, first, last in spans.values():
        closed, opened = ends[id(bucket.group)], begins[id(bucket.group)]
        after = bisect_left(closed, last) + 1
        freed = len(uses) - 1
        if after < len(closed):  # whoever begins a bucket once the next lot is closed waits for this one
            later = bisect_left(opened, closed[after] + 1)
            freed = opened[later] - 1 if later < len(opened) else freed
        windows.append(Window(bucket, False, first, first, last, freed))
    return windows


def parameter_windows(layout: PlanIndex, uses: Sequence[Use], buckets: BucketsByFamily) -> list[Window]:
    """When parameters are whole (ZeRO 3), in the uses of a place. `buckets`: as `gradient_windows` takes them."""
    if layout.plan.zero_stage < 3:
        return []
    windows: list[Window] = []
    whole: dict[int, tuple[int, int]] = {}
    needed: frozenset[int] = frozenset()
    before, current = -1, -1  # the last uses of the lot before the current one, and of the current one

    def release(leaving: Sequence[Bucket], last: int) -> None:
        for bucket in leaving:
            ahead, first = whole.pop(bucket.number)
            windows.append(Window(bucket, True, ahead, first, last, last))

    changes: dict[tuple[frozenset[int], frozenset[int]], tuple[list[Bucket], list[Bucket]]] = {}

    def change(old: frozenset[int], new: frozenset[int]) -> tuple[list[Bucket], list[Bucket]]:
        """The buckets that leave and those that enter, among those that are asked for."""
        if (old, new) not in changes:
            both = sorted(old - new), sorted(new - old)
            leaving, entering = ([bucket for begin in some for bucket in buckets.get(begin, ())] for some in both)
            changes[old, new] = leaving, entering
        return changes[old, new]

    families_of = {name: frozenset(layout.unsharded_families[name]) for name in {use.component for use in uses}}
    for number, use in enumerate(uses):
        families = families_of[use.component]
        if not families:
            continue
        if needed != families:
            leaving, entering = change(needed, families)
            release(leaving, current)
            ahead = before + 1 if use.phase is Phase.FORWARD or layout.plan.backward_prefetch else number
            whole |= {bucket.number: (ahead, number) for bucket in entering}
            before, needed = current, families
        current = number
    release(change(needed, frozenset())[0], current)
    return windows


def add_unsharded_buckets(draft: Draft, layout: PlanIndex) -> None:
    """The collectives of all buckets that come and go, place by place."""
    if layout.plan.zero_stage < 2:
        return
    every = [layout.buckets, *([layout.frozen_buckets] if layout.plan.zero_stage >= 3 else [])]
    kept = by_family(some.of(family, place) for some in every for family, place in some.places(draft.keeps_any))
    ranks = {number: draft.kept(group) for some in every for number, group in some.groups.items()}
    for place in range(layout.plan.mesh.pp):
        uses = uses_of(layout, place)
        in_order = attrgetter("place")
        gradients = sorted(gradient_windows(layout, uses, kept), key=in_order)
        collectives = _Collectives(draft, layout, uses, ranks)
        for window in sorted([*gradients, *parameter_windows(layout, uses, kept)], key=in_order):
            collectives.add(window)
        # whoever begins a bucket waits for the last of those of its group that are not to outlast this
        freed = {(id(window.bucket.group), window.freed): window for window in gradients}
        for group, first in dict.fromkeys((id(window.bucket.group), window.first) for window in gradients):
            sent = freed.get((group, first - 1))
            for rank in ranks[group] if sent is not None else ():
                assert sent is not None
                key = microbatch_sum_key(sent.bucket, uses[sent.last].microbatch)
                use = uses[first]
                draft.wait(first_key(layout, use.phase, rank, use.component, use.microbatch), key)


class _Collectives:
    """What a place on the pp axis sends of its buckets, window by window. `kept`: by the identity of a group, which all its
    buckets share, those of its ranks that are lowered."""

    def __init__(self, draft: Draft, layout: PlanIndex, uses: Sequence[Use], kept: Mapping[int, list[int]]) -> None:
        self._draft = draft
        self._layout = layout
        self._uses = uses
        self._kept = kept
        self._streams = {group: tuple(Resource(rank, DP_STREAM) for rank in ranks) for group, ranks in kept.items()}
        self._works: dict[tuple[int, bool], Collective] = {}
        names = {use.component for use in uses}
        self._needing = [layout.unsharded_families[use.component] for use in uses]
        self._everywhere = all(layout.placement[name].kind != "place" for name in names)
        self._first: dict[int, list[TaskKey]] = {}
        self._after: dict[tuple[int, bool, int], tuple[TaskKey, ...]] = {}

    def add(self, window: Window) -> None:
        layout, uses, bucket = self._layout, self._uses, window.bucket
        group, number, microbatch = id(bucket.group), bucket.number, uses[window.first].microbatch
        kind, gathered = (number, window.parameters), window.parameters
        key: TaskKey = ("gather", number, window.first) if gathered else microbatch_sum_key(bucket, microbatch)
        if kind not in self._works:
            self._works[kind] = gathering_work(bucket) if gathered else bucket_work(layout, bucket)
        after = self._awaited(group, window)
        origin = partial(Origin, stage=bucket.stages[0], bucket=number, microbatch=microbatch)
        self._draft.add_alike(key, (self._works[kind], self._streams[group], after), origin)
        if not gathered:
            return
        needed = [use for use in range(window.first, window.last + 1) if bucket.family.begin in self._needing[use]]
        for rank in self._kept[group]:
            first = self._first_of(rank)
            for use in needed:
                self._draft.wait(first[use], key)

    def _awaited(self, group: int, window: Window) -> tuple[TaskKey, ...]:
        """What a collective waits for on all ranks: one tuple for all that wait for the same."""
        end = window.ahead if window.parameters else window.last
        where = group, window.parameters, end
        if where not in self._after:
            ranks = self._kept[group]
            if window.parameters:
                self._after[where] = tuple([before for rank in ranks for before in self._latest(rank, end)])
            else:
                self._after[where] = tuple([self._uses[end].key(rank) for rank in ranks])
        return self._after[where]

    def _first_of(self, rank: int) -> list[TaskKey]:
        """By number of the use the key of the task with which it begins on a rank."""
        if rank not in self._first:
            self._first[rank] = [first_key(self._layout, use.phase, rank, use.component, use.microbatch) for use in self._uses]
        return self._first[rank]

    def _latest(self, rank: int, ahead: int) -> list[TaskKey]:
        """The last thing the rank computes before use `ahead`, if anything."""
        layout, uses = self._layout, self._uses
        for number in range(ahead - 1, -1, -1):
            if self._everywhere or layout.placement[uses[number].component].runs_on(layout.plan.shard_of_rank(rank)):
                return [uses[number].key(rank)]
        return []
