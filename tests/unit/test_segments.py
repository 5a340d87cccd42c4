"""Segments: runs of components that are recomputed as a whole, with their conversions; and parameters gathered ahead."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import parsim
from parsim.app.launch import check_runnable
from parsim.engines import static
from parsim.engines.static import compile_graph
from parsim.errors import ConfigError, PlanError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile, profile_from_parts
from parsim.model.catalogue.sublayers import EAGER, SamplePart, Shape
from parsim.model.catalogue.transformer import transformer
from parsim.model.component import Component, Parameter, Sharding, Value, ValueFootprint
from parsim.model.formats import Numerics, model_as_sent, value_in
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.plans.layouts import Placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.plans.stages import as_megatron, rest_in_last, with_ends
from parsim.predict.problem import PlanningProblem
from parsim.program.columns import columns_of
from parsim.program.lifetimes import KeptActivations
from parsim.program.lower import lower
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import Resource, TaskGraph, to_text
from parsim.program.templates import lower_columns
from parsim.work import Collective, Compute, Phase, SendRecv
from tests.execute.test_bad_run import write_profile

LAYERS = 2
WIDTH = 1000


def model() -> Model:
    """Two layers of two halves each, every half a sum over its shards, and a loss."""
    names = [f"h{layer}.{half}" for layer in range(LAYERS) for half in "ab"]
    values = [Value(name="x0", producer=None, bytes_per_sample=WIDTH, differentiable=False, savers=(names[0],))]
    components = []
    for number, name in enumerate(names):
        components.append(
            Component(
                name=name,
                inputs=(f"x{number}",),
                outputs=(f"x{number + 1}",),
                parameters=(Parameter(name=f"{name}.w", elements=10),),
                saved_activation_bytes=5 * WIDTH,
                shardings=(Sharding(rule="split", limit=4, inputs=("full",), outputs=("partial",)),),
            )
        )
        reader = names[number + 1] if number + 1 < len(names) else "loss"
        values.append(Value(name=f"x{number + 1}", producer=name, bytes_per_sample=WIDTH, savers=(reader,)))
    last = f"x{len(names)}"
    components.append(Component(name="loss", inputs=(last,), outputs=("y",), saved_activation_bytes=WIDTH))
    values.append(Value(name="y", producer="loss", bytes_per_sample=4, savers=()))
    return Model(
        name="halves",
        granularity="sublayer",
        components=tuple(components),
        values=tuple(values),
        inputs=("x0",),
        outputs=("y",),
    )


def plan(*, tp: int = 2, segments: tuple[tuple[str, ...], ...] = (), **rest: object) -> Plan:
    mesh = Mesh(pp=1, dp=int(rest.pop("dp", 1)), tp=tp)  # type: ignore[call-overload]
    components = tuple(component.name for component in model().components)
    placements = tuple(
        Placement("shard", rule="split", ways=tp) if name.startswith("h") else Placement("replicate") for name in components
    )
    return Plan(
        strategy="custom",
        mesh=mesh,
        stages=(Stage(components=components, ranks=mesh.stage_ranks(0), placements=placements if tp > 1 else ()),),
        global_batch=4 * mesh.dp,
        microbatches=2,
        segments=segments,
        **rest,  # type: ignore[arg-type]
    )


BOTH = (("h0.a", "h0.b"), ("h1.a", "h1.b"))


def collectives(graph: TaskGraph) -> int:
    return sum(isinstance(task.work, Collective) for task in graph.tasks)


def test_a_segment_sends_its_conversions_again() -> None:
    """Per layer and microbatch: two sums in the forward, two in the second forward, and the backward's."""
    without, recomputed, again = (
        lower(plan(segments=segments, recompute=names), model())
        for segments, names in (((), "none"), ((), tuple(name for run in BOTH for name in run)), (BOTH, "none"))
    )
    assert collectives(recomputed) == collectives(without)
    assert collectives(again) == collectives(without) + 2 * LAYERS * 2


def test_a_segment_runs_again_as_a_whole_before_its_backward() -> None:
    graph = lower(plan(tp=1, segments=BOTH), model())
    order = [
        (task.work.phase, task.work.component)
        for task in graph.tasks
        if isinstance(task.work, Compute) and task.origin.microbatch == 0
    ]
    backward = order[order.index((Phase.BACKWARD, "loss")) + 1 :]
    assert [f"{phase.short} {name}" for phase, name in backward] == [
        "R h1.a", "R h1.b", "B h1.b", "B h1.a", "R h0.a", "R h0.b", "B h0.b", "B h0.a",
    ]  # fmt: skip


def test_the_backward_waits_for_what_its_segment_sends_again() -> None:
    graph = lower(plan(segments=BOTH), model())
    (backward,) = (
        task
        for task in graph.tasks
        if isinstance(task.work, Compute)
        and (task.work.phase, task.work.component) == (Phase.BACKWARD, "h1.b")
        and task.origin.microbatch == 0
        and task.ranks == (0,)
    )
    (again,) = (
        task.index
        for task in graph.tasks
        if isinstance(task.work, Compute)
        and (task.work.phase, task.work.component) == (Phase.RECOMPUTE, "h1.b")
        and task.origin.microbatch == 0
        and task.ranks == (0,)
    )
    sums = {task.index for task in graph.tasks if isinstance(task.work, Collective) and again in task.dependencies}
    assert sums
    assert sums <= set(backward.dependencies)


def test_a_segment_keeps_what_enters_it_alone() -> None:
    """Of 5 widths that a half saves; the second half's input is made again."""

    def kept(**rest: object) -> dict[str, int]:
        found = KeptActivations(PlanIndex(plan(tp=1, **rest), model()), "fp32")  # type: ignore[arg-type]
        return {name: found.component(name).saved_activation_bytes for name in ("h1.a", "h1.b")}

    assert kept() == {"h1.a": 5 * WIDTH, "h1.b": 5 * WIDTH}
    assert kept(recompute=("h1.a", "h1.b")) == {"h1.a": WIDTH, "h1.b": WIDTH}
    assert kept(segments=BOTH) == {"h1.a": WIDTH, "h1.b": 0}


def test_a_whole_segment_is_saved_while_its_last_runs_backward() -> None:
    found = KeptActivations(PlanIndex(plan(tp=1, segments=BOTH), model()), "fp32")
    assert found.again("h1.b").saved_bytes == 2 * (4 * WIDTH + 5 * WIDTH)
    assert found.again("h1.a").saved_bytes == 2 * 4 * WIDTH


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ((("h0.a", "h1.a"),), "consecutive"),
        ((("h0.a", "nothing"),), "not a component"),
        ((("h0.a",), ("h0.a", "h0.b")), "twice"),
        (((),), "consecutive"),
    ],
)
def test_segments_that_cannot_be(segments: tuple[tuple[str, ...], ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(segments=segments)


def test_gathered_ahead_the_first_forward_waits_for_its_parameters() -> None:
    graph = lower(plan(tp=1, dp=2, zero_stage=1, gather_ahead=True, bucket_bytes=1), model())
    gathers = {task.index for task in graph.tasks if isinstance(task.work, Collective) and task.work.operation == "all_gather"}
    assert len(gathers) == 2 * LAYERS
    for task in graph.tasks:
        if isinstance(task.work, Compute) and task.work.phase is Phase.FORWARD and task.work.component != "loss":
            waits = gathers & set(task.dependencies)
            assert len(waits) == (task.origin.microbatch == 0)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gathering_ahead_means_nothing_but_with_zero_1(stage: int) -> None:
    ahead, usual = (plan(tp=1, dp=2, zero_stage=stage, gather_ahead=on, segments=()) for on in (True, False))
    assert to_text(lower(ahead, model())) == to_text(lower(usual, model()))
    assert (ahead.executable, ahead.summary()) == (usual.executable, usual.summary())


def test_what_the_executor_cannot_run_says_so_in_its_json() -> None:
    made = plan(segments=BOTH)
    assert not made.executable
    assert '"executable": false' in made.to_json()
    assert Plan.from_json(made.to_json()) == made
    assert "executable" not in plan().to_json()
    assert replace(made, segments=()).executable


def test_the_streams_are_those_of_the_plan_without_segments() -> None:
    graph = lower(plan(segments=BOTH), model())
    assert {resource.stream for task in graph.tasks for resource in task.resources if isinstance(resource, Resource)} <= {
        "compute", "tp", "host", "dp",
    }  # fmt: skip


def staged(*, blocking: bool) -> Plan:
    """One layer per stage."""
    mesh = Mesh(pp=2, dp=1, tp=1)
    names = [component.name for component in model().components]
    halves = (tuple(names[:2]), tuple(names[2:]))
    return Plan(
        strategy="custom",
        mesh=mesh,
        stages=tuple(Stage(components=own, ranks=mesh.stage_ranks(place)) for place, own in enumerate(halves)),
        global_batch=8,
        microbatches=8,
        blocking_transfers=blocking,
    )


def test_a_blocking_transfer_takes_the_senders_time_and_not_the_receivers() -> None:
    """1F1B in the steady state: f + b per microbatch where transfers hide, and one transfer more where they block."""
    seconds = {Phase.FORWARD: 1.0, Phase.BACKWARD: 2.0}

    def step_s(made: Plan) -> float:
        columns = lower_columns(made, model())
        durations = np.array(
            [
                seconds[unit.work.phase] if isinstance(unit.work, Compute) else 0.25 if isinstance(unit.work, SendRecv) else 0.0
                for unit in columns.units
            ]
        )[columns.unit]
        return static.simulate(compile_graph(columns), durations).makespan_s

    free, blocking = step_s(staged(blocking=False)), step_s(staged(blocking=True))
    per_microbatch = (blocking - free) / 8
    assert 0.15 < per_microbatch < 0.35


def test_without_backward_prefetch_a_gather_follows_the_backward_before() -> None:
    made = [
        lower(plan(tp=1, dp=2, zero_stage=3, bucket_bytes=1, backward_prefetch=prefetch), model()) for prefetch in (True, False)
    ]
    for graph, prefetch in zip(made, (True, False), strict=True):
        by_key = {
            (task.work.phase, task.work.component): task.index
            for task in graph.tasks
            if isinstance(task.work, Compute) and task.origin.microbatch == 0 and task.ranks == (0,)
        }
        backward = graph.tasks[by_key[Phase.BACKWARD, "h0.b"]]
        gathers = [
            graph.tasks[index]
            for index in backward.dependencies
            if isinstance(graph.tasks[index].work, Collective) and graph.tasks[index].work.operation == "all_gather"
        ]
        (gather,) = gathers
        assert (by_key[Phase.BACKWARD, "h1.a"] in gather.dependencies) is not prefetch


def test_scattered_transfers_send_a_part_and_gather_it() -> None:
    """Two stages of a layer each over two shards: values and gradients cross in halves, and values are gathered."""

    def made(*, scatter: bool) -> TaskGraph:
        mesh = Mesh(pp=2, dp=1, tp=2)
        names = [component.name for component in model().components]
        placements = [Placement("shard", rule="split", ways=2) if name != "loss" else Placement("replicate") for name in names]
        return lower(
            Plan(
                strategy="custom",
                mesh=mesh,
                stages=(
                    Stage(components=tuple(names[:2]), ranks=mesh.stage_ranks(0), placements=tuple(placements[:2])),
                    Stage(components=tuple(names[2:]), ranks=mesh.stage_ranks(1), placements=tuple(placements[2:])),
                ),
                global_batch=4,
                microbatches=4,
                scatter_gather=scatter,
            ),
            model(),
        )

    whole, parts = made(scatter=False), made(scatter=True)
    sent = [sum(task.work.size_bytes for task in graph.tasks if isinstance(task.work, SendRecv)) for graph in (whole, parts)]
    assert sent[0] == 2 * sent[1]
    assert collectives(parts) == collectives(whole) + 4
    columns = compile_graph(columns_of(parts))
    assert static.simulate(columns, np.ones(columns.size)).makespan_s > 0


def test_a_run_of_what_is_simulated_only_is_refused_before_launch() -> None:
    asked = SimpleNamespace(evaluation=SimpleNamespace(result=SimpleNamespace(plan=plan(segments=BOTH)), memory=()))
    with pytest.raises(PlanError, match=r"segments.*executable: false"):
        check_runnable(asked, None)  # type: ignore[arg-type]


def test_a_problem_lays_out_plans_that_gather_ahead() -> None:
    """Layouts are shared with the plan of the same computation that has whole states."""
    ahead = plan(tp=2, segments=BOTH, dp=2, zero_stage=1, gather_ahead=True)
    problem = PlanningProblem(model=model(), cluster=cluster_from_profile(load_profile("dgx1-v100-32gb"), 4), global_batch=8)
    assert problem.layout(replace(ahead, global_batch=8)).plan.gather_ahead
    assert not ahead.without_zero().gather_ahead
    assert ahead.without_zero().zero_stage == 0


def test_a_plan_file_with_segments_is_refused_by_run_and_validate_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a traced model, whatever the file itself says of being executable."""
    pytest.importorskip("torch")
    import parsim
    from parsim.errors import ParsimError

    monkeypatch.chdir(tmp_path)
    write_profile(tmp_path)
    tables = {"model": ("name", '"mlp"'), "cluster": ("profile", '"profile.json"'), "plan": ("strategy", '"plan.json"')}
    text = "\n".join(f"[{table}]\n{key} = {value}" for table, (key, value) in tables.items())
    (tmp_path / "run.toml").write_text(f"{text}\n[training]\nglobal_batch = 16\n")
    names = tuple(component.name for component in load_model(ModelSpec(name="mlp")).components)
    made = Plan(
        strategy="dp",
        mesh=Mesh(dp=2),
        stages=(Stage(components=names, ranks=(0, 1)),),
        global_batch=16,
        segments=(names[:2],),
    )
    document = json.loads(made.to_json())
    assert document.pop("executable") is False
    for told in (made.to_json(), json.dumps(document)):
        (tmp_path / "plan.json").write_text(told)
        for command in (parsim.run, parsim.validate):
            with pytest.raises(ParsimError, match="the plan has segments, which parsim simulates and the executor cannot run"):
                command("run.toml", out="out")
    assert not (tmp_path / "out").exists()


# Stages as numbers of layers: a question says them, or its framework counts them out; torchtitan's and Megatron's rules.

COUNTS = st.integers(1, 130)


@given(COUNTS, st.integers(1, 40), st.integers(0, 3), st.integers(0, 3))
def test_stages_with_ends_are_even_and_the_earliest_are_larger(layers: int, stages: int, first: int, last: int) -> None:
    counts = with_ends(layers, stages, first, last)
    if counts is None:
        assert (layers + first + last) // stages < max(1, first, last)
        return
    filled = [*counts]
    filled[0] += first
    filled[-1] += last
    assert sum(counts) == layers
    assert min(counts) >= 0
    assert filled == sorted(filled, reverse=True)
    assert filled[0] - filled[-1] <= 1


@given(COUNTS, st.integers(1, 40))
def test_megatron_cuts_equally_or_takes_one_layer_from_an_end(layers: int, stages: int) -> None:
    counts = as_megatron(layers, stages)
    assert (counts is None) == all((layers + ends) % stages for ends in range(3))
    if counts is not None:
        assert sum(counts) == layers
        assert len(set(counts[1:-1])) <= 1


def stages_of(**settings: Any) -> list[int]:
    """Layers of each stage of an answer for GPT-2 of 12 layers on a pipeline of two."""
    keys = {"plan.strategy": "custom", "plan.mesh": {"pp": 2, "dp": 4}, "plan.microbatches": 4}
    keys |= {key.replace("__", "."): value for key, value in settings.items()}
    plan = parsim.plan("gpt2", cluster="8xh100-sxm", global_batch=64, settings=keys).chosen.plan
    names = ([name.split(".")[1] for name in stage.components if name.startswith("h.")] for stage in plan.stages)
    return [len(set(stage)) for stage in names]


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        ({"software__framework": "megatron"}, [6, 6]),
        ({"software__framework": "torchtitan"}, [6, 6]),
        ({"software__framework": "megatron", "model__args": {"layers": 11}}, [6, 5]),
        ({"software__framework": "torchtitan", "model__args": {"layers": 11}}, [6, 5]),
        ({"plan__stage_layers": [9, 3]}, [9, 3]),
        ({"plan__stage_layers": [12, 0], "software__framework": "megatron"}, [12, 0]),
    ],
)
def test_a_plan_has_the_stages_that_are_counted_out(settings: dict[str, Any], counts: list[int]) -> None:
    assert stages_of(**settings) == counts


def test_layers_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"puts 13 layers into stages, and GPT-2.* has 12"):
        stages_of(plan__stage_layers=[9, 4])


def test_a_cut_that_the_framework_does_not_make_is_assumed_aloud() -> None:
    keys = {"plan.strategy": "custom", "plan.mesh": {"pp": 5}, "software.framework": "megatron", "plan.microbatches": 8}
    answer = parsim.plan("gpt2", cluster="5xh100-sxm", global_batch=64, settings=keys)
    assert "megatron does not cut 12 layers evenly into 5 stages" in " ".join(answer.problem.model.assumptions)


@pytest.mark.parametrize(
    ("stages", "counts"),
    [(4, [16, 16, 16, 13]), (16, [4] * 15 + [1]), (32, [1, *[2] * 30, 0]), (24, None)],
)
def test_layouts_of_recipes_hold_what_no_equal_cut_does(stages: int, counts: list[int] | None) -> None:
    assert rest_in_last(61, stages) == counts


# Under autocast values and gradients are sent as wide as they arrive: 2 bytes where autocast made them.

KEPT = ValueFootprint(bytes_per_sample=400, fixed_bytes=0, saved=True, savers=("b",))
"""A stream that autocast leaves in fp32."""


def sending_model(half: ValueFootprint | None = None) -> Model:
    return Model(
        name="two",
        granularity="block",
        components=(Component(name="a", inputs=("x",), outputs=("y",)), Component(name="b", inputs=("y",), outputs=("z",))),
        values=(
            Value(name="x", producer=None, bytes_per_sample=80, differentiable=False),
            Value(name="y", producer="a", bytes_per_sample=400, storage_bytes_per_sample=800, half=half),
            Value(name="z", producer="b", bytes_per_sample=4),
        ),
        inputs=("x",),
        outputs=("z",),
    )


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp8"])
def test_without_autocast_the_model_is_the_same(precision: str) -> None:
    whole = sending_model()
    assert model_as_sent(whole, precision) is whole


@pytest.mark.parametrize("precision", ["amp_bf16", "amp_fp16"])
def test_what_was_not_recorded_shrinks_to_two_bytes_and_token_ids_do_not(precision: str) -> None:
    sent = model_as_sent(sending_model(), precision)
    assert [value.bytes_per_sample for value in sent.values] == [80, 200, 2]


def test_what_was_recorded_decides() -> None:
    assert model_as_sent(sending_model(KEPT), "amp_bf16").value["y"].bytes_per_sample == 400
    assert model_as_sent(sending_model(replace(KEPT, bytes_per_sample=200)), "amp_bf16").value["y"].bytes_per_sample == 200


@pytest.mark.parametrize("half", [None, KEPT, replace(KEPT, bytes_per_sample=200, savers=())])
def test_memory_counts_the_same_values_afterwards(half: ValueFootprint | None) -> None:
    whole = sending_model(half)
    sent = model_as_sent(whole, "amp_bf16")
    assert model_as_sent(sent, "amp_bf16") is sent
    for before, after in zip(whole.values, sent.values, strict=True):
        expected, found = value_in(before, "amp_bf16"), value_in(after, "amp_bf16")
        assert replace(expected, half=None) == replace(found, half=None)


def test_a_second_forward_that_stops_early_leaves_out_the_last_product_and_no_memory() -> None:
    part = SamplePart(tokens=512, context=512)
    shape = Shape(name="small", layers=2, hidden=1024, heads=8, vocab=32000)
    layer = transformer(shape, replace(EAGER, early_stop=True), part, "layer").component("h.0")
    assert layer.selective is not None
    again = {number for number, _ in layer.selective.operators}
    last = max(number for number, operator in enumerate(layer.operators) if operator.kind == "matmul")
    assert again == set(range(last))
    assert layer.selective.kept == (0, 0)
    assert layer.selective.values == layer.inputs[:1]
    whole = transformer(shape, EAGER, part, "layer")
    early = transformer(shape, replace(EAGER, early_stop=True), part, "layer")
    peaks = []
    for model, recompute in ((whole, ("h.0", "h.1")), (early, ("selective:h.0", "selective:h.1"))):
        cluster = cluster_from_profile(profile_from_parts("a100-sxm-80gb", 1))
        problem = PlanningProblem(
            model=model, cluster=cluster, global_batch=4, numerics=Numerics(precision="bf16", optimizer="adamw_fused")
        )
        plan = Plan(
            strategy="custom",
            mesh=Mesh(),
            stages=(Stage(components=tuple(entry.name for entry in model.components), ranks=(0,)),),
            global_batch=4,
            recompute=recompute,
        )
        peaks.append(problem.memory(plan)[0].total_bytes)
    assert peaks[1] == pytest.approx(peaks[0], rel=0.01)
