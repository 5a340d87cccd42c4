"""The shape of a transformer, and the shapes of models that rows name only by a name.

A row's own columns win. What a row leaves out comes from here: ratios of GPT (ffn = 4 hidden), and published shapes by name.
Sources: config files of the models' repositories and the papers that describe them; they are facts about a model, no
measurements.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a decoder-only or encoder-only transformer.

    Attributes:
        kv_heads: fewer than heads: grouped queries. head_dim: 0: hidden / heads.
        gated: SwiGLU with three products; else two and GELU. norm: "layer" or "rms". bias: of linear layers.
        rotary: rotated queries and keys instead of learned positions. tied: the output matrix is the embedding.
        experts: of a mixture; active: that each token visits; expert_ffn: of one. shared_ffn: of experts that all tokens visit.
        dense_layers: first layers without experts.
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
    rotary: bool = False
    tied: bool = True
    experts: int = 0
    active: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
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


def gpt(name: str, layers: int, hidden: int, heads: int, vocab: int = 51200) -> Shape:
    """GPT as Megatron trains it."""
    return Shape(name=name, layers=layers, hidden=hidden, heads=heads, vocab=vocab)


def mpt(name: str, layers: int, hidden: int, heads: int) -> Shape:
    """MPT: no biases, attention with linear biases instead of positions, tied output."""
    return Shape(name=name, layers=layers, hidden=hidden, heads=heads, vocab=50368, bias=False, rotary=False)


def llama(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **rest: int | bool | str
) -> Shape:
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
    return replace(base, **rest)  # type: ignore[arg-type]


SHAPES: dict[str, Shape] = {
    "gpt-5b": gpt("GPT 5B", 24, 4096, 32),
    "gpt-20b": gpt("GPT 20B", 44, 6144, 48),
    "gpt3-20b": gpt("GPT 20B", 44, 6144, 48, 50304),
    "gpt-40b": gpt("GPT 40B", 48, 8192, 64),
    "gpt3-40b": gpt("GPT 40B", 48, 8192, 64, 50304),
    "gpt-175b": gpt("GPT-3 175B", 96, 12288, 96),
    "gpt3-175b": gpt("GPT-3 175B", 96, 12288, 96, 50304),
    "gpt3-355m": gpt("GPT-3 355M", 24, 1024, 16, 50304),
    "gpt3-1.3b": gpt("GPT-3 1.3B", 24, 2048, 16, 50304),
    "gpt3-2.7b": gpt("GPT-3 2.7B", 32, 2560, 20, 50304),
    "gpt3-125m": gpt("GPT-3 125M", 12, 768, 12, 50304),
    "megatron-22b": gpt("GPT 22B", 48, 6144, 64),
    "22b": gpt("GPT 22B", 48, 6144, 64),
    "turing-530b": gpt("GPT 530B", 105, 20480, 128),
    "megatron-1t": gpt("GPT 1T", 128, 25600, 160),
    "opt-350m": gpt("OPT-350M", 24, 1024, 16, 50272),
    "opt-350": gpt("OPT-350M", 24, 1024, 16, 50272),
    "gpt-neo-2.7b": gpt("GPT-Neo 2.7B", 32, 2560, 20, 50257 + 47),
    "mpt-125m": mpt("MPT-125m", 12, 768, 12),
    "mpt-350m": mpt("MPT-350m", 24, 1024, 16),
    "mpt-760m": mpt("MPT-760m", 24, 1536, 12),
    "mpt-1b": mpt("MPT-1b", 24, 2048, 16),
    "mpt-3b": mpt("MPT-3b", 32, 2560, 20),
    "mpt-7b": mpt("MPT-7b", 32, 4096, 32),
    "mpt-13b": mpt("MPT-13b", 40, 5120, 40),
    "mpt-30b": mpt("MPT-30b", 48, 7168, 56),
    "mpt-70b": mpt("MPT-70b", 80, 8192, 64),
    "internlm-7b": llama("InternLM 7B", 32, 4096, 32, 32, 10944, 103168, bias=True),
    "llama65b": llama("LLaMA 65B", 80, 8192, 64, 64, 22016, 32000),
    "llama2-7b": llama("Llama 2 7B", 32, 4096, 32, 32, 11008, 32000),
    "llama2-13b": llama("Llama 2 13B", 40, 5120, 40, 40, 13824, 32000),
    "llama2-70b": llama("Llama 2 70B", 80, 8192, 64, 8, 28672, 32000),
    "llama3-8b": llama("Llama 3 8B", 32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": llama("Llama 3 70B", 80, 8192, 64, 8, 28672, 128256),
    "llama3-405b": llama("Llama 3 405B", 126, 16384, 128, 8, 53248, 128256),
    "nemotron-8b": Shape(
        name="Nemotron 8B", layers=32, hidden=4096, heads=32, vocab=256000, ffn=16384, bias=False, rotary=True, tied=False
    ),
    "nemotron-15b": Shape(
        name="Nemotron 15B",
        layers=32,
        hidden=6144,
        heads=48,
        kv_heads=8,
        vocab=256000,
        ffn=24576,
        bias=False,
        rotary=True,
        tied=False,
    ),
    "nemotron4-15b": Shape(
        name="Nemotron 15B",
        layers=32,
        hidden=6144,
        heads=48,
        kv_heads=8,
        vocab=256000,
        ffn=24576,
        bias=False,
        rotary=True,
        tied=False,
    ),
    "nemotron-340b": Shape(
        name="Nemotron 340B",
        layers=96,
        hidden=18432,
        heads=96,
        kv_heads=8,
        vocab=256000,
        ffn=73728,
        bias=False,
        rotary=True,
        tied=False,
    ),
    "nemotron4-340b": Shape(
        name="Nemotron 340B",
        layers=96,
        hidden=18432,
        heads=96,
        kv_heads=8,
        vocab=256000,
        ffn=73728,
        bias=False,
        rotary=True,
        tied=False,
    ),
    "mixtral-8x7b": llama("Mixtral 8x7B", 32, 4096, 32, 8, 14336, 32000, experts=8, active=2, expert_ffn=14336),
    "mixtral-8x22b": llama("Mixtral 8x22B", 56, 6144, 48, 8, 16384, 32768, experts=8, active=2, expert_ffn=16384),
    "qwen3-30b-a3b": llama("Qwen3 30B A3B", 48, 2048, 32, 4, 6144, 151936, experts=128, active=8, expert_ffn=768, head_dim=128),
    "qwen3-235b-a22b": llama(
        "Qwen3 235B A22B", 94, 4096, 64, 4, 12288, 151936, experts=128, active=8, expert_ffn=1536, head_dim=128
    ),
    "gpt-oss-20b": llama("gpt-oss 20B", 24, 2880, 64, 8, 2880, 201088, experts=32, active=4, expert_ffn=2880, head_dim=64),
    "gpt-oss-120b": llama("gpt-oss 120B", 36, 2880, 64, 8, 2880, 201088, experts=128, active=4, expert_ffn=2880, head_dim=64),
    "deepseekv3": llama(
        "DeepSeek V3",
        61,
        7168,
        128,
        128,
        18432,
        129280,
        experts=256,
        active=8,
        expert_ffn=2048,
        shared_ffn=2048,
        dense_layers=3,
        head_dim=128,
        query_rank=1536,
        key_rank=512,
        rope_dim=64,
    ),
    "deepseekv2": llama(
        "DeepSeek V2",
        60,
        5120,
        128,
        128,
        12288,
        102400,
        experts=160,
        active=6,
        expert_ffn=1536,
        shared_ffn=3072,
        dense_layers=1,
        head_dim=128,
        query_rank=1536,
        key_rank=512,
        rope_dim=64,
    ),
    "bert-110m": Shape(name="BERT 110M", layers=12, hidden=768, heads=12, vocab=30522, causal=False),
    "bert-4b": Shape(name="BERT 4B", layers=48, hidden=2560, heads=40, vocab=30522, causal=False),
    "bert-20b": Shape(name="BERT 20B", layers=48, hidden=6144, heads=96, vocab=30522, causal=False),
}
"""By a normalised name (`shape_key`)."""


def shape_key(name: str) -> str:
    """`Llama 3.1 70B` -> `llama3-70b`; `GPT-3 175B` -> `gpt3-175b`; `Qwen3_30B_a3B` -> `qwen3-30b-a3b`."""
    text = name.lower().replace("_", "-").replace(" ", "-")
    text = re.sub(r"-+", "-", text)
    text = re.sub(r"llama-?(\d)(\.\d)?", r"llama\1", text)
    text = re.sub(r"^gpt-?3-?(?=\d)", "gpt3-", text)
    text = re.sub(r"deepseek-?v(\d).*", r"deepseekv\1", text)
    return re.sub(r"-(lora|sft|pretrain.*)$", "", text)


def shape_of_name(name: str) -> Shape | None:
    """The shape of a model by its name, reduced to so many layers where the name says so; None: not known."""
    reduced = re.search(r"reduced to (\d+) layers", name)
    key = shape_key(re.sub(r"\s*reduced to.*", "", name))
    found = SHAPES.get(key)
    if found is None or reduced is None:
        return found
    layers = int(reduced[1])
    return replace(found, layers=layers, dense_layers=min(found.dense_layers, 1))
