"""Late gradients on one row of weights: equal to the tick engine, and to plain training with one stage."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

import parsim
from experiments.relaxed.decoupled import DECOUPLINGS, Decoupling, TickEngine, TickRule
from parsim.app.learners import Learner
from parsim.data.samples import BatchOrder
from parsim.errors import AlgorithmError
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.plans.synchronisation import ALL_REDUCE, Synchronisation, parse_synchronisation
from parsim.relaxed.problems import load_problem, perceptron
from parsim.relaxed.replicas import LocalOptimizer, LocalTraining, stale_steps, steps_of

STEPS = 20
TOLERANCE = 1e-12


def learner(kind: str = "sgd_momentum") -> tuple[LocalTraining, BatchOrder, nn.Sequential]:
    problem = load_problem("digits", dtype=torch.float64)
    model = perceptron(problem, (24, 20, 16), seed=0, dtype=torch.float64, activation="tanh")
    start = copy.deepcopy(model)
    optimizer = LocalOptimizer(kind=kind, learning_rate=0.05)
    return LocalTraining(model, problem, optimizer), BatchOrder(n=len(problem), global_batch=32, seed=3), start


def in_parts(model: nn.Sequential, sizes: tuple[int, ...]) -> list[nn.Sequential]:
    """Consecutive children; Linear and its activation belong together."""
    pairs = [list(model)[place : place + 2] for place in range(0, len(model), 2)]
    ends = list(itertools.accumulate(sizes, initial=0))
    return [nn.Sequential(*itertools.chain(*pairs[first:end])) for first, end in itertools.pairwise(ends)]


def ticks_of(rule: Synchronisation) -> Decoupling:
    """The ticks of a rule's delays, counted boundary by boundary: a value or a gradient that is not awaited takes a tick."""

    def delays(modules: int) -> list[int]:
        step = {"ddg": 1, "fr": 1}.get(rule.schedule, 2)
        return list(rule.delays) or [step * later for later in reversed(range(modules))]

    def forward(k: int, modules: int) -> int:
        given = delays(modules)
        return sum(given[number] - given[number + 1] == 2 for number in range(k - 1))

    return Decoupling(
        name="asked", forward_tick=forward, backward_tick=lambda k, modules: forward(k, modules) + delays(modules)[k - 1]
    )


def mode_of(rule: Synchronisation) -> str:
    """The tick engine's name of what a backward uses."""
    return "replay" if rule.schedule == "fr" else rule.backward


def names_in_parts(training: LocalTraining, sizes: tuple[int, ...]) -> list[list[str]]:
    names = [name for name, _ in training.tensors]
    ends = list(itertools.accumulate((2 * size for size in sizes), initial=0))
    return [names[first:end] for first, end in itertools.pairwise(ends)]


FOUR = (1, 1, 1, 1)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        *((sizes, "stale") for sizes in ((4,), (2, 2), (1, 2, 1), FOUR)),
        *((FOUR, f"stale {words}") for words in ("schedule=ddg beta=0.5", "schedule=fr", "backward=fresh", "backward=replay")),
        *((FOUR, f"stale delays={delays}") for delays in ("4,3,1,0", "2,2,1,0", "3,1,0,0 beta=0.7 backward=replay")),
        ((2, 2), "stale schedule=ddg backward=fresh beta=0.9"),
    ],
)
def test_weights_equal_those_of_the_tick_engine(
    sizes: tuple[int, ...], text: str, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, order, model = learner()
    rule = parse_synchronisation(text)
    assert parse_synchronisation(str(rule)) == rule
    monkeypatch.setitem(DECOUPLINGS, "asked", ticks_of(rule))
    engine = TickEngine(
        in_parts(model, sizes),
        nn.functional.cross_entropy,
        TickRule(schedule="asked", mode=mode_of(rule), beta=rule.beta, learning_rate=0.05, momentum=0.9),
        groups=groups,
    )
    problem = training.problem
    rows = stale_steps(training, order, names_in_parts(training, sizes), rule)
    for step, workers in enumerate(itertools.islice(rows, STEPS)):
        parts = order.indices(step).reshape(groups, -1)
        engine.step([(problem.inputs[own], problem.targets[own]) for own in map(torch.tensor, parts)])
        live: list[Tensor] = [value.detach().flatten() for agent in engine.agents[0] for value in agent.live]
        assert (torch.cat(live) - workers.weights[0]).abs().max().item() < TOLERANCE
    assert (workers.weights[0] - training.start).abs().max().item() > 1e-3


@pytest.mark.parametrize("text", ["gossip/1 ring schedule=fdg", "average/1 delays=4,3,1,0 beta=0.7"])
def test_stages_of_replicas_that_mix_equal_the_tick_engine(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    training, order, model = learner()
    rule, replicas = parse_synchronisation(text), 4
    monkeypatch.setitem(DECOUPLINGS, "asked", ticks_of(rule))
    engine = TickEngine(
        in_parts(model, FOUR),
        nn.functional.cross_entropy,
        TickRule(schedule="asked", beta=rule.beta, learning_rate=0.05, momentum=0.9),
        groups=replicas,
        mixing=lambda t: rule.matrix(t, replicas),
    )
    problem = training.problem
    rows = steps_of(rule, replicas, training, order, names_in_parts(training, FOUR))
    for step in range(STEPS):
        workers, _ = next(rows)
        parts = order.indices(step).reshape(replicas, -1)
        engine.step([(problem.inputs[own], problem.targets[own]) for own in map(torch.tensor, parts)])
    for replica, agents in enumerate(engine.agents):
        live = torch.cat([value.detach().flatten() for agent in agents for value in agent.live])
        assert (live - workers.weights[replica]).abs().max().item() < TOLERANCE


@pytest.mark.parametrize("kind", ["sgd", "sgd_momentum", "adam"])
def test_one_stage_is_plain_training(kind: str) -> None:
    training, order, _ = learner(kind)
    plain = steps_of(ALL_REDUCE, 1, training, order)
    late = stale_steps(training, order, [[name for name, _ in training.tensors]])
    for (one, _), other in itertools.islice(zip(plain, late, strict=False), STEPS):
        assert (one.weights - other.weights).abs().max().item() < TOLERANCE


def test_stages_that_miss_or_share_a_parameter_are_refused() -> None:
    training, order, _ = learner()
    first, second = names_in_parts(training, (2, 2))
    with pytest.raises(AlgorithmError, match=second[-1]):
        next(stale_steps(training, order, [first, second[:-1]]))
    with pytest.raises(AlgorithmError, match=first[0]):
        next(stale_steps(training, order, [first, [*second, first[0]]]))


@pytest.mark.slow
def test_stale_is_ranked_by_the_time_to_an_accuracy() -> None:
    asked = parsim.plan("mlp", cluster="dgx1-v100-32gb", devices=2, global_batch=64, args={"width": 16}, optimizer="sgd")
    late = asked.to_target(0.5, rules=["stale"], seeds=1, most_steps=400)
    (entry,) = [each for each in late.contenders if each.rule.kind == "stale"]
    assert entry.result is not None
    assert entry.learnt is not None
    assert entry.result.plan.mesh.pp == 2
    assert entry.seconds == entry.learnt.steps * entry.result.step_s.median  # type: ignore[operator]
    (prompt,) = [each for each in late.contenders if not each.rule.is_relaxed]
    assert prompt.learnt is not None
    assert entry.learnt.courses[0].scores[:20] != prompt.learnt.courses[0].scores[:20]


def test_a_stand_in_with_fewer_layers_than_stages_is_refused_with_both_numbers() -> None:
    learner = Learner(
        words="", problem=load_problem("digits"), question=None, model=None, optimizer="sgd", rates=(0.1,), batch=32
    )
    stages = tuple(Stage(components=(f"c{place}",), ranks=(place,)) for place in range(3))
    rule = parse_synchronisation("stale")
    plan = Plan(strategy="mp", mesh=Mesh(pp=3), stages=stages, global_batch=32, synchronisation=rule)
    with pytest.raises(AlgorithmError, match="3 stages, and the stand-in that learns has 2 layers"):
        learner.steps_to(0.5, plan, rule, range(1), 10)
