#!/usr/bin/env bash
# A learning-rate scheduler that accelerate prepared moves by one step per process: on 4 ranks a decay over 40 steps is at its end
# after 10. With gradient accumulation of 2 it moves with each optimizer step, still by 4. The loop reads as one step per call, and the
# same script on one process decays 4 times as slowly. split_batches=True or step_scheduler_with_optimizer=False ends it.
# Guess before the run: one step of the schedule per optimizer step, whatever the number of ranks.
# Seen (Python 3.11, torch 2.13.0 CPU, accelerate 1.15.0): learning rate, 1 - step / 40, after 2, 4, 6 and 8 batches
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy==2.4.1 accelerate==1.15.0
cat > decay.py <<'P'
import multiprocessing
import os
import socket

import torch
from accelerate import Accelerator


def rank(number, ranks, port):
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 40)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rates = []
    for _ in range(8):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates.append(round(scheduler.get_last_lr()[0], 3))
    if number == 0:
        print(ranks, rates[1::2], flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    for ranks in (1, 4):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        every = [multiprocessing.get_context("fork").Process(target=rank, args=(number, ranks, port)) for number in range(ranks)]
        for process in every:
            process.start()
        for process in every:
            process.join()
P
OMP_NUM_THREADS=1 env/bin/python decay.py 2> log | tee seen
diff seen - <<'P'
1 [0.975, 0.95, 0.925, 0.9]
4 [0.9, 0.8, 0.7, 0.6]
P
