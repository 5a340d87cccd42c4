"""Modules whose Python code depends on the data run as a whole: each call of one becomes a single recorded call.

A mixture of experts sends every token to other experts with every batch, so a list of its torch calls holds for one batch only.
A component that contains such a module calls the module itself, with its own Python code: what it does then is right for
any data. Its work is counted on the recording in which the choices are taken as balanced
(`parsim.model.trace.recorder`).

Which modules these are follows from two recordings with different choices: every module that looked at a value, or in which a
size depended on a choice. A module whose sizes reach the code around it is joined by the module around it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from parsim.errors import TraceError
from parsim.model.runnable import Nested, Ref, StateKey
from parsim.model.trace.checks import change_note
from parsim.model.trace.recorder import RecordedOp, Recording, template_of, tensors_in
from parsim.private import tree_flatten_with_path

MODULE = "module"
"""Kind of a StateKey that stands for a whole module."""


class _EscapesError(Exception):
    """A value inside a whole call is read outside it, or one outside is read inside without being an argument."""


def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a module with its own code and hooks."""
    return module(*args, **kwargs)


def _outermost(modules: set[str] | frozenset[str]) -> frozenset[str]:
    """The modules of these that lie inside no other one."""
    return frozenset(
        name for name in modules if not any(other != name and (not other or name.startswith(f"{other}.")) for other in modules)
    )


def _module_of(recording: Recording, call: int | None) -> str:
    return "" if call is None else recording.calls[call].module


def whole_modules(first: Recording, second: Recording, root: nn.Module) -> frozenset[str]:
    """The modules that have to run as a whole: those whose code looked at values, and those around whose values escape.
    `first`, `second`: of one forward under different choices. `root`: the module."""
    whole = frozenset(_module_of(recording, entry.call) for recording in (first, second) for entry in recording.decisions)
    while True:
        whole = _outermost(whole)
        wider = _escape(first, whole) or _difference(first, second, whole, root)
        if wider is None:
            return whole
        if "" in whole:
            return frozenset({""})
        whole |= {wider}


def _escape(recording: Recording, whole: frozenset[str]) -> str | None:
    """The module around the first whole one whose values are read elsewhere."""
    for number, call in enumerate(recording.calls):
        if call.module in whole and not _inside(recording, call.parent, whole):
            try:
                _collapse_call(recording, number, *_span(recording, number))
            except _EscapesError:
                return _module_of(recording, call.parent)
    return None


def _difference(first: Recording, second: Recording, whole: frozenset[str], root: nn.Module) -> str | None:
    """The module in which two recordings differ first; None if they are equal outside whole calls."""
    one, other = (collapse(recording, whole, root)[0] for recording in (first, second))
    calls = [
        left.call for left, right in zip(one.ops, other.ops, strict=False) if _signature(one, left) != _signature(other, right)
    ]
    if len(one.ops) != len(other.ops):
        calls.append(one.ops[-1].call)
    if not calls:
        return None
    path = _module_of(one, calls[0])
    for name in whole:  # what made the difference is a call that is whole already: join it with what is around it
        if name == path or path.startswith(f"{name}."):
            return name.rpartition(".")[0]
    return path


def _signature(recording: Recording, op: RecordedOp) -> tuple[Any, ...]:
    shapes = tuple(tuple(recording.tensors[number].shape) for _, number in op.outputs)
    return op.function, _plain(op.arguments), _plain(op.keywords), shapes, op.context, _module_of(recording, op.call)


def _plain(template: Any) -> Any:
    """Constants of the arguments; tensors are places."""
    if type(template) is Ref:
        return "tensor"
    if type(template) is Nested:
        return _plain(template.items)
    if isinstance(template, tuple | list):
        return tuple(map(_plain, template))
    return template if isinstance(template, bool | int | float | str | type(None) | torch.dtype) else repr(type(template))


def _inside(recording: Recording, call: int | None, whole: frozenset[str]) -> bool:
    while call is not None:
        if recording.calls[call].module in whole:
            return True
        call = recording.calls[call].parent
    return False


def _span(recording: Recording, call: int) -> tuple[int, int]:
    """The recorded calls inside a call of a module."""
    inside = {call}
    for number in range(call + 1, len(recording.calls)):
        if recording.calls[number].parent in inside:
            inside.add(number)
    places = [place for place, op in enumerate(recording.ops) if op.call in inside]
    return (places[0], places[-1] + 1) if places else (0, 0)


def collapse(recording: Recording, whole: frozenset[str], root: nn.Module) -> tuple[Recording, tuple[int, ...]]:
    """The recording with one call for each call of the modules `whole`.
    `recording`: of a forward. `whole`: names of modules, none inside another. `root`: the module that was recorded. Raises
    TraceError: what such a module hands on besides its result leaves the whole model."""
    if not whole:
        return recording, tuple(range(len(recording.ops) + 1))
    last = len(recording.ops) if recording.loss_start is None else recording.loss_start
    spans: dict[int, tuple[int, RecordedOp]] = {}
    state, tensors = dict(recording.state), list(recording.tensors)
    for number, call in enumerate(recording.calls):
        if call.module in whole and not _inside(recording, call.parent, whole):
            start, end = _span(recording, number)
            if start == end:
                continue
            key = len(tensors)
            tensors.append(torch.empty(0))
            state[key] = StateKey(MODULE, call.module)
            try:
                op = _collapse_call(recording, number, start, end)
            except _EscapesError as error:
                raise TraceError(
                    f"{call.module or type(root).__name__} depends on the data and cannot run as a whole: {error}; return "
                    "what it makes instead of keeping it in attributes"
                ) from error
            spans[start] = end, replace(op, arguments=(Ref(key), *op.arguments), reads=(*op.reads, key))
    ops: list[RecordedOp] = []
    starts: list[int] = []
    place = 0
    loss_start = None
    while place < len(recording.ops):
        if place >= last and loss_start is None:
            loss_start = len(ops)
        starts.append(place)
        end, op = spans.get(place, (place + 1, recording.ops[place]))
        ops.append(op)
        place = end
    starts.append(len(recording.ops))
    if recording.loss_start is not None and loss_start is None:
        where = ", ".join(sorted(whole)) or "its forward"
        raise TraceError(
            f"{type(root).__name__} computes its own loss inside {where}, whose code depends on the data; put that "
            "code into a module of its own"
        )
    made = {number for op in ops for _, number in op.outputs}
    collapsed = replace(
        recording,
        ops=ops,
        state=state,
        tensors=tensors,
        loss_start=loss_start,
        buffer_writes={name: number for name, number in recording.buffer_writes.items() if number in made},
    )
    return collapsed, tuple(starts)


def _collapse_call(recording: Recording, call: int, start: int, end: int) -> RecordedOp:
    """One call of a module as one recorded call. Raises _EscapesError if values enter or leave it beside its arguments."""
    called = recording.calls[call]
    path = called.module
    number_of = {id(tensor): number for number, tensor in enumerate(recording.tensors)}
    inner = recording.ops[start:end]
    made = {number for op in inner for _, number in op.outputs}

    def ref(tensor: Tensor) -> Ref:
        if id(tensor) not in number_of:
            raise _EscapesError("an argument was not made by a recorded call")
        return Ref(number_of[id(tensor)])

    arguments = tuple(template_of(item, ref) for item in called.args)
    keywords = tuple((key, template_of(item, ref)) for key, item in called.kwargs.items())
    given = {number_of[id(tensor)] for _, tensor in tensors_in((called.args, called.kwargs))}
    outputs = []
    for keys, leaf in tree_flatten_with_path(called.output)[0]:
        if isinstance(leaf, Tensor):
            if id(leaf) not in number_of:
                raise _EscapesError("a result was not made by a recorded call")
            outputs.append((tuple(_step(key) for key in keys), number_of[id(leaf)]))
    from_outside = dict.fromkeys(number for op in inner for number in op.reads if number not in made and number not in given)
    if any(number not in recording.state and number not in recording.constants for number in from_outside):
        raise _EscapesError("it reads a value that is not an argument")
    later = {number for op in (*recording.ops[:start], *recording.ops[end:]) for number in op.reads}
    later |= {leaf.slot for leaf in recording.output_leaves if type(leaf) is Ref}
    if (made - {number for _, number in outputs}) & later:
        raise _EscapesError("a value that it makes is read outside, and is not its result")
    state = [
        number
        for number, key in recording.state.items()
        if key.kind in ("parameter", "buffer") and (not path or key.name.startswith(f"{path}."))
    ]
    return RecordedOp(
        function=call_module,
        arguments=arguments,
        keywords=keywords,
        outputs=tuple(outputs),
        context=called.context,
        call=call,
        reads=tuple(dict.fromkeys([*given, *(number for number in from_outside if number in recording.state), *state])),
        mutated=tuple(dict.fromkeys(number for op in inner for number in op.mutated if number not in made)),
    )


def _step(key: Any) -> Any:
    """An index or key of a path into a result. Raises _EscapesError for anything else."""
    for name in ("idx", "key"):
        if hasattr(key, name):
            return getattr(key, name)
    raise _EscapesError(f"a tensor lies in its result at {key}, which is not a place in a tuple, list or dict")


def assumptions(recording: Recording) -> tuple[str, ...]:
    """What the numbers of a recording assume about the data and about later steps, for people."""
    notes = list(_assumptions_on_data(recording))
    losses = [op.call for op in recording.ops if op.name == "ctc_loss"]
    if losses:  # their work grows with the lengths of a batch
        where = "the loss" if losses[0] is None else _module_of(recording, losses[0]) or "the root module"
        notes.append(f"CTC counted as if every target were as long as its row ({where})")
    if recording.changed_attributes:
        notes.append(change_note(recording.changed_attributes))
    return tuple(notes)


def _assumptions_on_data(recording: Recording) -> tuple[str, ...]:
    if not recording.decisions:
        return ()
    if recording.is_example:
        places = list(
            dict.fromkeys(
                f"{_module_of(recording, decision.call) or 'the root module'}{decision.line}"
                for decision in recording.decisions
            )
        )
        listing = "; ".join(places[:3]) + ("; ..." if len(places) > 3 else "")
        return (f"control flow that depends on data follows the example batch: {listing}",)
    kinds: dict[tuple[int, int, int], list[str]] = {}
    for routing in recording.routings.values():
        key = (routing.experts, routing.chosen, routing.positions // recording.samples)
        kinds.setdefault(key, []).append(_module_of(recording, recording.ops[routing.op].call))
    return tuple(
        f"routing traced with balanced experts: {chosen} of {experts} for each of {tokens} tokens per sample, "
        f"{tokens * chosen / experts:g} tokens each ({names[0] or 'the root module'}"
        f"{f' and {len(names) - 1} more' if len(names) > 1 else ''})"
        for (experts, chosen, tokens), names in kinds.items()
    )
