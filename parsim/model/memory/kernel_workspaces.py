"""What kernels save for their backward and fake tensors do not know.

oneDNN's LSTM (one direction of one layer) returns a workspace that autograd keeps: the gates, the hidden states and cells of
every step, and room for their gradients. The fake kernel returns an empty one.

Each of its seven arrays begins on a page of 4096 bytes. That is not linear in the batch, so a trace counts the arrays without
it, and keeps their sizes per sample (`Component.paged_bytes`) for whoever knows the samples.

Source: oneDNN, src/cpu/rnn/rnn_utils.cpp, get_good_ld and set_offsets. Sizes equal the real kernel's, pages included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

GATES = 4
LINE_BYTES = 64


def lstm_workspace_arrays(
    length: int, batch: int, features: int, hidden: int, element_bytes: int = 4, cell_bytes: int = 4
) -> tuple[int, ...]:
    """Bytes of the arrays in the workspace of one direction of one layer.

    Args:
        length: steps. batch: samples. features: of the input. hidden: of the state. element_bytes: of the input.
        cell_bytes: of an element of the cells, which are as wide as the first ones; gradients are in fp32.

    Returns:
        Gates, hidden states, inputs of cells, cells, and the gradients of the last two and of the states.
    """
    rows, steps = length * batch, 2 * (length + 1) * batch
    widest = max(features, hidden)
    return (
        rows * _padded(GATES * hidden, element_bytes) * element_bytes,
        rows * _padded(hidden, element_bytes) * element_bytes,
        steps * _padded(widest, element_bytes) * element_bytes,
        steps * hidden * cell_bytes,
        steps * _padded(widest, 4) * 4,
        steps * _padded(widest, 4) * 4,
        steps * hidden * 4,
    )


def _padded(width: int, element_bytes: int) -> int:
    """A row of a matrix: whole cache lines, and no multiple of 256 elements."""
    line = LINE_BYTES // element_bytes
    padded = -(-width // line) * line
    return padded + line if padded % 256 == 0 else padded


def paged_arrays(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Bytes of the arrays in the workspace that the operator keeps for its backward; none: it keeps none.

    Args:
        func: an operator of aten. args: its positional arguments.
    """
    if func is not torch.ops.aten.mkldnn_rnn_layer.default or not args[15]:
        return ()
    given, recurrent, cells = args[0], args[2], args[6]
    length, batch, features = given.shape
    sizes = given.element_size(), cells.element_size()
    return lstm_workspace_arrays(length, batch, features, recurrent.shape[1], *sizes)


def with_workspace(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """The result of an operator; the empty workspace of a fake LSTM has its size.

    Args:
        func: an operator of aten. args: its positional arguments. result: what it returned.
    """
    sizes = paged_arrays(func, args)
    if not sizes or result[3] is None or result[3].numel():
        return result
    workspace: Tensor = result[3].new_empty(sum(sizes))
    return (*result[:3], workspace)
