"""What kernels save for their backward and fake tensors do not know.

oneDNN's LSTM (one direction of one layer) returns a workspace that autograd keeps: the gates, the hidden states and cells of
every step, and room for their gradients. The fake kernel returns an empty one.

Leaves out: oneDNN begins each of its seven arrays on a page of 4096 bytes, which is not linear in the batch (at most 28 KiB
a layer and direction).

Source: oneDNN, src/cpu/rnn/rnn_utils.cpp, get_good_ld and set_offsets. Sizes equal the real kernel's, but for the pages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

GATES = 4
LINE_BYTES = 64
PAGE_BYTES = 4096
ARRAYS = 7


def lstm_workspace_arrays(length: int, batch: int, features: int, hidden: int, element_bytes: int = 4) -> tuple[int, ...]:
    """Bytes of the arrays in the workspace of one direction of one layer.

    Args:
        length: steps. batch: samples. features: of the input. hidden: of the state. element_bytes: of the input.

    Returns:
        Gates, hidden states, inputs of cells, cells, and the gradients of the last two and of the states.
    """
    rows, steps = length * batch, 2 * (length + 1) * batch
    widest = max(features, hidden)
    return (
        rows * _padded(GATES * hidden, element_bytes) * element_bytes,
        rows * _padded(hidden, element_bytes) * element_bytes,
        steps * _padded(widest, element_bytes) * element_bytes,
        steps * hidden * 4,
        steps * _padded(widest, 4) * 4,
        steps * _padded(widest, 4) * 4,
        steps * hidden * 4,
    )


def _padded(width: int, element_bytes: int) -> int:
    """A row of a matrix: whole cache lines, and no multiple of 256 elements."""
    line = LINE_BYTES // element_bytes
    padded = -(-width // line) * line
    return padded + line if padded % 256 == 0 else padded


def with_workspace(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """The result of an operator; the empty workspace of a fake LSTM has its size.

    Args:
        func: an operator of aten. args: its positional arguments. result: what it returned.
    """
    if func is not torch.ops.aten.mkldnn_rnn_layer.default or result[3] is None or result[3].numel():
        return result
    given, recurrent, train = args[0], args[2], args[15]
    if not train:
        return result
    length, batch, features = given.shape
    sizes = lstm_workspace_arrays(length, batch, features, recurrent.shape[1], given.element_size())
    workspace: Tensor = result[3].new_empty(sum(sizes))
    return (*result[:3], workspace)
