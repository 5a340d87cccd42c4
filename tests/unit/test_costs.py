"""Costs: the dispatch over Work, host overhead, loading, memoisation, and what it says when no cost is known."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from parsim.costs.adjustments import HardwareScale
from parsim.costs.communication.collectives import estimate_collective, estimate_send_recv
from parsim.costs.compute.compute import ComputeCosts
from parsim.costs.costs import Costs, price
from parsim.costs.estimate import OverlapFactors
from parsim.errors import CostError, GraphError
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import CollectiveFit, Communication, HostOverhead, Noise, Overlap, OverlapPoint, Profile, Regime
from parsim.hardware.records import ComputeRecords
from parsim.model.catalogue.sublayers import SamplePart, Shape, Software
from parsim.model.catalogue.transformer import transformer
from parsim.model.catalogue.zoo import load_preset
from parsim.model.formats import Numerics
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.predict.evaluate import evaluate
from parsim.predict.explain import BETWEEN, COMMUNICATION, COMPUTE, SLOWEST, Explanation, explain_plan
from parsim.predict.problem import PlanningProblem
from parsim.search.stages import balanced_plan
from parsim.work import Collective, LoadBatch, Mix, OptimizerStep, Phase, SendRecv, Work
from parsim.work import Compute as ComputeWork
from tests.commands import Told
from tests.measured_points import component_point, optimizer_point, toy_profile
from tests.models import chain_model

MODEL = chain_model()
FORWARD = ComputeWork(component="c0", phase=Phase.FORWARD, samples=32)
BACKWARD = ComputeWork(component="c0", phase=Phase.BACKWARD, samples=32)
STEP = OptimizerStep(elements=10**6, tensors=4)
SMALL = Shape(name="small", layers=3, hidden=256, heads=4, vocab=1000)


@pytest.fixture(scope="module")
def v100() -> Cluster:
    return cluster_from_profile(load_profile("dgx1-v100-32gb"))


def gloo_profile(**changes: object) -> Profile:
    """Two CPUs with a measured component and a fit for groups of two."""
    fit = CollectiveFit(
        operation="all_reduce",
        group_size=2,
        algorithm="gloo",
        regimes=[
            Regime(max_size_bytes=1000, latency_s=1e-3, seconds_per_byte=0.0),
            Regime(max_size_bytes=None, latency_s=5e-4, seconds_per_byte=1e-6),
        ],
        relative_sigma=0.05,
        repeat_sigma=0.2,
        min_size_bytes=10,
        max_size_bytes=10**6,
        source="s",
    )
    point = component_point(MODEL.components[0], 2e-3, samples=32, spread=0.1, source="s")
    communication = Communication(backend="gloo", fits=[fit]).model_dump()
    compute = ComputeRecords(components=[point]).model_dump()
    document = toy_profile(kind="cpu", devices=4, communication=communication, compute=compute)
    return document.model_copy(update=changes)


# --- dispatch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "work",
    [
        FORWARD,
        BACKWARD,
        STEP,
        Collective(operation="all_reduce", group=(0, 1), size_bytes=2**20),
        SendRecv(source=0, destination=1, size_bytes=2**20),
        LoadBatch(samples=32, size_bytes=2**20),
        Mix(elements=1000, copies=3),
    ],
    ids=lambda work: type(work).__name__,
)
def test_every_kind_of_work_has_a_price(v100: Cluster, work: Work) -> None:
    estimate = Costs(MODEL, v100).estimate(work, 0)
    assert estimate.median_s > 0
    assert estimate.source in ("measured", "fitted", "published")
    assert estimate.detail


def test_costs_are_those_of_the_parts(v100: Cluster) -> None:
    costs, device, profile = Costs(MODEL, v100), v100.devices[0], v100.profile
    assert costs.estimate(FORWARD, 0) == ComputeCosts(profile).estimate(FORWARD, MODEL.component("c0"), device)
    assert costs.estimate(STEP, 3) == ComputeCosts(profile, Numerics()).optimizer(STEP, device)
    collective = Collective(operation="all_reduce", group=(0, 3), size_bytes=2**24)
    assert costs.estimate(collective, 0) == estimate_collective(collective, v100)
    transfer = SendRecv(source=2, destination=6, size_bytes=2**24)
    assert costs.estimate(transfer, 2) == estimate_send_recv(transfer, v100)


def test_precision_and_optimizer_matter(v100: Cluster) -> None:
    plain, adam, half = (
        Costs(MODEL, v100, numerics=numerics)
        for numerics in (Numerics(), Numerics(optimizer="adam"), Numerics(precision="amp_fp16"))
    )
    assert adam.estimate(STEP, 0).median_s > plain.estimate(STEP, 0).median_s
    wide = ComputeWork(component="c1", phase=Phase.FORWARD, samples=10**5)
    assert half.estimate(wide, 0).median_s < plain.estimate(wide, 0).median_s


def test_ranks_are_places_in_the_device_list(v100: Cluster) -> None:
    """Ranks 0 and 1 on GPUs 0 and 3 have two links; on GPUs 0 and 1 one."""
    other = cluster_from_profile(v100.profile, [0, 3])
    work = SendRecv(source=0, destination=1, size_bytes=2**30)
    ratio = Costs(MODEL, v100).estimate(work, 0).median_s / Costs(MODEL, other).estimate(work, 0).median_s
    assert ratio == pytest.approx(2.0, rel=0.01)


# --- host, overlap, loading -------------------------------------------------------------------------------------------


def test_host_seconds_are_added_to_computation_only() -> None:
    plain = Costs(MODEL, cluster_from_profile(gloo_profile()))
    slow = Costs(MODEL, cluster_from_profile(gloo_profile(host=HostOverhead(task_s=1e-4, step_s=0.0, source="s"))))
    assert slow.estimate(FORWARD, 0).median_s == pytest.approx(plain.estimate(FORWARD, 0).median_s + 1e-4, rel=1e-12)
    assert slow.estimate(FORWARD, 0).source == plain.estimate(FORWARD, 0).source == "measured"
    collective = Collective(operation="all_reduce", group=(0, 1), size_bytes=100)
    assert slow.estimate(collective, 0) == plain.estimate(collective, 0)


def test_what_is_packed_has_a_price_of_its_own_where_it_was_measured() -> None:
    flat = Collective(operation="all_gather", group=(0, 1), size_bytes=100)
    packed = dataclasses.replace(flat, packed=True)
    profile = gloo_profile()
    (reduce,) = profile.communication.fits
    line = partial(Regime, max_size_bytes=None, seconds_per_byte=0.0)

    def seconds(work: Collective, **latency_s: float) -> float:
        fits = [
            reduce.model_copy(update={"operation": name, "regimes": [line(latency_s=latency)]})
            for name, latency in latency_s.items()
        ]
        known = profile.model_copy(update={"communication": profile.communication.model_copy(update={"fits": fits})})
        return Costs(MODEL, cluster_from_profile(known)).estimate(work, 0).median_s

    assert seconds(flat, all_gather=1e-3, all_gather_packed=2e-3) == 1e-3
    assert seconds(packed, all_gather=1e-3, all_gather_packed=2e-3) == 2e-3
    assert seconds(packed, all_gather=1e-3) == 1e-3, "a profile of old, or one that did not measure it"
    with pytest.raises(CostError, match="no measured all_gather over 2 ranks"):
        seconds(flat, all_gather_packed=2e-3)
    with pytest.raises(GraphError, match="all_reduce cannot be packed; of collectives all_gather and reduce_scatter can"):
        Collective(operation="all_reduce", group=(0, 1), size_bytes=100, packed=True)


def test_overlap_factors_come_from_the_profile(v100: Cluster) -> None:
    small = Collective(operation="all_reduce", group=(0, 1), size_bytes=100)
    large, gather = dataclasses.replace(small, size_bytes=10_000), dataclasses.replace(small, operation="all_gather")
    assert Costs(MODEL, v100).overlap([small], [1.0]) == OverlapFactors()
    assert not Costs(MODEL, cluster_from_profile(gloo_profile())).overlap([small], [1.0]).loads_ahead, "a CPU loads by itself"

    def factors(overlap: Overlap, works: list[Collective], seconds: list[float]) -> tuple[float, float]:
        found = Costs(MODEL, cluster_from_profile(gloo_profile(overlap=overlap))).overlap(works, seconds)
        return round(found.compute, 9), round(found.communication, 9)

    overlap = Overlap(compute_factor=1.2, communication_factor=1.5, source="s")
    assert factors(overlap, [small, large], [1.0, 2.0]) == (1.2, 1.5)
    point = OverlapPoint(
        operation="all_reduce",
        group_size=2,
        size_bytes=100,
        compute_factor=1.1,
        communication_factor=1.0,
        repeats=3,
        source="s",
    )
    bigger = point.model_copy(update={"size_bytes": 10_000, "compute_factor": 1.7, "communication_factor": 2.0})
    by_size = overlap.model_copy(update={"points": [bigger, point]})
    assert factors(by_size, [small], [1.0]) == factors(by_size, [gather], [1.0]) == (1.1, 1.0)
    assert factors(by_size, [large], [1.0]) == (1.7, 2.0)
    held = [1 - 1 / 1.1, 1 - 1 / 1.7]
    between, mean = (round(1 / (1 - share), 9) for share in ((held[0] + held[1]) / 2, (held[0] + 3 * held[1]) / 4))
    assert factors(by_size, [dataclasses.replace(small, size_bytes=1000)], [1.0]) == (between, 1.5)
    assert factors(by_size, [small, large], [1.0, 3.0]) == (mean, 1.75)
    assert factors(by_size, [dataclasses.replace(small, size_bytes=10**9)], [1.0]) == (1.7, 2.0)
    assert factors(by_size, [], []) == (1.2, 1.5)
    own = point.model_copy(update={"operation": "all_gather", "compute_factor": 1.3})
    assert factors(by_size.model_copy(update={"points": [bigger, point, own]}), [gather], [1.0]) == (1.3, 1.0)


def test_four_replicas_on_two_cores_take_twice_the_computation_of_two() -> None:
    """Processor sharing: the same batch per rank, prices of one rank per core, and the engines share the cores."""
    points = [
        component_point(component, 4e-3, phase=phase) for component in MODEL.components for phase in ("forward", "backward")
    ]
    optimizer = optimizer_point(MODEL.parameter_count, len(MODEL.parameters), 1e-3, source="s")
    profile = gloo_profile(compute=ComputeRecords(components=points, optimizers=[optimizer]))
    devices = [entry.model_copy(update={"core": 5 + entry.index % 2}) for entry in profile.devices]
    shared = profile.model_copy(update={"devices": devices})
    assert cluster_from_profile(profile).core_of_rank(4) == (0, 1, 2, 3)
    assert cluster_from_profile(shared).core_of_rank(4) == (0, 1, 0, 1)

    def step_s(profile: Profile, ranks: int) -> float:
        problem = PlanningProblem(model=MODEL, cluster=cluster_from_profile(profile), global_batch=8 * ranks)
        stage = Stage(components=tuple(c.name for c in MODEL.components), ranks=tuple(range(ranks)))
        plan = Plan(strategy="custom", mesh=Mesh(dp=ranks), stages=(stage,), global_batch=8 * ranks, bucket_bytes=10**9)
        free = Regime(max_size_bytes=None, latency_s=0, seconds_per_byte=0)
        fit = profile.communication.fits[0].model_copy(update={"group_size": ranks, "regimes": [free]})
        communication = profile.communication.model_copy(update={"fits": [fit]})
        cluster = cluster_from_profile(profile.model_copy(update={"communication": communication}))
        return evaluate(replace(problem, cluster=cluster), plan, samples=0).result.step_s.median

    assert step_s(shared, 2) == pytest.approx(step_s(profile, 2), rel=1e-12)
    load_s = 8 * 4 * 64 / 1e10
    assert step_s(shared, 4) == pytest.approx(2 * step_s(profile, 4), abs=2 * load_s)


def test_mixing_reads_every_copy_and_writes_one(v100: Cluster) -> None:
    costs = Costs(MODEL, v100)
    for copies in (1, 2, 5):
        known = Mix(elements=25_000_000, copies=copies, accesses=copies + 1)
        assert costs.estimate(Mix(elements=25_000_000, copies=copies), 0) == costs.estimate(known, 0)


def test_mixing_with_known_accesses_is_a_share_of_an_optimizer_step(v100: Cluster) -> None:
    """As many passes over the same tensors: SGD with momentum has 9 accesses per element."""
    costs = Costs(MODEL, v100)
    step_s = costs.estimate(OptimizerStep(elements=10**6, tensors=8), 0).median_s
    mixed = costs.estimate(Mix(elements=10**6, copies=1, accesses=18, tensors=8), 0)
    assert mixed.median_s == pytest.approx(2 * step_s)
    assert "18 accesses" in mixed.detail
    assert costs.estimate(Mix(elements=0, copies=1, accesses=18, tensors=8), 0).median_s <= step_s


def test_a_batch_comes_over_pcie_or_from_memory(v100: Cluster) -> None:
    size = 12 * 10**9
    pcie = v100.profile.link_kinds["pcie"].bandwidth_bytes_per_s.value
    assert Costs(MODEL, v100).estimate(LoadBatch(samples=1, size_bytes=size), 0).median_s == pytest.approx(
        size / pcie, rel=1e-4
    )
    host = HostOverhead(task_s=1e-3, step_s=0.0, source="s")
    cpu = Costs(MODEL, cluster_from_profile(gloo_profile(host=host)))
    load = cpu.estimate(LoadBatch(samples=1, size_bytes=10**9), 0)
    assert load.median_s == pytest.approx(0.1 + 1e-3, rel=1e-12)
    assert "not measured" in load.detail
    parts = cpu.estimate(LoadBatch(samples=1, size_bytes=10**9, parts=4), 0)
    assert parts.median_s == pytest.approx(0.1 + 4e-3, rel=1e-12)


@pytest.mark.parametrize(("again", "expected"), [({}, [1.3e-3, 2.2e-3]), ({"load_part_s": 1e-4}, [1.3e-3, 1.6e-3])])
def test_a_measured_batch_takes_a_call_per_part(again: dict[str, float], expected: list[float]) -> None:
    """Further parts take what the first took, or what they took right after one another where that was measured."""
    host = HostOverhead(task_s=1e-3, step_s=0.0, load_s=3e-4, load_seconds_per_byte=1e-9, source="s", **again)
    cpu = Costs(MODEL, cluster_from_profile(gloo_profile(host=host)))
    seconds = [cpu.estimate(LoadBatch(samples=8, size_bytes=10**6, parts=parts), 0).median_s for parts in (1, 4)]
    assert seconds == pytest.approx(expected, rel=1e-12)


def shared_cores(profile: Profile, *, ranks: int, cores: int) -> Profile:
    """Its first ranks on so many cores, in turn."""
    devices = [device.model_copy(update={"core": device.index % cores}) for device in profile.devices[:ranks]]
    return profile.model_copy(update={"devices": devices})


def test_crowded_ranks_compute_longer_in_proportion_to_those_beyond_the_cores() -> None:
    """Four ranks of a profile on two cores; loading and communication have prices of their own."""
    host = HostOverhead(task_s=0.0, step_s=0.0, core_sharing=1.2, load_s=1e-3, source="s")
    profile = shared_cores(gloo_profile(host=host), ranks=4, cores=2)
    cluster = cluster_from_profile(profile)
    alone = Costs(MODEL, cluster_from_profile(gloo_profile())).estimate(FORWARD, 0).median_s
    for ranks, factor in ((1, 1.0), (2, 1.0), (3, 1.1), (4, 1.2), (None, 1.2)):
        assert Costs(MODEL, cluster, ranks=ranks).estimate(FORWARD, 0).median_s == pytest.approx(factor * alone)
    assert Costs(MODEL, cluster, ranks=4).estimate(LoadBatch(samples=1, size_bytes=0), 0).median_s == 1e-3
    assert Costs(MODEL, cluster_from_profile(profile, 2)).estimate(FORWARD, 0).median_s == pytest.approx(alone)


def test_a_transfer_on_one_core_has_a_price_of_its_own() -> None:
    profile = shared_cores(gloo_profile(), ranks=4, cores=2)
    (reduce,) = profile.communication.fits
    fits = [
        reduce.model_copy(update={"operation": name, "regimes": [Regime(max_size_bytes=None, latency_s=s, seconds_per_byte=0)]})
        for name, s in (("send_recv", 1e-3), ("send_recv_on_one_core", 2e-3))
    ]

    def seconds(destination: int, known: int) -> float:
        communication = profile.communication.model_copy(update={"fits": fits[:known]})
        cluster = cluster_from_profile(profile.model_copy(update={"communication": communication}))
        return Costs(MODEL, cluster).estimate(SendRecv(source=0, destination=destination, size_bytes=8), 0).median_s

    assert [seconds(1, 2), seconds(2, 2), seconds(3, 2)] == [1e-3, 2e-3, 1e-3]
    assert seconds(2, 1) == 1e-3, "a profile of old"


# --- gloo fits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "seconds"), [(0, 1e-3), (100, 1e-3), (1000, 1e-3), (1001, 1.501e-3), (10**6, 1.0005), (10**7, 10.0005)]
)
def test_piecewise_lines_by_size(size: int, seconds: float) -> None:
    """Outside the measured sizes the spread widens."""
    costs = Costs(MODEL, cluster_from_profile(gloo_profile()))
    estimate = costs.estimate(Collective(operation="all_reduce", group=(2, 1), size_bytes=size), 1)
    assert estimate.median_s == pytest.approx(seconds, rel=1e-9)
    assert estimate.repeat_sigma == 0.2
    assert estimate.extrapolated == (not 10 <= size <= 10**6)
    assert (sum(sigma for _, sigma in estimate.parameters) > 0.05) == estimate.extrapolated


# --- no cost known ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (
            Collective(operation="all_reduce", group=(0, 1, 2), size_bytes=8),
            r"profile toy has no measured all_reduce over 3 ranks \(measured group sizes: 2\); measure it with "
            r"`parsim calibrate --nproc 3`",
        ),
        (Collective(operation="broadcast", group=(0, 1), size_bytes=8), r"no measured broadcast over 2 ranks .*sizes: none"),
        (SendRecv(source=0, destination=1, size_bytes=8), "no measured send_recv over 2 ranks"),
        (Collective(operation="all_reduce", group=(0, 9), size_bytes=8), "names rank 9, but the cluster has ranks 0 to 3"),
        (ComputeWork(component="c1", phase=Phase.FORWARD, samples=7), r"c1.*7 samples|7.*c1"),
        (ComputeWork(component="c9", phase=Phase.FORWARD, samples=7), r"'c9': chain has no such component; did you mean"),
        (STEP, "no cost is known for a step of sgd_momentum"),
    ],
    ids=["group size", "operation", "send_recv", "rank", "component", "unknown component", "optimizer"],
)
def test_an_unknown_cost_says_what_and_how_to_get_it(work: Work, message: str) -> None:
    costs = Costs(MODEL, cluster_from_profile(gloo_profile()))
    with pytest.raises(CostError, match=message):
        costs.estimate(work, 0)


def test_a_rank_outside_the_cluster(v100: Cluster) -> None:
    with pytest.raises(CostError, match="rank 8 is outside the cluster's ranks 0 to 7"):
        Costs(MODEL, v100).estimate(FORWARD, 8)


# --- pricing ----------------------------------------------------------------------------------------------------------


def test_pricing_keeps_the_order_and_prices_once(v100: Cluster) -> None:
    """One object per distinct work and device type: shared draws need it, and 10,000 tasks must not cost 10,000 searches."""
    costs = Costs(MODEL, v100)
    works: list[tuple[Work, int]] = [(FORWARD, 0), (BACKWARD, 0), (FORWARD, 1), (STEP, 5), (FORWARD, 0)]
    estimates = price(works, costs)
    assert estimates == [costs.estimate(work, rank) for work, rank in works]
    assert estimates[0] is estimates[2] is estimates[4]
    assert price([], costs) == []


def test_pricing_tells_placements_apart_and_reports_the_unknown(v100: Cluster) -> None:
    costs = Costs(MODEL, v100)
    pairs: list[tuple[Work, int]] = [(SendRecv(source=0, destination=to, size_bytes=2**24), 0) for to in (1, 3, 5)]
    one, two, relayed = (estimate.median_s for estimate in price(pairs, costs))
    assert two < one < relayed
    with pytest.raises(CostError, match="no such component"):
        price([(FORWARD, 0), (ComputeWork(component="zz", phase=Phase.FORWARD, samples=1), 0)], costs)


def test_components_that_do_the_same_are_priced_once(v100: Cluster) -> None:
    """Equal to the last digit to every one by itself, and one object: 80 layers cost what one does."""
    model = transformer(SMALL, Software(flash=True), SamplePart(tokens=256, context=256), "sublayer")
    costs, alone = (Costs(model, v100, numerics=Numerics(precision="amp_fp16")) for _ in range(2))
    works = [
        (ComputeWork(component=component.name, phase=phase, samples=2, rule=rule, ways=ways), 0)
        for component in model.components
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE)
        for rule, ways in (("", 1), ("tensor", 2))
    ]
    found = price(works, costs)
    assert found == [alone.estimate(work, rank) for work, rank in works]
    layers = [estimate for (work, _), estimate in zip(works, found, strict=True) if ".attn" in work.component]
    assert len(layers) == 6 * SMALL.layers
    assert len({id(estimate) for estimate in layers}) == 4, "a second forward is priced as the first"


def test_a_scale_is_of_computation_and_of_links_and_not_of_loading() -> None:
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"), 2)
    plain, scaled = (
        PlanningProblem(model=chain_model(), cluster=cluster, global_batch=8, scale=scale)
        for scale in (HardwareScale(), HardwareScale(computation=2.0, communication=4.0))
    )
    for work, factor in (
        (ComputeWork(component=plain.model.components[0].name, phase=Phase.FORWARD, samples=4), 2.0),
        (Collective(operation="all_reduce", group=(0, 1), size_bytes=2**20), 4.0),
        (LoadBatch(samples=4, size_bytes=2**20), 1.0),
    ):
        before_s, after_s = (problem.costs(2).estimate(work, 0).median_s for problem in (plain, scaled))
        assert after_s == pytest.approx(before_s / factor, rel=1e-12), work


# Where a predicted step comes from: the parts add up, and each is the price of something in the plan.

V100 = load_profile("dgx1-v100-32gb")


def explained(
    mesh: Mesh, *, microbatches: int = 1, profile: Profile = V100, fold: bool | None = None, model: str | None = None
) -> Explanation:
    problem = PlanningProblem(
        model=chain_model() if model is None else load_preset(model, "block"),
        cluster=cluster_from_profile(profile),
        global_batch=256,
    )
    order = "gpipe" if mesh.pp == 1 else "1f1b"
    plan = balanced_plan(problem, "hp", mesh, microbatches=microbatches, pipeline_order=order)
    return explain_plan(problem, evaluate(problem, plan, samples=0, fold=fold))


@pytest.mark.parametrize(("mesh", "microbatches"), [(Mesh(), 1), (Mesh(dp=8), 2), (Mesh(pp=2, dp=4), 4), (Mesh(pp=4, dp=2), 8)])
def test_categories_tasks_and_terms_each_sum_to_the_step(mesh: Mesh, microbatches: int) -> None:
    found = explained(mesh, microbatches=microbatches)
    assert sum(seconds for _, seconds in found.categories) == pytest.approx(found.step_s, rel=1e-12)
    for category, seconds in found.categories:
        tasks = found.of(category)
        if tasks:
            assert sum(task.seconds for task in tasks) == pytest.approx(seconds, rel=1e-9)
        for task in tasks:
            if task.terms:
                assert sum(term.seconds for term in task.terms) == pytest.approx(task.seconds, rel=1e-9)
    table = found.table()
    assert table["seconds"].sum() == pytest.approx(found.step_s, rel=1e-9)
    assert {"category", "kind", "component", "phase", "term", "operation", "value", "unit", "origin"} <= set(table.columns)


def test_computation_of_one_device_is_its_prices() -> None:
    """No communication, no overlap: the compute category is the sum of what each component costs."""
    problem = PlanningProblem(model=chain_model(), cluster=cluster_from_profile(V100), global_batch=256)
    plan = balanced_plan(problem, "single", Mesh(), microbatches=1, pipeline_order="gpipe")
    evaluation = evaluate(problem, plan, samples=0)
    found = explain_plan(problem, evaluation)
    by_name = {(task.what.component, task.what.phase): task for task in found.of(COMPUTE)}
    for unit, estimate in zip(evaluation.compiled.columns.units, evaluation.estimates, strict=True):
        component, phase = getattr(unit.work, "component", ""), getattr(unit.work, "phase", "")
        if component:
            assert by_name[component, phase].seconds == pytest.approx(estimate.median_s, rel=1e-12)
            assert by_name[component, phase].tasks == 1
    assert all(task.terms for task in found.of(COMPUTE))


def test_a_folded_plan_is_explained_as_the_whole_one() -> None:
    whole, folded = (explained(Mesh(pp=2, dp=4), microbatches=4, fold=fold) for fold in (False, True))
    assert dict(folded.categories) == pytest.approx(dict(whole.categories), rel=1e-9)
    tasks = [{task.what: task.seconds for task in found.tasks if task.terms} for found in (whole, folded)]
    assert tasks[1] == pytest.approx(tasks[0], rel=1e-9)


def test_noise_of_ranks_and_time_between_steps_are_categories() -> None:
    source = next(iter(V100.sources))
    profile = V100.model_copy(
        update={
            "noise": Noise(drift_sigma=0.1, rank_sigma=0.2, source=source),
            "host": HostOverhead(task_s=1e-4, step_s=0.25, source=source),
        }
    )
    found = explained(Mesh(dp=4), profile=profile)
    assert dict(found.categories)[BETWEEN] == 0.25
    assert dict(found.categories)[SLOWEST] > 0
    overheads = [term for task in found.of(COMPUTE) for term in task.terms if term.name == "host overhead"]
    assert overheads
    assert all(term.value == 1e-4 for term in overheads)


def test_communication_is_listed_with_what_hides_it() -> None:
    found = explained(Mesh(dp=8), model="resnet50")
    tasks = found.of(COMMUNICATION)
    assert any(task.what.kind == "all_reduce" for task in tasks)
    assert tasks[-1].seconds < 0  # most of it runs behind the backward
    assert {term.name for task in tasks for term in task.terms} == {"bytes", "latency"}


def test_texts_are_short_and_name_the_largest_first() -> None:
    found = explained(Mesh(dp=8), model="resnet50")
    text = str(found)
    assert text.splitlines()[0].startswith("Where the ")
    assert len(repr(found).splitlines()) == 1
    seconds = [task.seconds for task in found.of(COMPUTE) if task.terms]
    assert seconds == sorted(seconds, reverse=True)
    assert "more kinds of task" in text
    own = text.split("exposed communication, ")[1].split("\n\n")[0]
    assert "hidden behind computation" in own.splitlines()[-1], "what is hidden is not one of the kinds that are left out"
    assert json.loads(json.dumps(found.to_dict()))["step_s"] == found.step_s


# --- parsim cost --explain ----------------------------------------------------------------------------------------------


Call = Callable[..., str]


@pytest.fixture
def call(told: Told) -> Call:
    """What `parsim cost dgx1-v100-32gb ...` prints."""

    def run(*arguments: str) -> str:
        status, out, _ = told("cost", "dgx1-v100-32gb", *arguments)
        assert status == 0
        return out

    return run


def test_cost_explains_a_collective(call: Call) -> None:
    arguments = ("--collective", "all_reduce", "--size-bytes", "100000000")
    text = call(*arguments, "--explain")
    assert "How all_reduce is priced" in text
    assert "running total" in text
    assert "How all_reduce" not in call(*arguments)
    document = json.loads(call(*arguments, "--json"))
    assert [term["term"] for term in document["terms"]] == ["bytes", "latency"]
    assert document["terms"][-1]["running_total_s"] == document["seconds"]["median"]


def test_cost_explains_every_component(call: Call) -> None:
    rows = json.loads(call("--model", "mlp", "--batch", "32", "--json"))["rows"]
    for row in rows:
        assert row["terms"][-1]["running_total_s"] == row["seconds"]["median"]
        assert {term["unit"] for term in row["terms"]} <= {"s", ""}
    text = call("--model", "mlp", "--batch", "32", "--explain")
    assert text.count("is priced") == len(rows)
