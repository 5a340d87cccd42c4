"""On a GPU no computation is shorter than the host takes to queue it: a bound that holds of tasks and so of steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.fit.composition import MeasuredComponent, fit_compositions
from parsim.costs.adjustments import adjusted, price_context
from parsim.costs.compute.compute import ComputeCosts
from parsim.costs.compute.formula import component_kernels
from parsim.costs.compute.launches import ComputeRequest
from parsim.costs.compute.surfaces import Parts, composed_issue_s
from parsim.costs.costs import Costs
from parsim.costs.estimate import Estimate
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile, profile_from_parts
from parsim.hardware.profile import HostOverhead, Noise, PaceToday, ProbeSeconds, Profile
from parsim.model.catalogue.sublayers import EAGER, SamplePart, Shape
from parsim.model.catalogue.transformer import transformer
from parsim.model.formats import Numerics
from parsim.model.model import Model
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.predict.evaluate import evaluate
from parsim.predict.problem import PlanningProblem
from parsim.work import Compute, OptimizerStep, Phase
from tests.measured_points import component_point, optimizer_point
from tests.models import chain_model

SHIPPED = "dgx1-v100-32gb"
MODEL = chain_model((4e9, 8e9, 6e9), elements=4_000_000)
SAMPLES = 16


def measured(seconds: list[float], issue_s: list[float | None], *, task_s: float = 0.0) -> Profile:
    """Every component of MODEL, forward and backward, as measured on the shipped machine's GPUs, and its optimizer step."""
    base = load_profile(SHIPPED)
    device = base.devices[0].type
    values = iter(zip(seconds, issue_s, strict=True))
    components = []
    for component in MODEL.components:
        for phase in ("forward", "backward"):
            device_s, host_s = next(values)
            given = {"phase": phase, "samples": SAMPLES, "device_type": device, "issue_s": host_s, "source": "drift"}
            components.append(component_point(component, device_s, **given))
    device_s, host_s = next(values)
    elements = sum(component.parameter_bytes // 4 for component in MODEL.components)
    tensors = sum(len(component.parameters) for component in MODEL.components)
    update = optimizer_point(elements, tensors, device_s, device_type=device, issue_s=host_s, source="drift")
    compute = base.compute.model_copy(update={"components": components, "optimizers": [update]})
    host_overhead = HostOverhead(task_s=task_s, step_s=0.0, source="drift")
    return base.model_copy(update={"compute": compute, "host": host_overhead})


def single_plan(model: Model) -> Plan:
    stage = Stage(components=tuple(component.name for component in model.components), ranks=(0,))
    return Plan(strategy="single", mesh=Mesh(), stages=(stage,), global_batch=SAMPLES)


COUNT = 2 * len(MODEL.components) + 1
TIMES = st.lists(st.floats(1e-5, 1e-2), min_size=COUNT, max_size=COUNT)


@settings(max_examples=40, deadline=None)
@given(device=TIMES, host=TIMES, task_s=st.sampled_from([0.0, 1e-4]))
def test_a_step_is_no_shorter_than_the_host_and_no_shorter_than_the_device(
    device: list[float], host: list[float], task_s: float
) -> None:
    """The mean step of one rank is at least either sum, and exactly the sum of the larger of each task. What the interpreter
    takes per task is the host's: hidden where the device takes longer."""
    profile = measured(device, list(host), task_s=task_s)
    problem = PlanningProblem(model=MODEL, cluster=cluster_from_profile(profile, 1), global_batch=SAMPLES)
    step_s = evaluate(problem, single_plan(MODEL), samples=0).steady_s
    assert step_s >= max(sum(device), sum(host))
    tasks = sum(max(one, other + task_s) for one, other in zip(device, host, strict=True))
    loading_s = Costs(MODEL, problem.cluster).estimate(*loading(problem)).median_s
    assert tasks - 1e-12 <= step_s <= tasks + loading_s + 1e-12


def loading(problem: PlanningProblem) -> tuple[object, int]:
    graph = evaluate(problem, single_plan(MODEL), samples=0).graph
    return next(task.work for task in graph.tasks if type(task.work).__name__ == "LoadBatch"), 0


def test_where_nobody_measured_the_queueing_the_interpreters_time_is_added() -> None:
    profile = measured([1e-3] * COUNT, [None] * COUNT, task_s=1e-4)
    work = Compute(component=MODEL.components[0].name, phase=Phase.FORWARD, samples=SAMPLES)
    assert Costs(MODEL, cluster_from_profile(profile, 1)).estimate(work, 0).median_s == pytest.approx(1.1e-3)


@settings(max_examples=20, deadline=None)
@given(device=TIMES)
def test_what_the_host_queues_in_less_time_changes_nothing(device: list[float]) -> None:
    """Bit for bit: of a profile without `issue_s`, and of one whose host is faster than its GPU."""
    steps = []
    for issue_s in ([None] * COUNT, [0.5 * seconds for seconds in device]):
        profile = measured(device, list(issue_s))
        problem = PlanningProblem(model=MODEL, cluster=cluster_from_profile(profile, 1), global_batch=SAMPLES)
        steps.append(evaluate(problem, single_plan(MODEL), samples=0).steady_s)
    assert steps[0] == steps[1]


def test_shipped_profiles_say_nothing_of_it_and_keep_their_prices() -> None:
    shipped = load_profile(SHIPPED)
    text = shipped.model_dump_json()
    assert Profile.model_validate_json(text) == shipped
    assert all(point.issue_s is None for point in (*shipped.compute.components, *shipped.compute.optimizers))
    costs = Costs(MODEL, cluster_from_profile(shipped, 1))
    for component in MODEL.components:
        estimate = costs.estimate(Compute(component=component.name, phase=Phase.FORWARD, samples=SAMPLES), 0)
        assert (estimate.issue_s, estimate.host_bound) == (0.0, False)


def test_a_shard_is_queued_for_as_long_as_the_whole_and_half_a_backward_for_its_share() -> None:
    profile = measured([1e-2] * COUNT, [2e-3] * COUNT)
    cluster = cluster_from_profile(profile, 1)
    component = MODEL.components[0]
    work = Compute(component=component.name, phase=Phase.BACKWARD, samples=SAMPLES)
    costs = ComputeCosts(profile)
    whole = costs.estimate(work, component, cluster.devices[0])
    assert whole.issue_s == 2e-3
    halves = [
        costs.estimate(replace(work, phase=phase), component, cluster.devices[0])
        for phase in (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
    ]
    assert sum(half.issue_s for half in halves) == pytest.approx(2e-3)
    more = costs.estimate(replace(work, samples=4 * SAMPLES), component, cluster.devices[0])
    assert more.median_s == pytest.approx(4e-2)
    assert more.issue_s == 2e-3


def test_the_pace_of_today_is_the_gpus_and_not_the_hosts() -> None:
    profile = measured([1e-3] * COUNT, [1.5e-3] * COUNT, task_s=1e-4)
    noise = Noise(drift_sigma=0.1, probe=ProbeSeconds(alone=1e-3, together=1e-3), source="drift")
    works = [
        Compute(component=MODEL.components[0].name, phase=Phase.FORWARD, samples=SAMPLES),
        OptimizerStep(elements=1000, tensors=2),
    ]
    for slower, expected_s in ((1.0, 1.6e-3), (1.2, 1.6e-3), (3.0, 3e-3)):
        today = PaceToday(created="", alone=slower * 1e-3, together=slower * 1e-3)
        costs = Costs(MODEL, cluster_from_profile(profile.model_copy(update={"noise": noise, "today": today}), 1))
        estimate = costs.estimate(works[0], 0)
        assert estimate.median_s == pytest.approx(expected_s)
        assert estimate.host_bound == (slower < 1.5)
        assert ("host takes longer" in estimate.detail) == estimate.host_bound
        assert costs.between_steps_s == 0.0


def test_of_what_was_not_measured_the_launches_say_how_long_the_host_takes() -> None:
    estimate = Estimate(median_s=1e-4, source="fitted", issue_s=3e-4)
    work = Compute(component=MODEL.components[0].name, phase=Phase.FORWARD, samples=SAMPLES)
    issued = adjusted(estimate, work, 0, price_context(cluster_from_profile(load_profile(SHIPPED), 1)))
    assert (issued.median_s, issued.host_bound, estimate.host_bound) == (3e-4, True, False)

    seen = seen_components({(launches, 0): 2e-5 + 6e-6 * launches for launches in (3, 5, 9, 20, 40)})
    forward, _ = fit_compositions(seen, "gpu", "fp32", "drift")
    assert composed_issue_s(parts(30), forward) == pytest.approx(2e-5 + 30 * 6e-6, rel=1e-4)
    assert composed_issue_s(parts(30), None) == 0.0
    without, _ = fit_compositions([replace(entry, issue_s=None) for entry in seen], "gpu", "fp32", "drift")
    assert (without.issue_component_s, without.issue_launch_s) == (None, None)
    assert composed_issue_s(parts(30), without) == 0.0


def parts(products: int, convolutions: int = 0) -> Parts:
    kinds = {"matmul": products, "convolution": convolutions} if convolutions else {"matmul": products}
    return Parts(
        components=1.0,
        launches=products + convolutions,
        parameter_bytes=0.0,
        activation_bytes=0.0,
        seconds={kind: 1e-5 * (count + 1) for kind, count in kinds.items()},
        sigma=dict.fromkeys(kinds, 0.1),
        widening=dict.fromkeys(kinds, 0.0),
        outside_s=0.0,
        counts=kinds,
    )


def seen_components(issue_s: dict[tuple[int, int], float]) -> list[MeasuredComponent]:
    """Measured components of so many products and convolutions, with what the host took to queue each."""
    return [
        MeasuredComponent(
            model="m",
            fingerprint=f"{products} {convolutions}",
            phase=phase,
            samples=1,
            seconds=1e-5 * (products + convolutions),
            parts=parts(products, convolutions),
            issue_s=seconds,
        )
        for (products, convolutions), seconds in issue_s.items()
        for phase in ("forward", "backward")
    ]


def test_a_kind_that_takes_the_host_longer_is_told_from_the_others() -> None:
    """Convolutions take it 25 us, all else 5. A component of products alone costs no convolution."""
    shapes = [(4, 0), (8, 0), (20, 0), (40, 0), (6, 3), (10, 8), (12, 4), (16, 12)]
    seen = seen_components({shape: 2e-5 + 5e-6 * shape[0] + 25e-6 * shape[1] for shape in shapes})
    forward, _ = fit_compositions(seen, "gpu", "fp32", "drift")
    assert composed_issue_s(parts(30, 0), forward) == pytest.approx(2e-5 + 30 * 5e-6, rel=0.05)
    assert composed_issue_s(parts(10, 10), forward) == pytest.approx(2e-5 + 10 * 30e-6, rel=0.05)


@pytest.mark.parametrize(("gpu", "launch_s"), [("h100-sxm", 13.48e-6), ("gb200", 37.08e-6)])
def test_a_machine_of_parts_queues_a_small_layer_at_its_hosts_pace(gpu: str, launch_s: float) -> None:
    """A layer of 64 channels takes its launches times the host's seconds; one of 8192 channels does not wait for the host."""
    cluster = cluster_from_profile(profile_from_parts(gpu, 1), 1)
    work = Compute(component="h.0", phase=Phase.FORWARD, samples=1)

    def layer(hidden: int) -> tuple[Estimate, int]:
        shape = Shape(name="gpt", layers=1, hidden=hidden, heads=hidden // 64, vocab=1024)
        model = transformer(shape, EAGER, SamplePart(tokens=2048, context=2048), "layer")
        request = ComputeRequest(component=model.component("h.0"), phase=Phase.FORWARD, samples=1)
        launches = sum(kernel.count for kernel in component_kernels(request, "bf16", "cuda", fused_attention=True))
        return Costs(model, cluster, numerics=Numerics(precision="bf16")).estimate(work, 0), launches

    small, launches = layer(64)
    assert small.host_bound
    assert small.median_s == small.issue_s == pytest.approx(launches * launch_s)
    large, launches = layer(8192)
    assert not large.host_bound
    assert large.median_s > large.issue_s == pytest.approx(launches * launch_s)
    v100 = cluster_from_profile(profile_from_parts("v100-sxm-32gb", 1), 1)
    assert v100.profile.host is None
