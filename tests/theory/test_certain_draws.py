"""Comparisons of random numbers that always have one answer, as of layers that are dropped with probability 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from parsim.errors import TraceError
from parsim.model.build import record

Drops = Callable[[Tensor, float], object]
CERTAIN: dict[str, tuple[Drops, float, bool]] = {
    "none is below 0": (lambda drawn, rate: drawn < rate, 0.0, False),
    "all are below 1": (lambda drawn, rate: drawn < rate, 1.0, True),
    "0 is not above any": (lambda drawn, rate: rate > drawn, 0, False),
    "all are at least 0": (lambda drawn, rate: drawn >= rate, 0.0, True),
    "none is at most -1": (lambda drawn, rate: drawn <= rate, -1.0, False),
    "all are above -1": (lambda drawn, rate: torch.gt(drawn, rate), -1.0, True),
    "none is above 1": (lambda drawn, rate: drawn > rate, 1, False),
}
UNCERTAIN: dict[str, tuple[Drops, float]] = {
    "a rate between": (lambda drawn, rate: drawn < rate, 0.1),
    "0 can be drawn": (lambda drawn, rate: drawn <= rate, 0.0),
    "0 may be all there is": (lambda drawn, rate: drawn > rate, 0.0),
    "another comparison beside it": (lambda drawn, rate: (drawn < rate) | (drawn < 0.5), 0.0),
    "another comparison before it": (lambda drawn, rate: (drawn < 0.5) | (drawn < rate), 0.0),
    "numbers that were shifted": (lambda drawn, rate: drawn.sub_(1.0) < rate, 0.0),
    "not a comparison": (lambda drawn, rate: (drawn + rate) < 0.5, float("inf")),
    "another distribution": (lambda drawn, rate: torch.randn([]) < rate, 0.0),
}


class Dropping(nn.Module):
    """Leaves its second layer out where `drops` says so."""

    def __init__(self, drops: Drops, rate: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.drops, self.rate = drops, rate

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x if self.drops(torch.rand([]), self.rate) else self.second(x)


@pytest.mark.parametrize("name", CERTAIN)
def test_a_layer_that_is_never_or_always_dropped_is_recorded_so(name: str) -> None:
    drops, rate, dropped = CERTAIN[name]
    torch.manual_seed(0)
    module, before = Dropping(drops, rate), torch.get_rng_state()
    components = record(module, torch.ones(2, 4))
    assert torch.equal(torch.get_rng_state(), before)
    names = {parameter for component in components for parameter in component.parameter_names}
    assert ("second.weight" in names) != dropped
    assert "first.weight" in names


@pytest.mark.parametrize("name", UNCERTAIN)
def test_what_a_random_number_decides_is_refused(name: str) -> None:
    with pytest.raises(TraceError, match="depends on the data"):
        record(Dropping(*UNCERTAIN[name]), torch.ones(2, 4))
