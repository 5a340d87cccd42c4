"""The learning problems of virtual replicas: data in memory, a loss and a score, small enough for hundreds of replicas in
one process.

Splits are those of the research these algorithms are compared with: the first 80% of a permutation from seed 0 train.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from parsim.errors import DataError, MissingDependencyError, near_matches

TRAIN_FRACTION = 0.8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LearningProblem:
    """Inputs [n, features] and targets (int64 classes [n], or floats [n, 1] to regress), for training and for the score.
    `outputs` is the width of the last layer: classes, or 1."""

    name: str
    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    outputs: int

    @property
    def features(self) -> int:
        return self.inputs.shape[1]

    @property
    def classifies(self) -> bool:
        """Whether targets are classes (cross entropy, accuracy) or real (mean squared error, explained variance)."""
        return not self.targets.is_floating_point()

    def __len__(self) -> int:
        return len(self.inputs)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy or squared error per sample: [batch]."""
        if self.classifies:
            return nn.functional.cross_entropy(outputs, targets, reduction="none")
        return (outputs - targets).square().flatten(1).mean(1)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.losses(outputs, targets).mean()

    def score(self, outputs: Tensor) -> float:
        """Score of outputs for `test_inputs`: accuracy, or R^2 = 1 - MSE / variance of the test targets."""
        if self.classifies:
            return (outputs.argmax(-1) == self.test_targets).double().mean().item()
        error = (outputs - self.test_targets).square().mean()
        return (1.0 - error / self.test_targets.var(unbiased=False)).item()


def digits_problem(dtype: torch.dtype) -> LearningProblem:
    """scikit-learn's digits: 1,437 training and 360 test images of 64 pixels divided by 16, ten classes."""
    bunch = _sklearn_datasets().load_digits()
    return _split("digits", bunch.data / 16.0, bunch.target.astype(np.int64), 10, dtype)


def diabetes_problem(dtype: torch.dtype) -> LearningProblem:
    """scikit-learn's diabetes: 353 training and 89 test patients, 10 features scaled to unit deviation, the target standardised
    with the training patients' mean and deviation."""
    bunch = _sklearn_datasets().load_diabetes()
    features = bunch.data / bunch.data.std(axis=0)
    train = np.random.default_rng(0).permutation(len(features))[: round(TRAIN_FRACTION * len(features))]
    target = (bunch.target - bunch.target[train].mean()) / bunch.target[train].std()
    return _split("diabetes", features, target[:, None], 1, dtype)


def generated_problem(
    dtype: torch.dtype, *, samples: int = 4096, features: int = 32, classes: int = 10, seed: int = 0
) -> LearningProblem:
    """Unit noise around one mean per class; as many samples as wanted."""
    rng = np.random.default_rng([seed, samples])
    means = np.random.default_rng([seed, 2]).standard_normal((classes, features))
    targets = rng.integers(0, classes, round(samples / TRAIN_FRACTION))
    inputs = (0.7 * means[targets] + rng.standard_normal((len(targets), features))) / 1.2
    return _split("generated", inputs, targets, classes, dtype)


PROBLEMS: dict[str, Callable[..., LearningProblem]] = {
    "digits": digits_problem,
    "diabetes": diabetes_problem,
    "generated": generated_problem,
}


def load_problem(name: str, *, dtype: torch.dtype = torch.float32, **settings: int) -> LearningProblem:
    """A row of PROBLEMS; `settings` are those of the generated one."""
    if name not in PROBLEMS:
        raise DataError(f"unknown problem {name!r}{near_matches(name, PROBLEMS)}")
    return PROBLEMS[name](dtype, **settings)


ACTIVATIONS: dict[str, tuple[type[nn.Module], float]] = {"relu": (nn.ReLU, 2.0), "tanh": (nn.Tanh, 1.0)}
"""Activation and the variance gain of its initialisation: weights are normal with variance gain / inputs, biases zero."""


def perceptron(
    problem: LearningProblem,
    hidden: Sequence[int] = (64,),
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    activation: str = "relu",
) -> nn.Sequential:
    """Linear layers with an activation between, initialised after He (relu) or LeCun (tanh) by NumPy's generator from `seed`:
    drawn in float64 and rounded, so that runs of both precisions begin from the same weights."""
    if activation not in ACTIVATIONS:
        raise DataError(f"unknown activation {activation!r}{near_matches(activation, ACTIVATIONS)}")
    make, gain = ACTIVATIONS[activation]
    widths = [problem.features, *hidden, problem.outputs]
    rng = np.random.default_rng(seed)
    layers: list[nn.Module] = []
    for first, second in itertools.pairwise(widths):
        linear = nn.Linear(first, second, dtype=dtype, device="meta").to_empty(device="cpu")
        linear.weight.data.copy_(torch.from_numpy(rng.standard_normal((second, first)) * (gain / first) ** 0.5))
        linear.bias.data.zero_()
        layers += [linear, make()]
    return nn.Sequential(*layers[:-1])


def _split(name: str, inputs: np.ndarray, targets: np.ndarray, outputs: int, dtype: torch.dtype) -> LearningProblem:
    order = np.random.default_rng(0).permutation(len(inputs))
    train = round(TRAIN_FRACTION * len(inputs))
    x = torch.tensor(inputs[order], dtype=dtype)
    y = torch.tensor(targets[order], dtype=torch.int64 if targets.dtype == np.int64 else dtype)
    return LearningProblem(
        name=name,
        inputs=x[:train].contiguous(),
        targets=y[:train].contiguous(),
        test_inputs=x[train:].contiguous(),
        test_targets=y[train:].contiguous(),
        outputs=outputs,
    )


def _sklearn_datasets() -> Any:
    try:
        from sklearn import datasets
    except ImportError as error:
        raise MissingDependencyError(
            "digits and diabetes come with scikit-learn, which is not installed; pip install 'parsim[torch]', "
            "or use the generated problem"
        ) from error
    return datasets
