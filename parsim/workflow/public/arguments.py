"""The arguments of public functions as keys of a run file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from parsim.errors import ConfigError

QuestionSettings = Mapping[str, object]

KEYS = {
    "precision": "training.precision",
    "optimizer": "training.optimizer",
    "tokens": "training.tokens",
    "samples": "training.samples",
    "strategy": "plan.strategy",
    "devices": "cluster.devices",
    "nodes": "cluster.nodes",
    "network": "cluster.network",
    "args": "model.args",
    "seq": "model.args.seq",
    "input_shape": "model.input_shape",
    "granularity": "model.granularity",
}
"""The key of a run file that an argument stands for."""


def keys_of(settings: QuestionSettings | None, **arguments: object) -> QuestionSettings:
    """The arguments by their `KEYS`, and further keys. Raises ConfigError for a key given twice."""
    given = {KEYS[name]: _plain(value) for name, value in arguments.items() if value is not None}
    for key, value in (settings or {}).items():
        if key in given:
            raise ConfigError(f"settings[{key!r}] = {value!r}, but {key} = {given[key]!r} was given as an argument; drop one")
    return {**given, **(settings or {})}


def _plain(value: object) -> object:
    """As a run file would hold it."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
