"""Moving a training from one plan to another on the same processes, without files.

Parameter by parameter, the first rank that holds a piece broadcasts it with its optimizer state, unless every rank has all
it will need. Each rank assembles the
whole and keeps its part under the new plan. So beside what both plans hold, a rank has one whole parameter with its state
at a time. Running statistics follow in the same way, all at once, because they are small. A rank keeps its own. If it had
none, or the new plan cuts the channels differently, it takes those of the lowest rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parsim.execute.checkpoint.checkpoint import RankState
from parsim.execute.checkpoint.fragments import WHOLE, Fragment, fragment_from, is_per_element, join, join_state
from parsim.execute.optimizer import averaged_state
from parsim.execute.processes.exchange import gather_values
from parsim.execute.processes.heartbeat import pulse
from parsim.execute.stage import StageReplica
from parsim.program.placed import PlanIndex


def reshard(old: StageReplica, new: StageReplica) -> None:
    """Give `new` the weights, buffers, optimizer state and loss scale of `old`.

    Every rank calls it at once, between two steps.
    """
    state = old.state()
    catalogue = _catalogue(state)
    moved = _moved(old.layout, new.layout)
    for name in [parameter.name for parameter in old.layout.model.parameters]:
        if name not in moved:
            if name in new.parameters:
                new.load_parameter(name, *old.held_state(name))
            continue
        weights = _collect(catalogue["weights"].get(name, {}), state.weights.get(name), old.device)
        moments = _collect(catalogue["optimizer"].get(name, {}), state.optimizer.get(name), old.device)
        if name in new.parameters:
            new.load_parameter(name, join(name, weights), join_state(name, moments) if moments else {})
        del weights, moments
    buffers: dict[str, Tensor] = {}
    for name, holders in catalogue["buffers"].items():
        found: dict[Fragment, Tensor] = _collect(holders, state.buffers.get(name), old.device)
        own = state.fragments["buffers"].get(name, WHOLE)
        if name in state.buffers:
            found[own] = state.buffers[name]
        buffers[name] = join(name, found)
    new.load_buffers(buffers)
    new.finish_loading()
    new.loss_scale = old.loss_scale


def _moved(old: PlanIndex, new: PlanIndex) -> set[str]:
    """The parameters that some rank needs under the new plan and does not hold, whole and with all of its state, under the old.

    From data parallelism to a pipeline that is none: nothing has to be sent, over a link that may be why the plan changes.
    """
    if old.plan.zero_stage or old.plan.synchronisation.is_relaxed:
        return {parameter.name for parameter in old.model.parameters}
    found: set[str] = set()
    for rank in range(new.plan.world_size):
        whole = {parameter.name for parameter in old.rank_parameters(rank) if parameter.part is None}
        found |= {parameter.name for parameter in new.rank_parameters(rank)} - whole
    return found


def whole_weights(stage: StageReplica, *, averaged: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All weights and buffers of the model, whole, on every rank; of running statistics those of the lowest rank.

    Every rank calls it at once, between two steps. Where each has all weights anyway, only buffers are sent.

    Args:
        averaged: take the moving averages of the weights instead (`weight_averages`).
    """
    state = stage.state()
    if averaged:
        trained = {parameter.name for parameter in stage.layout.model.parameters if parameter.trainable}
        state = averaged_state(state, trained)
    catalogue = _catalogue(state)
    plan = stage.layout.plan
    weights: dict[str, Tensor] = {}
    if plan.mesh.dp == plan.world_size and plan.zero_stage < 3 and not averaged:
        weights = {name: parameter.data for name, parameter in stage.parameters.items()}
    else:
        for name, holders in catalogue["weights"].items():
            weights[name] = join(name, _collect(holders, state.weights.get(name), stage.device))
    buffers = {
        name: join(name, _collect(holders, state.buffers.get(name), stage.device))
        for name, holders in catalogue["buffers"].items()
    }
    return weights, buffers


class _Kind(NamedTuple):
    """Stands in the catalogue for a tensor that its holder will send."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Holder(NamedTuple):
    """The rank that sends a fragment, and its kind: a _Kind; for optimizer state a dict of kinds and step counters."""

    rank: int
    content: Any


_Holders = dict[Fragment, _Holder]


def _catalogue(state: RankState) -> dict[str, dict[str, _Holders]]:
    """Who sends what: by section and name, the same on every rank."""
    own = {
        section: {
            name: (state.fragments[section].get(name, WHOLE), _encoded(_described(value)))
            for name, value in getattr(state, section).items()
        }
        for section in ("weights", "buffers", "optimizer")
    }
    everyone = gather_values(own)
    merged: dict[str, dict[str, _Holders]] = {"weights": {}, "buffers": {}, "optimizer": {}}
    for rank, sections in enumerate(everyone):
        for section, names in sections.items():
            for name, (given, content) in names.items():
                fragment = fragment_from(given)
                merged[section].setdefault(name, {}).setdefault(fragment, _Holder(rank, _decoded(content)))
    return merged


def _encoded(content: Any) -> list[Any]:
    """A kind, a step counter or a dict of both as a plain value, with what it is before it."""
    match content:
        case _Kind():
            return ["kind", content.shape, str(content.dtype).removeprefix("torch.")]
        case Tensor():
            return ["tensor", content.tolist(), str(content.dtype).removeprefix("torch.")]
        case dict():
            return ["state", {key: _encoded(entry) for key, entry in content.items()}]
    return ["value", content]


def _decoded(content: list[Any]) -> Any:
    match content:
        case ["kind", shape, str() as dtype]:
            return _Kind(tuple(shape), _dtype(dtype))
        case ["tensor", value, str() as dtype]:
            return torch.tensor(value, dtype=_dtype(dtype))
        case ["state", dict() as entries]:
            return {key: _decoded(entry) for key, entry in entries.items()}
    return content[1]


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def _collect(holders: Mapping[Fragment, _Holder], own: Any, device: torch.device) -> dict[Fragment, Any]:
    """Every fragment, sent by its holder to all ranks; arrays on `device`, step counters where they were."""
    found: dict[Fragment, Any] = {}
    for fragment, holder in holders.items():
        given = own if holder.rank == dist.get_rank() else None
        if isinstance(holder.content, _Kind):
            found[fragment] = _sent(holder.content, given, holder.rank, device)
        else:
            found[fragment] = {
                key: _sent(content, None if given is None else given[key], holder.rank, device)
                if isinstance(content, _Kind)
                else content
                for key, content in holder.content.items()
            }
    return found


def _sent(kind: _Kind, given: Tensor | None, holder: int, device: torch.device) -> Tensor:
    """A copy on every rank of what its holder has."""
    if given is None:
        tensor = torch.empty(kind.shape, dtype=kind.dtype, device=device)
    else:
        tensor = given.detach().to(device, copy=True, memory_format=torch.contiguous_format)
    with pulse().waiting():
        dist.broadcast(tensor, holder)
    return tensor


def _described(value: Tensor | Mapping[str, Any]) -> Any:
    """What stands in the catalogue for a tensor, or for the state of a parameter."""
    if isinstance(value, Tensor):
        return _Kind(tuple(value.shape), value.dtype)
    return {key: _described(entry) if is_per_element(entry, key) else entry for key, entry in value.items()}
