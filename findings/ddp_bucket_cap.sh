#!/usr/bin/env bash
# bucket_cap_mb of DistributedDataParallel is no cap: a bucket is closed once it holds that much, so it holds up to one parameter
# more. Six weights of 24 MiB under a cap of 25 are all-reduced as 48 MiB each, and a bias of 2 KB before a weight of 100 MiB
# travels with it. Left out, the first bucket is closed at 1 MiB, so the same six weights make other buckets than with 25 said.
# Guess before the run: a bucket stays below the cap, so six buckets of 24 MiB; and 25 said is the default.
# Seen (Python 3.11, torch 2.13.0 CPU, one process over gloo): MiB of each bucket, after the first step
#   default [24, 48, 48, 24]   bucket_cap_mb=25 [48, 48, 48]   weights of 10 MiB: [10, 30, 30, 10]
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy==2.4.1
cat > buckets.py <<'P'
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MIB = 1 << 20


class Weights(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(round(size * MIB / 4)) for size in sizes)

    def forward(self):
        return sum(weight[0] for weight in self.weights)


def buckets(sizes, **arguments):
    model = DistributedDataParallel(Weights(sizes), **arguments)
    for _ in range(3):
        model().backward()
    text = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return [round(int(size) / MIB) for size in text.split(", ")]


dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
print(buckets([24] * 6), buckets([24] * 6, bucket_cap_mb=25), buckets([10] * 8), buckets([4, 100, 0.002], bucket_cap_mb=25))
P
OMP_NUM_THREADS=1 env/bin/python buckets.py 2> log | tee seen
diff seen - <<'P'
[24, 48, 48, 24] [48, 48, 48] [10, 30, 30, 10] [100, 4]
P
