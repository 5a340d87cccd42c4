"""Staleness: when each module of a decoupled model works on which batch, and what that delays, stores and takes.

The model is cut into K modules, numbered k = 1..K here as in the papers. Time goes in ticks; batch b enters at tick b. A
schedule says at which tick after its entry a batch is forwarded and backwarded by module k: a new one is a row of DECOUPLINGS.

- bp: all in one tick (backward locking); no delay.
- ddg: forward through all modules in tick b, backward of module k in tick b + K - k. Delay K - k.
- fdg: forward of module k in tick b + k - 1, backward in b + 2K - k - 1; nothing is locked. Delay 2(K - k).

fr (Features Replay) is ddg with the forward repeated at the backward (mode replay); adl is fdg with gradients accumulated.

Source of fdg: FDG.py of github.com/ZHUANGHP/FDG (its order is backward_first, its mode in effect fresh, and it never drains).
ddg and Features Replay: the public code slowbull/DDG and slowbull/FeaturesReplay, as this project's specification records it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parsim.errors import AlgorithmError, near_matches

MODES = ("stash", "fresh", "replay")
"""Weights and activations of a delayed backward. stash: both as at the forward (the true delayed gradient; weights are kept
with the activations). fresh: activations as at the forward, weights as they are now (what code does that updates weights
behind autograd's back). replay: the forward is repeated with the weights as they are now, from the stored input."""

ORDERS = ("concurrent", "backward_first")
"""Within a tick. concurrent: all work reads the weights of the tick's beginning. backward_first: backward, update, forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoupling:
    """Ticks after a batch's entry at which module k of K forwards and backwards it."""

    name: str
    forward_tick: Callable[[int, int], int]
    backward_tick: Callable[[int, int], int]

    def delay(self, k: int, modules: int) -> int:
        """d_k: ticks between the forward and the backward of a batch on module k."""
        _check_module(k, modules)
        return self.backward_tick(k, modules) - self.forward_tick(k, modules)

    def span(self, modules: int) -> int:
        """Ticks from a batch's entry to its last backward: what it takes to fill, and again to drain."""
        return max(self.backward_tick(k, modules) for k in range(1, modules + 1))

    def update_delay(self, k: int, modules: int, *, order: str = "concurrent", accumulate: int = 1) -> int:
        """The most updates of module k between the weights its forward read and the weights its gradient is applied to.

        concurrent: d_k; backward_first: max(0, d_k - 1), as the update of the tick itself is seen by its forward. With M
        gradients accumulated per update: ceil(delay / M).
        """
        check_order(order)
        delay = self.delay(k, modules)
        if order == "backward_first":
            delay = max(0, delay - 1)
        return math.ceil(delay / accumulate)

    def activations_held(self, k: int, modules: int) -> int:
        """Batches whose forward module k keeps at once: d_k + 1 (of fdg: 2(K-k)+1, K^2 over all modules)."""
        return self.delay(k, modules) + 1

    def weight_copies(self, k: int, modules: int, mode: str) -> int:
        """Stored versions of module k's weights besides the current ones: d_k in mode stash, none in the others."""
        check_mode(mode)
        return self.delay(k, modules) if mode == "stash" else 0


DECOUPLINGS: dict[str, Decoupling] = {
    "bp": Decoupling(name="bp", forward_tick=lambda k, modules: 0, backward_tick=lambda k, modules: 0),
    "ddg": Decoupling(name="ddg", forward_tick=lambda k, modules: 0, backward_tick=lambda k, modules: modules - k),
    "fdg": Decoupling(name="fdg", forward_tick=lambda k, modules: k - 1, backward_tick=lambda k, modules: 2 * modules - k - 1),
}


def decoupling(name: str) -> Decoupling:
    """The row of DECOUPLINGS called `name`; AlgorithmError with near matches else."""
    if name not in DECOUPLINGS:
        raise AlgorithmError(f"unknown decoupling {name!r}{near_matches(name, DECOUPLINGS)}")
    return DECOUPLINGS[name]


def check_mode(mode: str) -> None:
    """Raise AlgorithmError unless `mode` is one of MODES."""
    if mode not in MODES:
        raise AlgorithmError(f"unknown mode {mode!r} of a delayed backward{near_matches(mode, MODES)}")


def check_order(order: str) -> None:
    """Raise AlgorithmError unless `order` is one of ORDERS."""
    if order not in ORDERS:
        raise AlgorithmError(f"unknown order {order!r} within a tick{near_matches(order, ORDERS)}")


def diagonal_versions(batch: int, modules: int) -> tuple[int, ...]:
    """The weight versions of fdg's gradient of batch b in mode stash: (b, b+1, ..., b+K-1), version t before tick t.

    The block of module k equals the ordinary gradient of the whole network taken at these weights.
    """
    return tuple(range(batch, batch + modules))


def check_beta(beta: float) -> None:
    """Raise AlgorithmError unless 0 <= beta <= 1 (0 trains the last module alone)."""
    if not 0 <= beta <= 1:
        raise AlgorithmError(f"gradient shrinking needs beta in [0, 1], got {beta}; 1 does not shrink")


def even_cuts(layers: int, modules: int) -> tuple[int, ...]:
    """Layers per module, as even as can be, the first modules taking one more: (2, 2, 1) for 5 layers in 3 modules."""
    if not 1 <= modules <= layers:
        raise AlgorithmError(f"{layers} layers cannot be cut into {modules} modules; use between 1 and {layers} modules")
    base, more = divmod(layers, modules)
    return tuple(base + (number < more) for number in range(modules))


def _check_module(k: int, modules: int) -> None:
    if not 1 <= k <= modules:
        raise AlgorithmError(f"modules are numbered 1 to {modules}, got {k}")


# Seconds. F, B: per module the seconds of one batch forward and backward.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTimes:
    """Seconds of one batch on each of the K modules, and of what they exchange.

    Attributes:
        forward_s, backward_s: per module. transfer_s: exposed seconds of one transfer between neighbours.
        reduce_s: exposed seconds of averaging over the S groups, the slowest module's. overhead: relative, on all of it.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    transfer_s: float = 0.0
    reduce_s: float = 0.0
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if not self.forward_s or len(self.forward_s) != len(self.backward_s):
            raise AlgorithmError(
                f"give forward and backward seconds for each module; got {len(self.forward_s)} and {len(self.backward_s)}"
            )

    @property
    def modules(self) -> int:
        """K."""
        return len(self.forward_s)


def tick_s(name: str, times: ModuleTimes, *, replay: bool = False) -> float:
    """Seconds of one tick once the pipeline is full.

    bp: sum of F + B, and a transfer over each boundary both ways. ddg: sum of F with its transfers, then the slowest
    backward, after which gradients are exchanged at once. fdg: the slowest F + B, then the exchange both ways at once.
    `replay` adds F to each delayed backward (fr: ddg with replay; the last module has no delay and repeats nothing).

    Leaves out: transfers that hide behind compute (put the exposed part in `transfer_s`) and the ticks of fill and drain.
    """
    forward, backward, boundaries = times.forward_s, times.backward_s, times.modules - 1
    again = [seconds if replay and k < boundaries else 0.0 for k, seconds in enumerate(forward)]
    exchange = times.transfer_s if boundaries else 0.0
    if name == "bp":
        busy = sum(forward) + sum(backward) + 2 * boundaries * times.transfer_s
    elif name == "ddg":
        busy = sum(forward) + boundaries * times.transfer_s + exchange + max(map(sum, zip(backward, again, strict=True)))
    elif name == "fdg":
        busy = max(map(sum, zip(forward, backward, again, strict=True))) + exchange
    else:
        raise AlgorithmError(f"no tick time is known for {name!r}; known: {', '.join(DECOUPLINGS)}")
    return (busy + times.reduce_s) * (1.0 + times.overhead)


def epoch_s(name: str, times: ModuleTimes, batches: int, *, replay: bool = False, drain: bool = True) -> float:
    """Seconds of `batches` batches per group: one tick each, and the ticks of the last batch's way through the modules."""
    ticks = batches + (decoupling(name).span(times.modules) if drain else 0)
    return ticks * tick_s(name, times, replay=replay)


def balanced_speedup(modules: int, batches: int) -> float:
    """K N / (N + 2(K-1)): fdg over bp for equal modules, no communication, N batches, filled and drained."""
    return modules * batches / (batches + 2 * (modules - 1))


def stage_seconds(total_s: Sequence[float], backward_to_forward: float = 2.0) -> ModuleTimes:
    """Seconds per module split into forward and backward in the ratio 1 : `backward_to_forward`."""
    forward = tuple(seconds / (1.0 + backward_to_forward) for seconds in total_s)
    return ModuleTimes(
        forward_s=forward, backward_s=tuple(seconds - part for seconds, part in zip(total_s, forward, strict=True))
    )
