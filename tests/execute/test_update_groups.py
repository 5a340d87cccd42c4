"""Several networks with optimizers of their own in one model: a GAN trains under a plan as in the loop that people write."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import parsim
from parsim.data.datasets import dataset_for
from parsim.data.samples import order_of
from parsim.errors import ConfigError
from parsim.execute.checkpoint.checkpoint import latest_checkpoint, load_state
from parsim.execute.job import Argument, EmaRule, RunSpec, Schedule, TrainingRecipe, UpdateGroup, with_update_groups
from parsim.execute.stage import seeded_module
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.records import sorted_pairs
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.predict.problem import PlanningProblem
from parsim.program.lower import lower
from parsim.program.taskgraph import from_text, to_text
from parsim.program.templates import lower_columns
from parsim.work import OptimizerStep
from tests.execute.equality import Case, compare_case, even_plan, run_cases
from tests.execute.test_bad_run import cpu_profile
from tests.matrix.kinds import GAME

STEPS = 5
BETAS = sorted_pairs({"betas": (0.5, 0.9)})


def group(
    name: str, pattern: str, optimizer: str, rate: float, arguments: tuple[tuple[str, Argument], ...] = ()
) -> UpdateGroup:
    return UpdateGroup(name=name, parameters=(pattern,), optimizer=optimizer, learning_rate=rate, optimizer_args=arguments)


CRITIC, MAKER = "discriminator.*", "generator.*"
TWO_RATES = (group("critic", CRITIC, "adam", 4e-3, BETAS), group("maker", MAKER, "adam", 1e-3, BETAS))
UNLIKE = (group("critic", CRITIC, "sgd_momentum", 2e-2), group("maker", MAKER, "adamw", 1e-3))
HEAD = (group("head", "discriminator.2.*", "sgd", 0.1),)
TTUR, APART, REST = (TrainingRecipe(groups=groups) for groups in (TWO_RATES, UNLIKE, HEAD))
DECAYED = TrainingRecipe(
    weight_decay=0.1, no_weight_decay=("bias",), groups=(replace(TWO_RATES[0], weight_decay=0.3), TWO_RATES[1])
)
CLIPPED = replace(REST, schedule=Schedule(name="CosineAnnealingLR", warmup=2), clip_norm=0.1)


def case(mesh: Mesh, recipe: TrainingRecipe, **options: object) -> Case:
    plan = even_plan(GAME, mesh, strategy="dp" if mesh.dp > 1 else "single" if mesh.pp == 1 else "mp", batch=8, **options)  # type: ignore[arg-type]
    plan = replace(plan, clip_gradients=recipe.clip_norm is not None)
    return Case(spec=GAME, plan=plan, dataset="synthetic", optimizer="adam", learning_rate=2e-3, recipe=recipe)


CASES = [
    case(Mesh(), TTUR),
    case(Mesh(), APART, microbatches=2),
    case(Mesh(dp=2), TTUR, bucket_bytes=2**9),
    case(Mesh(dp=2), APART, zero_stage=1),
    case(Mesh(dp=2), TTUR, zero_stage=2, microbatches=2),
    case(Mesh(dp=2), APART, zero_stage=3),
    case(Mesh(dp=2), replace(APART, ema=EmaRule(decay=0.9)), zero_stage=3),
    case(Mesh(dp=2), DECAYED, zero_stage=1),
    case(Mesh(pp=2), TTUR, microbatches=2),
    case(Mesh(dp=2), CLIPPED),
]


def plain_loop(run: RunSpec) -> dict[str, torch.Tensor]:
    """The loop that people write: a loss and an optimizer for each player, both updated from the same weights."""
    module = seeded_module(GAME, run.seed, torch.float64, torch.device("cpu"))
    data = dataset_for(GAME, "synthetic", root=None, split="train", seed=run.seed)
    order = order_of(data, 8, run.seed)
    made: dict[str, torch.optim.Optimizer] = {}
    for group, player in zip(run.recipe.groups, (module.discriminator, module.generator), strict=True):
        arguments = dict(group.optimizer_args)
        make = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd_momentum": torch.optim.SGD}[group.optimizer]
        if group.optimizer == "sgd_momentum":
            arguments["momentum"] = 0.9
        made[group.name] = make(player.parameters(), lr=group.learning_rate, **arguments)  # type: ignore[operator]
    for step in range(STEPS):
        real, noise = (torch.from_numpy(np.asarray(value)).double() for value in data.values(order.indices(step)).values())
        fake = module.generator(noise)
        critic = (F.softplus(-module.discriminator(real)) + F.softplus(module.discriminator(fake.detach()))).mean()
        of_critic = torch.autograd.grad(critic, list(module.discriminator.parameters()))
        of_maker = torch.autograd.grad(F.softplus(-module.discriminator(fake)).mean(), list(module.generator.parameters()))
        for player, found in ((module.discriminator, of_critic), (module.generator, of_maker)):
            for parameter, gradient in zip(player.parameters(), found, strict=True):
                parameter.grad = gradient
        for optimizer in made.values():
            optimizer.step()
    return dict(module.named_parameters())


@pytest.mark.xdist_group("launch")
def test_players_train_as_in_a_plain_loop(tmp_path: Path) -> None:
    """Weights of every plan after five steps in float64, on one and on two processes; the optimizers' states too."""
    runs = run_cases(CASES, tmp_path, steps=STEPS)
    for item, run in zip(CASES, runs, strict=True):
        difference = compare_case(item, run, tmp_path, steps=STEPS)
        assert difference.worst <= 1e-10, f"{item}: {difference}"
        if run.recipe not in (TTUR, APART):
            continue
        found = latest_checkpoint(tmp_path / run.name / "checkpoints")
        assert found is not None
        weights = load_state(found).weights
        for name, expected in plain_loop(run).items():
            assert torch.allclose(weights[name], expected, rtol=0, atol=1e-10), f"{item}: {name}"


def model_of(groups: tuple[UpdateGroup, ...], granularity: str = "block") -> Model:
    return with_update_groups(load_model(GAME, granularity=granularity), groups)


def steps_of(model: Model, mesh: Mesh, **options: object) -> dict[int, list[OptimizerStep]]:
    graph = lower(case(mesh, TTUR, **options).plan, model)
    found: dict[int, list[OptimizerStep]] = {}
    for task in graph.tasks:
        if isinstance(task.work, OptimizerStep):
            found.setdefault(task.ranks[0], []).append(task.work)
    return found


def elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_each_player_has_a_task_of_its_own() -> None:
    module = seeded_module(GAME, 0, torch.float32, torch.device("cpu"))
    sizes = {"critic": elements(module.discriminator), "maker": elements(module.generator)}
    for steps in steps_of(model_of(UNLIKE), Mesh(dp=2)).values():
        assert [(step.update_group, step.optimizer, step.elements) for step in steps] == [
            ("critic", "sgd_momentum", sizes["critic"]),
            ("maker", "adamw", sizes["maker"]),
        ]
    rest = steps_of(model_of(HEAD), Mesh())[0]
    assert [(step.update_group, step.optimizer) for step in rest] == [("", ""), ("head", "sgd")]
    assert sum(step.elements for step in rest) == sum(sizes.values())


@pytest.mark.parametrize(
    ("mesh", "options"),
    [(Mesh(dp=4), {"zero_stage": 2}), (Mesh(pp=2, dp=2), {"microbatches": 2}), (Mesh(dp=2, tp=2), {"zero_stage": 1})],
)
def test_equal_components_of_two_groups_expand_to_the_same_program(mesh: Mesh, options: dict[str, int]) -> None:
    """Two Linear layers that are alike, but for their groups, are not copied for one another."""
    spec = ModelSpec(name="mlp")
    first = load_model(spec).components[0].parameters[0].name
    model = with_update_groups(load_model(spec), (group("first", first, "adam", 1e-3),))
    plan = even_plan(spec, mesh, strategy="hp" if mesh.pp * mesh.tp > 1 else "dp", batch=16, **options)  # type: ignore[arg-type]
    columns, graph = lower_columns(plan, model), lower(plan, model)
    assert columns.size == len(graph.tasks)
    for task in graph.tasks:
        assert sorted(columns.dependencies.row(task.index).tolist()) == list(task.dependencies)
        assert columns.units[columns.unit[task.index]].work == task.work
    assert from_text(to_text(graph)) == graph


def test_memory_and_price_are_those_of_each_players_optimizer() -> None:
    """SGD with momentum keeps 4 bytes of a parameter, AdamW 8; the step takes the sum of both."""
    module = seeded_module(GAME, 0, torch.float32, torch.device("cpu"))
    critic, maker = elements(module.discriminator), elements(module.generator)
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"), 1)
    plan = case(Mesh(), TTUR).plan

    def problem(groups: tuple[UpdateGroup, ...], optimizer: str = "adam") -> PlanningProblem:
        return PlanningProblem(model=model_of(groups), cluster=cluster, global_batch=8, optimizer=optimizer)

    (unlike,) = problem(UNLIKE).memory(plan)
    assert unlike.line("optimizer_state") == 4 * critic + 8 * maker
    (alike,) = problem(TWO_RATES).memory(plan)
    assert alike.line("optimizer_state") == 8 * (critic + maker)
    costs = problem(UNLIKE).costs(1)
    price = {
        name: costs.estimate(OptimizerStep(elements=critic, tensors=4, update_group="critic", optimizer=name), 0).median_s
        for name in ("sgd_momentum", "adamw")
    }
    usual = problem((), "sgd_momentum").costs(1).estimate(OptimizerStep(elements=critic, tensors=4), 0).median_s
    assert price["sgd_momentum"] == usual < price["adamw"]


def test_no_group_changes_nothing() -> None:
    model = load_model(GAME)
    assert with_update_groups(model, ()) is model
    grouped = model_of(TWO_RATES)
    assert [component.fingerprint for component in grouped.components] == [entry.fingerprint for entry in model.components]
    assert Model.from_json(grouped.to_json()) == grouped
    assert "group" not in model.to_json()
    assert with_update_groups(grouped, ()) == model, "what a saved Model says of groups is not asked for any more"


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            (group("critic", "discriminatr.*", "adam", 1e-3),),
            r"training\.groups\.critic: no parameter matches 'discriminatr\.\*'.*such as \"generator\.\*\"",
        ),
        (
            (group("one", MAKER, "adam", 1e-3), group("two", "*.0.weight", "adam", 1e-3)),
            r"parameter generator\.0\.weight is in training\.groups\.one and in training\.groups\.two; .*narrower",
        ),
    ],
)
def test_patterns_that_match_nothing_or_twice_are_refused(groups: tuple[UpdateGroup, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_of(groups)


RUN = """\
[model]
name = "tests.matrix.kinds:Game"
loss = "own"
inputs = { real = { shape = [8] }, noise = { shape = [4] } }
[cluster]
profile = "profile.json"
devices = 2
[training]
global_batch = 8
dataset = "synthetic"
optimizer = "Adam"
learning_rate = 0.002
steps = 8
dtype = "float64"
[training.schedule]
name = "CosineAnnealingLR"
[training.groups.critic]
parameters = ["discriminator.*"]
optimizer = "SGD"
optimizer_args = { momentum = 0.5 }
learning_rate = 0.02
[plan]
strategy = "dp"
zero_stage = 1
"""


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_a_run_file_with_groups_is_priced_run_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = cpu_profile()
    fits = profile["communication"]["fits"]
    fits += [{**fits[0], "operation": operation} for operation in ("reduce_scatter", "all_gather")]
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARSIM_ALLOW_CODE", "1")
    straight = parsim.run("run.toml", out="straight").to_dict()
    lines = [json.loads(line) for line in Path("straight/metrics.jsonl").read_text().splitlines()]
    assert lines[0]["learning_rate"] == pytest.approx(0.002)
    assert lines[0]["learning_rate.critic"] == pytest.approx(0.02)
    assert lines[4]["learning_rate.critic"] == pytest.approx(10 * lines[4]["learning_rate"])
    assert lines[4]["learning_rate"] < 0.002
    parsim.run("run.toml", out="parts", overrides=["training.steps=4", "training.schedule.T_max=8"])
    resumed = parsim.run("run.toml", out="parts", overrides=["training.schedule.T_max=8"], resume=True).to_dict()
    assert resumed["losses"] == pytest.approx(straight["losses"], abs=1e-12)
    with pytest.raises(ConfigError, match=r"training\.groups .parameters and optimizer."):
        parsim.run("run.toml", out="parts", overrides=['training.groups.critic.parameters=["discriminator.0.*"]'], resume=True)
