"""Multi-head self-attention, shared by the transformers of the zoo."""

from __future__ import annotations

import torch.nn.functional as functional
from torch import Tensor, nn

from parsim.errors import ModelError


class SelfAttention(nn.Module):
    """One fused projection to queries, keys and values, scaled dot-product attention, output projection.

    Input and output are [batch, positions, hidden].
    """

    def __init__(self, hidden: int, heads: int, *, dropout: float = 0.0, causal: bool = False) -> None:
        super().__init__()
        if hidden % heads:
            raise ModelError(f"hidden ({hidden}) must be divisible by heads ({heads})")
        self.heads = heads
        self.dropout = dropout
        self.causal = causal
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, positions, hidden = x.shape
        query, key, value = self.qkv(x).view(batch, positions, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=self.causal)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(batch, positions, hidden))
        return out
