"""Forward and backward of one component with the autograd graph cut at its boundary. Shared by executor and calibration.

The forward runs on detached leaves; the backward starts at the component's own outputs. Gradients equal those of the
uncut module bitwise if the gradients of a value are summed consumer by consumer in reverse execution order, as autograd
does. So the contribution of later consumers goes *into* the backward of the earlier ones (`so_far`), as the first
summand, instead of being added afterwards. A parameter that several components share adds to its `.grad` once per
component: bitwise as well, if `.grad` was empty or zero before and no component uses it more than once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from parsim.errors import TraceError
from parsim.model.runnable import Runnable


class Forward(Protocol):
    """What of a `Runnable` its forward needs."""

    @property
    def input_differentiable(self) -> tuple[bool, ...]: ...

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]: ...


class _Entry(torch.autograd.Function):
    """Identity at the entry of a component; its backward hands the gradient over and goes no further.

    Unlike a leaf's `.grad` it keeps the gradient's memory layout, which decides how the kernels below sum. `anchor` is an empty
    leaf, there to require a gradient: autograd keeps every leaf, and the value is to live no longer than somebody needs it.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, box: list[Tensor]) -> Tensor:
        del anchor
        ctx.box = box
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.box.append(gradients[0])
        return None, None, None


InputEdge = tuple[GradientEdge, list[Tensor]]
"""Where the gradient of an input arrives, and the list it is put in."""


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """What the backward of one forward needs. Neither inputs nor outputs are kept: only where gradients enter and leave.

    Attributes:
        entries: per input where its gradient arrives, and the list it is put in; None without a gradient.
        edges: per output where its gradient enters; None without a gradient.
    """

    entries: tuple[InputEdge | None, ...]
    edges: tuple[GradientEdge | None, ...]


def enter(value: Tensor) -> tuple[Tensor, InputEdge]:
    """A detached copy (sharing memory) that a gradient flows back to, and where that gradient arrives."""
    box: list[Tensor] = []
    anchor = torch.empty(0, device=value.device, requires_grad=True)
    cut = _Entry.apply(value.detach(), anchor, box)  # type: ignore[no-untyped-call]
    token = cut.view_as(cut).grad_fn  # a node of C++ that owns the graph, see get_gradient_edge
    return cut, (GradientEdge(cut.grad_fn, 0, ownership_token=token), box)


def forward_component(runnable: Forward, inputs: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Saved]:
    """Run `runnable` on detached copies (sharing memory) of `inputs`, in the order of `runnable.input_names`.

    An input gets a gradient if the recording says one flows through it, or if it requires one itself.

    Returns:
        Detached outputs in the order of `runnable.output_names`, and what `backward_component` needs. With gradients
        switched off (evaluation) nothing is saved.
    """
    training = torch.is_grad_enabled()
    given: list[Tensor] = []
    entries: list[InputEdge | None] = []
    for value, flows in zip(inputs, runnable.input_differentiable, strict=True):
        cut, entry = enter(value) if training and (flows or value.requires_grad) else (value.detach(), None)
        given.append(cut)
        entries.append(entry)
    outputs = runnable(given)
    edges = tuple(_edge(value) if value.requires_grad else None for value in outputs)
    return tuple(value.detach() for value in outputs), Saved(tuple(entries), edges)


def backward_component(
    saved: Saved, output_gradients: Sequence[Tensor | None], so_far: Sequence[Tensor | None] | None = None
) -> tuple[Tensor | None, ...]:
    """Accumulate parameter gradients into `.grad`; return the gradient of each input.

    Args:
        output_gradients: per output; None where nothing flowed back.
        so_far: per input the gradient that components executed *later* have already contributed; the returned gradient
            includes it. None (or an entry None) for nothing yet.

    Returns:
        Per input the total so far, None for an input without a gradient; possibly the same memory as a gradient given.
        A second backward on the same `saved` is an error of torch.

    Raises:
        TraceError: if the numbers of gradients do not match the forward.
    """
    so_far = so_far if so_far is not None else (None,) * len(saved.entries)
    roots, gradients = backward_roots(saved, output_gradients, so_far)
    if not roots:
        return tuple(so_far)
    run_backward(roots, gradients)
    return tuple(entry[1].pop() if entry is not None and entry[1] else None for entry in saved.entries)


def _edge(value: Tensor) -> GradientEdge:
    """As torch's `get_gradient_edge`, at a third of its cost where an operator of torch made the value."""
    node = value.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):
        return get_gradient_edge(value)
    return GradientEdge(node, value.output_nr)


def run_backward(roots: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """As `torch.autograd.backward`, without its own check of shapes: the engine checks them too."""
    Variable._execution_engine.run_backward(
        tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def backward_roots(
    saved: Saved, output_gradients: Sequence[Tensor | None], so_far: Sequence[Tensor | None]
) -> tuple[list[GradientEdge], list[Tensor]]:
    """Where the backward starts, and with what: at the outputs, and at the inputs with what later components contributed.

    Nothing where no gradient came for any output. Raises TraceError if the numbers of gradients do not match the forward.
    """
    if len(output_gradients) != len(saved.edges) or len(so_far) != len(saved.entries):
        raise TraceError(
            f"the forward had {len(saved.edges)} outputs and {len(saved.entries)} inputs, but gradients came for "
            f"{len(output_gradients)} and {len(so_far)}; give one (or None) for each"
        )
    roots: list[GradientEdge] = []
    gradients: list[Tensor] = []
    for edge, gradient in zip(saved.edges, output_gradients, strict=True):
        if edge is not None and gradient is not None:
            roots.append(edge)
            gradients.append(gradient)
    if not roots:
        return [], []
    for entry, gradient in zip(saved.entries, so_far, strict=True):
        if entry is not None and gradient is not None:
            roots.append(entry[0])
            gradients.append(gradient)
    return roots, gradients


def forward_components(components: Sequence[Runnable], inputs: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[Saved]]:
    """Every component in order: all values by name (inputs included), and what each backward needs."""
    values = dict(inputs)
    saved = []
    for component in components:
        outputs, kept = forward_component(component, [values[name] for name in component.input_names])
        values.update(zip(component.output_names, outputs, strict=True))
        saved.append(kept)
    return values, saved


def backward_components(
    components: Sequence[Runnable], saved: Sequence[Saved], gradients: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Every component in reverse order; `gradients` are those of the model's outputs. Returns them for every value."""
    found: dict[str, Tensor | None] = dict(gradients)
    for component, kept in zip(reversed(components), reversed(saved), strict=True):
        given = [found.get(name) for name in component.output_names]
        so_far = [found.get(name) for name in component.input_names]
        found.update(zip(component.input_names, backward_component(kept, given, so_far), strict=True))
    return {name: gradient for name, gradient in found.items() if gradient is not None}
