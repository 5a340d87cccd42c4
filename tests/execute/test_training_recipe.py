"""Recipes as tasks, memory and price: schedules, clipping, averages, groups of parameters. `test_equality` trains."""

from __future__ import annotations

import json
import random
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import parsim
from experiments.common.equality import Case, even_plan
from experiments.common.mixed import MODELS, random_case
from parsim.app.ask import ask
from parsim.app.config import load_config
from parsim.app.foreign import export_folder
from parsim.app.launch import check_runnable
from parsim.data.samples import BatchOrder
from parsim.errors import ConfigError, PlanError
from parsim.execute.job import EmaRule, Schedule, TrainingRecipe, UpdateGroup, with_update_groups
from parsim.execute.optimizer import LearningRates, check_exempt, check_schedule, exempt_names
from parsim.execute.stage import seeded_module
from parsim.execute.train import _board, _show
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.records import sorted_pairs
from parsim.model.build import build_module
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan
from parsim.predict.evaluate import evaluate
from parsim.predict.problem import PlanningProblem
from parsim.program.columns import columns_of
from parsim.program.lower import lower
from parsim.program.passes.gradients import counted_by, sums_norm
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import from_text, to_text
from parsim.program.templates import lower_columns
from parsim.search.search import search
from parsim.work import ClipGradients, Collective, OptimizerStep
from tests.execute.small_plans import GPT, MLP, VIT, case
from tests.execute.test_bad_run import write_profile
from tests.execute.test_equality import APART, MAKER, TTUR, TWO_RATES, game, group
from tests.matrix.kinds import GAME
from tests.quick import some_quick
from tests.theory.test_lowering_by_kinds import tasks_of

EPOCHS_OF_TEN = BatchOrder(n=40, global_batch=4)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("CosineAnnealingLR", {"T_max": 30}),
        ("OneCycleLR", {"max_lr": 0.5, "total_steps": 30}),
        ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.2, "step_size_up": 4}),
        ("PolynomialLR", {"total_iters": 30, "power": 2.0}),
        ("CosineAnnealingWarmRestarts", {"T_0": 7}),
        ("MultiStepLR", {"milestones": [3, 11]}),
        ("StepLR", {"step_size": 4}),
        ("ExponentialLR", {"gamma": 0.9}),
        ("LinearLR", {"start_factor": 0.1, "total_iters": 9}),
        ("ConstantLR", {"factor": 0.5}),
    ],
)
def test_rates_and_momenta_are_torchs(name: str, arguments: dict[str, object]) -> None:
    """Asked in any order: what a resumed training replays is what one that was never stopped has."""
    schedule = Schedule(name=name, arguments=sorted_pairs(arguments))
    rate = LearningRates("sgd_momentum", 0.1, TrainingRecipe(schedule=schedule), steps=30, order=EPOCHS_OF_TEN)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    expected = getattr(lr_scheduler, name)(optimizer, **arguments)
    wanted = []
    for _ in range(30):
        wanted.append({key: optimizer.param_groups[0][key] for key in ("lr", "momentum")})
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if len(wanted) < 30:
                expected.step()
    assert [rate.settings(step)[""] for step in range(30)] == wanted
    assert rate.settings(12)[""] == wanted[12]
    assert rate.settings(5)[""] == wanted[5]


def test_warm_up_rises_in_equal_parts_and_counts_epochs() -> None:
    recipe = TrainingRecipe(
        schedule=Schedule(name="StepLR", arguments=(("gamma", 0.5), ("step_size", 2)), warmup=3, per="epoch")
    )
    rate = LearningRates("adam", 1.0, recipe, steps=80, order=EPOCHS_OF_TEN)
    assert [rate.of(10 * epoch)[""] for epoch in range(8)] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 0.5, 0.5, 0.25])
    assert rate.of(19) == rate.of(10)


def test_reduce_on_plateau_keeps_its_state() -> None:
    recipe = TrainingRecipe(schedule=Schedule(name="ReduceLROnPlateau", arguments=(("factor", 0.5), ("patience", 1)), warmup=2))
    rate = LearningRates("sgd", 0.4, recipe, steps=50, order=EPOCHS_OF_TEN)
    other = LearningRates("sgd", 0.4, recipe, steps=50, order=EPOCHS_OF_TEN)
    assert rate.of(0)[""] == pytest.approx(0.4 / 3)
    rate.saw(9.0, 1)  # within the warm-up: not followed
    for step, score in enumerate([1.0, 1.1]):
        rate.saw(score, 10 + step)
    other.load(rate.state())
    rate.saw(1.2, 20)
    other.saw(1.2, 20)
    assert rate.of(20)[""] == other.of(20)[""] == pytest.approx(0.2)


def test_norms_and_biases_are_found_by_their_modules() -> None:
    module = seeded_module(VIT, 0, torch.float32, torch.device("cpu"))
    exempt = exempt_names(module, ("norm", "bias"))
    for name, parameter in module.named_parameters():
        assert (name in exempt) == (name.endswith("bias") or "ln" in name), name
        assert name in exempt or parameter.dim() > 1
    with pytest.raises(ConfigError, match=r"no parameter matches 'nrom'; did you mean norm"):
        check_exempt(dict(module.named_parameters()), ["nrom"])


def test_torch_names_what_is_wrong_with_a_schedule() -> None:
    recipe = TrainingRecipe(schedule=Schedule(name="PolynomialLR", arguments=(("total_iters", "ten"),)))
    with pytest.raises(ConfigError, match=r"training\.schedule"):
        check_schedule("sgd", 0.1, recipe, steps=10, order=EPOCHS_OF_TEN)
    short = TrainingRecipe(schedule=Schedule(name="OneCycleLR", arguments=(("total_steps", 5),)))
    with pytest.raises(ConfigError, match="OneCycleLR fails before step 10"):
        check_schedule("sgd_momentum", 0.1, short, steps=10, order=EPOCHS_OF_TEN)


# Clipping by the global norm as tasks of the graph, and its price. `test_equality` trains with it.


@pytest.mark.parametrize("seed", some_quick(range(2, 5), 2))
def test_every_gradient_is_counted_once(seed: int) -> None:
    item = random_case(random.Random(seed).choice(list(MODELS)), 4, random.Random(seed))
    layout = PlanIndex(item.plan, item.model)
    counted: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for rank in range(item.plan.world_size):
        for part in counted_by(layout, rank):
            name = tuple((held.name, held.shard if held.part else 0, held.ways) for held in part.bucket.parameters)
            if part.elements:
                counted.setdefault(name, []).append((part.start, min(part.stop, part.bucket.elements)))
    total = 0
    for parts in counted.values():
        end = 0
        for start, stop in sorted(parts):
            assert start == end
            end = stop
        total += end
    assert total == sum(parameter.elements for parameter in item.model.parameters if parameter.trainable)


def with_clipping(item: Case) -> Plan:
    return replace(item.plan, clip_gradients=True)


@pytest.mark.parametrize("stage", range(4))
def test_clipping_stands_in_the_graph(stage: int) -> None:
    """Two computations per rank and one all_reduce of 8 bytes between them."""
    item = case(MLP, Mesh(pp=2, dp=2), zero_stage=stage, microbatches=2)
    graph, plain = lower(with_clipping(item), item.model), lower(item.plan, item.model)
    norms = [task for task in graph.tasks if sums_norm(task)]
    assert len(graph.tasks) == len(plain.tasks) + 2 * 4 + 1
    assert [task.work for task in norms] == [Collective(operation="all_reduce", group=(0, 1, 2, 3), size_bytes=8)]
    clips = [task for task in graph.tasks if isinstance(task.work, ClipGradients)]
    assert {(task.ranks[0], task.work.part) for task in clips if isinstance(task.work, ClipGradients)} == {
        (rank, part) for rank in range(4) for part in ("norm", "scale")
    }
    assert from_text(to_text(graph)) == graph
    assert Plan.from_json(with_clipping(item).to_json()) == with_clipping(item)


def clipped_problem(clip: bool) -> PlanningProblem:
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"), 4)
    return PlanningProblem(model=case(GPT, Mesh()).model, cluster=cluster, global_batch=16, clip_gradients=clip)


def test_clipping_is_priced_folded_or_not() -> None:
    """Every plan of a search clips, and its step is longer for it; folding changes nothing."""
    plain, asked = clipped_problem(False), clipped_problem(True)
    for item in (case(GPT, Mesh(dp=4), batch=16), case(GPT, Mesh(pp=2, dp=2), batch=16, microbatches=2, zero_stage=1)):
        plan = with_clipping(item)
        with_it = evaluate(asked, plan, fold=False).result.step_s.median
        assert with_it > evaluate(plain, item.plan, fold=False).result.step_s.median
        assert evaluate(asked, plan).result.step_s.median == pytest.approx(with_it, rel=1e-9)
    found = search(asked, ("dp",))
    assert found.chosen is not None
    assert found.chosen.result.plan.clip_gradients


# Moving averages of the weights: torch's AveragedModel, exported, validated, predicted. `test_equality` trains with them.


def test_torchs_averaged_model_itself_is_the_oracle() -> None:
    """Our update against the class as users call it, on a module of one's own."""
    from parsim.execute.optimizer import update_averages

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2)).double()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    theirs = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for _ in range(12):
        optimizer.zero_grad()
        module(torch.randn(6, 5, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        update_averages(optimizer, 0.8)
        theirs.update_parameters(module)
        for parameter, expected in zip(module.parameters(), theirs.module.parameters(), strict=True):
            assert torch.allclose(optimizer.state[parameter]["ema"], expected, rtol=0, atol=1e-14)


def problem(*, ema: bool, precision: str = "fp32", master_weights: bool = True) -> PlanningProblem:
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"), 4)
    model = case(GPT, Mesh()).model
    return PlanningProblem(
        model=model,
        cluster=cluster,
        global_batch=16,
        numerics=Numerics(optimizer="adamw", precision=precision, ema=ema, master_weights=master_weights),
    )


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_the_memory_and_the_time_of_averages_are_predicted(zero_stage: int) -> None:
    plan = case(GPT, Mesh(dp=4), batch=16, zero_stage=zero_stage).plan
    plain, asked = (evaluate(problem(ema=ema), plan, fold=False) for ema in (False, True))
    for before, after in zip(plain.memory, asked.memory, strict=True):
        state, more = dict(before.lines)["optimizer_state"], dict(after.lines)["optimizer_state"]
        assert more == pytest.approx(1.5 * state, rel=1e-6)  # two moments and the average
        assert after.total_bytes - before.total_bytes == pytest.approx(more - state, rel=0.01)
    assert asked.result.step_s.median > plain.result.step_s.median


RUN = """\
[model]
name = "mlp"
args = { width = 24 }
[cluster]
profile = "profile.json"
devices = 2
[training]
global_batch = 16
dtype = "float64"
optimizer = "AdamW"
learning_rate = 0.01
steps = 8
ema = { decay = 0.7, evaluate = true }
tensorboard = TENSORBOARD
[training.evaluation]
every = 4
[plan]
strategy = "dp"
zero_stage = 1
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_profile(tmp_path, "reduce_scatter", "all_gather")
    (tmp_path / "run.toml").write_text(RUN.replace("TENSORBOARD", "false"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_averages_are_validated_and_exported(here: Path) -> None:
    from experiments.common.reference import train_reference
    from parsim.app.launch import run_spec
    from parsim.app.train import run
    from parsim.execute.rank_run import run_dataset

    done = run("run.toml", out="kept")
    spec = run_spec(done.prediction, "run", Path("kept/model.json"))
    expected = train_reference(
        spec.model,
        spec.plan,
        run_dataset(spec, "train"),
        optimizer="adamw",
        learning_rate=0.01,
        dtype=torch.float64,
        seed=0,
        steps=8,
        recipe=TrainingRecipe(ema=EmaRule(decay=0.7)),
    )
    file = done.export_weights(weights="ema", checkpoint="last")
    assert file.name == "ema.pt"
    exported = torch.load(file, weights_only=True)
    plain = torch.load(done.export_weights(checkpoint="last"), weights_only=True)
    for name, state in expected.optimizer_state.items():
        assert torch.allclose(exported[name], state["ema"], rtol=0, atol=1e-10)
        assert torch.allclose(plain[name], expected.parameters[name], rtol=0, atol=1e-10)
    module = build_module(spec.model).double()
    module.load_state_dict(exported)
    data = run_dataset(spec, "validation")
    values = data.values(np.arange(len(data)))
    with torch.no_grad():
        output = module.eval()(torch.from_numpy(values["input:0"]).double())
        loss = torch.nn.functional.cross_entropy(output, torch.from_numpy(values["target"]).long())
    assert done.document["validation"][-1]["loss"] == pytest.approx(float(loss), rel=1e-6)


def test_what_ema_needs_is_said(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("run.toml").write_text(RUN.replace("TENSORBOARD", "false").replace("[training.evaluation]\nevery = 4\n", ""))
    with pytest.raises(ConfigError, match=r"add \[training.evaluation\]"):
        load_config(Path("run.toml"))
    Path("run.toml").write_text(RUN.replace("TENSORBOARD", "false").replace("decay = 0.7", "decay = 1.7"))
    with pytest.raises(ConfigError, match=r"ema\.decay"):
        load_config(Path("run.toml"))
    relaxed = RUN.replace("TENSORBOARD", "false").replace("zero_stage = 1", 'synchronisation = "average/4"')
    Path("run.toml").write_text(relaxed)
    with pytest.raises(PlanError, match=r"training\.ema averages weights over steps"):
        check_runnable(ask(load_config(Path("run.toml"))).prediction, None)
    with pytest.raises(ConfigError, match="weights 'emma' are unknown; did you mean ema"):
        export_folder(Path("kept"), format="state_dict", weights="emma")


def test_tensorboard_is_refused_where_it_is_not_installed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from parsim.app.launch import check_tensorboard
    from parsim.errors import MissingDependencyError

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'parsim\[tensorboard\]'"):
        check_tensorboard()


# Several networks with optimizers of their own in one model: tasks, memory, price. `test_equality` trains a GAN.

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


GAN_RUN = """\
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
    write_profile(tmp_path, "reduce_scatter", "all_gather")
    (tmp_path / "run.toml").write_text(GAN_RUN)
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


def test_tensorboard_reads_them_and_a_resumed_part_replaces_what_it_trains_again(tmp_path: Path) -> None:
    reading: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first = _board(tmp_path, 0)
    _show(first, [{"step": step, "loss": float(step)} for step in range(1, 7)])
    first.close()
    again = _board(tmp_path, 4)  # the checkpoint of step 4
    _show(again, [{"step": step, "loss": 10.0 * step} for step in range(5, 8)])
    _show(again, [{"step": 8, "loss": 80.0, "validation": {"loss": 1.75, "accuracy": 0.5}}])
    again.close()
    found = reading.EventAccumulator(str(tmp_path))
    found.Reload()
    seen = {event.step: event.value for event in found.Scalars("loss")}
    assert seen == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 50.0, 6: 60.0, 7: 70.0, 8: 80.0}
    assert [(event.step, event.value) for event in found.Scalars("validation/accuracy")] == [(8, 0.5)]
