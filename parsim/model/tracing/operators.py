"""The kernel-sized operations below a forward: a dispatch mode that writes down every aten call that moves data.

Views and other calls that copy nothing are not operators. Shapes are those of the whole batch here; `grow` of two
recordings at different batches says how each operator grows. Source of the flop formulas: torch.utils.flop_counter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from parsim.model.component import Operator
from parsim.model.tracing.recorder import storage_key, tensors_in

Dims = tuple[tuple[str, int], ...]
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class RawOperator:
    """One aten call over the whole batch; `op` is the recorded torch-level call it happened in."""

    op: int
    function: str
    kind: str
    shape: Dims
    flop: int
    activation_bytes: int
    parameter_bytes: int


def _matmul(args: tuple[Any, ...], out: Any) -> Dims:
    left, right = args[0], args[1]
    return (("m", left.shape[0]), ("n", right.shape[1]), ("k", left.shape[1]))


def _addmm(args: tuple[Any, ...], out: Any) -> Dims:
    return _matmul(args[1:], out)


def _bmm(args: tuple[Any, ...], out: Any) -> Dims:
    left, right = args[0], args[1]
    return (("m", left.shape[1]), ("n", right.shape[2]), ("k", left.shape[2]), ("problems", left.shape[0]))


def _baddbmm(args: tuple[Any, ...], out: Any) -> Dims:
    return _bmm(args[1:], out)


def _linear(args: tuple[Any, ...], out: Any) -> Dims:
    given, weight = args[0], args[1]
    return (("m", given.numel() // given.shape[-1]), ("n", weight.shape[0]), ("k", weight.shape[1]))


def _convolution(args: tuple[Any, ...], out: Any) -> Dims:
    """One and three spatial dims are folded into two (height 1; depth times height)."""
    given, weight, stride, groups = args[0], args[1], args[3], args[8]

    def two(sizes: Any) -> tuple[int, int]:
        sizes = list(sizes)
        return (1, sizes[0]) if len(sizes) == 1 else (math.prod(sizes[:-1]), sizes[-1])

    (h, w), (r, s), (out_h, out_w) = two(given.shape[2:]), two(weight.shape[2:]), two(out.shape[2:])
    strides = [*stride] * (given.dim() - 2) if len(stride) == 1 else [*stride]
    stride_h, stride_w = two(strides)
    sizes = {"c": given.shape[1], "h": h, "w": w, "k": out.shape[1], "r": r, "s": s, "stride_h": stride_h}
    sizes |= {"stride_w": stride_w, "groups": groups, "out_h": out_h, "out_w": out_w, "batch": given.shape[0]}
    return tuple(sizes.items())


def _attention(args: tuple[Any, ...], out: Any) -> Dims:
    query, key = args[0], args[1]
    sizes = {"heads": query.shape[1], "q": query.shape[2], "kv": key.shape[2], "d": query.shape[3], "batch": query.shape[0]}
    return tuple(sizes.items())


def _flash_attention(args: tuple[Any, ...], out: Any) -> Dims:
    """Arguments: query, key, value, dropout, is_causal; trailing defaults may be missing."""
    return (*_attention(args, out), ("causal", int(len(args) > 4 and bool(args[4]))))


def _embedding(args: tuple[Any, ...], out: Any) -> Dims:
    return (("rows", args[1].numel()), ("width", args[0].shape[1]))


# kind and shape by aten packet: packets not listed are memory-bound.
_RULES: dict[Any, tuple[str, Callable[[tuple[Any, ...], Any], Dims]]] = {
    aten.mm: ("matmul", _matmul),
    aten.addmm: ("matmul", _addmm),
    aten.bmm: ("matmul", _bmm),
    aten.baddbmm: ("matmul", _baddbmm),
    aten.linear: ("matmul", _linear),
    aten.convolution: ("convolution", _convolution),
    aten.embedding: ("embedding", _embedding),
    **{
        getattr(aten, name): ("attention", _flash_attention if "flash" in name else _attention)
        for name in (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
        )
        if hasattr(aten, name)
    },
}
# The dim a sample multiplies, in the order tried, and what Operator.batch calls that. The dim "batch" leaves the shape.
_GROWTH = (("batch", "batch"), ("problems", "batch"), ("m", "rows"), ("rows", "rows"), ("elements", "batch"))
_NO_KERNEL = (aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.detach, aten.lift_fresh, aten.alias)


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects RawOperators while calls run on fake tensors. `casts`: parameters in another precision, by storage."""

    def __init__(self, current: Callable[[], int], state: set[int]) -> None:
        """`current` tells the number of the torch-level call that is running, `state` holds the storages of parameters."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.casts: dict[int, Tensor] = {}
        self.current = current
        self.operators: list[RawOperator] = []
        self._state = state

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        given = _unique(tensor for _, tensor in tensors_in((args, kwargs)))
        made = _unique(tensor for _, tensor in tensors_in(out))
        if packet in _NO_KERNEL or not made:
            return out
        known = {storage_key(tensor) for tensor in given}
        if given and not func._schema.is_mutable and all(storage_key(tensor) in known for tensor in made):
            return out
        kind, shape_of = _RULES.get(packet, ("memory_bound", None))
        parameters = [tensor for tensor in given if storage_key(tensor) in self._state]
        activations = [tensor for tensor in given if storage_key(tensor) not in self._state]
        if packet is aten._to_copy and parameters:
            self.casts.update((storage_key(tensor), tensor) for tensor in made)
        moved = sum(map(_size_bytes, activations)) + sum(map(_size_bytes, made))
        if kind == "embedding":  # reads the rows it gathers, not the table
            moved += _size_bytes(made[0])
            parameters = []
        self.operators.append(
            RawOperator(
                op=self.current(),
                function="aten.gelu_tanh" if packet is aten.gelu and kwargs.get("approximate") == "tanh" else str(packet),
                kind=kind,
                shape=shape_of(args, made[0]) if shape_of else (("elements", _elements(given, made, func)),),
                flop=_flop(packet, args, kwargs, out),
                activation_bytes=moved,
                parameter_bytes=sum(map(_size_bytes, parameters)),
            )
        )
        return out


def _unique(tensors: Any) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _size_bytes(tensor: Tensor) -> int:
    """An expanded tensor is no larger than its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _elements(given: list[Tensor], made: list[Tensor], func: Any) -> int:
    """Of the output; of the largest input for a reduction to less than a tenth."""
    largest = max((tensor.numel() for tensor in made), default=0)
    read = max((tensor.numel() for tensor in given), default=0)
    return largest if 10 * largest >= read else read


def _flop(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    if packet in _RULES and _RULES[packet][0] == "attention":
        return int(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))  # type: ignore[no-untyped-call]
    return 0


def grow(small: list[RawOperator], large: list[RawOperator], step: int) -> list[tuple[RawOperator | None, Operator]]:
    """Operators per sample from the calls at two batches that differ by `step` samples, each with its call at the small one.

    They come in the order of the large batch. A function called more often at the larger batch (a loop over the samples)
    becomes one memory-bound operator with the right flop and bytes, and no call.
    """
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
    moved = max(0, sum(raw.activation_bytes for raw in others) - sum(raw.activation_bytes for raw in ones)) // step
    return Operator(
        kind="memory_bound",
        shape=(("elements", max(1, moved // 8)),),
        batch="batch",
        forward_flop=float(max(0, sum(raw.flop for raw in others) - sum(raw.flop for raw in ones)) // step),
        activation_bytes=moved,
        parameter_bytes=0,
    )


def _grown(one: RawOperator, other: RawOperator, step: int) -> Operator:
    before, after = dict(one.shape), dict(other.shape)
    rates = {name: (after[name] - before[name]) // step for name in before}
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
        forward_flop=float((other.flop - one.flop) // step),
        activation_bytes=(other.activation_bytes - one.activation_bytes) // step if grown else one.activation_bytes,
        parameter_bytes=one.parameter_bytes,
        function=one.function.removeprefix("aten.") if one.kind == "memory_bound" else causal,
    )
