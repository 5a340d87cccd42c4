"""Does a run that may change its plan end sooner than the best fixed plan, when the machine changes in the middle?

    python -m experiments.adaptive.live_replanning [--quick] [--pairs N] [--kinds link,throttled]
        [--seconds N] [--out DIR] [--json]

Two kinds of disturbance, both from outside, in the middle of a training: the link between two network namespaces is shaped by
`tc` (needs root), or a rank is stopped for a part of every 20 ms. The controller is told of neither.

A profile is calibrated for the two ranks. `start` is the plan that the search finds, `other` the one that it would find under
the disturbance. Every pair trains the same steps as `adaptive` (from `start`), as `start` and as `other`, in turning order; as
many pairs are trained undisturbed. One more pair trains in float64, and losses and weights are compared. What lies in DIR
already is not run again.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from calibration.rounds.calibrate import calibrate
from calibration.rounds.request import CalibrationRequest
from experiments.adaptive.disturbing import (
    CALM_BYTES_PER_S,
    RANKS,
    RATE_BYTES_PER_S,
    SLOW_RANK,
    THROTTLE,
    Arena,
    AtStep,
    arena,
)
from experiments.common.running import part_parser, show
from parsim.costs.observed import CommunicationClass, RunCorrections
from parsim.execute.checkpoint import checkpoint
from parsim.execute.job import AdaptiveSpec, Job, RunSpec
from parsim.execute.processes.launch import launch
from parsim.execute.processes.output import read_progress_line
from parsim.files import read_json, write_json_atomically
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.plan import NONE, Plan
from parsim.predict.problem import PlanningProblem
from parsim.program.lower import lower
from parsim.search.adapt.planning import pool_planner, prepared_pool
from parsim.search.search import search
from parsim.work import Collective

WAYS = ("adaptive", "start", "other")
BATCH = 1024
SPEC = ModelSpec(name="experiments.adaptive.network:narrow", input_shape=(1, 16, 16), loss="cross_entropy")


def problem_on(profile: Path) -> PlanningProblem:
    """What the plans are for. Args: profile: of the two ranks."""
    return PlanningProblem(
        model=load_model(SPEC),
        cluster=cluster_from_profile(load_profile(str(profile)), RANKS),
        global_batch=BATCH,
        zero_stage=0,
        recompute=NONE,
    )


def fixed_plans(problem: PlanningProblem, kinds: list[str]) -> dict[str, Plan]:
    """`start`: the best for the machine as it is. `other KIND`: the best under the disturbance, from the first step on."""
    start = next(
        entry.result.plan
        for entry in search(problem, ("adaptive", "dp", "mp"), samples=0).candidates
        if entry.result.plan.world_size == RANKS
    )
    planner = pool_planner(prepared_pool(problem, start))
    return {"start": start, **{f"other {kind}": planner(disturbed(problem, start, kind), start).plan for kind in kinds}}


def disturbed(problem: PlanningProblem, plan: Plan, kind: str) -> RunCorrections:
    """What a disturbance makes of the profile: a throttled rank, or all communication as slow as what the plan sends."""
    if kind == "throttled":
        return RunCorrections(ranks=tuple((rank, THROTTLE if rank == SLOW_RANK else 1.0) for rank in range(RANKS)))
    sent = [work for task in lower(plan, problem.model).tasks if isinstance(work := task.work, Collective)]
    usual_s = sum(problem.costs(RANKS).estimate(work, 0).median_s for work in sent)
    shaped_s = sum(work.size_bytes for work in sent) / RATE_BYTES_PER_S
    every = CommunicationClass("all_reduce", tuple(range(RANKS)))
    return RunCorrections(communication=((every, max(1.0, shaped_s / usual_s)),))


KINDS = ("link", "throttled")
WINDOW = 5
STEPS = {"link": (200, 235), "throttled": (200, 230), "float64": (60, 110)}
"""Until the disturbance, and in all; `--quick` has those of float64. Undisturbed pairs make as many as those of links."""


def main() -> None:
    parser = part_parser(__doc__, "one short pair of each kind", out="runs/live_replanning")
    parser.add_argument("--pairs", type=int, default=10, help="of each kind, and undisturbed")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of disturbances")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no training after so many, and go on at the next call"
    )
    asked = parser.parse_args()
    until = time.monotonic() + asked.seconds
    asked.out.mkdir(parents=True, exist_ok=True)
    kinds = [kind for kind in KINDS if kind in asked.kinds.split(",")]
    rows = []
    with arena() as ranks:
        if "link" in kinds and ranks.why:
            print(f"no race over a link: {ranks.why}", file=sys.stderr)
            kinds.remove("link")
        plans = plans_of(asked.out, ranks, kinds)
        for pair, kind, ways in order_of(kinds, 1 if asked.quick else asked.pairs):
            for way in ways:
                if time.monotonic() > until:
                    break
                rows.append(trained(asked.out, ranks, plans, (pair, kind, way), quick=asked.quick))
                print(json.dumps({key: rows[-1][key] for key in SHOWN}), file=sys.stderr, flush=True)
    document = {
        "plans": {name: plan.summary() for name, plan in plans.items()},
        "no_link": ranks.why,
        "calm_bytes_per_s": CALM_BYTES_PER_S,
        "rate_bytes_per_s": RATE_BYTES_PER_S,
        "throttle": THROTTLE,
        "slow_rank": SLOW_RANK,
        "window_steps": WINDOW,
        "weights_differ_by": weights_differ_by(asked.out),
        "rows": rows,
    }
    show(document, as_json=asked.json)


SHOWN = ("pair", "way", "seconds", "disturbed_after", "switches", "plannings_s")


def order_of(kinds: list[str], pairs: int) -> list[tuple[str, str, tuple[str, ...]]]:
    """What is trained one after the other: the name of a pair, its disturbance ("": none), and its ways in turn. As many pairs
    are undisturbed as are of the first kind."""
    found: list[tuple[str, str, tuple[str, ...]]] = []
    for place, kind in enumerate(kinds):
        if not place:
            found.append(("float64", kind, WAYS[:2]))
        for number in range(pairs):
            turn = number % len(WAYS)
            found.append((f"{kind} {number}", kind, WAYS[turn:] + WAYS[:turn]))
            if not place:
                found.append((f"quiet {number}", "", WAYS[:2] if number % 2 else WAYS[1::-1]))
    return found


def plans_of(out: Path, ranks: Arena, kinds: list[str]) -> dict[str, Plan]:
    """The fixed plans, from a profile of these ranks; all are made once. Args: out: folder. kinds: of disturbances."""
    profile = out / "here.json"
    if not profile.is_file():
        request = CalibrationRequest(
            models=((SPEC, tuple(BATCH // 2**power for power in range(5))),), nproc=RANKS, quick=True, operator_budget_s=0.0
        )
        calibrate(request, profile, on_line=partial(print, file=sys.stderr), launcher=ranks.link or launch)
    wanted = ["start", *(f"other {kind}" for kind in kinds)]
    files = {name: out / f"{name.replace(' ', '-')}.plan.json" for name in wanted}
    if not all(file.is_file() for file in files.values()):
        for name, plan in fixed_plans(problem_on(profile), kinds).items():
            plan.save(files[name])
    return {name: Plan.load(file) for name, file in files.items()}


def trained(out: Path, ranks: Arena, plans: dict[str, Plan], which: tuple[str, str, str], *, quick: bool) -> dict[str, Any]:
    """One training, or what is known of it: seconds from the first timed step to the last, decisions, losses."""
    pair, kind, way = which
    folder = (out / f"{'quick ' if quick else ''}{pair} {way}".replace(" ", "-")).resolve()
    kept = folder.with_suffix(".json")
    if kept.is_file():
        known: dict[str, Any] = read_json(kept)
        return known
    exact = pair == "float64"
    calm, steps = STEPS["float64" if quick or exact else kind or "link"]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    model = problem_on(out / "here.json").model
    model.save(folder / "model.json")
    run = RunSpec(
        name="run",
        model=SPEC,
        model_path=str(folder / "model.json"),
        plan=plans[f"other {kind}" if way == "other" else "start"],
        optimizer="sgd_momentum",
        learning_rate=0.05,
        dataset="synthetic",
        dtype="float64" if exact else "float32",
    )
    look = AdaptiveSpec(
        profile=str((out / "here.json").resolve()), devices=(0, 1), precision="fp32", window_steps=WINDOW, epoch_steps=steps
    )
    job = Job(output=str(folder), mode="train", runs=(run,), steps=steps, adaptive=look if way == "adaptive" else None)
    job.save(folder / "job.json")
    disturbance = AtStep(step=calm, begin=partial(ranks.disturbed, kind))

    def mean_s(rounds: list[list[float]]) -> float:
        return sum(end - begin for begin, end, _ in rounds) / len(rounds)

    def on_line(line: str) -> None:
        told = read_progress_line(line)
        if kind and isinstance(told, dict) and "step" in told:
            disturbance.seen(int(str(told["step"]).partition("/")[0]))

    try:
        ranks.run(folder / "job.json", on_line)
    finally:
        disturbance.close()
    if kind and disturbance.since is None:
        sys.exit(f"the training in {folder} ended before step {calm} was seen; nothing was disturbed")
    rounds = read_json(folder / "run" / "rank0.json")["rounds"]
    decisions = read_json(folder / "decisions.json") if way == "adaptive" else []
    row = {
        "pair": pair,
        "way": way,
        "seconds": rounds[-1][1] - rounds[0][0],
        "steps": steps,
        "disturbed_after": sum(end <= disturbance.since for _, end, _ in rounds) if disturbance.since is not None else None,
        "calm_step_s": mean_s(rounds[calm // 2 : calm]),
        "last_step_s": mean_s(rounds[-10:]),
        "switches": [
            {key: entry[key] for key in ("step", "reason", "planning_s", "predicted_switch_s", "switch_s")}
            | {"plan": Plan.from_json(entry["plan"]).summary()}
            for entry in decisions
            if entry["plan"] is not None
        ],
        "looks": len(decisions),
        "plannings_s": [entry["planning_s"] for entry in decisions if entry["planning_s"]],
        "losses": losses_of(folder, ends=not exact),
    }
    write_json_atomically(kept, row)
    return row


def losses_of(folder: Path, *, ends: bool) -> list[float]:
    """Of every step, from whichever rank has seen it. Args: folder: of a training. ends: the first and the last alone."""
    by_rank = [read_json(folder / "run" / f"rank{rank}.json")["losses"] for rank in range(RANKS)]
    losses = [sum(own for own in step if own is not None) for step in zip(*by_rank, strict=True)]
    return [losses[0], losses[-1]] if ends else losses


def weights_differ_by(out: Path) -> float | None:
    """The largest difference of any weight at the end of the float64 pair; None before it is trained."""
    ended = [checkpoint.latest_checkpoint(out.resolve() / f"float64-{way}" / "checkpoints") for way in WAYS[:2]]
    if None in ended:
        return None
    one, other = (checkpoint.load_state(found).weights for found in ended if found is not None)
    return max(float((value - other[name]).abs().max()) for name, value in one.items())


if __name__ == "__main__":
    main()
