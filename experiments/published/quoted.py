"""Step seconds in the unit that a source quotes, with FLOP counted as the source counts them."""

from __future__ import annotations

from question import Asked

PEAKS = {"A100": 312e12, "H100": 989.4e12, "H200": 989.4e12, "B200": 2250e12, "GB200": 2500e12, "V100": 125e12}


def parameters_used(asked: Asked) -> float:
    """Weights that a token's products use, embedding left out and output matrix counted."""
    shape = asked.shape
    width = shape.dim
    attention = shape.hidden * width * (shape.heads + 2 * shape.keys) + shape.heads * width * shape.hidden
    if shape.key_rank:
        attention = (
            shape.hidden * (shape.query_rank + shape.key_rank + shape.rope_dim)
            + shape.query_rank * shape.heads * (width + shape.rope_dim)
            + shape.key_rank * 2 * shape.heads * width
            + shape.heads * width * shape.hidden
        )
    arms = 3 if shape.gated else 2
    dense = arms * shape.hidden * shape.inner
    mixture = arms * shape.hidden * (shape.active * shape.expert_ffn + shape.shared_ffn) + shape.hidden * shape.experts
    layers, plain = shape.layers, shape.dense_layers if shape.experts else shape.layers
    return layers * attention + plain * dense + (layers - plain) * mixture + shape.hidden * shape.vocab


def model_flop(asked: Asked, *, causal: bool) -> float:
    """Of a step, forward and backward once: 6 per weight and token, and attention's scores (half of them where causal)."""
    shape, tokens = asked.shape, asked.batch * asked.seq
    scores = 12 * shape.layers * shape.heads * (shape.dim + shape.rope_dim / 2) * asked.seq
    return tokens * (6 * parameters_used(asked) + scores * (0.5 if causal else 1.0))


def hardware_flop(asked: Asked) -> float:
    """Megatron's count with full recomputation: every layer's forward twice (Narayanan et al. 2021, equation 3)."""
    shape, tokens = asked.shape, asked.batch * asked.seq
    head = 6 * shape.hidden * shape.vocab * tokens
    layers = model_flop(asked, causal=False) - head
    return head + layers * (4 / 3 if asked.recompute == "full" else 1.0)


def selective_flop(asked: Asked) -> float:
    """As Korthikanti et al. (2022) count a step with selective recomputation: 72 B L s h^2 (1 + s / 3h + V / 12 L h).

    That is the scores' forward and backward once more, where the step computes their forward once more. Their HFU and MFU
    say so: 43.7 and 41.5% of 22B are 1.053 apart, and s / 3h against s / 6h is 1.052.
    """
    shape, tokens = asked.shape, asked.batch * asked.seq
    return model_flop(asked, causal=False) + 12 * shape.layers * shape.heads * shape.dim * asked.seq * tokens


def in_unit(asked: Asked, step_s: float) -> float:
    """Step seconds in the row's unit. Raises ValueError for a unit that is not known."""
    unit = asked.row.unit.lower().strip()
    gpus, tokens = asked.gpus, asked.batch * asked.seq
    if unit.startswith("ms"):
        return step_s * 1e3
    if unit.startswith("s/") or unit in ("s", "seconds", "seconds/step"):
        return step_s
    if unit.startswith("samples/s"):
        return asked.batch / step_s
    if unit.startswith("tokens/s"):
        return tokens / step_s / (gpus if "gpu" in unit else 1)
    if unit.startswith(("tflop", "percent", "mfu", "hfu")):
        hardware = "hardware" in unit or "hfu" in unit
        prefix = asked.row.id
        if prefix.startswith("megds"):
            hardware = True
        causal = prefix.startswith(("nemo", "llama3", "titan"))
        if hardware:
            flop = selective_flop(asked) if asked.recompute == "selective" else hardware_flop(asked)
        else:
            flop = model_flop(asked, causal=causal)
        rate = flop / step_s / gpus
        if unit.startswith("tflop"):
            return rate / 1e12
        peak = next((peak for name, peak in PEAKS.items() if name in asked.row.hardware), 0.0)
        if not peak:
            raise ValueError(f"no peak is known for {asked.row.hardware}")
        return 100 * rate / peak if unit.startswith("percent") else rate / peak
    raise ValueError(f"unit {asked.row.unit!r} is not known")


def larger_is_faster(asked: Asked) -> bool:
    """Whether the unit is a rate."""
    unit = asked.row.unit.lower()
    return not unit.startswith(("ms", "s/")) and unit not in ("s", "seconds", "seconds/step")
