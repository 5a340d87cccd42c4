"""How tokens reach the experts that they visit, and come back: the bytes that travel, the fullest rank, and what hides them.

A dispatcher either sends a token once for every expert that it visits ("all_to_all"), or once to every rank and node among them
("deepep", "hybridep"). Of k visits spread at random over n places, n (1 - (1 - 1/n)^k) places have at least one.

The fullest of ep ranks has more visits than the mean, by the mean of the largest of ep normal deviates. Their spread is that of
tokens that choose at random, and of experts that are chosen more often than others (`ExpertRouting.skew`).

Sources: Megatron Core's MoE guide (--moe-token-dispatcher-type, --overlap-moe-expert-parallel-comm, --delay-wgrad-compute);
deepseek-ai/DeepEP README @dd758caf4518: tokens are forwarded from the network to NVLink, so each crosses once per node.

Leaves out: experts that are chosen together, nodes to which a router keeps, and multiprocessors that a dispatcher takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

Dispatcher = Literal["all_to_all", "deepep", "hybridep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRouting:
    """Attributes:
    capacity_factor: visits that an expert has room for (and computes, padded) over their mean; 0: as many as come.
    skew: standard deviation of the visits of single experts over their mean, beyond chance; 0: balanced.
    dispatcher: what sends the tokens.
    overlapped: exchanges run beside the computation of another microbatch.
    delayed: gradients of the experts' weights are computed when the exchange behind them has begun.
    """

    capacity_factor: float = 0.0
    skew: float = 0.0
    dispatcher: Dispatcher = "all_to_all"
    overlapped: bool = False
    delayed: bool = False

    @property
    def sends_once(self) -> bool:
        """Whether a token travels once to each rank and node, however many experts it visits there."""
        return self.dispatcher != "all_to_all"

    def load(self, visits: float, experts: int, ways: int) -> float:
        """Visits of the fullest of so many ranks over their mean.

        Args:
            visits: the mean of a rank. experts: of a rank.
        """
        return self.capacity_factor or busiest_share(visits, ways, self.skew / math.sqrt(experts))


BALANCED = ExpertRouting()


def busiest_share(visits: float, ways: int, skew: float = 0.0) -> float:
    """Visits of the fullest of so many ranks over their mean, if every visit chooses a rank at random.

    1 + m sqrt((1 - 1/n) / mean + skew^2), with m the mean of the largest of n standard normal numbers (Blom's approximation).

    Args:
        visits: the mean of a rank. ways: ranks. skew: relative standard deviation of how likely ranks are chosen.
    """
    if ways == 1 or visits <= 0:
        return 1.0
    largest = NormalDist().inv_cdf((ways - 0.375) / (ways + 0.25))
    return min(float(ways), 1.0 + largest * math.sqrt((1 - 1 / ways) / visits + skew**2))


def places_visited(places: int, visits: int) -> float:
    """The mean number of different places among so many visits, each at a place chosen at random."""
    return places * (1 - (1 - 1 / places) ** visits)
