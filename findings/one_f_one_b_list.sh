#!/usr/bin/env bash
# torch's Schedule1F1B keeps a list of its actions (`pipeline_order`) that it does not run: on the last rank the list numbers
# the forwards from 1 to M, so microbatch 0 is missing and there is one too many. The step runs 0 to M - 1. A tool that draws or
# checks pipelines by the list sees a forward after its backward. The other schedules list what they run.
# Guess before the run: the list of every schedule holds each microbatch's forward and backward once.
# Seen (Python 3.11, torch 2.13.0 CPU, 2 ranks, 4 microbatches), forwards and backwards of the last rank:
#   Schedule1F1B F [1, 2, 3, 4] B [0, 1, 2, 3]   ScheduleGPipe F [0, 1, 2, 3] B [0, 1, 2, 3]
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy==2.4.1
cat > listed.py <<'P'
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
for kind in (Schedule1F1B, ScheduleGPipe):
    stage = PipelineStage(torch.nn.Linear(2, 2), 0, 2, torch.device("cpu"))
    last = [action for action in kind(stage, 4, loss_fn=torch.nn.functional.mse_loss).pipeline_order[1] if action is not None]
    numbers = {
        short: [action.microbatch_index for action in last if action.computation_type.name == name]
        for short, name in (("F", "FORWARD"), ("B", "FULL_BACKWARD"))
    }
    print(kind.__name__, "F", numbers["F"], "B", numbers["B"])
P
env/bin/python listed.py 2> log | tee seen
diff seen - <<'P'
Schedule1F1B F [1, 2, 3, 4] B [0, 1, 2, 3]
ScheduleGPipe F [0, 1, 2, 3] B [0, 1, 2, 3]
P
