"""Moving a training from one plan to another on the same processes, without files.

Parameter by parameter, every rank that is the first to hold a piece broadcasts it with its optimizer state; the whole is put
together on each rank, which keeps its part under the new plan. So at most one whole parameter (and its state) is held twice.
Running statistics follow the same way; where the new plan divides samples otherwise, a rank takes those of the first replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from parsim.execute.checkpoint import RankState
from parsim.execute.fragments import WHOLE, Fragment, join, join_state
from parsim.execute.stage import StageReplica


def reshard(old: StageReplica, new: StageReplica) -> None:
    """Give `new` the weights, buffers and optimizer state of `old`. Every rank calls it at once, between two steps."""
    state = old.state()
    catalogue = _catalogue(state)
    for name in [parameter.name for parameter in old.layout.model.parameters]:
        weights = _collect(catalogue["weights"].get(name, {}), state.weights.get(name))
        moments = _collect(catalogue["optimizer"].get(name, {}), state.optimizer.get(name))
        if name in new.parameters:
            new.load_parameter(name, join(name, weights), join_state(name, moments) if moments else {})
        del weights, moments
    buffers: dict[str, Tensor] = {}
    for name, holders in catalogue["buffers"].items():
        found: dict[Fragment, Tensor] = _collect(holders, state.buffers.get(name))
        own = state.fragments["buffers"].get(name, WHOLE)
        if name in state.buffers:
            found[own] = state.buffers[name]
        buffers[name] = join(name, found)
    new.load_buffers(buffers)
    new.finish_loading()


_Holders = dict[Fragment, int]
"""Fragment of a tensor -> the rank that sends it."""


def _catalogue(state: RankState) -> dict[str, dict[str, _Holders]]:
    """Who sends what: by section and name, the same on every rank."""
    own = {
        section: {name: state.fragments[section].get(name, WHOLE) for name in getattr(state, section)}
        for section in ("weights", "buffers", "optimizer")
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    merged: dict[str, dict[str, _Holders]] = {"weights": {}, "buffers": {}, "optimizer": {}}
    for rank, sections in enumerate(everyone):
        for section, names in sections.items():
            for name, fragment in names.items():
                merged[section].setdefault(name, {}).setdefault(fragment, rank)
    return merged


def _collect(holders: Mapping[Fragment, int], own: Any) -> dict[Fragment, Any]:
    """Every fragment, sent by its holder to all ranks."""
    found = {}
    for fragment, rank in holders.items():
        sent = [_detached(own) if dist.get_rank() == rank else None]
        dist.broadcast_object_list(sent, src=rank)
        found[fragment] = sent[0]
    return found


def _detached(value: Any) -> Any:
    """CPU copies: a view sent as it is would carry the whole flat array it looks into."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    return {key: _detached(entry) for key, entry in value.items()} if isinstance(value, Mapping) else value
