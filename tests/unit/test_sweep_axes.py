"""What is swept: fields, ranges, samples, and goals; each error teaches."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsim.app.sweep.executing import COLUMNS
from parsim.app.sweep.goal import Goal, parse_goal, sensitivity
from parsim.app.sweep.points import (
    Axis,
    axes_of,
    axis_of,
    check_field,
    grid,
    is_whole,
    known_fields,
    parse_axis,
    saltelli,
    sobol_sample,
)
from parsim.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("cluster.nodes=1,2,4,8", (1, 2, 4, 8)),
        ("training.global_batch=256:4096:x2", (256, 512, 1024, 2048, 4096)),
        ("training.global_batch=256:4000:x2", (256, 512, 1024, 2048)),
        ("cluster.devices=2:8:+2", (2, 4, 6, 8)),
        ("cluster.devices=3:3:+1", (3,)),
        ("plan.strategy=dp,adaptive", ("dp", "adaptive")),
        ("plan.mesh={pp=1, dp=8}, {pp=2, dp=4}", ({"pp": 1, "dp": 8}, {"pp": 2, "dp": 4})),
        ("model.args.hidden=128,256", (128, 256)),
        ("scale.links=0.5:2:x2", (0.5, 1.0, 2.0)),
        ("cluster.profile=dgx1-v100-32gb,dgx2-v100", ("dgx1-v100-32gb", "dgx2-v100")),
        ('cluster.network="infiniband-100g"', ("infiniband-100g",)),
    ],
)
def test_values_of_an_axis(text: str, values: tuple[object, ...]) -> None:
    axis = parse_axis(text)
    assert axis.values == values
    assert [type(value) for value in axis.values] == [type(value) for value in values]
    assert axes_of({axis.key: text.partition("=")[2]})[0].values == values, "a mapping takes the same texts"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cluster.nods=1", "did you mean cluster.nodes"),
        ("nodes=1", "did you mean cluster.nodes"),
        ("scale.memori=2", "did you mean scale.memory"),
        ("cluster.nodes", "KEY=1,2,4"),
        ("cluster.nodes=", "KEY=1,2,4"),
        ("cluster.nodes=8:1:x2", "the range is empty, since 8 > 1"),
        ("cluster.nodes=1:8:x1", "never arrive"),
        ("cluster.nodes=0:8:x2", "never arrive"),
        ("cluster.nodes=1:8:+0", "never arrive"),
        ("cluster.nodes=1:8:twice", "neither x2, +8 nor log"),
        ("cluster.nodes=1:many", "both ends of a range are numbers"),
        ("cluster.nodes=1,,2", "a value between two commas is missing"),
        ("cluster.nodes=1,2,1", "appears twice"),
        ("scale.links=0:1:log", "a factor from 1e-06"),
        ("scale.links=fast", "a factor from 1e-06"),
        ("training.global_batch=1:1000000000:+1", "more than the 100,000"),
    ],
)
def test_an_axis_that_cannot_be_says_why(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_axis(text)
    assert said in str(refused.value)


def test_axes_together() -> None:
    with pytest.raises(ConfigError, match="was given twice"):
        axes_of(["cluster.nodes=1", "cluster.nodes=2"])
    with pytest.raises(ConfigError, match="a key to vary"):
        axes_of([])
    with pytest.raises(ConfigError, match="the list of values is empty"):
        axis_of("cluster.nodes", [])
    with pytest.raises(ConfigError, match="has no step: add one"):
        grid(axes_of(["scale.links=0.5:2"]))
    with pytest.raises(ConfigError, match="1,000,000 of one sweep"):
        grid([Axis(key=key, values=tuple(range(200))) for key in ("a", "b", "c")])


def test_every_key_of_a_run_file_is_a_field() -> None:
    fields = known_fields()
    assert {"cluster.nodes", "training.global_batch", "plan.mesh.tp", "plan.zero_stage", "model.args.*"} <= set(fields)
    for field in fields:
        check_field(field.replace("*", "anything"))
    assert is_whole("training.global_batch")
    assert is_whole("plan.mesh.dp")
    assert not is_whole("training.learning_rate")
    assert not is_whole("scale.links")


def test_a_grid_has_every_combination_the_last_axis_fastest() -> None:
    designed = grid(axes_of({"cluster.nodes": [1, 2], "plan.strategy": ["dp", "mp"]}))
    assert [tuple(entry.values()) for entry in designed] == [(1, "dp"), (1, "mp"), (2, "dp"), (2, "mp")]


@given(low=st.integers(1, 50), span=st.integers(0, 50), seed=st.integers(0, 5), log=st.booleans())
def test_samples_stay_between_the_ends(low: int, span: int, seed: int, log: bool) -> None:
    whole = parse_axis(f"training.global_batch={low}:{low + span}{':log' if log else ''}")
    listed = parse_axis("plan.strategy=dp,mp,hp")
    for entry in sobol_sample([whole, listed], 16, seed):
        assert low <= entry["training.global_batch"] <= low + span
        assert isinstance(entry["training.global_batch"], int)
        assert entry["plan.strategy"] in ("dp", "mp", "hp")


def test_samples_are_even_and_follow_their_seed() -> None:
    axes = axes_of(["cluster.devices=1:4", "plan.strategy=dp,mp", "scale.links=0.25:4:log"])
    first = sobol_sample(axes, 256, 7)
    assert first == sobol_sample(axes, 256, 7)
    assert first != sobol_sample(axes, 256, 8)
    assert set(Counter(entry["cluster.devices"] for entry in first).values()) == {64}
    assert set(Counter(entry["plan.strategy"] for entry in first).values()) == {128}
    assert sum(entry["scale.links"] < 1 for entry in first) == 128, "uniform in the logarithm"


def test_designs_that_cannot_be() -> None:
    one = axes_of(["cluster.devices=1:4"])
    with pytest.raises(ConfigError, match="at least one point"):
        sobol_sample(one, 0, 0)
    with pytest.raises(ConfigError, match="a second --over"):
        saltelli(one, 8, 0)
    pytest.importorskip("SALib")
    with pytest.raises(ConfigError, match="a power of two; use 8"):
        saltelli(axes_of(["scale.links=0.5:2", "scale.compute=0.5:2"]), 10, 0)


def test_sobol_indices_of_a_function_that_is_known() -> None:
    """y = 3 a + b over the unit square: a explains 9 tenths of the variance, alone and in all; a third field nothing."""
    pytest.importorskip("SALib")
    axes = axes_of(["scale.compute=1:2", "scale.links=1:2", "scale.memory=1:2"])
    designed = saltelli(axes, 512, 3)
    assert len(designed) == 512 * 5
    rows = [{"status": "ok", "y": 3 * entry["scale.compute"] + entry["scale.links"]} for entry in designed]
    found = sensitivity(axes, rows, "y", 0)
    assert [share.key for share in found.shares] == ["scale.compute", "scale.links", "scale.memory"]
    assert [share.total for share in found.shares] == pytest.approx([0.9, 0.1, 0.0], abs=0.03)
    assert [share.first for share in found.shares] == pytest.approx([0.9, 0.1, 0.0], abs=0.03)
    broken = [{"status": "failed"} if number == 7 else row for number, row in enumerate(rows)]
    assert sensitivity(axes, broken, "y", 0).left_out == 5
    with pytest.raises(ConfigError, match="only 0 of 512 blocks"):
        sensitivity(axes, [{"status": "failed"}] * len(rows), "y", 0)
    assert sensitivity(axes, [{"status": "ok", "y": 1.0}] * len(rows), "y", 0).shares == ()


ROWS = [
    {"status": "ok", "step_s": 2.0, "epoch_s": 7000.0, "usd_per_epoch": 5.0, "peak_memory_bytes": 2**30, "strategy": "dp"},
    {"status": "ok", "step_s": 1.0, "epoch_s": 7300.0, "usd_per_epoch": 1.0, "peak_memory_bytes": 2**34, "strategy": "mp"},
    {
        "status": "does_not_fit",
        "step_s": 0.5,
        "epoch_s": 10.0,
        "usd_per_epoch": 0.1,
        "peak_memory_bytes": 2**40,
        "strategy": "dp",
    },
    {"status": "failed", "reason": "no"},
]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("min cost where epoch < 2h", 0),
        ("min cost where epoch < 122min", 1),
        ("min cost", 1),
        ("max step_s", 0),
        ("min step where strategy = dp", 0),
        ("min step where strategy != dp and memory < 20 GiB", 1),
        ("min step where status != failed", 2),
        ("min epoch where memory<=1GiB", 0),
        ("min cost where epoch < 1s", None),
        ("minimize price where cost >= 5$", 0),
    ],
)
def test_goals(text: str, number: int | None) -> None:
    assert parse_goal(text, ROWS, list(ROWS[0])).best(ROWS) == number


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must begin with min or max"),
        ("cheapest", "must begin with min or max"),
        ("min", "must begin with min or max"),
        ("min cots", "did you mean cost"),
        ("min cost when epoch < 2h", "after the column comes `where`"),
        ("min cost where", "nothing follows `where`"),
        ("min cost where epoch", "is not a condition"),
        ("min cost where epoch < 2h and", "nothing follows the last `and`"),
        ("min cost where epoch < 2GiB", "'GiB' is not a unit of epoch_s"),
        ("min cost where epoch < soon", "'soon' is not a number with a unit"),
        ("min cost where strategy < dp", "is a text"),
        ("min energy", "the power of the devices is not known"),
        ("min mfu", "no point has a value of mfu"),
        ("min run", "set training.tokens"),
        ("min __import__('os')", "there is no column"),
        ("min cost where 'epoch < 2h", "cannot read"),
        ("min " + "a" * 2000, "characters"),
    ],
)
def test_goals_that_cannot_be_read_teach(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_goal(text, ROWS, list(ROWS[0]))
    assert said in str(refused.value)


@given(
    st.text(max_size=60)
    | st.lists(st.sampled_from(["min", "max", "cost", "where", "and", "<", "=", "2h", "'", "%"])).map(" ".join)
)
def test_any_text_is_a_goal_or_a_message(text: str) -> None:
    said = ""
    try:
        assert isinstance(parse_goal(text, ROWS, list(COLUMNS)), Goal)
    except ConfigError as error:
        said = str(error)
    assert said.startswith("--goal") or not said


def test_points_that_a_measurement_cannot_tell_apart_are_ties() -> None:
    rows = [{"status": status, "step_s": step_s, "memory_limit_bytes": 1} for status, step_s in (
        ("ok", 1.03), ("ok", 1.0), ("ok", 1.04), ("does_not_fit", 1.0), ("ok", 1.0)
    )]  # fmt: skip
    assert parse_goal("min step", rows, ["step_s"]).ties(rows) == [0, 4]
    assert parse_goal("max memory_limit_bytes", rows, ["memory_limit_bytes"]).ties(rows) == [], "not a time"
