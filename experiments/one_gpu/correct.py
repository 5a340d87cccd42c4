"""Does the executor train on a GPU what one process trains on the CPU? And do several ranks share one GPU?

    python experiments/one_gpu/correct.py [--device cuda] [--out DIR]

1. One rank under torchrun, with NCCL, in float64, four plans: weights after a few steps against plain training on the CPU.
2. Two ranks with NCCL on one GPU, each with an NCCL_HOSTID of its own, since NCCL refuses two ranks of one host on one GPU:
   an all_reduce. On the CPU: two ranks with gloo.

Every part says what came of it; exit status 1 if the first is wrong. The second decides nothing: NCCL does not promise it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from questions import GRANULARITY, REHEARSED, Question

from parsim.execute.job import Job, RunSpec
from parsim.execute.processes.launch import launch
from parsim.execute.reference import largest_difference, train_reference
from parsim.execute.state.checkpoint import latest_checkpoint, load_state
from parsim.execute.training.rank_run import run_dataset
from parsim.model.load import load_model

STEPS = 4
TOLERANCE = 1e-9
"""Of float64 weights after a few steps: sums in another order differ by far less, a wrong gradient by far more."""

RANKS, TIMEOUT_S = 2, 90
ALL_REDUCE = """
import os, sys, torch
import torch.distributed as dist
device = sys.argv[1]
rank = int(os.environ["RANK"])
if device == "cuda":
    torch.cuda.set_device(0)
dist.init_process_group("nccl" if device == "cuda" else "gloo")
values = torch.full((1 << 20,), float(rank + 1), device=device)
dist.all_reduce(values)
expected = sum(range(1, dist.get_world_size() + 1))
assert bool((values == expected).all()), f"all_reduce gave {values[0].item()}, not {expected}"
print(f"rank {rank}: all_reduce over {dist.get_world_size()} ranks is right")
dist.destroy_process_group()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="writes correct.json there")
    asked = parser.parse_args()
    first, second = REHEARSED.held_out[0], REHEARSED.held_out[3]
    questions = (first, second, replace(first, microbatches=2), replace(first, recompute="full"))
    rows = [weights_after_training(question, asked.device) for question in questions]
    rows.append(several_ranks(asked.device))
    for row in rows:
        print(f"{'ok    ' if row['ok'] else 'FAILED'} {row['what']}: {row['found']}", flush=True)
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "correct.json").write_text(json.dumps(rows, indent=1))
    return int(not all(row["ok"] for row in rows[:-1]))


def weights_after_training(question: Question, device: str) -> dict[str, Any]:
    """The largest difference of any weight from plain training of the same samples on the CPU."""
    model = load_model(question.spec, granularity=GRANULARITY)
    plan = question.plan(tuple(component.name for component in model.components))
    what = f"{question.name} on one rank, {device}, float64, {STEPS} steps, {question.optimizer}"
    try:
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            model.save(folder / "model.json")
            run = RunSpec(
                name="run",
                model=question.spec,
                model_path=str(folder / "model.json"),
                plan=plan,
                optimizer=question.optimizer,
                learning_rate=1e-2,
                dataset="synthetic",
                dtype="float64",
            )
            job = Job(output=text, mode="train", runs=(run,), steps=STEPS, warmup_steps=0, device=device)
            job.save(folder / "job.json")
            launch(folder / "job.json", 1, timeout_s=TIMEOUT_S)
            found = latest_checkpoint(folder / "checkpoints")
            assert found is not None, "training ends with a checkpoint"
            weights = load_state(found).weights
        expected = train_reference(
            question.spec,
            plan,
            run_dataset(run, "train"),
            optimizer=run.optimizer,
            learning_rate=run.learning_rate,
            dtype=torch.float64,
            seed=run.seed,
            steps=STEPS,
            model=model,
        ).parameters
        held = {name: tensor.cpu() for name, tensor in weights.items()}
        difference = largest_difference(expected, held, list(held))
    except Exception as error:  # the other plans are worth trying
        return {"what": what, "ok": False, "found": f"{type(error).__name__}: {error}"}
    return {"what": what, "ok": difference < TOLERANCE, "found": f"weights differ by at most {difference:.2g}"}


def several_ranks(device: str) -> dict[str, Any]:
    """Two processes and one device."""
    where = "one GPU, NCCL_HOSTID per rank" if device == "cuda" else "gloo"
    what = f"{RANKS} ranks on {where}"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(ALL_REDUCE), device],
            env={**common, "RANK": str(rank), "LOCAL_RANK": "0", "NCCL_HOSTID": f"parsim-{rank}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        ended = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    except subprocess.TimeoutExpired:
        return {"what": what, "ok": False, "found": f"no answer within {TIMEOUT_S} s"}
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    failed = [error.strip().splitlines()[-1] for (_, error), rank in zip(ended, ranks, strict=True) if rank.returncode]
    said = [output.strip() for output, _ in ended]
    return {"what": what, "ok": not failed, "found": "; ".join(failed or said)}


if __name__ == "__main__":
    sys.exit(main())
