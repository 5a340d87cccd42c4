"""Decoupled stages on real processes: equal to the tick engine of one process, and resumed with batches in flight."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import parsim as ps
from experiments.common.equality import Case, even_plan, run_cases
from experiments.common.forked import run_job
from experiments.relaxed.decoupled import DECOUPLINGS, TickEngine, TickRule
from parsim.data.samples import BatchOrder, part
from parsim.errors import PlanError
from parsim.execute.checkpoint.checkpoint import load_state
from parsim.execute.job import Job, RunSpec
from parsim.execute.rank_run import run_dataset
from parsim.execute.stage import seeded_module
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan
from parsim.plans.synchronisation import parse_synchronisation
from parsim.program.lower import lower
from tests.execute.rank_states import newest
from tests.unit.test_virtual_stale import mode_of, ticks_of

TOLERANCE = 1e-12
STEPS = 20


def chain(depth: int = 4, width: int = 12, norm: bool = False) -> nn.Sequential:
    """Linear layers one behind another, each with what follows it as one child."""
    layers: list[nn.Module] = []
    inputs = 64
    for _ in range(depth):
        between = [nn.BatchNorm1d(width)] if norm else []
        first = [nn.Flatten()] if not layers else []
        layers.append(nn.Sequential(*first, nn.Linear(inputs, width), *between, nn.Tanh()))
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, 10))


def spec(**args: object) -> ModelSpec:
    return ModelSpec(name="tests.execute.test_stale_run:chain", args=tuple(args.items()), input_shape=(1, 8, 8))


def stale_plan(model: ModelSpec, mesh: Mesh, text: str = "stale") -> Plan:
    plan = even_plan(model, mesh, strategy="hp" if mesh.dp > 1 else "mp", batch=8 * mesh.dp)
    return replace(plan, synchronisation=parse_synchronisation(text))


def run_of(plan: Plan, model: ModelSpec, folder: Path, **options: object) -> RunSpec:
    folder.mkdir(exist_ok=True)
    load_model(model).save(folder / "model.json")
    return RunSpec(
        name="run",
        model=model,
        model_path=str(folder / "model.json"),
        plan=plan,
        optimizer="sgd_momentum",
        learning_rate=0.05,
        dataset="digits",
        dtype="float64",
        seed=3,
        **options,  # type: ignore[arg-type]
    )


def train(run: RunSpec, folder: Path, *, steps: int, resume: bool = False) -> None:
    job = Job(output=str(folder), mode="train", runs=(run,), steps=steps, warmup_steps=0, checkpoint_every=50, resume=resume)
    job.save(folder / "job.json")
    run_job(folder / "job.json")


def ticked(run: RunSpec, steps: int) -> TickEngine:
    """The tick engine on the run's stages, samples and order; nothing is drained."""
    data, plan = run_dataset(run, "train"), run.plan
    arrays = data.values(np.arange(len(data)))
    inputs, targets = torch.tensor(arrays["input:0"], dtype=torch.float64), torch.tensor(arrays["target"])
    module = seeded_module(run.model, run.seed, torch.float64, torch.device("cpu"))
    assert isinstance(module, nn.Sequential)
    children, pieces = list(module), []
    for stage in plan.stages:
        size = len([name for name in stage.components if name != "loss"])
        pieces.append(nn.Sequential(*children[:size]))
        del children[:size]
    assert not children
    asked = plan.synchronisation
    DECOUPLINGS[str(asked)] = ticks_of(asked)
    rule = TickRule(schedule=str(asked), mode=mode_of(asked), beta=asked.beta, learning_rate=run.learning_rate, momentum=0.9)
    graph = (lambda _: asked.matrix(0, plan.mesh.dp)) if asked.mixes else None
    engine = TickEngine(pieces, nn.functional.cross_entropy, rule, groups=plan.mesh.dp, mixing=graph)
    order = BatchOrder(n=len(data), global_batch=plan.global_batch, seed=run.seed)
    for step in range(steps):
        samples = [part(order.indices(step), replica=replica, dp=plan.mesh.dp) for replica in range(plan.mesh.dp)]
        engine.step([(inputs[own], targets[own]) for own in samples])
    return engine


def difference(run: RunSpec, folder: Path) -> float:
    """Of all weights and running statistics, from the tick engine after as many steps."""
    found = newest(folder)
    engine = ticked(run, found.step)
    first = 0
    worst = 0.0
    weights = load_state(found).weights
    for agents, means in zip(zip(*engine.agents, strict=True), engine.average_parameters(), strict=True):
        agent = agents[0]
        for name, value in means.items():
            child, _, rest = name.partition(".")
            worst = max(worst, (weights[f"{int(child) + first}.{rest}"] - value).abs().max().item())
        for replica, own in enumerate(agents):
            rank = run.plan.stages[agent.k - 1].ranks[replica]
            kept = load_state(found, rank=rank).buffers
            for name, buffer in own.module.named_buffers():
                child, _, rest = name.partition(".")
                worst = max(worst, (kept[f"{int(child) + first}.{rest}"] - buffer).abs().max().item())
        first += len(agent.module)  # type: ignore[arg-type]
    return worst


def cases(*meshes: Mesh, texts: tuple[str, ...] = ("stale",)) -> list[Case]:
    return [
        Case(spec=model, plan=stale_plan(model, mesh, text), optimizer="sgd_momentum", learning_rate=0.05)
        for mesh in meshes
        for text in texts
        for model in (spec(), spec(norm=True))
    ]


def assert_equal_to_ticks(given: list[Case], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for case, run in zip(given, run_cases(given, folder, steps=STEPS), strict=True):
        assert difference(run, folder / run.name / "checkpoints") <= TOLERANCE, str(case)


@pytest.mark.slow
def test_two_stages_equal_the_tick_engine(tmp_path: Path) -> None:
    words = ("", "schedule=ddg beta=0.5", "schedule=fr", "backward=fresh", "backward=replay beta=0.7")
    two = tuple(f"stale {each}".strip() for each in words)
    assert_equal_to_ticks(cases(Mesh(pp=2), texts=two), tmp_path)


@pytest.mark.slow
def test_four_ranks_equal_the_tick_engine(tmp_path: Path) -> None:
    four = ("stale", "stale delays=4,3,1,0", "stale delays=2,2,1,0 backward=replay", "stale schedule=ddg backward=fresh")
    assert_equal_to_ticks(cases(Mesh(pp=4), texts=four), tmp_path / "pipelines")
    mixed = ("gossip/1 weights=0.8,0.2;0.2,0.8 schedule=fdg", "average/1 schedule=fr beta=0.5")
    assert_equal_to_ticks(cases(Mesh(pp=2, dp=2), texts=("stale", "stale schedule=fr", *mixed)), tmp_path / "replicas")


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "text"), [(1, "stale"), (13, "stale"), (13, "stale schedule=fr beta=0.5")])
def test_a_resumed_training_goes_on_with_the_batches_in_flight(stop: int, text: str, tmp_path: Path) -> None:
    """Stopped while the stages fill, and when they are full."""
    model = spec(norm=True)
    run = run_of(stale_plan(model, Mesh(pp=2), text), model, tmp_path)
    train(run, tmp_path, steps=stop)
    train(run, tmp_path, steps=STEPS, resume=True)
    found = newest(tmp_path / "checkpoints")
    assert found.step == STEPS
    assert difference(run, tmp_path / "checkpoints") <= TOLERANCE


@pytest.mark.slow
def test_no_stage_moves_before_its_first_gradient(tmp_path: Path) -> None:
    """With momentum and weight decay an optimizer would move weights by gradients of zero."""
    model = spec()
    run = run_of(stale_plan(model, Mesh(pp=2)), model, tmp_path)
    train(run, tmp_path, steps=2)
    found = newest(tmp_path / "checkpoints")
    begin = dict(seeded_module(model, run.seed, torch.float64, torch.device("cpu")).named_parameters())
    moved = {name for name, value in load_state(found).weights.items() if not torch.equal(value, begin[name])}
    behind = {name for name in begin if any(name.startswith(part + ".") for part in run.plan.stages[1].components)}
    assert behind
    assert moved == behind


def test_tied_weights_of_two_stages_are_refused() -> None:
    model = load_model(ModelSpec(name="gpt", args=(("layers", 2), ("hidden", 16), ("heads", 2), ("vocab", 32), ("seq", 8))))
    names = [component.name for component in model.components]
    plan = even_plan(spec(), Mesh(pp=2), strategy="mp", batch=8)
    stages = tuple(
        replace(stage, components=tuple(part)) for stage, part in zip(plan.stages, (names[:2], names[2:]), strict=True)
    )
    with pytest.raises(PlanError, match="stages share"):
        lower(replace(plan, stages=stages, synchronisation=parse_synchronisation("stale")), model)


@pytest.mark.slow
def test_a_run_counts_the_losses_that_there_are(tmp_path: Path) -> None:
    """The last stage sees the first batch one step late; memory is counted while all stages are full."""
    (tmp_path / "run.toml").write_text(RUN_FILE)
    measured = ps.run(tmp_path / "run.toml", out=tmp_path / "run")
    assert len(measured.losses) == 11
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert ["loss" in line for line in lines] == [False] + [True] * 11
    memory = measured.memory()
    assert (memory.relative_error.abs() < 0.03).all(), memory


RUN_FILE = """
[model]
name = "mlp"
args = { width = 64 }
[cluster]
profile = "this-machine"
devices = 2
[training]
global_batch = 32
steps = 12
[plan]
strategy = "mp"
mesh = { pp = 2 }
[plan.synchronisation]
kind = "stale"
"""
