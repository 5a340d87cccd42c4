"""The sizes of a transformer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from parsim.errors import ModelError
from parsim.units import nearest_divisors


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a decoder-only or encoder-only transformer.

    Attributes:
        ffn: inside of the MLP; 0: 4 hidden. kv_heads: fewer than heads: grouped queries; 0: heads. head_dim: 0: hidden / heads.
        gated: SwiGLU with three products; else two and GELU. norm: "layer" or "rms". bias: of linear layers.
        qkv_bias: of queries, keys and values alone. qk_norm: a norm per head of queries and of keys.
        rotary: rotated queries and keys instead of learned positions. alibi: neither of both, but biases of scores.
        positions: learned ones; 0: as many as a sample has tokens. tied: the output matrix is the embedding.
        embedding_norm: a norm behind the embedding. sinks: a learned score per head.
        experts: of a mixture; active: that each token visits; expert_ffn: of one. shared_ffn: of experts that all tokens visit.
        expert_bias: of experts and router. dense_layers: first layers without experts.
        query_rank, key_rank, rope_dim: of multi-head latent attention; 0: none.
        causal: a query sees no later key.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    ffn: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = False
    norm: str = "layer"
    bias: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    rotary: bool = False
    alibi: bool = False
    positions: int = 0
    tied: bool = True
    embedding_norm: bool = False
    sinks: bool = False
    experts: int = 0
    active: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    expert_bias: bool = False
    dense_layers: int = 0
    query_rank: int = 0
    key_rank: int = 0
    rope_dim: int = 0
    causal: bool = True

    @property
    def inner(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def keys(self) -> int:
        return self.kv_heads or self.heads

    @property
    def dim(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def learned_positions(self) -> bool:
        return not (self.rotary or self.alibi)

    def check(self) -> None:
        """Raise ModelError, with the nearest sizes that go together, for those that do not."""
        for key in ("layers", "hidden", "heads", "vocab"):
            if getattr(self, key) < 1:
                raise ModelError(f"{self.name}: {key} must be >= 1, got {getattr(self, key)}")
        if not self.head_dim and self.hidden % self.heads:
            fitting = nearest_divisors(self.hidden, self.heads)
            raise ModelError(
                f"{self.name}: the heads ({self.heads}) must divide the hidden size ({self.hidden}); the nearest that do: "
                f"{fitting}; or give head_dim"
            )
        if self.heads % self.keys:
            raise ModelError(
                f"{self.name}: kv_heads ({self.kv_heads}) must divide the heads ({self.heads}); the nearest that do: "
                f"{nearest_divisors(self.heads, self.kv_heads)}"
            )
        if self.experts and not 1 <= self.active <= self.experts:
            raise ModelError(f"{self.name}: active = {self.active} experts per token must be 1 to experts = {self.experts}")


def gpt(name: str, layers: int, hidden: int, heads: int, vocab: int = 51200, **rest: Any) -> Shape:
    """GPT as Megatron trains it."""
    return replace(Shape(name=name, layers=layers, hidden=hidden, heads=heads, vocab=vocab), **rest)


def mpt(name: str, layers: int, hidden: int, heads: int) -> Shape:
    """MPT as its pretraining files have it: no biases, learned positions, tied output."""
    return Shape(name=name, layers=layers, hidden=hidden, heads=heads, vocab=50368, bias=False)


def llama(name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **rest: Any) -> Shape:
    """Llama and its relatives."""
    base = Shape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        gated=True,
        norm="rms",
        bias=False,
        rotary=True,
        tied=False,
    )
    return replace(base, **rest)
