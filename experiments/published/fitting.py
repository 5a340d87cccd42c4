"""What rows err by, as a sum of effects: of the chip, the framework with its version, and kinds of models.

    log(measured / predicted) = sum of effects of the row + effect of its source + noise

Every effect is drawn from a normal distribution of its kind with mean 0 (`PRIORS`), so an effect that few sources show is near
0, and a GPU with three rows takes what its chip has shown. A source counts once: its rows share an effect of their own, which
is not known for a new source. So the interval of a new source has the spread of sources, the noise of rows and what is not
known of the effects (best linear unbiased prediction; Robinson 1991). Rows far off weigh less (Huber).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.published.predict import Facts, Predicted
from parsim.costs.published import GUESSED_SHARE, NOISE, SHARE, UNKNOWN, Effects, class_of, features_of, guess_of
from parsim.numeric import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A prediction beside the measurement: `log_error` is log(predicted seconds / measured seconds)."""

    predicted: Predicted
    log_error: float
    group: str
    source: str

    @property
    def facts(self) -> Facts:
        """Of the question; a judged row has one."""
        assert self.predicted.facts is not None
        return self.predicted.facts


PRIORS: Mapping[str, float] = {
    "chip": 0.08,
    "framework": 0.03,
    "recipes": 0.15,
    "kind": 0.15,
    "images": 0.1,
    "guess": 0.2,
}
"""Standard deviation of the effects of a kind, of log seconds; the kind is what stands before the colon of a name. Effects of a
precision, of a board, and of a framework on a chip were tried and make rows of other sources worse. Effects of frameworks are
as wide as makes rows of other sources most likely, with those of sources: the mean of their log density is 1.63, and 1.60
without the effect of recipes."""
SOURCE_SIGMA = 0.04
UNSEEN_SIGMA = 0.08
"""Of a framework that no given row runs, which was described with no measurement in sight: runs beside the tables by MaxText,
Pax, FSDP, llm.c and DualPipe lie 0.11 from their medians by source, where chips and sources explain 0.07."""
HUBER = 2.0
"""Standard deviations from which on a row weighs less."""
PASSES = 6


def fitted(rows: Sequence[Judged], guessed: Sequence[Judged]) -> Effects:
    """Effects, their covariance, and the ends of intervals from how the rows of every source lie when it is held out. guessed:
    rows predicted as if no framework was known."""
    ends = interval_ends(rows, held_out(rows)) | interval_ends(guessed, held_out(rows, guessed))
    return replace(_effects(rows, guessed), ends=ends, priors={**PRIORS, "unseen": UNSEEN_SIGMA})


def _effects(rows: Sequence[Judged], guessed: Sequence[Judged]) -> Effects:
    """Those of chips, frameworks and kinds from the rows; then that of guessing, from what they leave of the guessed."""
    rows = [row for row in rows if row.facts.run.framework != UNKNOWN]
    known = _solved(rows, [features_of(row.facts.run) for row in rows], [0.0] * len(rows))
    if not guessed:
        return known
    left = [-known.of(row.facts.run)[0] for row in guessed]
    guess = _solved(guessed, [(guess_of(row.facts.run),) for row in guessed], left)
    kept = len(known.names)
    covariance = np.zeros((kept + len(guess.names),) * 2)
    covariance[:kept, :kept], covariance[kept:, kept:] = known.covariance, guess.covariance
    return replace(
        known,
        names=(*known.names, *guess.names),
        mean={**known.mean, **guess.mean},
        covariance=covariance,
        sources={**known.sources, **guess.sources},
    )


def _solved(rows: Sequence[Judged], features: Sequence[Sequence[str]], offsets: Sequence[float]) -> Effects:
    """The effects of these features on log(measured / predicted) + offset."""
    shown: dict[str, set[str]] = defaultdict(set)
    for row, own in zip(rows, features, strict=True):
        for name in own:
            shown[name].add(row.source)
    names = sorted(shown)
    sources = sorted({row.source for row in rows})
    column = {name: number for number, name in enumerate([*names, *(f"source {name}" for name in sources)])}
    matrix = np.zeros((len(rows), len(column)))
    for number, (row, own) in enumerate(zip(rows, features, strict=True)):
        matrix[number, [*(column[name] for name in own), column[f"source {row.source}"]]] = 1.0
    error = np.array([offset - row.log_error for row, offset in zip(rows, offsets, strict=True)])
    noise = np.array([NOISE[class_of(row.facts.run)] for row in rows])
    prior = np.array([PRIORS[name.split(":")[0]] for name in names] + [SOURCE_SIGMA] * len(sources))
    weight = np.ones(len(rows))
    for _ in range(PASSES):
        precision = matrix.T @ (matrix * (weight / noise**2)[:, None]) + np.diag(prior**-2)
        covariance = np.linalg.inv(precision)
        mean = covariance @ (matrix.T @ (error * weight / noise**2))
        weight = np.minimum(1.0, HUBER * noise / np.maximum(np.abs(error - matrix @ mean), 1e-9))
    kept = len(names)
    return Effects(
        names=tuple(names),
        mean=dict(zip(names, mean[:kept].tolist(), strict=True)),
        covariance=covariance[:kept, :kept],
        priors=dict(PRIORS),
        source_sigma=SOURCE_SIGMA,
        sources={name: len(shown[name]) for name in names},
        ends={},
    )


def held_out(rows: Sequence[Judged], guessed: Sequence[Judged] = ()) -> dict[str, tuple[float, float]]:
    """By row the median and the standard deviation of log(measured / predicted), from the rows of all other sources.

    guessed: the rows to tell it of, predicted as if no framework was known; none: those with their frameworks.
    """
    found = {}
    told = guessed or rows
    for source in {row.source for row in told}:
        others = ([row for row in group if row.source != source] for group in (rows, guessed))
        effects = _effects(*others)
        found |= {row.predicted.row.id: effects.of(row.facts.run) for row in told if row.source == source}
    return found


def score_of(row: Judged, medians: Mapping[str, tuple[float, float]]) -> float:
    """Standard deviations that a row's log(measured / predicted) lies from its median."""
    median, sigma = medians[row.predicted.row.id]
    return (-row.log_error - median) / sigma


POOLED_SOURCES = 4
"""Sources of a class whose rows weigh as much as those of all other classes together. Of classes by themselves the intervals
of few sources are those of one; with all rows together one wide class widens every other."""


def interval_ends(rows: Sequence[Judged], medians: Mapping[str, tuple[float, float]]) -> dict[str, Ends]:
    """By class the ends of its interval in standard deviations: of its rows and, the fewer sources show it, of all others.

    Rows whose framework was guessed come without others.
    """
    guessed = all(row.facts.run.framework == UNKNOWN for row in rows)
    scores = np.array([score_of(row, medians) for row in rows])
    counts = Counter(row.source for row in rows)
    weights = np.array([1.0 / (counts[row.source] + WHOLE_ROWS) for row in rows])
    classes = np.array([class_of(row.facts.run) for row in rows])
    found = {}
    for name in (name for name in NOISE if name.startswith(UNKNOWN) == guessed):
        alike = classes == name
        sources = len({row.source for row, same in zip(rows, alike, strict=True) if same})
        share = sources / (sources + POOLED_SOURCES) if not alike.all() else 1.0
        parts = np.where(alike, share / max(weights[alike].sum(), 1e-9), (1 - share) / max(weights[~alike].sum(), 1e-9))
        found[name] = ends_of(scores, weights * parts, GUESSED_SHARE if guessed else SHARE)
    return found


def covered(rows: Sequence[Judged], medians: Mapping[str, tuple[float, float]]) -> dict[str, tuple[bool, float]]:
    """By row whether its measurement lies in the interval of the other sources, and the interval's width over the median."""
    found = {}
    for source in {row.source for row in rows}:
        ends = interval_ends([row for row in rows if row.source != source], medians)
        for row in rows:
            if row.source == source:
                (low, high), name = ends[class_of(row.facts.run)], row.predicted.row.id
                width = math.exp(high * medians[name][1]) - math.exp(low * medians[name][1])
                found[name] = (low <= score_of(row, medians) <= high, width)
    return found


Ends = tuple[float, float]
WHOLE_ROWS = 6
"""Rows of a source beyond which it hardly weighs more: n of them weigh n / (n + 6)."""
LEAST = 0.3
"""Standard deviations that an interval reaches to either side at least."""


def ends_of(scores: Floats, weights: Floats, share: float) -> Ends:
    """The shortest interval of standard scores (of held-out rows, from their medians) that has a share of the weight."""
    order = np.argsort(scores)
    ordered, total = scores[order], np.concatenate(([0.0], np.cumsum(weights[order])))
    best = (float(ordered[0]), float(ordered[-1]))
    for first in range(len(ordered)):
        last = int(np.searchsorted(total, total[first] + share * total[-1], side="left")) - 1
        if last >= len(ordered):
            break
        if ordered[last] - ordered[first] < best[1] - best[0]:
            best = (float(ordered[first]), float(ordered[last]))
    return min(best[0], -LEAST), max(best[1], LEAST)


def relative(log_error: float) -> float:
    """A logarithm as a relative error."""
    return math.exp(log_error) - 1
