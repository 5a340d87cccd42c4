"""The recorder: sees every torch-level call of a forward on fake tensors, in order, and writes it down.

Integer and boolean tensors that depend on neither inputs nor weights (positions, masks made of them) are computed for
real. So code that branches on *their* values behaves as outside the recording.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from parsim.errors import TraceError
from parsim.model.objective import Settled
from parsim.model.runnable import PLAIN, Context, Nested, Op, Ref, StateKey, run_op
from parsim.model.trace.checks import at_line, gradient_message, hint, hook_message, value_message, weight_message
from parsim.private import (
    DataDependentOutputException,
    DisableTorchFunction,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TreeSpec,
    _disable_current_modes,
    unset_fake_temporarily,
)

# The values of tensors of a recording, where they can be known although the recording runs on fake tensors.
#
# A value is known if it was made of constants alone (masks, positions). Two more leaves can be taken:
#
#     routing   which experts a router chooses: the indices of a topk, argmax or sort of activations are taken as balanced, so
#               that every expert gets as many tokens as any other. The answer says so.
#     example   inputs and weights are those of an example batch (`control_flow="example"`), and so every value is known.
#
# A value is computed when somebody asks for it, by running the recorded calls that led to it for real. Random numbers are
# never known, except in an example. But no number of `torch.rand` is below 0, nor as large as 1, and a comparison may need no
# more.


_DRAWS = ("rand", "normal", "bernoulli", "multinomial", "dropout", "uniform", "exponential", "cauchy", "geometric", "rrelu")
"""Parts of the names of functions that draw random numbers."""
_UNSET = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
_ROUTERS = {"topk": -1, "sort": -1, "argsort": -1, "max": None, "argmax": None}
"""Functions that choose along a dim, with the dim where none is given (None: all of the tensor, which is not a choice)."""
_CERTAIN = {"lt": (0.0, 1.0), "ge": (0.0, 1.0), "le": (-math.ulp(0.0), 1.0), "gt": (-math.ulp(0.0), 1.0)}
"""Comparisons of a number of [0, 1) with a bound: at most the first, or at least the second, and the answer is always one."""


class UnknownValueError(Exception):
    """A value depends on the data of inputs, on weights or on random numbers."""


@dataclass(frozen=True, slots=True)
class Routing:
    """A choice taken as balanced: `chosen` of `experts` for each of `positions` tokens, by the call `op`, along `dim`."""

    op: int
    experts: int
    chosen: int
    positions: int
    dim: int = -1

    def divisor(self, samples: int) -> int:
        """The batches at which every expert gets equally many tokens are multiples of this."""
        tokens = self.positions // samples if self.positions % samples == 0 else 0
        if tokens * self.chosen >= self.experts:
            return 1
        return self.experts // math.gcd(self.experts, max(1, tokens * self.chosen))


class KnownValues:
    """Values of one recording, computed on demand; it notes the choices that it takes as balanced in `Recording.routings`."""

    def __init__(self, recording: Recording, *, skew: bool = False) -> None:
        """`skew`: take choices that are not balanced, to find out what depends on them."""
        self._recording = recording
        self._skew = skew
        self._example: Mapping[int, Tensor] = {}
        self._values = _Values(recording, {})
        self._done: set[int] = set()
        self._producer: dict[int, int] = {}
        self._changed: dict[int, list[int]] = {}
        self._indexed = 0

    def follow(self, example: Mapping[int, Tensor]) -> None:
        """From now on inputs, parameters and buffers have the values of an example, by value number."""
        self._example, self._values = example, _Values(self._recording, example)
        self._recording.is_example = True

    def value_of(self, number: int) -> tuple[Tensor, bool]:
        """The value now of a tensor of the recording, and whether it rests on more than constants.
        Raises UnknownValueError."""
        self._index()
        needed = self._needed(number)
        assumed = self._recording.is_example or any(place in self._recording.routings for place in needed)
        last = max(self._done, default=-1)
        fresh = sorted(needed - self._done)
        if fresh and fresh[0] < last:  # something later has run: a storage may have changed since
            self._values, self._done, fresh = _Values(self._recording, self._example), set(), sorted(needed)
        with _disable_current_modes(), DisableTorchFunction(), torch.no_grad():
            for place in fresh:
                self._run(place)
                self._done.add(place)
            return self._values[number], assumed

    def _index(self) -> None:
        """Note which calls made a value or changed a storage since this was last asked."""
        ops = self._recording.ops
        for place in range(self._indexed, len(ops)):
            for _, number in ops[place].outputs:
                if number not in ops[place].reads:  # else it is changed in place
                    self._producer.setdefault(number, place)
            for number in ops[place].mutated:
                self._changed.setdefault(storage_key(self._recording.tensors[number]), []).append(place)
        self._indexed = len(ops)

    def _needed(self, number: int) -> set[int]:
        """Numbers of the calls that led to a value."""
        recording = self._recording
        needed: set[int] = set()
        drawn: set[int] = set()  # numbers of which only comparisons are needed that always have one answer
        seen = {number}
        waiting = [number]
        while waiting:
            value = waiting.pop()
            places = [self._producer[value]] if value in self._producer else []
            if not places and value not in recording.constants and value not in self._example:
                key = recording.state.get(value)
                raise UnknownValueError(f"it depends on {'an input' if key is None else key.name}")
            places += self._changed.get(storage_key(recording.tensors[value]), ())
            for place in places:
                if place in recording.routings and recording.tensors[value].is_floating_point():
                    raise UnknownValueError("it depends on the scores of a choice")
                if place in needed and place not in drawn:
                    continue
                needed.add(place)
                op = recording.ops[place]
                if self._routing(place, value) is not None:
                    continue
                if not recording.is_example and (op.name in _UNSET or _draws(op.name)):
                    raise UnknownValueError(f"{op.name} draws random numbers")
                if (draw := self._draw_of(op)) is not None:
                    needed.add(draw)
                    drawn.add(draw)
                    continue
                fresh = [read for read in op.reads if read not in seen]
                seen.update(fresh)
                waiting += fresh
        return needed

    def _draw_of(self, op: RecordedOp) -> int | None:
        """The call of `torch.rand` whose numbers a comparison is about that always has one answer; None for another call."""
        comparison = op.name.strip("_")
        if self._recording.is_example or comparison not in _CERTAIN or len(op.arguments) != 2:
            return None
        numbers, bound = op.arguments
        least, most = _CERTAIN[comparison]
        if type(numbers) is not Ref or not isinstance(bound, int | float) or least < bound < most:
            return None
        place = self._producer.get(numbers.slot)
        storage = storage_key(self._recording.tensors[numbers.slot])
        is_draw = place is not None and self._recording.ops[place].name == "rand" and storage not in self._changed
        return place if is_draw else None

    def _routing(self, place: int, value: int) -> Routing | None:
        """The choice among experts that a call makes, where its indices are the value that is asked for."""
        routings, op = self._recording.routings, self._recording.ops[place]
        if place in routings or self._recording.is_example:
            return routings.get(place)
        if op.name not in _ROUTERS or not op.arguments or type(op.arguments[0]) is not Ref:
            return None
        scores, indices = self._recording.tensors[op.arguments[0].slot], self._recording.tensors[value]
        if not scores.is_floating_point() or indices.is_floating_point() or scores.dim() < 1:
            return None
        dim = op.argument("dim", 2 if op.name == "topk" else 1, _ROUTERS[op.name])
        if not isinstance(dim, int) or isinstance(dim, bool):
            return None
        experts = scores.shape[dim]
        positions = scores.numel() // max(1, experts)
        if positions < 2 or experts < 2:
            return None
        routings[place] = Routing(place, experts, max(1, indices.numel() // positions), positions, dim % scores.dim())
        return routings[place]

    def _run(self, place: int) -> None:
        """Run a recorded call; a routing puts balanced indices where it puts its own, and what else it makes stays unknown."""
        op = self._recording.ops[place]
        routing = self._recording.routings.get(place)
        if routing is None:
            run_op(op, self._values)
            return
        scores = self._recording.tensors[op.arguments[0].slot]
        shape = [size for dim, size in enumerate(scores.shape) if dim != routing.dim]
        choice = balanced_choice(routing, self._recording.samples, skew=self._skew).reshape(*shape, routing.chosen)
        for _, number in op.outputs:
            indices = self._recording.tensors[number]
            if not indices.is_floating_point():
                self._values[number] = choice.movedim(-1, routing.dim).reshape(indices.shape).to(indices.dtype)


class _Values(dict[int, Any]):
    """Values by number; the first ones are those of constants and of the example."""

    def __init__(self, recording: Recording, example: Mapping[int, Tensor]) -> None:
        self._recording, self._example = recording, example

    def __missing__(self, number: int) -> Tensor:
        constant = self._recording.constants.get(number)
        self[number] = value = (self._example[number] if constant is None else constant).detach().clone()
        return value


def _draws(name: str) -> bool:
    return any(word in name for word in _DRAWS)


def balanced_choice(routing: Routing, samples: int, *, skew: bool = False) -> Tensor:
    """Which experts every token goes to: [positions, chosen], each expert as often as any other.
    Where a sample has a token for every expert the pattern repeats with the samples, so that all numbers are linear in the
    batch. Else it runs on from one sample to the next. `routing`: how many tokens and experts. `samples`: of the batch. `skew`:
    the first half of the tokens takes the first experts."""
    token = torch.arange(routing.positions)
    if routing.positions % samples == 0 and routing.divisor(samples) == 1:
        token = token % (routing.positions // samples)
    step = routing.chosen if routing.chosen < routing.experts else 1
    first = token * step
    if skew:
        first = torch.where(torch.arange(routing.positions) < routing.positions // 2, 0, first)
    return (first[:, None] + torch.arange(routing.chosen)) % routing.experts


# Calls whose sizes depend on the values of a mask, with real masks in the place of fake ones.


def _sets_by_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a call puts rows where a mask is true: the number of rows depends on the mask."""
    if name != "__setitem__" or not isinstance(args[2], Tensor) or args[2].dim() == 0:
        return False
    return any(isinstance(part, FakeTensor) and part.dtype is torch.bool for part in _parts(args[1]))


def _with_index_arrays(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A call with arrays of indices in the place of its real masks, so that its sizes are those of its arguments."""
    if name in ("__getitem__", "__setitem__"):
        spread: list[Any] = []
        with _disable_current_modes():
            for part in _parts(args[1]):
                if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
                    spread += part.nonzero(as_tuple=True)
                else:
                    spread.append(int(part) if isinstance(part, Tensor) and part.dim() == 0 else part)
        return function, (args[0], tuple(spread), *args[2:]), kwargs
    if name == "masked_select":
        values, mask = torch.broadcast_tensors(args[0], args[1] if len(args) > 1 else kwargs["mask"])  # type: ignore[no-untyped-call]
        with _disable_current_modes():
            places = mask.nonzero(as_tuple=True)
        return Tensor.__getitem__, (values, places), {}
    if name == "repeat_interleave":
        repeats = args[1] if len(args) > 1 else kwargs["repeats"]
        with _disable_current_modes():
            return function, args, {**kwargs, "output_size": int(repeats.sum())}
    return function, args, kwargs


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


@dataclass(slots=True)
class Call:
    """One call of one module.
    `number`: counts the calls of that module, from 1. `parent`: the call it happened in. `args`, `kwargs`, `context`, `output`:
    what it was given, in which context, and what it returned."""

    module: str
    number: int
    parent: int | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: Context
    output: Any = None


@dataclass(frozen=True, slots=True)
class DataDecision:
    """A place where Python code looked at a value that depends on data: the module call and the line."""

    call: int | None
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOp(Op):
    """One torch-level call of a module call; Refs hold value numbers of the whole recording.
    `measured`: (function, arguments, keywords) that stand for it where the data that its sizes depend on are assumed."""

    call: int | None
    reads: tuple[int, ...]
    mutated: tuple[int, ...]
    measured: tuple[Callable[..., Any], tuple[Any, ...], tuple[tuple[str, Any], ...]] | None = None


@dataclass(slots=True)
class Recording:
    """All of one forward (and of the loss, from op `loss_start` on).

    Attributes:
        tensors: the fake tensor of every value number. inputs: (name, value number). state, constants: by value number.
        output_leaves: a value number, or a constant, per leaf of `output_spec`. outputs: value numbers of the tensors of the
            output, by `parsim.model.total_loss.entries`. buffer_writes: buffers assigned anew in the forward -> value number.
        settled: the loss, its output and its targets. loss_parts: names and first calls of the parts of a loss that was taken
            in parts. loss_form: what the loss gave, as `parsim.model.total_loss` names it.
        decisions: where the forward looked at values. assumed: whole numbers that rest on an assumption
            about the data, by value number. routings: choices taken as balanced, by their call. samples: the batch.
        answers: to questions about truth values that rest on an assumption. is_example: values are those of an example batch.
        changed_attributes: of modules, numbers and words that the forward has changed. kept_tensors: names of attributes that
            hold a tensor of the forward after it, by value number. read_again: those that a second forward has read.
    """

    ops: list[RecordedOp] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    inputs: list[tuple[str, int]] = field(default_factory=list)
    state: dict[int, StateKey] = field(default_factory=dict)
    constants: dict[int, Tensor] = field(default_factory=dict)
    differentiable: dict[int, bool] = field(default_factory=dict)
    buffer_writes: dict[str, int] = field(default_factory=dict)
    output_leaves: tuple[Any, ...] = ()
    output_spec: TreeSpec | None = None
    loss_start: int | None = None
    loss_value: int | None = None
    loss_parts: list[tuple[str, int]] = field(default_factory=list)
    settled: Settled | None = None
    outputs: dict[str, int] = field(default_factory=dict)
    loss_form: str = ""
    decisions: list[DataDecision] = field(default_factory=list)
    assumed: dict[int, Tensor] = field(default_factory=dict)
    routings: dict[int, Routing] = field(default_factory=dict)
    samples: int = 1
    answers: list[bool] = field(default_factory=list)
    is_example: bool = False
    changed_attributes: tuple[str, ...] = ()
    kept_tensors: dict[int, str] = field(default_factory=dict)
    read_again: tuple[str, ...] = ()


def storage_key(tensor: Tensor) -> int:
    """Equal for tensors that share memory (while the storages live)."""
    return int(tensor.untyped_storage()._cdata)


def tensors_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Tensors in nested tuples, lists, dicts and slices, with the way to each."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, tuple | list):
        for number, item in enumerate(value):
            yield from tensors_in(item, (*path, number))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, (*path, key))
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step), path)


def rebuild_of(value: Any) -> tuple[Callable[[list[Any]], Any], list[Any]]:
    """What makes a tuple, list, dict or slice of its items, and the items."""
    if isinstance(value, dict):
        keys = list(value)
        return (lambda items: dict(zip(keys, items, strict=True))), list(value.values())
    if isinstance(value, slice):
        return (lambda items: slice(*items)), [value.start, value.stop, value.step]
    if isinstance(value, list):
        return list, value
    kind = type(value)
    if hasattr(kind, "_fields"):
        return (lambda items: kind(*items)), list(value)
    return tuple, list(value)


def holds_tensors(value: Any) -> bool:
    """Whether it is a tuple, list, dict or slice with a tensor in it."""
    return isinstance(value, tuple | list | dict | slice) and next(tensors_in(value), None) is not None


def template_of(value: Any, stand_in: Callable[[Tensor], Any]) -> Any:
    """An argument with what stands for them in the place of its tensors."""
    if isinstance(value, Tensor):
        return stand_in(value)
    if holds_tensors(value):
        rebuild, items = rebuild_of(value)
        return Nested(rebuild, tuple(template_of(item, stand_in) for item in items))
    return value


class Recorder(TorchFunctionMode):
    """Sees every torch-level call of a forward, in order.

    Attributes:
        stack: numbers of the calls of modules that run now. numbers: the value number of every tensor, by its `id`.
        suspended: calls run unseen. has_gradients: whether gradients were on at the last call.
        real_state: the real parameters and buffers, by value number.
    """

    def __init__(
        self, module: nn.Module, fakes: FakeTensorMode, *, skew: bool = False, answers: Sequence[bool] | None = None
    ) -> None:
        """
        Args:
            skew: take choices of experts that are not balanced.
            answers: to the questions about truth values, in order, where another recording of this forward gave them.
        """
        super().__init__()
        self.recording = Recording()
        self.known = KnownValues(self.recording, skew=skew)
        self.module = module
        self.fakes = fakes
        self.stack: list[int] = []
        self.numbers: dict[int, int] = {}
        self.suspended = False
        self.has_gradients = True
        self.real_state: dict[int, Tensor] = {}
        self._answers = None if answers is None else list(answers)
        self._exact: set[int] = set()
        self._stale: set[int] = set()
        self._weights: dict[int, str] | None = None
        self._calls_of: dict[str, int] = {}
        self._autocast = _autocast_state()

    @property
    def current(self) -> int:
        """The number the next recorded op will have."""
        return len(self.recording.ops)

    @property
    def innermost(self) -> nn.Module:
        """The module that runs now."""
        return self.module.get_submodule(self.recording.calls[self.stack[-1]].module) if self.stack else self.module

    @property
    def where(self) -> str:
        """The module that runs now, for messages."""
        kind = type(self.innermost).__name__
        return f"{self.recording.calls[self.stack[-1]].module or 'the root module'} ({kind})" if self.stack else kind

    def enter(self, name: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        """A module starts, on these arguments."""
        self._calls_of[name] = self._calls_of.get(name, 0) + 1
        parent = self.stack[-1] if self.stack else None
        self.stack.append(len(self.recording.calls))
        self.recording.calls.append(Call(name, self._calls_of[name], parent, args, kwargs or {}, self._context()))

    def leave(self, name: str, output: Any = None) -> None:
        """The module has ended, and with it those in it that ended by an exception it caught."""
        while self.recording.calls[call := self.stack.pop()].module != name:
            pass
        self.recording.calls[call].output = output

    def add(self, tensor: Tensor) -> int:
        """Give a tensor a value number; it is kept alive, so its identity stays its own. Raises TraceError for a sparse one."""
        if tensor.layout != torch.strided:
            line = at_line(traceback.extract_stack()) if self.stack else ""
            raise TraceError(
                f"{self.where} holds or makes a tensor of layout {tensor.layout}{line}, and only dense ones can be recorded. "
                "Keep indices and values as dense tensors (index_select, index_add), or put the product into an operator of "
                "your own (torch.library.custom_op, parsim.model.operator_table)"
            )
        number = len(self.recording.tensors)
        self.recording.tensors.append(tensor)
        self.numbers[id(tensor)] = number
        return number

    def number_of(self, tensor: Tensor) -> int:
        """The value number of a tensor used in a call or returned; unknown ones become constants.
        Raises TraceError for a tensor that no recorded call made, or that requires a gradient without being a parameter."""
        if id(tensor) in self.numbers:
            return self.numbers[id(tensor)]
        if isinstance(tensor, FakeTensor):
            raise TraceError(
                f"{self.where} uses a tensor of shape {tuple(tensor.shape)} that no recorded torch call made (it came from "
                f"C++ or from a function transform such as vmap). Compute it with ordinary torch functions"
            )
        if tensor.requires_grad:
            raise TraceError(
                f"{self.where} uses a tensor of shape {tuple(tensor.shape)} that requires a gradient but is not a registered "
                f"parameter; register it with nn.Parameter on a module"
            )
        number = self.add(tensor)
        self.recording.constants[number] = tensor
        return number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.suspended:
            return func(*args, **kwargs)
        if func is Tensor.__iter__:
            return iter(self.call(torch.unbind, (args[0],), {}))
        return self.call(func, args, kwargs)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `function` on fakes; write it down if it makes or changes a tensor."""
        recording = self.recording
        given = [tensor for _, tensor in tensors_in((args, kwargs))]
        numbers = [self.numbers.get(id(tensor)) for tensor in given]
        name = getattr(function, "__name__", "")
        if function in _DIFFERENTIATING:
            raise TraceError(gradient_message(self.where, name))
        if function is Tensor.register_hook:
            raise TraceError(hook_message(self.where))
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_OPERATORS
        stale = any(number in self._stale for number in numbers)
        assumed = any(number in recording.assumed for number in numbers)
        if name in _VALUE_QUERIES:
            if stale or any(isinstance(tensor, FakeTensor) for tensor in given):
                return self._look(function, name, args, kwargs)
            if assumed:
                self._decide()
        if function == SET_DATA and _is_weight(args[0], recording.state.get(self.number_of(args[0]))):
            raise TraceError(weight_message(self.where, recording.state[self.number_of(args[0])].name))
        versions = [tensor._version for tensor in given]
        self.has_gradients = torch.is_grad_enabled()
        with self.unseen():
            result: Any = _INEXACT
            if self._is_exact(name, given, numbers, in_place):
                result = _compute_exactly(function, args, kwargs)
            exact, measured = result is not _INEXACT, None
            if not exact:
                try:
                    if _sets_by_mask(name, args):
                        with contextlib.suppress(TraceError):
                            result, measured, exact = self._with_known_sizes(function, name, args, kwargs, name)
                    if measured is None:
                        result = function(*args, **kwargs)
                except (DataDependentOutputException, DynamicOutputShapeException) as error:
                    result, measured, exact = self._with_known_sizes(function, name, args, kwargs, error)
        changed = [tensor for tensor, version in zip(given, versions, strict=True) if tensor._version != version]
        if in_place and not isinstance(args[0], FakeTensor) and all(tensor is not args[0] for tensor in changed):
            changed.append(args[0])  # a real constant: the fake call changed a copy
        made = list(tensors_in(result))
        if not made and not changed and name != "__set__":
            return result
        fresh = self._write(function, args, kwargs, given, changed, made, measured)
        if exact:
            self._exact.update(fresh)
            if assumed or measured is not None:
                recording.assumed.update((number, recording.tensors[number]) for number in fresh)
        self._check_weights(changed)
        if stale or not exact:
            self._stale.update(number for number in (*fresh, *map(self.number_of, changed)) if number in self._exact)
        return result

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Inside, calls run without being recorded."""
        before, self.suspended = self.suspended, True
        try:
            yield
        finally:
            self.suspended = before

    def _check_weights(self, changed: Sequence[Tensor]) -> None:
        """Raise TraceError if the forward has changed the memory of a trained parameter."""
        if self._weights is None and changed:
            state = ((self.recording.tensors[number], key) for number, key in self.recording.state.items())
            self._weights = {storage_key(tensor): key.name for tensor, key in state if _is_weight(tensor, key)}
        for tensor in changed:
            if name := (self._weights or {}).get(storage_key(tensor)):
                raise TraceError(weight_message(self.where, name))

    def _decide(self) -> None:
        """Note that the forward depends on data here."""
        self.recording.decisions.append(
            DataDecision(self.stack[-1] if self.stack else None, at_line(traceback.extract_stack()))
        )

    def _real(self, value: Any, *, fractions: bool) -> tuple[Any, bool]:
        """An argument with real tensors, and whether one of them rests on an assumption. Raises UnknownValueError.
        `fractions`: also of floats, which stay fake otherwise."""
        if isinstance(value, Tensor):
            if _has_fractions(value) and not fractions:
                return value, False
            number = self.numbers.get(id(value))
            if number is None:
                raise UnknownValueError("it was not made by a recorded call")
            if not isinstance(value, FakeTensor) and number not in self._stale:
                return value, number in self.recording.assumed
            return self.known.value_of(number)
        if not holds_tensors(value):
            return value, False
        rebuild, items = rebuild_of(value)
        pairs = [self._real(item, fractions=fractions) for item in items]
        return rebuild([real for real, _ in pairs]), any(assumed for _, assumed in pairs)

    def _look(self, function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The answer to a question about values. Raises TraceError where they are unknown."""
        try:
            with self.unseen():
                (real, keywords), assumed = self._real((args, kwargs), fractions=True)
                with _disable_current_modes():
                    result = function(*real, **keywords)
        except UnknownValueError as error:
            raise TraceError(value_message(self.where, name, why=str(error)) + hint(self.innermost, "")) from error
        if assumed:
            self._decide()
            if isinstance(result, bool):
                result = self._answers.pop(0) if self._answers else result
                self.recording.answers.append(result)
        return result

    def _with_known_sizes(
        self, function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], error: object
    ) -> tuple[Any, tuple[Callable[..., Any], tuple[Any, ...], tuple[tuple[str, Any], ...]], bool]:
        """Run a call whose sizes depend on data with the values of its masks and indices.
        Returns the result, the call that stands for it in a measurement, and whether its result is real. Raises TraceError
        where the values are unknown."""
        try:
            (real, keywords), assumed = self._real((args, kwargs), fractions=False)
        except UnknownValueError as reason:
            raise TraceError(value_message(self.where, error, why=str(reason))) from reason
        if assumed:
            self._decide()
        if all(not isinstance(tensor, FakeTensor) for _, tensor in tensors_in((real, keywords))):
            with _disable_current_modes():
                return function(*real, **keywords), (function, real, tuple(keywords.items())), True
        function, real, keywords = _with_index_arrays(function, name, real, keywords)
        return function(*real, **keywords), (function, real, tuple(keywords.items())), False

    def _is_exact(self, name: str, given: list[Tensor], numbers: list[int | None], in_place: bool) -> bool:
        """True if the call may be computed for real: nothing random, only constants, no constant of the user's changed."""
        if name == "empty" or _draws(name) or any(isinstance(each, FakeTensor) or _has_fractions(each) for each in given):
            return False
        if any(number in self.recording.state for number in numbers):
            return False
        return not in_place or numbers[0] in self._exact

    def _write(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[Tensor],
        changed: list[Tensor],
        made: list[tuple[tuple[Any, ...], Tensor]],
        measured: tuple[Callable[..., Any], tuple[Any, ...], tuple[tuple[str, Any], ...]] | None,
    ) -> list[int]:
        """Append the call to the recording; returns the value numbers it makes."""

        def ref(tensor: Tensor) -> Ref:
            return Ref(self.number_of(tensor))

        arguments = tuple(template_of(item, ref) for item in args)
        keywords = tuple((name, template_of(item, ref)) for name, item in kwargs.items())
        first = len(self.recording.tensors)
        outputs = tuple(
            (path, self.numbers[id(tensor)] if id(tensor) in self.numbers else self.add(tensor)) for path, tensor in made
        )
        fresh = list(range(first, len(self.recording.tensors)))
        mutated = tuple(dict.fromkeys(map(self.number_of, changed)))
        for number in (*(number for _, number in outputs), *mutated):
            self.recording.differentiable[number] = self.recording.tensors[number].requires_grad
        self.recording.ops.append(
            RecordedOp(
                function=function,
                arguments=arguments,
                keywords=keywords,
                outputs=outputs,
                context=self._context(),
                call=self.stack[-1] if self.stack else None,
                reads=tuple(dict.fromkeys(map(self.number_of, given))),
                mutated=mutated,
                measured=measured,
            )
        )
        return fresh

    def _context(self) -> Context:
        changed = [new for new, old in zip(_autocast_state(), self._autocast, strict=True) if new != old]
        if torch.is_grad_enabled() and not changed:
            return PLAIN
        return Context(no_grad=not torch.is_grad_enabled(), autocast=changed[0] if changed else None)


def _autocast_state() -> tuple[tuple[str, torch.dtype, bool], ...]:
    return tuple((device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)) for device in ("cpu", "cuda"))


_INEXACT = object()
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
"""`tensor.data = other`"""
_DIFFERENTIATING = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
"""What takes gradients: calls of users, since parsim takes none while it records."""
_IN_PLACE_OPERATORS = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__", "__ixor__", "__ifloordiv__")
_VALUE_QUERIES = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "numpy", "equal", "allclose")


def _is_weight(tensor: Tensor, key: StateKey | None) -> bool:
    """Whether it is a trained parameter."""
    return key is not None and key.kind == "parameter" and tensor.requires_grad


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _compute_exactly(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The real result, or _INEXACT if it holds fractions (weights and activations must stay fake) or has no data."""
    dtype = kwargs.get("dtype")
    if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex):
        return _INEXACT
    with unset_fake_temporarily():
        result = function(*args, **kwargs)
    return _INEXACT if any(_has_fractions(tensor) or tensor.is_meta for _, tensor in tensors_in(result)) else result
