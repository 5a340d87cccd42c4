#!/usr/bin/env bash
# Holistic Trace Analysis measures a rank from its first kernel to its last. Of a 1F1B pipeline of 4 equal stages and 4
# microbatches every rank idles 3/7 of the step; HTA says 43%, 33%, 20% and 0%. The wait of a later stage for its first
# microbatch, and for the others' last backward, is outside of its own range, although the step's annotation spans it. Compute of
# the last stage is 100%. The bubble of a pipeline cannot be read from any rank but the first.
# Guess before the run: 42.9% on every rank.
# Seen (Python 3.11, HolisticTraceAnalysis 0.5.0, traces in kineto's format with a ProfilerStep over the whole step)
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env
env/bin/pip install -q numpy==2.4.1 packaging==25.0
env/bin/pip install -q --no-deps HolisticTraceAnalysis==0.5.0 pandas==3.1.1 plotly==7.1.0 networkx==3.6.1 \
  python-dateutil==2.9.0.post0 six==1.17.0 narwhals==2.28.0 pyyaml==6.0.3 psutil==7.2.1 tzdata==2025.3
cat > idle.py <<'P'
import contextlib
import json
import os
import sys

STAGES = MICROBATCHES = 4
SECONDS = {"F": 1000, "B": 2000}  # microseconds


def order(rank):
    ahead = STAGES - 1 - rank
    actions = [("F", number) for number in range(ahead)]
    for number in range(MICROBATCHES - ahead):
        actions += [("F", ahead + number), ("B", number)]
    return actions + [("B", number) for number in range(MICROBATCHES - ahead, MICROBATCHES)]


ended, free, started = {}, [0] * STAGES, [[] for _ in range(STAGES)]
todo = [order(rank) for rank in range(STAGES)]
while any(todo):
    for rank in range(STAGES):
        while todo[rank]:
            kind, number = todo[rank][0]
            if kind == "F":
                needs = [(rank - 1, "F", number)] if rank else []
            else:
                needs = [(rank + 1, "B", number)] if rank + 1 < STAGES else []
            if any(need not in ended for need in needs):
                break
            start = max([free[rank], *(ended[need] for need in needs)])
            ended[rank, kind, number] = free[rank] = start + SECONDS[kind]
            started[rank].append((start, kind))
            todo[rank].pop(0)
os.mkdir("traces")
for rank, rows in enumerate(started):
    events = [{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 0, "dur": max(free), "args": {}}]
    for count, (start, kind) in enumerate(rows, start=1):
        link = {"External id": count, "correlation": count}
        launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": max(0, start - 5), "dur": 2}
        kernel = {"cat": "kernel", "name": f"gemm_{kind}", "pid": 0, "tid": 7, "ts": start, "dur": SECONDS[kind]}
        events.append({"ph": "X", **launch, "args": {**link, "cbid": 211}})
        events.append({"ph": "X", **kernel, "args": {**link, "stream": 7, "device": rank}})
    group = {"backend": "nccl", "rank": rank, "world_size": STAGES}
    with open(f"traces/rank{rank}.json", "w") as file:
        json.dump({"schemaVersion": 1, "distributedInfo": group, "traceEvents": events}, file)
with contextlib.redirect_stdout(sys.stderr):
    from hta.trace_analysis import TraceAnalysis

    table = TraceAnalysis(trace_dir="traces").get_temporal_breakdown(visualize=False)
work = MICROBATCHES * sum(SECONDS.values())
print("true", [round(100 - 100 * work / max(free), 1)] * STAGES, "HTA", table["idle_time_pctg"].round(1).tolist())
P
PYTHONWARNINGS=ignore env/bin/python idle.py 2> log | tee seen
diff seen - <<'P'
true [42.9, 42.9, 42.9, 42.9] HTA [42.9, 33.3, 20.0, 0.0]
P
