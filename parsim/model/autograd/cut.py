"""Forward and backward of one component with the autograd graph cut at its boundary. Shared by executor and calibration.

The forward runs on detached leaves; the backward starts at the component's own outputs. Gradients equal those of the
uncut module bitwise if the gradients of a value are summed consumer by consumer in reverse execution order, as autograd
does. So the contribution of later consumers goes *into* the backward of the earlier ones (`so_far`), as the first
summand, instead of being added afterwards. A parameter that several components share adds to its `.grad` once per
component: bitwise as well, if `.grad` was empty or zero before and no component uses it more than once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from parsim.errors import TraceError
from parsim.private import _FunctionBase


class Forward(Protocol):
    """What of a `Runnable` its forward needs."""

    @property
    def input_differentiable(self) -> tuple[bool, ...]: ...

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]: ...


class _Entry(torch.autograd.Function):
    """Identity at the entry of a component; its backward hands the gradient over and goes no further.
    Unlike a leaf's `.grad` it keeps the gradient's memory layout, which decides how the kernels below sum. `anchor` is an empty
    leaf, there to require a gradient: autograd keeps every leaf, and the value is to live no longer than somebody needs it."""

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
    `entries`: per input where its gradient arrives, and the list it is put in; None without a gradient. `edges`: per output
    where its gradient enters; None without a gradient."""

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
    An input gets a gradient if the recording says one flows through it, or if it requires one itself. Returns detached outputs
    in the order of `runnable.output_names`, and what `backward_component` needs. With gradients switched off (evaluation)
    nothing is saved."""
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

    `output_gradients`: per output; None where nothing flowed back. `so_far`: per input the gradient that components executed
    *later* have already contributed; the returned gradient includes it. None (or an entry None) for nothing yet. Returns per
    input the total so far, None for an input without a gradient; possibly the same memory as a gradient given. Raises
    TraceError: if the numbers of gradients do not match the forward. torch refuses a second backward on `saved`.
    """
    so_far = so_far if so_far is not None else (None,) * len(saved.entries)
    roots, gradients = backward_roots(saved, output_gradients, so_far)
    if not roots:
        return tuple(so_far)
    run_backward(roots, gradients)
    return tuple(entry[1].pop() if entry is not None and entry[1] else None for entry in saved.entries)


def _edge(value: Tensor) -> GradientEdge:
    """torch's `get_gradient_edge`, at a third of its cost where an operator of torch made the value."""
    node = value.grad_fn
    if node is None or isinstance(node, _FunctionBase):
        return get_gradient_edge(value)
    return GradientEdge(node, value.output_nr)


def run_backward(roots: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """`torch.autograd.backward` without its own check of shapes: the engine checks them too."""
    Variable._execution_engine.run_backward(
        tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def backward_roots(
    saved: Saved, output_gradients: Sequence[Tensor | None], so_far: Sequence[Tensor | None]
) -> tuple[list[GradientEdge], list[Tensor]]:
    """Where the backward starts, and with what: at the outputs, and at the inputs with what later components contributed.
    Nothing where no gradient came for any output. Raises TraceError if the numbers of gradients do not match the forward."""
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


# A component's backward in two halves: the gradients of its inputs now, those of its parameters later.
#
# The first half runs autograd towards the inputs alone. It records the gradient that arrives at every operator with a
# parameter (`_Frontier`). The second half runs those operators again from there, towards their parameters alone. So neither
# half repeats what lies between operators, and the sum of both is the work of one backward.
#
# If a parameter enters several operators of the component, or an operator hides its use, the second half runs autograd from
# the component's outputs instead. The result is the same, but that repeats the backward through the component.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frontier:
    """An operator that gradients pass on their way to an input, and the parameters that enter it beside that way."""

    node: Any
    parameters: tuple[Tensor, ...]
    arrived: list[tuple[Tensor | None, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardHalf:
    """What the second half needs. `whole`: roots, gradients and parameters where it has to start from the outputs."""

    frontiers: tuple[_Frontier, ...]
    whole: tuple[tuple[GradientEdge, ...], tuple[Tensor, ...], tuple[Tensor, ...]] | None = None


def backward_inputs(
    saved: Saved,
    parameters: Sequence[Tensor],
    output_gradients: Sequence[Tensor | None],
    so_far: Sequence[Tensor | None],
) -> tuple[tuple[Tensor | None, ...], BackwardHalf]:
    """The first half: per input its gradient, as `backward_component` returns it; and what `backward_weights` needs.
    `parameters`: those of the component. `output_gradients`, `so_far`, and errors: as for `backward_component`."""
    roots, gradients = backward_roots(saved, output_gradients, so_far)
    entries = [entry[0] for entry in saved.entries if entry is not None]
    if not roots or not entries:
        return tuple(so_far), BackwardHalf(frontiers=())
    of_outputs = sum(edge is not None and value is not None for edge, value in zip(saved.edges, output_gradients, strict=True))
    starts, given = tuple(roots[:of_outputs]), tuple(gradients[:of_outputs])
    frontiers = _frontiers(starts, [entry.node for entry in entries], parameters)
    hooks = [_note(frontier) for frontier in frontiers or ()]
    arrived = iter(torch.autograd.grad(roots, entries, gradients, retain_graph=True, allow_unused=True))
    for hook in hooks:
        hook.remove()
    inputs = tuple(None if entry is None else next(arrived) for entry in saved.entries)
    if frontiers is None:
        return inputs, BackwardHalf(frontiers=(), whole=(starts, given, tuple(p for p in parameters if p.requires_grad)))
    return inputs, BackwardHalf(frontiers=tuple(frontiers))


def backward_weights(half: BackwardHalf) -> None:
    """The second half: accumulate parameter gradients into `.grad`. The graph is released with `half`."""
    if half.whole is not None:
        roots, gradients, parameters = half.whole
        if parameters and roots:
            torch.autograd.backward(roots, gradients, inputs=parameters)
        return
    for frontier in half.frontiers:
        for arrived in frontier.arrived:
            edges = [(GradientEdge(frontier.node, place), value) for place, value in enumerate(arrived) if value is not None]
            if edges:
                torch.autograd.backward(
                    [edge for edge, _ in edges],
                    [value for _, value in edges],
                    inputs=frontier.parameters,
                    retain_graph=True,
                )


def _note(frontier: _Frontier) -> Any:
    """A hook that notes the gradients which arrive."""
    return frontier.node.register_prehook(frontier.arrived.append)


def _frontiers(roots: Sequence[GradientEdge], entries: Sequence[Any], parameters: Sequence[Tensor]) -> list[_Frontier] | None:
    """Every operator between outputs and inputs that has parameters; None if these cannot be distinguished."""
    towards_input = set(entries)
    below: dict[Any, set[int]] = {}  # parameters that a node off the way to the inputs leads to
    by_id = {id(parameter): parameter for parameter in parameters if parameter.requires_grad}
    entered: list[int] = []
    frontiers: list[_Frontier] = []
    for node in nodes_below([root.node for root in roots]):  # from the leaves to the outputs
        nexts = [following for following, _ in node.next_functions if following is not None]
        if any(following in towards_input for following in nexts):
            towards_input.add(node)
        beside = {number for following in nexts if following not in towards_input for number in below.get(following, ())}
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in by_id:
            beside.add(id(variable))
        if node in towards_input:
            if beside and node not in entries:
                entered += beside
                numbers = sorted(beside)
                frontiers.append(_Frontier(node=node, parameters=tuple(by_id[number] for number in numbers), arrived=[]))
        elif beside:
            below[node] = beside
    reached = all(root.node in towards_input for root in roots)
    return frontiers if reached and sorted(entered) == sorted(by_id) else None


def nodes_below(roots: Sequence[Any]) -> list[Any]:
    """All nodes of autograd's graph below the roots, each after those it leads to."""
    done: dict[Any, None] = {}
    stack = [(root, False) for root in roots]
    while stack:
        node, ready = stack.pop()
        if ready:
            done[node] = None
        elif node not in done:
            stack.append((node, True))
            followers = (following for following, _ in node.next_functions if following is not None)
            stack.extend((following, False) for following in followers if following not in done)
    return list(done)


# Tensors among the arguments and results of operators, and the deaths of their storages.


def tensors_among(values: Iterable[Any]) -> list[Tensor]:
    """Tensors among an operator's arguments or results, in order: themselves, or in lists, tuples and mappings."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += tensors_among(value)
        elif isinstance(value, Mapping):
            tensors += tensors_among(value.values())
    return tensors


class StorageRef(weakref.ref[torch.UntypedStorage]):
    """Tells of the end of a storage, as `weakref.finalize` does in three times the time.
    `key`: the storage's address, as torch names it; another storage may have it later."""

    __slots__ = ("key",)
    key: int

    def __new__(cls, storage: torch.UntypedStorage, ended: Callable[[Any], None]) -> StorageRef:
        """`ended` is called with this object when the storage dies, if this object lives then."""
        ref = super().__new__(cls, storage, ended)
        ref.key = storage._cdata
        return ref
