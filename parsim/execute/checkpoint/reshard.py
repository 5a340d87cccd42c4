"""Moving a training from one plan to another on the same processes, without files.

Parameter by parameter, the first rank that holds a piece broadcasts it with its optimizer state, unless every rank has all
it will need. Each rank assembles the whole and keeps its part under the new plan. So beside what both plans hold, a rank has
one whole parameter with its state at a time. Running statistics follow in the same way, all at once, because they are small. A
rank keeps its own. If it had none, or the new plan cuts the channels differently, it takes those of the lowest rank.
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
    """Give `new` the weights, buffers, optimizer state and loss scale of `old`. Every rank calls it at once, between steps."""
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
        parts: dict[Fragment, Tensor] = _collect(holders, state.buffers.get(name), old.device)
        if name in state.buffers:
            parts[state.fragments["buffers"].get(name, WHOLE)] = state.buffers[name]
        buffers[name] = join(name, parts)
    new.load_buffers(buffers)
    new.finish_loading()
    new.loss_scale = old.loss_scale


def _moved(old: PlanIndex, new: PlanIndex) -> set[str]:
    """The parameters that some rank needs under the new plan and does not hold, whole and with all of its state, under the old.
    From data parallelism to a pipeline that is none: nothing has to be sent, over a link that may be why the plan changes."""
    if old.plan.zero_stage or old.plan.synchronisation.is_relaxed:
        return {parameter.name for parameter in old.model.parameters}
    moved: set[str] = set()
    for rank in range(new.plan.world_size):
        undivided = {parameter.name for parameter in old.rank_parameters(rank) if parameter.part is None}
        moved |= {parameter.name for parameter in new.rank_parameters(rank)} - undivided
    return moved


def whole_weights(stage: StageReplica, *, averaged: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All weights and buffers of the model, whole, on every rank; of running statistics those of the lowest rank. Every rank
    calls it at once, between two steps. Where each has all weights anyway, only buffers are sent. averaged: the moving averages
    instead."""
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
    sections = {
        section: {
            name: (state.fragments[section].get(name, WHOLE), _encoded(value))
            for name, value in getattr(state, section).items()
        }
        for section in ("weights", "buffers", "optimizer")
    }
    merged: dict[str, dict[str, _Holders]] = {section: {} for section in sections}
    for rank, held in enumerate(gather_values(sections)):
        for section, names in held.items():
            for name, (fragment, content) in names.items():
                merged[section].setdefault(name, {}).setdefault(fragment_from(fragment), _Holder(rank, _decoded(content)))
    return merged


def _encoded(value: Any, key: str = "") -> list[Any]:
    """A tensor that will be sent, a step counter, or the state of a parameter as plain values, with what it is before it."""
    match value:
        case Mapping():
            return ["state", {name: _encoded(entry, name) for name, entry in value.items()}]
        case Tensor():
            dtype = str(value.dtype).removeprefix("torch.")
            return ["kind", value.shape, dtype] if is_per_element(value, key) else ["tensor", value.tolist(), dtype]
    return ["value", value]


def _decoded(content: list[Any]) -> Any:
    match content:
        case ["kind", shape, str() as dtype]:
            return _Kind(tuple(shape), getattr(torch, dtype))
        case ["tensor", value, str() as dtype]:
            return torch.tensor(value, dtype=getattr(torch, dtype))
        case ["state", dict() as entries]:
            return {key: _decoded(entry) for key, entry in entries.items()}
    return content[1]


def _collect(holders: Mapping[Fragment, _Holder], held: Any, device: torch.device) -> dict[Fragment, Any]:
    """Every fragment, sent by its holder, which has `held`, to all ranks; arrays on `device`, step counters where they were."""
    collected: dict[Fragment, Any] = {}
    for fragment, (rank, content) in holders.items():
        source = held if rank == dist.get_rank() else None
        if isinstance(content, _Kind):
            collected[fragment] = _sent(content, source, rank, device)
        else:
            collected[fragment] = {
                key: _sent(kind, None if source is None else source[key], rank, device) if isinstance(kind, _Kind) else kind
                for key, kind in content.items()
            }
    return collected


def _sent(kind: _Kind, source: Tensor | None, rank: int, device: torch.device) -> Tensor:
    if source is None:
        tensor = torch.empty(kind.shape, dtype=kind.dtype, device=device)
    else:
        tensor = source.detach().to(device, copy=True, memory_format=torch.contiguous_format)
    with pulse().waiting():
        dist.broadcast(tensor, rank)
    return tensor
