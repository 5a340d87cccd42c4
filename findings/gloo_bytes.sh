#!/usr/bin/env bash
# Bytes that 64 processes write to their sockets in collectives of S = 4 MiB over gloo. A reduce_scatter sends as much as an
# all_reduce, 1.98 S, and not half of it. A reduce to one rank makes every rank send a whole S.
# The root of a broadcast sends log2(64) = 6 S. A step of ZeRO 2 sends 3 S, where it sends 2 S elsewhere.
# Guess before the run: reduce_scatter and all_gather 0.98 S each, all_reduce their sum; reduce 0.98 S in a tree for most ranks.
# Seen (Python 3.11, torch 2.13.0 CPU, 64 processes, /proc/self/io): S sent by the first rank, and by all on average
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy==2.4.1
cat > sent.py <<'P'
import multiprocessing

import torch
import torch.distributed as dist

RANKS, ELEMENTS = 64, 1 << 20


def written():
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("wchar"))


def rank(number):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=number, world_size=RANKS, store=dist.FileStore("store", RANKS))
    whole, other, part = torch.ones(ELEMENTS), torch.empty(ELEMENTS), torch.empty(ELEMENTS // RANKS)
    every = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_gather": lambda: dist.all_gather_into_tensor(other, part),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "reduce": lambda: dist.reduce(whole, 0),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    for name, collective in every.items():
        collective()
        dist.barrier()
        before = written()
        collective()
        sent = [None] * RANKS
        own = (written() - before) / (4 * ELEMENTS)
        dist.all_gather_object(sent, own)
        if number == 0:
            print(name, f"{sent[0]:.1f} {sum(sent) / RANKS:.2f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = [multiprocessing.get_context("fork").Process(target=rank, args=(number,)) for number in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
P
OMP_NUM_THREADS=1 env/bin/python sent.py 2> log | tee seen
diff seen - <<'P'
all_reduce 2.0 1.98
reduce_scatter 2.0 1.98
all_gather 1.0 0.99
all_to_all 1.0 0.99
reduce 1.0 1.00
broadcast 6.0 0.98
P
