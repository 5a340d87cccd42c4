"""Pipeline orders against the action lists of torch's own schedules (torch 2.13.0)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from parsim.engines import static
from parsim.errors import PlanError
from parsim.plans.pipeline import PIPELINE_ORDERS, check_torch_schedule, in_flight, pipeline_actions
from tests.theory.test_engines import durations_s, pipeline_graph

pytestmark = pytest.mark.real

RANKS = (2, 3, 4, 5, 6, 8, 12, 16)
MICROBATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16, 24, 32, 48, 64)
FORWARD_S, BACKWARD_S, WEIGHT_S = 1.0, 2.0, 1.0
"""Of one stage and microbatch; a whole backward, and its half for weights."""

LISTS = """
import itertools, json, re, sys
import torch
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping

ORDERS = {"gpipe": ("ScheduleGPipe", (1,)), "1f1b": ("Schedule1F1B", (1,)),
          "interleaved": ("ScheduleInterleaved1F1B", (1, 2, 3, 4)),
          "zero-bubble": ("ScheduleInterleavedZeroBubble", (1, 2, 3, 4)), "zero-bubble-v": ("ScheduleZBVZeroBubble", (2,)),
          "dualpipe-v": ("ScheduleDualPipeV", (2,))}
ranks_asked, microbatches_asked = json.loads(sys.argv[1]), json.loads(sys.argv[2])
seconds = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
schedules.PipelineScheduleMulti._prepare_schedule_with_comms = lambda *a, **k: None
schedules._PipelineScheduleRuntime._prepare_schedule_with_comms = lambda *a, **k: None

class Numbers(_PipelineStageBase):
    def __init__(self, stage, ranks, chunks):
        self.stage_index, self.num_stages, self.group_size, self.group_rank = stage, ranks * chunks, ranks, 0
        self.has_backward, self.device, self.submod = False, None, None
        self.stage_index_to_group_rank = {}
Numbers.__abstractmethods__ = frozenset()

def makespan(lists, stages):
    '''Every action as soon as its rank is free and what it needs has ended.'''
    ended, free, reached = {}, [0.0] * len(lists), [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(lists):
            while reached[rank] < len(own):
                stage, phase, number = own[reached[rank]]
                if phase == "F":
                    needs = [(stage - 1, "F", number)] if stage else []
                elif phase == "W":
                    needs = [(stage, "I", number)]
                else:
                    needs = [(stage, "F", number)] + ([(stage + 1, phase, number)] if stage + 1 < stages else [])
                if any(need not in ended for need in needs):
                    break
                start = max([free[rank], *(ended[need] for need in needs)])
                free[rank] = ended[stage, phase, number] = start + seconds[phase]
                reached[rank] += 1
                moved = True
    assert all(count == len(own) for count, own in zip(reached, lists))
    return max(free)

found = []
for order, (name, every) in ORDERS.items():
    kind = getattr(schedules, name)
    for ranks, microbatches, chunks in itertools.product(ranks_asked, microbatches_asked, every):
        style = "v" if order.endswith("-v") else "loop"
        stages = generate_rank_to_stage_mapping(ranks, ranks * chunks, style=style)[0]
        own = [Numbers(stage, ranks, chunks) for stage in stages]
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        try:
            made = kind(own[0] if single else own, microbatches)
        except ValueError as error:
            found.append({"key": [order, ranks, microbatches, chunks], "refused": str(error)})
            continue
        listed = made.pipeline_order
        printed = [" ".join(str(action) for action in listed[rank] if action is not None) for rank in range(ranks)]
        texts = [re.findall(r"(\\d+)([FBIW])(\\d+)", own) for own in printed]
        lists = [[(int(stage), phase, int(number)) for stage, phase, number in own] for own in texts]
        if order == "1f1b":  # its list numbers the forwards of the last stage from 1, and it runs them from 0
            lists[-1] = [(stage, phase, number - (phase == "F")) for stage, phase, number in lists[-1]]
        if style == "v" and order == "dualpipe-v":
            halves = {"B": "IW"}
            lists = [[(s, half, n) for s, p, n in own for half in halves.get(p, p)] for own in lists]
        held = []
        for own in lists:
            now = most = 0
            for _, phase, _ in own:
                now += {"F": 1, "I": 0}.get(phase, -1)
                most = max(most, now)
            held.append(most)
        found.append({"key": [order, ranks, microbatches, chunks], "held": held, "makespan": makespan(lists, ranks * chunks),
                      "actions": [" ".join(f"{s}{p}{n}" for s, p, n in own) for own in lists]})
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def listed(run_script: Any) -> list[dict[str, Any]]:
    return list(run_script(LISTS, list(RANKS), list(MICROBATCHES)))


def test_every_order_is_asked_for(listed: list[dict[str, Any]]) -> None:
    assert {row["key"][0] for row in listed} == set(PIPELINE_ORDERS)
    assert sum("held" in row for row in listed) > 1000


def test_torch_refuses_what_the_rule_refuses(listed: list[dict[str, Any]]) -> None:
    """torch 2.13: interleaved schedules refuse uneven rounds also with one stage per rank, which parsim runs without
    rounds."""
    for row in listed:
        order, ranks, microbatches, chunks = row["key"]
        if "refused" in row:
            with pytest.raises(PlanError):
                check_torch_schedule(order, ranks, microbatches, chunks)
        else:
            check_torch_schedule(order, ranks, microbatches, chunks)


def test_actions_and_memory_in_flight_are_torchs(listed: list[dict[str, Any]]) -> None:
    """torch 2.13: actions and memory in flight of all six schedules, on 2 to 16 ranks with 1 to 4 chunks and up to 64
    microbatches. A pair of DualPipeV counts as its two actions."""
    for row in listed:
        if "refused" in row:
            continue
        order, ranks, microbatches, chunks = row["key"]
        own = [" ".join(map(str, pipeline_actions(order, rank, ranks, microbatches, chunks))) for rank in range(ranks)]
        assert own == row["actions"], row["key"]
        assert [in_flight(order, rank, ranks, microbatches, chunks) for rank in range(ranks)] == row["held"], row["key"]


def test_makespans_are_those_of_torchs_lists(listed: list[dict[str, Any]]) -> None:
    """torch 2.13: lists of schedules replayed at a forward of 1 s and a backward of 2 s, half of it for weights, take as long
    as parsim's graphs."""
    for row in listed:
        order, ranks, microbatches, chunks = row["key"]
        if "refused" in row or ranks * microbatches * chunks > 512:
            continue
        graph = pipeline_graph(ranks, microbatches, order, chunks=chunks, weights=True)
        seconds = durations_s(graph, FORWARD_S, BACKWARD_S, 0.0, WEIGHT_S)
        assert float(np.max(static.step_times_s(graph, seconds[None]))) == pytest.approx(row["makespan"], rel=1e-9), row["key"]
