"""Experts of a mixture as grouped products over tokens sorted by expert, in every precision and on every device.

transformers takes torch's grouped_mm for them, whose shapes torch knows for bfloat16 alone. Its own operator for other cases,
`transformers::grouped_mm_fallback`, multiplies the same matrices one expert at a time. So every token is multiplied with the
experts it chose, whichever they are: the work does not depend on how tokens are routed. What an uneven routing does to the time
of a device that holds some of the experts is left out.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

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
    return NAME
