"""Pipeline orders: which action each rank of a pipeline runs next. A new order is one function and one row.

Actions print as in PyTorch's pipelining: `1F0` is stage 1, forward, microbatch 0. B is a whole backward; I and W are its
halves (gradients of inputs, gradients of weights). With V chunks per rank there are V * S stages. The order's row places
each on a rank of the pipeline: in a loop (stage s on rank s % S) or in a V (there and back).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from parsim.errors import DeadlockError, PlanError
from parsim.registry import Registry
from parsim.work import Phase

_PHASES = {phase.short: phase for phase in Phase if phase not in (Phase.OPTIMIZER, Phase.RECOMPUTE)}
_CELLS_SHOWN = 4
"""Actions shown on either side of the blocked one in the grid of a deadlock."""


MOST_CHECKED = 2048
"""Actions of a step. Shipped orders follow one rule at every size, and tests check them at small ones. So longer steps
of theirs are not walked through.
"""


class Action(NamedTuple):
    """One phase of one microbatch on one stage."""

    stage: int
    phase: Phase
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.phase.short}{self.microbatch}"


Actions = tuple[Action, ...]


def in_a_loop(stage: int, ranks: int) -> int:
    """Place stage s on rank s % S."""
    return stage % ranks


def in_a_v(stage: int, ranks: int) -> int:
    """Place chunk after chunk there and back: with two chunks, rank r has the stages r and 2 S - 1 - r."""
    chunk, step = divmod(stage, ranks)
    return step if chunk % 2 == 0 else ranks - 1 - step


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOrder:
    """One pipeline order.

    Attributes:
        actions: (rank of the pipeline, ranks, microbatches, chunks per rank) -> its actions, in order: each of the rank's
            stages runs every microbatch forward and backward once. Raises PlanError for microbatches it cannot have.
        place: (stage, ranks) -> the rank that runs the stage; every rank has as many. fewest_chunks, most_chunks (None: any):
            stages per rank.
        halves: its backwards run in halves, BACKWARD_INPUT and BACKWARD_WEIGHT.
        full_in_torch: torch's schedule refuses fewer microbatches than stages; parsim's executor runs them.
    """

    actions: Callable[[int, int, int, int], Actions]
    place: Callable[[int, int], int] = in_a_loop
    fewest_chunks: int = 1
    most_chunks: int | None = 1
    halves: bool = False
    full_in_torch: bool = False

    def __post_init__(self) -> None:
        if self.fewest_chunks < 1 or (self.most_chunks is not None and self.most_chunks < self.fewest_chunks):
            raise PlanError(
                f"a pipeline order takes 1 <= fewest_chunks <= most_chunks, got {self.fewest_chunks} and {self.most_chunks}"
            )

    def takes(self, chunks: int) -> bool:
        return self.fewest_chunks <= chunks and (self.most_chunks is None or chunks <= self.most_chunks)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What every stage runs for every microbatch."""
        return (Phase.FORWARD, *((Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT) if self.halves else (Phase.BACKWARD,)))


def parse_action(text: str) -> Action:
    """Inverse of `str(action)`. Raises PlanError."""
    match = re.fullmatch(rf"(\d+)([{''.join(_PHASES)}])(\d+)", text)
    if match is None:
        raise PlanError(f"cannot read action {text!r}; write stage, one of {', '.join(_PHASES)}, microbatch, as in 1F0")
    return Action(int(match[1]), _PHASES[match[2]], int(match[3]))


def gpipe(rank: int, ranks: int, microbatches: int, chunks: int) -> Actions:
    """All forwards, then all backwards: the least dependence on timing, all microbatches in flight. Source: Huang et al., GPipe
    (2019); order of PyTorch's ScheduleGPipe."""
    del ranks, chunks
    forward = tuple(Action(rank, Phase.FORWARD, number) for number in range(microbatches))
    return forward + tuple(Action(rank, Phase.BACKWARD, number) for number in range(microbatches))


def one_forward_one_backward(rank: int, ranks: int, microbatches: int, chunks: int) -> Actions:
    """Warm up with ranks - rank - 1 forwards, then alternate, then drain: at most ranks - rank microbatches in flight."""
    del chunks
    forward = [Action(rank, Phase.FORWARD, number) for number in range(microbatches)]
    backward = [Action(rank, Phase.BACKWARD, number) for number in range(microbatches)]
    return _alternating(forward, backward, ranks - rank - 1)


def interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> Actions:
    """1F1B over V chunks per rank, earlier microbatches first: the fill is V times shorter, the transfers V times as many.
    Microbatches run in rounds of as many as there are ranks, or somewhat more if they do not divide evenly.

    Source: Narayanan et al., Megatron-LM (2021), section 2.2; order of PyTorch's ScheduleInterleaved1F1B.
    """
    per_round = microbatches_per_round(ranks, microbatches, chunks)
    forward = _in_rounds(rank, ranks, microbatches, chunks, Phase.FORWARD)
    backward = _in_rounds(rank, ranks, microbatches, chunks, Phase.BACKWARD)
    return _alternating(forward, backward, (chunks - 1) * per_round + 2 * (ranks - 1 - rank))


def zero_bubble(rank: int, ranks: int, microbatches: int, chunks: int) -> Actions:
    """ZB-H1: the backward in halves; at most `rank` halves for weights wait, and they fill the drain.

    Source: Qi et al., Zero Bubble Pipeline Parallelism (2023), section 2; order of PyTorch's ScheduleInterleavedZeroBubble.
    """
    per_round = microbatches_per_round(ranks, microbatches, chunks)
    forward = _in_rounds(rank, ranks, microbatches, chunks, Phase.FORWARD)
    inputs = _in_rounds(rank, ranks, microbatches, chunks, Phase.BACKWARD_INPUT)
    weights = _in_rounds(rank, ranks, microbatches, chunks, Phase.BACKWARD_WEIGHT)
    warm_up = min(len(forward), (chunks - 1) * per_round + ranks - 1 - rank)
    actions = forward[:warm_up]
    for number, action in enumerate(inputs):
        actions.extend(forward[warm_up + number : warm_up + number + 1])
        actions.append(action)
        if number >= rank:
            actions.append(weights[number - rank])
    actions.extend(weights[max(0, len(inputs) - rank) :])
    return tuple(actions)


def zero_bubble_v(rank: int, ranks: int, microbatches: int, chunks: int) -> Actions:
    """ZB-V: two chunks per rank in a V, so the first rank has the loss; each backward in halves, the late ones fill the drain.

    There is no bubble if forward and both halves take equally long. A rank holds at most 2 S chunks of a microbatch. With fewer
    than 2 S - 1 microbatches the actions of the missing ones are left out.

    Source: Qi et al., Zero Bubble Pipeline Parallelism (2023), section 6; order of PyTorch's ScheduleZBVZeroBubble.
    """
    near, far = rank, chunks * ranks - 1 - rank
    total = max(2 * ranks - 1, microbatches)
    done: dict[tuple[int, str], int] = {}
    made: list[Action] = []

    def run(stage: int, phases: str, times: int = 1) -> None:
        """The next microbatch of each phase, as long as there is one."""
        for phase in phases * times:
            number = done.get((stage, phase), 0)
            if number < total:
                done[stage, phase] = number + 1
                made.append(Action(stage, _PHASES[phase], number))

    run(near, "F", 2 * (ranks - rank) - 1)
    for _ in range(rank):
        run(far, "F")
        run(near, "F")
    run(far, "FIW", ranks - rank)
    for _ in range(total - ranks):
        run(near, "FIW")
        run(far, "FIW")
    for _ in range(rank):
        run(near, "I")
        run(far, "I")
    run(near, "IW", ranks - rank)
    run(far, "W", total)
    run(near, "W", total)
    return tuple(action for action in made if action.microbatch < microbatches)


def dual_pipe_v(rank: int, ranks: int, microbatches: int, chunks: int) -> Actions:
    """DualPipeV: two chunks per rank in a V; between fill and drain a forward of one chunk is followed by a backward of the
    other.

    Halves for weights follow at once, and wait where they fill the drain. With fewer than 2 S microbatches the actions of the
    missing ones are left out. Leaves out: communication inside a forward (of experts) does not hide behind the backward beside
    it, which is what DeepSeek made the order for.

    Source: DeepSeek-V3 (2024), section 3.2.1; order of PyTorch's ScheduleDualPipeV, its overlapped pairs one after another.
    """
    near, far = rank, chunks * ranks - 1 - rank
    total = max(2 * ranks, microbatches)
    done: dict[tuple[int, str], int] = {}
    made: list[Action] = []
    waiting: list[Action] = []

    def run(stage: int, phase: str) -> None:
        number = done.get((stage, phase), 0)
        done[stage, phase] = number + 1
        made.append(Action(stage, _PHASES[phase], number))

    def backward(stage: int, *, weights: bool = True) -> None:
        run(stage, "I")
        waiting.append(Action(stage, _PHASES["W"], done[stage, "I"] - 1))
        if weights:
            made.append(waiting.pop())

    for _ in range(2 * (ranks - rank - 1)):
        run(near, "F")
    for _ in range(rank + 1):
        run(near, "F")
        run(far, "F")
    for _ in range(ranks - rank - 1):
        backward(far)
        run(far, "F")
    for _ in range(total - 2 * ranks + rank + 1):
        run(near, "F")
        backward(far)
        run(far, "F")
        backward(near)
    for _ in range(ranks - rank - 1):
        backward(far)
        run(far, "F")
        backward(near)
    for number in range(2 * (rank + 1)):
        backward((far, near)[number % 2], weights=number <= rank)
    for _ in range(ranks - rank - 1):
        made += waiting[:1]
        del waiting[:1]
        backward(near, weights=False)
    made += waiting
    return tuple(action for action in made if action.microbatch < microbatches)


def microbatches_per_round(ranks: int, microbatches: int, chunks: int) -> int:
    """Microbatches of one chunk that a rank runs before it turns to the next chunk. Raises PlanError: they do not divide into
    rounds of at least as many as there are ranks."""
    rounds = max(1, microbatches // ranks) if chunks > 1 else 1
    if microbatches % rounds:
        raise PlanError(
            f"with chunks = {chunks} the microbatches ({microbatches}) run in {rounds} equal rounds on pp = {ranks}, which "
            f"does not divide; use {rounds * ranks} or {rounds * ranks + ranks} microbatches"
        )
    return microbatches // rounds


def _in_rounds(rank: int, ranks: int, microbatches: int, chunks: int, phase: Phase) -> list[Action]:
    """A round of the first chunk, of the second and so on (backwards: of the last first), then the next round."""
    per_round = microbatches_per_round(ranks, microbatches, chunks)
    order = range(chunks) if phase is Phase.FORWARD else range(chunks - 1, -1, -1)
    return [
        Action(chunk * ranks + rank, phase, first + number)
        for first in range(0, microbatches, per_round)
        for chunk in order
        for number in range(per_round)
    ]


def _alternating(forward: Sequence[Action], backward: Sequence[Action], warm_up: int) -> Actions:
    """`warm_up` forwards, then one forward and one backward, then the remaining backwards."""
    warm_up = min(warm_up, len(forward))
    actions = list(forward[:warm_up])
    for number, action in enumerate(backward):
        actions.extend(forward[warm_up + number : warm_up + number + 1])
        actions.append(action)
    return tuple(actions)


PIPELINE_ORDERS: Registry[PipelineOrder] = Registry(
    "pipeline_order",
    PipelineOrder,
    {
        "gpipe": PipelineOrder(actions=gpipe),
        "1f1b": PipelineOrder(actions=one_forward_one_backward, full_in_torch=True),
        "interleaved": PipelineOrder(actions=interleaved, most_chunks=None),
        "zero-bubble": PipelineOrder(actions=zero_bubble, most_chunks=None, halves=True),
        "zero-bubble-v": PipelineOrder(actions=zero_bubble_v, place=in_a_v, fewest_chunks=2, most_chunks=2, halves=True),
        "dualpipe-v": PipelineOrder(
            actions=dual_pipe_v, place=in_a_v, fewest_chunks=2, most_chunks=2, halves=True, full_in_torch=True
        ),
    },
    error=PlanError,
)


def check_chunks(order: str, chunks: int) -> None:
    """Raise PlanError unless an order exists and takes so many chunks per rank."""
    row = PIPELINE_ORDERS[order]
    if row.takes(chunks):
        return
    if row.most_chunks == 1 or chunks < 1:
        several = ", ".join(name for name, other in PIPELINE_ORDERS.items() if other.most_chunks != 1)
        raise PlanError(
            f"pipeline_order {order!r} with chunks = {chunks}: only {several} have more than one chunk per "
            "rank; choose one of them or chunks = 1"
        )
    most = "" if row.most_chunks == row.fewest_chunks else " or more" if row.most_chunks is None else f" to {row.most_chunks}"
    raise PlanError(
        f"pipeline_order {order!r} with chunks = {chunks}: it takes {row.fewest_chunks}{most} stages per rank; "
        f"set chunks = {row.fewest_chunks}"
    )


def check_torch_schedule(order: str, ranks: int, microbatches: int, chunks: int = 1) -> None:
    """Raise PlanError where torch's schedule of the order refuses chunks or microbatches; parsim's executor runs some of these.

    Source: torch 2.13, torch/distributed/pipelining/schedules.py: constructors of Schedule1F1B, ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble and ScheduleDualPipeV.
    """
    check_chunks(order, chunks)
    row, stages = PIPELINE_ORDERS[order], ranks * chunks
    if row.full_in_torch and microbatches < stages:
        raise PlanError(
            f"torch's schedule of {order!r} needs at least as many microbatches as stages, and {microbatches} are fewer than "
            f'pp = {ranks} x {chunks} = {stages}; set microbatches to {stages} or more, or pipeline_order = "gpipe"'
        )
    if row.most_chunks is None and microbatches % (rounds := max(1, microbatches // ranks)):
        raise PlanError(
            f"torch's schedule of {order!r} runs microbatches ({microbatches}) in {rounds} equal rounds on pp = {ranks}; use "
            f"{rounds * ranks} or {rounds * ranks + ranks} microbatches"
        )


@lru_cache(maxsize=1024)
def pipeline_actions(order: str, rank: int, ranks: int, microbatches: int, chunks: int = 1) -> Actions:
    """The actions of one rank of a pipeline, in order. Raises PlanError: an unknown order, or chunks or microbatches it cannot
    have."""
    check_chunks(order, chunks)
    return tuple(PIPELINE_ORDERS[order].actions(rank, ranks, microbatches, chunks))


IN_ROUNDS = ("1f1b", "interleaved")
"""Orders that repeat one pattern of actions from round to round of microbatches, one per rank of the pipeline."""


def few_rounds(order: str, ranks: int, microbatches: int) -> int:
    """A number of microbatches, four rounds at most, with the same beginning, repeated pattern and end of the actions."""
    if order in IN_ROUNDS and microbatches % ranks == 0:
        return min(microbatches, 4 * ranks)
    return microbatches


def in_few_rounds(order: str, ranks: int, microbatches: int, number: int) -> int:
    """The microbatch of `few_rounds` that stands where this one does: in the beginning, the repeated part or the end."""
    few = few_rounds(order, ranks, microbatches)
    if few == microbatches or number < few // 2:
        return number
    left = microbatches - number
    return few - left if left <= few // 2 else few // 2 + number % ranks


@lru_cache(maxsize=1024)
def stages_by_rank(order: str, ranks: int, chunks: int = 1) -> tuple[tuple[int, ...], ...]:
    """Per rank of the pipeline the stages that it runs, ascending. Raises PlanError: they are not equally many."""
    place = PIPELINE_ORDERS[order].place
    found: list[list[int]] = [[] for _ in range(ranks)]
    for stage in range(ranks * chunks):
        number = place(stage, ranks)
        if not 0 <= number < ranks:
            raise PlanError(f"pipeline_order {order!r} places stage {stage} on rank {number} of {ranks}; correct its place()")
        found[number].append(stage)
    uneven = next((rank for rank, own in enumerate(found) if len(own) != chunks), None)
    if uneven is not None:
        raise PlanError(
            f"pipeline_order {order!r} gives rank {uneven} of {ranks} the stages {found[uneven]}; every rank takes {chunks}: "
            "correct its place()"
        )
    return tuple(map(tuple, found))


@lru_cache(maxsize=1024)
def rank_of_stage(order: str, ranks: int, chunks: int = 1) -> tuple[int, ...]:
    found = [0] * (ranks * chunks)
    for rank, stages in enumerate(stages_by_rank(order, ranks, chunks)):
        for stage in stages:
            found[stage] = rank
    return tuple(found)


@lru_cache(maxsize=256)
def check_order(order: str, ranks: int, microbatches: int, chunks: int = 1) -> None:
    """Check that an order runs to its end, with every action of every rank exactly once.

    Raises DeadlockError with the grid of ranks where it stops; PlanError for an action that is missing, runs twice or belongs
    to another rank, and as `pipeline_actions`.
    """
    if order in PIPELINE_ORDERS and 2 * ranks * microbatches * chunks > MOST_CHECKED:
        pipeline_actions(order, 0, ranks, microbatches, chunks)
        return
    own = [pipeline_actions(order, rank, ranks, microbatches, chunks) for rank in range(ranks)]
    phases = PIPELINE_ORDERS[order].phases
    for rank, (stages, actions) in enumerate(zip(stages_by_rank(order, ranks, chunks), own, strict=True)):
        wanted = {Action(stage, phase, number) for stage in stages for phase in phases for number in range(microbatches)}
        wrong = sorted(wanted.symmetric_difference(actions))
        if wrong or len(actions) != len(wanted):
            said = "leaves out" if wrong and wrong[0] in wanted else "runs, of another rank or phase," if wrong else "repeats"
            which = wrong[0] if wrong else next(action for action in actions if actions.count(action) > 1)
            raise PlanError(
                f"pipeline_order {order!r} on rank {rank} of {ranks} {said} action {which}; every stage of the rank "
                f"({', '.join(map(str, stages))}) runs {', '.join(phase.short for phase in phases)} once per microbatch"
            )
    check_actions(own, ranks * chunks)


def check_actions(actions: Sequence[Sequence[Action]], stages: int) -> None:
    """Raise DeadlockError unless actions, one sequence per rank in order, run to their end.

    A forward needs that of the stage before. A backward (or its half for inputs) needs the forward here and the backward of the
    stage after. The half for weights needs the half for inputs.
    """
    done: set[Action] = set()
    reached = [0] * len(actions)
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(actions):
            while reached[rank] < len(own) and not _missing(own[reached[rank]], stages, done):
                done.add(own[reached[rank]])
                reached[rank] += 1
                moved = True
    if any(count < len(own) for count, own in zip(reached, actions, strict=True)):
        raise DeadlockError(_grid_text(actions, reached, stages, done))


def _missing(action: Action, stages: int, done: set[Action]) -> list[Action]:
    stage, phase, microbatch = action
    match phase:
        case Phase.FORWARD:
            needs = [Action(stage - 1, phase, microbatch)] if stage else []
        case Phase.BACKWARD_WEIGHT:
            needs = [Action(stage, Phase.BACKWARD_INPUT, microbatch)]
        case _:
            after = [Action(stage + 1, phase, microbatch)] if stage + 1 < stages else []
            needs = [Action(stage, Phase.FORWARD, microbatch), *after]
    return [need for need in needs if need not in done]


def _grid_text(actions: Sequence[Sequence[Action]], reached: Sequence[int], stages: int, done: set[Action]) -> str:
    """One line per rank, its actions around the first that cannot run, which is marked *."""
    rows = []
    for rank, (own, count) in enumerate(zip(actions, reached, strict=True)):
        if count == len(own):
            rows.append([str(rank), *[""] * (2 * _CELLS_SHOWN + 1), "done"])
            continue
        first, last = count - _CELLS_SHOWN, count + _CELLS_SHOWN + 1
        cells = [str(own[place]) if 0 <= place < len(own) else "" for place in range(first, last)]
        cells[_CELLS_SHOWN] = f"*{own[count]}"
        needs = ", ".join(map(str, _missing(own[count], stages, done)))
        rows.append([str(rank), *cells, f"waits for {needs}"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [" ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width).rstrip() for row in rows]
    blocked = sum(len(own) - count for own, count in zip(actions, reached, strict=True))
    return "\n".join(
        [
            f"deadlock: {blocked} of {sum(map(len, actions))} actions of this pipeline order can never start; by rank",
            *lines,
            "(* = blocked action; what stands before it has run)",
            "order each rank's actions so that what they wait for on other ranks comes first there",
        ]
    )


@lru_cache(maxsize=1024)
def in_flight(order: str, rank: int, ranks: int, microbatches: int, chunks: int = 1) -> int:
    """The most microbatches held at any moment on a rank, over all chunks: forward has run, backward has not ended."""
    return sum(moments(order, rank, ranks, microbatches, chunks)[-1])


@lru_cache(maxsize=1024)
def moments(order: str, rank: int, ranks: int, microbatches: int, chunks: int = 1) -> tuple[tuple[int, ...], ...]:
    """Microbatches of each chunk held on a rank, at every moment that no other moment exceeds in every chunk; those with the
    largest totals come last."""
    if order == "1f1b" and chunks == 1:  # asked for thousands of pipelines, each of hundreds of actions
        return ((min(microbatches, ranks - rank),),)
    if order == "gpipe":
        return ((microbatches,),)
    few = few_rounds(order, ranks, microbatches)
    return (
        moments(order, rank, ranks, few, chunks) if few < microbatches else _moments(order, rank, ranks, microbatches, chunks)
    )


def _moments(order: str, rank: int, ranks: int, microbatches: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    alive = [0] * chunks
    chunk_of = {stage: chunk for chunk, stage in enumerate(stages_by_rank(order, ranks, chunks)[rank])}
    seen: dict[tuple[int, ...], None] = {}
    for action in pipeline_actions(order, rank, ranks, microbatches, chunks):
        if action.phase is Phase.FORWARD:
            alive[chunk_of[action.stage]] += 1
            seen[tuple(alive)] = None
        elif action.phase is not Phase.BACKWARD_INPUT:
            alive[chunk_of[action.stage]] -= 1
    if chunks == 1:
        return (max(seen),)
    every = np.array(list(seen))
    exceeded = np.zeros(len(every), dtype=bool)
    for first in range(0, len(every), 256):
        some = every[first : first + 256, None, :]
        exceeds = np.all(every >= some, axis=2) & np.any(every > some, axis=2)
        exceeded[first : first + 256] = np.any(exceeds, axis=1)
    largest = [moment for moment, over in zip(seen, exceeded.tolist(), strict=True) if not over]
    return tuple(sorted(largest, key=sum))
