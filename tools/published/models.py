"""BERT and GPT as the published programs ran them: the zoo's models with the attention and the head that those programs have.

Model factories for `ModelSpec("tools.published.models:...")`, for pricing alone. What is traced has the launches of the
measured program, not its values: a mask is of zeros, or inside a kernel and left out.

    nvidia_bert    three projections, scores divided and masked in passes of their own, the vocabulary's bias added after its
                   product. Source: github NVIDIA/DeepLearningExamples, PyTorch/LanguageModeling/BERT/modeling.py (2020). Leaves
                   out the next-sentence head and the fusion of bias with GELU.
    megatron_gpt   scaling inside the product, the causal mask inside the softmax kernel. Source: github NVIDIA/Megatron-LM,
                   megatron/model/transformer.py (2021). Leaves out the fusions of bias with GELU, with dropout and residual.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from parsim.model.catalogue.networks import BERT, GPT, MaskedLanguageHead, SelfAttention


class SeparateAttention(nn.Module):
    """[batch, positions, hidden] to the same; every step between the two batched products is a pass over the scores."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query, self.key, self.value, self.proj = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, positions, hidden = x.shape
        parts = (layer(x).view(batch, positions, self.heads, -1) for layer in (self.query, self.key, self.value))
        query, key, value = (part.permute(0, 2, 1, 3) for part in parts)
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(hidden // self.heads)
        weights = torch.softmax(scores + x.new_zeros(batch, 1, 1, positions), dim=-1)
        mixed = torch.matmul(functional.dropout(weights, self.dropout, self.training), value)
        out: Tensor = self.proj(mixed.permute(0, 2, 1, 3).reshape(batch, positions, hidden))
        return out


class SeparateBiasHead(MaskedLanguageHead):
    """The zoo's head with the decoder's bias added to the logits afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        logits = functional.linear(self.norm(functional.gelu(self.dense(x))), self.decoder.weight)
        out: Tensor = logits + self.decoder.bias
        return out


def nvidia_bert(*, hidden: int, layers: int, heads: int, vocab: int, seq: int, dropout: float) -> BERT:
    """With the masked-language head over every position."""
    model = BERT(hidden=hidden, layers=layers, heads=heads, vocab=vocab, seq=seq, dropout=dropout)
    for layer in model.layers:
        layer.attention = SeparateAttention(hidden, heads, dropout)
    model.head = SeparateBiasHead(hidden, vocab)
    model.head.decoder.weight = model.embeddings.word.weight
    return model


class FusedSoftmaxAttention(SelfAttention):
    """[batch, positions, hidden] to the same; two batched products with one softmax and one dropout between them."""

    def forward(self, x: Tensor) -> Tensor:
        batch, positions, hidden = x.shape
        width = hidden // self.heads
        projected = self.qkv(x).view(batch, positions, 3, self.heads, width).permute(2, 0, 3, 1, 4)
        query, key, value = (part.reshape(batch * self.heads, positions, width) for part in projected)
        scores = torch.baddbmm(query.new_empty(1, 1, 1), query, key.transpose(1, 2), beta=0.0, alpha=1 / math.sqrt(width))
        weights = functional.dropout(torch.softmax(scores, dim=-1), self.dropout, self.training)
        mixed = torch.bmm(weights, value).view(batch, self.heads, positions, width)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, positions, hidden))
        return out


def megatron_gpt(*, hidden: int, layers: int, heads: int, vocab: int, seq: int, dropout: float) -> GPT:
    """With the output matrix tied to the token embedding, as there."""
    model = GPT(hidden=hidden, layers=layers, heads=heads, vocab=vocab, seq=seq, dropout=dropout)
    for block in model.h:
        block.attn = FusedSoftmaxAttention(hidden, heads, dropout=dropout, causal=True)
    return model
