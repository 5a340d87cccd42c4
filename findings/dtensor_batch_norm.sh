#!/usr/bin/env bash
# batch_norm of a DTensor that is sharded along its batch gathers the whole batch: the output is Replicate, every rank
# computes all samples, and no warning says so. A plan that counts on a divided batch behind such a layer computes it on
# all ranks.
# Seen (Python 3.11, torch 2.13.0 CPU, 2 ranks over gloo, 8 samples):
#   Shard(dim=0) -> (Replicate(),), all_gather_into_tensor: 1
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy==2.4.1
cat > norm.py <<'P'
import os
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode


def rank(number):
    os.environ.update(RANK=str(number), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29471")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    samples = distribute_tensor(torch.randn(8, 3), mesh, [Shard(0)])
    norm = distribute_module(torch.nn.BatchNorm1d(3), mesh)
    with CommDebugMode() as communication, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        normed = norm(samples)
    if number == 0:
        counts = {str(key).rsplit(".", 1)[-1]: count for key, count in communication.get_comm_counts().items()}
        print(samples.placements, normed.placements, counts, len(said), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank, nprocs=2)
P
env/bin/python norm.py 2> log | tee seen
diff seen - <<'P'
(Shard(dim=0),) (Replicate(),) {'all_gather_into_tensor': 1} 0
P
