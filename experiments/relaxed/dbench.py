"""The distance of replicas, tensor by tensor, for DBench (`bench.py`).

The profile of a moment is the L2 norm of every parameter tensor on every replica, taken before mixing. Metrics of inequality
over the replicas are the rows of METRICS. Norms can agree while vectors differ, so the consensus distance stands beside them.

Source: the summary of arXiv 2509.12213 in this project's specification says that norms before averaging are profiled, and which
findings to test. The formulas are the textbook ones; the paper's own could not be obtained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from parsim.errors import AlgorithmError
from parsim.relaxed.replicas import LocalTraining

Values = NDArray[np.float64]


def gini(values: Values) -> Values:
    """sum_i sum_j |a_i - a_j| / (2 n^2 mean): 0 for equal values, (n-1)/n when one worker has all.

    Args:
        values: [n, ...] >= 0, over the first axis. Returns [...]; 0 where all are 0.
    """
    n = len(values)
    ordered = np.sort(values, axis=0)
    place = np.arange(1, n + 1).reshape(-1, *[1] * (values.ndim - 1))
    total = ordered.sum(0)
    return _ratio(2.0 * ((place - (n + 1) / 2) * ordered).sum(0), n * total)


def quartile_coefficient(values: Values) -> Values:
    """(Q3 - Q1)/(Q3 + Q1), quartiles interpolated linearly, over the first axis."""
    low, high = np.quantile(values, [0.25, 0.75], axis=0)
    return _ratio(high - low, high + low)


METRICS: dict[str, Callable[[Values], Values]] = {
    "coefficient_of_variation": lambda values: _ratio(values.std(0), values.mean(0)),
    "dispersion_index": lambda values: _ratio(values.var(0), values.mean(0)),
    "gini": gini,
    "quartile_coefficient": quartile_coefficient,
}
"""Over the first axis, with deviation and variance of the population; the index of dispersion has the unit of the values."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VarianceProfile:
    """What was recorded of one training run.

    Attributes:
        tensors: names [l]. rounds: int64 [r], the rounds recorded. norms: [r, n, l], before mixing.
        consensus: [r], the distance before mixing, and after: [r].
    """

    tensors: tuple[str, ...]
    rounds: NDArray[np.int64]
    norms: Values
    consensus: Values
    consensus_after: Values

    @classmethod
    def of(cls, training: LocalTraining, records: Sequence[tuple[int, Values, float, float]]) -> VarianceProfile:
        """From (exchange, norms [n, l], distance before, distance after) of every recorded exchange."""
        rounds, norms, before, after = zip(*records, strict=True)
        return cls(
            tensors=tuple(name for name, _ in training.tensors),
            rounds=np.array(rounds, dtype=np.int64),
            norms=np.stack(norms),
            consensus=np.array(before),
            consensus_after=np.array(after),
        )

    def metric(self, name: str) -> Values:
        """[r, l]: a row of METRICS over the replicas, or `consensus` [r, 1]."""
        if name == "consensus":
            return self.consensus[:, None]
        if name not in METRICS:
            raise AlgorithmError(f"unknown metric {name!r}; known: consensus, {', '.join(METRICS)}")
        measured: Values = METRICS[name](np.moveaxis(self.norms, 1, 0))
        return measured


def mean_ranks(profiles: Mapping[str, VarianceProfile], metric: str) -> dict[str, float]:
    """Per graph its mean rank by a metric: at each recorded round and tensor the graphs are ranked, 1 the least variance.

    Ties share the mean of their ranks.

    Raises:
        AlgorithmError: profiles that did not record the same rounds and tensors.
    """
    names = list(profiles)
    values = [profiles[name].metric(metric) for name in names]
    if len({value.shape for value in values}) != 1:
        raise AlgorithmError("graphs can be ranked only over the same rounds and tensors; record them with the same settings")
    ranks = rankdata(np.stack(values).reshape(len(names), -1), axis=0)
    return dict(zip(names, ranks.mean(1).tolist(), strict=True))


def _ratio(above: Values, below: Values) -> Values:
    """above / below, 0 where below is 0."""
    result: Values = np.divide(
        above, below, out=np.zeros_like(np.asarray(above, dtype=np.float64)), where=np.asarray(below) != 0
    )
    return result
