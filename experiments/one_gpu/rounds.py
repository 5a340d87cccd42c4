"""Programs in interleaved rounds: in each round every program has a turn, the executor two, in an order drawn for the round.

A turn is one step that is not timed (unless steps are long), then some that are, between two waits for the device. So what the
machine does meanwhile falls on all programs alike, and the executor's two turns say how far two measurements of one program
differ (A/A).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from programs import Program
from questions import Scope

from parsim.execute.cuda.driver import DeviceClock
from tools.gpu.device import SpoiledProcessError
from tools.gpu.programme import failure

AGAIN = " again"
WARM_STEPS = 3
LONG_STEP_S, LONG_STEPS = 0.1, 2
"""Steps that take so long: fewer in a turn, and none before them. What another program left in the caches hardly counts."""


def interleaved(
    clock: DeviceClock, programs: Sequence[Program], scope: Scope, *, seed: int, remaining_s: float
) -> dict[str, Any]:
    """`rounds_s` of every program (one mean step per round), and the `losses` of its first steps. As many rounds as fit into
    the scope's budget for a question, or into half of what remains, within its bounds."""
    losses = {program.name: [_stepped(program) for _ in range(WARM_STEPS)] for program in programs}
    step_s = {program.name: _turn(clock, program, 1) for program in programs}
    turns = [*programs, programs[0]]
    long = max(step_s.values()) > LONG_STEP_S
    untimed, steps = (0, min(LONG_STEPS, scope.steps)) if long else (1, scope.steps)
    round_s = (steps + untimed) * (sum(step_s.values()) + step_s[programs[0].name])
    least, most = scope.rounds
    rounds = max(least, min(most, int(min(scope.round_budget_s, remaining_s / 2) / round_s)))
    draw = random.Random(seed)
    found: dict[str, list[float]] = {name: [] for name in (*losses, programs[0].name + AGAIN)}
    for _ in range(rounds):
        order = list(range(len(turns)))
        draw.shuffle(order)
        for place in order:
            program = turns[place]
            name = program.name + (AGAIN if place == len(programs) else "")
            for _ in range(untimed):
                program.step()
            found[name].append(_turn(clock, program, steps))
    return {"rounds": rounds, "steps": steps, "untimed": untimed, "rounds_s": found, "losses": losses}


def _stepped(program: Program) -> float:
    program.step()
    return program.loss()


def _turn(clock: DeviceClock, program: Program, steps: int) -> float:
    """Mean seconds of a step, by the host's clock between two waits."""
    clock.synchronize()
    begin_s = clock.host_s()
    for _ in range(steps):
        program.step()
    clock.synchronize()
    return (clock.host_s() - begin_s) / steps


def build_all(builders: Sequence[tuple[str, Any]]) -> tuple[list[Program], dict[str, Any]]:
    """The programs that could be built, and why the others could not: the first has to be, and none may spoil the process."""
    programs, failed = [], {}
    for number, (name, build) in enumerate(builders):
        try:
            programs.append(build())
        except Exception as error:
            if number == 0 or isinstance(error, SpoiledProcessError):
                raise
            failed[name] = failure(error)
    return programs, failed
