"""Step sizes against quadratic losses: what the programs of relaxed rules do just below and just above each limit, and that
below a safe step gradients stay under the bound."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from parsim.plans.convergence import MOST_DRIFT, delayed_limit, drift, step_condition
from parsim.plans.mixing import Merged, merged_in_turn
from parsim.plans.synchronisation import parse_synchronisation
from parsim.relaxed.problems import LearningProblem
from parsim.relaxed.replicas import LocalOptimizer, LocalTraining, steps_of
from tests.quick import some_quick

CURVATURE = 4.0


class EverySample:
    """Each replica its own sample, in every step."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def indices(self, step: int) -> NDArray[np.int64]:
        return np.arange(self.samples)


class OneWeightPerStage(nn.Module):
    """sum_k w_k x_k: a quadratic loss over weights of several stages."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.full((1,), 1.0, dtype=torch.float64)) for _ in range(stages)])

    def forward(self, x: Tensor) -> Tensor:
        return sum((x[:, number, None] * weight for number, weight in enumerate(self.weights)), torch.zeros(1, dtype=x.dtype))


def quadratic(step: float, inputs: Tensor, targets: Tensor) -> LocalTraining:
    """sum of (x w - y)^2, with eta = step / CURVATURE."""
    problem = LearningProblem(
        name="quadratic", inputs=inputs, targets=targets, test_inputs=inputs, test_targets=targets, outputs=1
    )
    return LocalTraining(OneWeightPerStage(inputs.shape[1]), problem, LocalOptimizer(learning_rate=step / CURVATURE))


def growth(rule: str, replicas: int, step: float, *, stages: int = 1, steps: int = 400) -> float:
    """How much more the weights change per step late than early: below 1 they converge."""
    rows = max(replicas, 1)
    inputs = torch.zeros(rows, stages, dtype=torch.float64)
    inputs[:, 0] = (CURVATURE / 2) ** 0.5  # d^2/dw^2 (x w - y)^2 = 2 x^2
    targets = torch.from_numpy(np.random.default_rng(0).standard_normal((rows, 1)))
    if rule.startswith(("merge", "stale", "average")):
        targets = torch.ones_like(targets)  # replicas with the same data
    names = [(f"weights.{number}",) for number in range(stages)] if rule == "stale" else []
    training = quadratic(step, inputs, targets)
    states = steps_of(parse_synchronisation(rule), replicas, training, EverySample(rows), names)
    weights = torch.stack([workers.weights for workers, _ in islice(states, steps)])
    moved = (weights[1:] - weights[:-1]).abs().amax((1, 2))
    early, late = moved[: steps // 4].max(), moved[-steps // 4 :].max()
    return float(late / early)


EXACT = [
    ("all_reduce", 1, 1),
    ("average/4", 4, 1),
    ("average/4 outer=nesterov:1.6:0.9", 4, 1),
    ("average/2 outer=momentum:4:0.5", 2, 1),
    ("gossip/1 ring", 6, 1),
    ("gossip/2 exponential", 6, 1),
    ("gossip/1 ring combination=combine_adapt", 4, 1),
    ("gossip/1 ring combination=combine_adapt", 9, 1),
    ("gossip/1 exponential combination=combine_adapt", 6, 1),
    ("gossip/1 torus combination=combine_adapt", 12, 1),
    ("gossip/1 star combination=combine_adapt", 5, 1),
    ("merge/2", 3, 1),
    ("merge/4 merge=running", 3, 1),
    ("merge/2 merge=staleness:0.6", 4, 1),
    ("merge/1 merge=buffered:1", 2, 1),
    ("merge/1 merge=buffered:1", 5, 1),
    ("merge/3 merge=buffered:1:0.7", 4, 1),
    ("stale", 1, 2),
    ("stale", 1, 3),
    ("stale", 1, 4),
]


QUICK = [("gossip/1 ring combination=combine_adapt", 4, 1), ("merge/1 merge=buffered:1", 2, 1), ("stale", 1, 2)]


@pytest.mark.parametrize(("rule", "replicas", "stages"), some_quick(EXACT, *QUICK))
def test_a_quadratic_loss_converges_below_the_limit_and_diverges_above(rule: str, replicas: int, stages: int) -> None:
    found = step_condition(parse_synchronisation(rule), replicas=replicas, stages=stages)
    assert found.limit is not None
    assert found.is_exact
    assert growth(rule, replicas, 0.95 * found.limit, stages=stages) < 0.7
    assert growth(rule, replicas, 1.05 * found.limit, stages=stages) > 1.4


@given(
    st.integers(2, 7).flatmap(lambda replicas: st.tuples(st.just(replicas), st.integers(1, replicas))),
    st.integers(1, 3),
    st.floats(0.3, 1.0),
)
def test_buffered_merges_converge_below_their_limit(sizes: tuple[int, int], steps: int, rate: float) -> None:
    """By the merge itself, for one weight: H local steps multiply it by (1 - s)^H."""
    replicas, buffer = sizes
    rule = parse_synchronisation(f"merge/{steps} merge=buffered:{buffer}:{rate!r}")
    found = step_condition(rule, replicas=replicas)
    assert found.limit is not None
    kept = (1 - 0.9 * found.limit) ** steps
    state, starts, seen = Merged(weights=1.0), [1.0] * replicas, [1.0]
    for number in range(300):
        own = [kept * start for start in starts]
        state, starts = merged_in_turn(rule.merge_rule(replicas), state, own, starts, number)
        seen.append(abs(state.weights))
    assert max(seen[-20:]) < 0.95 * max(seen[:20])  # where a round changes little with s, 0.9 s is nearly the limit


@pytest.mark.parametrize(("delay", "limit"), [(0, 2.0), (1, 1.0), (2, 0.618034), (6, 0.241073)])
def test_delayed_limits_are_the_known_ones(delay: int, limit: float) -> None:
    """And the characteristic polynomial z^(d+1) - z^d + s has its largest root on the unit circle there."""
    assert delayed_limit(delay) == pytest.approx(limit, abs=1e-6)
    roots = np.roots([1.0, -1.0, *[0.0] * (delay - 1), delayed_limit(delay)] if delay else [1.0, delayed_limit(0) - 1.0])
    assert np.abs(roots).max() == pytest.approx(1.0, abs=1e-9)


@given(st.integers(2, 5), st.integers(0, 10**6))
def test_stale_stages_converge_at_the_safe_step_for_any_coupling(stages: int, seed: int) -> None:
    """By the eigenvalues of the map of all waiting weights, for a random Hessian over the weights of all stages."""
    rng = np.random.default_rng(seed)
    width = 2
    factor = rng.standard_normal((stages * width, stages * width))
    hessian = factor @ factor.T
    hessian /= np.linalg.eigvalsh(hessian).max()
    safe = step_condition(parse_synchronisation("stale"), replicas=1, stages=stages).safe
    assert safe is not None
    last, size = 2 * (stages - 1), stages * width
    companion = np.eye(size * (last + 1), k=-size)
    companion[:size, :size] = np.eye(size)
    for of in range(stages):
        for at in range(stages):
            late = last - of - at
            rows, columns = slice(of * width, (of + 1) * width), slice(late * size + at * width, late * size + (at + 1) * width)
            companion[rows, columns] -= safe * hessian[of * width : (of + 1) * width, at * width : (at + 1) * width]
    assert np.abs(np.linalg.eigvals(companion)).max() < 1.0


RULES = ["average/1", "average/5", "gossip/1 ring", "gossip/3 ring", "gossip/1 ring combination=combine_adapt"]
CYCLES = ["gossip/1 one_peer_exponential", "gossip/2 one_peer_exponential", "gossip/1 star"]
CYCLES += ["gossip/1 one_peer_exponential combination=combine_adapt"]


@pytest.mark.parametrize("rule", some_quick(RULES + CYCLES, "average/5", "gossip/1 ring"))
@pytest.mark.parametrize("share", some_quick([0.3, 0.9], 0.9))
def test_replicas_stay_within_the_drift_of_their_gradients(rule: str, share: float) -> None:
    """On quadratics of unlike curvature and minimum, with the gradients of the mean weights measured on the way."""
    replicas, width = 6, 3
    parsed = parse_synchronisation(rule)
    found = step_condition(parsed, replicas=replicas)
    assert found.safe is not None
    step = share * found.safe
    rng = np.random.default_rng(1)
    inputs = torch.from_numpy(rng.standard_normal((replicas, width)))
    smoothness = float(2 * inputs.square().sum(1).max())
    targets = torch.from_numpy(10 * rng.standard_normal((replicas, 1)))
    training = quadratic(step / smoothness * CURVATURE, inputs, targets)
    differing = apart = 0.0
    squares, steps = [], 150
    before = training.start.repeat(replicas, 1)
    own = np.arange(replicas)[:, None]

    def at_mean(weights: Tensor) -> Tensor:
        return training.gradient(weights.mean(0).repeat(replicas, 1), own)

    for workers, _ in islice(steps_of(parsed, replicas, training, EverySample(replicas)), steps):
        gradient = at_mean(before)
        squares.append(float(gradient.mean(0).square().sum()))
        differing = max(differing, float((gradient - gradient.mean(0)).square().sum(1).mean() ** 0.5))
        apart = max(apart, float((before - before.mean(0)).square().sum(1).mean() ** 0.5))
        before = workers.weights
    assert apart * smoothness <= found.drift(step) * differing + 1e-12
    least = torch.linalg.lstsq(inputs, targets).solution
    losses = [float((inputs @ weights - targets).square().mean()) for weights in (training.start[:, None], least)]
    bound = found.gradient_bound(step, smoothness, steps, above_minimum=losses[0] - losses[1], differing=differing)
    assert np.mean(squares) <= bound


def test_conditions_fall_with_local_steps_delay_and_the_spectral_gap() -> None:
    def safe(rule: str, replicas: int = 16, stages: int = 1) -> float:
        found = step_condition(parse_synchronisation(rule), replicas=replicas, stages=stages).safe
        assert found is not None
        return found

    assert [safe(f"average/{steps}") for steps in (1, 1 + 1)] == pytest.approx([1.0, MOST_DRIFT])
    assert safe("average/32") == pytest.approx(np.log(1 + MOST_DRIFT) / 31, rel=0.02), "1/(L H) for many local steps"
    gaps = {"ring": 0.050747, "torus": 0.4, "exponential": 0.4, "complete": 1.0}
    steps = {graph: safe(f"gossip/1 {graph}") for graph in gaps}
    assert steps["torus"] == pytest.approx(steps["exponential"])
    assert steps["ring"] < steps["torus"] < steps["complete"] == 1.0
    assert steps["ring"] == pytest.approx(MOST_DRIFT / (1 + MOST_DRIFT) * gaps["ring"] / (1 - gaps["ring"]), rel=1e-4)
    assert safe("stale", stages=2) == pytest.approx((21**0.5 - 1) / 10)
    assert safe("stale", stages=2) > safe("stale", stages=3) > safe("stale", stages=4)
    assert safe("merge/2 merge=buffered:1") < safe("merge/1 merge=buffered:1")
    assert drift(0.5, 1, 0.0) == 0.0, "replicas that average in every step do not differ when a gradient is taken"
    assert step_condition(parse_synchronisation("gossip/1 random_directed push_sum"), replicas=4).limit is None
    assert step_condition(parse_synchronisation("gossip/1 ada(rounds=5, epochs=3)"), replicas=16).contraction < 1.0
