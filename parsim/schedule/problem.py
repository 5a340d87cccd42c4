"""The question a scheduler answers: this model, on this cluster, with this batch, precision and optimizer."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property

from parsim.costs.corrected import NO_CORRECTIONS, Corrections
from parsim.costs.costs import Costs
from parsim.costs.estimate import Estimate
from parsim.costs.pricing import price
from parsim.hardware.cluster import Cluster
from parsim.model.model import Model
from parsim.work import Work


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Attributes: global_batch in samples per step; precision and optimizer as in RUN.toml; corrections learnt from a run."""

    model: Model
    cluster: Cluster
    global_batch: int
    precision: str = "fp32"
    optimizer: str = "sgd_momentum"
    corrections: Corrections = NO_CORRECTIONS

    def costs(self, ranks: int) -> Costs:
        """Prices under the load of `ranks` ranks that compute at once."""
        if ranks not in self._costs:
            self._costs[ranks] = Costs(
                model=self.model,
                cluster=self.cluster,
                precision=self.precision,
                optimizer=self.optimizer,
                ranks_active=ranks,
                corrections=self.corrections,
            )
        return self._costs[ranks]

    def price(self, work_of_ranks: Iterable[tuple[Work, int]], ranks: int) -> list[Estimate]:
        """Estimates in order; what one plan has asked is known for the next. Raises CostError."""
        return price(work_of_ranks, self.costs(ranks), self._known.setdefault(ranks, {}))

    @cached_property
    def _known(self) -> dict[int, dict[Hashable, Estimate]]:
        return {}

    @cached_property
    def _costs(self) -> dict[int, Costs]:
        return {}
