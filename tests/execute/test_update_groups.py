"""Several networks with optimizers of their own in one model: tasks, memory, price. `test_equality` trains a GAN."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import parsim
from experiments.common.equality import even_plan
from parsim.errors import ConfigError
from parsim.execute.job import UpdateGroup, with_update_groups
from parsim.execute.stage import seeded_module
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.predict.problem import PlanningProblem
from parsim.program.columns import columns_of
from parsim.program.lower import lower
from parsim.program.taskgraph import from_text, to_text
from parsim.program.templates import lower_columns
from parsim.work import OptimizerStep
from tests.execute.test_bad_run import cpu_profile
from tests.execute.test_equality import APART, MAKER, TTUR, TWO_RATES, game, group
from tests.matrix.kinds import GAME
from tests.theory.test_lowering_by_kinds import tasks_of

UNLIKE, HEAD = APART.update_groups, (group("head", "discriminator.2.*", "sgd", 0.1),)


def model_of(groups: tuple[UpdateGroup, ...], granularity: str = "block") -> Model:
    return with_update_groups(load_model(GAME, granularity=granularity), groups)


def steps_of(model: Model, mesh: Mesh, **options: object) -> dict[int, list[OptimizerStep]]:
    graph = lower(game(mesh, TTUR, **options).plan, model)
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
    graph = lower(plan, model)
    assert tasks_of(lower_columns(plan, model)) == tasks_of(columns_of(graph))
    assert from_text(to_text(graph)) == graph


def test_memory_and_price_are_those_of_each_players_optimizer() -> None:
    """SGD with momentum keeps 4 bytes of a parameter, AdamW 8; the step takes the sum of both."""
    module = seeded_module(GAME, 0, torch.float32, torch.device("cpu"))
    critic, maker = elements(module.discriminator), elements(module.generator)
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"), 1)
    plan = game(Mesh(), TTUR).plan

    def problem(groups: tuple[UpdateGroup, ...], optimizer: str = "adam") -> PlanningProblem:
        return PlanningProblem(model=model_of(groups), cluster=cluster, global_batch=8, numerics=Numerics(optimizer=optimizer))

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
