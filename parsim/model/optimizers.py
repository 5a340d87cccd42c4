"""The optimizers by name: the state and traffic of each per parameter element, and how torch makes it. A new one is one
row.

Costs, memory, checkpoints, calibration and the executor read this table. It needs no torch; a row's `make` imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from parsim.errors import ConfigError
from parsim.registry import Registry
from parsim.work import OptimizerStep

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer as TorchOptimizer

MOMENTUM = 0.9
COUNTERS = ("step", "mu_product", "eta", "mu")
"""Entries of an optimizer's state that follow from the number of steps (NAdam's product of momenta, ASGD's rates): one number
for each parameter, which every rank keeps."""
HOST_COUNTERS = ("mu_product",)
"""Those that torch keeps in the memory of the host, whatever device the parameters are on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """One optimizer. It must work element by element: ZeRO gives each rank a slice of a flat array of parameters.

    Attributes:
        make: (parameters, learning rate) -> the torch.optim.Optimizer, in its foreach form.
        states: names of the arrays of its state with one element per parameter scalar, as in `optimizer.state[p]`. ZeRO 1
            and above divides them. What follows from the number of steps (COUNTERS) is kept by every rank.
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
        if min(self.state_element_bytes, self.temporary_bytes_per_element) < 0 or set(COUNTERS) & set(self.states):
            raise ConfigError(
                f"an optimizer needs bytes >= 0 and states without the step counter, got {self.state_element_bytes}, "
                f"{self.temporary_bytes_per_element} and {self.states}"
            )

    @property
    def state_bytes_per_element(self) -> int:
        """Bytes of state per fp32 parameter scalar. Leaves out step counters (4 bytes per array)."""
        return len(self.states) * self.state_element_bytes


def _torch(name: str, **settings: Any) -> Callable[[list[Tensor], float], TorchOptimizer]:
    """(parameters, learning rate) -> torch's optimizer of that name, with these settings."""

    def make(parameters: list[Tensor], lr: float) -> TorchOptimizer:
        import torch

        made: TorchOptimizer = getattr(torch.optim, name)(parameters, lr=lr, **settings)
        return made

    return make


# Accesses are those of torch's foreach operations, one by one: an array that is read or written counts one each (a lerp of a
# moment 3, a product with a number 2, p += m / d: 4), and the zeroing of the gradient 1 more. Fused Adam reads the parameter,
# the gradient and two moments, and writes all but the gradient. Temporary arrays hold all parameters at once: the root of the
# second moment (of Adamax |g|), and with Adagrad the scaled gradient, with Adadelta the change. Activations are free by then.
OPTIMIZERS: Registry[Optimizer] = Registry(
    "optimizer",
    Optimizer,
    {
        "sgd": Optimizer(make=_torch("SGD", foreach=True), states=(), accesses_per_element=4, learning_rate=0.05, linear=True),
        "sgd_momentum": Optimizer(
            make=_torch("SGD", momentum=MOMENTUM, foreach=True),
            states=("momentum_buffer",),
            accesses_per_element=9,
            learning_rate=0.05,
            linear=True,
        ),
        "adam": Optimizer(
            make=_torch("Adam", foreach=True),
            states=("exp_avg", "exp_avg_sq"),
            accesses_per_element=19,
            learning_rate=1e-3,
            temporary_bytes_per_element=4,
        ),
        "adamw": Optimizer(
            make=_torch("AdamW", foreach=True),
            states=("exp_avg", "exp_avg_sq"),
            accesses_per_element=21,
            learning_rate=1e-3,
            temporary_bytes_per_element=4,
        ),
        "adam_fused": Optimizer(
            make=_torch("Adam", fused=True), states=("exp_avg", "exp_avg_sq"), accesses_per_element=8, learning_rate=1e-3
        ),
        "adamw_fused": Optimizer(
            make=_torch("AdamW", fused=True), states=("exp_avg", "exp_avg_sq"), accesses_per_element=8, learning_rate=1e-3
        ),
        "rmsprop": Optimizer(
            make=_torch("RMSprop", foreach=True),
            states=("square_avg",),
            accesses_per_element=14,
            learning_rate=1e-3,
            temporary_bytes_per_element=4,
        ),
        "rmsprop_momentum": Optimizer(
            make=_torch("RMSprop", momentum=MOMENTUM, foreach=True),
            states=("square_avg", "momentum_buffer"),
            accesses_per_element=19,
            learning_rate=1e-3,
            temporary_bytes_per_element=4,
        ),
        "adagrad": Optimizer(
            make=_torch("Adagrad", foreach=True),
            states=("sum",),
            accesses_per_element=14,
            learning_rate=1e-2,
            temporary_bytes_per_element=8,
        ),
        "radam": Optimizer(
            make=_torch("RAdam", foreach=True),
            states=("exp_avg", "exp_avg_sq"),
            accesses_per_element=23,
            learning_rate=1e-3,
            temporary_bytes_per_element=4,
        ),
        "nadam": Optimizer(
            make=_torch("NAdam", foreach=True),
            states=("exp_avg", "exp_avg_sq"),
            accesses_per_element=23,
            learning_rate=2e-3,
            temporary_bytes_per_element=4,
        ),
        "asgd": Optimizer(
            make=_torch("ASGD", foreach=True),
            states=("ax",),
            accesses_per_element=13,
            learning_rate=1e-2,
            temporary_bytes_per_element=4,
        ),
        "adamax": Optimizer(
            make=_torch("Adamax", foreach=True),
            states=("exp_avg", "exp_inf"),
            accesses_per_element=17,
            learning_rate=2e-3,
            temporary_bytes_per_element=4,
        ),
        "adadelta": Optimizer(
            make=_torch("Adadelta", foreach=True),
            states=("square_avg", "acc_delta"),
            accesses_per_element=28,
            learning_rate=1.0,
            temporary_bytes_per_element=8,
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
        OptimizerStep(elements=sum(sizes[group, name]), tensors=len(sizes[group, name]), update_group=group, optimizer=name)
        for group, name in sorted(sizes)
    )
