"""Acceptance of the first research system, the part that runs for real: digits MLP 64-64-10, learning rate 0.1, 200 steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.common.equality import Case, compare_case, even_plan, run_cases
from experiments.common.reference import largest_difference
from parsim.execute.checkpoint.checkpoint import load_state
from parsim.execute.job import Job, RunSpec, Switch
from parsim.execute.processes.launch import launch
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.layouts import parse_placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from tests.execute.rank_states import newest

MLP = ModelSpec(name="mlp", args=(("depth", 1), ("width", 64)), input_shape=(1, 8, 8))
STEPS = 200
FLOAT64, FLOAT32 = 1e-12, 1e-5


def cut(tp: int, *, dp: int = 1) -> Plan:
    """The hidden layer by columns, the classifier by rows: one sum forward, one backward (Megatron's division)."""
    model = load_model(MLP, granularity="layer")
    texts = {"layers.0": f"shard:column/{tp}", "layers.3": f"shard:row/{tp}"}
    mesh = Mesh(dp=dp, tp=tp)
    names = tuple(component.name for component in model.components)
    assert set(texts) <= set(names)
    stage = Stage(
        components=names,
        ranks=mesh.stage_ranks(0),
        placements=tuple(parse_placement(texts.get(name, "replicate")) for name in names),
    )
    return Plan(strategy="custom", mesh=mesh, stages=(stage,), global_batch=32)


def case(plan: Plan, dtype: str, *, granularity: str = "block") -> Case:
    return Case(spec=MLP, plan=plan, optimizer="sgd", learning_rate=0.1, dtype=dtype, granularity=granularity)


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_data_parallel_tensor_sharded_and_pipelined_training_equal_plain_sgd(tmp_path: Path) -> None:
    """1. four replicas; 2. columns and rows; 3. eight microbatches through a pipeline: max |dw| 1e-12, in fp32 1e-5."""
    dp = even_plan(MLP, Mesh(dp=4), strategy="dp", batch=32)
    pipeline = replace(even_plan(MLP, Mesh(pp=2, dp=2), strategy="hp", batch=32, microbatches=8), pipeline_order="gpipe")
    cases = [
        case(plan, dtype, granularity=granularity)
        for plan, granularity in ((dp, "block"), (cut(4), "layer"), (pipeline, "block"))
        for dtype in ("float64", "float32")
    ]
    for tried, run in zip(cases, run_cases(cases, tmp_path, steps=STEPS), strict=True):
        worst = compare_case(tried, run, tmp_path, steps=STEPS).parameters
        assert worst <= (FLOAT64 if tried.dtype == "float64" else FLOAT32), f"{tried}: {worst:.1e}"


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_dp_to_hp_and_back_leaves_weights_and_optimizer_state_as_without_a_switch(tmp_path: Path) -> None:
    """4. The plan changes after 70 steps and changes back after 140."""
    names = tuple(component.name for component in load_model(MLP, granularity="layer").components)
    mesh = Mesh(dp=4)
    dp = Plan(strategy="dp", mesh=mesh, stages=(Stage(components=names, ranks=mesh.stage_ranks(0)),), global_batch=32)
    model = tmp_path / "model.json"
    load_model(MLP, granularity="layer").save(model)
    states = []
    for name, switches in (("straight", ()), ("switched", (Switch(step=70, plan=cut(2, dp=2)), Switch(step=140, plan=dp)))):
        folder = tmp_path / name
        folder.mkdir()
        run = RunSpec(
            name="run",
            model=MLP,
            model_path=str(model),
            plan=dp,
            optimizer="adam",
            learning_rate=1e-3,
            dataset="digits",
            dtype="float64",
        )
        job = Job(output=str(folder), mode="train", runs=(run,), steps=STEPS, warmup_steps=0, switches=switches)
        job.save(folder / "job.json")
        launch(folder / "job.json", job.world_size, timeout_s=300)
        found = newest(folder / "checkpoints")
        assert found.step == STEPS
        states.append(load_state(found))
    straight, switched = states
    assert largest_difference(dict(straight.weights), dict(switched.weights)) <= 1e-10
    assert straight.optimizer
    for parameter, state in straight.optimizer.items():
        assert largest_difference(dict(state), dict(switched.optimizer[parameter])) <= 1e-10
