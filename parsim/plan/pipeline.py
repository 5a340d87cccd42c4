"""Pipeline orders: which forward and backward each stage runs next. A new order is one function and one row.

Actions print as PyTorch's pipelining prints them: `1F0` is stage 1, forward, microbatch 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from parsim.errors import PlanError, near_matches
from parsim.work import Phase


class Action(NamedTuple):
    """One phase of one microbatch on one stage."""

    stage: int
    phase: Phase
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.phase.short}{self.microbatch}"


def parse_action(text: str) -> Action:
    """Inverse of `str(action)`."""
    match = re.fullmatch(r"(\d+)([FB])(\d+)", text)
    if match is None:
        raise PlanError(f"cannot read action {text!r}; write stage, F or B, microbatch, as in 1F0")
    return Action(int(match[1]), Phase.FORWARD if match[2] == "F" else Phase.BACKWARD, int(match[3]))


def gpipe(stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    """All forwards, then all backwards: the least dependence on timing, all microbatches in flight.

    Source: Huang et al., GPipe (2019); order of PyTorch's ScheduleGPipe.
    """
    del stages
    forward = tuple(Action(stage, Phase.FORWARD, number) for number in range(microbatches))
    return forward + tuple(Action(stage, Phase.BACKWARD, number) for number in range(microbatches))


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    """Warm up with S - s - 1 forwards, then alternate, then drain: at most S - s microbatches in flight."""
    warm_up = min(microbatches, stages - stage - 1)
    actions = [Action(stage, Phase.FORWARD, number) for number in range(warm_up)]
    for number in range(microbatches - warm_up):
        actions.append(Action(stage, Phase.FORWARD, warm_up + number))
        actions.append(Action(stage, Phase.BACKWARD, number))
    actions.extend(Action(stage, Phase.BACKWARD, number) for number in range(microbatches - warm_up, microbatches))
    return tuple(actions)


PIPELINE_ORDERS: Mapping[str, Callable[[int, int, int], tuple[Action, ...]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
}


def pipeline_actions(order: str, stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    """The actions of one stage. Raises PlanError for an unknown order."""
    if order not in PIPELINE_ORDERS:
        raise PlanError(f"unknown pipeline_order {order!r}{near_matches(order, PIPELINE_ORDERS)}")
    return PIPELINE_ORDERS[order](stage, stages, microbatches)


def in_flight(order: str, stage: int, stages: int, microbatches: int) -> int:
    """The most microbatches whose forward has run and whose backward has not, at any moment on this stage."""
    alive = most = 0
    for action in pipeline_actions(order, stage, stages, microbatches):
        alive += 1 if action.phase is Phase.FORWARD else -1
        most = max(most, alive)
    return most
