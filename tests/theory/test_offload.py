"""Offload to the host: seconds in closed form, memory by hand, and a program that without offload is what it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parsim.app import functions
from parsim.app.ask import ask, ask_again
from parsim.app.config import Question, parse_config
from parsim.app.launch import check_runnable
from parsim.app.run_folder import RunFolder
from parsim.app.write_folder import write_prediction
from parsim.costs.loading import update_bytes
from parsim.engines.static import simulate
from parsim.errors import ConfigError, CostError, PlanError
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile, profile_from_parts
from parsim.hardware.profile import HostMemory
from parsim.model.component import Value
from parsim.model.formats import Numerics
from parsim.model.model import Model
from parsim.plans.mesh import Mesh
from parsim.plans.plan import ActivationOffload, Plan, Stage
from parsim.predict.evaluate import REPEATED_STEPS, evaluate
from parsim.predict.explain import explain_plan
from parsim.predict.memory import BUFFERS
from parsim.predict.problem import PlanningProblem
from parsim.program.lower import lower
from parsim.program.taskgraph import from_text, to_text
from parsim.search.bound import step_bound_s
from parsim.search.memory_floor import missing_bytes
from parsim.search.search import search
from parsim.search.stages import balanced_plan
from parsim.search.tensor import uniform_options
from parsim.work import Collective, Compute, HostCopy, HostUpdate, LoadBatch, OptimizerStep, Phase
from tests.models import chain_model, residual_model
from tests.theory.test_folding import assert_same_answer

PCIE_5, LATENCY = 48.79e9, 2e-6
"""Of the part pcie-5, and of its two links."""
MEMORY = 200e9


def machine(
    count: int = 1, *, memory_bytes: float | None = None, bandwidth: float | None = MEMORY, link: float | None = None
) -> Cluster:
    profile = profile_from_parts("h100-sxm", count)
    host = HostMemory(memory_bytes=memory_bytes, bandwidth_bytes_per_s=bandwidth, link_bytes_per_s=link, source="parts")
    return cluster_from_profile(profile.model_copy(update={"host_memory": host}))


def saving(model: Model, *, size: int) -> Model:
    """The same model, of which every component but the loss saves `size` bytes per sample."""
    components = tuple(replace(own, saved_activation_bytes=size if own.name != "loss" else 0) for own in model.components)
    return replace(model, components=components)


def plan_of(model: Model, *, dp: int = 1, batch: int = 8, microbatches: int = 1, **rest: object) -> Plan:
    mesh = Mesh(dp=dp)
    stage = Stage(components=tuple(component.name for component in model.components), ranks=mesh.stage_ranks(0))
    given = {"strategy": "custom", "mesh": mesh, "stages": (stage,), "global_batch": batch, "microbatches": microbatches}
    return Plan(**{**given, **rest})  # type: ignore[arg-type]


def problem_of(model: Model, cluster: Cluster, **rest: object) -> PlanningProblem:
    return PlanningProblem(model=model, cluster=cluster, global_batch=8, numerics=Numerics(optimizer="adam"), **rest)  # type: ignore[arg-type]


def step_s(problem: PlanningProblem, plan: Plan) -> float:
    return evaluate(problem, plan, samples=0).result.step_s.median


def first_load_s(problem: PlanningProblem, plan: Plan) -> float:
    """Of the first batch, which the mean of several steps waits for once; later ones are loaded ahead."""
    loads = [task.work for task in lower(plan, problem.model, problem.layout(plan)).tasks if isinstance(task.work, LoadBatch)]
    return problem.price([(work, 0) for work in loads], Mesh())[0].median_s / REPEATED_STEPS


def compute_s(problem: PlanningProblem, name: str, phase: Phase, samples: int = 8) -> float:
    work = Compute(component=name, phase=phase, samples=samples)
    return problem.price([(work, 0)], Mesh())[0].median_s


@pytest.mark.parametrize("size", [1_000, 200_000_000], ids=["compute-bound", "copy-bound"])
def test_a_step_with_activations_on_the_host_takes_what_the_closed_form_says(size: int) -> None:
    """c0, then the loss: the copy of c0 hides behind the loss's forward, and its fetch behind the loss's backward."""
    model = saving(chain_model((5e10,)), size=size)
    problem = problem_of(model, machine())
    forward, backward = (compute_s(problem, "c0", phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
    loss, back = (compute_s(problem, "loss", phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
    copy = 8 * size / PCIE_5 + LATENCY
    update = problem.price([(OptimizerStep(elements=1000, tensors=1), 0)], Mesh())[0].median_s
    load = first_load_s(problem, plan_of(model))
    expected = load + forward + max(loss, copy) + max(back, copy) + backward + update
    assert step_s(problem, plan_of(model, activation_offload=("c0",))) == pytest.approx(expected, rel=1e-9)
    without = load + forward + loss + back + backward + update
    assert step_s(problem, plan_of(model)) == pytest.approx(without, rel=1e-9)


@pytest.mark.parametrize(("elements", "bandwidth"), [(10**9, 1e12), (10**9, 1e10)], ids=["copy-bound", "memory-bound"])
def test_a_step_with_the_optimizer_on_the_host_takes_what_the_closed_form_says(elements: int, bandwidth: float) -> None:
    """Two buckets. The first one's gradients are copied beside the backward of the other component. Updates begin when all have
    come, and the first one's parameters go back beside the second update."""
    model = chain_model((5e10, 5e10), elements=elements)
    problem = problem_of(model, machine(bandwidth=bandwidth))
    times = [
        compute_s(problem, name, phase)
        for phase, names in ((Phase.FORWARD, ("c0", "c1", "loss")), (Phase.BACKWARD, ("loss", "c1")))
        for name in names
    ]
    copy = 4 * elements / PCIE_5 + LATENCY
    update = (4 + 2 * 8 + 2 * 4) * elements / bandwidth
    arrived = max(compute_s(problem, "c0", Phase.BACKWARD), copy) + copy
    expected = sum(times) + arrived + update + max(copy, update) + copy
    found = evaluate(problem, plan_of(model, optimizer_offload=True, bucket_bytes=1), samples=0)
    assert found.result.step_s.median == pytest.approx(expected + first_load_s(problem, found.result.plan), rel=1e-9)
    exposed = arrived - compute_s(problem, "c0", Phase.BACKWARD) + update + max(copy, update) + copy
    assert found.breakdown[0].host_s == pytest.approx(exposed, rel=1e-9)
    assert found.breakdown[0].step_s == pytest.approx(expected + found.breakdown[0].load_s, rel=1e-9)


@pytest.mark.parametrize(
    ("precision", "master_weights", "expected"),
    [
        ("fp32", True, 4 + 2 * 8 + 2 * 4),
        ("amp_bf16", True, 4 + 2 * 8 + 2 * 4),
        ("bf16", True, 2 + 2 * (8 + 4) + 2),
        ("bf16", False, 2 + 2 * 4 + 2 * 2),
    ],
)
def test_bytes_of_an_update_on_the_host(precision: str, master_weights: bool, expected: int) -> None:
    assert update_bytes(Numerics(precision=precision, optimizer="adam", master_weights=master_weights)) == expected


def test_ranks_of_a_node_share_the_hosts_memory_and_links() -> None:
    """Two V100s hang on one PCIe switch, of which one link goes on; eight share the memory."""
    model = chain_model((1e9,))
    profile = load_profile("dgx1-v100-32gb")
    host = HostMemory(bandwidth_bytes_per_s=MEMORY, source=next(iter(profile.sources)))
    cluster = cluster_from_profile(profile.model_copy(update={"host_memory": host}))
    problem = problem_of(model, cluster, optimizer_offload=True)
    copy, update = HostCopy(size_bytes=10**9, to_host=True), HostUpdate(elements=10**9)

    def price(work: HostCopy | HostUpdate, dp: int) -> float:
        return problem.costs(dp).estimate(work, 0).median_s

    assert price(copy, 8) == pytest.approx(2 * price(copy, 1), rel=1e-3)  # but for the latency
    assert price(update, 8) == pytest.approx(8 * price(update, 1))


# --- memory -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_the_optimizers_state_lies_in_the_hosts_memory(zero_stage: int) -> None:
    model = chain_model((1e9,) * 4, elements=4_000)
    problem = problem_of(model, machine(4))
    plan = plan_of(model, dp=4, zero_stage=zero_stage)
    before, after = problem.memory(plan)[0], problem.memory(replace(plan, optimizer_offload=True))[0]
    part = 4 if zero_stage else 1
    assert before.line("optimizer_state") == 2 * 4 * 16_000 // part
    assert after.line("optimizer_state") == 0
    others = {name: size for name, size in before.lines if name not in ("optimizer_state", "workspace", "allocator")}
    assert others == {name: size for name, size in after.lines if name in others}
    held = 4 * 16_000 // part
    assert dict(after.host_lines) == {"optimizer_state": 2 * held, "gradients": held, "parameters": held}
    assert before.host_lines == ()


def test_activations_in_flight_by_hand() -> None:
    """Of four components that save 1000 bytes of each of 8 samples: one that is used, and one that leaves or comes. Where the
    forward ends and the backward begins there may be three: the last, the one before it, and none to be fetched."""
    model = saving(chain_model((1e9,) * 4), size=1_000)
    problem = problem_of(model, machine())
    plain, plan = plan_of(model), plan_of(model, activation_offload=("c0", "c1", "c2", "c3"))
    before, after = problem.memory(plain)[0], problem.memory(plan)[0]
    assert before.line("activations") == 4 * 8_000
    assert after.line("activations") == 0
    assert after.line(BUFFERS) == 2 * 8_000
    assert dict(after.host_lines) == {"activations": 4 * 8_000}


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_microbatches_in_turn_hold_no_more_in_the_hosts_memory(microbatches: int) -> None:
    model = saving(chain_model((1e9,) * 3), size=1_000)
    problem = problem_of(model, machine())
    found = problem.memory(plan_of(model, microbatches=microbatches, activation_offload=True))[0]
    assert dict(found.host_lines) == {"activations": 3 * 8_000 // microbatches}


def kept_by_two() -> Model:
    """a -> b -> c -> d, d reads a too: a's value is saved by b and d, and counted with b."""
    model = residual_model()
    values = tuple(
        replace(value, savers=("b", "d")) if value.name == "a:0" else _kept_by_reader(value) for value in model.values
    )
    sizes = {"a": 0, "b": 128, "c": 128, "d": 128, "loss": 0}
    components = tuple(replace(own, saved_activation_bytes=sizes[own.name]) for own in model.components)
    return replace(model, values=values, components=components)


def _kept_by_reader(value: Value) -> Value:
    return replace(value, savers={"b:0": ("c",), "c:0": ("d",)}.get(value.name, ()))


@pytest.mark.parametrize(
    ("offload", "copied", "away"),
    [
        (("b",), {"b": 0}, 0),  # d needs the value, and it is not offloaded
        (("b", "d"), {"b": 0, "d": 2 * 128}, 2 * 128),
        (("b", "c", "d"), {"b": 0, "c": 128, "d": 2 * 128}, 3 * 128),
        (("c",), {"c": 128}, 128),
    ],
)
def test_a_value_that_two_components_save_goes_with_the_last(
    offload: ActivationOffload, copied: dict[str, int], away: int
) -> None:
    model = kept_by_two()
    problem = problem_of(model, machine())
    plan = plan_of(model, activation_offload=offload)
    found = problem.layout(plan).offloaded
    assert found == {name: 8 * size for name, size in copied.items()}
    plain, some = problem.memory(plan_of(model))[0], problem.memory(plan)[0]
    assert plain.line("activations") - some.line("activations") == 8 * away


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(0, 2**32 - 1))
def test_a_device_never_holds_more_than_the_line_of_what_is_in_flight(draw: st.DataObject, seed: int) -> None:
    """Whatever takes how long: what was made and has not left, and what was fetched and is not used up."""
    layers = draw.draw(st.integers(1, 5))
    model = saving(chain_model((1e9,) * layers), size=1_000)
    names = [component.name for component in model.components]
    some = draw.draw(st.sets(st.sampled_from(names), min_size=1))
    microbatches = draw.draw(st.sampled_from([1, 2, 4]))
    recompute = draw.draw(st.sampled_from(["none", "full"]))
    problem = problem_of(model, machine())
    plan = plan_of(model, microbatches=microbatches, activation_offload=tuple(some), recompute=recompute)
    layout = problem.layout(plan)
    assert layout.offloaded is not None
    graph = lower(plan, problem.model, layout)
    rng = np.random.default_rng(seed)
    timeline = simulate(graph, rng.exponential(rng.choice([0.1, 1.0, 10.0], len(graph.tasks))))
    start, end = np.zeros(len(graph.tasks)), np.zeros(len(graph.tasks))
    start[timeline.task], end[timeline.task] = timeline.start_s, timeline.end_s
    events = []
    for task in graph.tasks:
        size = layout.offloaded.get(task.origin.component or "", 0)
        match task.work:
            case Compute(phase=Phase.FORWARD):
                events.append((start[task.index], size))
            case HostCopy(to_host=True):
                events.append((end[task.index], -size))
            case HostCopy(to_host=False):
                events.append((start[task.index], size))
            case Compute(phase=Phase.BACKWARD):
                events.append((end[task.index], -size))
    now = most = 0
    for _, change in sorted(events):  # what leaves at an instant has left before something comes
        now += change
        most = max(most, now)
    assert now == 0
    assert most <= problem.memory(plan)[0].line(BUFFERS)


def test_a_node_without_room_for_the_state_does_not_fit() -> None:
    model = chain_model((1e9,), elements=10**6)
    plan = plan_of(model, dp=8, optimizer_offload=True)
    held = 4 * 10**6 * 4  # state, gradients, parameters
    enough, little = (problem_of(model, machine(8, memory_bytes=8 * held + spare)).memory(plan)[0] for spare in (0.0, -1.0))
    assert enough.fits
    assert enough.host_excess_bytes == 0
    assert not little.fits
    assert little.fit_probability == 0.0
    assert "more than its host has memory" in little.describe()
    assert problem_of(model, machine(8)).memory(plan)[0].host_limit_bytes is None


# --- programs -------------------------------------------------------------------------------------------------------------


def test_without_offload_nothing_is_copied() -> None:
    model = chain_model()
    graph = lower(plan_of(model, dp=2, zero_stage=1), model)
    assert not [task for task in graph.tasks if isinstance(task.work, HostCopy | HostUpdate)]
    assert "offload" not in plan_of(model).to_json()


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([1, 2, 4]),
    st.integers(0, 3),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.sampled_from([(), ("c0",), ("c0", "c1", "c2")]),
    st.sampled_from([1, 10**9]),
    st.floats(1e9, 1e11),
    st.floats(1.0, 10.0),
)
def test_more_bandwidth_of_the_host_is_never_slower_and_no_step_is_below_its_bound(
    dp: int,
    zero_stage: int,
    microbatches: int,
    optimizer: bool,
    activations: tuple[str, ...],
    bucket_bytes: int,
    rate: float,
    more: float,
) -> None:
    assume(optimizer or activations)
    model = saving(chain_model((5e10,) * 3, elements=10**6), size=10**6)
    plan = plan_of(
        model,
        dp=dp,
        zero_stage=zero_stage,
        microbatches=microbatches,
        bucket_bytes=bucket_bytes,
        optimizer_offload=optimizer,
        activation_offload=activations,
    )
    given = {"optimizer_offload": optimizer, "activation_offload": activations}
    problems = [
        problem_of(model, machine(4, bandwidth=bandwidth, link=link), **given)
        for bandwidth, link in ((rate, rate), (rate * more, rate), (rate, rate * more), (rate * more, rate * more))
    ]
    slow, *others = [step_s(problem, plan) for problem in problems]
    assert all(other <= slow * (1 + 1e-12) for other in others)
    assert step_bound_s(problems[0], plan) <= slow


# --- refusals -------------------------------------------------------------------------------------------------------------


def test_what_is_not_known_of_the_host_is_refused_with_the_key() -> None:
    model = chain_model()
    with pytest.raises(CostError, match=r"cluster\.host_memory_bandwidth_bytes_per_s"):
        step_s(problem_of(model, machine(bandwidth=None)), plan_of(model, optimizer_offload=True))
    cluster = machine()
    bare = replace(cluster, topology=type(cluster.topology)(links=()))
    with pytest.raises(CostError, match=r"cluster\.host_link_bytes_per_s"):
        step_s(problem_of(model, bare), plan_of(model, activation_offload=True))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"activation_offload": ("c9",)}, "activation_offload names 'c9'"),
        ({"activation_offload": True, "segments": (("c0", "c1"),)}, "segments keep what enters several"),
    ],
)
def test_plans_that_cannot_be(keys: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of(chain_model(), **keys)


def test_a_plan_with_offload_goes_through_json_and_is_simulated_only() -> None:
    model = chain_model()
    plan = plan_of(model, optimizer_offload=True, activation_offload=["c1", "c0"])
    assert plan.activation_offload == ("c0", "c1")
    assert Plan.from_json(plan.to_json()) == plan
    assert not plan.executable
    assert '"executable": false' in plan.to_json()
    assert plan_of(model, activation_offload=plan.components).activation_offload is True
    assert "optimizer-offload activation-offload=2 of 5" in plan.summary()


# --- searches and answers -------------------------------------------------------------------------------------------------


def small_devices(cluster: Cluster, memory_bytes: int) -> Cluster:
    devices = tuple(replace(each, type=replace(each.type, memory_bytes=memory_bytes)) for each in cluster.devices)
    return replace(cluster, devices=devices)


def test_where_nothing_fits_offload_is_named_if_it_helps() -> None:
    """Parameters and gradients fit, and their state does not."""
    model = chain_model((1e9,) * 2, elements=10**9)
    cluster = machine()
    context = cluster.devices[0].type.context_bytes
    for room, helps in ((20 * 10**9, True), (10 * 10**9, False)):
        problem = problem_of(model, small_devices(cluster, context + room))
        found = search(problem, ("single",), samples=0)
        assert found.chosen is None
        assert ("; with plan.optimizer_offload = true it would fit" in found.candidates[0].result.reason) == helps
        kept = search(replace(problem, optimizer_offload=True), ("single",), samples=0)
        assert (kept.chosen is not None) == helps


@pytest.mark.parametrize("strategy", ["dp", "mp", "hp", pytest.param("adaptive", marks=pytest.mark.slow)])
def test_a_search_keeps_what_is_offloaded(strategy: str) -> None:
    model = saving(chain_model((5e10,) * 4, elements=10**6), size=10**6)
    problem = problem_of(model, machine(4), optimizer_offload=True, activation_offload=("c0", "c1"))
    found = search(problem, (strategy,), samples=0, top=3)
    assert found.candidates
    for candidate in found.candidates:
        assert candidate.result.plan.optimizer_offload
        assert candidate.result.plan.activation_offload == ("c0", "c1")


def test_where_the_time_goes_names_the_copies() -> None:
    model = saving(chain_model((5e10,) * 2, elements=10**9), size=10**8)
    problem = problem_of(model, machine())
    evaluation = evaluate(problem, plan_of(model, optimizer_offload=True, activation_offload=True), samples=0)
    explained = explain_plan(problem, evaluation)
    assert sum(seconds for _, seconds in explained.categories) == pytest.approx(explained.step_s)
    names = {task.what.kind for task in explained.of("host")}
    assert {"copy to host", "copy from host", "update on the host"} <= names
    assert sum(task.seconds for task in explained.of("host")) == pytest.approx(dict(explained.categories)["host"])
    assert any("assumed: copies to and from the host over pcie" in text for text in evaluation.result.warnings)


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_folded_and_dynamic_simulations_agree(zero_stage: int) -> None:
    model = saving(chain_model((5e10,) * 3, elements=10**6), size=10**6)
    problem = problem_of(model, machine(4))
    plan = plan_of(model, dp=4, zero_stage=zero_stage, optimizer_offload=True, activation_offload=True)
    whole, folded = (evaluate(problem, plan, samples=0, fold=fold) for fold in (False, True))
    assert folded.folding.is_folded
    assert_same_answer(folded, whole)
    events = evaluate(problem, plan, samples=0, engine="dynamic", fold=False)
    assert events.timeline.makespan_s == whole.timeline.makespan_s


def test_printed_programs_read_back_equal() -> None:
    model = saving(chain_model((1e9,) * 2), size=1_000)
    problem = problem_of(model, machine(2))
    plan = plan_of(model, dp=2, zero_stage=1, optimizer_offload=True, activation_offload=True)
    graph = lower(plan, problem.model, problem.layout(plan))
    assert from_text(to_text(graph)) == graph


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([Mesh(), Mesh(dp=2), Mesh(pp=2), Mesh(pp=2, dp=2)]),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
    st.floats(0.0, 1.0),
)
def test_what_a_search_leaves_out_for_its_memory_does_not_fit(
    mesh: Mesh, microbatches: int, zero_stage: int, optimizer: bool, activations: bool, share: float
) -> None:
    model = saving(chain_model((1e9,) * 5, elements=10**7), size=10**7)
    given = {"optimizer_offload": optimizer, "activation_offload": activations}
    cluster = machine(4)
    problem = problem_of(model, cluster, zero_stage=zero_stage, **given)
    plan = balanced_plan(problem, "custom", mesh, microbatches=microbatches, pipeline_order="1f1b", zero_stage=zero_stage)
    needed = max(memory.total_bytes for memory in problem.memory(plan))
    context = cluster.devices[0].type.context_bytes
    tight = small_devices(cluster, int(context + share * (needed - context)))
    problem = problem_of(model, tight, zero_stage=zero_stage, **given)
    options = tuple(uniform_options(problem, component, mesh.tp, divides=True) for component in model.components)
    if missing_bytes(problem, mesh, microbatches, options):
        for recompute in ("none", "full"):
            assert not all(memory.fits for memory in problem.memory(replace(plan, recompute=recompute)))


def test_a_given_plan_on_some_ranks_is_priced_as_they_share_the_host() -> None:
    """Whatever other numbers of ranks the problem, which was not asked to offload, has priced before."""
    model = chain_model((5e10,), elements=10**8)
    plan = plan_of(model, dp=2, optimizer_offload=True)
    asked_before = problem_of(model, machine(4))
    asked_before.costs(4)
    assert step_s(asked_before, plan) == step_s(problem_of(model, machine(4)), plan)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_bound_knows_that_buckets_are_gathered_beside_later_updates(zero_stage: int) -> None:
    """The host updates a bucket in about the time that it takes to gather one."""
    model = chain_model((1e6,) * 6, elements=10**8)
    problem = problem_of(model, machine(4, bandwidth=2.8e12, link=1e12), optimizer_offload=True)
    plan = plan_of(model, dp=4, zero_stage=zero_stage, optimizer_offload=True, bucket_bytes=1)
    assert step_bound_s(problem, plan) <= step_s(problem, plan)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_host_updates_with_the_gradients_of_all_sharding_groups(stage: int) -> None:
    """HSDP: what a rank sends to its host is its part of the sum over all replicas, not of its sharding group's alone."""
    model = chain_model((5e10, 5e10), elements=10**6)
    plan = plan_of(model, zero_stage=stage, optimizer_offload=True)
    plan = replace(plan, mesh=Mesh(dp=4, dp_shard=2), stages=(replace(plan.stages[0], ranks=Mesh(dp=4).stage_ranks(0)),))
    graph = lower(plan, model)
    copies = [task for task in graph.tasks if isinstance(task.work, HostCopy) and task.work.to_host]
    assert {task.work.size_bytes for task in copies if isinstance(task.work, HostCopy)} == {2 * 4 * 10**6 // 2}
    for task in copies:
        waited = [graph.tasks[number].work for number in task.dependencies]
        sums = [work for work in waited if isinstance(work, Collective) and work.operation == "all_reduce"]
        assert [set(work.group) for work in sums] == [{task.resources[0].rank, (task.resources[0].rank + 2) % 4}]


RUN = """
[model]
name = "{model}"
[cluster]
gpu = "a100-sxm-80gb"
gpus_per_node = 2
host_memory_bandwidth_bytes_per_s = 2e11
host_memory_bytes = 1e12
[training]
global_batch = 8

"""


def asked(tmp_path: Path, *overrides: str) -> Question:
    path = tmp_path / "model.json"
    chain_model((1e9,) * 3, elements=10**6).save(path)
    text = RUN.format(model=path)
    return parse_config(text, ["plan.strategy=dp", *overrides], folder=tmp_path)


def test_a_folder_keeps_what_the_run_file_says_of_the_host(tmp_path: Path) -> None:
    overrides = ["plan.strategy=dp", "plan.optimizer_offload=true", "plan.activation_offload=['c*']"]
    path = tmp_path / "run.toml"
    path.write_text(asked(tmp_path).to_toml())
    out = tmp_path / "out"
    found = functions.simulate(path, overrides=overrides)
    out.mkdir()
    write_prediction(RunFolder(out), found)
    again = ask_again(RunFolder(out))
    assert again.evaluation.result.step_s.median == found.evaluation.result.step_s.median
    assert again.evaluation.memory[0].host_lines == found.evaluation.memory[0].host_lines
    assert Plan.load(out / "plan.json").activation_offload == ("c0", "c1", "c2")


def test_a_plan_with_offload_is_not_launched(tmp_path: Path) -> None:
    found = ask(asked(tmp_path, "plan.activation_offload=true"))
    with pytest.raises(PlanError, match=r"the plan has activation_offload, which parsim simulates"):
        check_runnable(found, None)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["plan.activation_offload=['nowhere*']"], "plan.activation_offload"),
        (["plan.optimizer_offload=true", "plan.synchronisation=average/8"], "belongs to synchronous training"),
        (["plan.optimizer_offload=true", "plan.strategy=plan.json"], "the plan is read from"),
    ],
)
def test_what_offload_does_not_go_with(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ask(asked(tmp_path, *overrides))


def test_false_is_the_plan_without_it(tmp_path: Path) -> None:
    plain, off = (
        ask(asked(tmp_path, *more)) for more in ((), ("plan.activation_offload=false", "plan.optimizer_offload=false"))
    )
    assert plain.evaluation.result.plan == off.evaluation.result.plan
