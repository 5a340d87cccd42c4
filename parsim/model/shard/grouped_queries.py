"""Attention of a shard that picks its keys and values from whole ones, or that draws random numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from parsim.model.shard.randomness import drawn_by_shard


def attention_of_shard(
    shard: int,
    ways: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
    *,
    picks: bool = False,
) -> Tensor:
    """Scaled dot-product attention of the query heads of one shard.

    Args:
        key, value: of the shard's own heads; if `picks`, of all heads, which are fewer than the query heads.
    """
    if picks:
        key, value = (_own_heads(entry, query.shape[-3], shard, ways) for entry in (key, value))
        grouped = key.shape[-3] < query.shape[-3]
    arguments = (query, key, value, mask, dropout, causal)
    if not dropout:
        return functional.scaled_dot_product_attention(*arguments, scale=scale, enable_gqa=grouped)
    result: Tensor = drawn_by_shard(functional.scaled_dot_product_attention, shard, *arguments, scale=scale, enable_gqa=grouped)
    return result


def _own_heads(entry: Tensor, own: int, shard: int, ways: int) -> Tensor:
    """Of all key or value heads those that `own` query heads of this shard read; one per query where groups are torn."""
    group = own * ways // entry.shape[-3]
    if own % group == 0 or group % own == 0:
        return entry.narrow(-3, shard * own // group, max(1, own // group))
    heads = torch.arange(shard * own, (shard + 1) * own, device=entry.device) // group
    return entry.index_select(-3, heads)
