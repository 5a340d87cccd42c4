"""Records and plain JSON values: write one as the other, and check what a file held. A file may hold anything.

A checker and a reader are made once per class from its annotations. Whole numbers are no booleans and fit 64 bits; other
numbers are finite. Leaves out: annotations that exist for the type checker alone, and anything beside plain values, containers,
dataclasses and named tuples.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, cached_property, wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Union

LARGEST = 2**63
LARGEST_NUMBER = 1e40
"""Of flop, bytes and seconds: products with counts stay finite."""
Problem = str
"""What is wrong, beginning with where: `components.3.name: expected a text, got 7`; "" if nothing is."""
TypeCheck = Callable[[Any], Problem]


def check_types(record: Any, what: str) -> None:
    """Raise ValueError with the first field of a dataclass, however deep, that is not of its annotated type."""
    if problem := _checker(typing.cast(Hashable, type(record)))(record):
        raise ValueError(f"{what}{problem}")


@cache
def _checker(kind: Hashable) -> TypeCheck:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return _one_of(arguments)
    if origin is Literal:
        return lambda value: "" if value in arguments else _expected(f"one of {', '.join(map(repr, arguments))}", value)
    if origin is typing.Annotated:
        return _checker(arguments[0])
    if origin is tuple:
        return _tuple(arguments)
    if origin in (list, Sequence, frozenset, set):
        return _all(list if origin is list else tuple if origin is Sequence else origin, _checker(arguments[0]))
    if origin in (dict, Mapping):
        return _mapping(*map(_checker, arguments))
    if _is_record(kind):
        return _record(kind)
    if _is_named_tuple(kind):
        return _tuple(list(typing.get_type_hints(kind).values()))
    return _PLAIN.get(kind, lambda value: "")


def _expected(what: str, value: object) -> Problem:
    return f": expected {what}, got {repr(value)[:60]}"


def _is_whole(value: Any) -> Problem:
    return "" if type(value) is int and -LARGEST <= value < LARGEST else _expected("a whole number", value)


def _is_number(value: Any) -> Problem:
    if type(value) is int:
        return _is_whole(value)
    fits = isinstance(value, float) and abs(value) <= LARGEST_NUMBER
    return "" if fits else _expected("a finite number", value)


_PLAIN: dict[Any, TypeCheck] = {
    int: _is_whole,
    float: _is_number,
    str: lambda value: "" if isinstance(value, str) else _expected("a text", value),
    bool: lambda value: "" if isinstance(value, bool) else _expected("true or false", value),
    type(None): lambda value: "" if value is None else _expected("nothing", value),
}


def _one_of(kinds: Sequence[Any]) -> TypeCheck:
    checks = [_checker(kind) for kind in kinds]

    def check(value: Any) -> Problem:
        problems = [check(value) for check in checks]
        return "" if "" in problems else problems[0]

    return check


def _tuple(kinds: Sequence[Any]) -> TypeCheck:
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return _all(tuple, _checker(kinds[0]))
    checks = [_checker(kind) for kind in kinds]

    def check(value: Any) -> Problem:
        if not isinstance(value, tuple) or len(value) != len(checks):
            return _expected(f"{len(checks)} values", value)
        return _first((number, check(entry)) for number, (check, entry) in enumerate(zip(checks, value, strict=True)))

    return check


def _all(kind: Any, check_entry: TypeCheck) -> TypeCheck:
    def check(value: Any) -> Problem:
        if not isinstance(value, kind):
            return _expected("a list", value)
        return _first((number, check_entry(entry)) for number, entry in enumerate(value))

    return check


def _mapping(check_key: TypeCheck, check_value: TypeCheck) -> TypeCheck:
    def check(value: Any) -> Problem:
        if not isinstance(value, Mapping):
            return _expected("a table", value)
        return _first((key, check_key(key) or check_value(entry)) for key, entry in value.items())

    return check


def _is_record(kind: Any) -> bool:
    return dataclasses.is_dataclass(typing.get_origin(kind) or kind)


def _is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _record(kind: Any) -> TypeCheck:
    record: type = typing.get_origin(kind) or kind
    checks = [(name, _checker(hint)) for name, hint in _field_types(kind).items()]

    def check(value: Any) -> Problem:
        if not isinstance(value, record):
            return _expected(f"a {record.__name__}", value)
        return _first((name, check(getattr(value, name))) for name, check in checks)

    return check


def _field_types(kind: Any) -> dict[str, Any]:
    """Types of a dataclass' fields, with what a generic class is of in the place of its type variables."""
    record = typing.get_origin(kind) or kind
    bound: dict[Any, Any] = {}
    for generic in (kind, *getattr(record, "__orig_bases__", ())):
        origin = typing.get_origin(generic)
        if origin not in (None, typing.Generic):
            bound |= dict(zip(origin.__parameters__, typing.get_args(generic), strict=True))
    try:
        hints = typing.get_type_hints(record)
    except NameError:  # names that only the type checker imports
        return {}

    def of_this(hint: Any) -> Any:
        if variables := getattr(hint, "__parameters__", ()):
            return hint[tuple(bound[variable] for variable in variables)]
        return bound.get(hint, hint)

    return {field.name: of_this(hints[field.name]) for field in dataclasses.fields(record) if field.name in hints}


def plain(value: Any) -> Any:
    """A record as JSON values: a dataclass as a table without the fields that have their default, tuples as lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        table = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {field.name: plain(content) for field, content in table if content != field.default}
    if isinstance(value, tuple | list):
        return [plain(entry) for entry in value]
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return value


def record_from(kind: Any, document: Any) -> Any:
    """The record that `plain` wrote. Check it with `check_types`; what has no place in the class is a TypeError."""
    return _reader(kind)(document)


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType) and type(None) in arguments:
        inner = [_reader(argument) for argument in arguments if argument is not type(None)]
        return (lambda value: value if value is None else inner[0](value)) if len(inner) == 1 else lambda value: value
    if origin is tuple:
        return _tuple_reader(arguments)
    if _is_record(kind):
        return _record_reader(kind)
    if _is_named_tuple(kind):
        return lambda value: kind(*value)
    return lambda value: value


def _tuple_reader(kinds: Sequence[Any]) -> Callable[[Any], Any]:
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        read = _reader(kinds[0])
        return lambda value: tuple([read(entry) for entry in _entries(value)])
    readers = [_reader(kind) for kind in kinds]
    return lambda value: tuple([read(entry) for read, entry in zip(readers, _entries(value), strict=True)])


def _entries(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(_expected("a list", value).removeprefix(": "))
    return value


def _record_reader(kind: Any) -> Callable[[Any], Any]:
    record: type = typing.get_origin(kind) or kind
    readers = {name: _reader(hint) for name, hint in _field_types(kind).items()}

    def read(table: Any) -> Any:
        if not isinstance(table, dict):
            raise ValueError(_expected(f"a {record.__name__}", table).removeprefix(": "))
        return record(**{name: readers[name](value) if name in readers else value for name, value in table.items()})

    return read


def _first(problems: typing.Iterable[tuple[object, Problem]]) -> Problem:
    for place, problem in problems:
        if problem:
            return f".{place}{problem}"
    return ""


# Results that belong to a value and that others work out: kept with it, so that they are worked out once and end with it.


Kept = TypeVar("Kept")
P = ParamSpec("P")


class Remembering:
    """A value that keeps what others worked out about it. What is kept holds nothing that the value does not determine."""

    def remembered(self, kind: type[Kept]) -> Kept:
        """The one object of a class that takes no arguments, made at the first request."""
        if kind not in self._stores:
            self._stores[kind] = kind()
        kept: Kept = self._stores[kind]
        return kept

    def answers(self, function: object) -> dict[Any, Any]:
        """What a function found out about this value so far, by its other arguments."""
        found: dict[Any, Any] = self._stores.setdefault(function, {})
        return found

    @cached_property
    def _stores(self) -> dict[object, Any]:
        return {}


_Owner = TypeVar("_Owner", bound=Remembering)


def once(function: Callable[Concatenate[_Owner, P], Kept]) -> Callable[Concatenate[_Owner, P], Kept]:
    """A function of a `Remembering` value and of hashable arguments that is worked out once for each of these."""

    @wraps(function)
    def answer(value: _Owner, /, *args: P.args, **settings: P.kwargs) -> Kept:
        answers = value.answers(function)
        key = (args, tuple(settings.items())) if settings else args
        if key not in answers:
            answers[key] = function(value, *args, **settings)
        kept: Kept = answers[key]
        return kept

    return answer
