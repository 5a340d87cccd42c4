"""Max-min fair rates: closed forms, the properties that define them, and a lexicographic linear programme as the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from parsim.engines.scenario import max_min_rates
from parsim.errors import ScenarioError
from parsim.numeric import Floats

INF = np.inf
Instance = tuple[Floats, Floats, Floats]


@pytest.mark.parametrize(
    ("loads", "capacity", "limit", "rates"),
    [
        *((np.ones((1, flows)), [3.0], [INF] * flows, [3.0 / flows] * flows) for flows in (1, 2, 7)),
        (np.ones((1, 3)), [10.0], [1.0, INF, INF], [1.0, 4.5, 4.5]),
        ([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]], [2.0, 10.0], [INF] * 3, [1.0, 1.0, 9.0]),
        (np.concatenate([np.ones((6, 1)), np.eye(6)], axis=1), np.ones(6), [INF] * 7, [0.5] * 7),
        ([[1.0, 0.0], [0.0, 1.0]], [0.0, 5.0], [INF, INF], [0.0, 5.0]),
        (np.zeros((2, 0)), [1.0, 1.0], [], []),
    ],
    ids=[
        "alone",
        "two alike",
        "seven alike",
        "a slow one",
        "a long one over two links",
        "parking lot",
        "a link down",
        "no flows",
    ],
)
def test_closed_forms(loads: Floats, capacity: Floats, limit: Floats, rates: list[float]) -> None:
    """Equal flows share equally; what a slow flow, or a long one over a small link, leaves goes to the others; of n links in a
    row, one flow over all and one per link have 1/2 each; a link that is down stops its flows alone."""
    np.testing.assert_allclose(max_min_rates(loads, capacity, limit), rates, rtol=1e-15)


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    links, flows = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    load = st.sampled_from([0.0, 0.0, 1.0, 1.0, 0.5, 0.25, 0.7, 2.0])
    loads = np.array([[draw(load) for _ in range(flows)] for _ in range(links)])
    capacity = np.array([draw(st.floats(0.125, 100.0)) for _ in range(links)])
    limit = np.array([draw(st.one_of(st.just(200.0), st.floats(0.01, 50.0))) for _ in range(flows)])
    return loads, capacity, limit


@given(instances())
def test_no_link_is_over_its_capacity_and_every_flow_has_its_bottleneck(instance: Instance) -> None:
    """The bottleneck condition characterises max-min fairness: a full link on which no flow is faster, or the own limit."""
    loads, capacity, limit = instance
    rates = max_min_rates(loads, capacity, limit)
    carried = loads @ rates
    assert np.all(carried <= capacity * (1 + 1e-9))
    assert np.all(rates <= limit)
    for flow, rate in enumerate(rates):
        full = (loads[:, flow] > 0) & (carried >= capacity * (1 - 1e-9))
        fastest = [rates[loads[link] > 0].max() <= rate * (1 + 1e-9) for link in np.flatnonzero(full)]
        assert rate == limit[flow] or any(fastest)


@given(instances(), st.integers(-8, 8))
def test_scaling_every_capacity_and_limit_scales_the_rates(instance: Instance, exponent: int) -> None:
    loads, capacity, limit = instance
    scale = 2.0**exponent
    rates = max_min_rates(loads, capacity, limit)
    np.testing.assert_array_equal(max_min_rates(loads, capacity * scale, limit * scale), rates * scale)


@given(instances(), st.randoms(use_true_random=False))
def test_the_order_of_links_and_flows_does_not_matter(instance: Instance, random: object) -> None:
    loads, capacity, limit = instance
    links, flows = list(range(len(capacity))), list(range(len(limit)))
    random.shuffle(links)  # type: ignore[attr-defined]
    random.shuffle(flows)  # type: ignore[attr-defined]
    shuffled = max_min_rates(loads[np.ix_(links, flows)], capacity[links], limit[flows])
    np.testing.assert_allclose(shuffled, max_min_rates(loads, capacity, limit)[flows], rtol=1e-9)


def lexicographic(loads: Floats, capacity: Floats, limit: Floats) -> Floats:
    """Maximise the least rate, fix the flows that can rise no further, go on with the rest, by linear programmes."""
    flows = len(limit)
    fixed: dict[int, float] = {}
    while len(fixed) < flows:
        free = [flow for flow in range(flows) if flow not in fixed]
        bounds = [(fixed.get(flow, 0.0), fixed.get(flow, limit[flow])) for flow in range(flows)]
        at_least = [[-float(other == flow) for other in range(flows)] + [1.0] for flow in free]
        rows = np.vstack([np.hstack([loads, np.zeros((len(loads), 1))]), at_least])
        room = np.concatenate([capacity, np.zeros(len(free))])
        found = linprog([0.0] * flows + [-1.0], A_ub=rows, b_ub=room, bounds=[*bounds, (0, None)])
        assert found.status == 0, found.message
        least = float(found.x[-1])
        for flow in free:
            lower = [(fixed.get(other, least * (1 - 1e-9)), fixed.get(other, limit[other])) for other in range(flows)]
            aim = [-float(other == flow) for other in range(flows)]
            best = linprog(aim, A_ub=loads, b_ub=capacity * (1 + 1e-12), bounds=lower)
            assert best.status == 0, best.message
            if -best.fun <= least * (1 + 1e-6):
                fixed[flow] = least
    return np.array([fixed[flow] for flow in range(flows)])


@pytest.mark.parametrize("seed", range(60))
def test_equals_the_lexicographic_linear_programme(seed: int) -> None:
    random = np.random.default_rng(seed)
    links, flows = int(random.integers(1, 5)), int(random.integers(1, 6))
    loads = random.choice([0.0, 1.0, 0.5, 0.3], size=(links, flows))
    capacity, limit = random.uniform(0.5, 10.0, links), random.uniform(0.2, 12.0, flows)
    np.testing.assert_allclose(max_min_rates(loads, capacity, limit), lexicographic(loads, capacity, limit), rtol=1e-5)


@pytest.mark.parametrize(
    ("loads", "capacity", "limit", "message"),
    [
        ([[1.0]], [1.0, 2.0], [1.0], "shape"),
        ([[-1.0]], [1.0], [1.0], "loads must be >= 0, got -1"),
        ([[1.0]], [float("nan")], [1.0], "capacity must be >= 0, got nan"),
        ([[INF]], [1.0], [1.0], "finite"),
        ([[0.0]], [1.0], [INF], "nothing limits flow 0"),
    ],
)
def test_bad_input(loads: list[list[float]], capacity: list[float], limit: list[float], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        max_min_rates(loads, capacity, limit)
