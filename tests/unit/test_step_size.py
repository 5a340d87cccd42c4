"""The learning rate of a relaxed plan beside the step size that is known to converge, as answers tell it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import parsim
from parsim.app.prediction import Prediction
from parsim.plans.convergence import step_condition
from parsim.plans.synchronisation import parse_synchronisation
from parsim.relaxed.problems import load_problem, perceptron
from parsim.relaxed.replicas import LocalOptimizer, LocalTraining


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
    assert asked("all_reduce").step_size is None
