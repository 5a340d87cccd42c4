"""Replicas that mix in rounds, on real processes: equal to the virtual replicas, and resumed where they stopped."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

import parsim
import parsim as ps
from experiments.common.equality import Case, even_plan, run_cases
from experiments.common.forked import run_job
from experiments.relaxed.decoupled import DECOUPLINGS, TickEngine, TickRule
from parsim.app.config import load_config
from parsim.data.samples import BatchOrder, Order, part
from parsim.data.shards import training_order
from parsim.errors import AlgorithmError, PlanError
from parsim.execute.checkpoint.checkpoint import load_state
from parsim.execute.job import Job, RunSpec
from parsim.execute.mixing import MixingRounds
from parsim.execute.rank_run import run_dataset
from parsim.execute.runtime import StepScripts
from parsim.execute.stage import StageReplica, seeded_module
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.plans.synchronisation import parse_synchronisation
from parsim.program.lower import lower
from parsim.program.passes.rounds import fragments_of
from parsim.program.placed import PlanIndex
from parsim.relaxed.problems import LearningProblem
from parsim.relaxed.replicas import (
    LocalOptimizer,
    LocalTraining,
    RoundState,
    check_room,
    mixed_weights,
    steps_of,
    train_planned,
)
from tests.execute.rank_states import newest, rank_of
from tests.execute.small_plans import run_spec
from tests.quick import some_quick
from tests.unit.test_virtual_stale import mode_of, ticks_of

STEPS = 20
TOLERANCE = 1e-12
MLP = ModelSpec(name="mlp", args=(("width", 16),))

TWO = [
    ("average/1", "sgd"),
    ("average/5 outer=nesterov:0.7:0.9", "sgd_momentum"),
    ("average/4 weights=0.75,0.25 outer=sgd:0.5", "sgd_momentum"),
    ("average/4 combination=combine_adapt outer=nesterov:0.7:0.9", "sgd_momentum"),
    ("average/6 fragments=3 outer=nesterov:0.7:0.9", "adam"),
    ("average/4 combination=combine_adapt fragments=2 outer=momentum:0.7:0.5", "sgd_momentum"),
    ("gossip/3 ring combination=combine_adapt", "adam"),
    ("average/4 message_format=bf16", "adam"),
    ("average/4 weights=0.75,0.25 message_format=int8 participation=0.5", "sgd_momentum"),
    ("average/6 combination=combine_adapt fragments=2 message_format=int8 outer=nesterov:0.7:0.9", "adam"),
    ("average/3 participation=0.5", "sgd_momentum"),
    ("gossip/2 ring", "adam"),
    ("gossip/1 weights=0.9,0.1;0.1,0.9", "sgd_momentum"),
    ("gossip/1 ring combination=combine_adapt", "sgd_momentum"),
    ("gossip/2 push_sum weights=0.5,0.25;0.5,0.75", "sgd_momentum"),
    ("merge/1", "sgd_momentum"),
    ("merge/4 merge=running", "adam"),
    ("merge/3 merge=staleness:0.6:0.5", "sgd_momentum"),
    ("merge/3 merge=buffered:2:0.7", "sgd_momentum"),
]
FOUR = [
    ("average/8 outer=momentum:0.7:0.5 participation=0.5 seed=3", "sgd_momentum"),
    ("gossip/1 ring", "sgd_momentum"),
    ("gossip/1 one_peer_exponential", "sgd"),
    ("gossip/2 exponential", "sgd_momentum"),
    ("gossip/1 complete", "sgd_momentum"),
    ("gossip/1 star", "sgd_momentum"),
    ("gossip/1 one_peer_exponential combination=combine_adapt", "sgd_momentum"),
    ("gossip/2 hierarchical(per_node=2, every=3)", "sgd_momentum"),
    ("gossip/1 hierarchical_ring(per_node=2, every=2)", "sgd_momentum"),
    ("gossip/2 random_directed(links=2) push_sum", "sgd_momentum"),
    ("gossip/1 ada(kind=step, start=3, rate=0.5, milestones=1+2, rounds=4, epochs=3)", "sgd_momentum"),
    ("gossip/1 ada(start=3, rate=1.0, rounds=4, epochs=3)", "sgd_momentum"),
    ("merge/1", "sgd_momentum"),
    ("merge/5 merge=staleness:0.6:0.5", "sgd_momentum"),
    ("merge/2 merge=buffered:3:1.0", "sgd_momentum"),
]


LOOPS = [
    "gossip/1 ada(kind=closed_loop, target=0.0001, rounds=4)",
    "gossip/2 ada(kind=closed_loop, target=0.0003, rounds=3) combination=combine_adapt",
]


def relaxed_case(text: str, optimizer: str, replicas: int) -> Case:
    size = 2**10 if "fragments" in text else 2**14  # every fragment needs a bucket
    plan = even_plan(MLP, Mesh(dp=replicas), strategy="dp", batch=8 * replicas, bucket_bytes=size)
    rate = 0.005 if optimizer == "adam" else 0.02
    return Case(
        spec=MLP, plan=replace(plan, synchronisation=parse_synchronisation(text)), optimizer=optimizer, learning_rate=rate
    )


def normed_case(text: str) -> Case:
    """BatchNorm: every replica has running statistics of its own."""
    model = ModelSpec(name="tests.execute.test_relaxed_run:chain", args=(("depth", 2), ("norm", True)), input_shape=(1, 8, 8))
    plan = even_plan(model, Mesh(dp=2), strategy="dp", batch=16)
    plan = replace(plan, synchronisation=parse_synchronisation(text))
    return Case(spec=model, plan=plan, optimizer="sgd_momentum", learning_rate=0.02)


def virtual_training(run: RunSpec) -> tuple[LocalTraining, Order]:
    """Virtual replicas of the run's model, on its data in its order."""
    data = run_dataset(run, "train")
    arrays = data.values(np.arange(len(data)))
    inputs, targets = torch.from_numpy(arrays["input:0"]).double(), torch.from_numpy(arrays["target"]).long()
    problem = LearningProblem(
        name="digits", inputs=inputs, targets=targets, test_inputs=inputs, test_targets=targets, outputs=10
    )
    module = seeded_module(run.model, run.seed, torch.float64, torch.device("cpu"))
    training = LocalTraining(module, problem, LocalOptimizer(kind=run.optimizer, learning_rate=run.learning_rate))
    replicas = run.plan.mesh.dp
    return training, training_order(data, run.plan.global_batch, run.seed, shards=run.shards, replicas=replicas)


def largest_differences(run: RunSpec, folder: Path, *, steps: int = STEPS) -> tuple[float, float]:
    """Of the mean weights, and of every replica's own, from the virtual replicas."""
    training, order = virtual_training(run)
    rule = run.plan.synchronisation
    fragments = fragments_of(PlanIndex(run.plan, load_model(run.model))) if rule.fragments > 1 else ()
    expected = train_planned(run.plan, training, order, steps, fragments=fragments)
    found = newest(folder / "checkpoints")
    assert found.step == steps
    names = [name for name, _ in training.tensors]
    buffers = {name: place for place, (name, _) in enumerate(training.model.named_buffers())}

    def row(weights: object) -> torch.Tensor:
        return torch.cat([weights[name].flatten() for name in names])  # type: ignore[index]

    mean = row(load_state(found).weights)
    own = []
    for rank in range(run.plan.world_size):
        state = load_state(found, rank=rank).own
        own.append(row({name: state[f"weights/{name}"] for name in names}))
        held = load_state(found, rank=rank).buffers
        apart = [(held[name] - expected.buffers[place][rank]).abs().max().item() for name, place in buffers.items()]
        assert max(apart, default=0.0) <= TOLERANCE
    spread = (torch.stack(own) - expected.workers).abs().max().item()
    return (mean - expected.weights).abs().max().item(), spread


def assert_equal_to_replicas(cases: list[Case], folder: Path) -> None:
    for case, run in zip(cases, run_cases(cases, folder, steps=STEPS), strict=True):
        mean, own = largest_differences(run, folder / run.name)
        assert max(mean, own) <= TOLERANCE, f"{case}: {mean:.3g}, {own:.3g}"


def test_two_processes_equal_virtual_replicas(tmp_path: Path) -> None:
    """Also on shards of their own: sorted by label, and unequal ones of a Dirichlet draw."""
    sharded = [
        replace(relaxed_case("average/4", "sgd_momentum", 2), shards="label_sorted"),
        replace(relaxed_case("gossip/1 ring", "sgd_momentum", 2), shards="dirichlet:0.1"),
    ]
    normed = [normed_case(text) for text in ("average/4", "gossip/1 ring", "average/3 participation=0.5", "merge/2")]
    assert_equal_to_replicas([*(relaxed_case(*entry, 2) for entry in TWO), *sharded, *normed], tmp_path)


@pytest.mark.slow
def test_four_processes_on_a_ring_equal_virtual_replicas(tmp_path: Path) -> None:
    assert_equal_to_replicas([relaxed_case("gossip/2 ring", "sgd_momentum", 4)], tmp_path)


@pytest.mark.slow
def test_four_processes_equal_virtual_replicas(tmp_path: Path) -> None:
    assert_equal_to_replicas([relaxed_case(*entry, 4) for entry in FOUR], tmp_path)


@pytest.mark.slow
def test_four_processes_choose_the_lattices_of_a_closed_loop(tmp_path: Path) -> None:
    """It goes from the complete graph to a ring, and back once the replicas drift more."""
    cases = [relaxed_case(text, "sgd_momentum", 4) for text in LOOPS]
    for case, run in zip(cases, run_cases(cases, tmp_path, steps=STEPS), strict=True):
        assert max(largest_differences(run, tmp_path / run.name)) <= TOLERANCE, case
        states = islice(steps_of(run.plan.synchronisation, 4, *virtual_training(run)), STEPS)
        places = [kept.loop.place for _, kept in states]
        assert [place for place, _ in groupby(places)] == [0, 1, 0], case


@pytest.mark.slow
def test_averaging_after_every_step_of_sgd_is_synchronous_training(tmp_path: Path) -> None:
    """Momentum kept by every replica too: its step is linear in the gradient."""
    relaxed = relaxed_case("average/1", "sgd_momentum", 2)
    usual = replace(relaxed, plan=replace(relaxed.plan, synchronisation=parse_synchronisation("all_reduce")))
    runs = run_cases([relaxed, usual], tmp_path, steps=STEPS)
    # both begin with the seed of their place in the job: compare with virtual replicas of each
    mean, _ = largest_differences(runs[0], tmp_path / runs[0].name)
    assert mean <= TOLERANCE
    training, order = virtual_training(replace(runs[1], plan=relaxed.plan))
    expected = train_planned(relaxed.plan, training, order, STEPS).weights
    weights = load_state(newest(tmp_path / runs[1].name / "checkpoints")).weights
    synchronous = torch.cat([weights[name].flatten() for name, _ in training.tensors])
    assert (synchronous - expected).abs().max().item() <= TOLERANCE


@pytest.mark.slow
def test_replicas_of_two_stages_average_stage_by_stage(tmp_path: Path) -> None:
    plan = even_plan(MLP, Mesh(dp=2, pp=2), strategy="hp", batch=16)
    rule = parse_synchronisation("average/4 outer=nesterov:0.7:0.9")
    case = Case(spec=MLP, plan=replace(plan, synchronisation=rule), optimizer="sgd_momentum", learning_rate=0.02)
    (run,) = run_cases([case], tmp_path, steps=STEPS)
    training, order = virtual_training(run)
    expected = train_planned(run.plan, training, order, STEPS)
    weights = load_state(newest(tmp_path / run.name / "checkpoints")).weights
    mean = torch.cat([weights[name].flatten() for name, _ in training.tensors])
    assert (mean - expected.weights).abs().max().item() <= TOLERANCE


def trained(plan: Plan, folder: Path, *, steps: int, resume: bool = False) -> RunSpec:
    case = relaxed_case("average/5", "sgd_momentum", 2)
    run = run_spec(replace(case, plan=plan), folder, dtype="float64", seed=4)
    job = Job(output=str(folder), mode="train", runs=(run,), steps=steps, warmup_steps=0, checkpoint_every=7, resume=resume)
    job.save(folder / "job.json")
    run_job(folder / "job.json")
    return run


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a CUDA build: ranks come from a server without the patched step")
def test_a_step_that_fails_is_reported_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rank says what happened and ends; it does not look for the cause of an error that is its own cause."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr("parsim.execute.runtime.RankProgram.step", fail)
    usual = relaxed_case("average/5", "sgd_momentum", 2)
    with pytest.raises(AssertionError, match="a kernel failed"):
        run_cases([usual], tmp_path, steps=2, start=partial(run_job, timeout_s=60.0))


@pytest.mark.parametrize(
    "text",
    some_quick(
        [
            "average/5 outer=nesterov:0.7:0.9",
            "gossip/3 ring",
            "gossip/3 ada(kind=closed_loop, target=0.001, rounds=3)",
            "merge/5",
            "merge/13 merge=staleness:0.6:0.5",
        ],
        "gossip/3 ring",
    ),
)
def test_a_resumed_training_equals_one_that_was_not_stopped(text: str, tmp_path: Path) -> None:
    """It stops after 13 steps, between two rounds, when replicas hold different weights."""
    plan = relaxed_case(text, "sgd_momentum", 4 if "ada" in text else 2).plan  # two replicas have one lattice
    trained(plan, tmp_path / "stopped", steps=13)
    run = trained(plan, tmp_path / "stopped", steps=STEPS, resume=True)
    mean, own = largest_differences(run, tmp_path / "stopped")
    assert max(mean, own) <= TOLERANCE


@pytest.mark.slow
def test_another_plan_goes_on_with_the_mean(tmp_path: Path) -> None:
    plan = relaxed_case("average/5", "sgd_momentum", 2).plan
    trained(plan, tmp_path / "run", steps=8)
    before = load_state(newest(tmp_path / "run" / "checkpoints")).weights
    usual = replace(plan, synchronisation=parse_synchronisation("all_reduce"))
    trained(usual, tmp_path / "run", steps=8, resume=True)
    after = load_state(newest(tmp_path / "run" / "checkpoints")).weights
    assert all(torch.equal(before[name], value) for name, value in after.items())


def rounds_of(plan: Plan) -> MixingRounds:
    """What rank 0 keeps of a plan, in this process alone."""
    case = relaxed_case("average/5", "sgd_momentum", 2)
    stage = StageReplica(
        case.spec,
        PlanIndex(plan, case.model),
        0,
        optimizer=case.optimizer,
        learning_rate=case.learning_rate,
        dtype=torch.float64,
        seed=4,
        device=torch.device("cpu"),
    )
    return MixingRounds(stage, {}, received=lambda _: None, used=lambda _: None)


@pytest.mark.parametrize(("text", "samples"), [("all_reduce", 16), ("average/5", 8), ("gossip/1 ring", 8), ("merge/1", 8)])
def test_replicas_that_mix_train_on_the_mean_of_their_own_samples(text: str, samples: int) -> None:
    """Of a batch of 16 on two replicas; synchronous ones add up their gradients."""
    plan = replace(relaxed_case("average/5", "sgd_momentum", 2).plan, synchronisation=parse_synchronisation(text))
    assert rank_of(MLP, plan, 1).loss_gradient.item() == 1 / samples


def test_steps_of_one_period_are_those_of_its_round() -> None:
    """What a rank does in a step follows from the number of the round, which all steps of a period have in common."""
    plan = replace(
        relaxed_case("average/5", "sgd_momentum", 4).plan, synchronisation=parse_synchronisation("average/3 participation=0.5")
    )
    stage = rank_of(MLP, plan, 1)
    groups: dict[tuple[str, tuple[int, ...]], Any] = defaultdict(lambda: None)
    mixing = MixingRounds(stage, groups, received=lambda _: None, used=lambda _: None)
    scripts = StepScripts(lower(plan, stage.layout.model, mixing_round=0), stage.layout, 1, mixing)
    rounds = [plan.synchronisation.takes_part(number, 4)[1] for number in range(8)]
    assert len(set(rounds)) == 2
    for step in range(24):
        assert scripts.of_step(step).computes == rounds[step // 3], step


def test_other_buckets_or_another_cut_into_stages_are_another_plan() -> None:
    """They begin from the mean, with a new outer optimizer. What lies in other arrays is not taken, and is no damage."""
    rule = parse_synchronisation("average/5 outer=nesterov:0.7:0.9")
    small = replace(relaxed_case("average/5", "sgd_momentum", 2).plan, bucket_bytes=2**10, synchronisation=rule)
    two = replace(even_plan(MLP, Mesh(dp=2, pp=2), strategy="hp", batch=16), synchronisation=rule)
    first, second = two.stages
    moved = (
        Stage(components=(*first.components, second.components[0]), ranks=first.ranks),
        Stage(components=second.components[1:], ranks=second.ranks),
    )
    for plan, other in ((small, replace(small, bucket_bytes=2**20)), (two, replace(two, stages=moved))):
        before = rounds_of(plan)
        for flat in before.previous.values():
            flat.add_(1.0)
        state = before.own_state()
        same, changed = rounds_of(plan), rounds_of(other)
        same.load_own(state)
        assert all(torch.equal(same.previous[number], flat) for number, flat in before.previous.items())
        fresh = rounds_of(other).previous
        assert {number: flat.shape for number, flat in fresh.items()} != {
            number: flat.shape for number, flat in before.previous.items()
        }
        changed.load_own(state)
        assert all(torch.equal(changed.previous[number], flat) for number, flat in fresh.items())


def test_more_replicas_than_memory_holds_names_how_many_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parsim.relaxed.replicas.available_bytes", lambda: 6 * 1000 * 10 + 59)
    check_room(10, 1000)
    with pytest.raises(AlgorithmError, match="10 fit"):
        check_room(11, 1000)


def test_virtual_replicas_of_a_plan_refuse_what_does_not_mix() -> None:
    case = relaxed_case("gossip/1 ring", "sgd", 2)
    run = run_spec(case, optimizer="sgd", learning_rate=0.1, dataset="digits")
    training, order = virtual_training(run)
    outcome = train_planned(case.plan, training, order, 4, step_s=0.5, score_every=2)
    assert (outcome.seconds, outcome.rounds, [step for step, _ in outcome.scores]) == (2.0, 4, [2, 4])
    with pytest.raises(AlgorithmError, match="use average, gossip or merge"):
        train_planned(replace(case.plan, synchronisation=parse_synchronisation("all_reduce")), training, order, 1)
    with pytest.raises(AlgorithmError, match="batches of 16"):
        train_planned(case.plan, training, replace(cast(BatchOrder, order), global_batch=8), 1)


def test_a_round_of_gossip_in_closed_form() -> None:
    """Beside the step: W x + change of the step. Push-sum: masses are sums of rows, and columns keep what there is."""
    before = torch.arange(8, dtype=torch.float64).reshape(4, 2)
    after = 1.5 * before + 1
    rule = parse_synchronisation("gossip/1 ring combination=combine_adapt")
    mixed, _ = mixed_weights(rule, before, after, RoundState.fresh(before))
    assert torch.allclose(mixed, torch.tensor(rule.matrix(0, 4)) @ before + after - before)
    rule = parse_synchronisation("gossip/1 random_directed(links=2) push_sum")
    matrix = torch.tensor(rule.matrix(0, 4))
    assert not torch.allclose(matrix.sum(1), torch.ones(4, dtype=torch.float64))
    mixed, kept = mixed_weights(rule, before, after, RoundState.fresh(before))
    assert torch.allclose(kept.masses, matrix.sum(1))
    assert torch.allclose(mixed * kept.masses[:, None], matrix @ after)


# The run files of docs/relaxed.md: all are listed, planned and simulated.

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "relaxed"
FILES = sorted(FOLDER.glob("*.toml"))


def test_every_kind_has_a_run_file_that_the_page_names() -> None:
    page = (FOLDER.parent / "relaxed.md").read_text(encoding="utf-8")
    assert [path.stem for path in FILES] == ["all_reduce", "average", "gossip", "merge", "stale"]
    assert all(f"(relaxed/{path.name})" in page for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_run_file_is_planned(path: Path) -> None:
    answer = parsim.plan(path)
    rule = answer.prediction.plan.synchronisation
    assert rule.kind == path.stem == load_config(path).plan.relaxed.kind
    assert answer.fits
    document = answer.to_dict()
    told = [text for text in document["chosen"]["warnings"] if "not synchronous training" in text]
    assert bool(told) == rule.is_relaxed
    assert document["chosen"]["plan"].get("executable", True)
    if rule.kind != "all_reduce":
        assert document["chosen"]["plan"]["synchronisation"]["kind"] == rule.kind
    found = {
        "average": "averaging weights every 8 steps",
        "gossip": "neighbours (ring)",
        "merge": "one after another (staleness) every 4 steps",
        "stale": "2 steps late",
    }
    assert found.get(rule.kind, "data parallelism") in answer.sentence()


# Decoupled stages on real processes: equal to the tick engine of one process, and resumed with batches in flight.


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
    return ModelSpec(name="tests.execute.test_relaxed_run:chain", args=tuple(args.items()), input_shape=(1, 8, 8))


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
