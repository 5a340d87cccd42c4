"""Factors and intervals from the errors of other rows: fitted, held out by source, and whether they hold."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from experiments.published.intervals import Ends, ends_of, reach_of, spread_of
from experiments.published.predict import Facts, Predicted, key_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A prediction beside the measurement: `log_error` is log(predicted seconds / measured seconds)."""

    predicted: Predicted
    log_error: float
    key: str
    group: str
    source: str


def facts_of(row: Judged) -> Facts:
    """Of the question; a judged row has one."""
    assert row.predicted.facts is not None
    return row.predicted.facts


PRIOR_ROWS = 4
PRIOR_SOURCES = 1
STATED_SOURCES = 3


def _informative(rows: Sequence[Judged]) -> list[Judged]:
    """Rows whose errors say most of a GPU, by GPU and precision.

    Where at least three sources have rows on one node, only these count: there is no network and hardly a split. Else, where
    three have complete rows, only those: what a rule assumes says little of a GPU. Else all.
    """
    one_node: dict[str, set[str]] = defaultdict(set)
    stated: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        if facts_of(row).one_node:
            one_node[row.key].add(row.source)
        if row.predicted.row.complete:
            stated[row.key].add(row.source)

    def counts(row: Judged) -> bool:
        if len(one_node[row.key]) >= STATED_SOURCES:
            return facts_of(row).one_node
        return row.predicted.row.complete or len(stated[row.key]) < STATED_SOURCES

    return [row for row in rows if counts(row)]


def fitted_factors(rows: Sequence[Judged]) -> dict[str, tuple[float, int]]:
    """By GPU and precision: minus a weighted mean over sources of the median log error, and the number of sources.

    A source of n rows weighs n / (n + 4), so that none decides by its number of rows, and one row decides little. The mean is
    shrunk towards no factor as if one more source had shown none. Not all rows count (`_informative`).
    """
    by_source: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in _informative(rows):
        by_source[row.key][row.source].append(row.log_error)
    found = {}
    for key, sources in by_source.items():
        weights = [len(errors) / (len(errors) + PRIOR_ROWS) for errors in sources.values()]
        total = sum(weight * median(errors) for weight, errors in zip(weights, sources.values(), strict=True))
        found[key] = (-total / (sum(weights) + PRIOR_SOURCES / 2), len(sources))
    return found


FEW_ROWS = 8


END_ROWS = 19
LEVELS = (("place", END_ROWS), ("kind", FEW_ROWS), ("framework", FEW_ROWS), ("family", FEW_ROWS))
"""What rows have in common, the most first, and how many of them a spread needs."""


def _like(row: Judged, others: Sequence[Judged]) -> list[Judged]:
    """The rows that have the most in common with it, all where these are few."""
    for name, least in LEVELS:
        found = [other for other in others if getattr(facts_of(other), name) == getattr(facts_of(row), name)]
        if len(found) >= least:
            return found
    return list(others)


def _distances(rows: Sequence[Judged], errors: Mapping[str, float]) -> dict[str, float]:
    """By row how many scales of the others like it lie between their middle and its error."""
    found = {}
    for row in rows:
        others = _like(row, [other for other in rows if other is not row])
        spread = spread_of(_errors(others, errors) or [0.0])
        found[row.predicted.row.id] = spread.scales_away(errors[row.predicted.row.id])
    return found


def _errors(rows: Sequence[Judged], errors: Mapping[str, float]) -> list[float]:
    return [errors[row.predicted.row.id] for row in rows]


def _ends(
    alike: Sequence[Judged],
    complete: bool,
    errors: Mapping[str, float],
    rows: Sequence[Judged],
    distances: Mapping[str, float],
) -> Ends:
    """From rows that have the most in common with one that is complete or not.

    Where enough of them are as complete as it, they also say how many of their scales hold most of them. Else all `rows` that
    are as complete do, by their `distances`.
    """
    own = _errors([row for row in alike if row.predicted.row.complete == complete], errors)
    if len(own) >= END_ROWS:
        spread = spread_of(own)
        return ends_of(spread, reach_of([spread.scales_away(error) for error in own], spread))
    spread = spread_of(_errors(alike, errors) or [0.0])
    away = [distances[row.predicted.row.id] for row in rows if row.predicted.row.complete == complete]
    return ends_of(spread, reach_of(away or [0.0], spread))


def interval_ends(rows: Sequence[Judged], factors: Mapping[str, tuple[float, int]]) -> dict[str, Ends]:
    """By place and by kind of row, complete or not, the ends of its interval, from the errors that its factor leaves."""
    errors = {row.predicted.row.id: row.log_error + factors.get(row.key, (0.0, 0))[0] for row in rows}
    distances = _distances(rows, errors)
    found: dict[str, Ends] = {}
    for row in rows:
        facts = facts_of(row)
        same = [other for other in rows if facts_of(other).kind == facts.kind]
        for complete in {other.predicted.row.complete for other in rows}:
            names = [(facts.place, _like(row, rows))] + ([(facts.kind, same)] if len(same) >= FEW_ROWS else [])
            for name, alike in names:
                if key_of(name, complete) not in found:
                    found[key_of(name, complete)] = _ends(alike, complete, errors, rows, distances)
    return found


def covered(rows: Sequence[Judged], outside: Mapping[str, float]) -> dict[str, tuple[bool, float]]:
    """By row whether its held-out error lies in the interval of the other rows like it, and the width over the prediction."""
    found = {}
    distances = _distances(rows, outside)
    for row in rows:
        name = row.predicted.row.id
        others = [other for other in rows if other is not row]
        low, high = _ends(_like(row, others), row.predicted.row.complete, outside, others, distances)
        found[name] = (low <= -outside[name] <= high, math.exp(high) - math.exp(low))
    return found


def held_out(rows: Sequence[Judged]) -> dict[str, float]:
    """By row the log error with factors fitted on all other sources."""
    found = {}
    for source in {row.source for row in rows}:
        factors = fitted_factors([row for row in rows if row.source != source])
        for row in rows:
            if row.source == source:
                found[row.predicted.row.id] = row.log_error + factors.get(row.key, (0.0, 0))[0]
    return found
