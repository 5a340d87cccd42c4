"""What a forward takes from elsewhere than its tensors: numbers drawn by Python or numpy, and attributes that it changes.

A recording is one forward, which every rank repeats in every step. torch's own generators are recorded as calls, and buffers as
writes. Leaves out: global variables, files, clocks, and generators hidden inside other objects than modules.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import numpy as np
from torch import nn

from parsim.errors import first_few
from parsim.model.tracing.refused.messages import at_line

_NUMBERS = (bool, int, float, str)
_PYTHON, _NUMPY = "Python's random", "numpy.random"
_Generator = random.Random | np.random.RandomState | np.random.Generator


class Generators:
    """The generators of Python, of numpy and in the attributes of a module's parts, as they were when this was made."""

    def __init__(self, module: nn.Module) -> None:
        self._own: dict[str, _Generator] = {
            f"{path}.{name}" if path else name: value
            for path, part in module.named_modules()
            for name, value in part.__dict__.items()
            if isinstance(value, _Generator)
        }
        self._states = self._now()
        self._python, self._numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - of users' code

    def drawn(self) -> str:
        """Names of those that have been drawn from since; "" if none has."""
        return ", ".join(name for name, state in self._now().items() if state != self._states[name])

    def put_back(self) -> None:
        """The two global ones."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002

    def _now(self) -> dict[str, Hashable]:
        shared = {_PYTHON: random.getstate(), _NUMPY: _plain(np.random.get_state())}  # noqa: NPY002
        return {**shared, **{f"the generator {name}": _state_of(value) for name, value in self._own.items()}}


def _state_of(generator: _Generator) -> Hashable:
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    return _plain(generator.getstate() if isinstance(generator, random.Random) else generator.get_state())


def _plain(value: Any) -> Hashable:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, Mapping):
        return tuple((key, _plain(item)) for key, item in value.items())
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else value


def draw_message(name: str, drawn: str, forward: Callable[[], object]) -> str:
    """Why a forward that draws outside torch cannot be recorded.

    Args:
        name: of the module. drawn: of `Generators.drawn`. forward: the same again, to find the line.
    """
    return (
        f"the forward of {name} draws from {drawn}{_first_draw(forward)}: each step would draw again, but a recorded forward "
        "repeats one outcome in every step; draw with torch and use the numbers as a tensor, as in "
        "x * (torch.rand(len(x), 1) < 0.9), or draw outside the forward and give the result as an input"
    )


def _first_draw(forward: Callable[[], object]) -> str:
    """The user's line of the first draw; "" where it cannot be seen."""
    found: list[str] = []

    def look(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call" and not found and isinstance(getattr(argument, "__self__", None), _Generator):
            found.append(at_line(traceback.extract_stack(frame)))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        forward()
    finally:
        sys.setprofile(before)
    return found[0] if found else ""


def changed_attributes(module: nn.Module, before: Iterable[tuple[nn.Module, Mapping[str, Any]]]) -> tuple[str, ...]:
    """Numbers and words in attributes that the forward has left with another value, for people.

    Args:
        module: with all parts. before: of every part, its attributes before the forward.
    """
    names = {id(part): path for path, part in module.named_modules()}
    return tuple(
        f"{f'{names[id(part)]}.' if names.get(id(part)) else ''}{key} ({was!r} to {now!r})"
        for part, attributes in before
        for key, was in attributes.items()
        if isinstance(was, _NUMBERS) and isinstance(now := part.__dict__.get(key), _NUMBERS) and now != was
    )


def change_note(changed: tuple[str, ...]) -> str:
    """What the answer says of `changed_attributes`."""
    return (
        f"the forward changes attributes of its modules: {first_few(changed)}. Every step is taken as the first one, also in "
        "training; keep what changes in a buffer, and use it as a tensor"
    )
