"""The path of a calibration on one GPU, from the first fact to the profile, with a driver whose device is this process.

Arrays lie in CPU memory and torch computes at once; everything else is what runs on a GPU with one rank: steps are held, calls
are timed by the driver's events, both paces are looked at, and what is measured becomes a profile of a `cuda` device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from calibration import __main__ as measuring
from calibration.fit.build_profile import build_profile
from calibration.measure import collectives, components, device, operators, overlap, shards
from calibration.measure.components import Case, component_section, make_case
from calibration.measure.device import arithmetic_settings
from calibration.rounds.calibrate import models_of
from calibration.rounds.request import CalibrationRequest, RawPoints
from calibration.rounds.turns import WARM_UP
from parsim.costs.costs import Costs
from parsim.errors import CostError
from parsim.execute import worker
from parsim.execute.cuda import gpu as rank_gpu
from parsim.execute.cuda.streams import CudaStreams
from parsim.execute.job import Job, RunSpec
from parsim.execute.measurement import RankRecord
from parsim.execute.processes import speed_probe
from parsim.execute.processes.group import ProcessPlace
from parsim.execute.processes.machine import describe_environment
from parsim.execute.processes.speed_probe import CORE_SIZE, SpeedProbe
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import save_profile
from parsim.model.formats import Numerics, recorded_weights
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.program.taskgraph import COMPUTE, work_text
from parsim.work import Compute, OptimizerStep, Phase
from tests.virtual_cuda import VirtualDriver
from tools.gpu.device import WallClock

MLP = ModelSpec(name="mlp", args=(("width", 64),), input_shape=(1, 32, 32))
BERT = ModelSpec(name="bert", args=(("hidden", 32), ("heads", 2), ("layers", 2), ("vocab", 64), ("seq", 8)), input_shape=(8,))
CPU = torch.device("cpu")
REQUEST = CalibrationRequest(
    models=((MLP, (2, 4)), (BERT, (2,))),
    device="cuda",
    nproc=1,
    quick=True,
    shard_ways=(2,),
    optimizers=("sgd_momentum", "adam"),
)


class HostDriver(WallClock):
    """A device that runs what it is given while it is given it: its events are moments of the host's clock."""

    queues = True

    def passed(self, event: float) -> bool:
        return False


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    driver = HostDriver()
    for module in (collectives, components, device, operators, speed_probe):
        monkeypatch.setattr(module, "driver_of", lambda _: driver)
    for module in (components, device, operators, shards):
        monkeypatch.setattr(module, "warm_gpu", lambda *_: None)
    monkeypatch.setattr(Case, "on_gpu", True)
    monkeypatch.setattr(components, "SUSTAINED_S", 0.0)
    monkeypatch.setattr(Case, "_settle", lambda self: None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def measured(sections: list[Any]) -> dict[str, list[Any]]:
    """The least rounds of each section, each entry with its round."""
    found: dict[str, list[Any]] = {}
    for section in sections:
        section.measure(WARM_UP)
        for number in range(section.min_rounds):
            for key, entries in section.measure(number).items():
                found.setdefault(key, []).extend({**entry, "round": number} for entry in entries)
    return found


def few(launches: tuple[Any, ...]) -> tuple[Any, ...]:
    """As many of each surface as a fit needs, and a third more: a busy machine makes single ones contradict others."""
    kept: dict[tuple[str, str, str], list[Any]] = {}
    for launch in launches:
        kept.setdefault((launch.kind, launch.function, launch.phase), []).append(launch)
    return tuple(launch for surface in kept.values() for launch in surface[:12])


@pytest.mark.slow
def test_one_rank_on_one_gpu_becomes_a_profile(one_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    everything, reaches = operators.operator_launches, []

    def some(*, quick: bool, reach: Any) -> tuple[Any, ...]:
        reaches.append(reach)
        return few(everything(quick=quick, reach=reach))

    monkeypatch.setattr(operators, "operator_launches", some)
    facts = device.measure_device(CPU, torch.float32, name="NVIDIA X")
    models = [load_model(spec) for spec, _ in REQUEST.models]
    cases = [
        make_case(number, spec, models[number], samples, REQUEST, CPU)
        for number, (spec, batches) in enumerate(REQUEST.models)
        for samples in batches
    ]
    probe, host = SpeedProbe(CPU), SpeedProbe(CPU, size=CORE_SIZE)
    group = dist.group.WORLD
    bench = collectives.make_bench(CPU, torch.float32, 1, 0)
    assert bench.scratch.numel() == 0
    assert collectives.collective_section(bench, (), REQUEST, probe) is None
    assert overlap.overlap_section(cases, bench, REQUEST, probe) is None
    assert shards.shard_section(cases, 1, group, REQUEST, CPU) is None, "one rank holds no two shards side by side"
    found = measured(
        [
            component_section(cases, {1: group}, REQUEST, CPU, probe, host),
            operators.operator_section(group, REQUEST, torch.float32, CPU, probe),
        ]
    )
    for sweep in found["sweeps"]:
        assert sweep["hidden"]
        computing = [seconds > 0 for seconds in sweep["issue_s"]]
        assert sum(computing) == len(sweep["seconds"]) - 1, "all but the load"
        assert {"pace_s", "host_pace_s", "load_again_s"} <= sweep.keys()
        assert sweep["ahead"] == [place for place, computes in enumerate(computing) if computes], "a driver that is always busy"
    assert all("issue_s" in entry for entry in found["optimizers"])
    assert all(entry["hidden"] and entry["issue_s"] > 0 for entry in found["operators"])
    shapes = [(entry["function"], entry["phase"], *entry["sizes"].items()) for entry in found["operators"]]
    assert len(set(shapes)) == len(shapes) == len(operators.operator_launches(quick=True, reach=reaches[-1])), "each once"
    environment = {**describe_environment(), "arithmetic": arithmetic_settings()}
    texts = [{"model": case.number, "samples": case.samples, "tasks": task_texts(case)} for case in cases]
    raw = {"ranks": [{**found, "device": facts.to_dict(), "allocator": []}], "cases": texts, "environment": environment}
    points = RawPoints(raw=raw, request=REQUEST, models=models, created="now", command="c", name="gpu")
    profile = build_profile(points)
    save_profile(profile, tmp_path / "gpu.json")
    profile = load_profile(str(tmp_path / "gpu.json"))
    assert (profile.device_types["NVIDIA X"].kind, profile.communication.backend) == ("cuda", "nccl")
    assert profile.provenance.environment["arithmetic"]["matmul_allow_tf32"] is False  # type: ignore[index,call-overload]
    assert all(point.issue_s is not None for point in (*profile.compute.components, *profile.compute.optimizers))
    assert all(entry.issue_launch_s is not None for entry in profile.compute.compositions)
    costs = Costs(models[0], cluster_from_profile(profile))
    work = Compute(component=models[0].components[0].name, phase=Phase.FORWARD, samples=4)
    assert costs.estimate(work, 0).median_s >= costs.estimate(work, 0).issue_s > 0


def task_texts(case: Case) -> list[str]:
    return [work_text(task.work) for task in case.graph.tasks]


def test_shards_are_held_too(one_gpu: None) -> None:
    request = CalibrationRequest(models=((BERT, (2,)),), device="cuda", nproc=2, quick=True, shard_ways=(2,))
    cases = [make_case(0, BERT, load_model(BERT), 2, request, CPU)]
    section = shards.shard_section(cases, 1, dist.group.WORLD, request, CPU)
    assert section is not None
    (entry, *_) = section.measure(0)["shards"]
    assert entry["parts"]
    assert all(seconds > 0 and whole_s > 0 for *_, seconds, whole_s in entry["parts"])


@pytest.mark.parametrize("precision", ["amp_bf16", "bf16"])
def test_half_precision_trains_and_is_held(one_gpu: None, precision: str) -> None:
    request = CalibrationRequest(models=((MLP, (4,)),), device="cuda", nproc=1, precision=precision)
    case = make_case(0, MLP, load_model(MLP), 4, request, CPU)
    before = [parameter.detach().clone() for parameter in case.stage.parameters.values()]
    case.step()
    step = case.step(held=True)
    assert step.hidden
    weights = list(case.stage.parameters.values())
    assert {weight.dtype for weight in weights} == {torch.bfloat16 if precision == "bf16" else torch.float32}
    assert all(torch.isfinite(weight).all() for weight in weights)
    assert precision == "bf16" or any(not torch.equal(one, other) for one, other in zip(before, weights, strict=True))


@pytest.mark.slow
def test_a_profile_in_bf16_prices_training_in_bf16(one_gpu: None) -> None:
    """Components are known by the sizes of their arrays, too, and its updates are those of weights of 2 bytes."""
    request = replace(REQUEST, models=((MLP, (2, 4)),), precision="bf16")
    (model,) = models_of(request)
    assert model == load_model(MLP, weights=recorded_weights("bf16"))
    cases = [make_case(0, MLP, model, samples, request, CPU) for samples in (2, 4)]
    facts = device.measure_device(CPU, torch.bfloat16, name="NVIDIA X")
    probe, host = SpeedProbe(CPU), SpeedProbe(CPU, size=CORE_SIZE)
    found = measured([component_section(cases, {1: dist.group.WORLD}, request, CPU, probe, host)])
    texts = [{"model": 0, "samples": case.samples, "tasks": task_texts(case)} for case in cases]
    ranks = [{**found, "device": facts.to_dict(), "allocator": []}]
    raw = {"ranks": ranks, "cases": texts, "environment": describe_environment()}
    points = RawPoints(raw=raw, request=request, models=[model], created="now", command="c", name="gpu")
    cluster = cluster_from_profile(build_profile(points))
    costs = Costs(model, cluster, numerics=Numerics(precision="bf16"))
    elements = sum(parameter.elements for parameter in model.parameters)
    update = OptimizerStep(elements=elements, tensors=len(model.parameters))
    backward = Compute(component=model.components[0].name, phase=Phase.BACKWARD, samples=4)
    assert costs.estimate(backward, 0).source == costs.estimate(update, 0).source == "measured"
    assert costs.estimate(update, 0).median_s > 0
    with pytest.raises(CostError, match=r"measured sgd_momentum .* with master weights"):
        replace(costs, numerics=replace(costs.numerics, master_weights=False)).estimate(update, 0)
    with pytest.raises(CostError, match="weights of 2 bytes"):
        replace(costs, numerics=replace(costs.numerics, precision="amp_bf16")).estimate(update, 0)


@pytest.mark.parametrize("call_s", [15e-6, 150e-6])
def test_short_calls_run_beside_steps_though_the_host_takes_longer_to_queue_them(
    monkeypatch: pytest.MonkeyPatch, call_s: float
) -> None:
    """Without a hold each has ended before the next is queued, and all before the first step begins."""
    gpu = VirtualDriver(launch_s=20e-6, record_s=5e-6)
    case, bench = Stepping(gpu), SimpleNamespace(device=CPU, everyone=None)
    monkeypatch.setattr(overlap, "driver_of", lambda _: gpu)
    monkeypatch.setattr(overlap, "make_streams", lambda _: CudaStreams(gpu))
    monkeypatch.setattr(overlap.dist, "barrier", lambda group: gpu.synchronize())
    alone = overlap._run(case, bench, steps=2, calls=0, call=print, pause_s=0.0)  # type: ignore[arg-type]
    together = overlap._run(case, bench, steps=2, calls=60, call=gpu.kernel(call_s), pause_s=0.0)  # type: ignore[arg-type]
    assert len(overlap.seconds_beside([together])) >= 59, "all but one that may have begun with the steps"
    assert overlap.seconds_beside([together]) == pytest.approx([call_s] * len(overlap.seconds_beside([together])), rel=0.01)
    assert overlap.computation_factor([(alone, together)], [[together]]) == pytest.approx(1.0, abs=0.02)
    assert len(gpu.holds_s) == 1, "steps alone wait for nothing"


class Stepping:
    """Steps of some long kernels, each beside the calls of another stream, which slow nothing here."""

    def __init__(self, gpu: VirtualDriver) -> None:
        self.gpu = gpu

    def step(self) -> components.StepTimes:
        streams, begin_s = CudaStreams(self.gpu), self.gpu.host_s()
        for task in range(10):
            streams.compute(task, COMPUTE, [], self.gpu.kernel(1e-3))
        times = streams.finish()
        return components.StepTimes(times, self.gpu.host_s() - begin_s, 0.0)


class EnoughError(Exception):
    """What a test wanted to see has happened."""


def test_what_cuda_reads_when_it_begins_is_set_before_a_calibration_names_the_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Naming them begins with CUDA, and the number of its queues is read there."""
    environment = {"RANK": "0", "WORLD_SIZE": "1"}
    monkeypatch.setattr(rank_gpu.os, "environ", environment)
    monkeypatch.setattr(measuring, "read_place", place)
    seen: list[dict[str, str]] = []

    def described() -> Any:
        seen.append(dict(environment))
        raise EnoughError

    monkeypatch.setattr(measuring, "describe_environment", described)
    for kind in ("cuda", "cpu"):
        (tmp_path / "job.json").write_text(CalibrationRequest(models=((MLP, (2,)),), device=kind, nproc=1).to_json())
        environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        with pytest.raises(EnoughError):
            measuring.main(tmp_path / "job.json")
    assert [found.get("CUDA_DEVICE_MAX_CONNECTIONS") for found in seen] == ["32", None]


def place() -> ProcessPlace:
    return ProcessPlace(rank=0, world_size=1, local_rank=0, local_world_size=1, attempt=0)


class Entry:
    """A run whose steps are noted."""

    def __init__(self, noted: list[str]) -> None:
        self.noted = noted
        self.record = RankRecord(rank=0)

    def step(self, *, keep: bool) -> None:
        self.noted.append("step")

    def measure_memory(self) -> None:
        self.noted.append("memory")

    def timed(self, steps: int) -> None:
        self.noted.append("timed")


def test_the_memory_of_a_run_is_seen_before_the_probe_takes_some(one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []

    class Probe:
        def __init__(self, device: torch.device) -> None:
            noted.append("probe")

        def seconds(self) -> float:
            return 1.0

    monkeypatch.setattr(worker, "SpeedProbe", Probe)
    plan = components.one_rank_plan(load_model(MLP), 2)
    run = RunSpec(name="run", model=MLP, model_path="", plan=plan, optimizer="sgd", learning_rate=0.1, dataset="synthetic")
    job, entry = Job(output="", mode="measure", runs=(run,), steps=1, rounds=2, warmup_steps=1), Entry(noted)
    worker._measure(job, [entry], place(), looks=True)  # type: ignore[list-item]
    assert noted == ["step", "memory", "probe", "timed", "timed"]
    assert entry.record.pace_s == [1.0, 1.0]
    worker._measure(job, [entry], place(), looks=False)  # type: ignore[list-item]
    assert noted.count("probe") == 1
