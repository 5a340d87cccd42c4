"""Which operators are kept where a component is recomputed by operator, and what their schemas say of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

KEPT: frozenset[str] = frozenset(
    f"aten.{name}"
    for name in (
        "mm",
        "addmm",
        "addmv",
        "mv",
        "linear",
        "convolution",
        "mkldnn_rnn_layer",
        "_cudnn_rnn",
        "_thnn_fused_lstm_cell",
        "_thnn_fused_gru_cell",
        "_grouped_mm",
        "_scaled_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_flash_attention_forward",
        "_efficient_attention_forward",
    )
)
"""Operators whose outputs are kept: dear to compute for their size. `aten.bmm` is not among them, because the scores of unfused
attention are one."""

_SIZES_FROM_DATA = tuple(
    getattr(torch.Tag, name) for name in ("data_dependent_output", "dynamic_output_shape") if hasattr(torch.Tag, name)
)


@cache
def draws(function: Any) -> bool:
    """Whether an operator takes random numbers."""
    return torch.Tag.nondeterministic_seeded in function.tags


@cache
def sizes_from_data(function: Any) -> bool:
    """Whether the shapes of what an operator makes depend on values that it reads."""
    return any(tag in function.tags for tag in _SIZES_FROM_DATA)


@cache
def is_kept(function: Any) -> bool:
    """Whether an operator is in KEPT."""
    return str(function._overloadpacket) in KEPT


@cache
def written_arguments(function: Any) -> tuple[tuple[int, str], ...]:
    """Places and names of the arguments that an operator's schema says are written."""
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(function._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
