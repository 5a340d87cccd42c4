"""Synchronisation as a value: its text and JSON forms, what it refuses, and the keys of a run file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import parsim
from parsim.app import train
from parsim.app.config import parse_config
from parsim.app.launch import (
    check_adaptive,
    check_rounds,
    on_first_graph,
    rounds_in_words,
    steps_per_round,
    whole_periods,
)
from parsim.app.measured import remembered
from parsim.errors import ParsimError, PlanError
from parsim.execute.measurement import Measurement, RankRecord
from parsim.plans.mesh import Mesh
from parsim.plans.mixing import mixing_graph
from parsim.plans.plan import Plan, Stage
from parsim.plans.synchronisation import ALL_REDUCE, Synchronisation, parse_synchronisation

RUN = """
[model]
name = "mlp"
[cluster]
profile = "dgx1-v100-32gb"
devices = 4
[training]
global_batch = 64
[plan]
strategy = "dp"
"""


SLOW = "ada(rounds=2,epochs=2,rate=0.5)"
LOOP = "ada(kind=closed_loop, target=0.01, rounds=4)"
STEPS = "ada(kind=step, start=3, rate=0.5, milestones=1+2, rounds=4, epochs=3)"


@st.composite
def synchronisations(draw: st.DrawFn) -> Synchronisation:
    kind = draw(st.sampled_from(("all_reduce", "average", "gossip", "merge", "stale")))
    if kind == "average":
        outer = draw(st.sampled_from(("none", "sgd", "momentum", "nesterov")))
        rates = st.floats(0.01, 2.0)
        participation = draw(st.floats(0.01, 1.0))
        return Synchronisation(
            kind=kind,
            period_steps=draw(st.integers(1, 1000)),
            outer_optimizer=outer,
            outer_learning_rate=0.0 if outer == "none" else draw(rates),
            outer_momentum=draw(st.floats(0.0, 0.99)) if outer in ("momentum", "nesterov") else 0.9,
            participation=participation,
            seed=draw(st.integers(0, 9)) if participation < 1 else 0,
        )
    if kind == "gossip":
        graphs = ("ring", "exponential", "lattice(neighbours=4)", "ada(rounds=5, epochs=3)", SLOW, STEPS, LOOP)
        ways = ({}, {"push_sum": True}, {"combination": "combine_adapt"})
        way = draw(st.sampled_from(ways))
        period = 1 if "combination" in way else draw(st.integers(1, 9))
        graph = draw(st.sampled_from([graph for graph in graphs if not (graph == LOOP and "push_sum" in way)]))
        return Synchronisation(kind=kind, period_steps=period, graph=graph, **way)
    if kind == "merge":
        merge = draw(st.sampled_from(("half", "running", "staleness", "buffered")))
        given = {"merge_rate": draw(st.floats(0.01, 1.0)), "merge_exponent": draw(st.floats(0.0, 3.0))}
        if merge == "buffered":
            given = {"merge_rate": given["merge_rate"], "merge_buffer": draw(st.integers(1, 4))}
        given = given if merge in ("staleness", "buffered") else {}
        return Synchronisation(kind=kind, period_steps=draw(st.integers(1, 9)), merge=merge, **given)
    if kind == "all_reduce":
        return Synchronisation()
    when = draw(st.sampled_from(({}, {"delays": (2, 0)}, {"delays": (3, 1, 1, 0)}, {"schedule": "ddg"}, {"schedule": "fdg"})))
    backward = draw(st.sampled_from(("stash", "fresh", "replay")))
    return Synchronisation(kind=kind, **when, backward=backward, beta=draw(st.floats(0.0, 1.0)))


def plan_of(rule: Synchronisation, *, dp: int = 4, pp: int = 1, batch: int = 64) -> Plan:
    stages = tuple(Stage(components=(f"c{place}",), ranks=tuple(range(place * dp, (place + 1) * dp))) for place in range(pp))
    return Plan(strategy="custom", mesh=Mesh(dp=dp, pp=pp), stages=stages, global_batch=batch, synchronisation=rule)


@given(rule=synchronisations())
@settings(max_examples=60, deadline=None)
def test_text_and_json_round_trip(rule: Synchronisation) -> None:
    back = parse_synchronisation(str(rule))
    assert back.outer == rule.outer
    assert str(back) == str(rule)
    assert Synchronisation.from_dict(json.loads(json.dumps(rule.to_dict()))) == rule
    if rule.mixes or not rule.is_relaxed:
        plan = plan_of(rule)
        assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("merge/4 merge=staleness:0.6:0.5:0.4", "3 numbers, and takes at most 2"),
        ("merge/4 merge=half:0.6", "1 numbers, and takes none"),
        ("merge/4 merge=buffered:0", "a buffer holds at least one arrival"),
        ("merge/4 merge=buffered:2:0.5:1", "3 numbers, and takes at most 2"),
        ("merge/4 merge=running:1:0.5", "2 numbers, and takes none"),
        ("average/8 outer=nesterov:0.7:0.9:0.1", "3 numbers, and takes at most 2"),
        ("average/8 outer=sgd:inf", "learning rate above 0"),
        ("average/8 outer=sgd:nan", "learning rate above 0"),
        ("average/8 participation=0.5 participation=0.7", "second participation"),
        ("gossip/1 ring torus", "second graph"),
        ("gossip/1 ring push_sum push_sum", "second push_sum"),
        ("gossip/1 ring combination=combine", "did you mean combine_adapt"),
        ("gossip/1 ring push_sum combination=combine_adapt", 'use combination = "adapt_combine" with push_sum'),
        ("average/4 push_sum", "belongs to kind gossip"),
        ("gossip/1 ada(kind=step, milestones=1+b, rounds=4, epochs=3)", "is not a number"),
        ("gossip/1 ada(kind=closed_lop, rounds=4, epochs=3)", "did you mean closed_loop"),
        ("gossip/1 lattice(neighbours=2, neighbours=4)", "neighbours twice"),
        ("average/8 participaton=0.5", "did you mean.*participation"),
        ("average/", "not a synchronisation"),
        ("average/8/2", "not a synchronisation"),
        ("merge/4 merge=staleness:inf", "rate in"),
        ("merge/4 merge=staleness:1:inf", "exponent from 0"),
    ],
)
def test_a_text_with_words_that_would_be_ignored_is_refused(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        parse_synchronisation(text)


def test_a_merge_may_leave_its_last_numbers_out() -> None:
    rule = parse_synchronisation("merge/4 merge=staleness:0.6")
    assert (rule.merge_rate, rule.merge_exponent) == (0.6, 0.5)
    assert parse_synchronisation("merge/4 merge=staleness").merge_rate == 1.0


def test_a_synchronous_plan_is_written_as_before() -> None:
    assert "synchronisation" not in plan_of(ALL_REDUCE).to_dict()
    relaxed = plan_of(Synchronisation(kind="average", period_steps=8))
    assert relaxed.to_dict()["synchronisation"] == {"kind": "average", "period_steps": 8}
    assert "average/8" in relaxed.summary()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"kind": "averge"}, "average"),
        ({"kind": "average", "period_steps": 0}, "1 is after every step"),
        ({"kind": "average", "participation": 0.0}, "above 0"),
        ({"kind": "average", "participation": 1.5}, "at most 1"),
        ({"kind": "average", "seed": 3}, "participation = 1 takes all"),
        ({"kind": "average", "participation": 0.5, "seed": -1}, "seed of draws is at least 0"),
        ({"kind": "all_reduce", "period_steps": 4}, "belongs to kind average or gossip or merge"),
        ({"kind": "gossip"}, "neither a graph nor weights"),
        ({"kind": "gossip", "graph": "rng"}, "ring"),
        ({"kind": "gossip", "graph": "push_sum"}, r"^[^;]*; known: [^;]*$"),
        ({"kind": "average", "outer_optimizer": "adam"}, r"^[^;]*; known: [^;]*$"),
        ({"kind": "gossip", "graph": "lattice(width=3)"}, "neighbours"),
        ({"kind": "gossip", "graph": "ada(rounds=0, epochs=2)"}, "rounds >= 1"),
        ({"kind": "gossip", "graph": "ada(kind=closed_loop, target=0.1, rounds=1, epochs=2)"}, "no epochs"),
        ({"kind": "gossip", "graph": "ada(kind=closed_loop, target=0.1)"}, "rounds >= 1"),
        ({"kind": "average", "outer_learning_rate": 0.5}, "needs an outer_optimizer"),
        ({"kind": "average", "outer_optimizer": "adamm"}, "known"),
        ({"kind": "stale", "delays": (1, -1)}, r"last stage has delay 0.*use for example \[2, 0\]"),
        ({"kind": "stale", "delays": (3, 0)}, "falls by 2"),
        ({"kind": "stale", "delays": (1, 2, 0)}, "falls by 2"),
        ({"kind": "stale", "delays": (2, 0), "schedule": "ddg"}, "in place of schedule = 'ddg'"),
        ({"kind": "stale", "schedule": "ddgg"}, "did you mean ddg"),
        ({"kind": "stale", "backward": "stashed"}, "did you mean stash"),
        ({"kind": "stale", "schedule": "fr", "backward": "fresh"}, "drop one of them"),
        ({"kind": "stale", "beta": 1.5}, r"lies in \[0, 1\]"),
        ({"kind": "average", "beta": 0.5}, "belong to stale stages, and average has none"),
        ({"kind": "merge", "beta": 0.5}, "belongs to kind stale or average or gossip"),
        (
            {"kind": "average", "schedule": "fdg", "participation": 0.5},
            "is not built for stages that are stale",
        ),
        ({"kind": "average", "message_format": "int9"}, "did you mean int8"),
        ({"kind": "average", "period_steps": 8, "fragments": 3}, "must divide it; use period_steps = 9"),
        ({"kind": "average", "period_steps": 4, "fragments": 2, "participation": 0.5}, "drop one of them"),
        ({"kind": "average", "combination": "combine_adapt", "participation": 0.5}, "lets some wait"),
        ({"kind": "gossip", "graph": "ring", "fragments": 2}, "belongs to kind average"),
        ({"kind": "merge", "combination": "combine_adapt"}, "belongs to kind average or gossip"),
        ({"kind": "merge", "period_steps": 0}, "1 is after every step"),
        ({"kind": "merge", "merge": "bufered"}, "did you mean buffered"),
        ({"kind": "merge", "merge": "running", "merge_buffer": 2}, 'merge_buffer belongs to "buffered", not to'),
        ({"kind": "merge", "merge_rate": 0.5}, 'belongs to "staleness" and "buffered"'),
        ({"kind": "merge", "merge": "staleness", "merge_rate": 0.0}, "rate in"),
        ({"kind": "merge", "merge": "staleness", "merge_exponent": float("nan")}, "exponent from 0"),
        ({"kind": "merge", "graph": "ring"}, "belongs to kind gossip"),
        ({"kind": "average", "merge": "running"}, "belongs to kind merge"),
    ],
)
def test_contradictions_are_refused(keys: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Synchronisation.from_dict(keys)


@pytest.mark.parametrize(
    ("rule", "mesh", "words"),
    [
        (Synchronisation(kind="average", weights=((0.5, 0.4),)), {"dp": 2}, "sum to 1"),
        (Synchronisation(kind="gossip", weights=((0.5, 0.5), (0.6, 0.5))), {"dp": 2}, "sum"),
        (Synchronisation(kind="gossip", weights=((1.0, 0.0), (0.0, 1.0))), {"dp": 2}, "connect nothing"),
        (Synchronisation(kind="gossip", weights=((1.0,),)), {"dp": 2}, "2 rows"),
        (Synchronisation(kind="gossip", graph="alone"), {"dp": 4}, "not connected"),
        (
            Synchronisation(kind="gossip", graph="random_directed"),
            {"dp": 4},
            "directed graph random_directed.* push_sum = true",
        ),
        (
            Synchronisation(kind="gossip", push_sum=True, weights=((0.5, 0.5), (0.4, 0.6))),
            {"dp": 2},
            "push-sum needs a column-stochastic matrix",
        ),
        (Synchronisation(kind="gossip", graph="ada(rounds=5, epochs=3, rate=nan)"), {"dp": 4}, "rate must be >= 0"),
        (Synchronisation(kind="gossip", graph="ada(rounds=5, epochs=3, rate=inf)"), {"dp": 4}, "rate must be >= 0"),
        (Synchronisation(kind="gossip", graph="ada(kind=closed_loop, rounds=5)"), {"dp": 4}, "needs a target > 0"),
        (Synchronisation(kind="gossip", graph=LOOP, push_sum=True), {"dp": 4}, "no push_sum"),
        (Synchronisation(kind="gossip", graph=LOOP), {"dp": 4, "pp": 2}, "measures whole replicas"),
        (Synchronisation(kind="gossip", graph=LOOP), {"dp": 2}, "n >= 3"),
        (Synchronisation(kind="gossip", graph="ring"), {"dp": 1}, "at least 2 replicas"),
        (Synchronisation(kind="merge"), {"dp": 1}, "at least 2 replicas"),
        (Synchronisation(kind="merge", merge="buffered", merge_buffer=5), {"dp": 4}, "between 1 and workers, got 4 and 5"),
        (Synchronisation(kind="stale"), {"dp": 2}, "at least 2 stages"),
        (Synchronisation(kind="stale", delays=(4, 2, 0)), {"dp": 2, "pp": 2}, "are of 3 stages, and the mesh has 2"),
    ],
)
def test_a_mesh_that_cannot_be_synchronised_so_is_refused(rule: Synchronisation, mesh: dict[str, int], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan_of(rule, **mesh)


def test_zero_divides_what_replicas_keep_apart() -> None:
    with pytest.raises(PlanError, match="states of their own"):
        Plan(
            strategy="custom",
            mesh=Mesh(dp=2),
            stages=(Stage(components=("c",), ranks=(0, 1)),),
            global_batch=4,
            zero_stage=1,
            synchronisation=Synchronisation(kind="average"),
        )


def test_matrices_are_those_of_the_algorithms() -> None:
    ada = Synchronisation(kind="gossip", graph="ada(start=7, rate=2, rounds=3, epochs=3)")
    assert [ada.mixing.graph(number, 8).settings for number in (0, 2, 3, 6, 99)] == [
        (("neighbours", 7),),
        (("neighbours", 7),),
        (("neighbours", 4),),
        (("neighbours", 2),),
        (("neighbours", 2),),
    ]
    assert ada.mixing.cycle(8) == (0, 3, 6)
    one_peer = Synchronisation(kind="gossip", graph="one_peer_exponential")
    assert one_peer.mixing.cycle(8) == (0, 1, 2)
    np.testing.assert_array_equal(one_peer.matrix(4, 8), mixing_graph("one_peer_exponential", 8)(4))
    half = Synchronisation(kind="average", participation=0.5)
    assert [sum(half.takes_part(number, 4)) for number in range(5)] == [2] * 5
    assert half.matrix(0, 4).sum() == pytest.approx(4)


def test_run_file_keys_make_the_value() -> None:
    table = parse_config(
        RUN
        + """
[plan.synchronisation]
kind = "average"
period_steps = 8
outer_optimizer = "nesterov"
outer_learning_rate = 0.5
participation = 0.5
"""
    )
    expected = Synchronisation(
        kind="average", period_steps=8, outer_optimizer="nesterov", outer_learning_rate=0.5, participation=0.5
    )
    assert table.plan.relaxed == expected
    assert parse_config(table.to_toml()).plan.relaxed == expected
    lattice = 'synchronisation = { kind = "gossip", graph = { name = "lattice", neighbours = 2 } }'
    assert parse_config(RUN + lattice).plan.relaxed.graph == "lattice(neighbours=2)"
    assert parse_config(RUN, ["plan.synchronisation=gossip/2 ring"]).plan.relaxed == Synchronisation(
        kind="gossip", period_steps=2, graph="ring"
    )
    assert parse_config(RUN).plan.relaxed == ALL_REDUCE


def test_what_a_run_cannot_mix_is_refused() -> None:
    rule = Synchronisation(kind="average", period_steps=4)
    check_rounds(plan_of(rule), "fp32", evaluates=True)
    check_rounds(plan_of(ALL_REDUCE, pp=2), "bf16", evaluates=True)
    for precision in ("bf16", "amp_fp16"):
        with pytest.raises(PlanError, match="keeps a loss scale"):
            check_rounds(plan_of(rule), precision)
    with pytest.raises(PlanError, match="no rank has them whole"):
        check_rounds(plan_of(rule, pp=2), "fp32", evaluates=True)
    with pytest.raises(PlanError, match="drop --adaptive"):
        check_adaptive(plan_of(rule))
    assert [steps_per_round(plan_of(entry), 4) for entry in (ALL_REDUCE, rule)] == [4, 4]
    assert steps_per_round(plan_of(Synchronisation(kind="gossip", graph="one_peer_exponential", period_steps=3)), 4) == 6


def test_a_training_is_averaged_over_whole_periods() -> None:
    seen = Measurement(ranks=(RankRecord(rank=0, rounds=[(0.0, float(step_s), 1) for step_s in range(10)]),))
    left_out, together = whole_periods(seen, plan_of(Synchronisation(kind="average", period_steps=4)))
    assert (left_out, together) == (2, 4)
    assert replace(seen, left_out=left_out, together=together).step_s.tolist() == [3.5, 7.5]
    assert whole_periods(seen, plan_of(ALL_REDUCE)) == (0, 1)


def test_a_training_without_a_round_is_told() -> None:
    rule = Synchronisation(kind="average", period_steps=100)
    (told,) = rounds_in_words(plan_of(rule), 40)
    assert "period_steps = 100 is beyond the 40 steps of this training" in told
    assert "mean of 4 separate trainings" in told
    assert rounds_in_words(plan_of(rule), 100) == rounds_in_words(plan_of(ALL_REDUCE), 1) == []


def test_a_graph_that_changes_is_measured_on_its_first() -> None:
    """The predicted step is the mean over all graphs: no run of other shares can be held against it."""
    ada = plan_of(Synchronisation(kind="gossip", period_steps=2, graph="ada(start=7, rate=2, rounds=3, epochs=4)"), dp=8)
    first = on_first_graph(ada)
    assert first.synchronisation == Synchronisation(kind="gossip", period_steps=2, graph="lattice(neighbours=7)")
    assert on_first_graph(first) is first
    assert steps_per_round(first, 4) == 4
    (told,) = rounds_in_words(ada, 12)
    assert "mean over the 24 steps" in told
    assert "this training makes 12" in told
    assert rounds_in_words(ada, 24) == rounds_in_words(first, 12) == []


def test_ada_is_validated_by_the_step_of_its_first_graph_and_its_training_is_not_remembered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Against the mean over dense and sparse graphs, steps on the dense first one are an error that a profile would learn."""
    asked = parsim.plan(
        "mlp",
        cluster="dgx1-v100-32gb",
        devices=4,
        global_batch=4,
        args={"width": 16},
        settings={"plan.synchronisation": "gossip/1 ada(start=3, rate=1.0, rounds=5, epochs=2)"},
    ).prediction
    first = train._on_one_graph(asked)
    assert "measured and predicted on its first graph: gossip/1 lattice(neighbours=3)" in capsys.readouterr().err
    assert first.plan == replace(asked.plan, synchronisation=Synchronisation(kind="gossip", graph="lattice(neighbours=3)"))
    assert first.step_s.median > asked.step_s.median
    assert train._on_one_graph(first) is first
    seen, comparison = (cast(Any, SimpleNamespace(steps=100)) for _ in range(2))
    found = remembered(asked, seen, comparison, plan_changed=False)
    assert found["recorded"] is False
    assert "mean over all graphs of the plan" in found["text"]


def test_the_interval_of_a_closed_loop_spans_its_lattices() -> None:
    loop, sparse, dense = (
        parsim.plan(
            "mlp",
            cluster="dgx1-v100-32gb",
            devices=8,
            global_batch=8,
            args={"width": 16},
            settings={"plan.synchronisation": f"gossip/1 {graph}"},
        ).prediction.evaluation.result
        for graph in (LOOP, "lattice(neighbours=2)", "lattice(neighbours=7)")
    )
    assert sparse.step_s.median < loop.step_s.median < dense.step_s.median
    assert loop.step_s.p05 <= sparse.step_s.p05
    assert loop.step_s.p95 >= dense.step_s.p95
    assert loop.interval_correction is not None
    (note,) = loop.interval_correction.notes
    assert "each of 4 lattices equally often" in note


def test_a_round_follows_the_last_step_of_each_period_and_stages_wait_twice_their_way_to_the_loss() -> None:
    assert [step for step in range(9) if parse_synchronisation("average/3").due(step)] == [2, 5, 8]
    stale = parse_synchronisation("stale")
    assert not any(map(stale.due, range(9)))
    assert [stale.delay_of(stage, 4) for stage in range(4)] == [6, 4, 2, 0]
    assert stale.steps_to_fill(4) == 6


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([100, 100], r"2 sizes that sum to 200, and 2 replicas share \d+ samples"),
        ([1000, 300, 197], r"3 sizes that sum to 1497, and 2 replicas"),
        ([1497, 0], "a replica without samples"),
    ],
)
def test_shards_that_are_not_the_data_are_refused_when_planning(shards: list[int], message: str) -> None:
    pytest.importorskip("torch")
    settings = {"training.shards": shards, "plan.synchronisation": "average/8", "plan.mesh": {"dp": 2}}
    with pytest.raises(ParsimError, match=message):
        parsim.plan("mlp", cluster="2xh100-sxm", global_batch=32, settings=settings)


def test_shards_do_not_hide_that_nothing_fits(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    profile = json.loads((Path(__file__).parents[2] / "hardware_profiles" / "dgx1-v100-32gb.json").read_text())
    profile["device_types"]["V100-SXM2"]["memory_bytes"]["value"] = 735e6  # its context takes 734 MB
    (tmp_path / "small.json").write_text(json.dumps(profile))
    answer = parsim.plan("mlp", str(tmp_path / "small.json"), global_batch=32, settings={"training.shards": [100, 100]})
    assert not answer.fits
    assert "No plan fits" in answer.sentence()
