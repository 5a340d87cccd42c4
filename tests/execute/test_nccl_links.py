"""The first transfer over a link of an NCCL group waits on the host for its peer, whatever stream it is given.

A rank that asks for a message before it computes would then wait for a peer that waits for it. So links are opened when the
groups are made, in one order on all ranks.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from experiments.one_gpu.fake_peers import HeldStreams, fake_rank, own_part
from parsim.execute import rank_run
from parsim.execute.rank_run import ProcessGroups
from tests.execute.interpreted import CPU, planned
from tests.execute.test_cuda_races import PLANS
from tests.virtual_cuda import VirtualDriver

Link = tuple[Any, int, int]
"""Stream with its ranks, source, destination."""

CHAINS = [name for name, case in PLANS.items() if case.args[1].pp > 1]


def calls_of(name: str, rank: int, patch: pytest.MonkeyPatch) -> list[Link]:
    """The transfers of a rank in the order in which its host asks NCCL for them: as groups are made, and in its first step."""
    run = planned(PLANS[name]())
    calls: list[Link] = []
    streams = HeldStreams(VirtualDriver())
    with fake_rank(run, rank, streams, CPU, torch.clone) as (graph, program, loader):
        groups = program._communicating._groups
        stream_of = {id(group): stream for stream, group in groups.items()}
        _, numbers = own_part(graph, rank)
        streams.takes_s = dict.fromkeys(numbers, 1e-3)
        mine = {stream: group for stream, group in groups.items() if rank in stream[1]}
        patch.setattr(dist, "send", lambda _, to, group: calls.append((stream_of[id(group)], rank, to)))
        patch.setattr(dist, "recv", lambda _, source, group: calls.append((stream_of[id(group)], source, rank)))
        patch.setattr(dist, "get_backend", lambda: "nccl")
        patch.setattr(rank_run, "make_groups", lambda *_, **__: mine)
        patch.setattr(rank_run, "default_device", lambda: CPU)
        ProcessGroups(1.0).make(graph, "fp32")
        program.step(loader.batch(0))
        patch.undo()
    return calls


def stuck(calls: list[list[Link]]) -> dict[int, Link]:
    """Per rank the call in which its host waits for ever, where the first call over a link waits for the other end."""
    place, opened = [0] * len(calls), Counter[Link]()
    asked: set[tuple[Link, int]] = set()
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(calls):
            while place[rank] < len(own):
                link = own[place[rank]]
                asked.add((link, rank))
                if not opened[link] and not {(link, link[1]), (link, link[2])} <= asked:
                    break
                opened[link] += 1
                place[rank] += 1
                moved = True
    return {rank: own[place[rank]] for rank, own in enumerate(calls) if place[rank] < len(own)}


def test_the_check_finds_ranks_that_wait_for_one_another() -> None:
    there, back = ("there", 0, 1), ("back", 1, 0)
    assert stuck([[back, there], [there, back]]) == {0: back, 1: there}
    assert stuck([[there, back, back, there], [there, back, there, back]]) == {}


@pytest.mark.parametrize("name", CHAINS)
def test_no_rank_waits_for_ever_in_its_first_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = range(PLANS[name]().plan.world_size)
    calls = [calls_of(name, rank, monkeypatch) for rank in ranks]
    assert any(calls), "ranks of a pipeline send to one another"
    assert stuck(calls) == {}
