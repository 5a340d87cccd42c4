"""Every price is recomputed from its terms, exactly, and the adjustments apply in the order in which they are listed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsim.costs.adjustments import ADJUSTMENTS, COMPUTATION
from parsim.costs.communication.collectives import estimate_collective
from parsim.costs.costs import Costs, price
from parsim.costs.estimate import Estimate, Term, folded_s, running_totals_s
from parsim.costs.observed import CommunicationClass, RunCorrections
from parsim.errors import CostError
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import (
    CollectiveFit,
    CommunicationFactor,
    DeviceFactor,
    HostOverhead,
    Noise,
    PaceToday,
    PhaseFactor,
    ProbeSeconds,
    Profile,
    Regime,
    Update,
)
from parsim.model.model import Model
from parsim.work import PACKABLE, Collective, Compute, LoadBatch, Mix, OptimizerStep, Phase, SendRecv, Work
from tests.measured_points import component_point, optimizer_point
from tests.models import sharded_model

SHIPPED = {name: load_profile(name) for name in ("dgx1-v100-32gb", "pcie-8xv100")}
MODEL = sharded_model()
PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT, Phase.RECOMPUTE)
factors = st.floats(0.2, 5.0)
seconds = st.floats(1e-7, 1.0)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """A shipped profile with measured components, host overheads, a refreshed speed and updates drawn at random."""
    known = SHIPPED[draw(st.sampled_from(sorted(SHIPPED)))]
    source = next(iter(known.sources))
    usual = {"device_type": known.devices[0].type, "spread": 0.1, "source": source}
    points = [
        component_point(
            component,
            draw(seconds),
            phase=phase,
            samples=samples,
            ranks_active=draw(st.sampled_from([1, 4])),
            issue_s=draw(st.none() | seconds),
            **usual,
        )
        for component in MODEL.components
        for phase in ("forward", "backward")
        for samples in draw(st.lists(st.integers(1, 40), max_size=3, unique=True))
    ]
    optimizers = [
        optimizer_point(elements, tensors, draw(seconds), issue_s=draw(st.none() | seconds), **usual)
        for elements, tensors in draw(st.lists(st.tuples(st.integers(1, 10**7), st.integers(1, 50)), max_size=5))
    ]
    host = HostOverhead(
        task_s=draw(st.sampled_from([0.0, 3e-5])),
        step_s=1e-3,
        post_wait_s=draw(st.sampled_from([0.0, 7e-5])),
        core_sharing=draw(st.floats(1.0, 2.0)),
        load_s=draw(st.none() | seconds),
        load_seconds_per_byte=draw(st.none() | st.floats(0, 1e-9)),
        source=source,
    )
    update = Update(
        created="today",
        run="r1",
        plan="dp",
        steps=20,
        aa_floor=0.0,
        devices=[DeviceFactor(device=0, factor=draw(factors))],
        phases=[PhaseFactor(phase="forward", factor=draw(factors))],
        communication=[CommunicationFactor(operation="all_reduce", devices=[0, 1], factor=draw(factors))],
    )
    noise = Noise(drift_sigma=0.1, probe=ProbeSeconds(alone=2e-3, together=3e-3), source=source)
    cores = draw(st.sampled_from([None, 2]))
    devices = [entry if cores is None else entry.model_copy(update={"core": entry.index % cores}) for entry in known.devices]
    fits = [
        CollectiveFit(
            operation="all_reduce",
            group_size=2,
            algorithm="gloo",
            regimes=[
                Regime(max_size_bytes=10**4, latency_s=draw(seconds), seconds_per_byte=draw(st.floats(0, 1e-8))),
                Regime(max_size_bytes=None, latency_s=draw(seconds), seconds_per_byte=draw(st.floats(0, 1e-8))),
            ],
            relative_sigma=0.1,
            repeat_sigma=0.1,
            min_size_bytes=1,
            max_size_bytes=10**6,
            source=source,
        )
    ]
    communication = known.communication
    kind = draw(st.sampled_from(["cpu", "cuda"]))
    if kind == "cpu" or draw(st.booleans()):  # priced by fits, as gloo is
        communication = communication.model_copy(update={"link_model": None, "fits": fits})
    return known.model_copy(
        update={
            "devices": devices,
            **({"links": [], "nics": [], "nics_source": None} if kind == "cpu" else {}),
            "device_types": {name: entry.model_copy(update={"kind": kind}) for name, entry in known.device_types.items()},
            "communication": communication,
            "compute": known.compute.model_copy(update={"components": points, "optimizers": optimizers}),
            "host": draw(st.none() | st.just(host)),
            "noise": draw(st.none() | st.just(noise)),
            "today": draw(st.none() | st.just(PaceToday(created="now", alone=draw(seconds), together=draw(seconds)))),
            "updates": draw(st.sampled_from([[], [update]])),
        }
    )


@st.composite
def works(draw: st.DrawFn, world_size: int) -> Work:
    size_bytes = draw(st.integers(0, 2**30))
    ranks = draw(st.lists(st.integers(0, world_size - 1), min_size=2, max_size=world_size, unique=True))
    component = draw(st.sampled_from(MODEL.components))
    rules = [(sharding.rule, ways) for sharding in component.shardings for ways in (2, 4) if sharding.limit % ways == 0]
    rule, ways = draw(st.sampled_from([("", 1), *rules]))
    samples, phase = draw(st.integers(1, 64)), draw(st.sampled_from(PHASES))
    operation = draw(st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"]))
    packed = operation in PACKABLE and draw(st.booleans())
    made: list[Work] = [
        Compute(component=component.name, phase=phase, samples=samples, rule=rule, ways=ways),
        OptimizerStep(elements=draw(st.integers(0, 10**8)), tensors=draw(st.integers(1, 100))),
        Mix(elements=draw(st.integers(1, 10**6)), copies=draw(st.integers(1, 4))),
        LoadBatch(samples=samples, size_bytes=size_bytes, parts=draw(st.integers(1, 3))),
        Collective(operation=operation, group=tuple(ranks), size_bytes=size_bytes, packed=packed),
        SendRecv(source=ranks[0], destination=ranks[1], size_bytes=size_bytes),
    ]
    return draw(st.sampled_from(made))


def recomputed(terms: tuple[Term, ...]) -> float:
    """The arithmetic that `parsim cost --explain` prints, transcribed."""
    total = math.nan
    for name, operation, value, *_ in terms:
        assert name
        if operation == "start":
            total = value
        elif operation == "at least":
            total = max(total, value)
        elif operation == "plus":
            total = total + value
        elif operation == "times":
            total = total * value
        else:
            assert operation == "over"
            total = total / value
    return total


@st.composite
def questions(draw: st.DrawFn) -> tuple[Costs, Work, int, tuple[tuple[int, ...], ...], bool]:
    profile = draw(profiles())
    nodes = 2 if draw(st.booleans()) and profile.communication.link_model is not None and profile.nics else 1
    cluster = cluster_from_profile(profile, nodes=nodes, network="infiniband-100g" if nodes > 1 else None)
    costs = Costs(
        model=MODEL,
        cluster=cluster,
        ranks_active=draw(st.sampled_from([None, 1, 4])),
        ranks=draw(st.sampled_from([None, 1, cluster.size])),
        corrections=RunCorrections(
            ranks=((0, draw(factors)),) if draw(st.booleans()) else (),
            communication=((CommunicationClass("all_gather", (0, 1, 2)), draw(factors)),) if draw(st.booleans()) else (),
        ),
    )
    work = draw(works(cluster.size))
    beside: tuple[tuple[int, ...], ...] = ()
    if isinstance(work, Collective | SendRecv) and draw(st.booleans()):
        own = work.group if isinstance(work, Collective) else (work.source, work.destination)
        others = [rank for rank in range(cluster.size) if rank not in own]
        if len(others) >= 2:
            beside = (tuple(sorted(own)) if isinstance(work, Collective) else own, tuple(others[:2]))
    return costs, work, draw(st.integers(0, cluster.size - 1)), beside, draw(st.booleans())


@settings(max_examples=60, deadline=None)
@given(questions())
def test_every_price_is_recomputed_from_its_terms(
    question: tuple[Costs, Work, int, tuple[tuple[int, ...], ...], bool],
) -> None:
    """Bit for bit; adjustments stand at the end, in the order of the list; sources are named."""
    costs, work, rank, beside, after_wait = question
    try:
        estimate = costs.estimate(work, rank, beside, after_wait=after_wait)
    except CostError:  # no cost is known for this work on this profile
        return
    assert recomputed(estimate.terms) == estimate.median_s == estimate.recompute()
    assert list(running_totals_s(estimate.terms))[-1][1] == estimate.median_s
    assert estimate.terms[0].operation == "start"
    assert all(term.operation != "start" for term in estimate.terms[1:])
    order = [adjustment.name for adjustment in ADJUSTMENTS]
    applied = [order.index(term.name) for term in estimate.terms if term.name in order]
    assert applied == sorted(set(applied))
    assert [term.name in order for term in estimate.terms] == sorted(term.name in order for term in estimate.terms)
    assert (estimate.source == "updated") == any(term.name == "update" for term in estimate.terms)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(questions())
def test_an_adjusted_price_is_the_formula_of_the_list(
    question: tuple[Costs, Work, int, tuple[tuple[int, ...], ...], bool],
) -> None:
    """The two lines at the head of `parsim.costs.adjustments`, written down by hand."""
    costs, work, rank, beside, after_wait = question
    plain = replace(
        costs,
        corrections=RunCorrections(),
        cluster=replace(
            costs.cluster, profile=costs.cluster.profile.model_copy(update={"today": None, "updates": [], "host": None})
        ),
    )
    if isinstance(work, LoadBatch):
        return  # its base reads the host's seconds
    try:
        base = plain.estimate(work, rank, beside)
    except CostError:
        return
    profile = costs.cluster.profile
    host, computes = profile.host, isinstance(work, COMPUTATION)
    base_s = base.median_s
    if base.host_bound:  # what the device takes, before it waits for the host
        base_s = folded_s(term for term in base.terms if term.name != "queueing")
    expected_s, on_gpu = base_s, costs.cluster.devices[0].type.kind == "cuda"
    cores = len({entry.core if entry.core is not None else -1 - entry.index for entry in profile.devices})
    ranks = costs.cluster.size if costs.ranks is None else costs.ranks
    if host is not None and computes and cores < min(ranks, len(profile.devices)) and costs.cluster.network is None:
        expected_s *= 1.0 + (host.core_sharing - 1.0) * (ranks - cores) / (len(profile.devices) - cores)
    elif host is not None and computes and costs.cluster.network is not None and cores < len(profile.devices):
        return  # cores of several nodes: how many there are is the cluster's to say
    speed = 1.0
    if profile.today is not None and profile.noise is not None and profile.noise.probe is not None:
        active = cores if costs.ranks_active is None else costs.ranks_active
        share = 1.0 if cores <= 1 else min(1.0, (active - 1) / (cores - 1))
        now, then = profile.today, profile.noise.probe
        speed = (now.alone + share * (now.together - now.alone)) / (then.alone + share * (then.together - then.alone))
    overhead_s = host.task_s if host is not None and computes else 0.0
    expected_s *= speed if on_gpu and computes else 1.0
    if on_gpu and base.issue_s:  # the host's, hidden where the device takes longer
        expected_s = max(expected_s, base.issue_s + overhead_s)
    else:
        expected_s += overhead_s
    expected_s *= 1.0 if on_gpu else speed
    for given_factors in (costs._context.updates, costs.corrections):
        expected_s *= given_factors.factor(work, rank)
    if after_wait and computes and host is not None:
        expected_s += speed * host.post_wait_s
    assert costs.estimate(work, rank, beside, after_wait=after_wait).median_s == pytest.approx(expected_s, rel=1e-12)


def test_every_adjustment_says_what_it_is() -> None:
    assert len({adjustment.name for adjustment in ADJUSTMENTS}) == len(ADJUSTMENTS)
    for adjustment in ADJUSTMENTS:
        assert adjustment.applies_to
        assert "Source:" in (adjustment.term.__doc__ or "")


def test_terms_that_do_not_make_the_median_are_refused() -> None:
    whole = Estimate.of((Term("a", "start", 2.0, "measured"), Term("b", "times", 3.0, "fitted")), source="measured")
    assert whole.median_s == 6.0
    assert whole.then(Term("c", "plus", 1.0, "assumed")).median_s == 7.0
    with pytest.raises(CostError, match=r"estimate of 5.0 s has terms that give 6.0 s"):
        replace(whole, median_s=5.0)
    assert Estimate(median_s=4.0, source="fitted").recompute() == 4.0


@given(st.lists(st.tuples(st.sampled_from(["plus", "times", "over"]), st.floats(0.1, 10)), max_size=8), st.floats(0.1, 10))
def test_adding_terms_one_by_one_is_folding_all_of_them(more: list[tuple[str, float]], start: float) -> None:
    terms = [Term("start", "start", start, "measured")]
    estimate = Estimate.of(tuple(terms), source="measured")
    for operation, value in more:
        terms.append(Term("next", operation, value, "fitted"))  # type: ignore[arg-type]
        estimate = estimate.then(terms[-1])
    assert estimate.median_s == folded_s(terms) == recomputed(tuple(terms))


def cluster() -> Cluster:
    return cluster_from_profile(SHIPPED["dgx1-v100-32gb"], nodes=2, network="infiniband-100g")


def test_contention_is_a_term_of_its_own_and_leaves_the_latency() -> None:
    """Two groups whose rings cross the same network cards: the bytes take longer than alone, the latency does not."""
    work = Collective(operation="all_reduce", group=(0, 8), size_bytes=2**26)
    alone = estimate_collective(work, cluster())
    beside = estimate_collective(work, cluster(), ((0, 8), (1, 9), (2, 10), (3, 11)))
    by_name = [{term.name: term.value for term in estimate.terms} for estimate in (alone, beside)]
    assert "contention" not in by_name[0]
    assert by_name[1]["contention"] > 0
    assert by_name[0]["latency"] == by_name[1]["latency"]
    assert beside.median_s > alone.median_s


def test_resumed_work_is_priced_with_its_wait_as_the_last_term() -> None:
    host = HostOverhead(task_s=1e-3, step_s=0.0, post_wait_s=0.5, source="throughput")
    known = SHIPPED["dgx1-v100-32gb"].model_copy(update={"host": host})
    costs = Costs(model=MODEL, cluster=cluster_from_profile(known))
    work = Compute(component=MODEL.components[0].name, phase=Phase.FORWARD, samples=4)
    first, resumed = price([(work, 0), (work, 0, True)], costs)
    assert resumed.terms[:-1] == first.terms
    assert resumed.terms[-1].name == "post-wait"
    assert resumed.median_s == first.median_s + 0.5


def test_models_price_is_the_sum_of_kinds_over_the_efficiency() -> None:
    """Of a shipped profile: kinds of operators first, then what whole models reach of them."""
    costs = Costs(model=MODEL, cluster=cluster_from_profile(SHIPPED["dgx1-v100-32gb"]))
    model: Model = costs.model
    estimate = costs.estimate(Compute(component=model.components[0].name, phase=Phase.FORWARD, samples=8), 0)
    names = [term.name for term in estimate.terms]
    assert names[-1] == "efficiency"
    assert set(names[:-1]) <= {"matmul", "convolution", "memory_bound"}
    assert "flop/s" in estimate.terms[0].text
