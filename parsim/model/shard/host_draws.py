"""Whether a component of a GPU draws random numbers from the generator of the host, as `torch.rand(3).to(x.device)` does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parsim.model.runnable import CallProgram, Op, run_op
from parsim.model.shard.content import operands_of
from parsim.model.shard.unlisted import drawing_calls


def may_draw_on_host(program: CallProgram) -> bool:
    """Whether any call does, or may for all that can be seen: one that is no operator of torch's own.

    Masks of dropout are drawn where the values are, which is on the GPU.
    """
    return any(_may_draw(program, program.ops[number]) for number in drawing_calls(program))


def _may_draw(program: CallProgram, op: Op) -> bool:
    """Meta tensors stand for those of the GPU, so a call that asks for none of them there makes its own on the host."""
    environment: list[Any] = [None] * program.slots
    for slot in operands_of(op):
        kind = program.tensors[slot]
        environment[slot] = torch.empty_strided(kind.shape, kind.stride, dtype=kind.dtype, device="meta")
    keywords = tuple((name, _on_meta(value) if name == "device" else value) for name, value in op.keywords)
    watch = _HostDraws()
    try:
        with torch.no_grad(), watch:
            run_op(Op(op.function, op.arguments, keywords, op.outputs, op.context, ()), environment)
    except Exception:  # nothing is known of it
        return True
    return watch.found


def _on_meta(device: Any) -> Any:
    return device if device is None or torch.device(device).type == "cpu" else torch.device("meta")


class _HostDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whether an operator draws random numbers for a tensor of the host, or does what torch does not see."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [entry for entry in (result if isinstance(result, list | tuple) else [result]) if isinstance(entry, Tensor)]
        draws = torch.Tag.nondeterministic_seeded in func.tags
        hidden = func.namespace not in ("aten", "prims", "prim")
        self.found |= hidden or (draws and any(entry.device.type == "cpu" for entry in made))
        return result
