"""The kernel-sized operations below a forward: a dispatch mode that writes down every aten call that moves data.

What a call computes and moves stands in `parsim.model.operator_table`; torch's own flop counter decides the flop wherever it
has the operator. Views and other calls that copy nothing are not operators. Shapes are those of the whole batch here; `grow` of
two recordings at different batches says how each operator grows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from parsim.model.autograd.cut import tensors_among
from parsim.model.component import Operator
from parsim.model.operator_table import UNLISTED, Dims, KernelPiece, OperatorRow, TracedCall, row_of
from parsim.model.trace.fakes import CallWatch, paged_arrays, with_workspace
from parsim.model.trace.recorder import Recorder, storage_key
from parsim.private import FakeTensorMode

aten = torch.ops.aten


class RawOperator(NamedTuple):
    """One kernel over the whole batch, or `count` equal ones; `op` is the recorded torch-level call it happened in.
    `flop`, `activation_bytes`, `parameter_bytes`: of one. `made_elements`: of its largest output. `gradients`: as in
    `Operator`. `paged_arrays`: bytes of what it keeps on pages of their own."""

    op: int
    function: str
    kind: str
    shape: Dims
    flop: int
    activation_bytes: int
    parameter_bytes: int
    count: int = 1  # type: ignore[assignment]  # in place of the method of a tuple
    made_elements: int = 0
    gradients: str = ""
    paged_arrays: tuple[int, ...] = ()


# The dim a sample multiplies, in the order tried, and what Operator.batch calls that. The dim "batch" leaves the shape.
_GROWTH = (("batch", "batch"), ("problems", "batch"), ("m", "rows"), ("rows", "rows"), ("elements", "batch"))
_PASSES_OVER = tuple(getattr(torch.Tag, name) for name in ("pointwise", "reduction") if hasattr(torch.Tag, name))
_NO_KERNEL = tuple(
    getattr(aten, name)
    for name in (
        *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
        *("detach", "lift_fresh", "alias"),
    )
)


_BIAS = {"addmm": 0, "baddbmm": 0, "addbmm": 0, "addmv": 0, "convolution": 2, "linear": 2}
"""Where the bias stands among the arguments of a product."""
_PRODUCTS = (*_BIAS, "mm", "bmm")


class OperatorMode(CallWatch):
    """Collects RawOperators while calls run on fake tensors.
    casts: parameters in another precision, by storage. `frozen`: some parameter takes no gradient."""

    def __init__(
        self,
        current: Callable[[], int],
        state: set[int],
        has_gradients: Callable[[], bool] = lambda: True,
        *,
        frozen: bool = False,
    ) -> None:
        """
        Args:
            current: tells the number of the torch-level call that is running. state: storages of parameters and buffers.
            has_gradients: tells whether gradients were enabled at that call.
        """
        super().__init__()
        self._current = current
        self._state = state
        self._has_gradients = has_gradients
        self.frozen = frozen
        self.casts: dict[int, Tensor] = {}
        self.operators: list[RawOperator] = []

    def around(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the call, which is noted."""
        out = with_workspace(func, args, func(*args, **kwargs))
        packet = func._overloadpacket
        given, made = _unique((args, kwargs)), _unique((out,))
        parameters = [tensor for tensor in given if storage_key(tensor) in self._state]
        if packet is aten.detach and parameters:
            self.frozen = True  # from here on a weight may be used as if it were
        if packet in _NO_KERNEL or not made:
            return out
        storages = {storage_key(tensor) for tensor in given}
        if given and not func._schema.is_mutable and all(storage_key(tensor) in storages for tensor in made):
            return out
        if packet is aten._to_copy and parameters:
            self.casts.update((storage_key(tensor), tensor) for tensor in made)
        kernels = self._kernels(func, args, kwargs, given, made, out)
        if arrays := paged_arrays(func, args):
            kernels[0] = kernels[0]._replace(paged_arrays=arrays)
        gradients = self._gradients(func, args, given)
        self.operators += [raw._replace(gradients=gradients) for raw in kernels] if gradients else kernels
        return out

    def _gradients(self, func: Any, args: tuple[Any, ...], given: list[Tensor]) -> str:
        """What the backward of a call computes, where it is not the usual: gradients are off, or something is frozen.
        A custom autograd function runs with gradients off and has a backward all the same. A bias counts with nothing: its
        gradient is a sum."""
        if not self._has_gradients():
            return "none"
        if not self.frozen or not torch.is_grad_enabled() or not given:
            return ""
        name = str(func._overloadpacket).removeprefix("aten.")
        bias = args[_BIAS[name]] if name in _BIAS and _BIAS[name] < len(args) else None
        operands = [tensor for tensor in given if tensor is not bias]
        weights = [tensor for tensor in operands if storage_key(tensor) in self._state]
        others = [tensor for tensor in operands if storage_key(tensor) not in self._state]
        if not (weights and others) and name in _PRODUCTS:
            others, weights = operands[:1], operands[1:]
        of_others, of_weights = (any(tensor.requires_grad for tensor in tensors) for tensors in (others, weights))
        if of_others == of_weights:
            return "" if of_others else "none"
        return "weight" if of_weights else "input" if weights else ""

    def _kernels(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], made: list[Tensor], out: Any
    ) -> list[RawOperator]:
        """The kernels of one aten call by the operator table.
        `given`, `made`: the tensors of its arguments and results. `out`: what it returned."""
        packet = func._overloadpacket
        call = TracedCall(
            name=str(packet),
            arguments={
                argument.name: args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
                for place, argument in enumerate(func._schema.arguments)
            },
            outputs=tuple(made),
            size_bytes=_size_bytes,
            is_state=lambda tensor: storage_key(tensor) in self._state,
        )
        row = row_of(call.name)
        activations, parameters = _moved_bytes(call, row, given, made)
        counted = int(flop_registry[packet](*args, **kwargs, out_val=out)) if packet in flop_registry else None
        most_made, most_read = (max((tensor.numel() for tensor in tensors), default=0) for tensors in (made, given))
        # elements of the output, or of the largest input for a reduction to less than a tenth
        elements = most_made if 10 * most_made >= most_read else most_read
        if row is not None and row.pieces is not None:
            pieces: tuple[KernelPiece, ...] = row.pieces(call)
        else:
            flop = 0 if row is None or row.flop is None else int(row.flop(call))
            pieces = (KernelPiece(kind="memory_bound", shape=(("elements", elements),), flop=flop),)
        is_known = row is not None or counted is not None or any(tag in func.tags for tag in _PASSES_OVER)
        name = call.name if is_known else f"{UNLISTED}{call.name}"
        if packet is aten.gelu and kwargs.get("approximate") == "tanh":
            name = "aten.gelu_tanh"
        return [
            RawOperator(
                op=self._current(),
                function=piece.function or name,
                kind=piece.kind,
                shape=piece.shape,
                flop=counted if counted is not None and len(pieces) == 1 else piece.flop or 0,
                activation_bytes=activations if piece.activation_bytes is None else piece.activation_bytes,
                parameter_bytes=parameters if piece.parameter_bytes is None else piece.parameter_bytes,
                count=piece.count,
                made_elements=most_made,
            )
            for piece in pieces
        ]


def _moved_bytes(call: TracedCall, row: OperatorRow | None, given: list[Tensor], made: list[Tensor]) -> tuple[int, int]:
    """Bytes of activations, read and written, and of parameters read; every tensor once."""
    written = sum(map(_size_bytes, made))
    read = {True: 0, False: 0}
    for tensor in given:
        part = row is not None and row.reads_part and tensor is given[0]
        read[call.is_state(tensor) and not part] += min(_size_bytes(tensor), written) if part else _size_bytes(tensor)
    return written + read[False], read[True]


def _unique(values: Any) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors_among(values)}.values())


def _size_bytes(tensor: Tensor) -> int:
    """An expanded tensor is no larger than its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def grow(small: Sequence[RawOperator], large: Sequence[RawOperator], step: int) -> list[tuple[RawOperator | None, Operator]]:
    """Operators per sample from the calls at two batches that differ by `step` samples, each with its call at the small one.
    They come in the order of the large batch. A function called more often at the larger batch (a loop over the samples)
    becomes one memory-bound operator with the right flop and bytes, and no call."""
    grown: list[tuple[int, RawOperator | None, Operator]] = []
    place = {id(raw): number for number, raw in enumerate(large)}
    for function in dict.fromkeys(raw.function for raw in (*small, *large)):
        ones = [raw for raw in small if raw.function == function]
        others = [raw for raw in large if raw.function == function]
        if len(ones) == len(others):
            grown += [(place[id(other)], one, _grown(one, other, step)) for one, other in zip(ones, others, strict=True)]
        else:
            grown.append((place[id(others[0])] if others else len(large), None, _lump(ones, others, step)))
    return [(raw, operator) for _, raw, operator in sorted(grown, key=lambda entry: entry[0])]


def _lump(ones: list[RawOperator], others: list[RawOperator], step: int) -> Operator:
    """What the larger batch has more of. Equal products become independent problems, all else one memory-bound operator."""
    more = others[len(ones) :]
    alike = {(raw.kind, raw.shape, raw.flop, raw.count) for raw in (*ones, *others)}
    if len(alike) == 1 and others[0].kind == "matmul" and more and len(more) % step == 0:
        first, per_sample = others[0], len(more) // step
        shape = dict(first.shape)
        shape["problems"] = per_sample * shape.get("problems", 1)
        return Operator(
            kind="matmul",
            shape=tuple(shape.items()),
            batch="batch",
            forward_flop=float(per_sample * first.flop),
            activation_bytes=per_sample * (first.activation_bytes + first.parameter_bytes),
            parameter_bytes=0,
            count=first.count,
            gradients=first.gradients,
        )

    def growth(amount: Callable[[RawOperator], int]) -> int:
        """Per sample, over all calls."""
        before, after = (sum(raw.count * amount(raw) for raw in operators) for operators in (ones, others))
        return max(0, after - before) // step

    moved = growth(lambda raw: raw.activation_bytes)
    function = (others or ones)[0].function
    return Operator(
        kind="memory_bound",
        shape=(("elements", max(1, moved // 8)),),
        batch="batch",
        forward_flop=float(growth(lambda raw: raw.flop)),
        activation_bytes=moved,
        parameter_bytes=0,
        function=function if function.startswith(UNLISTED) else "",
        gradients=(others or ones)[0].gradients,
    )


def _grown(one: RawOperator, other: RawOperator, step: int) -> Operator:
    if one.count != other.count or dict(one.shape).keys() != dict(other.shape).keys():
        return _lump([one], [other], step)
    before, after = dict(one.shape), dict(other.shape)
    if one.kind == "memory_bound" and (before["elements"] == one.made_elements) != (after["elements"] == other.made_elements):
        before["elements"], after["elements"] = one.made_elements, other.made_elements
    rates = {name: _rate(after[name] - before[name], step) for name in before}
    shape = dict(before)
    batch = "none"
    growing = next(((name, growth) for name, growth in _GROWTH if rates.get(name)), None)
    if growing is not None:
        shape[growing[0]] = rates[growing[0]]
        batch = growing[1]
    elif one.kind == "matmul" and (rates["n"] or rates["k"]):  # the samples lie along the other side: count it transposed
        side = "n" if rates["n"] else "k"
        shape["m"], shape[side], batch = rates[side], before["m"], "rows"
    elif one.kind == "memory_bound" and other.activation_bytes != one.activation_bytes:  # a sum over the batch, say
        shape["elements"], batch = max(1, (other.activation_bytes - one.activation_bytes) // (4 * step)), "batch"
    shape.pop("batch", None)
    causal = "causal" if shape.pop("causal", 0) else ""
    grown = batch != "none"
    return Operator(
        kind=one.kind,
        shape=tuple(shape.items()),
        batch=batch,
        forward_flop=float(_rate(other.flop - one.flop, step) if grown else one.flop),
        activation_bytes=_rate(other.activation_bytes - one.activation_bytes, step) if grown else one.activation_bytes,
        parameter_bytes=one.parameter_bytes,
        count=one.count,
        function=one.function.removeprefix("aten.") if one.kind == "memory_bound" else causal,
        gradients=one.gradients,
    )


def _rate(growth: int, step: int) -> int:
    """Per sample; a fraction where only several samples together have a whole token for every expert."""
    rate, rest = divmod(growth, step)
    return rate if not rest else growth / step  # type: ignore[return-value]


# What is counted while calls run on fake tensors: operators, and the tensors that autograd saves for the backward.


class SavedTensors:
    """What autograd keeps, by the number of the call it happens in.
    saves: (number of the call, storage, bytes), in order."""

    def __init__(self, current: Callable[[], int]) -> None:
        self.saves: list[tuple[int, int, int]] = []
        self._current = current
        self._alive: dict[int, Tensor] = {}

    def open(self) -> contextlib.AbstractContextManager[None]:
        """Inside, saved tensors are noted."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept)

    def _pack(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        self._alive.setdefault(key, tensor)
        self.saves.append((self._current(), key, tensor.untyped_storage().nbytes()))
        return tensor

    def first_saves(self, known: set[int]) -> list[tuple[int, int, int]]:
        """Every storage but the known ones, where it is saved first."""
        first: dict[int, tuple[int, int, int]] = {}
        for save in self.saves:
            first.setdefault(save[1], save)
        return [save for key, save in first.items() if key not in known]


class Watch:
    """Operators and saved tensors of one forward that is being recorded.
    `state`: storages of parameters and buffers."""

    fakes: FakeTensorMode
    state: set[int]
    mode: OperatorMode
    saved: SavedTensors

    @contextlib.contextmanager
    def open(self, recorder: Recorder) -> Iterator[None]:
        """Inside, statistics are taken."""
        state = [(recorder.recording.tensors[number], key) for number, key in recorder.recording.state.items()]
        frozen = any(key.kind == "parameter" and not tensor.requires_grad for tensor, key in state)
        self.fakes, self.state = recorder.fakes, {storage_key(tensor) for tensor, _ in state}
        self.mode = OperatorMode(lambda: recorder.current, self.state, lambda: recorder.has_gradients, frozen=frozen)
        self.saved = SavedTensors(lambda: recorder.current)
        with self.saved.open(), self.mode:
            yield
