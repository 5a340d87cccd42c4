"""A component's backward in two halves: the gradients of its inputs now, those of its parameters later.

The first half runs autograd towards the inputs alone. It records the gradient that arrives at every operator with a
parameter (`_Frontier`). The second half runs those operators again from there, towards their parameters alone. So neither
half repeats what lies between operators, and the sum of both is the work of one backward.

If a parameter enters several operators of the component, or an operator hides its use, the second half runs autograd from
the component's outputs instead. The result is the same, but that repeats the backward through the component.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from parsim.model.autograd.cut import Saved, backward_roots


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

    Args:
        parameters: those of the component. output_gradients, so_far: as for `backward_component`.

    Raises: TraceError as `backward_component` does.
    """
    roots, gradients = backward_roots(saved, output_gradients, so_far)
    entries = [entry for entry in saved.entries if entry is not None]
    if not roots or not entries:
        return tuple(so_far), BackwardHalf(frontiers=())
    own = [
        (edge, given)
        for edge, given in zip(saved.edges, output_gradients, strict=True)
        if edge is not None and given is not None
    ]
    starts, given = tuple(edge for edge, _ in own), tuple(gradient for _, gradient in own)
    frontiers = _frontiers(starts, [entry[0].node for entry in entries], parameters)
    hooks = [_note(frontier) for frontier in frontiers or ()]
    found = torch.autograd.grad(roots, [entry[0] for entry in entries], gradients, retain_graph=True, allow_unused=True)
    for hook in hooks:
        hook.remove()
    arrived = iter(found)
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
    return frontier.node.register_prehook(lambda gradients: frontier.arrived.append(gradients))


def _frontiers(roots: Sequence[GradientEdge], entries: Sequence[Any], parameters: Sequence[Tensor]) -> list[_Frontier] | None:
    """Every operator between outputs and inputs that has parameters; None if these cannot be distinguished."""
    order = nodes_below([root.node for root in roots])
    towards_input = set(entries)
    below: dict[Any, set[int]] = {}  # parameters that a node off the way to the inputs leads to
    by_id = {id(parameter): parameter for parameter in parameters if parameter.requires_grad}
    entered: dict[int, int] = {}
    frontiers: list[_Frontier] = []
    for node in order:  # from the leaves to the outputs
        nexts = [entry for entry, _ in node.next_functions if entry is not None]
        if node not in towards_input and any(entry in towards_input for entry in nexts):
            towards_input.add(node)
        beside = {number for entry in nexts if entry not in towards_input for number in below.get(entry, ())}
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in by_id:
            beside.add(id(variable))
        if node in towards_input:
            if beside and node not in entries:
                for number in beside:
                    entered[number] = entered.get(number, 0) + 1
                own = tuple(by_id[number] for number in sorted(beside))
                frontiers.append(_Frontier(node=node, parameters=own, arrived=[]))
        elif beside:
            below[node] = beside
    reached = all(root.node in towards_input for root in roots)
    once = set(entered) == set(by_id) and all(count == 1 for count in entered.values())
    return frontiers if reached and once else None


def nodes_below(roots: Sequence[Any]) -> list[Any]:
    """All nodes of a graph below the roots, each after those it leads to.

    Args:
        roots: nodes of autograd.
    """
    done: dict[Any, None] = {}
    stack = [(root, False) for root in roots]
    while stack:
        node, ready = stack.pop()
        if ready:
            done[node] = None
        elif node not in done:
            stack.append((node, True))
            stack.extend((entry, False) for entry, _ in node.next_functions if entry is not None and entry not in done)
    return list(done)
