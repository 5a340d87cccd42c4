"""Time to an accuracy: steps on virtual replicas times simulated seconds, and what cannot be reached or asked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import parsim
from parsim.app.answer import Answer
from parsim.app.prediction import Prediction
from parsim.app.relaxed import asked_rules
from parsim.data.samples import BatchOrder
from parsim.errors import AlgorithmError, ConfigError, PlanError
from parsim.plans.convergence import step_condition
from parsim.plans.synchronisation import ALL_REDUCE, parse_synchronisation
from parsim.relaxed.problems import load_problem, perceptron
from parsim.relaxed.replicas import LearningCourse, LocalOptimizer, LocalTraining, course_to, learnt_steps
from tests.commands import status_of


@pytest.fixture(scope="module")
def answer() -> Answer:
    return parsim.plan("mlp", cluster="dgx1-v100-32gb", devices=4, global_batch=64, args={"width": 16}, optimizer="sgd")


def training() -> tuple[LocalTraining, BatchOrder]:
    problem = load_problem("digits", dtype=torch.float64)
    model = perceptron(problem, (32,), seed=0, dtype=torch.float64)
    return LocalTraining(model, problem, LocalOptimizer(learning_rate=0.2)), BatchOrder(n=len(problem), global_batch=64)


def test_synchronous_training_learns_as_replicas_that_average_every_step_of_sgd() -> None:
    """So one replica stands for all of them."""
    learner, order = training()
    alone = course_to(0.9, ALL_REDUCE, 1, learner, order, most_steps=200)
    four = course_to(0.9, parse_synchronisation("average/1"), 4, learner, order, most_steps=200)
    assert alone.steps == four.steps is not None
    assert [score for _, score in alone.scores] == pytest.approx([score for _, score in four.scores])


def test_a_course_ends_at_the_target_or_after_the_most_steps() -> None:
    learner, order = training()
    reached = course_to(0.5, ALL_REDUCE, 1, learner, order, most_steps=400)
    assert reached.steps == reached.scores[-1][0] < 400
    assert all(score < 0.5 for _, score in reached.scores[:-1])
    never = course_to(0.999, ALL_REDUCE, 1, learner, order, most_steps=20)
    assert never.steps is None
    assert [step for step, _ in never.scores] == [5, 10, 15, 20]
    assert never.best == max(score for _, score in never.scores)
    with pytest.raises(AlgorithmError, match="checked every 5 steps, got 3"):
        course_to(0.5, ALL_REDUCE, 1, learner, order, most_steps=3)


def test_the_best_rate_reaches_the_target_first_and_half_of_the_seeds_must() -> None:
    asked: list[tuple[float, int, int]] = []

    def course(rate: float, seed: int, most: int) -> LearningCourse:
        asked.append((rate, seed, most))
        needed = 10**6 if rate > 0.3 and seed else int(100 / rate) + 200 * (seed == 2)
        return LearningCourse(steps=needed if needed <= most else None, best=rate, best_step=5, scores=((5, rate),))

    chosen = learnt_steps(course, (0.1, 0.2, 0.4), range(3), 2000)
    assert (chosen.learning_rate, chosen.steps, chosen.spread) == (0.2, 500, (500, 700))
    assert (0.2, 0, 1000) in asked  # at 0.1 it was reached after 1000 steps, so no better rate needs more
    assert (0.4, 1, 500) in asked
    only = learnt_steps(course, (0.4,), range(3), 2000)
    assert only.steps is None
    assert only.spread == (250, None)


def test_seeds_that_are_slower_than_the_rate_before_train_on_at_the_best_rate() -> None:
    def course(rate: float, seed: int, most: int) -> LearningCourse:
        needed = 100 if rate == 0.1 else (50, 60, 300)[seed]
        return LearningCourse(steps=needed if needed <= most else None, best=rate, best_step=5, scores=((5, rate),))

    chosen = learnt_steps(course, (0.1, 0.2), range(3), 2000)
    assert (chosen.learning_rate, chosen.steps, chosen.spread) == (0.2, 60, (50, 300))


@pytest.mark.slow
def test_seconds_are_steps_of_the_rules_own_plan(answer: Answer) -> None:
    ranking = answer.to_target(0.6, rules=["average/4", "gossip/1 ring"], seeds=1, most_steps=300)
    assert ranking.learner == "mlp on digits, the model asked for"
    assert {str(entry.rule) for entry in ranking.contenders} == {"all_reduce", "average/4", "gossip/1 ring"}
    seconds = [entry.seconds for entry in ranking.contenders]
    assert seconds == sorted(seconds)  # type: ignore[type-var]
    for entry in ranking.contenders:
        assert entry.result is not None
        assert entry.learnt is not None
        assert entry.result.plan.synchronisation == entry.rule
        assert entry.seconds == entry.learnt.steps * entry.result.step_s.median  # type: ignore[operator]
        assert entry.curve()[-1][1] >= 0.6
    assert len(ranking.figure().data) == 3


@pytest.mark.slow
def test_seconds_of_ada_are_those_of_the_graphs_that_the_steps_used() -> None:
    """Its first graphs are dense and slow: a mean over all would make an early target too cheap."""
    eight = parsim.plan("mlp", cluster="dgx1-v100-32gb", global_batch=64, args={"width": 16}, optimizer="sgd")
    rule = "gossip/2 ada(start=6, rate=2.0, rounds=5, epochs=3)"
    found = eight.to_target(0.999, rules=[rule, "gossip/2 lattice(neighbours=6)"], seeds=1, most_steps=25)
    ada, dense = (next(each for each in found.contenders if name in str(each.rule)) for name in ("ada", "lattice"))
    assert [lasts for lasts, _ in ada.phases] == [10, 10, 10]
    first, second, third = (step_s for _, step_s in ada.phases)
    assert first > second > third
    assert dense.result is not None
    assert first == pytest.approx(dense.result.step_s.median, rel=1e-9)
    assert ada.curve()[1][0] == pytest.approx(10 * first)
    assert ada.curve()[2][0] == pytest.approx(10 * first + 5 * second)
    assert ada.seconds_after(40) == pytest.approx(10 * first + 10 * second + 20 * third)


@pytest.mark.slow
def test_what_is_never_reached_says_how_near_it_came_and_when(answer: Answer) -> None:
    ranking = answer.to_target(0.999, rules=["average/4"], seeds=1, most_steps=20)
    assert "no way reaches it" in ranking.lines()[0]
    for entry, line in zip(ranking.contenders, ranking.lines()[1:], strict=True):
        assert entry.seconds is None
        assert entry.learnt is not None
        best = entry.learnt.best
        assert f"not reached; {best.best:.3f} at most, after" in line
        assert f"({best.best_step} steps)" in line


@pytest.mark.slow
def test_a_rule_without_a_plan_stays_in_with_its_reason(answer: Answer) -> None:
    single = parsim.plan("mlp", cluster="dgx1-v100-32gb", devices=1, global_batch=64, args={"width": 16}, optimizer="sgd")
    last = single.to_target(0.3, rules=["gossip/1 ring"], seeds=1, most_steps=50).contenders[-1]
    assert last.seconds is None
    assert "no plan has synchronisation gossip/1 ring" in last.line()


@pytest.mark.parametrize("target", [0.0, 1.0, 95.0, -1.0])
def test_a_target_that_is_no_accuracy_is_refused(target: float) -> None:
    answer = parsim.plan("mlp", cluster="dgx1-v100-32gb", devices=2, global_batch=64, args={"width": 16}, strategy="dp")
    with pytest.raises(ConfigError, match="lies between 0 and 1"):
        answer.to_target(target)


def test_a_bad_target_or_rule_ends_the_command_before_it_plans(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*given: object, **named: object) -> None:
        raise AssertionError("planned")

    monkeypatch.setattr("parsim.app.functions.plan", never)
    question = ["plan", "mlp", "--on", "dgx1-v100-32gb", "--batch", "64"]
    assert status_of(monkeypatch, *question, "--target-accuracy", "95") == 1
    assert "give 0.95 for 95%" in capsys.readouterr().err
    assert status_of(monkeypatch, *question, "--target-accuracy", "0.9", "--rule", "gosip/1 ring") == 1
    assert "did you mean gossip" in capsys.readouterr().err


def test_a_rule_that_is_given_twice_is_compared_once() -> None:
    rules = asked_rules(0.9, ["average/4", "average/4", "all_reduce", "merge/4 merge=half", "merge/4"])
    assert [str(rule) for rule in rules] == ["average/4", "merge/4"]


def test_bad_questions_are_refused() -> None:
    answer = parsim.plan("mlp", cluster="dgx1-v100-32gb", devices=2, global_batch=64, args={"width": 16}, strategy="dp")
    with pytest.raises(PlanError, match="unknown"):
        answer.to_target(0.9, rules=["gossip/1 rings"])
    relaxed = parsim.plan(
        "mlp",
        cluster="dgx1-v100-32gb",
        devices=4,
        global_batch=64,
        args={"width": 16},
        settings={"plan.synchronisation": "average/4"},
    )
    with pytest.raises(ConfigError, match="asks for synchronisation average/4 already"):
        relaxed.to_target(0.9)


@pytest.mark.slow
def test_what_replicas_leave_out_of_the_training_is_named() -> None:
    asked = parsim.plan(
        "mlp",
        cluster="dgx1-v100-32gb",
        devices=2,
        global_batch=64,
        args={"width": 16},
        settings={"training.weight_decay": 0.1, "training.optimizer_args": {"momentum": 0.5}},
    )
    ranking = asked.to_target(0.3, rules=[], seeds=1, most_steps=20)
    assert ranking.learner == (
        "mlp on digits, the model asked for without its training.optimizer_args and training.weight_decay"
    )


def test_a_model_that_replicas_cannot_train_has_a_named_stand_in() -> None:
    asked = parsim.plan("resnet_small", cluster="dgx1-v100-32gb", devices=2, global_batch=32, strategy="dp")
    ranking = asked.to_target(0.5, rules=[], seeds=1, most_steps=100)
    assert ranking.learner.startswith("the digits MLP (64-64-10), 32 samples a step, sgd: a stand-in for resnet_small, because")
    assert "running statistics" in ranking.learner


def test_the_command_ranks_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "curves.html"
    words = [
        "plan",
        "mlp",
        "--on",
        "dgx1-v100-32gb",
        "--batch",
        "64",
        "--set",
        "cluster.devices=2",
        "--set",
        "plan.strategy=dp",
    ]
    words += ["--set", "training.optimizer=sgd", "--set", "model.args.width=16"]
    asked = ["--target-accuracy", "0.4", "--rule", "average/4", "--curves", str(page), "--json"]
    assert status_of(monkeypatch, *words, *asked) == 0
    found = json.loads(capsys.readouterr().out)["to_target"]
    assert found["target_accuracy"] == 0.4
    assert {entry["synchronisation"] for entry in found["contenders"]} == {"all_reduce", "average/4"}
    assert "plotly" in page.read_text(encoding="utf-8")
    assert status_of(monkeypatch, *words, "--rule", "average/4") == 2


# The learning rate of a relaxed plan beside the step size that is known to converge, as answers tell it.


def asked(rule: str, *, model: str = "mlp", devices: int = 4, **changes: object) -> Prediction:
    overrides = [f"plan.synchronisation={rule}", *(f"{key.replace('__', '.')}={value}" for key, value in changes.items())]
    args = {"width": 16} if model == "mlp" else {}
    return parsim.simulate(
        model, cluster="dgx1-v100-32gb", devices=devices, global_batch=64, args=args, strategy="adaptive", overrides=overrides
    )


def test_the_curvature_is_the_largest_eigenvalue_of_the_hessian() -> None:
    problem = load_problem("digits", dtype=torch.float64)
    training = LocalTraining(perceptron(problem, (3,), seed=1, dtype=torch.float64), problem, LocalOptimizer())
    samples = np.arange(50)

    def loss(weights: torch.Tensor) -> torch.Tensor:
        return problem.loss(training.outputs(weights, problem.inputs[:50]), problem.targets[:50])

    hessian = torch.autograd.functional.hessian(loss, training.start)
    wanted = float(torch.linalg.eigvalsh(hessian).abs().max())
    assert training.curvature(training.start, samples, iterations=100) == pytest.approx(wanted, rel=1e-4)
    assert training.curvature(training.start, samples) <= wanted * (1 + 1e-9)


def test_a_step_beyond_the_safe_one_is_warned_of_with_the_bound() -> None:
    answer = asked("stale", devices=2, training__optimizer="sgd", training__learning_rate="1.5")
    found = answer.step_size
    assert found is not None
    assert found.curvature is not None
    curvature, samples = found.curvature
    safe = step_condition(parse_synchronisation("stale"), replicas=1, stages=2).safe
    assert safe is not None
    assert found.times_safe == pytest.approx(1.5 * curvature / safe)
    assert found.times_safe > 1
    text = f"Safe step size here: {safe / curvature:.3g}, with L = {curvature:.3g} at the first weights ({samples} samples); "
    assert found.warnings()[0].startswith(f"{text}yours, 1.5, is {found.times_safe:.2g} times that.")
    assert found.warnings()[0] in answer.warnings
    assert "gradients up to 2 updates late" in str(answer)
    assert answer.to_dict()["step_size"]["times_safe"] == found.times_safe


def test_momentum_counts_and_a_small_step_is_not_warned_of() -> None:
    found = asked("average/4", training__learning_rate="0.001").step_size
    assert found is not None
    assert found.step == pytest.approx(0.01)
    assert "yours, 0.001 / (1 - 0.9) = 0.01, is" in found.lines()[1]
    assert found.warnings() == []


@pytest.mark.parametrize(
    ("rule", "model", "optimizer", "words"),
    [
        ("gossip/1 ring", "resnet50", "sgd", "Your step size, 0.02, is safe while L is at most"),
        ("gossip/1 ring", "mlp", "adam", "adam scales its steps, so the bound does not apply to it"),
        ("gossip/1 random_directed push_sum", "mlp", "sgd", "nothing is proven of push-sum"),
        ("merge/4", "mlp", "sgd", 'nothing is proven of the merge "half" beyond quadratic losses'),
        ("average/4 outer=nesterov", "mlp", "sgd", "quadratic losses diverge beyond 2/L"),
    ],
)
def test_what_is_not_known_is_told(rule: str, model: str, optimizer: str, words: str) -> None:
    found = asked(rule, model=model, training__optimizer=optimizer, training__learning_rate="0.02").step_size
    assert found is not None
    assert words in " ".join(found.lines())


def test_synchronous_training_is_told_nothing() -> None:
    found = parsim.simulate("mlp", cluster="dgx1-v100-32gb", devices=4, global_batch=64, args={"width": 16}, strategy="dp")
    assert found.step_size is None
