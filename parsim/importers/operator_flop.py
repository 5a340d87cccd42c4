"""The arithmetic of an operator in a profiler trace, from the shapes of its inputs (`record_shapes=True`).

Products, convolutions and attention: nearly all arithmetic of a network. A multiply-add counts as 2. An operator that is not in
the table does no counted arithmetic, and its time is reported as such.

Leaves out: transposed convolutions, whose positions are counted as those of plain ones; and causal masks, which let a kernel
skip half of the products of an attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

InputShapes = Sequence[Sequence[int]]
MOST_FLOP = 1e21
"""Of one operator; more is a shape that cannot be."""


def _product(dims: InputShapes, args: Mapping[str, Any], first: int) -> float:
    """[..., m, k] times [..., k, n]."""
    del args
    a, b = dims[first], dims[first + 1]
    if len(a) < 2 or len(b) != len(a) or a[-1] != b[-2]:
        return 0.0
    return 2.0 * math.prod(a) * b[-1]


def _convolution(dims: InputShapes, args: Mapping[str, Any]) -> float:
    return _convolved(dims[0], dims[1], args)


def _convolved(source: Sequence[int], weight: Sequence[int], args: Mapping[str, Any]) -> float:
    """Output positions follow from stride, padding and dilation, which stand among the concrete inputs."""
    if len(source) != len(weight) or len(source) < 3:
        return 0.0
    padding, stride, dilation = _geometry(args, len(source) - 2)
    positions = 1
    for size, kernel, pad, step, spread in zip(source[2:], weight[2:], padding, stride, dilation, strict=True):
        positions *= max(0, (size + 2 * pad - spread * (kernel - 1) - 1) // max(1, step) + 1)
    return 2.0 * source[0] * positions * math.prod(weight)


def _convolution_backward(dims: InputShapes, args: Mapping[str, Any]) -> float:
    """The gradient's own shape gives the positions; once for each of input and weight that needs a gradient."""
    gradient, weight = dims[0], dims[2]
    if len(gradient) != len(weight) or len(gradient) < 3:
        return 0.0
    mask = str(_concrete(args)[-1]) if _concrete(args) else ""
    needed = max(1, sum("true" in part.lower() for part in mask.split(",")[:2])) if mask.startswith("[") else 2
    return 2.0 * gradient[0] * math.prod(gradient[2:]) * math.prod(weight) * needed


def _attention(dims: InputShapes, args: Mapping[str, Any], first: int, factor: float) -> float:
    """[batch, heads, queries, width]: scores and values, two products (five in the backward)."""
    del args
    q, k = dims[first], dims[first + 1]
    if len(q) != 4 or len(k) != 4:
        return 0.0
    return factor * 2.0 * math.prod(q) * k[2]


_FLOP: Mapping[str, Callable[[InputShapes, Mapping[str, Any]], float]] = {
    "aten::mm": lambda dims, args: _product(dims, args, 0),
    "aten::bmm": lambda dims, args: _product(dims, args, 0),
    "aten::addmm": lambda dims, args: _product(dims, args, 1),
    "aten::_addmm_activation": lambda dims, args: _product(dims, args, 1),
    "aten::baddbmm": lambda dims, args: _product(dims, args, 1),
    "aten::_scaled_mm": lambda dims, args: _product(dims, args, 0),
    "aten::convolution": _convolution,
    "aten::convolution_overrideable": _convolution,
    "aten::cudnn_convolution": _convolution,
    "aten::miopen_convolution": _convolution,
    "aten::mkldnn_convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    **{
        f"aten::_scaled_dot_product_{kind}_attention": lambda dims, args: _attention(dims, args, 0, 2.0)
        for kind in ("flash", "efficient", "cudnn")
    },
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda dims, args: _attention(dims, args, 0, 2.0),
    **{
        f"aten::_scaled_dot_product_{kind}_attention_backward": lambda dims, args: _attention(dims, args, 1, 5.0)
        for kind in ("flash", "efficient", "cudnn")
    },
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda dims, args: _attention(dims, args, 1, 5.0),
}
"""The counted operators. The outermost one counts: `aten::convolution` and not what it calls."""


def flop_of(name: str, args: object) -> float | None:
    """Operations of one call; None for an operator that is not counted or whose shapes were not recorded.

    Args:
        name: of the operator. args: of its event.
    """
    rule = _FLOP.get(name)
    if rule is None or not isinstance(args, dict):
        return None
    dims = _dims(args.get("Input Dims", args.get("Input dims")))
    try:
        flop = rule(dims, {**args, "name": name})
    except (IndexError, OverflowError):
        return None
    return float(flop) if 0 < flop <= MOST_FLOP else None


def is_counted(name: str) -> bool:
    """Whether the table has the operator."""
    return name in _FLOP


def _dims(value: object) -> list[list[int]]:
    """Shapes of the inputs; [] for one that is not a tensor."""
    if not isinstance(value, list):
        return []
    return [
        list(entry) if isinstance(entry, list) and all(isinstance(n, int) and 0 <= n < 2**48 for n in entry) else []
        for entry in value[:64]
    ]


def _concrete(args: Mapping[str, Any]) -> list[Any]:
    value = args.get("Concrete Inputs")
    return value if isinstance(value, list) else []


def _integer_lists(args: Mapping[str, Any], length: int) -> list[list[int]]:
    """The concrete inputs that are lists of integers, such as "[1, 1]", spread to one number per dim."""
    found: list[list[int]] = []
    for entry in _concrete(args)[:32]:
        text = str(entry)
        if not (text.startswith("[") and text.endswith("]")) or len(text) > 64:
            continue
        parts = [part.strip() for part in text[1:-1].split(",")]
        if all(part.isascii() and part.isdigit() and len(part) < 9 for part in parts):
            numbers = [int(part) for part in parts]
            found.append(numbers if len(numbers) == length else numbers[:1] * length)
    return found


def _geometry(args: Mapping[str, Any], length: int) -> tuple[list[int], list[int], list[int]]:
    """(padding, stride, dilation): `convolution` lists the stride first, the libraries' own operators the padding."""
    lists = _integer_lists(args, length)
    if len(lists) < 3:
        return [0] * length, [1] * length, [1] * length
    first, second, dilation = lists[:3]
    if args["name"] in ("aten::convolution", "aten::convolution_overrideable"):
        return second, first, dilation
    return first, second, dilation
