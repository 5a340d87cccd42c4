"""Pipeline orders: which action each rank of a pipeline runs next. A new order is one function and one row.

Actions print as PyTorch's pipelining prints them: `1F0` is stage 1, forward, microbatch 0; B is a whole backward, I and W are
its halves (gradients of inputs, gradients of weights). With V chunks per rank there are V * S stages, and stage s runs on rank
s % S of the pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from parsim.errors import DeadlockError, PlanError, near_matches
from parsim.work import Phase

_PHASES = {phase.short: phase for phase in Phase if phase not in (Phase.OPTIMIZER, Phase.RECOMPUTE)}
_CELLS_SHOWN = 4
"""Actions shown on either side of the blocked one in the grid of a deadlock."""


class Action(NamedTuple):
    """One phase of one microbatch on one stage."""

    stage: int
    phase: Phase
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.phase.short}{self.microbatch}"


Actions = tuple[Action, ...]
Order = Callable[[int, int, int, int], Actions]
"""(rank of the pipeline, ranks, microbatches, chunks per rank) -> its actions."""


def parse_action(text: str) -> Action:
    """Inverse of `str(action)`."""
    match = re.fullmatch(rf"(\d+)([{''.join(_PHASES)}])(\d+)", text)
    if match is None:
        raise PlanError(f"cannot read action {text!r}; write stage, one of {', '.join(_PHASES)}, microbatch, as in 1F0")
    return Action(int(match[1]), _PHASES[match[2]], int(match[3]))


def gpipe(rank: int, ranks: int, microbatches: int, chunks: int) -> Actions:
    """All forwards, then all backwards: the least dependence on timing, all microbatches in flight.

    Source: Huang et al., GPipe (2019); order of PyTorch's ScheduleGPipe.
    """
    del ranks, chunks
    forward = tuple(Action(rank, Phase.FORWARD, number) for number in range(microbatches))
    return forward + tuple(Action(rank, Phase.BACKWARD, number) for number in range(microbatches))


def one_forward_one_backward(rank: int, ranks: int, microbatches: int, chunks: int) -> Actions:
    """Warm up with S - s - 1 forwards, then alternate, then drain: at most S - s microbatches in flight."""
    del chunks
    forward = [Action(rank, Phase.FORWARD, number) for number in range(microbatches)]
    backward = [Action(rank, Phase.BACKWARD, number) for number in range(microbatches)]
    return _alternating(forward, backward, ranks - rank - 1)


def interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> Actions:
    """1F1B over V chunks per rank, earlier microbatches first: the fill is V times shorter, the transfers V times as many.

    Microbatches go in rounds of as many as there are ranks (or somewhat more, where they do not divide evenly).
    Source: Narayanan et al., Megatron-LM (2021), section 2.2; order of PyTorch's ScheduleInterleaved1F1B.
    """
    per_round = microbatches_per_round(ranks, microbatches, chunks)
    forward = _in_rounds(rank, ranks, microbatches, chunks, Phase.FORWARD)
    backward = _in_rounds(rank, ranks, microbatches, chunks, Phase.BACKWARD)
    return _alternating(forward, backward, (chunks - 1) * per_round + 2 * (ranks - 1 - rank))


def zero_bubble(rank: int, ranks: int, microbatches: int, chunks: int) -> Actions:
    """ZB-H1: the backward in halves; those for weights wait, `rank` of them at most, and fill the drain.

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


def microbatches_per_round(ranks: int, microbatches: int, chunks: int) -> int:
    """How many microbatches a rank runs of one chunk before it turns to the next.

    Raises PlanError where the microbatches do not divide into rounds of at least as many as there are ranks.
    """
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


PIPELINE_ORDERS: Mapping[str, Order] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}

CHUNKED_ORDERS = ("interleaved", "zero-bubble")
"""Orders of more than one chunk per rank."""

SPLIT_ORDERS = ("zero-bubble",)
"""Orders that run backwards in halves."""


def check_chunks(order: str, chunks: int) -> None:
    """Raises PlanError for an unknown order, or one that has not so many chunks per rank."""
    if order not in PIPELINE_ORDERS:
        raise PlanError(f"unknown pipeline_order {order!r}{near_matches(order, PIPELINE_ORDERS)}")
    if chunks < 1 or (chunks > 1 and order not in CHUNKED_ORDERS):
        raise PlanError(
            f"pipeline_order {order!r} with chunks = {chunks}: only {', '.join(CHUNKED_ORDERS)} have more than one chunk per "
            "rank; choose one of them or chunks = 1"
        )


@lru_cache(maxsize=1024)
def pipeline_actions(order: str, rank: int, ranks: int, microbatches: int, chunks: int = 1) -> Actions:
    """The actions of one rank of a pipeline. Raises PlanError for an unknown order, chunks or microbatches it cannot have."""
    check_chunks(order, chunks)
    return PIPELINE_ORDERS[order](rank, ranks, microbatches, chunks)


@lru_cache(maxsize=256)
def check_order(order: str, ranks: int, microbatches: int, chunks: int = 1) -> None:
    """Raises DeadlockError (the grid of ranks) unless the order runs to its end; PlanError as `pipeline_actions`."""
    check_actions([pipeline_actions(order, rank, ranks, microbatches, chunks) for rank in range(ranks)], ranks * chunks)


def check_actions(actions: Sequence[Sequence[Action]], stages: int) -> None:
    """Raises DeadlockError unless these actions, one sequence per rank, run to their end.

    A forward needs that of the stage before; a backward (or its half for inputs) the forward here and the backward of the
    stage after; the half for weights the half for inputs.
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
    """What the action waits for."""
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
    """The most microbatches held at any moment on this rank, all chunks together: forward has run, backward has not ended."""
    return sum(moments(order, rank, ranks, microbatches, chunks)[-1])


@lru_cache(maxsize=1024)
def moments(order: str, rank: int, ranks: int, microbatches: int, chunks: int = 1) -> tuple[tuple[int, ...], ...]:
    """How many microbatches of each chunk are held, at every moment at which no other moment holds more of each.

    Those that hold most in total come last.
    """
    alive = [0] * chunks
    seen: dict[tuple[int, ...], None] = {}
    for action in pipeline_actions(order, rank, ranks, microbatches, chunks):
        if action.phase is Phase.FORWARD:
            alive[action.stage // ranks] += 1
            seen[tuple(alive)] = None
        elif action.phase is not Phase.BACKWARD_INPUT:
            alive[action.stage // ranks] -= 1
    largest = [
        moment
        for moment in seen
        if not any(other != moment and all(a >= b for a, b in zip(other, moment, strict=True)) for other in seen)
    ]
    return tuple(sorted(largest, key=sum))


@lru_cache(maxsize=1024)
def halves_waiting(order: str, rank: int, ranks: int, microbatches: int, chunks: int = 1) -> int:
    """The most microbatches whose backward has run for inputs and not yet for weights, at any moment on this rank."""
    waiting = most = 0
    for action in pipeline_actions(order, rank, ranks, microbatches, chunks):
        waiting += (action.phase is Phase.BACKWARD_INPUT) - (action.phase is Phase.BACKWARD_WEIGHT)
        most = max(most, waiting)
    return most
