"""`dataset = "package.module:factory"`: what a function or class of the user's own returns, as samples of the model."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from parsim.data.samples import DataRequest, Dataset, Described, MapSamples, NamedDataset, StreamSamples
from parsim.errors import DataError, FactoryError, NoSplitError

TAKEN = ("split", "root", "seed")
"""Arguments that a factory may have."""

OwnSamples = Dataset | NamedDataset | MapSamples | StreamSamples


def load_own(factory: Callable[..., Any], ask: DataRequest) -> OwnSamples:
    """Call the factory with those of `split`, `root` and `seed` that it takes, and look at what it returns.

    It returns a dataset, a mapping from "train", "validation" and "test" to datasets, or None for a split that it lacks. One
    that takes no split and returns one dataset has training samples alone.

    Raises:
        NoSplitError: it has no such split. DataError: it returns no dataset, or samples that do not suit the model.
        FactoryError: it raised.
    """
    name = getattr(factory, "__qualname__", repr(factory))
    taken = _taken(factory, name)
    given = {"split": ask.split, "root": None if ask.root is None else str(ask.root), "seed": ask.seed}
    try:
        found = factory(**{key: given[key] for key in taken})
    except NoSplitError:
        raise
    except Exception as error:
        raise FactoryError(f"dataset {name} raised {type(error).__name__}: {error}\n{_own_lines()}") from error
    if isinstance(found, Mapping):
        found = found.get(ask.split)
    elif "split" not in taken and ask.split != "train":
        found = None
    if found is None:
        raise NoSplitError(f"dataset {name} has no split {ask.split!r}; let it take split= and return one for {ask.split!r}")
    return _samples(found, name, ask)


def _taken(factory: Callable[..., Any], name: str) -> list[str]:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return []
    needed = [
        entry.name
        for entry in parameters
        if entry.default is entry.empty and entry.kind not in (entry.VAR_KEYWORD, entry.VAR_POSITIONAL)
    ]
    unknown = [entry for entry in needed if entry not in TAKEN]
    if unknown:
        raise DataError(
            f"dataset {name} needs the argument {unknown[0]!r}; parsim gives {', '.join(TAKEN)}: give it a default, or write a "
            "function without it"
        )
    if any(entry.kind is entry.VAR_KEYWORD for entry in parameters):
        return list(TAKEN)
    return [entry.name for entry in parameters if entry.name in TAKEN]


def _samples(found: Any, name: str, ask: DataRequest) -> OwnSamples:
    if isinstance(found, Dataset | NamedDataset):
        return found
    has_items, has_length = hasattr(found, "__getitem__"), hasattr(found, "__len__")
    is_iterable = hasattr(type(found), "__iter__")
    if type(found).__name__ == "DataLoader" or isinstance(found, str | bytes) or not (has_items or is_iterable):
        raise DataError(
            f"dataset {name} returned a {type(found).__name__}; return a dataset: __getitem__ and __len__, or __iter__ "
            "(batches, order and workers are parsim's)"
        )
    if has_items and not has_length and not is_iterable:
        raise DataError(f"dataset {name}: {type(found).__name__} has __getitem__ but no __len__; add it")
    described = described_of(name, ask)
    if has_items and has_length:
        return MapSamples(found, described, split=ask.split, seed=ask.seed)
    return StreamSamples(found, described, split=ask.split, seed=ask.seed)


def described_of(name: str, ask: DataRequest) -> Described:
    """The values that the model takes of a sample. Raises DataError for constant inputs, which no sample can hold."""
    constant = [entry.name for entry in ask.inputs if entry.constant]
    if constant:
        raise DataError(
            f"dataset {name}: input {constant[0]!r} is the same for every batch, and a dataset gives samples; make it a buffer "
            "of the module"
        )
    return Described(name, ask.inputs, None if ask.targets is None else ask.targets.described)


def _own_lines() -> str:
    return traceback.format_exc(limit=-3)


def loader_of(found: Any) -> Callable[[DataRequest], OwnSamples] | None:
    """How to load what a name "package.module:factory" leads to; None if it is not a factory."""
    return partial(load_own, found) if callable(found) else None
