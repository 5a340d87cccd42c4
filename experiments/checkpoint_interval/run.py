"""How often should a run write a checkpoint, and when are Young's and Daly's formulas right?

    python -m experiments.checkpoint_interval.run [--quick] [--seed N] [--json]

Every case is a whole run simulated under many checkpoint intervals with the same failures for all. Shown: both formulas, the
interval of the shortest mean run, and by how much the run grows when a formula's interval is taken instead.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.common.running import part_parser, show
from parsim.engines.scenario import FailureAt, Failures, Run, parse_scenario
from parsim.engines.whole_run import (
    Training,
    daly_interval_s,
    interval_times,
    machine_mtbf_s,
    one_draw_many_times,
    young_interval_s,
)
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.predict.evaluate import evaluate
from parsim.predict.forecast import Played
from parsim.predict.problem import PlanningProblem
from parsim.search.families import FAMILIES

HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run: `work_s` of training in steps of `training`, on parts that fail as `failures` says.

    Attributes: mean_s: what the formulas are given as time between failures, where it is not that of the parts.
    """

    name: str
    work_s: float
    write_s: float
    failures: Failures
    training: Training
    mean_s: float | None = None

    @property
    def mtbf_s(self) -> float:
        return self.mean_s or machine_mtbf_s(self.failures, self.training.ranks, self.training.nodes)


def one_second(parts: int) -> Training:
    return Training(step_s=np.ones((1, 1)), ranks=parts)


def cases(quick: bool) -> list[Case]:
    """Where the formulas' assumptions hold, and where one of them at a time does not."""
    part, hour = 8, HOUR_S
    textbook = Case(
        name="as the formulas assume: exponential, d = M/500, 40 M of work",
        work_s=111 * hour,
        write_s=20.0,
        failures=Failures(rank_mtbf_s=part * 10_000.0, restart_s=300.0),
        training=one_second(part),
    )
    found = [
        textbook,
        replace(
            textbook,
            name="a checkpoint takes half of M",
            work_s=20_000.0,
            write_s=500.0,
            failures=Failures(rank_mtbf_s=part * 1000.0),
        ),
        replace(textbook, name="a run of 700 s, little longer than the interval", work_s=700.0),
    ]
    if quick:
        return found
    return [
        *found,
        replace(
            textbook,
            name="one part, failures in bursts (Weibull, shape 0.3)",
            failures=Failures(node_mtbf_s=10_000.0, distribution="weibull", shape=0.3, restart_s=300.0),
        ),
        replace(
            textbook,
            name="512 new parts (Weibull, shape 0.7)",
            failures=Failures(rank_mtbf_s=512 * 10_000.0, distribution="weibull", shape=0.7, restart_s=300.0),
            training=one_second(512),
        ),
        replace(
            textbook,
            name="one failure, at a known hour (5,000 s of 10,000)",
            work_s=10_000.0,
            write_s=40.0,
            failures=Failures(at=(FailureAt(at_s=5000.0, rank=0),), restart_s=60.0),
            mean_s=10_000.0,
        ),
        resnet50(),
    ]


def resnet50() -> Case:
    """90 epochs of 1,281,167 images on the eight V100s of the shipped profile, weights and momentum written at 50 MB/s."""
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"), 8)
    problem = PlanningProblem(model=load_model(ModelSpec(name="resnet50")), cluster=cluster, global_batch=1024)
    plan = next(plan for plan in FAMILIES["dp"](problem) if plan.world_size == 8)
    text = """
    [run]
    epochs = 90
    samples_per_epoch = 1281167
    draws = 200
    warm_up_steps = 100
    warm_up_factor = 2.0
    [checkpoints]
    interval_s = 600.0
    write_bytes_per_s = 5e7
    [failures]
    rank_mtbf_s = 144000.0
    restart_s = 300.0
    """
    played = Played(problem=problem, evaluation=evaluate(problem, plan, samples=0), scenario=parse_scenario(text))
    run = played.scenario.run
    assert run is not None
    step_s = played.evaluation.result.step_s.median
    return Case(
        name="ResNet-50, 90 epochs on 8 V100s, each failing every 40 h",
        work_s=90 * (1281167 // 1024) * step_s,
        write_s=played.write_s,
        failures=played.scenario.failures,
        training=played.training(run),
    )


def row(case: Case, draws: int, seed: int) -> dict[str, object]:
    """One case: intervals in seconds, and the mean run's growth in percent with the standard error of the difference."""
    young, daly = young_interval_s(case.write_s, case.mtbf_s), daly_interval_s(case.write_s, case.mtbf_s)
    step_s = float(np.median(case.training.step_s[:, 0]))
    steps = max(1, round(case.work_s / step_s))
    training = case.training if len(case.training.step_s) > 1 else one_draw_many_times(case.training, draws)
    begun = time.perf_counter()
    found = interval_times(
        candidates(young, daly, case.work_s, case.mtbf_s),
        run=Run(samples_per_epoch=1),
        training=training,
        failures=case.failures,
        steps_per_epoch=steps,
        write_s=case.write_s,
        seed=seed,
    )
    taken_s = time.perf_counter() - begun
    best = float(found.mean_s.min())
    line: dict[str, object] = {
        "case": case.name,
        "M_s": case.mtbf_s,
        "d_s": case.write_s,
        "young_s": young,
        "daly_s": daly,
        "simulated_s": found.best_interval_s,
        "run_s": best,
    }
    for name, interval in (("young", young), ("daly", daly)):
        place = int(np.abs(np.log(found.interval_s / interval)).argmin())
        line[f"{name}_costs_percent"] = 100 * (float(found.mean_s[place]) / best - 1)
        line[f"{name}_error_percent"] = 100 * float(found.error_s[place]) / best
    return line | {"draws": len(training.step_s), "intervals": len(found.mean_s), "taken_s": taken_s}


def candidates(young: float, daly: float, work_s: float, mtbf_s: float) -> Sequence[float]:
    """Three per doubling from a quarter to four times Daly's interval, the formulas' own, and parts of a short run."""
    grid = [daly * 2 ** (power / 3) for power in range(-6, 7)]
    parts = [work_s / count for count in range(1, 9) if work_s / count < 8 * daly]
    every = (*grid, young, daly, *parts, 0.49 * work_s)
    return [interval for interval in every if interval <= min(max(work_s, 1.1 * young), 3 * mtbf_s)]


def main() -> None:
    parser = part_parser(__doc__, "three cases, fewer draws")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = [row(case, 100 if options.quick else 1000, options.seed) for case in cases(options.quick)]
    show({"rows": rows}, as_json=options.json)


if __name__ == "__main__":
    main()
