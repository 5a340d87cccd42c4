"""A bidirectional transformer encoder with a masked-language-model head, after Devlin et al., "BERT" (2018)."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from parsim.model.zoo.attention import SelfAttention

_EPS = 1e-12


class Embeddings(nn.Module):
    """Token, position and token-type (always type 0) embeddings, normalised."""

    def __init__(self, hidden: int, vocab: int, seq: int, dropout: float) -> None:
        super().__init__()
        self.word = nn.Embedding(vocab, hidden)
        self.position = nn.Embedding(seq, hidden)
        self.token_type = nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden, eps=_EPS)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.word(tokens) + self.token_type(torch.zeros_like(tokens)) + self.position(positions)
        out: Tensor = self.dropout(self.norm(x))
        return out


class EncoderLayer(nn.Module):
    """Attention and MLP, each followed by residual and normalisation (post-norm)."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(hidden, heads, dropout=dropout)
        self.attention_norm = nn.LayerNorm(hidden, eps=_EPS)
        self.intermediate = nn.Linear(hidden, 4 * hidden)
        self.output = nn.Linear(4 * hidden, hidden)
        self.output_norm = nn.LayerNorm(hidden, eps=_EPS)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        y = self.output(functional.gelu(self.intermediate(x)))
        out: Tensor = self.output_norm(x + self.dropout(y))
        return out


class MaskedLanguageHead(nn.Module):
    """Dense, GELU, normalisation, then the token embedding matrix with a separate bias."""

    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden, eps=_EPS)
        self.decoder = nn.Linear(hidden, vocab)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decoder(self.norm(functional.gelu(self.dense(x))))
        return out


class BERT(nn.Module):
    """Token ids [batch, positions <= seq] to logits [batch, positions, vocab]; no padding mask."""

    def __init__(self, *, hidden: int, layers: int, heads: int, vocab: int, seq: int, dropout: float) -> None:
        super().__init__()
        self.embeddings = Embeddings(hidden, vocab, seq, dropout)
        self.layers = nn.ModuleList(EncoderLayer(hidden, heads, dropout) for _ in range(layers))
        self.head = MaskedLanguageHead(hidden, vocab)
        self.head.decoder.weight = self.embeddings.word.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def bert(
    *,
    hidden: int = 768,
    layers: int = 12,
    heads: int = 12,
    vocab: int = 30522,
    seq: int = 512,
    dropout: float = 0.0,
    input_shape: tuple[int, ...] = (512,),
) -> BERT:
    """The defaults are BERT base with its masked-language head (no pooler): 109,514,298 parameters."""
    return BERT(hidden=hidden, layers=layers, heads=heads, vocab=vocab, seq=seq, dropout=dropout)
