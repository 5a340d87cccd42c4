"""fp32 copies of half-precision weights, which the optimizer updates.

An update that is smaller than a weight's last digit adds up in the copy.

The optimizer knows the copies alone. A checkpoint holds them as an entry of the optimizer's state, `MASTER`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

MASTER = "master"


class MasterWeights:
    """Copies of `parameters`. Attributes: copies: in the same order."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self.copies: list[Tensor] = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
        self._copy = {id(parameter): copy for parameter, copy in zip(self._parameters, self.copies, strict=True)}

    def of(self, parameter: Tensor) -> Tensor:
        return self._copy[id(parameter)]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One update of the copies with the parameters' gradients; the parameters become the copies, rounded."""
        for parameter, copy in zip(self._parameters, self.copies, strict=True):
            copy.grad = None if parameter.grad is None else parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for parameter, copy in zip(self._parameters, self.copies, strict=True):
                parameter.copy_(copy)
                copy.grad = None
