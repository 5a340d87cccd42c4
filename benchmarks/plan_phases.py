"""Where the CPU time of an evaluated plan goes: milliseconds of each part of `evaluate`, without the parts inside it."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import parsim.predict.evaluate as evaluating
import parsim.predict.folding as nearly
from parsim.predict import problem as planning
from parsim.program import templates as expand
from parsim.program.placed import ComponentKinds, PlanIndex, SharedProperty

FUNCTIONS: tuple[tuple[str, Any, str], ...] = (
    ("plan over model", planning.PlanningProblem, "layout"),
    ("folding", evaluating, "folding_of"),
    ("folding", evaluating, "nearly_alike"),
    ("lowering: end of the step", expand, "_end_of_step"),
    ("lowering: kinds and pieces", expand, "Pieces"),
    ("lowering: kinds and pieces", ComponentKinds, "__init__"),
    ("lowering: copies", expand._Expansion, "columns"),
    ("compiling", nearly, "compile_graph"),
    ("prices", planning, "price"),
    ("simulation", evaluating, "mean_step_s"),
    ("simulation", nearly, "mean_step_s"),
    ("simulation", evaluating.static, "simulate"),
    ("memory", planning, "unlike_memory"),
    ("memory", planning, "of_every_rank"),
    ("breakdown", evaluating, "breakdown"),
)
"""Part, and the function (by its owner and name) whose time counts there."""

BUCKETS = "buckets"
REST = "all else"
PARTS = tuple(dict.fromkeys([*(part for part, _, _ in FUNCTIONS), BUCKETS, REST]))


class Stopwatch:
    """CPU seconds by part; a part that calls another one stands still meanwhile."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside: list[float] = []

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose time counts for a part."""

        @wraps(function)
        def counting(*given: Any, **more: Any) -> Any:
            begun = time.process_time()
            self._inside.append(0.0)
            try:
                return function(*given, **more)
            finally:
                spent = time.process_time() - begun
                self.seconds[part] = self.seconds.get(part, 0.0) + spent - self._inside.pop()
                if self._inside:
                    self._inside[-1] += spent

        return counting


@contextmanager
def watched() -> Iterator[Stopwatch]:
    """Time the parts while the block runs."""
    watch, kept = Stopwatch(), [(owner, name, getattr(owner, name)) for _, owner, name in FUNCTIONS]
    buckets = PlanIndex.__dict__["buckets"]
    timed = SharedProperty(buckets.part, watch.timed(BUCKETS, buckets.work_out))
    timed.__set_name__(PlanIndex, "buckets")
    try:
        for part, owner, name in FUNCTIONS:
            setattr(owner, name, watch.timed(part, getattr(owner, name)))
        PlanIndex.buckets = timed  # type: ignore[method-assign]
        yield watch
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)
        PlanIndex.buckets = buckets  # type: ignore[method-assign]


def phases_ms(call: Callable[[], object], repeats: int, before: Callable[[], object]) -> dict[str, float]:
    """Median CPU milliseconds of every part of a call that evaluates one plan, and of the whole (key "").

    Args:
        call: evaluates a plan. repeats: of it. before: each of them, and not counted.
    """
    runs: list[dict[str, float]] = []
    for _ in range(repeats):
        before()
        gc.collect()
        gc.disable()
        with watched() as watch:
            begun = time.process_time()
            call()
            whole = time.process_time() - begun
        gc.enable()
        runs.append({**watch.seconds, REST: whole - sum(watch.seconds.values()), "": whole})
    return {part: 1e3 * statistics.median(run.get(part, 0.0) for run in runs) for part in (*PARTS, "")}


def print_phases(columns: Sequence[str], rows: Sequence[dict[str, float]]) -> None:
    """A table of parts by plan.

    Args:
        columns: heads, one for each plan. rows: of `phases_ms`, one for each plan.
    """
    print(f"\n| part, ms | {' | '.join(columns)} |")
    print(f"|---|{'---:|' * len(columns)}")
    for part in (*PARTS, ""):
        print(f"| {part or 'whole'} | {' | '.join(f'{row[part]:.1f}' for row in rows)} |")
