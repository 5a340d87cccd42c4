#!/usr/bin/env bash
# torch's interleaved 1F1B holds more activations with fewer microbatches. On 4 ranks with 2 stages each, 8 microbatches
# hold at most 11, 9, 7 and 5 forwards per rank, and 6 hold 12, 11, 9 and 7: 6 microbatches do not divide into rounds of
# 4, the schedule then takes one round of 6, and its first phase grows with the round.
# Seen (Python 3.11, torch 2.13.0 CPU), most forwards held by rank:
#   5 [10, 10, 8, 6]   6 [12, 11, 9, 7]   7 [14, 12, 10, 8]   8 [11, 9, 7, 5]   16 [11, 9, 7, 5]
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy==2.4.1
cat > held.py <<'P'
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
stages = [PipelineStage(torch.nn.Linear(2, 2), index, 8, torch.device("cpu")) for index in (0, 4)]
for microbatches in (5, 6, 7, 8, 16):
    schedule = ScheduleInterleaved1F1B(stages, microbatches, loss_fn=torch.nn.functional.mse_loss)
    most = []
    for actions in schedule.pipeline_order.values():
        held, peak = 0, 0
        for action in filter(None, actions):
            held += {"FORWARD": 1, "FULL_BACKWARD": -1}[action.computation_type.name]
            peak = max(peak, held)
        most.append(peak)
    print(microbatches, most)
P
env/bin/python held.py 2> log | tee seen
diff seen - <<'P'
5 [10, 10, 8, 6]
6 [12, 11, 9, 7]
7 [14, 12, 10, 8]
8 [11, 9, 7, 5]
16 [11, 9, 7, 5]
P
