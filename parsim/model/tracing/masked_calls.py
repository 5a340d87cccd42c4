"""Calls whose sizes depend on the values of a mask, with real masks in the place of fake ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes


def sets_by_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a call puts rows where a mask is true: the number of rows depends on the mask."""
    if name != "__setitem__" or not isinstance(args[2], Tensor) or args[2].dim() == 0:
        return False
    return any(isinstance(part, FakeTensor) and part.dtype is torch.bool for part in _parts(args[1]))


def with_index_arrays(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The same call with arrays of indices in the place of masks, whose sizes are those of the result.

    Args:
        function, name: a call. args, kwargs: with real masks.
    """
    if name in ("__getitem__", "__setitem__"):
        parts = _parts(args[1])
        spread: list[Any] = []
        with _disable_current_modes():
            for part in parts:
                if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
                    spread += part.nonzero(as_tuple=True)
                else:
                    spread.append(int(part) if isinstance(part, Tensor) and part.dim() == 0 else part)
        return function, (args[0], tuple(spread), *args[2:]), kwargs
    if name == "masked_select":
        given, mask = torch.broadcast_tensors(args[0], args[1] if len(args) > 1 else kwargs["mask"])  # type: ignore[no-untyped-call]
        with _disable_current_modes():
            places = mask.nonzero(as_tuple=True)
        return Tensor.__getitem__, (given, places), {}
    if name == "repeat_interleave":
        repeats = args[1] if len(args) > 1 else kwargs["repeats"]
        with _disable_current_modes():
            return function, args, {**kwargs, "output_size": int(repeats.sum())}
    return function, args, kwargs


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)
