"""`dataset = "package.module:factory"`: what a function or class of the user's own returns, as samples of the model."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
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
    arguments = {"split": ask.split, "root": None if ask.root is None else str(ask.root), "seed": ask.seed}
    names = _taken(factory, name)
    try:
        dataset = factory(**{key: arguments[key] for key in names})
    except NoSplitError:
        raise
    except Exception as error:
        lines = traceback.format_exc(limit=-3)
        raise FactoryError(f"dataset {name} raised {type(error).__name__}: {error}\n{lines}") from error
    if isinstance(dataset, Mapping):
        dataset = dataset.get(ask.split)
    elif "split" not in names and ask.split != "train":
        dataset = None
    if dataset is None:
        raise NoSplitError(f"dataset {name} has no split {ask.split!r}; let it take split= and return one for {ask.split!r}")
    return _samples(dataset, name, ask)


def _taken(factory: Callable[..., Any], name: str) -> list[str]:
    """Which arguments the factory takes."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return []
    for parameter in parameters:
        is_needed = parameter.default is parameter.empty
        is_one = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if is_needed and is_one and parameter.name not in TAKEN:
            raise DataError(
                f"dataset {name} needs the argument {parameter.name!r}; parsim gives {', '.join(TAKEN)}: give it a default, or "
                "write a function without it"
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return list(TAKEN)
    return [parameter.name for parameter in parameters if parameter.name in TAKEN]


def _samples(dataset: Any, name: str, ask: DataRequest) -> OwnSamples:
    if isinstance(dataset, Dataset | NamedDataset):
        return dataset
    has_items, has_length = hasattr(dataset, "__getitem__"), hasattr(dataset, "__len__")
    is_iterable = hasattr(type(dataset), "__iter__")
    if type(dataset).__name__ == "DataLoader" or isinstance(dataset, str | bytes) or not (has_items or is_iterable):
        raise DataError(
            f"dataset {name} returned a {type(dataset).__name__}; return a dataset: __getitem__ and __len__, or __iter__ "
            "(batches, order and workers are parsim's)"
        )
    if has_items and not has_length and not is_iterable:
        raise DataError(f"dataset {name}: {type(dataset).__name__} has __getitem__ but no __len__; add it")
    constant = [value.name for value in ask.inputs if value.constant]
    if constant:
        raise DataError(
            f"dataset {name}: input {constant[0]!r} is the same for every batch, and a dataset gives samples; make it a buffer "
            "of the module"
        )
    described = Described(name, ask.inputs, None if ask.targets is None else ask.targets.described)
    kind = MapSamples if has_items and has_length else StreamSamples
    return kind(dataset, described, split=ask.split, seed=ask.seed)
