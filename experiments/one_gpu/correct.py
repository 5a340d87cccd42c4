"""Does the executor train on a GPU what one process trains on the CPU? And do several ranks share one GPU?

    python experiments/one_gpu/correct.py [--device cuda] [--budget SECONDS] [--out DIR]

In this order, as far as the budget goes:

1. One rank under torchrun, with NCCL, in float64: weights after a few steps against plain training on the CPU.
2. Two, then four ranks on one GPU, in float64: data parallel, ZeRO 1 to 3, pipelines, tensor parallel and hybrids. First with
   NCCL and a host name per rank, since NCCL refuses two ranks of one host on one GPU. Where that fails, with gloo on copies
   in the host's memory. Without a GPU: with gloo, and once more on copies.
3. On a GPU: every rank of these plans alone, with torch's fake process group, for issue order and overlap only.
4. One rank under three more plans.

Every part says what came of it, as soon as it is known, or that there was no time for it. Exit status 1 if one fails that does
not need NCCL's consent, if NCCL's weights are wrong, or if nothing was checked.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

BEGIN_S = time.monotonic()  # what imports take belongs to the budget
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from fake_peers import IssuedStep, PlannedRun, drawn_durations_s, issued_step, simulated_ends_s, with_rooms
from questions import GRANULARITY, REHEARSED, Question

from experiments.common.reference import largest_difference, train_reference
from parsim.execute.checkpoint.checkpoint import latest_checkpoint, load_state
from parsim.execute.cuda.driver import Driver, TorchCudaDriver
from parsim.execute.cuda.gpu import NCCL, SHARE_VARIABLE, STAGED, prepare_cuda, usable_gpus
from parsim.execute.job import Job, RunSpec
from parsim.execute.loading import Pin
from parsim.execute.processes.launch import launch
from parsim.execute.rank_run import run_dataset
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.plans.layouts import BATCH, Placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan
from parsim.plans.stages import even_parts, stages_of

STEPS = 4
TOLERANCE = 1e-9
"""Of float64 weights after a few steps: sums in another order differ by far less, a wrong gradient by far more."""

TIMEOUT_S = 90
SHARED_TIMEOUT_S = 100
"""Of a launch of all plans of one number of ranks. Ranks that share a GPU take turns at it, some milliseconds each."""

BUDGET_S = 240
LAUNCH_S, ALONE_S = 30, 10
"""Of the budget: what a launch, and a plan whose ranks are alone, are worth beginning for."""

LATE = 0.05
"""Of a step: what a task may begin away from its simulated time, on a GPU whose events and launches take some time."""

SMALL = ModelSpec(name="gpt_small", args=(("heads", 2), ("hidden", 16), ("layers", 2), ("seq", 16), ("vocab", 32)))

Left = Callable[[], float]
"""Seconds that are left of the budget."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds, imports included")
    parser.add_argument("--out", type=Path, help="writes correct.json there")
    asked = parser.parse_args()
    if asked.device == "cuda":
        prepare_cuda(0)  # ranks that are alone run in this process
        available, why = usable_gpus()
        if not available:
            print(f"error: {why}", file=sys.stderr)
            return 1
    rows = []
    for row in checks(asked.device, lambda: asked.budget - (time.monotonic() - BEGIN_S)):
        rows.append(row)
        said = "NOT RUN" if row.get("not_run", False) else "ok    " if row["ok"] else "FAILED"
        print(f"{said} {row['what']}: {row['found']}", flush=True)
        if asked.out is not None:
            asked.out.mkdir(parents=True, exist_ok=True)
            (asked.out / "correct.json").write_text(json.dumps(rows, indent=1))
    ran = [row for row in rows if not row.get("not_run", False)]
    print(f"{f'{len(ran)} checked' if ran else 'nothing was checked'}; {len(rows) - len(ran)} not run")
    return int(not ran or not all(row["ok"] or row.get("refused", False) for row in ran))


def checks(device: str, left_s: Left) -> Iterator[dict[str, Any]]:
    """All, the cheapest and most telling first."""
    first, second = REHEARSED.held_out[0], REHEARSED.held_out[3]
    yield weights_after_training(first, device, left_s)
    yield from several_ranks(device, left_s)
    if device == "cuda":
        yield from ranks_alone(left_s=left_s)
    for question in (second, replace(first, microbatches=2), replace(first, recompute="full")):
        yield weights_after_training(question, device, left_s)


def not_run(what: str, why: str, **more: Any) -> dict[str, Any]:
    return {"what": what, **more, "ok": False, "not_run": True, "found": f"not run: {why}"}


def too_late(left_s: Left) -> str:
    """Why there is no launch any more; "" if there is time for one."""
    left = left_s()
    return f"{max(0.0, left):.0f} s of the budget are left" if left < LAUNCH_S else ""


def weights_after_training(question: Question, device: str, left_s: Left = lambda: math.inf) -> dict[str, Any]:
    """The largest difference of any weight from plain training of the same samples on the CPU."""
    model = load_model(question.spec, granularity=GRANULARITY)
    plan = question.plan(tuple(component.name for component in model.components))
    what = f"{question.name} on one rank, {device}, float64, {STEPS} steps, {question.optimizer}"
    if why := too_late(left_s):
        return not_run(what, why)
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
            launch(folder / "job.json", 1, timeout_s=min(TIMEOUT_S, left_s()))
            return {"what": what, **beside_plain_training(run, folder / "checkpoints", model)}
    except Exception as error:  # the other plans are worth trying
        return {"what": what, "ok": False, "found": f"{type(error).__name__}: {error}"}


def several_ranks(device: str, left_s: Left = lambda: math.inf) -> Iterator[dict[str, Any]]:
    """Every kind of plan on two and on four ranks. On one GPU with NCCL; where that fails, with gloo through the host."""
    refused = False
    for ranks, plans in shared_plans().items():
        for way in (NCCL, STAGED) if device == "cuda" else ("", STAGED):
            if way == NCCL and refused:
                yield not_run(told_of(plans, ranks, device, way), "NCCL did not take two ranks on one GPU", way=way)
                continue
            found = ranks_sharing(ranks, plans, device, way, left_s)
            yield from found
            refused = refused or any(row.get("refused", False) for row in found)
            if device == "cuda" and all(row["ok"] for row in found):
                break  # what NCCL has shown, gloo need not show


def told_of(plans: Iterable[str], ranks: int, device: str, way: str) -> str:
    where = {NCCL: "one GPU, NCCL_HOSTID per rank", STAGED: f"{device}, gloo staged through the host"}.get(way, "gloo")
    return f"{', '.join(plans)}: {ranks} ranks, {where}, float64"


def shared_plans() -> dict[int, dict[str, Plan]]:
    """By ranks and name: data parallel, ZeRO 1 to 3, pipelines, tensor parallel, hybrids."""
    two, four = Mesh(dp=2), {"dp 2 x pp 2": Mesh(dp=2, pp=2), "dp 2 x tp 2": Mesh(dp=2, tp=2), "pp 2 x tp 2": Mesh(pp=2, tp=2)}
    return {
        2: {
            "dp": plan_on(two),
            **{f"dp, ZeRO {stage}": plan_on(two, microbatches=2, zero_stage=stage) for stage in (1, 2, 3)},
            "pp, 1f1b": plan_on(Mesh(pp=2), microbatches=4),
            "pp, zero-bubble": plan_on(Mesh(pp=2), microbatches=4, pipeline_order="zero-bubble"),
            "tp": plan_on(Mesh(tp=2)),
        },
        4: {name: plan_on(mesh, microbatches=4 if mesh.pp > 1 else 1) for name, mesh in four.items()}
        | {"dp 2 x tp 2, ZeRO 3": plan_on(Mesh(dp=2, tp=2), microbatches=2, zero_stage=3)},
    }


def plan_on(mesh: Mesh, **options: Any) -> Plan:
    """The small model on a mesh; on a tp axis every component that can be cut is."""
    model = shared_model()

    def placed(name: str) -> Placement:
        rules = [cut.rule for cut in model.component(name).shardings if cut.limit % mesh.tp == 0]
        return Placement("shard", rule=rules[0], ways=mesh.tp) if mesh.tp > 1 and rules else BATCH

    parts = even_parts([component.name for component in model.components], mesh.pp)
    order = options.get("pipeline_order", "1f1b")
    stages = stages_of(mesh, parts, placed if mesh.tp > 1 else None, order=order)
    return Plan(strategy="custom", mesh=mesh, stages=stages, global_batch=8, bucket_bytes=2**14, **options)


def shared_model() -> Model:
    return load_model(SMALL, granularity="sublayer")


def ranks_sharing(
    ranks: int, plans: Mapping[str, Plan], device: str, way: str, left_s: Left = lambda: math.inf
) -> list[dict[str, Any]]:
    """All plans in one launch, and each one's weights beside plain training on the CPU. way: how ranks share the GPU
    (`parsim.execute.cuda.gpu`); "": they need none."""
    if why := too_late(left_s):
        return [not_run(told_of(plans, ranks, device, way), why, way=way)]
    model = shared_model()
    try:
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            model.save(folder / "model.json")
            runs = tuple(
                RunSpec(
                    name=f"run{number}",
                    model=SMALL,
                    model_path=str(folder / "model.json"),
                    plan=plan,
                    optimizer="adamw",
                    learning_rate=1e-2,
                    dataset="synthetic",
                    dtype="float64",
                )
                for number, plan in enumerate(plans.values())
            )
            job = Job(output=text, mode="measure", runs=runs, steps=STEPS, warmup_steps=1, device=device, keep_state=True)
            job.save(folder / "job.json")
            within_s = min(SHARED_TIMEOUT_S, left_s())
            launch(folder / "job.json", ranks, timeout_s=within_s, env={SHARE_VARIABLE: way} if way else {})
            return [
                {
                    "what": told_of([name], ranks, device, way),
                    "way": way,
                    **beside_plain_training(run, folder / run.name / "checkpoints", model),
                }
                for name, run in zip(plans, runs, strict=True)
            ]
    except Exception as error:  # NCCL may refuse, or a plan hang
        refused = f"{type(error).__name__}: {error}"
        return [{"what": told_of(plans, ranks, device, way), "way": way, "ok": False, "refused": way == NCCL, "found": refused}]


def ranks_alone(
    driver: Driver[Any, Any] | None = None, pin: Pin = torch.Tensor.pin_memory, left_s: Left = lambda: math.inf
) -> Iterator[dict[str, Any]]:
    """Every rank of every plan, one after the other, beside its simulated step. For issue order and overlap only."""
    device = torch.device("cuda", 0) if driver is None else torch.device("cpu")
    for ranks, plans in shared_plans().items():
        for name, plan in plans.items():
            what = f"{name}: {ranks} ranks, each alone with torch's fake process group, for issue order and overlap only"
            if left_s() < ALONE_S:
                yield not_run(what, f"{max(0.0, left_s()):.0f} s of the budget are left")
                continue
            try:
                steps = steps_alone(plan, driver or TorchCudaDriver(device), device, pin)
                late = max(step.latest_s / step.makespan_s for step in steps)
                hidden, simulated = (sum(shares) / ranks for shares in zip(*(step.shares for step in steps), strict=True))
                found = (
                    f"no task begins {late:.2%} of the step from its time; {hidden:.0%} of communication beside computation, "
                    f"{simulated:.0%} simulated"
                )
                yield {"what": what, "ok": late < LATE, "found": found}
            except Exception as error:  # the other plans are worth trying
                yield {"what": what, "ok": False, "found": f"{type(error).__name__}: {error}"}


def steps_alone(plan: Plan, driver: Driver[Any, Any], device: torch.device, pin: Pin) -> list[IssuedStep]:
    run = PlannedRun(spec=SMALL, model=shared_model(), plan=plan)
    graph = with_rooms(run)
    ends_s = simulated_ends_s(graph, drawn_durations_s(graph, seed=0))
    return [issued_step(run, rank, driver, device, pin, graph, ends_s) for rank in range(plan.world_size)]


def beside_plain_training(run: RunSpec, checkpoints: Path, model: Model) -> dict[str, Any]:
    """Whether the weights of a checkpoint are those of plain training of the same samples on the CPU."""
    found = latest_checkpoint(checkpoints)
    assert found is not None, "training ends with a checkpoint"
    expected = train_reference(
        run.model,
        run.plan,
        run_dataset(run, "train"),
        optimizer=run.optimizer,
        learning_rate=run.learning_rate,
        dtype=torch.float64,
        seed=run.seed,
        steps=found.step,
        model=model,
    ).parameters
    held = {name: tensor.cpu() for name, tensor in load_state(found).weights.items()}
    difference = largest_difference(expected, held, list(held))
    whole = len(held) == len(expected)
    told = f"weights differ by at most {difference:.2g} after {found.step} steps"
    return {"ok": whole and difference < TOLERANCE, "found": told if whole else f"{len(held)} of {len(expected)} weights"}


if __name__ == "__main__":
    sys.exit(main())
