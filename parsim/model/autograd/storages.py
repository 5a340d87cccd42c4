"""Tensors among the arguments and results of operators, and the deaths of their storages."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


def tensors_among(values: Iterable[Any]) -> list[Tensor]:
    """Tensors of an operator's arguments or results, in order: they lie there themselves, or in lists and tuples.

    Args:
        values: positional arguments, values of keyword arguments, or results.
    """
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_among(value)
        elif isinstance(value, Mapping):
            found += tensors_among(value.values())
    return found


class StorageRef(weakref.ref[torch.UntypedStorage]):
    """Tells of the end of a storage, as `weakref.finalize` does in three times the time.

    Attributes:
        key: the storage's address, as torch names it; another storage may have it later.
    """

    __slots__ = ("key",)
    key: int

    def __new__(cls, storage: torch.UntypedStorage, ended: Callable[[Any], None]) -> StorageRef:
        """
        Args:
            storage: of a tensor. ended: called with this object when the storage dies, if this object lives then.
        """
        own = super().__new__(cls, storage, ended)
        own.key = storage._cdata
        return own
