"""Prices of computation that was never measured, from its operators: the request, and the protocol of models that answer
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from parsim.costs.estimate import Estimate
from parsim.hardware.profile import Profile
from parsim.model.component import Component
from parsim.work import Phase

DEFAULT_DRIFT_SIGMA = 0.05
"""Assumed relative spread of a machine from run to run where the profile states none."""

EXTRAPOLATED_SHARE = 0.1
"""An estimate from operators counts as extrapolated when more than this share of it lies outside the fitted sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeRequest:
    """The computation to price: a component, or a shard of one (`parsim.model.shard.narrow`), in one phase over some
    samples.

    Attributes:
        input_gradient: False for a component whose inputs want no gradient (the model's first one): the backward of its first
            operator then computes the gradient of the weight alone.
    """

    component: Component
    phase: Phase
    samples: int
    input_gradient: bool = True


class OperatorModel(Protocol):
    """Prices components from their operators, on one type of device in one precision.

    Two implementations: `parsim.costs.compute.kernel_model.KernelModel` (a formula fitted to published kernels, or a roofline)
    and `parsim.costs.compute.composition.LaunchModel` (surfaces measured on the machine, and what components add to them).
    """

    def seconds(self, request: ComputeRequest) -> float:
        """Seconds for comparing parts of one component; a common factor may be left out.

        Raises CostError where an operator has no price.
        """

    def estimate(self, request: ComputeRequest) -> Estimate:
        """The price, its terms, and its uncertain parameters.

        Raises CostError where an operator has no price.
        """


def drift_of(profile: Profile) -> tuple[str, float]:
    """Name and relative sigma of the cost parameter that all computation of a machine shares.

    Args:
        profile: of the machine; without a measured noise it takes the default sigma.
    """
    return "drift", DEFAULT_DRIFT_SIGMA if profile.noise is None else profile.noise.drift_sigma
