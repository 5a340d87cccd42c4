"""Comparable forms of recorded calls, without names and value numbers: equal forms mean the same work."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any

from torch import Tensor

from parsim.model.runnable import CallProgram, Nested, Ref

PLAIN_TYPES = (int, float, str, bool, complex, bytes, type(None), type(Ellipsis))


def canonical(value: Any, of_slot: Callable[[int], Hashable] = lambda slot: slot) -> Hashable:
    """A recorded argument in a form that can be compared and hashed.

    Values of two types differ, although Python calls 1, 1.0 and True equal. Objects of unknown types are equal only to
    themselves.

    Args:
        value: a constant, Ref or Nested. of_slot: what stands for the slot of a Ref.
    """
    if type(value) is Ref:
        return "ref", of_slot(value.slot)
    if type(value) is Nested:
        return "nested", canonical_function(value.rebuild), *(canonical(item, of_slot) for item in value.items)
    if type(value) is float:
        return "float", value.hex()
    if type(value) in PLAIN_TYPES:
        return type(value), value
    if isinstance(value, tuple | list):
        return type(value), *(canonical(item, of_slot) for item in value)
    if isinstance(value, dict):
        return type(value), *((canonical(key, of_slot), canonical(item, of_slot)) for key, item in value.items())
    if isinstance(value, slice):
        return "slice", *(canonical(item, of_slot) for item in (value.start, value.stop, value.step))
    if type(value).__module__ == "torch" and not isinstance(value, Tensor) and type(value).__name__ in _BY_VALUE:
        return type(value), value
    return "object", id(value)


_BY_VALUE = ("dtype", "device", "layout", "memory_format")


def canonical_function(function: Any) -> Hashable:
    """Equal for one function, and for two closures of the same code over equal values."""
    if isinstance(function, FunctionType) and function.__closure__:
        return function.__code__, *(canonical(cell.cell_contents) for cell in function.__closure__)
    try:
        hash(function)
    except TypeError:
        return "object", id(function)
    return type(function), function


def calls_key(program: CallProgram) -> Hashable:
    """Equal for programs with the same calls between the same slots, on tensors of the same kinds."""
    return (
        tuple(
            (
                canonical_function(op.function),
                canonical(op.arguments),
                canonical(op.keywords),
                canonical(op.outputs),
                op.context,
                op.drop,
            )
            for op in program.ops
        ),
        program.tensors,
    )


def program_key(program: CallProgram, calls: Hashable) -> Hashable:
    """Equal for programs that make the same calls on tensors of the same kinds, whatever their values are named.

    Args:
        calls: `calls_key` of the program, or what stands for it.
    """
    names = {key.name: place for place, (key, _) in enumerate(program.state)}
    return (
        calls,
        program.slots,
        tuple(entry[1:] for entry in program.inputs),
        tuple(entry[1:] for entry in program.outputs),
        tuple((key.kind, slot) for key, slot in program.state),
        tuple((id(constant), slot) for constant, slot in program.constants),
        tuple((names.get(name), slot) for name, slot in program.buffer_writes),
    )
