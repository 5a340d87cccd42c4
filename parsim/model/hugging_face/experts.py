"""Experts of a mixture as grouped products over tokens sorted by expert, in every precision and on every device.

transformers takes torch's grouped_mm for them, whose shapes torch knows for bfloat16 alone. Its own operator for other cases,
`transformers::grouped_mm_fallback`, multiplies the same matrices one expert at a time. So every token is multiplied with the
experts it chose, whichever they are: the work does not depend on how tokens are routed. What an uneven routing does to the time
of a device that holds some of the experts is left out.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from torch import Tensor

NAME = "parsim_grouped_mm"
"""Of the implementation, as `config._experts_implementation` has it."""


def _grouped_experts(self: Any, *args: Any, **kwargs: Any) -> Any:
    from transformers.integrations import moe

    with patch.object(moe, "_can_use_grouped_mm", lambda *_, **__: False):
        return moe.grouped_mm_experts_forward(self, *args, **kwargs)


def implementation() -> str | None:
    """The name of the implementation, registered with transformers; None where transformers has no such table."""
    try:
        from transformers.integrations import moe

        moe.ALL_EXPERTS_FUNCTIONS.register(NAME, _grouped_experts)
    except (ImportError, AttributeError):
        return None
    _set_backward()
    return NAME


@cache
def _set_backward() -> None:
    """Make the backward of the fallback one operator, where transformers walks over the experts in it (5.17 does).

    Fake tensors have no numbers of tokens to walk over.
    """
    import torch

    if not hasattr(torch.ops.transformers, "grouped_mm_fallback") or hasattr(
        torch.ops.transformers, "grouped_mm_fallback_backward"
    ):
        return
    define_backward()

    def setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return *torch.ops.parsim.grouped_mm_backward(*ctx.saved_tensors, gradient), None

    torch.library.register_autograd("transformers::grouped_mm_fallback", backward, setup_context=setup)


@cache
def define_backward() -> None:
    """`torch.ops.parsim.grouped_mm_backward`: gradients of tokens [s, k] sorted by expert and of weights [experts, k, n].

    `ends` has the number of tokens of the experts up to each.
    """
    import torch

    def backward(tokens: Tensor, weights: Tensor, ends: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        of_tokens, of_weights = torch.zeros_like(tokens), torch.zeros_like(weights)
        start = 0
        for expert, end in enumerate(ends.tolist()):
            of_tokens[start:end] = gradient[start:end] @ weights[expert].T
            of_weights[expert] = tokens[start:end].T @ gradient[start:end]
            start = end
        return of_tokens, of_weights

    name = "parsim::grouped_mm_backward"
    schema = "(Tensor tokens, Tensor weights, Tensor ends, Tensor gradient) -> (Tensor, Tensor)"
    torch.library.custom_op(name, backward, mutates_args=(), schema=schema)
    torch.library.register_fake(
        name, lambda tokens, weights, ends, gradient: (torch.empty_like(tokens), torch.empty_like(weights))
    )
