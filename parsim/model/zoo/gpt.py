"""A decoder-only transformer with the sizes and names of GPT-2 (Radford et al., 2019)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from parsim.errors import ModelError
from parsim.model.zoo.attention import SelfAttention


class DecoderBlock(nn.Module):
    """Pre-norm causal attention and MLP, each with a residual."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden)
        self.attn = SelfAttention(hidden, heads, dropout=dropout, causal=True)
        self.ln_2 = nn.LayerNorm(hidden)
        self.c_fc = nn.Linear(hidden, 4 * hidden)
        self.c_proj = nn.Linear(4 * hidden, hidden)
        self.gelu = nn.GELU(approximate="tanh")
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attn(self.ln_1(x)))
        out: Tensor = x + self.dropout(self.c_proj(self.gelu(self.c_fc(self.ln_2(x)))))
        return out


class GPT(nn.Module):
    """Token ids [batch, positions <= seq] to logits [batch, positions, vocab]; the output matrix is the token embedding."""

    def __init__(self, *, hidden: int, layers: int, heads: int, vocab: int, seq: int, dropout: float) -> None:
        super().__init__()
        self.seq = seq
        self.wte = nn.Embedding(vocab, hidden)
        self.wpe = nn.Embedding(seq, hidden)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(DecoderBlock(hidden, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        self.lm_head.weight = self.wte.weight
        for name, parameter in self.named_parameters():
            if name.endswith("proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))
            elif parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > self.seq:
            raise ModelError(f"{tokens.shape[1]} tokens exceed the {self.seq} positions; raise the argument seq")
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        out: Tensor = self.lm_head(self.ln_f(x))
        return out


def gpt(
    *,
    hidden: int = 768,
    layers: int = 12,
    heads: int = 12,
    vocab: int = 50257,
    seq: int = 1024,
    dropout: float = 0.0,
    input_shape: tuple[int, ...] = (1024,),
) -> GPT:
    """The defaults are GPT-2 small: 124,439,808 parameters."""
    return GPT(hidden=hidden, layers=layers, heads=heads, vocab=vocab, seq=seq, dropout=dropout)
