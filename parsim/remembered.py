"""Results that belong to a value and that others work out: kept with it, so that they are worked out once and end with it."""

from __future__ import annotations

from functools import cached_property
from typing import TypeVar

Kept = TypeVar("Kept")


class Remembering:
    """A value that keeps one object for every class that asks. The objects hold nothing that the value does not determine."""

    def remembered(self, kind: type[Kept]) -> Kept:
        """The one object of this class, made empty at the first request.

        Args:
            kind: of the object, which takes no arguments.
        """
        stores = self._stores
        if kind not in stores:
            stores[kind] = kind()
        found = stores[kind]
        assert isinstance(found, kind)
        return found

    @cached_property
    def _stores(self) -> dict[type[object], object]:
        return {}
