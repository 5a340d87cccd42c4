"""Ranks launch in one order: then no rank waits for ever, even where a GPU runs one thing after the other.

NCCL asks that all ranks give their communications in one order, over whatever communicators: its kernels wait for data, and
CUDA promises for no two streams that they run at the same time. So the check is the strictest one. Every rank runs all that it
launches, computation too, one by one in the order of its launches. What then ends also ends where streams share a queue of the
device, where NCCL orders its kernels by their launches, and where loading a kernel or freeing memory waits for the device.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from experiments.common.equality import Case
from experiments.common.mixed import random_case
from experiments.one_gpu.fake_peers import HeldStreams, fake_rank, own_part
from parsim.execute import rank_run
from parsim.execute.cuda.streams import CudaStreams
from parsim.execute.rank_run import ProcessGroups
from parsim.execute.runtime import launch_order
from parsim.plans.mesh import Mesh
from parsim.program.lower import lower
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import COMPUTE, Task, rank_tasks
from parsim.work import Collective, Mix, OptimizerStep, SendRecv
from tests.execute.interpreted import CPU, planned
from tests.execute.small_plans import GPT, MLP, VIT, case
from tests.execute.test_cuda_races import PLANS, relaxed
from tests.virtual_cuda import VirtualDriver

MORE = {
    "gather ahead": lambda: gathered_ahead(case(VIT, Mesh(dp=2), zero_stage=1)),
    "zero 2 in a pipeline": partial(case, GPT, Mesh(pp=2, dp=2), microbatches=4, zero_stage=2),
    "zero 3 in a pipeline": partial(case, GPT, Mesh(pp=2, dp=2), microbatches=4, zero_stage=3),
    "four stages": partial(case, GPT, Mesh(pp=4), microbatches=4),
    "four stages, gpipe": partial(case, GPT, Mesh(pp=4), microbatches=4, order="gpipe"),
    "four stages, zero-bubble": partial(case, VIT, Mesh(pp=4), microbatches=4, order="zero-bubble"),
}


def gathered_ahead(of: Case) -> Case:
    return replace(of, plan=replace(of.plan, gather_ahead=True))


ROUNDS = ("average/1", "gossip/1 ring", "gossip/1 complete", "gossip/1 one_peer_exponential", "merge/1")
RELAXED = {text: partial(relaxed, text, MLP, Mesh(dp=4)) for text in ROUNDS}
RELAXED["average/1 in a pipeline"] = partial(relaxed, "average/1", GPT, Mesh(dp=2, pp=2), microbatches=2)
RELAXED["gossip/1 in a pipeline"] = partial(relaxed, "gossip/1 ring", GPT, Mesh(dp=2, pp=2), microbatches=2)
RELAXED["stale"] = partial(relaxed, "stale", MLP, Mesh(pp=3))
EVERY: Mapping[str, Callable[[], Case]] = {**PLANS, **MORE, **RELAXED}

Order = Sequence[tuple[str, int]]
"""What a rank launches: tasks by number, and "agree" where all ranks agree on the scale of the loss."""


class LoggedStreams(CudaStreams[Any, Any]):
    """Attributes: launched: tasks in the order in which the host launched them."""

    def __init__(self) -> None:
        super().__init__(VirtualDriver())
        self.launched: list[int] = []

    def _launch(self, task: int, stream: str, operation: Any, on: Any) -> Any:
        self.launched.append(task)
        return super()._launch(task, stream, operation, on)


def launched(of: Case, rank: int, steps: int) -> list[list[int]]:
    """The tasks of every step of a rank, as it launches them."""
    streams, found = LoggedStreams(), []
    with fake_rank(planned(of), rank, streams, CPU, torch.clone) as (_, program, loader):
        for step in range(steps):
            streams.launched = []
            number, stale = step, program._stale
            if stale is not None:
                stale.begin_step(step)
                number = max(0, stale.batch_of(step))
            program.step(loader.batch(number), script=program.script(step))
            found.append(streams.launched)
    return found


def with_agreement(order: Sequence[int], tasks: Sequence[Task]) -> Order:
    """A rank with a scaled loss agrees with all others right in its first optimizer step, or else at the end of its step."""
    found: list[tuple[str, int]] = []
    agreed = False
    for index in order:
        if isinstance(tasks[index].work, OptimizerStep) and not agreed:
            found.append(("agree", 0))
            agreed = True
        found.append(("task", index))
    return found if agreed else [*found, ("agree", 0)]


def stuck(orders: Sequence[Order], members: Mapping[tuple[str, int], Sequence[int]]) -> dict[int, tuple[str, int]]:
    """Per rank what it never gets past, if each runs its own order one by one.

    Args:
        members: the ranks of what several ranks do together.
    """
    place = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(orders):
            while place[rank] < len(own):
                head = own[place[rank]]
                together = members.get(head, (rank,))
                if any(place[other] == len(orders[other]) or orders[other][place[other]] != head for other in together):
                    break
                for other in together:
                    place[other] += 1
                moved = True
    return {rank: own[place[rank]] for rank, own in enumerate(orders) if place[rank] < len(own)}


def members_of(tasks: Sequence[Task], world_size: int) -> dict[tuple[str, int], Sequence[int]]:
    together = {("task", task.index): task.ranks for task in tasks if isinstance(task.work, Collective | SendRecv)}
    return {**together, ("agree", 0): range(world_size)}


def check(of: Case, steps: int = 1) -> None:
    world_size = of.plan.world_size
    mixes = of.plan.synchronisation.mixes
    every = [launched(of, rank, steps) for rank in range(world_size)]
    for step in range(steps):
        tasks = lower(of.plan, of.model, mixing_round=step if mixes else 0).tasks
        members = members_of(tasks, world_size)
        orders = [with_agreement(own[step], tasks) for own in every]
        if of.plan.synchronisation.kind != "stale":  # whose stages fill one by one
            assert sum(map(len, orders)) == sum(len(task.ranks) for task in tasks) + world_size
        assert stuck(orders, members) == {}


def test_the_check_finds_ranks_that_wait_for_one_another() -> None:
    a, b, own = ("task", 0), ("task", 1), ("task", 2)
    members = {a: (0, 1), b: (0, 1)}
    assert stuck([[a, own, b], [a, b]], members) == {}
    assert stuck([[a, b], [b, a]], members) == {0: a, 1: b}
    assert stuck([[a, b], [a]], members) == {0: b}


def orders_of(of: Case) -> tuple[list[Order], dict[tuple[str, int], Sequence[int]], Sequence[Task]]:
    """Of every rank in its first step; who does what together; and all tasks."""
    tasks, world_size = lower(of.plan, of.model).tasks, of.plan.world_size
    orders = [with_agreement(launched(of, rank, 1)[0], tasks) for rank in range(world_size)]
    return orders, members_of(tasks, world_size), tasks


@pytest.mark.parametrize("name", ["dp", "zero 3", "1f1b", "four stages"])
def test_a_planted_wrong_order_is_found(name: str) -> None:
    """One rank communicates before what it does right before with the same ranks."""
    orders, members, _ = orders_of(EVERY[name]())
    first = orders[0]
    shared = [place for place, head in enumerate(first) if head in members]
    planted = [(a, b) for a, b in itertools.pairwise(shared) if members[first[a]] == members[first[b]]]
    assert planted
    for earlier, later in planted:
        wrong = [*first[:earlier], first[later], *first[earlier:later], *first[later + 1 :]]
        assert stuck([wrong, *orders[1:]], members), f"{first[later]} before {first[earlier]}"


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble"])
def test_a_message_that_is_asked_for_before_its_sender_can_begin_is_found(name: str) -> None:
    """A stage that asks for its first gradient before it has sent a value: streams that run at the same time hide it."""
    orders, members, tasks = orders_of(EVERY[name]())
    first = orders[0]
    asked = next(place for place, (_, index) in enumerate(first) if tasks[index].origin.gradient and first[place] in members)
    assert isinstance(tasks[first[asked][1]].work, SendRecv)
    assert stuck([[first[asked], *first[:asked], *first[asked + 1 :]], *orders[1:]], members)


@pytest.mark.parametrize("name", EVERY)
def test_no_rank_of_a_plan_waits_for_ever(name: str) -> None:
    check(EVERY[name](), steps=8 if name == "stale" else 3 if name in RELAXED else 1)


def test_a_round_is_among_what_is_checked() -> None:
    of = RELAXED["gossip/1 ring"]()
    tasks = lower(of.plan, of.model, mixing_round=0).tasks
    launches = launched(of, 0, 1)[0]
    assert any(isinstance(tasks[index].work, Mix) for index in launches)
    assert any(isinstance(tasks[index].work, SendRecv) for index in launches)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("processes", [2, 4])
def test_no_rank_of_a_mixed_plan_waits_for_ever(seed: int, processes: int) -> None:
    """Tensor parallelism with other axes, conversions, ZeRO and recomputation, drawn at random."""
    rng = random.Random(1000 * processes + seed)
    check(random_case(rng.choice(["mlp", "vit_small", "gpt_small"]), processes, rng))


@pytest.mark.parametrize("name", EVERY)
def test_a_communication_is_launched_early(name: str) -> None:
    """Right behind what it waits for on its rank, or at most two computations later: a host that is slow delays it by no more.

    A receive waits for its sender besides.
    """
    of = EVERY[name]()
    layout = PlanIndex(of.plan, of.model)
    graph = lower(of.plan, of.model, layout)
    order = launch_order(graph, layout)
    for rank in range(of.plan.world_size):
        stream_of = {task.index: stream for task, stream, _ in rank_tasks(graph, rank)}
        mine = [index for index in order if index in stream_of]
        place = {index: number for number, index in enumerate(mine)}
        last: dict[str, int] = {}
        for index in mine:
            task, stream = graph.tasks[index], stream_of[index]
            received = isinstance(task.work, SendRecv) and task.work.destination == rank
            if isinstance(task.work, Collective | SendRecv) and not received:
                before = [place[other] for other in task.dependencies if other in place]
                between = mine[max([*before, last.get(stream, -1)], default=-1) + 1 : place[index]]
                assert sum(stream_of[other] == COMPUTE for other in between) <= 2
            last[stream] = place[index]


# The first transfer over a link of an NCCL group waits on the host for its peer, whatever stream it is given. A rank that
# asks for a message before it computes would then wait for a peer that waits for it. So links are opened when the groups
# are made, in one order on all ranks.

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


def stuck_links(calls: list[list[Link]]) -> dict[int, Link]:
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


def test_the_check_of_links_finds_ranks_that_wait() -> None:
    there, back = ("there", 0, 1), ("back", 1, 0)
    assert stuck_links([[back, there], [there, back]]) == {0: back, 1: there}
    assert stuck_links([[there, back, back, there], [there, back, there, back]]) == {}


@pytest.mark.parametrize("name", CHAINS)
def test_no_rank_waits_for_ever_in_its_first_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = range(PLANS[name]().plan.world_size)
    calls = [calls_of(name, rank, monkeypatch) for rank in ranks]
    assert any(calls), "ranks of a pipeline send to one another"
    assert stuck_links(calls) == {}
