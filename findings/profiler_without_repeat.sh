#!/usr/bin/env bash
# A torch profiler with schedule(wait=1, warmup=2, active=3) starts over after six steps. An export after the loop, the
# form of many examples, then holds what the unfinished cycle has: after 7 batches no step at all, after 10 one step and
# the empty beginning of the next. With repeat=1 and an export in on_trace_ready all loops hold their three steps.
# Seen (Python 3.11, torch 2.13.0 CPU): steps in the file, and operators within each
#   without: 6 [3 full] 7 [] 10 [1 full, 1 empty] 13 []    with repeat=1: 3 full steps each time
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy==2.4.1
cat > steps.py <<'P'
import json

import torch
from torch.profiler import profile, schedule

layer = torch.nn.Linear(64, 64)


def steps_of(batches, **ends):
    on_ready = {"on_trace_ready": lambda prof: prof.export_chrome_trace("trace.json")} if ends else {}
    with profile(schedule=schedule(wait=1, warmup=2, active=3, **ends), **on_ready) as prof:
        for _ in range(batches):
            layer(torch.randn(8, 64)).sum().backward()
            prof.step()
    if not ends:
        prof.export_chrome_trace("trace.json")
    events = json.load(open("trace.json"))["traceEvents"]
    steps = [event for event in events if str(event.get("name")).startswith("ProfilerStep#")]
    products = [event["ts"] for event in events if event.get("name") == "aten::addmm"]
    return [sum(step["ts"] <= ts < step["ts"] + step["dur"] for ts in products) for step in sorted(steps, key=lambda e: e["ts"])]


for batches in (6, 7, 10, 13):
    print(batches, steps_of(batches), steps_of(batches, repeat=1))
P
env/bin/python steps.py 2> log | grep -v ^USDT | tee seen
diff seen - <<'P'
6 [1, 1, 1] [1, 1, 1]
7 [] [1, 1, 1]
10 [1, 0] [1, 1, 1]
13 [] [1, 1, 1]
P
