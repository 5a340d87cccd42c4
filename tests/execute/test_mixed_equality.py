"""Random plans that place every component by itself equal single-process training (DESIGN §4), and so does changing plan."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from experiments.common.reference import largest_difference
from parsim.execute.checkpoint.checkpoint import latest_checkpoint, load_state
from parsim.execute.job import Job, RunSpec, Switch
from parsim.execute.measurement import Measurement, RankRecord
from parsim.model.load import load_model
from parsim.plans.layouts import parse_placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from tests.execute.equality import compare_case, run_cases
from tests.execute.forked import run_job
from tests.execute.mixed import MODELS, random_case

TOLERANCE = 1e-10


def assert_equal(names: list[str], processes: int, plans: int, steps: int, folder: Path) -> None:
    rng = random.Random(f"{names} {processes} {steps}")
    cases = [random_case(name, processes, rng) for name in names for _ in range(plans)]
    for case, run in zip(cases, run_cases(cases, folder, steps=steps), strict=True):
        difference = compare_case(case, run, folder, steps=steps)
        assert difference.worst <= TOLERANCE, f"{case}: {difference}"


@pytest.mark.xdist_group("launch")
def test_mixed_plans_on_two_processes_equal_one_process(tmp_path: Path) -> None:
    assert_equal(["mlp", "vit_small", "gpt_small", "resnet_small"], 2, 1, 6, tmp_path)


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("name", ["mlp", "vit_small", "gpt_small", "resnet_small"])
def test_mixed_plans_equal_one_process_over_a_hundred_steps(name: str, processes: int, tmp_path: Path) -> None:
    assert_equal([name], processes, 2, 100, tmp_path)


def plan(name: str, placement: str, *, dp: int = 1, tp: int = 2, zero_stage: int = 0) -> Plan:
    """Everything under one placement where it can be, else replicated."""
    model = load_model(MODELS[name], granularity="layer")
    mesh = Mesh(dp=dp, tp=tp)
    placements = []
    for component in model.components:
        rules = [sharding.rule for sharding in component.shardings if sharding.limit % 2 == 0]
        text = placement
        if placement == "shard":
            text = f"shard:{rules[0]}/2" if rules else "replicate"
        placements.append(parse_placement(text))
    stage = Stage(
        components=tuple(component.name for component in model.components),
        ranks=mesh.stage_ranks(0),
        placements=tuple(placements) if tp > 1 else (),
    )
    return Plan(strategy="custom", mesh=mesh, stages=(stage,), global_batch=16, zero_stage=zero_stage)


@pytest.mark.xdist_group("launch")
def test_changing_plan_on_the_way_changes_nothing_else(tmp_path: Path) -> None:
    """DP -> shards -> ZeRO 1 -> ZeRO 3 -> one rank -> DP, against DP throughout: weights, Adam's state, losses."""
    name, steps = "vit_small", 16
    changes = (
        Switch(step=3, plan=plan(name, "shard")),
        Switch(step=6, plan=plan(name, "batch", zero_stage=1)),
        Switch(step=8, plan=plan(name, "batch", zero_stage=3)),
        Switch(step=10, plan=plan(name, "place:1")),
        Switch(step=12, plan=plan(name, "batch", dp=2, tp=1)),
    )
    model = tmp_path / "model.json"
    load_model(MODELS[name], granularity="layer").save(model)
    folders = []
    for label, switches in (("straight", ()), ("switched", changes)):
        folder = tmp_path / label
        folder.mkdir()
        run = RunSpec(
            name="run",
            model=MODELS[name],
            model_path=str(model),
            plan=plan(name, "batch", dp=2, tp=1),
            optimizer="adam",
            learning_rate=1e-3,
            dataset="digits",
            dtype="float64",
        )
        job = Job(output=str(folder), mode="train", runs=(run,), steps=steps, warmup_steps=0, switches=switches)
        job.save(folder / "job.json")
        run_job(folder / "job.json")
        folders.append(folder)
    states = []
    for folder in folders:
        found = latest_checkpoint(folder / "checkpoints")
        assert found is not None
        assert found.step == steps
        states.append(load_state(found))
    straight, switched = states
    assert largest_difference(dict(straight.weights), dict(switched.weights)) <= TOLERANCE
    for parameter, state in straight.optimizer.items():
        assert largest_difference(dict(state), dict(switched.optimizer[parameter])) <= TOLERANCE
    first, second = (losses(folder) for folder in folders)
    assert len(first) == len(second) == steps
    assert max(abs(one - two) for one, two in zip(first, second, strict=True)) <= TOLERANCE
    assert len(set(first)) == steps, "it trains"


def losses(folder: Path) -> list[float]:
    """Mean loss per step, from the ranks that counted it."""
    return list(Measurement(ranks=tuple(RankRecord.load(folder / "run", rank) for rank in range(2))).losses)
