"""How large a step may be under a rule of synchronisation, in units of 1/L: L is the largest curvature of the loss.

safe    below it the gradients at the mean weights are bounded, for every loss whose gradient is L-Lipschitz on every replica:

            mean_t |grad f(x_t)|^2  <=  2 (f(x_0) - min f) / (eta T)  +  (drift zeta)^2

        zeta: how far gradients of replicas are from their mean, root mean square over replicas. It may grow with the gradient,
        zeta^2 = z^2 + |grad f|^2: a safe step has drift <= 1/sqrt(2), and then both terms count twice, with z for zeta.
limit   below it no quadratic loss with curvatures up to L diverges; where `is_exact`, one diverges above it.

Minibatch noise adds terms that fall with eta, and no condition. Proofs, with s = eta L and a = 1 + s:

1. The mean moves by -eta g, g the mean of gradients taken at other points. The descent lemma with <p, q> = (|p|^2 + |q|^2 -
   |p - q|^2)/2:  f falls by at least eta/2 (|grad f|^2 + (1 - s) |g|^2 - |grad f - g|^2).
2. Replicas at a distance c_t from their mean (root mean square): |grad f - g| <= L c_t. A local step makes c at most
   a c + eta zeta, a round of W times rho = |W - 11'/n|. Summed over all earlier steps, L c <= drift zeta (`drift`). Where
   a round is one of a cycle of different W, only the product of all contracts.
3. Gradients at points that lack the last d updates: |grad f - g| <= L eta d max |g|, and summed over steps s + s^2 d^2 <= 1
   suffices. Stages that wait differently: d^2 is the largest sum over stages of squared delays of one stage's weights.
4. Quadratic losses: w <- w - s w_(t-d) is stable for s < 2 sin(pi / (2 (2 d + 1))). W x - eta g has the eigenvalues
   lambda - s, x <- W (x - eta g) those of 1 - s times at most 1. An outer optimizer of rate r and momentum b sees the
   gradient m = 1 - (1 - s)^H, and is stable for r m < 2 (1 + b), of Nesterov's 2 (1 + b) / (1 + 2 b).

Source: our statements, proven above. They have the order of the known ones, which were not opened: 1/(L H) and (1 - rho)/L
of local and decentralised SGD (Koloskova et al. 2020), (1 + lambda_min)/L (Yuan, Ling, Yin 2016), 1/(L d) with delays (Lian et
al. 2015; Arjevani, Shamir, Srebro 2020). Leaves out adaptive optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from parsim.plans.mixing import Matrix, eigenvalues, is_circulant
from parsim.plans.synchronisation import Synchronisation

MOST_DRIFT = math.sqrt(0.5)
"""Of a safe step: the gradients that drift adds are then at most half of those at the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCondition:
    """Attributes:
    safe, limit: largest eta L; None: none is known, and `why` says so. is_exact: a quadratic loss diverges above the limit.
    local_steps: between two rounds. contraction: rho of a round, or of a cycle of `cycle` rounds; 0 for an average.
    late: whether a round mixes what was there before the step. delay: updates that a gradient lacks.
    """

    safe: float | None
    limit: float | None
    is_exact: bool = True
    why: str = ""
    local_steps: int = 1
    contraction: float = 0.0
    cycle: int = 1
    late: bool = False
    delay: int = 0

    def drift(self, step: float) -> float:
        """L c / zeta for eta L = step: how far replicas differ for how far their gradients do; infinite where it grows."""
        return drift(step, self.local_steps, self.contraction, cycle=self.cycle, late=self.late)

    def gradient_bound(self, step: float, smoothness: float, steps: int, *, above_minimum: float, differing: float) -> float:
        """Of the mean over steps of |grad f|^2: 2 (f_0 - min f)/(eta T) + (drift zeta)^2; infinite for a step beyond safe.
        step: eta L. smoothness: L. above_minimum: f_0 - min f. differing: the largest zeta."""
        if self.safe is None or step > (self.safe if self.delay else 1.0):
            return math.inf
        apart = self.drift(step) * differing if differing else 0.0
        return 2.0 * above_minimum * smoothness / (step * steps) + apart**2

    def terms(self) -> str:
        """`spectral gap 0.195, 8 local steps`, `gradients up to 6 steps late`; "" of synchronous training."""
        words = []
        if self.contraction:
            over = f" over {self.cycle} rounds" if self.cycle > 1 else ""
            words.append(f"spectral gap {1 - self.contraction:.3g}{over}")
        if self.local_steps > 1:
            words.append(f"{self.local_steps} local steps")
        if self.delay:
            words.append(f"gradients up to {self.delay} updates late")
        return ", ".join(words)

    def to_dict(self) -> dict[str, Any]:
        return {
            "safe_step_times_curvature": self.safe,
            "limit_step_times_curvature": self.limit,
            "limit_is_exact": self.is_exact,
            "spectral_gap": 1.0 - self.contraction,
            "local_steps": self.local_steps,
            "delay": self.delay,
            "why": self.why or None,
        }


def drift(step: float, local_steps: int, contraction: float, *, cycle: int = 1, late: bool = False) -> float:
    """L c / zeta, by the sum over all earlier steps; see 2. of the module."""
    growth, steps = 1.0 + step, local_steps * cycle
    if steps * math.log(growth) > math.log(1e9):
        return math.inf
    within, whole = growth ** (steps - 1), growth**steps
    if cycle == 1 and not late:
        kept, before = contraction * whole, contraction * within * (whole - 1.0)
    else:  # the last steps before a round are not contracted by those before them
        kept, before = contraction + whole - 1.0, within * (whole - 1.0)
    return within - 1.0 + before / (1.0 - kept) if kept < 1.0 else math.inf


def step_condition(rule: Synchronisation, *, replicas: int, stages: int = 1) -> StepCondition:
    """What is known of the step size of a rule on so many replicas and stages. Raises as `Synchronisation.check`."""
    unknown = {
        "stale stages that mix weights": rule.is_stale and rule.mixes,
        "fragments that are averaged in turn": rule.fragments > 1,
        "messages in fewer bits": bool(rule.message_format),
        f'gradients of stale stages with beta = {rule.beta:g} and backward = "{rule.backward}"': rule.is_stale
        and (rule.beta < 1 or not rule.stashes),
    }
    for what, asked in unknown.items():
        if asked:
            return StepCondition(safe=None, limit=None, why=f"nothing is proven of {what}")
    return _CONDITIONS[rule.kind](rule, replicas, stages)


def _average(rule: Synchronisation, replicas: int, stages: int) -> StepCondition:
    steps, outer = rule.period_steps, rule.outer
    if outer is None:
        late = rule.combines_first
        return StepCondition(
            safe=_largest(lambda step: drift(step, steps, 0.0, late=late)),
            limit=1.0 if late else 2.0,  # differences are multiplied by -s (1 - s)^(H-1)
            is_exact=not late or steps == 1,
            local_steps=steps,
            late=late,
        )
    most = 2.0 * (1.0 + outer.momentum) / (1.0 + 2.0 * outer.momentum * outer.nesterov) / outer.lr
    why = "nothing is proven of an outer optimizer beyond quadratic losses"
    return StepCondition(safe=None, limit=_of_round(most, steps), local_steps=steps, why=why)


def _gossip(rule: Synchronisation, replicas: int, stages: int) -> StepCondition:
    if rule.push_sum:
        return StepCondition(safe=None, limit=None, why="nothing is proven of push-sum, whose masses scale the steps")
    changes = bool(rule.graph) and len(rule.mixing.phases(replicas)) > 1
    matrices = [rule.matrix(number, replicas) for number in rule.cycle(replicas)]
    steps, late, cycle = rule.period_steps, rule.combines_first, 1 if changes else len(matrices)
    # Of graphs that follow one another for long (Ada) the slowest decides, of a cycle the product of its rounds.
    contraction = max(map(_contraction, matrices)) if changes else _contraction(reduce(lambda all_, one: one @ all_, matrices))
    return StepCondition(
        safe=_largest(lambda step: drift(step, steps, contraction, cycle=cycle, late=late)),
        limit=min(map(_late_limit, matrices)) if late else 2.0,
        is_exact=not late or len(matrices) == 1,
        local_steps=steps,
        contraction=contraction,
        cycle=cycle,
        late=late,
    )


def _merge(rule: Synchronisation, replicas: int, stages: int) -> StepCondition:
    steps = rule.period_steps
    if rule.merge != "buffered":  # sums of weights that add to 1, of models that a local step has made smaller
        why = f'nothing is proven of the merge "{rule.merge}" beyond quadratic losses, with the same data on every replica'
        return StepCondition(safe=None, limit=2.0, is_exact=steps % 2 == 0, local_steps=steps, why=why)
    merges = -(-(replicas - 1) // rule.merge_buffer)
    delay = (replicas + rule.merge_buffer - 1) * steps - 1
    return StepCondition(
        safe=_of_delay(delay * delay),
        limit=_of_round(delayed_limit(merges) / rule.merge_rate, steps),
        is_exact=rule.merge_buffer == 1,
        local_steps=steps,
        delay=delay,
    )


def _stale(rule: Synchronisation, replicas: int, stages: int) -> StepCondition:
    """A stage applies gradients that were taken at the weights that every stage had when the batch ran forward there."""
    late = [[rule.backward_lag(of, stages) - rule.forward_lag(at, stages) for of in range(stages)] for at in range(stages)]
    squared = max(sum(steps * steps for steps in own) for own in late)
    return StepCondition(safe=_of_delay(squared), limit=delayed_limit(late[0][0]), delay=max(map(max, late)))


_CONDITIONS: dict[str, Callable[[Synchronisation, int, int], StepCondition]] = {
    "all_reduce": lambda rule, replicas, stages: StepCondition(safe=1.0, limit=2.0),
    "average": _average,
    "gossip": _gossip,
    "merge": _merge,
    "stale": _stale,
}


def delayed_limit(delay: int) -> float:
    """2 sin(pi / (2 (2 d + 1))): the largest s with which w <- w - s w_(t-d) is stable; 2 without a delay, 1 for d = 1."""
    return 2.0 * math.sin(math.pi / (2 * (2 * delay + 1)))


def _of_delay(squared: float) -> float:
    """The root of s + s^2 d^2 = 1."""
    return 2.0 / (1.0 + math.sqrt(1.0 + 4.0 * squared))


def _of_round(most: float, steps: int) -> float:
    """The least s above 0 at which the change of a round, 1 - (1 - s)^H, comes to `most`; 2 at most."""
    if most <= 1.0:
        return float(1.0 - (1.0 - most) ** (1.0 / steps))
    return 2.0 if steps % 2 == 0 else min(2.0, float(1.0 + (most - 1.0) ** (1.0 / steps)))


def _largest(drift_of: Callable[[float], float]) -> float:
    """The largest s <= 1 whose drift is safe, by bisection: drift grows with s."""
    if drift_of(1.0) <= MOST_DRIFT:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if drift_of(middle) <= MOST_DRIFT else (low, middle)
    return low


def _contraction(matrix: Matrix) -> float:
    """|W - 11'/n|: how much of the replicas' differences a round leaves at most."""
    if is_circulant(matrix):
        return float(np.abs(eigenvalues(matrix)[1:]).max(initial=0.0))
    return float(np.linalg.norm(matrix - 1.0 / len(matrix), 2))


def _late_limit(matrix: Matrix) -> float:
    """The least s with |lambda - s| = 1 over the eigenvalues of W: exact where W is normal, as all graphs here are."""
    values = eigenvalues(matrix)
    return float((values.real + np.sqrt(np.maximum(0.0, 1.0 - values.imag**2))).min())
