"""The time of fused attention: blocks of queries on multiprocessors, each over the keys that it sees.

Forward, over `problems` heads of q queries and k keys with `depth` channels (and `value_depth` of the values), on S
multiprocessors at the rate R = utilisation * peak_flop_per_s:

    blocks = problems * ceil(q / 128)         x = blocks / S      waves = x + quantisation * (ceil(x) - x)
    score  = passes * (2 (depth + value_depth) + softmax_flop)    of one query and one key
    block  = 128 * (keys + key_overhead) * score * S / R          keys: k; half of k and half a block where causal
    c      = max(waves * block, the longest block)                the longest one sees every key
    t      = floor_s + (c^p + m^p)^(1/p)                          m: queries, keys, values and outputs once

`softmax_flop` is the cost of the exponential of one score, in units of the arithmetic that runs meanwhile. It explains why
heads of 64 channels reach less of the peak than those of 128. The backward makes five products where the forward makes two,
so its `passes` is 2.5, with coefficients of its own. A causal mask skips the scores it hides, in both.

Leaves out: windows and other masks, dropout, and how grouped heads share keys in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from parsim.costs.compute.tile_model import Array

BLOCK = 128.0
BACKWARD_PASSES = 2.5
"""Products of the backward (scores again, and four gradients) over those of the forward."""
SHARPNESS = 4.0
COEFFICIENTS = ("utilisation", "softmax_flop", "key_overhead", "quantisation", "floor_s", "bandwidth_fraction")


def attention_seconds(
    queries: Array,
    keys: Array,
    depth: Array,
    value_depth: Array,
    problems: Array,
    causal: Array,
    size_bytes: Array,
    coefficients: Mapping[str, float],
    *,
    backward: bool = False,
) -> Array:
    """Seconds of fused attention by the formula of this module, for several shapes at once.

    Args:
        queries, keys, depth, value_depth: per head, float64 [shapes]. problems: heads of all samples.
        causal: 1 where a query sees no later key, else 0.
        size_bytes: arrays read and written.
        coefficients: `COEFFICIENTS`, and `multiprocessors`, `peak_flop_per_s`, `memory_bandwidth_bytes_per_s`.
        backward: five products instead of two.

    Returns:
        Seconds, float64 [shapes]. Leaves out windows and dropout.
    """
    units = coefficients["multiprocessors"]
    passes = BACKWARD_PASSES if backward else 1.0
    score = passes * (2.0 * (depth + value_depth) + coefficients["softmax_flop"])
    rate = coefficients["peak_flop_per_s"] * coefficients["utilisation"] / units
    seen = np.where(causal > 0, 0.5 * (keys + np.minimum(BLOCK, keys)), keys)
    blocks = problems * np.ceil(queries / BLOCK) / units
    waves = blocks + coefficients["quantisation"] * (np.ceil(blocks) - blocks)
    per_key = BLOCK * score / rate
    block = per_key * (seen + coefficients["key_overhead"])
    longest = per_key * (keys + coefficients["key_overhead"])
    compute = np.maximum(waves * block, longest)
    memory = size_bytes / (coefficients["memory_bandwidth_bytes_per_s"] * coefficients["bandwidth_fraction"])
    larger = np.maximum(compute, memory)
    seconds: Array = coefficients["floor_s"] + larger * (1.0 + (np.minimum(compute, memory) / larger) ** SHARPNESS) ** (
        1.0 / SHARPNESS
    )
    return seconds
