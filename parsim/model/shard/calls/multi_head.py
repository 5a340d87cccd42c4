"""torch's multi-head attention as one call (nn.MultiheadAttention, nn.TransformerEncoder): cut by heads.

Every shard does whole, and this leaves out: other widths of keys and values, biases added to them, and masks per head.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from parsim.model.component import FULL
from parsim.model.runnable import Ref
from parsim.model.shard.content import SUMMAND, WHOLE, First, Piece, Refused, RuleOutcome, ShardNumber, Step
from parsim.model.shard.randomness import drawn_by_shard

_SIGNATURE = inspect.signature(functional.multi_head_attention_forward)
_UNUSUAL = ("bias_k", "bias_v", "static_k", "static_v", "add_zero_attn", "use_separate_proj_weight")


def multi_head(step: Step) -> RuleOutcome:
    """Whole, or the input projections by heads and the output projection by rows."""
    bound = _SIGNATURE.bind(*step.op.arguments, **dict(step.op.keywords))
    bound.apply_defaults()
    given = bound.arguments
    if any(step.contents[slot].form != FULL for slot in step.operands()):
        raise Refused("multi-head attention of a tensor that is not full: it projects whole features")
    part = step.decision(given["in_proj_weight"], [(0, 3)]) if _can_be_cut(step, given) else None
    if part is None:
        return RuleOutcome(contents=(WHOLE,) * len(step.op.outputs), whole_weight=True)
    parts: dict[str, First | Piece] = {
        "in_proj_weight": Piece(0, 3),
        "in_proj_bias": Piece(0, 3),
        "out_proj_weight": Piece(1),
        "out_proj_bias": First(),
    }
    heads = int(given["num_heads"])
    query, key, value = given["query"], given["key"], given["value"]
    return RuleOutcome(
        contents=(SUMMAND,) * len(step.op.outputs),
        converted={given[name].slot: how for name, how in parts.items() if given[name] is not None},
        function=heads_of_shard,
        arguments=(
            ShardNumber(),
            step.ways,
            heads // step.ways,
            (1 + (query != key)) if key == value else 3,
            query,
            key,
            value,
            *(given[name] for name in parts),
            given["dropout_p"] if given["training"] else 0.0,
            given["key_padding_mask"],
            given["attn_mask"],
            given["is_causal"],
            given["need_weights"],
        ),
        label="heads+row",
        limit=heads,
    )


def _can_be_cut(step: Step, given: dict[str, Any]) -> bool:
    mask, weight = given["attn_mask"], given["in_proj_weight"]
    if any(given[name] is not None and given[name] is not False for name in _UNUSUAL) or type(weight) is not Ref:
        return False
    if len(step.shape(given["query"])) != 3 or (type(mask) is Ref and len(step.shape(mask)) != 2):
        return False
    return bool(given["average_attn_weights"]) or not given["need_weights"]


def heads_of_shard(
    shard: int,
    ways: int,
    heads: int,
    products: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    in_weight: Tensor,
    in_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    dropout: float,
    padding: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """As `torch.nn.functional.multi_head_attention_forward`, for the `heads` of one shard: summands of its results.

    Args:
        products: 1 if query, key and value are one tensor, 2 if key and value are; the projections are as many products.
    """
    length, samples, _ = query.shape
    width = in_weight.shape[0] // 3
    parts = _projected(products, (query, key, value), in_weight, in_bias)
    query, key, value = (
        part.view(part.shape[0], samples * heads, width // heads).transpose(0, 1).view(samples, heads, part.shape[0], -1)
        for part in parts
    )
    if causal and padding is None and not need_weights:
        mask = None
    elif padding is not None:
        causal = False
    mask = _joined(mask, padding, query.dtype)
    if need_weights:
        made, weights = _with_weights(shard, query, key, value, mask, dropout)
        averaged: Tensor | None = weights.mean(1) / ways
    else:
        averaged = None
        arguments = (query, key, value, mask, dropout, causal)
        attention = functional.scaled_dot_product_attention
        made = drawn_by_shard(attention, shard, *arguments) if dropout else attention(*arguments)
    rows = made.permute(2, 0, 1, 3).contiguous().view(samples * length, width)
    out = functional.linear(rows, out_weight, out_bias)
    return out.view(length, samples, out.shape[1]), averaged


def _projected(products: int, given: tuple[Tensor, Tensor, Tensor], weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    """Queries, keys and values, by as many products as torch makes."""
    width = weight.shape[0] // 3
    sizes = {1: [3], 2: [1, 2], 3: [1, 1, 1]}[products]
    rows = [width * size for size in sizes]
    weights = torch.split(weight, rows)
    biases = [None] * len(sizes) if bias is None else list(torch.split(bias, rows))
    found: list[Tensor] = []
    for tensor, size, own, added in zip(given, sizes, weights, biases, strict=False):
        made = functional.linear(tensor, own, added)
        if size == 1:
            found.append(made)
        else:
            apart = made.view(*made.shape[:-1], size, width).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
            found += apart.unbind(0)
    return found


def _joined(mask: Tensor | None, padding: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores [samples, heads, length, keys]; of boolean masks what is True counts nothing."""

    def added(entry: Tensor) -> Tensor:
        return torch.zeros_like(entry, dtype=dtype).masked_fill_(entry, -math.inf) if entry.dtype == torch.bool else entry

    parts = [] if mask is None else [added(mask)[None, None]]
    if padding is not None:
        parts.append(added(padding)[:, None, None])
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _with_weights(
    shard: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    """As torch does where the weights are asked for."""
    scores = (query * math.sqrt(1.0 / query.shape[-1])) @ key.transpose(-2, -1)
    weights = torch.softmax(scores if mask is None else scores + mask, -1)
    if dropout:
        weights = drawn_by_shard(functional.dropout, shard, weights, dropout)
    return weights @ value, weights
