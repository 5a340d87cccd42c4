"""Which graph replicas gossip on, round by round: a row of GRAPHS, or Ada's lattices, which begin dense and end sparse.

    ring    lattice(neighbours=4)    ada(kind=linear, start=7, least=2, rate=1.0, rounds=50, epochs=4)

Ada has `epochs` lattices, each for `rounds` rounds; then its last graph stays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from parsim.algorithms.ada import Ada
from parsim.algorithms.graphs import GRAPHS, Matrix, MixingGraph, check_connected, mixing_graph
from parsim.errors import AlgorithmError, PlanError, near_matches

ADA = "ada"
_ADA_KEYS: dict[str, type] = {"kind": str, "start": int, "least": int, "rate": float, "rounds": int, "epochs": int}
MOST_EPOCHS = 1000


@dataclass(frozen=True, slots=True)
class MixingSchedule:
    """Attributes: name: a row of GRAPHS, or "ada". settings: sorted pairs, those of the row or of Ada."""

    name: str
    settings: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        known: Mapping[str, Any] = _ADA_KEYS if self.name == ADA else {}
        if self.name in GRAPHS:
            known = GRAPHS[self.name].defaults
        elif self.name != ADA:
            raise PlanError(f"unknown mixing graph {self.name!r}{near_matches(self.name, (*GRAPHS, ADA))}")
        for key, _ in self.settings:
            if key not in known:
                raise PlanError(f"the graph {self.name} has no setting {key!r}; its settings: {', '.join(known) or 'none'}")
        if self.name == ADA and not (1 <= self._of("epochs", 0) <= MOST_EPOCHS and self._of("rounds", 0) >= 1):
            raise PlanError(
                f"ada needs rounds >= 1 (mixing rounds between two changes of the graph) and epochs from 1 to {MOST_EPOCHS} "
                "(how many graphs there are), for example ada(rounds=50, epochs=4)"
            )
        if self.name == ADA and self._of("kind", "linear") not in ("linear", "exponential"):
            raise PlanError(
                f"ada(kind={self._of('kind', '')}) cannot be planned: a plan knows its graphs beforehand; use linear or "
                "exponential"
            )

    def _of(self, key: str, default: Any) -> Any:
        return dict(self.settings).get(key, default)

    def __str__(self) -> str:
        inside = ", ".join(f"{key}={value}" for key, value in self.settings)
        return f"{self.name}({inside})" if inside else self.name

    def graph(self, number: int, replicas: int) -> MixingGraph:
        """The graph of round `number`. Raises AlgorithmError where the settings do not suit so many replicas."""
        if self.name != ADA:
            return mixing_graph(self.name, replicas, **dict(self.settings))
        epoch = min(number // self._of("rounds", 1), self._of("epochs", 1) - 1)
        return self._ada(replicas).graph(epoch)

    def _ada(self, replicas: int) -> Ada:
        keys = {key: value for key, value in self.settings if key in ("kind", "start", "least", "rate")}
        return Ada(n=replicas, **keys)

    def matrix(self, number: int, replicas: int) -> Matrix:
        """W of round `number`: float64 [replicas, replicas]."""
        return self.graph(number, replicas)(number)

    def cycle(self, replicas: int) -> tuple[int, ...]:
        """Rounds that stand for all: of a graph one period of it, of Ada one round of every graph it comes to.

        Args:
            replicas: that mix. Ada's graphs each last equally long, so a mean over these rounds is one over the schedule.
        """
        if self.name == ADA:
            return tuple(epoch * self._of("rounds", 1) for epoch in range(self._of("epochs", 1)))
        return tuple(range(self.graph(0, replicas).period))

    def phases(self, replicas: int) -> tuple[tuple[int, str], ...]:
        """Of Ada in order how many rounds a graph lasts, and its name; the last one stays. Of other graphs none.

        Args:
            replicas: that mix.
        """
        if self.name != ADA:
            return ()
        ada, rounds = self._ada(replicas), self._of("rounds", 1)
        names = [f"lattice(neighbours={ada.neighbours(epoch)})" for epoch in range(self._of("epochs", 1))]
        return tuple((rounds * len(list(same)), name) for name, same in groupby(names))

    def check(self, replicas: int) -> None:
        """Raise AlgorithmError unless every replica's weights reach every other, and the settings suit so many."""
        if self.name == "alone":
            raise AlgorithmError(
                "the mixing graph is not connected: on the graph alone replicas never exchange anything; use another graph"
            )
        for number in self.cycle(replicas) if self.name == ADA else (0,):
            graph = self.graph(number, replicas)
            check_connected(graph, period=graph.period)


_CALL = re.compile(r"(\w+)(?:\((.*)\))?")


def parse_mixing(text: str) -> MixingSchedule:
    """Inverse of `str(schedule)`.

    Args:
        text: such as "lattice(neighbours=4)".

    Raises:
        PlanError: an unknown graph or setting, or a setting that is not a number.
    """
    match = _CALL.fullmatch(text.strip())
    if match is None:
        raise PlanError(f"{text!r} is not a mixing graph; write for example ring or lattice(neighbours=4)")
    settings: dict[str, Any] = {}
    for word in filter(None, (part.strip() for part in (match[2] or "").split(","))):
        key, given, value = (part.strip() for part in word.partition("="))
        if not given:
            raise PlanError(f"{text!r}: write settings as key=value, for example lattice(neighbours=4)")
        if key in settings:
            raise PlanError(f"{text!r} gives {key} twice; give it once")
        try:
            settings[key] = (_ADA_KEYS.get(key, int) if match[1] == ADA else int)(value)
        except ValueError as error:
            raise PlanError(f"{text!r}: {key} = {value!r} is not a number") from error
    return MixingSchedule(match[1], tuple(sorted(settings.items())))


def mixing_text(table: str | Mapping[str, Any]) -> str:
    """The text of what a run file says: a text already, or a table with `name` and the settings.

    Args:
        table: such as {"name": "lattice", "neighbours": 4}.
    """
    if isinstance(table, str):
        return table
    settings = ", ".join(f"{key}={value}" for key, value in table.items() if key != "name")
    if "name" not in table:
        raise PlanError('a mixing graph has a name, for example { name = "lattice", neighbours = 4 }')
    return str(parse_mixing(f"{table['name']}({settings})"))
