"""Tables of rows by name, and the one way to add a row from outside: the name "package.module:ROW".

parsim ships a fixed table per kind of extension (optimizers, pipeline orders, ...). Wherever a name of such a table is
allowed (run file, plan, profile, call), "package.module:ROW" is allowed too. The module is imported, and the attribute is
the row. Nothing registers itself, so a launched rank finds the row by the same text as the process that planned.
docs/extending.md shows one of each kind.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic_core import PydanticCustomError, core_schema

from parsim.errors import ConfigError, ParsimError, near_matches

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

RegistryRow = TypeVar("RegistryRow")


def is_reference(name: str) -> bool:
    """Whether the name is of the form "package.module:ROW"."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


class Registry(Mapping[str, RegistryRow]):
    """Rows by name. Iterating, `len` and `in` see the shipped rows; `registry[name]` also loads "package.module:ROW".

    Args:
        what: the kind of extension, for messages ("optimizer").
        row: the class of a row.
        rows: the shipped rows.
        error: what an unknown name raises.
        adapt: makes a row of what "package.module:ROW" names, where that is none itself; else returns it as it is.
    """

    def __init__(
        self,
        what: str,
        row: type[RegistryRow],
        rows: Mapping[str, RegistryRow],
        *,
        error: type[ParsimError] = ConfigError,
        adapt: Callable[[Any], Any] = lambda found: found,
    ) -> None:
        self.what = what
        self.row = row
        self.rows: Mapping[str, RegistryRow] = MappingProxyType(dict(rows))
        self.error = error
        self._adapt = adapt
        self._loaded: dict[str, RegistryRow] = {}

    def __getitem__(self, name: str) -> RegistryRow:
        """The row. Raises `error` with near matches, or with why the text cannot be loaded."""
        if name in self.rows:
            return self.rows[name]
        if name not in self._loaded:
            if not is_reference(name):
                raise self.error(f"unknown {self.what} {name!r}{self.near(name)}")
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def near(self, name: str) -> str:
        """What follows the word "unknown" in an error: near matches or all names, and how to give a row of one's own."""
        near = near_matches(name, self.rows)
        listing = "" if near.startswith("; known") else f" (known: {', '.join(self.rows)})"
        return f"{near}{listing}; your own: package.module:NAME, see docs/extending.md"

    def _load(self, name: str) -> RegistryRow:
        module, _, attribute = name.partition(":")
        try:
            row = self._adapt(getattr(importlib.import_module(module), attribute))
        except (ImportError, AttributeError) as error:
            raise self.error(
                f"{self.what} {name!r} cannot be loaded: {error}; write package.module:NAME with the package on the Python path"
            ) from error
        if not isinstance(row, self.row):
            raise self.error(
                f"{self.what} {name!r} is a {type(row).__name__}; it must be a {self.row.__module__}.{self.row.__qualname__}"
            )
        return row

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __contains__(self, name: object) -> bool:
        return name in self.rows

    def __len__(self) -> int:
        return len(self.rows)

    __hash__ = object.__hash__

    def where(self, **wanted: object) -> tuple[str, ...]:
        """The names of shipped rows whose attributes have these values."""
        return tuple(
            name for name, row in self.rows.items() if all(getattr(row, key) == value for key, value in wanted.items())
        )


def as_key_error(value: Any, validated: Callable[[Any], Any]) -> Any:
    """A pydantic WrapValidator: what a record refuses when it is made, as pydantic reports an error of its key."""
    try:
        return validated(value)
    except ParsimError as error:
        raise PydanticCustomError("described", "{rule}", {"rule": str(error)}) from error


class RowOf:
    """A pydantic annotation: text that names a row of a registry, or "package.module:ROW", which is loaded where it is read.
    `also` raises ParsimError for a row that cannot stand here."""

    def __init__(self, registry: Registry[Any], also: Callable[[str], None] = lambda _: None) -> None:
        self.registry = registry
        self.also = also

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def check(self, name: str) -> str:
        """Raises what pydantic reports as an error of this key."""
        try:
            self.registry[name]
            self.also(name)
        except ParsimError as error:
            rule = str(error) if is_reference(name) or name in self.registry else f"is unknown{self.registry.near(name)}"
            raise PydanticCustomError("unknown_row", "{rule}", {"rule": rule}) from error
        return name
