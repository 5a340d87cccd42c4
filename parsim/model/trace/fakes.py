"""Fake tensors whose answers are found again quickly.

Tracing asks fake tensors the same questions for every batch, precision and shard. torch keeps the answers, but finding one
takes longer than the rest of a call. `QuickFakeMode` finds them under a shorter key. It has all that torch's key has, for dense
tensors and plain arguments. Every other call is left to torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parsim.private import (
    _DISPATCH_HANDLE_DIRECTLY,
    _DISPATCH_META_HANDLERS,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    _BypassDispatchCache,
    _CacheKeyState,
    default_device,
    mutable_data_ptr_guard,
)

DEVICE = torch.ops.prim.device.default
"""Asked of a fake tensor several times per call."""


class CallWatch(TorchDispatchMode, ABC):
    """Sees every call below autograd while it is entered."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @abstractmethod
    def around(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call returns."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled inside, and the guard against it costs as much as what is done here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].device if func is DEVICE else self.around(func, args, kwargs or {})


# What kernels save for their backward and fake tensors do not know.
#
# oneDNN's LSTM (one direction of one layer) returns a workspace that autograd keeps: the gates, the hidden states and cells
# of every step, and room for their gradients. The fake kernel returns an empty one.
#
# Each of its seven arrays begins on a page of 4096 bytes. That is not linear in the batch, so a trace counts the arrays
# without it, and keeps their sizes per sample (`Component.paged_bytes`) for whoever knows the samples.
#
# Source: oneDNN, src/cpu/rnn/rnn_utils.cpp, get_good_ld and set_offsets. Sizes equal the real kernel's, pages included.


GATES = 4
LINE_BYTES = 64


def lstm_workspace_arrays(
    length: int, batch: int, features: int, hidden: int, element_bytes: int = 4, cell_bytes: int = 4
) -> tuple[int, ...]:
    """Bytes of the arrays in the workspace of one direction of one layer.
    `length`: steps. `features`: of the input. `hidden`: of the state. `element_bytes`: of the input. `cell_bytes`: of an
    element of the cells, which are as wide as the first ones; gradients are in fp32. Returns gates, hidden states, inputs of
    cells, cells, and the gradients of the last two and of the states."""
    rows, steps = length * batch, 2 * (length + 1) * batch
    widest = max(features, hidden)
    return (
        rows * _padded(GATES * hidden, element_bytes) * element_bytes,
        rows * _padded(hidden, element_bytes) * element_bytes,
        steps * _padded(widest, element_bytes) * element_bytes,
        steps * hidden * cell_bytes,
        steps * _padded(widest, 4) * 4,
        steps * _padded(widest, 4) * 4,
        steps * hidden * 4,
    )


def _padded(width: int, element_bytes: int) -> int:
    """A row of a matrix: whole cache lines, and no multiple of 256 elements."""
    line = LINE_BYTES // element_bytes
    padded = -(-width // line) * line
    return padded + line if padded % 256 == 0 else padded


def paged_arrays(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Bytes of the arrays in the workspace that an operator of aten keeps for its backward; none: it keeps none."""
    if func is not torch.ops.aten.mkldnn_rnn_layer.default or not args[15]:
        return ()
    given, recurrent, cells = args[0], args[2], args[6]
    length, batch, features = given.shape
    return lstm_workspace_arrays(length, batch, features, recurrent.shape[1], given.element_size(), cells.element_size())


def with_workspace(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """What an operator of aten returned; the empty workspace of a fake LSTM gets its size."""
    sizes = paged_arrays(func, args)
    if not sizes or result[3] is None or result[3].numel():
        return result
    workspace: Tensor = result[3].new_empty(sum(sizes))
    return (*result[:3], workspace)


# The CTC loss on fake tensors, for which torch has no kernel: its sizes depend on the lengths of the targets.
#
# Every target is taken to be as long as its row, so sizes are the largest that a batch can have. A run calls the real kernel
# on the real lengths.
#
# Source: aten/src/ATen/native/LossCTC.cpp: alpha has 2 S + 1 states of each step, and the backward a gradient of each logit.


_FORWARD = (torch.ops.aten._ctc_loss.default, torch.ops.aten._ctc_loss.Tensor)
_BACKWARD = (torch.ops.aten._ctc_loss_backward.default, torch.ops.aten._ctc_loss_backward.Tensor)
CTC = frozenset((*_FORWARD, *_BACKWARD))


def fake_ctc(func: Any, args: Sequence[Any]) -> Tensor | tuple[Tensor, Tensor]:
    """What one of `CTC` makes of fake arguments.
    Raises DynamicOutputShapeException: targets in one row, whose longest only the lengths tell."""
    if func in _BACKWARD:
        return torch.empty_like(args[1])
    log_probs, targets = args[0], args[1]
    steps, batch = (log_probs.shape[0], 1) if log_probs.dim() == 2 else log_probs.shape[:2]
    if targets.dim() == 1 and batch > 1:
        raise DynamicOutputShapeException(func)
    longest = targets.shape[-1]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * longest + 1)


_PLAIN = frozenset(
    (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class _Kind(NamedTuple):
    """What a new tensor is like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


class _Made(NamedTuple):
    """One output of an operator.
    `same_as`: the argument that it is, changed in place. `view_of`: the argument whose memory it sees. `kind`: of a tensor that
    is not an argument; None for an argument, or without a tensor. `attributes`: of the Python object."""

    same_as: int | None = None
    view_of: int | None = None
    kind: _Kind | None = None
    attributes: Mapping[str, Any] = {}


class _Answer(NamedTuple):
    outputs: tuple[_Made, ...]
    is_tuple: bool


def _kind(made: FakeTensor) -> _Kind:
    offset = int(made.storage_offset())
    return _Kind(tuple(made.shape), made.stride(), offset, made.dtype, made.fake_device, made.requires_grad)


def _attributes(made: FakeTensor) -> dict[str, Any]:
    return {name: value for name, value in vars(made).items() if name != "fake_mode"} | {_ANSWERED: True}


_ANSWERED = "_parsim_answered"
"""An attribute of fake tensors that were made from an answer: these are ordinary."""


def _first_of(sizes: Sequence[int], dim: int, index: Any) -> Any:
    """The index of a dim's first entry for that of any entry; others stay, for torch to refuse."""
    inside = type(dim) is int and -len(sizes) <= dim < len(sizes) and type(index) is int and type(sizes[dim]) is int
    return 0 if inside and -sizes[dim] <= index < sizes[dim] else index


_OPERATORS: dict[int, tuple[Any, int, bool]] = {}
"""By `id` an operator, held here so that no other gets its id; a number of its own, which is compared and hashed faster; and
whether it matters to it where its tensors lie in their memory."""


def _operator(function: Any) -> tuple[Any, int, bool]:
    if id(function) not in _OPERATORS:
        computes = torch.Tag.pointwise in function.tags or torch.Tag.reduction in function.tags or function in _COMPUTING
        makes_views = any(returned.alias_info is not None for returned in function._schema.returns)
        _OPERATORS[id(function)] = function, len(_OPERATORS), makes_views or not computes
    return _OPERATORS[id(function)]


_COMPUTING = tuple(
    getattr(torch.ops.aten, name).default
    for name in ("mm", "bmm", "addmm", "baddbmm", "cat", "stack", "clone", "_to_copy", "select_backward", "slice_backward")
)
_SELECT, _SELECT_BACKWARD = torch.ops.aten.select.int, torch.ops.aten.select_backward.default
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
_VIEWS, _AS_STRIDED = (torch.ops.aten.view.default, _UNSAFE_VIEW), torch.ops.aten.as_strided.default
_PRODUCTS = tuple(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "mv", "addmv"))
_LOOK_UP = torch.ops.aten.embedding.default
_UNKNOWN: Any = object()
_META = torch.device("meta")
_ANSWERS: dict[Hashable, _Answer | None] = {}
"""Of every mode, by the question. None: torch keeps none."""


def _strided_view(args: Sequence[Any]) -> tuple[Any, ...] | None:
    """The arguments of `as_strided` for a view in another shape; None where another way is needed.
    torch finds such a view dim by dim in Python. Of a dense tensor without dims of one entry only one such view exists."""
    given, shape = args
    if not all(type(size) is int and size > 1 for size in (*given.shape, *shape)):
        return None
    if math.prod(shape) != given.numel() or given.stride() != _dense_strides(given.shape):
        return None
    return given, shape, _dense_strides(shape)


def _dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _check_types(func: Any, args: Sequence[Any]) -> None:
    """Raises RuntimeError for a product of two types, and for indices that are none, as the real kernels do.
    Those for fake tensors multiply any types, and in torch 2.11 look up any index."""
    if func is _LOOK_UP and args[1].dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"{func} takes indices of dtype int32 or int64, got {args[1].dtype}")
    if func in _PRODUCTS:
        kinds = dict.fromkeys(arg.dtype for arg in args if isinstance(arg, Tensor))
        if len(kinds) > 1:
            raise RuntimeError(f"{func} multiplies tensors of one dtype, got {' and '.join(map(str, kinds))}")


class QuickFakeMode(FakeTensorMode):
    """torch's FakeTensorMode, with a shorter way to the answers that torch keeps.
    A deep copy is the mode itself: `copy.deepcopy` in an `__init__` (nn.TransformerEncoder) copies layers, not the mode."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)  # type: ignore[no-untyped-call]
        unsafe = self._allow_unsafe_data_ptr_access
        self._guard = mutable_data_ptr_guard(warns=unsafe)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuickFakeMode:
        return self

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled while a module is recorded, and the guard against it costs as much as an answer

    def __torch_dispatch__(  # type: ignore[override]  # torch gives a tuple and a dict
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DEVICE:
            return args[0].device
        kwargs = kwargs or {}
        if func in _DISPATCH_META_HANDLERS:  # sizes and strides of a tensor
            return _DISPATCH_META_HANDLERS[func](args)  # type: ignore[no-untyped-call]
        if func in CTC:
            return fake_ctc(func, args)
        if func is _SELECT and len(args) == 3 and type(args[0]) is FakeTensor:
            return self._select(func, types, args)
        if func is _SELECT_BACKWARD and len(args) == 4:
            args = (*args[:3], _first_of(args[1], args[2], args[3]))
        return self._result(func, types, args, kwargs)

    def _select(self, func: Any, types: Sequence[type], args: Sequence[Any]) -> Any:
        """One entry of a dim lies as far behind the first as its number says: a scan over tokens asks for every one."""
        given, dim, index = args
        first = (given, dim, _first_of(given.shape, dim, index))
        key = self._key(func, first, {})
        answer = None if key is None else _ANSWERS.get(key, _UNKNOWN)
        if key is not None and answer is _UNKNOWN:
            self._ask(key, func, types, first, {})
            answer = _ANSWERS.get(key)
        if answer is None or first[2] == index:
            return self._result(func, types, args, {})
        return self._output(answer.outputs[0], args, index % given.shape[dim] * given.stride(dim))

    def _result(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The answer, from those that are kept if it is there."""
        key = self._key(func, args, kwargs)
        if key is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        answer = _ANSWERS.get(key, _UNKNOWN)
        if answer is _UNKNOWN:
            return self._ask(key, func, types, args, kwargs)
        if answer is None:
            return self._dispatch_impl(func, types, args, kwargs)
        if answer.is_tuple:
            return tuple([self._output(made, args) for made in answer.outputs])
        return self._output(answer.outputs[0], args)

    def _ask(self, key: Hashable, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The answer of torch, which is kept if torch itself would keep it."""
        _check_types(func, args)
        if func in _DISPATCH_HANDLE_DIRECTLY or not self.cache_enabled:
            return super().__torch_dispatch__(func, types, args, kwargs)
        strided = _strided_view(args) if func in _VIEWS and not kwargs else None
        if strided is None:
            result = self._dispatch_impl(func, types, args, kwargs)
        else:
            result = self._dispatch_impl(_AS_STRIDED, types, strided, {})
        if self._key(func, args, kwargs) == key:  # no argument has become another tensor
            _ANSWERS[key] = self._kept_by_torch(func, args, kwargs, result)
        return result

    def _key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable | None:
        """All that an answer can depend on; None if it may be more than is known here."""
        if torch.is_inference_mode_enabled():
            return None
        _, number, offsets = _OPERATORS.get(id(func)) or _operator(func)
        parts: list[Any] = [number, torch.get_default_dtype(), default_device()]
        if self._add(parts, args, offsets) and (not kwargs or self._add(parts, kwargs.items(), offsets)):
            return tuple(parts)
        return None

    def _add(self, parts: list[Any], arguments: Iterable[Any], offsets: bool) -> bool:
        """Add arguments to a question; False for one of an unknown kind. `offsets`: where tensors lie in their memory, too."""
        for argument in arguments:
            kind = type(argument)
            if kind is FakeTensor:
                if argument.fake_mode is not self or argument.constant is not None:
                    return False
                if _ANSWERED not in argument.__dict__ and (
                    argument.layout is not torch.strided or argument.is_conj() or argument.is_neg() or argument.is_inference()
                ):
                    return False
                parts += (
                    argument.shape,
                    argument.stride(),
                    argument.dtype,
                    (argument.storage_offset(), argument.untyped_storage().nbytes()) if offsets else None,
                    argument.fake_device,
                    argument.requires_grad,
                )
            elif kind in _PLAIN:
                parts += kind, argument  # 1, 1.0 and True are equal, but make other tensors
            elif kind is list or kind is tuple:
                parts += kind, len(argument)
                if not self._add(parts, argument, offsets):
                    return False
            else:
                return False
        return True

    def _kept_by_torch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> _Answer | None:
        """What torch would keep as its answer to this call, if anything."""
        if func is _UNSAFE_VIEW:  # torch keeps none, because its schema does not tell that it sees its argument's memory
            if result.untyped_storage()._cdata != args[0].untyped_storage()._cdata:
                return None
            return _Answer((_Made(view_of=0, kind=_kind(result), attributes=_attributes(result)),), False)
        state: Any = _CacheKeyState(self.shape_env)
        key: Any = None  # names symbolic sizes, which are not among the keys
        try:
            kept = self._make_cache_entry(state, key, func, args, kwargs, result)
        except _BypassDispatchCache:
            return None
        outputs = []
        storages = []
        for tensor, info in zip(result if isinstance(result, tuple | list) else (result,), kept.output_infos, strict=True):
            if info.inplace_idx is not None:
                outputs.append(_Made(same_as=info.inplace_idx))
                continue
            if isinstance(tensor, Tensor) and info.view_idx is None:
                storages.append(tensor.untyped_storage()._cdata)
            made = self._get_output_tensor_from_cache_entry(state, info, key, func, args)
            if isinstance(made, FakeTensor) and not (made.is_conj() or made.is_neg()):
                outputs.append(_Made(view_of=info.view_idx, kind=_kind(made), attributes=_attributes(made)))
            elif made is None:
                outputs.append(_Made())
            else:
                return None
        if len(set(storages)) < len(storages):  # both gradients of an LSTM's biases: an answer gives each memory of its own
            return None
        return _Answer(tuple(outputs), kept.is_output_tuple)

    def _output(self, made: _Made, args: Sequence[Any], shift: int = 0) -> Any:
        """An output made as torch makes it from an answer that it kept, so many elements further back in its memory."""
        if made.kind is None:
            return None if made.same_as is None else args[made.same_as]
        shape, stride, offset, dtype, device, requires_grad = made.kind
        if made.view_of is None:
            memory = torch.empty_strided(shape, stride, dtype=dtype, device=_META)
        else:
            memory = torch.empty((0,), dtype=dtype, device=_META)
            memory.set_(args[made.view_of].untyped_storage(), offset + shift, shape, stride)
        fake = Tensor._make_subclass(FakeTensor, memory, requires_grad, dispatch_device=True, device_for_backend_keys=device)
        self._guard(fake)
        fake.__dict__.update(made.attributes)
        fake.__dict__["fake_mode"] = self
        return fake
