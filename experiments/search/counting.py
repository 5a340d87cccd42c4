"""One property over many drawn problems, and how many of them it really compared."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException, Unsatisfiable

from experiments.search.asking import SEEN, SHAPES, Check, Seen, Shape, drawn

UNLIKELY = st.sampled_from((False, False, False, True))
"""Whether Hypothesis draws a problem: ends of ranges and equal numbers. The others are drawn evenly from a number of its, since
it repeats itself: of 40 problems up to 29 had one device, or 19 alone were different."""


@dataclass
class Counts:
    """Of one property.

    Attributes:
        name: of the property. drawn: problems. compared: those of them in which anything was compared.
        several: those of these with several devices. different: those that are not one another's equal.
        comparisons: of two figures or answers. failed: of the problems that were compared, what each says, with its draw.
        cpu_s: of all of them. slowest_s: of one. seen: what the searches answered.
    """

    name: str
    drawn: int = 0
    compared: int = 0
    several: int = 0
    different: int = 0
    comparisons: int = 0
    failed: list[str] = field(default_factory=list)
    cpu_s: float = 0.0
    slowest_s: float = 0.0
    seen: Seen = field(default_factory=Seen)

    @property
    def passed(self) -> int:
        return self.compared - len(self.failed)

    def __str__(self) -> str:
        told = (
            f"{self.name}: {self.drawn} problems drawn, {self.compared} compared ({self.different} different, "
            f"{self.several} on several devices; {self.comparisons} comparisons), "
            f"{self.passed} passed; {self.seen.searches} searches, {self.cpu_s:.0f} CPU-s, one took {self.slowest_s:.1f}"
        )
        return told if self.compared else f"{told}; NOTHING WAS COMPARED"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "property": self.name,
            "drawn": self.drawn,
            "compared": self.compared,
            "several": self.several,
            "different": self.different,
            "comparisons": self.comparisons,
            "passed": self.passed,
            "failed": self.failed,
            "searches": self.seen.searches,
            "infeasible": self.seen.infeasible,
            "untried": self.seen.untried,
            "used": dict(self.seen.used),
            "cpu_s": round(self.cpu_s, 1),
            "slowest_s": round(self.slowest_s, 2),
        }


def counted(
    name: str, check: Check, examples: int, *, shapes: Sequence[Shape] = SHAPES, begin: int | None = None, patient: bool = True
) -> Counts:
    """Draw problems until so many were compared, or ten times as many were drawn. Failures are counted and not raised, errors
    of the search among them.

    check: raises AssertionError where the property does not hold. begin: of Hypothesis' random numbers; None: another one every
    time. patient: whether to go on after a failure.
    """
    counts = Counts(name)
    problems: set[str] = set()

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),  # a draw is small as it is, and shrinking it takes minutes
    )
    @given(number=st.integers(1, 2**60), unlikely=UNLIKELY, random=st.randoms(use_true_random=False))
    def run(number: int, unlikely: bool, random: Random) -> None:
        if counts.failed and not patient:
            return
        random = random if unlikely else Random(number)
        shape = shapes[number % len(shapes)] if unlikely else random.choice(shapes)
        draw = drawn(random, shape)
        counts.drawn += 1
        before_s, failed = time.process_time(), ""
        try:
            made = check(draw, random)
        except HypothesisException:
            raise
        except Exception as error:
            made, failed = 1, f"{type(error).__name__}: {error}\n{draw}"
        taken_s = time.process_time() - before_s
        counts.cpu_s += taken_s
        counts.slowest_s = max(counts.slowest_s, taken_s)
        counts.comparisons += made
        counts.compared += made > 0
        counts.several += made > 0 and draw.cluster.nodes * len(draw.cluster.kinds) > 1
        if made:
            problems.add(repr(draw))
            counts.different = len(problems)
        if failed:
            counts.failed.append(failed)
        assume(made > 0)

    known = SEEN.set(counts.seen)
    try:
        with contextlib.suppress(Unsatisfiable):  # no draw had anything to compare, which the counts say
            (run if begin is None else seed(begin)(run))()
    finally:
        SEEN.reset(known)
    return counts


def assert_holds(counts: Counts) -> None:
    """Raise AssertionError where the property failed, or where nothing was compared."""
    assert counts.compared, str(counts)
    assert not counts.failed, f"{counts}\n" + "\n".join(counts.failed[:3])


def features_used(rows: list[Mapping[str, Any]]) -> dict[str, int]:
    """How many chosen plans of all properties use each feature."""
    found: dict[str, int] = {}
    for row in rows:
        for name, number in row["used"].items():
            found[name] = found.get(name, 0) + number
    return found
