"""Segments: runs of components that are recomputed as a whole, with their conversions; and parameters gathered ahead."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from parsim.app.launch import check_runnable
from parsim.engines import static
from parsim.engines.static import compile_graph
from parsim.errors import PlanError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.component import Component, Parameter, Sharding, Value
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.plans.layouts import Placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.predict.problem import PlanningProblem
from parsim.program.columns import columns_of
from parsim.program.lifetimes import KeptActivations
from parsim.program.lower import lower
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import Resource, TaskGraph, to_text
from parsim.program.templates import lower_columns
from parsim.work import Collective, Compute, Phase, SendRecv
from tests.execute.test_bad_run import cpu_profile

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
    (tmp_path / "profile.json").write_text(json.dumps(cpu_profile()))
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
