"""Calibration: pure statistics against known parameters, and a real quick calibration of this machine."""

from __future__ import annotations

import gzip
import json
import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from calibration.fit.build_profile import build_profile, device_entries, optimizer_points, shard_points
from calibration.fit.drift import estimate_drift, other_share
from calibration.measure.collectives import (
    COLLECTIVES,
    LARGE_BYTES,
    LARGE_EVERY,
    Bench,
    CollectiveItem,
    chain_of,
    collective_groups,
    items_of_round,
    make_bench,
    scratch_bytes,
    transfer_pairs,
)
from calibration.measure.components import DTYPES, make_case, optimizer_cases, sweep_record
from calibration.measure.overlap import beside_steps, measure_overlap
from calibration.measure.shards import ShardChoice, run_parts, sweeps_of, useful_batches, useful_cuts
from calibration.rounds.calibrate import CalibrationRequest, calibrate, refit, stopped_points, unfitted_path, warning_lines
from calibration.rounds.environment import core_count
from calibration.rounds.refresh import refresh
from calibration.rounds.request import SIZES_BYTES, RawPoints, active_levels, load_raw, raw_path, save_raw
from calibration.rounds.turns import CalibrationSection, SectionProgress, next_section
from experiments.common.forked import run_ranks
from parsim.app.doctor import Found, Gpu
from parsim.errors import ConfigError, CostError, ExecutionError, ProfileError
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import save_profile
from parsim.hardware.records import ComponentPoint
from parsim.hardware.speed_factor import speed_since
from parsim.model.build import build_module
from parsim.model.component import narrow
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.program.taskgraph import work_text
from parsim.units import GIB
from parsim.work import COLLECTIVES as OPERATIONS

MLP = ModelSpec(name="mlp", args=(("width", 64),), input_shape=(1, 32, 32))
GPT = ModelSpec(name="gpt_small", args=(("layers", 2),))
REQUEST = CalibrationRequest(models=((MLP, (4, 8)),), quick=True)


# --- the request ------------------------------------------------------------------------------------------------------


def test_request_round_trips_as_json() -> None:
    request = CalibrationRequest(
        models=((MLP, (8, 4)), (GPT, (2,))),
        nproc=4,
        optimizers=("adam", "sgd"),
        sizes_bytes=(1024,),
        granularities=("block", "sublayer"),
        shard_ways=(2,),
    )
    assert CalibrationRequest.from_json(request.to_json()) == request
    assert [(spec.name, granularity) for spec, _, granularity in request.measured_models] == [
        ("mlp", "block"),
        ("gpt_small", "block"),
        ("mlp", "sublayer"),
        ("gpt_small", "sublayer"),
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": "cudo"}, "cuda"),
        ({"precision": "fp16"}, "fp32 or fp64"),
        ({"nproc": 0}, "nproc must be >= 1"),
        ({"models": ()}, "no model"),
        ({"models": ((MLP, ()),)}, "local batches"),
        ({"models": ((MLP, (0,)),)}, "local batches"),
        ({"optimizers": ()}, "sgd_momentum"),
        ({"sizes_bytes": (4,)}, ">= 8 bytes"),
        ({"min_rounds": 9, "max_rounds": 2}, "min_rounds"),
        ({"granularities": ()}, "such as block"),
        ({"shard_ways": (2, 1)}, "at least 2 shards"),
    ],
)
def test_bad_requests_teach(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CalibrationRequest(**{"models": ((MLP, (4,)),), **change})


def test_unknown_optimizer_and_missing_folder_are_refused_before_measuring(tmp_path: Path) -> None:
    bad = CalibrationRequest(models=((MLP, (4,)),), optimizers=("adamx",))
    with pytest.raises(ConfigError, match="adamw"):
        calibrate(bad, tmp_path / "p.json")
    with pytest.raises(ConfigError, match="no folder"):
        calibrate(REQUEST, tmp_path / "none" / "p.json")
    assert list(tmp_path.iterdir()) == []


def test_levels_groups_and_pairs() -> None:
    assert active_levels(1, 2) == (1,)
    assert active_levels(2, 2) == (1, 2)
    assert active_levels(4, 2) == (1, 2)
    assert active_levels(4, 16) == (1, 4)
    assert collective_groups(1) == ()
    assert collective_groups(4) == ((0, 1), (0, 1, 2), (0, 1, 2, 3))
    assert transfer_pairs(2, 2) == ((0, 1), (1, 0))
    assert transfer_pairs(4, 2) == ((0, 1), (1, 0), (0, 2), (2, 0))
    assert transfer_pairs(1, 2) == ()


def test_every_large_size_is_measured_once_in_four_rounds_and_small_ones_in_each() -> None:
    items = [CollectiveItem(operation, (0, 1), size) for size in SIZES_BYTES for operation in COLLECTIVES]
    rounds = [items_of_round(items, number) for number in range(LARGE_EVERY)]
    for item in items:
        assert sum(item in chosen for chosen in rounds) == (1 if item.size_bytes > LARGE_BYTES else LARGE_EVERY)
    assert max(SIZES_BYTES) == 256 * 1024 * 1024
    assert min(SIZES_BYTES) == 1024


@given(st.sampled_from([3, 5, 1000, 65_537, 20_000_000]), st.sampled_from(["fp32", "fp64"]))
def test_arrays_to_send_are_aligned_apart_and_fit(size_bytes: int, precision: str) -> None:
    """The three of a chain lie side by side in what `scratch_bytes` asks for."""
    import torch

    dtype = DTYPES[precision]
    room = torch.empty(scratch_bytes(size_bytes) // dtype.itemsize, dtype=dtype)
    bench = Bench(rank=0, world_size=1, device=torch.device("cpu"), dtype=dtype, cores=1, dp={}, sends={}, scratch=room)
    count = bench.elements(size_bytes)
    item = CollectiveItem("all_reduce", (0, 1), size_bytes)
    chain = [own.array(count) for own in chain_of(bench, item)]
    assert len(chain) == item.chain
    begins = [array.data_ptr() - room.data_ptr() for array in chain]
    assert all(begin % 64 == 0 for begin in begins)
    assert all(array.numel() == count for array in chain)
    assert all(later - earlier >= count * dtype.itemsize for earlier, later in pairwise(begins))


def _exchanges(rank: int) -> int:
    """Everything that is measured, at sizes that do not divide evenly too; returns how many calls there were."""
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD
    assert group is not None
    made = 0
    for size_bytes in (4, 1000, 1024, 65_552):
        room = torch.ones(scratch_bytes(size_bytes) // 4, dtype=torch.float32)
        bench = Bench(
            rank=rank, world_size=2, device=torch.device("cpu"), dtype=room.dtype, cores=2, dp={}, sends={}, scratch=room
        )
        for prepare in COLLECTIVES.values():
            prepare(bench, size_bytes, group)()
            made += 1
    return made


def test_every_operation_runs_at_every_size(tmp_path: Path) -> None:
    assert run_ranks(_exchanges, 2, tmp_path) == [4 * len(COLLECTIVES)] * 2


def test_who_used_the_least_of_its_time_is_next() -> None:
    def section(name: str, budget_s: float, min_rounds: int, max_rounds: int = 40) -> CalibrationSection:
        return CalibrationSection(
            name=name, budget_s=budget_s, min_rounds=min_rounds, max_rounds=max_rounds, measure=lambda _: {}
        )

    sections = [section("a", 10.0, 3), section("b", 40.0, 1, 9)]
    spent: dict[str, SectionProgress] = {}
    order = []
    while (chosen := next_section(sections, spent)) is not None:
        name = sections[chosen].name
        done = spent.get(name, SectionProgress())
        spent[name] = SectionProgress(done.rounds + 1, done.seconds + {"a": 2.0, "b": 4.0}[name])
        order.append(name)
    assert spent == {"a": SectionProgress(5, 10.0), "b": SectionProgress(9, 36.0)}
    for turn in range(1, len(order)):
        shares = [order[:turn].count("a") * 2.0 / 10.0, order[:turn].count("b") * 4.0 / 40.0]
        assert abs(shares[0] - shares[1]) <= 0.2 + 1e-9
    slow = [section("a", 1.0, 3)]
    assert next_section(slow, {"a": SectionProgress(2, 50.0)}) == 0
    assert next_section(slow, {"a": SectionProgress(3, 75.0)}) is None


# --- one rank, in this process ----------------------------------------------------------------------------------------


def test_measuring_trains_exactly_as_plain_torch_does() -> None:
    """Four measured steps leave the weights that four plain SGD steps on the mean loss leave (float64)."""
    import torch

    request = CalibrationRequest(models=((MLP, (6,)),), precision="fp64")
    case = make_case(0, MLP, load_model(MLP), 6, request, torch.device("cpu"))
    optimizers = optimizer_cases(case.stage, ("sgd_momentum", "adam"))
    records, batches = [], []
    for number in range(4):
        batches.append(case.batch())
        records.append(sweep_record(case, case.step()))
        optimizers[number % len(optimizers)].step()
    torch.manual_seed(request.seed)
    module = build_module(MLP).double().train()
    from calibration.measure.components import LEARNING_RATE

    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(batch["input:0"]), batch["target"]).backward()
        optimizer.step()
    for name, parameter in module.named_parameters():
        assert torch.allclose(case.stage.parameters[name], parameter, rtol=0, atol=1e-12), name
    for record in records:
        assert len(record["seconds"]) == len(case.graph.tasks)
        assert sum(record["seconds"]) <= record["wall_s"]
        assert min(record["seconds"]) >= 0


def test_optimizer_cases_tell_a_step_from_its_arrays_and_elements() -> None:
    """A step of 240 us, 28 us per array and 0.2 ns per element is priced so where ZeRO leaves one array, which is far from
    what the model's own arrays took. Without the flat array nothing tells the step from the arrays."""
    import torch

    from parsim.costs.compute.compute import measured_optimizer
    from parsim.hardware.records import OptimizerPoint
    from parsim.work import OptimizerStep

    request = CalibrationRequest(models=((MLP, (2,)),))
    case = make_case(0, MLP, load_model(MLP), 2, request, torch.device("cpu"))
    cases = optimizer_cases(case.stage, ("sgd",))
    whole, first, second, flat = cases
    assert whole.elements == load_model(MLP).parameter_count == first.elements + second.elements
    assert whole.tensors == first.tensors + second.tensors
    assert (flat.elements, flat.tensors) == (-(-whole.elements // 2), 1)

    def took_s(work: OptimizerStep) -> float:
        return 240e-6 + 28e-6 * work.tensors + 2e-10 * work.elements

    works = [OptimizerStep(elements=one.elements, tensors=one.tensors) for one in cases]
    same = {"optimizer": "sgd", "device_type": "cpu", "spread": 0.0, "repeats": 9, "source": "optimizer_steps"}
    points = [
        OptimizerPoint(elements=work.elements, tensors=work.tensors, seconds=took_s(work), **same)  # type: ignore[arg-type]
        for work in works
    ]
    asked = OptimizerStep(elements=whole.elements // 4, tensors=1)
    assert measured_optimizer(asked, "sgd", points, 1, ("drift", 0.1)).median_s == pytest.approx(took_s(asked))
    assert measured_optimizer(asked, "sgd", points[:3], 1, ("drift", 0.1)).median_s < 0.5 * took_s(asked)


def test_optimizers_take_as_much_longer_inside_a_step_as_the_whole_one() -> None:
    """sgd takes 4 ms inside and 2 ms apart, so a part of 60% that takes 1 ms apart counts 1.2 ms more; adam has its turn, 2 ms
    inside against 3 ms apart, so a part takes two thirds; adamw had none and is treated as sgd."""
    sweep = {"model": 0, "samples": 4, "ranks_active": 1, "round": 0, "optimizer": "sgd", "seconds": [4e-3]}
    another = {**sweep, "optimizer": "adam", "seconds": [2e-3]}
    apart = {"model": 0, "samples": 4, "ranks_active": 1, "round": 0}
    steps = [
        {**apart, "optimizer": name, "elements": elements, "tensors": 2, "seconds": seconds}
        for name, elements, seconds in (
            ("sgd", 100, 2e-3),
            ("sgd", 60, 1e-3),
            ("adam", 100, 3e-3),
            ("adam", 60, 1.5e-3),
            ("adamw", 100, 3e-3),
        )
    ]
    raw = {
        "ranks": [{"sweeps": [sweep, another], "optimizers": steps}],
        "cases": [{"model": 0, "samples": 4, "tasks": ["optimizer 100 elements in 2"]}],
    }
    request = CalibrationRequest(models=((MLP, (4,)),), optimizers=("sgd", "adam", "adamw"))
    points = {(p.optimizer, p.elements): p for p in optimizer_points(raw, request, "cpu-core", estimate_drift([]))}
    assert points["sgd", 100].seconds == pytest.approx(4e-3)
    assert points["sgd", 60].seconds == pytest.approx(2.2e-3)
    assert points["adam", 100].seconds == pytest.approx(2e-3)
    assert points["adam", 60].seconds == pytest.approx(1e-3)
    assert points["adamw", 100].seconds == pytest.approx(5e-3)
    assert (points["sgd", 100].source, points["sgd", 60].source) == ("steps", "optimizer_steps")


def synthetic_raw(request: CalibrationRequest) -> dict[str, Any]:
    """What the ranks would leave if every task took (place in the graph + 1) ms, twice that with two ranks active."""
    import torch

    model = load_model(MLP)
    cases, sweeps = [], []
    for samples in request.models[0][1]:
        case = make_case(0, MLP, model, samples, request, torch.device("cpu"))
        texts = [work_text(task.work) for task in case.graph.tasks]
        cases.append({"model": 0, "samples": samples, "tasks": texts})
        for active in (1, 2):
            for number in range(5):
                place = {"model": 0, "samples": samples, "ranks_active": active, "round": number, "optimizer": "sgd_momentum"}
                seconds = [1e-3 * active * (place + 1) for place in range(len(texts))]
                sweeps.append({**place, "seconds": seconds, "gap_s": 2e-5, "rest_s": 3e-4, "wall_s": 1.0, "cpu_s": 0.75})
    facts = {"name": "x", "memory_bytes": 8e9, "context_bytes": 2e8, "peak_flop_per_s": 9e10, "copy_bytes_per_s": 2e10}
    entry = {"model": 0, "samples": 4, "ranks_active": 2, "round": 0}
    steps = [{**entry, "optimizer": "sgd_momentum", "elements": 100, "tensors": 2, "seconds": 1e-4}]
    collectives = [
        {"operation": operation, "group": [0, 1], "size_bytes": size, "round": 0, "seconds": [[1e-4 + 1e-9 * size] * 3] * 5}
        for operation in ("all_reduce", "send_recv")
        for size in (1024, 65536, 1 << 20, 1 << 22)
    ]
    environment = {"processor": "P", "cores": 2, "affinity": [0, 1], "system": "Linux", "versions": {"torch": "2"}}
    overlap = {"model": 0, "samples": 4, "operation": "all_reduce", "group_size": 2, "size_bytes": 4096, "round": 0}
    own = {"sweeps": sweeps, "optimizers": steps, "shards": [], "device": facts}
    sent = {"collectives": collectives, "overlap": [{**overlap, "computation": [1.2, 1.4], "communication_s": [1e-3]}]}
    return {"ranks": [{**own, **sent}, own], "cases": cases, "environment": environment}


def points_of(raw: dict[str, Any]) -> RawPoints:
    return RawPoints(raw=raw, request=REQUEST, models=[load_model(MLP)], created="now", command="c", name="p")


@pytest.mark.parametrize(
    ("pinned", "count", "named"),
    [
        ([("a", 3), ("a", 5)], 2, [None, None]),
        ([("a", 3), ("a", 5), ("a", 3), ("a", 5)], 2, [3, 5, 3, 5]),
        ([("a", None)] * 4, 4, [None] * 4),
        ([("a", 0), ("b", 0)], 2, [None, None]),
    ],
    ids=["a core each", "crowded", "not pinned, as on a GPU", "one core each of two hosts"],
)
def test_ranks_beyond_the_cores_name_the_core_they_are_pinned_to(
    pinned: list[tuple[str, int | None]], count: int, named: list[int | None]
) -> None:
    pinnings = [{"host": host, "core": core} for host, core in pinned]
    assert core_count(pinnings) == count
    assert [entry.core for entry in device_entries(pinnings, "x")] == named


def test_profile_holds_exactly_what_was_measured(tmp_path: Path) -> None:
    raw = json.loads(json.dumps(synthetic_raw(REQUEST)))
    profile = build_profile(points_of(raw))
    save_profile(profile, tmp_path / "p.json")
    assert load_profile(str(tmp_path / "p.json")) == profile
    texts = raw["cases"][0]["tasks"]
    for point in profile.compute.components:
        place = texts.index(f"{point.phase} {point.component} x4")
        assert point.seconds == pytest.approx(1e-3 * point.ranks_active * (place + 1), rel=1e-9)
        assert point.spread == pytest.approx(0.0, abs=1e-12)
        assert point.repeats == 10
    assert {point.source for point in profile.compute.optimizers} == {"steps", "optimizer_steps"}
    assert profile.host is not None
    assert (profile.host.task_s, profile.host.step_s) == (2e-5, 3e-4)
    assert profile.overlap is not None
    assert profile.overlap.compute_factor == pytest.approx(1.3)
    assert len(profile.devices) == 2
    assert other_share(raw) == pytest.approx(0.25)
    assert profile.provenance.warnings == [
        "other programs had 25.0% of the cores meanwhile; for a quiet machine, calibrate again"
    ]
    assert check_complete(profile, REQUEST) == 2 * 2 * 2 * len(load_model(MLP).components)


def test_raw_points_give_the_profile_again_bit_for_bit(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    raw = synthetic_raw(REQUEST)
    for sweep in raw["ranks"][0]["sweeps"]:
        sweep["seconds"] = [float(value * rng.uniform(1.0, 1.3)) for value in sweep["seconds"]]
    points = points_of(raw)
    path = tmp_path / "p.json"
    save_profile(build_profile(points), path)
    save_raw(points, raw_path(path))
    assert [entry.name for entry in sorted(tmp_path.iterdir())] == ["p.json", "p.raw.json.gz"]
    written = path.read_bytes()
    path.write_text("{}")
    refit(path)
    assert path.read_bytes() == written
    packed = raw_path(path).read_bytes()
    save_raw(load_raw(raw_path(path)), raw_path(path))
    assert raw_path(path).read_bytes() == packed


def test_what_the_machine_did_meanwhile_is_kept_and_what_casts_doubt_is_said() -> None:
    def state(hz: float, idle: int, steal: int) -> dict[str, Any]:
        return {"core_hz": {"0": hz, "1": hz}, "ticks": {"user": 0, "idle": idle, "steal": steal}, "load_average": [0.5]}

    raw = synthetic_raw(REQUEST)
    for rank in raw["ranks"]:
        rank["pinning"] = {"core": 0, "threads": 1, "shared_by": 1}
        for sweep in rank["sweeps"]:
            sweep["cpu_s"] = 0.99
    calm = {**raw, "states": [[state(2e9, 0, 0), state(2.1e9, 1000, 1)]]}
    profile = build_profile(points_of(calm))
    assert profile.provenance.warnings == []
    kept = profile.provenance.environment
    assert kept["stolen_share"] == pytest.approx(1 / 1001)
    assert kept["other_share"] == pytest.approx(0.01)
    assert kept["ranks"] == [{"core": 0, "threads": 1, "shared_by": 1}] * 2
    uneasy = {**raw, "states": [[state(2e9, 0, 0), state(2e9, 90, 10)], [state(2e9, 90, 10), state(2.5e9, 990, 10)]]}
    assert build_profile(points_of(uneasy)).provenance.warnings == [
        "the host of this virtual machine gave 10.0% of the cores' time to others meanwhile",
        "the clock went from 2.00 to 2.50 GHz; times hold for neither",
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "written by `parsim calibrate`"),
        (b"no gzip", "cannot read"),
        (gzip.compress(b'{"schema_version": 9}', mtime=0), "schema_version must be 2, got 9"),
    ],
)
def test_raw_points_that_cannot_be_used_are_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "p.json"
    path.write_text("old")
    if content is not None:
        raw_path(path).write_bytes(content)
    with pytest.raises(ProfileError, match=words):
        refit(path)
    assert path.read_text() == "old"


# --- shards -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_shards_worth_measuring() -> None:
    """Both layers of the GPT do the same work: one of each kind is cut, by every rule, as often as the ranks allow."""
    model = load_model(GPT, granularity="sublayer")
    rules = {component.name: [entry.rule for entry in component.shardings] for component in model.components}

    def cuts(**changes: Any) -> list[ShardChoice]:
        return useful_cuts([model], CalibrationRequest(models=((GPT, (4,)),), **changes))[0]

    four = cuts(nproc=4)
    assert {cut.ways for cut in four} == {2, 4}
    assert {(cut.component, cut.rule) for cut in four if cut.component == "h.0.attn"} == {("h.0.attn", "heads+row")}
    assert not any(cut.component.startswith("h.1") for cut in four)
    assert {cut.rule for cut in four if cut.component == "lm_head"} == set(rules["lm_head"])
    assert cuts(nproc=1) == cuts(nproc=3) == []
    quick = cuts(nproc=4, quick=True)
    assert {cut.ways for cut in quick} == {2}
    assert len({cut.component for cut in quick}) == len(quick) > 0
    assert set(quick) <= set(four)
    assert useful_batches([1, 2, 4, 8], quick=False) == (1, 4, 8)
    assert useful_batches([8, 2], quick=False) == (2, 8)
    assert useful_batches([1, 2, 4, 8], quick=True) == (8,)


def test_shards_compute_their_piece_and_leave_the_module_as_it_was() -> None:
    import torch

    from parsim.execute.rank_run import make_streams
    from parsim.model.autograd.cut import forward_component
    from parsim.work import Phase

    request, cpu = CalibrationRequest(models=((GPT, (2,)),), precision="fp64"), torch.device("cpu")
    model = load_model(GPT, granularity="sublayer")
    case = make_case(0, GPT, model, 2, request, cpu)
    weights = {name: tensor.clone() for name, tensor in case.stage.module.named_parameters()}
    sweeps = sweeps_of(
        case,
        [ShardChoice("lm_head", "column", 2), ShardChoice("lm_head", "column", 4), ShardChoice("h.0.attn", "heads+row", 2)],
    )
    assert [[part.cut for part in parts] for parts in sweeps] == [
        [ShardChoice("lm_head"), ShardChoice("h.0.attn")],
        [ShardChoice("lm_head", "column", 2), ShardChoice("h.0.attn", "heads+row", 2)],
        [ShardChoice("lm_head", "column", 4)],
    ]
    streams = make_streams(cpu)
    for parts in sweeps:
        run_parts(parts, streams)
        assert all(part.seconds[phase] > 0 for part in parts for phase in (Phase.FORWARD, Phase.BACKWARD))
    whole, half, quarter = (parts[0] for parts in sweeps)
    whole.install()
    (logits,) = forward_component(whole.runnable, whole.inputs)[0]
    for part, ways in ((half, 2), (quarter, 4)):
        part.install()
        (piece,) = forward_component(part.runnable, part.inputs)[0]
        assert torch.allclose(piece, logits[..., : logits.shape[-1] // ways], rtol=0, atol=1e-12)
        assert all(parameter.grad is not None for _, _, parameter in part.state if isinstance(parameter, torch.nn.Parameter))
    for part in sweeps[0]:
        part.install()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in case.stage.module.named_parameters())


def test_a_shard_takes_its_share_of_what_the_whole_takes_in_a_step() -> None:
    """Beside a whole of 2 and 4 ms the shard took 1 and 2 (half), and once by accident 4 ms."""
    model = load_model(MLP)
    first = model.components[0]
    base = ComponentPoint(
        fingerprint=first.fingerprint,
        model="mlp",
        component=first.name,
        phase="forward",
        samples=4,
        device_type="cpu-core",
        precision="fp32",
        ranks_active=2,
        seconds=3e-3,
        spread=0.01,
        repeats=9,
        source="steps",
    )
    rule = first.shardings[0].rule
    parts = [
        [first.name, rule, 2, "forward", seconds, whole_s] for seconds, whole_s in ((1e-3, 2e-3), (2e-3, 4e-3), (4e-3, 4e-3))
    ]
    entry = {"model": 0, "samples": 4, "round": 0, "ranks_active": 2}
    raw = {"ranks": [{"shards": [{**entry, "parts": [part]} for part in parts]}]}
    (point,) = shard_points(raw, [model], [base])
    assert point.seconds == pytest.approx(1.5e-3)
    assert point.fingerprint == narrow(first, rule, 2).fingerprint != first.fingerprint
    assert (point.component, point.repeats, point.source) == (f"{first.name} shard:{rule}/2", 3, "shards")


def check_complete(profile: Any, request: CalibrationRequest) -> int:
    """Every (component, phase, batch, active ranks) has one point, with a positive median, or is said to be left out, as one
    may be on a busy machine; returns how many there are."""
    points = profile.compute.components
    keys = {(p.fingerprint, p.model, p.component, p.phase, p.samples, p.ranks_active) for p in points}
    assert len(keys) == len(points)
    for spec, batches in request.models:
        model = load_model(spec)
        for component in model.components:
            for phase in ("forward", "backward"):
                for samples in batches:
                    named = f"left out {phase} of {component.name} of {model.name} at {samples} samples"
                    said = any(named in warning for warning in profile.provenance.warnings)
                    for active in active_levels(request.nproc, 2):
                        assert said or (component.fingerprint, model.name, component.name, phase, samples, active) in keys
    assert all(point.seconds > 0 and point.spread >= 0 for point in points)
    return len(points)


# --- this machine -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_quick_calibration_of_this_machine(tmp_path: Path, nproc: int) -> None:
    request = CalibrationRequest(models=((MLP, (4, 8)),), nproc=nproc, quick=True, compute_budget_s=1.0)
    lines: list[str] = []
    calibrate(request, tmp_path / "here.json", on_line=lines.append)
    profile = load_profile(str(tmp_path / "here.json"))
    check_complete(profile, request)
    assert profile.name == "here"
    assert len(profile.devices) == nproc
    operations = {*COLLECTIVES, "send_recv"}
    assert {fit.operation for fit in profile.communication.fits} == (set() if nproc == 1 else operations)
    assert any(point.source == "shards" for point in profile.compute.components) == (nproc > 1)
    assert (profile.overlap is None) == (nproc == 1)
    whole = load_model(MLP).parameter_count
    assert {whole} < {point.elements for point in profile.compute.optimizers}
    assert any("components: round 3" in line for line in lines)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here.json", "here.raw.json.gz"]
    environment = profile.provenance.environment
    assert len(environment["ranks"]) == nproc
    assert os.uname().nodename not in json.dumps(environment)
    assert str(tmp_path) not in json.dumps(environment)
    assert environment["seconds"] > 0
    assert profile.noise is not None
    assert profile.noise.probe is not None
    assert 0.2 < profile.noise.probe.together / profile.noise.probe.alone < 5
    assert all(state["ticks"] for state in environment["sessions"][0].values())
    written = (tmp_path / "here.json").read_bytes()
    refit(tmp_path / "here.json")
    assert (tmp_path / "here.json").read_bytes() == written
    today = refresh(tmp_path / "here.json", seconds=0.5)
    assert 0.2 < speed_since(today).mean < 5
    assert load_profile(str(tmp_path / "here.json")) == today
    assert today.model_copy(update={"today": None}) == profile


@pytest.mark.parametrize("error", [ProfileError("too much contradicts"), CostError("there is no fit")])
def test_raw_points_outlive_a_fit_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A machine may be there once. What it measured stays beside the profile that was there, and can be fitted by mended
    code."""
    raw = json.loads(json.dumps(synthetic_raw(REQUEST)))

    def fails(points: RawPoints) -> None:
        raise error

    monkeypatch.setattr("calibration.rounds.calibrate.gather_raw", lambda _: raw)
    monkeypatch.setattr("calibration.rounds.calibrate.build_profile", fails)
    out = tmp_path / "here.json"
    out.write_text("old")
    with pytest.raises(type(error), match=str(error)) as caught:
        calibrate(REQUEST, out, launcher=lambda *_, **__: None)
    assert out.read_text() == "old"
    kept = unfitted_path(out)
    assert kept.name == "here.unfitted.raw.json.gz"
    assert isinstance(caught.value, CostError) or kept.name in str(caught.value)
    found = load_raw(kept)
    assert (found.raw["ranks"], found.request) == (raw["ranks"], REQUEST)


def test_what_a_stopped_calibration_measured_can_be_kept_elsewhere(tmp_path: Path) -> None:
    """A rank that dies, or a budget that ends, leaves turns in a folder which does not travel."""
    out, raw = tmp_path / "here.json", json.loads(json.dumps(synthetic_raw(REQUEST)))
    assert stopped_points(REQUEST, out) is None
    start = {**raw, "ranks": [{"device": rank["device"]} for rank in raw["ranks"]]}
    turn = {"section": "components", "round": 0, "time_s": 0.0, "seconds": 1.0}
    sweeps = [{"sweeps": rank["sweeps"]} for rank in raw["ranks"]]

    def dies(job_path: Path, nproc: int, **_: object) -> None:
        (job_path.parent / "start.json").write_text(json.dumps(start))
        (job_path.parent / "turn-00000.json").write_text(json.dumps({**turn, "ranks": sweeps}))
        raise ExecutionError("rank 0 was killed")

    with pytest.raises(ExecutionError, match="what was measured is kept, call again to continue"):
        calibrate(REQUEST, out, launcher=dies)
    stopped = stopped_points(REQUEST, out)
    assert stopped is not None
    assert len(stopped.raw["ranks"][0]["sweeps"]) == len(raw["ranks"][0]["sweeps"])
    save_raw(stopped, tmp_path / "kept.raw.json.gz")
    assert load_raw(tmp_path / "kept.raw.json.gz").models == stopped.models


@pytest.mark.slow
def test_a_failing_rank_leaves_no_file_and_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that are gone when the ranks begin: they fail, the old profile stays."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    gone = Gpu(name="NVIDIA X", free_bytes=79 * GIB, total_bytes=80 * GIB, capability=(9, 0))
    there = Found(torch=torch.__version__, cuda_build="13.0", backends=("gloo", "nccl"), gpus=(gone, gone))
    monkeypatch.setattr("calibration.rounds.calibrate.look_apart", lambda: there)
    out = tmp_path / "here.json"
    out.write_text("old")
    with pytest.raises(ExecutionError, match="GPU"):
        calibrate(CalibrationRequest(models=((MLP, (4,)),), device="cuda", quick=True), out)
    assert out.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["here.json"]


def test_what_cannot_be_refreshed_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a file; --refresh takes a profile that `parsim calibrate` wrote"):
        refresh(tmp_path / "dgx1-v100-32gb")
    published = tmp_path / "published.json"
    save_profile(load_profile("dgx1-v100-32gb"), published)
    with pytest.raises(ConfigError, match="does not say how fast the cores were"):
        refresh(published)


# What a calibration runs beside training steps.

SMALL_MLP = ModelSpec(name="mlp", args=(("width", 24),))
SIZE_BYTES = 2**16


def test_only_collectives_that_can_be_called_run_beside_steps() -> None:
    """Plans of context parallelism send ring shifts, which no calibration calls; a thorough one looked for their call."""
    bench: Any = SimpleNamespace(scratch=torch.empty(2**28, device="meta"), dtype=torch.float32)
    beside = {operation for operation, _ in beside_steps(bench, quick=False)}
    assert beside == set(COLLECTIVES) & set(OPERATIONS)
    assert {"all_reduce", "all_gather", "reduce_scatter"} < beside
    assert {operation for operation, _ in beside_steps(bench, quick=True)} == {"all_reduce"}


def beside_all_reduces(rank: int) -> list[dict[str, Any]]:
    cpu = torch.device("cpu")
    case = make_case(0, SMALL_MLP, load_model(SMALL_MLP), 4, CalibrationRequest(models=((SMALL_MLP, (4,)),)), cpu)
    return measure_overlap(case, make_bench(cpu, torch.float32, 2, SIZE_BYTES), "all_reduce", SIZE_BYTES)


@pytest.mark.xdist_group("launch")
def test_two_ranks_measure_steps_beside_calls(tmp_path: Path) -> None:
    """Rank 0 gathers what both did, as plain values; nothing of a step but its tasks is needed there."""
    (entry,), others = run_ranks(beside_all_reduces, 2, tmp_path)
    assert others == []
    assert (entry["operation"], entry["group_size"], entry["size_bytes"]) == ("all_reduce", 2, SIZE_BYTES)
    assert len(entry["computation"]) == 2
    assert all(factor is None or factor > 0 for factor in entry["computation"])
    assert all(seconds > 0 for seconds in entry["communication_s"])


def test_of_many_discarded_timings_the_first_few_are_printed_and_the_others_counted() -> None:
    discarded = [f"left out forward of layer{number}" for number in range(15)]
    lines = warning_lines([*discarded, "other programs had 87.9% of the cores"])
    assert lines[:3] == [f"warning: {text}" for text in discarded[:3]]
    assert lines[3] == "warning: other programs had 87.9% of the cores"
    assert lines[4].startswith("warning: 12 more implausible timings were left out")
    assert len(lines) == 5


def test_few_warnings_are_printed_as_they_are() -> None:
    few = ["left out forward of conv1", "other programs had 30% of the cores"]
    assert warning_lines(few) == [f"warning: {text}" for text in few]
