#!/usr/bin/env bash
# fully_shard cuts dim 0 and pads it to the number of ranks: a router of 8 experts (8 x 4096) on 64 ranks is a shard of one row
# on 8 ranks and of none on 56, and what is gathered and reduced is 64 rows, 8 times the weight. 65 rows travel as 128. The same
# weight the other way round (4096 x 8) travels as it is.
# Guess before the run: each rank holds 1/64, and a gather moves the weight once.
# Seen (Python 3.11, torch 2.13.0 CPU, fake process group of 64): elements of the gather's output over the weight's
#   8 x 4096: 8   65 x 4096: 1.97   1 x 4096: 64   4096 x 8: 1
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy==2.4.1
cat > rows.py <<'P'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

RANKS = 64


class Gathered(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if "allgather_base" in str(function):
            moved.append(arguments[0].numel())
        if "reduce_scatter_base" in str(function):
            moved.append(arguments[1].numel())
        return function(*arguments, **(named or {}))


dist.init_process_group("fake", rank=RANKS - 1, world_size=RANKS, store=FakeStore())
mesh = init_device_mesh("cpu", (RANKS,))
for rows, columns in ((8, 4096), (65, 4096), (1, 4096), (4096, 8)):
    moved = []
    model = nn.Linear(columns, rows, bias=False)
    fully_shard(model, mesh=mesh)
    held = tuple(model.weight.to_local().shape)
    with Gathered():
        model(torch.randn(2, columns)).sum().backward()
    print((rows, columns), "last rank holds", held, "moved", *(f"{count / (rows * columns):.2f}" for count in moved))
P
OMP_NUM_THREADS=1 env/bin/python rows.py 2> log | tee seen
diff seen - <<'P'
(8, 4096) last rank holds (0, 4096) moved 8.00 8.00
(65, 4096) last rank holds (0, 4096) moved 1.97 1.97
(1, 4096) last rank holds (0, 4096) moved 64.00 64.00
(4096, 8) last rank holds (64, 8) moved 1.00 1.00
P
