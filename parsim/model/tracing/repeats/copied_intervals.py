"""Components that copy an earlier one, because the block around them was copied: only names differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from parsim.model.runnable import CallProgram, StateKey
from parsim.model.tracing.recorder import Copied, Recording
from parsim.model.tracing.sublayers import CallInterval, pieces_at, sublayers


class Original(NamedTuple):
    """Where the calls of a component come from: the place of an earlier one, and its value numbers with the copy's."""

    place: int
    numbers: Mapping[int, int]


def originals(recording: Recording, intervals: Sequence[CallInterval]) -> list[Original | None]:
    """Per component the earlier one that has the same calls; None for one that ran, or that is cut otherwise."""
    places = {(interval.start, interval.end): place for place, interval in enumerate(intervals)}
    found: list[Original | None] = []
    for interval in intervals:
        copy = _copy_around(recording, interval)
        found.append(None if copy is None else _original(recording, intervals, places, interval, copy))
    return found


def _copy_around(recording: Recording, interval: CallInterval) -> Copied | None:
    return next((copy for copy in recording.copies if copy.start <= interval.start and interval.end <= copy.stop), None)


def _same_calls(recording: Recording, intervals: Sequence[CallInterval]) -> list[int | None]:
    """Per interval the place of an earlier one that lies in a copied block and has the same calls, boundaries aside."""
    places = {(interval.start, interval.end): place for place, interval in enumerate(intervals)}
    state = recording.state
    found: list[int | None] = []
    for interval in intervals:
        copy = _copy_around(recording, interval)
        place = None
        if copy is not None and all((one in state) == (other in state) for one, other in copy.numbers.items()):
            shift = copy.start - copy.source
            place = places.get((interval.start - shift, interval.end - shift))
        found.append(place)
    return found


def pieces_of(recording: Recording, blocks: Sequence[CallInterval]) -> list[CallInterval]:
    """The sublayers of every block. A copied block is cut where its original is."""
    found: list[list[CallInterval]] = []
    for block, place in zip(blocks, _same_calls(recording, blocks), strict=True):
        if place is None:
            found.append(sublayers(recording, block))
            continue
        shift = block.start - blocks[place].start
        found.append(pieces_at(recording, block, [piece.end + shift for piece in found[place]]))
    return [piece for pieces in found for piece in pieces]


def _original(
    recording: Recording,
    intervals: Sequence[CallInterval],
    places: Mapping[tuple[int, int], int],
    interval: CallInterval,
    copy: Copied,
) -> Original | None:
    shift = copy.start - copy.source
    place = places.get((interval.start - shift, interval.end - shift))
    if place is None or recording.assumed or recording.buffer_writes:
        return None
    one, numbers = intervals[place], copy.numbers
    for before, after in ((one.inputs, interval.inputs), (one.outputs, interval.outputs)):
        if [numbers[number] for number in before] != after:
            return None
    return Original(place, numbers)


def renamed(
    program: CallProgram,
    numbers: Mapping[int, int],
    recording: Recording,
    interval: CallInterval,
    names: Mapping[int, str],
    known: Mapping[StateKey, int],
) -> CallProgram | None:
    """The program of a copy, with the very calls of the original; None if what it owns is not what that owns.

    Args:
        program: of the original. numbers: as in Original. interval: of the copy. names: of all values.
        known: value numbers of parameters and buffers.
    """
    state = [(numbers[known[key]], slot) for key, slot in program.state]
    if any(number not in recording.state for number, _ in state):
        return None

    def ends(before: Sequence[tuple[str, int, bool]], numbers: Sequence[int]) -> tuple[tuple[str, int, bool], ...]:
        flows = recording.differentiable
        pairs = zip(numbers, before, strict=True)
        return tuple((names[number], slot, flows.get(number, False)) for number, (_, slot, _) in pairs)

    return replace(
        program,
        name=interval.name,
        inputs=ends(program.inputs, interval.inputs),
        outputs=ends(program.outputs, interval.outputs),
        state=tuple((recording.state[number], slot) for number, slot in state),
    )
