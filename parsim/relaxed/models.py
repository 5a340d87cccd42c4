"""The models that `bench-graphs` trains on scikit-learn's digits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from parsim.model.catalogue.networks import VisionTransformer
from parsim.relaxed.problems import load_problem, perceptron
from parsim.relaxed.replicas import LocalOptimizer, LocalTraining

DTYPE = torch.float32


def mlp(seed: int, *, dtype: torch.dtype = torch.float64) -> LocalTraining:
    """64-64-10, ReLU, He initialisation from NumPy's PCG64, SGD .1: the setting of the specified figures."""
    problem = load_problem("digits", dtype=dtype)
    return LocalTraining(perceptron(problem, (64,), seed=seed, dtype=dtype), problem, LocalOptimizer(learning_rate=0.1))


def logistic(seed: int) -> LocalTraining:
    """64-10: convex; SGD .1."""
    problem = load_problem("digits", dtype=DTYPE)
    return LocalTraining(perceptron(problem, (), seed=seed, dtype=DTYPE), problem, LocalOptimizer(learning_rate=0.1))


def cnn(seed: int) -> LocalTraining:
    """Two convolutions of 8 and 16 channels with stride 2 and a linear layer; SGD .05 with momentum .9."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64, 10),
        )
    optimizer = LocalOptimizer(kind="sgd_momentum", learning_rate=0.05)
    return LocalTraining(model.to(DTYPE), load_problem("digits", dtype=DTYPE), optimizer)


class PlainAttention(nn.Sequential):
    """Modules in turn, attention written out: the fused kernel of a CPU has no rule for many replicas at once."""

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            result: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return result


def transformer(seed: int) -> LocalTraining:
    """A vision transformer of one layer of width 16 on four patches; Adam .01."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        encoder = VisionTransformer(input_shape=(1, 8, 8), patch=4, hidden=16, layers=1, heads=2, num_classes=10, dropout=0.0)
    model = PlainAttention(nn.Unflatten(1, (1, 8, 8)), encoder).to(DTYPE)
    return LocalTraining(model, load_problem("digits", dtype=DTYPE), LocalOptimizer(kind="adam", learning_rate=0.01))


MODELS: dict[str, Callable[[int], LocalTraining]] = {
    "logistic": logistic,
    "mlp": lambda seed: mlp(seed, dtype=DTYPE),
    "cnn": cnn,
    "transformer": transformer,
}
