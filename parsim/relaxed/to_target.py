"""How many steps a way of synchronising takes to a score, by virtual replicas at the scale that is asked about."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parsim.errors import AlgorithmError
from parsim.plans.synchronisation import Synchronisation
from parsim.relaxed.replicas import LocalTraining, SampleOrder, steps_of

SCORED_EVERY = 5
"""Steps between two scores. So the steps to a target are known to so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningCourse:
    """One training until it reached a score, or as long as it was let.

    Attributes:
        steps: to the target; None: it was not reached. best, best_step: the highest score and when it was.
        scores: (step, score of the mean weights), in order.
    """

    steps: int | None
    best: float
    best_step: int
    scores: tuple[tuple[int, float], ...]


def course_to(
    target: float,
    rule: Synchronisation,
    replicas: int,
    training: LocalTraining,
    order: SampleOrder,
    *,
    most_steps: int,
    parts: Sequence[Sequence[str]] = (),
) -> LearningCourse:
    """Train until the mean weights score `target` (accuracy, or R^2), or for `most_steps`. replicas, parts: see `steps_of`.

    Raises AlgorithmError: so many replicas do not fit, or `most_steps` has no score in it.
    """
    if most_steps < SCORED_EVERY:
        raise AlgorithmError(f"a target is checked every {SCORED_EVERY} steps, got {most_steps} at most; allow more")
    scores: list[tuple[int, float]] = []
    for step, (workers, kept) in enumerate(steps_of(rule, replicas, training, order, parts), 1):
        if step % SCORED_EVERY == 0:
            scores.append((step, training.score(kept.mean(workers.weights), workers)))
            if scores[-1][1] >= target or step + SCORED_EVERY > most_steps:
                break
    best_step, best = max(scores, key=lambda entry: entry[1])
    return LearningCourse(
        steps=scores[-1][0] if scores[-1][1] >= target else None, best=best, best_step=best_step, scores=tuple(scores)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearntSteps:
    """Courses over seeds at the learning rate that is best for this way of synchronising.

    Attributes: learning_rate: of those tried. courses: one per seed.
    """

    learning_rate: float
    courses: tuple[LearningCourse, ...]

    @property
    def steps(self) -> float | None:
        """The median over seeds; None where half of them or more do not reach the target."""
        reached = [float("inf") if course.steps is None else float(course.steps) for course in self.courses]
        middle = statistics.median(reached)
        return None if middle == float("inf") else middle

    @property
    def best(self) -> LearningCourse:
        """The seed in the middle by its highest score: what was learnt where the target is not reached."""
        ranked = sorted(self.courses, key=lambda course: course.best)
        return ranked[len(ranked) // 2]

    @property
    def spread(self) -> tuple[int | None, int | None]:
        """The fewest and the most steps; None: not reached."""
        steps = [course.steps for course in self.courses]
        reached = [count for count in steps if count is not None]
        return min(reached, default=None), None if None in steps else max(reached)


def learnt_steps(
    course: Callable[[float, int, int], LearningCourse], learning_rates: Sequence[float], seeds: Sequence[int], most_steps: int
) -> LearntSteps:
    """Try several learning rates: the one that reaches the target first, or comes nearest.

    A rate is given up where the best one so far had reached the target: beyond, it cannot be better. Of the best rate every
    seed trains as long as it may. course: of a learning rate, a seed and the most steps.
    """
    best: LearntSteps | None = None
    for rate in learning_rates:
        most = most_steps if best is None or best.steps is None else math.ceil(best.steps)
        tried = LearntSteps(learning_rate=rate, courses=tuple(course(rate, seed, most) for seed in seeds))
        if best is None or _order(tried) < _order(best):
            courses = (
                course(rate, seed, most_steps) if short.steps is None and most < most_steps else short
                for seed, short in zip(seeds, tried.courses, strict=True)
            )
            best = LearntSteps(learning_rate=rate, courses=tuple(courses))
    assert best is not None
    return best


def _order(tried: LearntSteps) -> tuple[bool, float, float]:
    return tried.steps is None, tried.steps or 0.0, -tried.best.best
