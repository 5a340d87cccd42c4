"""The optimizers by name: the state and traffic of each per parameter element, and how torch makes it. A new one is one
row.

Costs, memory, checkpoints, calibration and the executor read this table. It needs no torch; a row's `make` imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from parsim.errors import ConfigError
from parsim.registry import Registry
from parsim.work import OptimizerStep

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer as TorchOptimizer

MOMENTUM = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """One optimizer. It must work element by element: ZeRO gives each rank a slice of a flat array of parameters.

    Attributes:
        make: (parameters, learning rate) -> the torch.optim.Optimizer, in its foreach form.
        states: names of the arrays of its state with one element per parameter scalar, as in `optimizer.state[p]`. ZeRO 1
            and above divides them; any other entry of the state (a step counter) is kept whole by every rank.
        accesses_per_element: 4-byte reads and writes of one step per parameter scalar, operation by operation, the zeroing of
            the gradient (1) included. It prices a step where none was measured.
        learning_rate: taken where the run file gives none.
        state_element_bytes: of each state array per parameter scalar, for fp32 parameters.
        temporary_bytes_per_element: that a step holds of all parameters at once, beside the state.
        linear: the step is linear in the gradient, so averaging weights after every step is averaging gradients.
    """

    make: Callable[[list[Tensor], float], TorchOptimizer]
    states: tuple[str, ...]
    accesses_per_element: int
    learning_rate: float
    state_element_bytes: int = 4
    temporary_bytes_per_element: int = 0
    linear: bool = False

    def __post_init__(self) -> None:
        if self.accesses_per_element < 1 or self.learning_rate <= 0:
            raise ConfigError(
                f"an optimizer needs accesses_per_element >= 1 and learning_rate > 0, got {self.accesses_per_element} and "
                f"{self.learning_rate}"
            )
        if min(self.state_element_bytes, self.temporary_bytes_per_element) < 0 or "step" in self.states:
            raise ConfigError(
                f"an optimizer needs bytes >= 0 and states without the step counter, got {self.state_element_bytes}, "
                f"{self.temporary_bytes_per_element} and {self.states}"
            )

    @property
    def state_bytes_per_element(self) -> int:
        """Bytes of state per fp32 parameter scalar. Leaves out step counters (4 bytes per array)."""
        return len(self.states) * self.state_element_bytes


def _sgd(parameters: list[Tensor], lr: float) -> TorchOptimizer:
    import torch

    return torch.optim.SGD(parameters, lr=lr, foreach=True)


def _sgd_momentum(parameters: list[Tensor], lr: float) -> TorchOptimizer:
    import torch

    return torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM, foreach=True)


def _adam(parameters: list[Tensor], lr: float) -> TorchOptimizer:
    import torch

    return torch.optim.Adam(parameters, lr=lr, foreach=True)


def _adam_fused(parameters: list[Tensor], lr: float) -> TorchOptimizer:
    import torch

    return torch.optim.Adam(parameters, lr=lr, fused=True)


def _adamw_fused(parameters: list[Tensor], lr: float) -> TorchOptimizer:
    import torch

    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def _adamw(parameters: list[Tensor], lr: float) -> TorchOptimizer:
    import torch

    return torch.optim.AdamW(parameters, lr=lr, foreach=True)


# Accesses: SGD p += g: 3. Momentum m *= mu: 2, m += g: 3, p += m: 3. Adam lerp of m: 3, v *= b: 2, v += g g: 3, sqrt, / and
# + eps: 6, p += m / sqrt(v): 4. AdamW p *= 1 - wd: 2 more. Each with the zeroing of the gradient: 1.
# Fused Adam: parameter, gradient and two moments read, all but the gradient written: 7, and the zeroing.
# Foreach Adam keeps the root of the second moment of all parameters at once; activations are free by then.
OPTIMIZERS: Registry[Optimizer] = Registry(
    "optimizer",
    Optimizer,
    {
        "sgd": Optimizer(make=_sgd, states=(), accesses_per_element=4, learning_rate=0.05, linear=True),
        "sgd_momentum": Optimizer(
            make=_sgd_momentum, states=("momentum_buffer",), accesses_per_element=9, learning_rate=0.05, linear=True
        ),
        "adam": Optimizer(
            make=_adam,
            states=("exp_avg", "exp_avg_sq"),
            accesses_per_element=19,
            learning_rate=1e-3,
            temporary_bytes_per_element=4,
        ),
        "adamw": Optimizer(
            make=_adamw,
            states=("exp_avg", "exp_avg_sq"),
            accesses_per_element=21,
            learning_rate=1e-3,
            temporary_bytes_per_element=4,
        ),
        "adam_fused": Optimizer(make=_adam_fused, states=("exp_avg", "exp_avg_sq"), accesses_per_element=8, learning_rate=1e-3),
        "adamw_fused": Optimizer(
            make=_adamw_fused, states=("exp_avg", "exp_avg_sq"), accesses_per_element=8, learning_rate=1e-3
        ),
    },
)


class Grouped(Protocol):
    """A parameter, or what a rank holds of it: its scalars and the group with which it is updated."""

    @property
    def elements(self) -> int: ...
    @property
    def group(self) -> str: ...
    @property
    def optimizer(self) -> str: ...


def update_steps(parameters: Iterable[Grouped]) -> tuple[OptimizerStep, ...]:
    """The updates of these parameters, each in an array of its own: one per group, that without a name first."""
    sizes: dict[tuple[str, str], list[int]] = {}
    for parameter in parameters:
        sizes.setdefault((parameter.group, parameter.optimizer), []).append(parameter.elements)
    return tuple(
        OptimizerStep(elements=sum(sizes[group, name]), tensors=len(sizes[group, name]), group=group, optimizer=name)
        for group, name in sorted(sizes)
    )
