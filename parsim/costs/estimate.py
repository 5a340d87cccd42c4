"""One priced piece of work: its median, the terms it was computed from, and what it rests on; and samples of prices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parsim.errors import CostError

Source = Literal["measured", "fitted", "published", "updated"]
"""`updated`: one of the others, times what a validation has shown it to be wrong by."""

TermOperation = Literal["start", "plus", "times", "over", "at least"]
"""What a term does to the running total: begin it, add seconds, multiply by a factor, divide by one, be no less."""

TermOrigin = Literal["measured", "fitted", "published", "updated", "observed", "assumed"]
"""Where the number of a term comes from. `observed`: a running job has shown it. `assumed`: nobody has measured it."""


QUEUEING = "queueing"
"""The term that lifts a price to the host's time."""

Detail = str | tuple[str | float, ...]
"""A text, or a template of `str.format` and its values: most details are never read."""


class Term(NamedTuple):
    """One step of a price.

    Attributes:
        name: what the number is, e.g. "latency", "host overhead per task".
        operation: how it enters: prices are folded from left to right.
        value: seconds for "start", "plus" and "at least", a factor for "times", a divisor for "over".
        origin: where the number comes from. detail: more of it for people, e.g. "at 16 samples", "12 steps of 1.2 us".
    """

    name: str
    operation: TermOperation
    value: float
    origin: TermOrigin
    detail: Detail = ""

    @property
    def text(self) -> str:
        """The detail as a text."""
        if isinstance(self.detail, str):
            return self.detail
        template, *values = self.detail
        return str(template).format(*values)

    @property
    def unit(self) -> str:
        """ "s" for seconds, "" for a factor."""
        return "" if self.operation in ("times", "over") else "s"

    def applied(self, total_s: float) -> float:
        """The running total after this term."""
        match self.operation:
            case "plus":
                return total_s + self.value
            case "times":
                return total_s * self.value
            case "over":
                return total_s / self.value
            case "at least":
                return max(total_s, self.value)
        return self.value


Terms = tuple[Term, ...]


def folded_s(terms: Iterable[Term]) -> float:
    """Seconds of the terms, applied from left to right; 0 without any."""
    total = 0.0
    for term in terms:
        total = term.applied(total)
    return total


def running_totals_s(terms: Iterable[Term]) -> Iterator[tuple[Term, float]]:
    """Yield every term with the seconds after it."""
    total = 0.0
    for term in terms:
        total = term.applied(total)
        yield term, total


def summed(parts: Iterable[tuple[str, float, TermOrigin, Detail]]) -> Terms:
    """Terms that add up seconds, from (name, seconds, origin, detail) of each."""
    return tuple(
        Term(name, "plus" if number else "start", seconds, origin, detail)
        for number, (name, seconds, origin, detail) in enumerate(parts)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Attributes:
    median_s: seconds; always what the terms fold to.
    parameters: (name, relative standard deviation) of the uncertain parameters the number is proportional to. Work
        that names the same parameter shares its draw: independent draws per task would average out to nothing.
    repeat_sigma: relative spread of one repetition around the median (noise of a single task on a single rank).
    detail: for people: "measured: 30 repeats at 16 samples", "ring over 0,1,2,3".
    extrapolated: the question lies outside the measured range.
    issue_s: on a GPU, seconds of the host to queue the work (0: not measured apart).
    terms: the numbers that the median was computed from, in order; a number given without them is one term.

    Raises:
        CostError: the terms do not fold to the median.
    """

    median_s: float
    source: Source
    parameters: tuple[tuple[str, float], ...] = ()
    repeat_sigma: float = 0.0
    detail: str = ""
    extrapolated: bool = False
    issue_s: float = 0.0
    terms: Terms = ()

    def __post_init__(self) -> None:
        if not self.terms:
            object.__setattr__(self, "terms", (Term("given", "start", self.median_s, self.source, self.detail),))
        elif self.recompute() != self.median_s:
            raise CostError(
                f"an estimate of {self.median_s!r} s has terms that give {self.recompute()!r} s; "
                "make it with Estimate.of(terms, ...) or change it with then(term)"
            )

    @classmethod
    def of(cls, terms: Terms, *, source: Source, **attributes: Any) -> Estimate:
        """The estimate that these terms make; `attributes`: its others."""
        return cls(median_s=folded_s(terms), terms=terms, source=source, **attributes)

    @property
    def host_bound(self) -> bool:
        """The host takes longer to queue the work on a GPU than the device to run it, and the price is the host's."""
        return any(term.name == QUEUEING for term in self.terms)

    def recompute(self) -> float:
        """Seconds from the terms alone; equal to `median_s`, bit for bit."""
        return folded_s(self.terms)

    def term_rows(self) -> list[dict[str, Any]]:
        """For people and JSON: one row per term, with the seconds after it."""
        return [
            {
                "term": term.name,
                "operation": term.operation,
                "value": term.value,
                "unit": term.unit,
                "running_total_s": total_s,
                "origin": term.origin,
                "detail": term.text,
            }
            for term, total_s in running_totals_s(self.terms)
        ]

    def then(self, term: Term) -> Estimate:
        """The estimate with one more term at the end; its spread stays as it was."""
        return replace(self, median_s=term.applied(self.median_s), terms=(*self.terms, term))


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapFactors:
    """While computation and communication of one rank run at once, each takes its factor times as long as alone.

    Attributes:
        core_of_rank: the processor core each rank runs on; empty: a core each. Ranks on one core share it: k of them that
            compute at once take k times as long each, and what one communicates slows what another computes.
        communications_share: each of k operations that a rank communicates at once on several streams takes k times as long, as
            in a library that works on the processor.
        loads_ahead: a step's batch loads while the step before still runs, as the copy engine of a GPU does. If the computing
            core also loads, loading waits for its turn.
    """

    compute: float = 1.0
    communication: float = 1.0
    core_of_rank: tuple[int, ...] = ()
    communications_share: bool = False
    loads_ahead: bool = True


# --- from estimates to samples of durations ---------------------------------------------------------------------------
#
# One draw per cost *parameter*, shared by every task that depends on it.


STEPS_AVERAGED = 20


def medians_s(estimates: Sequence[Estimate]) -> NDArray[np.float64]:
    """Medians of estimates: float64 [n] seconds."""
    return np.array([estimate.median_s for estimate in estimates], dtype=np.float64)


RepeatNoise = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""From independent standard normal draws float64 [rows, n] to log(duration / median) of the tasks' own noise."""


def sample_durations_s(
    estimates: Sequence[Estimate], samples: int, seed: int, *, unit: NDArray[np.int64] | None = None
) -> NDArray[np.float64]:
    """Draw durations: median * product of exp(sigma * z) over the estimate's parameters.

    Args:
        estimates: of the units. samples: rows. unit: int64 [n], which estimate each task has (None: task i has estimate i).

    Returns:
        float64 [samples, n] seconds. The z of a parameter is standard normal, one per sample and parameter. Repeat noise is
        drawn per task and divided by sqrt(STEPS_AVERAGED). Leaves out correlation between parameters, and that a maximum over
        noisy ranks exceeds the maximum of their means (see `rank_noise`).
    """
    units = np.arange(len(estimates)) if unit is None else unit
    durations: NDArray[np.float64] = np.concatenate(
        list(sampled_durations_by_rows(estimates, samples, seed, unit=units, rows=samples))
    )
    return durations


def sampled_durations_by_rows(
    estimates: Sequence[Estimate],
    samples: int,
    seed: int,
    *,
    unit: NDArray[np.int64],
    rows: int,
    repeat: RepeatNoise | None = None,
) -> Iterator[NDArray[np.float64]]:
    """Yield the draws of `sample_durations_s`, number for number, in pieces of at most so many rows.

    `repeat` makes the repeat noise of the draws if tasks do not draw it independently (`parsim.engines.noise`).
    """
    rng = np.random.default_rng(seed)
    names = sorted({name for estimate in estimates for name, _ in estimate.parameters})
    column = {name: number for number, name in enumerate(names)}
    loadings = np.zeros((len(names), len(estimates)))
    for number, estimate in enumerate(estimates):
        for name, sigma in estimate.parameters:
            loadings[column[name], number] += sigma
    shared = rng.standard_normal((samples, len(names))) @ loadings
    medians, sigmas = medians_s(estimates)[unit], repeat_sigmas(estimates, unit)
    for begin in range(0, samples, rows):
        exponent = shared[begin : begin + rows][:, unit]
        if sigmas.any():
            draws = rng.standard_normal(exponent.shape)
            exponent += draws * sigmas if repeat is None else repeat(draws)
        yield medians * np.exp(exponent)


def repeat_sigmas(estimates: Sequence[Estimate], unit: NDArray[np.int64]) -> NDArray[np.float64]:
    """Relative spread of each task's own noise in the mean of `STEPS_AVERAGED` steps: float64 [n]."""
    sigmas: NDArray[np.float64] = np.array([estimate.repeat_sigma for estimate in estimates])[unit] / np.sqrt(STEPS_AVERAGED)
    return sigmas


def rank_noise(ranks: NDArray[np.int64], sigma: float, draws: int, seed: int) -> NDArray[np.float64]:
    """Draw how slow ranks are in single steps: one log-normal factor per draw and rank, with mean 1: float64 [draws, n].

    `ranks`: int64 [n], of each task; of ranks that share a core, the core; -1 (communication) keeps factor 1. `sigma`: relative
    spread of a rank's step against the others'.
    """
    world = 1 + int(ranks.max(initial=-1))
    shocks = np.random.default_rng(seed).standard_normal((draws, world))
    by_rank = np.exp(sigma * shocks - sigma**2 / 2)
    steady = np.ones((draws, 1))
    factors: NDArray[np.float64] = np.concatenate([by_rank, steady], axis=1)[:, np.where(ranks < 0, world, ranks)]
    return factors
