"""RowTable rows as columns of one length."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from calibration.parts.robust import Errors
from parsim.costs.compute.formula import Array

if TYPE_CHECKING:
    from typing import Self


class RowTable:
    """What every kind of row has. A subclass is a dataclass of arrays and tuples, each with an entry per row."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    seconds: Array
    source: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.seconds)

    def where(self, keep: NDArray[np.bool_]) -> Self:
        """The rows for which `keep` is true."""
        chosen = np.flatnonzero(keep)
        columns = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        kept = {
            name: tuple(column[index] for index in chosen) if isinstance(column, tuple) else column[chosen]
            for name, column in columns.items()
        }
        return dataclasses.replace(self, **kept)


SomeRows = TypeVar("SomeRows", bound=RowTable)


def leave_sources_out(rows: SomeRows, errors_of: Callable[[SomeRows, SomeRows], Errors], least: int = 1) -> dict[str, Errors]:
    """Per source of at least `least` rows: its errors under the fit to all other sources (to none: the prior).

    Args:
        errors_of: the rows to fit, the rows to judge -> errors.
    """
    names = np.array(rows.source)
    return {
        str(source): errors_of(rows.where(names != source), rows.where(names == source))
        for source, count in zip(*np.unique(names, return_counts=True), strict=True)
        if count >= least
    }
