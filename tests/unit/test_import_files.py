"""Profiler traces, topologies and DeepSpeed configs: exact on files made here, and what a user calls."""

from __future__ import annotations

import gzip
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import parsim as ps
from parsim.app.config import load_config
from parsim.costs.communication.collectives import estimate_collective
from parsim.costs.compute.formula import KernelModel
from parsim.costs.compute.launches import Launch, product_sizes
from parsim.errors import ImportedFileError
from parsim.formats.deepspeed import read_deepspeed
from parsim.formats.kineto import KINDS, flop_of, read_kineto
from parsim.formats.ledger import ledger_of
from parsim.formats.source import MOST_BYTES, SourceFile, read_source
from parsim.formats.topology import read_topo_matrix
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.parts import load_gpu
from parsim.timeline import Timeline
from parsim.work import Collective
from tests.commands import status_of
from tests.unit.import_samples import DEEPSPEED, TOPO, gpu_trace, nccl_text, switched_topo


def source(document: object) -> SourceFile:
    text = document if isinstance(document, str) else json.dumps(document)
    return SourceFile(Path("file"), text.encode())


def write(path: Path, document: object) -> Path:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_the_ledger_of_a_gpu_is_exact() -> None:
    trace = read_kineto(source(gpu_trace()))
    peak = 2.0 * 1024**3 / 100e-6  # the product needs 100 us at the peak and took 400
    ledger = ledger_of(trace, peak)
    parts = dict(ledger.entries())
    expected = {
        "ideal: arithmetic at the peak": 100e-6,
        "slow kernels: arithmetic below the peak": 300e-6,
        "other kernels: no counted arithmetic": 200e-6,
        "exposed communication": 150e-6,
        "exposed copies": 50e-6,
        "data loading": 0.0,
        "launch gaps: the host is late": 100e-6,
        "idle": 100e-6,
    }
    assert parts == pytest.approx(expected, abs=1e-9)
    assert sum(parts.values()) == pytest.approx(ledger.step_s, rel=1e-12) == pytest.approx(1e-3)
    assert ledger.utilisation == pytest.approx(0.1)
    assert ledger.communication_busy_s == pytest.approx(250e-6)
    assert (trace.rank, trace.world_size, trace.number_type, trace.device) == (3, 8, "c10::BFloat16", "NVIDIA H100 80GB HBM3")


def with_kernel(kernel: str, operator: str = "Torch-Compiled Region: 0/0", **args: object) -> Any:
    """The trace of a GPU whose products are launched by another operator and have another name."""
    document: Any = gpu_trace()
    for event in document["traceEvents"]:
        if event["name"] == "aten::mm":
            event["name"] = operator
            event["args"] = {key: value for key, value in event["args"].items() if not key.startswith("Input")} | args
        elif event["name"] == "gemm":
            event["name"] = kernel
    document["traceEvents"].append(
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 5_000_100.0, "dur": 5.0}
        | {"args": {"External id": 99, "Input Dims": [[8, 8], [8, 8]], "Input type": ["c10::BFloat16"] * 2}}
    )
    document["traceEvents"].append(
        {"ph": "X", "cat": "kernel", "name": "gemm_small", "pid": 1, "tid": 7, "ts": 5_000_650.0, "dur": 1.0}
        | {"args": {"External id": 99, "stream": 7, "correlation": 99}}
    )
    return document


@pytest.mark.parametrize(
    ("kernel", "is_product"),
    [
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT128x192x64", True),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", True),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", True),
        ("triton_tem_fused_mm_relu_3", True),
        ("triton_mm", True),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128,128,64>>", True),
        ("triton_poi_fused_add_norm_7", False),
        ("triton_per_fused_native_layer_norm_summary_2", False),
        ("void at::native::vectorized_elementwise_kernel<4>", False),
        ("multi_tensor_apply_kernel", False),
    ],
)
def test_a_product_whose_shapes_are_not_told_is_no_other_kernel(kernel: str, is_product: bool) -> None:
    ledger = ledger_of(read_kineto(source(with_kernel(kernel))), 1e15)
    assert ledger.uncounted_s == pytest.approx(400e-6 if is_product else 0.0, abs=1e-9)
    assert sum(seconds for _, seconds in ledger.entries()) == pytest.approx(ledger.step_s)
    assert ("uncounted products: shapes not recorded" in dict(ledger.entries())) == is_product


FOUR_HEADS = [[2, 64, 4, 16], [2, 64, 2, 16], [2, 64, 2, 16]]
WHOLE = 4.0 * 2 * 4 * 64 * 64 * 16
PACKED = [[128, 4, 16], [128, 2, 16], [128, 2, 16], [3], [3]]


@pytest.mark.parametrize(
    ("name", "dims", "concrete", "flop"),
    [
        ("flash_attn::_flash_attn_forward", FOUR_HEADS, [], WHOLE),
        ("flash_attn::_flash_attn_forward", FOUR_HEADS, ["", "", "", "0.", "0.25", "True"], WHOLE / 2),
        ("flash_attn::_flash_attn_backward", [FOUR_HEADS[0], *FOUR_HEADS], [], 2.5 * WHOLE),
        ("flash_attn::_flash_attn_varlen_forward", PACKED, [], WHOLE),
        ("aten::_flash_attention_forward", FOUR_HEADS, [*[""] * 8, "True"], WHOLE / 2),
        ("aten::_scaled_dot_product_flash_attention", [[2, 4, 64, 16]] * 3, ["", "", "", "0.", "False"], WHOLE),
        ("aten::_scaled_dot_product_flash_attention", [[2, 4, 64, 16]] * 3, ["", "", "", "0.", "True"], WHOLE / 2),
        ("aten::_grouped_mm", [[128, 32], [8, 32, 64], [8]], [], 2.0 * 128 * 32 * 64),
        ("aten::_grouped_mm", [[32, 128], [128, 64], [8]], [], 2.0 * 128 * 32 * 64),
        ("aten::_scaled_grouped_mm", [[8, 16, 32], [8, 32, 64]], [], 2.0 * 8 * 16 * 32 * 64),
    ],
)
def test_attention_and_grouped_products_count(name: str, dims: list[object], concrete: list[str], flop: float) -> None:
    assert flop_of(name, {"Input Dims": dims, "Concrete Inputs": concrete}) == flop


SHAPES = [(256, 512, 1024), (512, 4096, 4096), (1024, 1024, 512), (2048, 4096, 11008), (4096, 4096, 4096), (8192, 11008, 4096)]
"""Rows, columns and depth of products."""


def product_s(profile: str, rows: int, columns: int, depth: int) -> float:
    """Seconds that a profile of H100 predicts of a product in bf16."""
    loaded = load_profile(profile)
    elements = rows * depth + depth * columns + rows * columns
    sizes, flop = product_sizes(1, rows, columns, depth), 2.0 * rows * columns * depth
    launch = Launch("matmul", "linear", "forward", sizes, flop=flop, size_bytes=2.0 * elements)
    return KernelModel(loaded, cluster_from_profile(loaded).devices[0].type, "bf16").price(launch).seconds


def products_trace(factor: float, shapes: list[tuple[int, int, int]]) -> Any:
    """Each shape twice, `factor` as long as 8xh100-sxm predicts; every second one 2% longer."""
    document: Any = gpu_trace()
    events, at = [event for event in document["traceEvents"] if event["ph"] == "M"], 0.0
    for key, (rows, columns, depth) in enumerate(shapes * 2):
        length = 1e6 * factor * product_s("8xh100-sxm", rows, columns, depth) * (1.02 if key % 2 else 1.0)
        args: dict[str, Any] = {"External id": key, "Input Dims": [[rows, depth], [depth, columns]]}
        args["Input type"] = ["c10::BFloat16", "c10::BFloat16"]
        common = {"ph": "X", "pid": 1, "ts": at, "dur": length}
        events.append({**common, "cat": "cpu_op", "name": "aten::mm", "tid": 1, "args": args})
        events.append({**common, "cat": "kernel", "name": "gemm", "tid": 7, "args": {"External id": key, "stream": 7}})
        at += length + 1.0
    return {**document, "traceEvents": events}


def test_a_trace_of_one_gpu_calibrates_a_profile(tmp_path: Path) -> None:
    """Products that take 1.5 times as long do so in the new profile, and held-out shapes are predicted within their noise."""
    trace, mine = write(tmp_path / "trace.json", products_trace(1.5, SHAPES)), tmp_path / "mine.json"
    imported = ps.import_file(trace, into=mine)
    (entry,) = imported.found["factors"]
    assert (entry["kind"], entry["phase"], entry["shapes"]) == ("matmul", "forward", len(SHAPES))
    assert entry["factor"] == pytest.approx(1.5, rel=0.03)
    assert entry["held_out"]["p90"] < 0.03 < entry["before"]
    assert "held-out error" in str(imported)
    for shape in [*SHAPES, (3000, 3000, 3000)]:
        assert product_s(str(mine), *shape) == pytest.approx(1.5 * product_s("8xh100-sxm", *shape), rel=0.05)
    fit = next(fit for fit in load_profile(str(mine)).compute.operator_fits if (fit.kind, fit.precision) == ("matmul", "bf16"))
    assert fit.held_out["trace"].rows == len(SHAPES)
    again = ps.import_file(trace, into=mine)  # what is added to is already as fast as the trace
    assert again.found["factors"][0]["factor"] == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize(
    ("shapes", "options", "said"),
    [
        (3, {}, "3 of matmul forward.*Record more layers"),
        (6, {"cluster": "8xb200"}, "the trace is of NVIDIA H100.*8xb200 has b200"),
        (6, {"precision": "fp64"}, "give --precision, one of"),
        (0, {}, "calibrates nothing"),
    ],
)
def test_a_trace_that_cannot_calibrate_says_why(tmp_path: Path, shapes: int, options: dict[str, str], said: str) -> None:
    document = products_trace(1.0, SHAPES[:shapes]) if shapes else with_kernel("triton_mm")
    with pytest.raises(ImportedFileError, match=said):
        ps.import_file(write(tmp_path / "trace.json", document), into=tmp_path / "mine.json", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "mine.json").exists()


def test_loading_is_told_from_other_launch_gaps() -> None:
    document: Any = gpu_trace()
    for step in range(2):
        at = 5_000_000.0 + 1000 * step
        document["traceEvents"].append(
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": "enumerate(DataLoader)#next",
                "pid": 1,
                "tid": 1,
                "ts": at + 700,
                "dur": 60,
            }
        )
    ledger = ledger_of(read_kineto(source(document)), None)
    assert (ledger.loading_s, ledger.launch_gaps_s, ledger.idle_s) == pytest.approx((60e-6, 40e-6, 100e-6), abs=1e-9)


RUN = """
[model]
name = "mlp"
[cluster]
profile = "{profile}"
devices = 1
[training]
global_batch = 64
"""


def test_a_trace_beside_a_prediction_for_other_devices(tmp_path: Path) -> None:
    """Another GPU is named. A GPU beside CPUs is refused: their difference says nothing of the step."""
    trace = write(tmp_path / "trace.json", gpu_trace())
    (tmp_path / "run.toml").write_text(RUN.format(profile="dgx1-v100-32gb"))
    imported = ps.import_file(trace, against=tmp_path / "run.toml")
    assert any("the trace is of h100-sxm, and the prediction beside it is for V100" in note for note in imported.warnings)
    on_cpu = gpu_trace()
    on_cpu["traceEvents"] = [event for event in on_cpu["traceEvents"] if event.get("cat") not in ("kernel", "gpu_memcpy")]  # type: ignore[attr-defined]
    with pytest.raises(ImportedFileError, match=r"the trace is of a CPU, and .*run\.toml asks about GPUs"):
        ps.import_file(write(tmp_path / "cpu.json", on_cpu), against=tmp_path / "run.toml")


def test_the_ledger_says_what_helps_against_its_largest_parts() -> None:
    from parsim.formats.imports import HELPS, _what_helps

    ledger = ledger_of(read_kineto(source(gpu_trace())), 2.0 * 1024**3 / 100e-6)
    names = [line.removeprefix("Against ").partition(":")[0] for line in _what_helps(ledger)]
    assert names == ["slow kernels", "other kernels", "exposed communication"]
    bare = ledger_of(read_kineto(source(gpu_trace())), None)
    compiled = ledger_of(read_kineto(source(with_kernel("triton_mm"))), 1e15)
    parts = {name.partition(":")[0] for some in (ledger, bare, compiled) for name, _ in some.entries()} - {"ideal"}
    assert parts == set(HELPS)


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_trace_becomes_a_timeline(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"trace{suffix}"
    data = json.dumps(gpu_trace()).encode()
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    into = tmp_path / "timeline.json.gz"
    imported = ps.import_file(path, into=into)
    timeline = Timeline.load(into)
    assert timeline.source == "measured"
    assert set(timeline.resources) == {"r3.stream7", "r3.stream20"}
    assert timeline.makespan_s == pytest.approx(2e-3)
    peak = load_gpu("h100-sxm").peak_flop_per_s["bf16"].value
    assert imported.found["ledger"]["utilisation"] == pytest.approx(2 * 1024**3 / peak / 1e-3)
    assert "of the peak" in imported.summary
    assert "ncclDevKernel" in gzip.decompress(into.read_bytes()).decode()


def test_a_real_trace_of_this_cpu(tmp_path: Path) -> None:
    """The step of the trace is the clock's, its ledger sums to it, and its arithmetic is torch's own count."""
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.flop_counter import FlopCounterMode

    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 8, 3),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 14 * 14, 64),
        torch.nn.Linear(64, 10),
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x, y = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))

    def step() -> None:
        torch.nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with FlopCounterMode(display=False) as counter:
        step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(3):
            step()
            profiler.step()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    trace = read_kineto(SourceFile(path, path.read_bytes()))
    ledger = ledger_of(trace, 1e11)
    assert not trace.on_gpu
    assert ledger.flop * trace.steps == pytest.approx(3 * counter.get_total_flops(), rel=1e-9)
    assert sum(seconds for _, seconds in ledger.entries()) == pytest.approx(ledger.step_s, rel=1e-9)
    assert ledger.compute_s > 0.3 * ledger.step_s
    assert trace.number_type == "float"


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"traceEvents": []}, "holds 0 events"),
        ({"traceEvents": [{"ph": "X", "cat": "python_function", "name": "f", "ts": 0, "dur": 1}]}, "none of them is a kernel"),
        ({"traceEvents": 3}, "no list `traceEvents`"),
        ('{"traceEvents": [', "is not JSON"),
    ],
)
def test_a_trace_of_nothing_is_refused(document: object, said: str) -> None:
    with pytest.raises(ImportedFileError, match=said):
        read_kineto(source(document))


def test_a_matrix_of_bridged_pairs() -> None:
    tree = read_topo_matrix(source(TOPO))
    assert tree.lanes == {(0, 1): 12, (2, 3): 12}
    assert [(link.a, link.b, link.lanes) for link in tree.direct_links(12)] == [("gpu0", "gpu1", 12), ("gpu2", "gpu3", 12)]
    assert tree.switch == (0, 0, 1, 2)
    assert tree.socket == (0, 1, 1)
    assert tree.cards == (("mlx5_0", "pcie0"), ("mlx5_1", "socket1"))


@pytest.mark.parametrize(("lanes", "operation"), [(18, "all_reduce"), (9, "all_gather")])
def test_a_matrix_of_switches_becomes_the_machine_made_of_parts(tmp_path: Path, lanes: int, operation: str) -> None:
    """Collectives cost as on the shipped part; with half of its lanes, nearly twice that."""
    path = write(tmp_path / "topo.txt", switched_topo(lanes=lanes))
    imported = ps.import_file(path, into=tmp_path / "p.json", cluster="8xh100-sxm")
    assert imported.found["direct"] == f"{lanes} lanes of each GPU to a switch"
    work = Collective(operation=operation, group=tuple(range(8)), size_bytes=2**28)
    made, plain = (cluster_from_profile(load_profile(name)) for name in (str(tmp_path / "p.json"), "8xh100-sxm"))
    ratio = estimate_collective(work, made).median_s / estimate_collective(work, plain).median_s
    if lanes == 18:
        assert ratio == pytest.approx(1.0, rel=1e-12)
    else:
        assert "had 144 lanes" in imported.warnings[0]
        assert ratio > 1.7


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nothing", "no matrix of GPUs"),
        (switched_topo().replace("GPU3\t", "GPX3\t", 1), "lists GPU0|no row"),
        (switched_topo(4).replace("NV18", "NV17", 1), "must be symmetric"),
        (switched_topo(4).replace("NV18", "QQ", 1), "not an entry of this matrix"),
        ("\n".join(switched_topo(4).splitlines()[:3]), "no row of GPU2, GPU3"),
    ],
)
def test_a_matrix_that_is_cut_or_contradicts_itself_is_refused(text: str, said: str) -> None:
    with pytest.raises(ImportedFileError, match=said):
        read_topo_matrix(source(text))


def test_a_matrix_for_another_machine_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "topo.txt", switched_topo(4))
    with pytest.raises(ImportedFileError, match="shows 4 GPUs, and profile 8xh100-sxm has 8"):
        ps.import_file(path, into=tmp_path / "p.json", cluster="8xh100-sxm")
    with pytest.raises(ImportedFileError, match="does not name the machine"):
        ps.import_file(path, into=tmp_path / "p.json")
    with pytest.raises(ImportedFileError, match="profile 4xa40 has no NVLink"):
        ps.import_file(path, into=tmp_path / "p.json", cluster="4xa40")


def test_a_deepspeed_config_becomes_a_run_file(tmp_path: Path) -> None:
    path = write(tmp_path / "ds.json", DEEPSPEED)
    into = tmp_path / "run.toml"
    with pytest.raises(ImportedFileError, match=r"--set model.name=gpt and --set cluster.profile"):
        ps.import_file(path, into=into)
    given = ("model.name=gpt_small", "cluster.profile=8xh100-sxm")
    imported = ps.import_file(path, into=into, overrides=given)
    config = load_config(into)
    assert (config.training.global_batch, config.training.precision, config.training.optimizer) == (256, "bf16", "adamw_fused")
    assert (config.plan.zero_stage, config.plan.microbatches, config.plan.bucket_bytes) == (3, 4, 10**9)
    assert imported.found["data_parallel_ranks"] == 8
    assert config.plan.optimizer_offload
    assert any("offload_optimizer: gradients are accumulated on the device" in warning for warning in imported.warnings)
    assert any("my_own_key = 3 is not known" in warning for warning in imported.warnings)
    assert config.training.clip_norm == 1.0
    again = ps.import_file(path, into=into)
    assert again.found == imported.found


def test_deepspeed_on_one_gpu_becomes_a_run_file_that_plans(tmp_path: Path) -> None:
    """One device has nobody to divide states with: strategy "dp" has no plan there."""
    config = {"train_batch_size": 16, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    path, into = write(tmp_path / "ds.json", config), tmp_path / "run.toml"
    imported = ps.import_file(path, into=into, overrides=["model.name=gpt2", "cluster.profile=1xh100-sxm"])
    assert any("one device" in warning for warning in imported.warnings)
    plan = load_config(into).plan
    assert (plan.strategy, plan.zero_stage) == ("single", 0)
    assert ps.plan(into).chosen.plan.world_size == 1


def test_the_cluster_of_the_run_file_tells_deepspeed_s_microbatches(tmp_path: Path) -> None:
    """256 samples of 4 per rank on 16 ranks are 4 microbatches; without a cluster the import says that 4 is not used."""
    batch = {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"}
    path = write(tmp_path / "ds.json", {"zero_optimization": {"stage": 3}, **batch})
    given = ["model.name=gpt_small", "cluster.gpu=h100-sxm", "cluster.nodes=2", "cluster.network=infiniband-400g"]
    imported = ps.import_file(path, into=tmp_path / "run.toml", overrides=given)
    plan = load_config(tmp_path / "run.toml").plan
    assert plan.microbatches == 4
    assert plan.dp_shard == 16  # the search alone may choose groups of a node, which ZeRO 3 of DeepSpeed does not have
    assert not any("is not used" in warning for warning in imported.warnings)
    alone = ps.import_file(path)
    assert any("train_micro_batch_size_per_gpu = 4 is not used" in warning for warning in alone.warnings)
    ps.import_file(path, into=tmp_path / "one.toml", overrides=[*given[:2], "cluster.nodes=1"])
    one = load_config(tmp_path / "one.toml").plan
    assert (one.microbatches, one.dp_shard) == (8, None)
    with pytest.raises(ImportedFileError, match=r"ranks \(24\)"):
        ps.import_file(path, into=tmp_path / "three.toml", overrides=[*given, "cluster.nodes=3"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"train_batch_size": 250}, "train_batch_size = 250 must be"),
        ({"gradient_clipping": -1}, "gradient_clipping = -1 must be a number of at least 0"),
        ({"zero_optimization": {"stage": 5}}, "stage = 5 must be 0, 1, 2 or 3"),
        ({"fp16": {"enabled": True}}, "both enabled"),
        ({"train_batch_size": "many"}, "train_batch_size = many must be a whole number"),
        ({"optimizer": 3}, "must be a table"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size = 2 is a degree of parallelism"),
    ],
)
def test_a_deepspeed_config_that_contradicts_itself_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ImportedFileError, match=said):
        read_deepspeed(source({**DEEPSPEED, **change}))


BATCHES: list[tuple[tuple[int | None, int | None, int | None], int, tuple[int, int] | None]] = [
    ((32, 4, 4), 2, (32, 4)),
    ((32, 4, None), 2, (32, 4)),
    ((32, None, 4), 2, (32, 4)),
    ((None, 4, 4), 2, (32, 4)),
    ((32, None, None), 2, (32, 1)),
    ((None, 4, None), 2, (8, 1)),
    ((32, 4, 2), 2, None),
    ((32, None, 5), 2, None),
    ((33, None, None), 2, None),
    ((32, 5, None), 2, None),
    ((None, None, 4), 2, None),
]
"""Batch, micro batch and accumulation on so many ranks: batch and accumulation as DeepSpeed 0.19.2 to 0.19.8 fills them in
(deepspeed/runtime/config.py); None: it refuses them."""


@pytest.mark.parametrize(("batch", "ranks", "filled"), BATCHES)
def test_a_deepspeed_batch_is_filled_in_or_refused_as_deepspeed_does(
    batch: tuple[int | None, int | None, int | None], ranks: int, filled: tuple[int, int] | None
) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {key: value for key, value in zip(keys, batch, strict=True) if value is not None}
    read = partial(read_deepspeed, source({**config, "bf16": {"enabled": True}}), world_size=ranks)
    if filled is None:
        with pytest.raises(ImportedFileError, match=r"must be|needs train_batch_size"):
            read()
    else:
        run = read()
        assert (run.keys["training.global_batch"], run.keys["plan.microbatches"]) == filled


@pytest.mark.parametrize(("stated", "norm"), [({}, 1.0), ({"gradient_clipping": 0.5}, 0.5), ({"gradient_clipping": 0.0}, None)])
def test_deepspeed_clips_at_1_where_nothing_is_said(stated: dict[str, float], norm: float | None) -> None:
    """DeepSpeed 0.19.3: GRADIENT_CLIPPING_DEFAULT is 1.0 (runtime/constants.py); in 0.19.2 it is 0."""
    run = read_deepspeed(source({"train_batch_size": 8, **stated}))
    assert run.keys.get("training.clip_norm") == norm
    assert any("0.19.3" in warning for warning in run.warnings) == (not stated)


@pytest.mark.parametrize(("stage", "warns"), [(0, False), (1, True), (2, True), (3, False)])
def test_deepspeed_overlaps_by_itself_at_stage_3_alone(stage: int, warns: bool) -> None:
    """DeepSpeed 0.19: overlap_comm left out is true at stage 3 and false below (0.19.2 to 0.19.8, runtime/zero/config.py)."""
    for stated in ({}, {"overlap_comm": True}):
        run = read_deepspeed(source({"train_batch_size": 8, "zero_optimization": {"stage": stage, **stated}}))
        assert any("overlap_comm is absent" in warning for warning in run.warnings) == (warns and not stated)


@pytest.mark.parametrize("batches", [7, 9, 10])
def test_the_documented_profiler_loop_records_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    """torch 2.13: without `repeat=1` an export after the loop holds the profiler's cycle that began last, with empty steps or
    none."""
    torch = pytest.importorskip("torch")
    snippet = re.search(r"```python\n(steps = torch.profiler.*?)```", Path("docs/import.md").read_text(), re.DOTALL)
    assert snippet
    monkeypatch.chdir(tmp_path)
    loader, layer = torch.randn(batches, 8, 64), torch.nn.Linear(64, 64)
    exec(snippet[1], {"torch": torch, "loader": loader, "train": lambda batch: layer(batch).sum().backward()})
    path = tmp_path / "trace.json.gz"
    trace = read_kineto(SourceFile(path, gzip.decompress(path.read_bytes())))
    assert trace.steps == 3
    assert not {"steps in which nothing ran"} & set(trace.skipped)


def test_steps_in_which_nothing_ran_are_left_out() -> None:
    document = gpu_trace()
    events = document["traceEvents"]
    assert isinstance(events, list)
    whole = read_kineto(source(document))
    events.append(
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#2", "pid": 1, "tid": 1, "ts": 5_002_100, "dur": 900}
    )
    trace = read_kineto(source(document))
    assert (trace.steps, trace.window_s) == (whole.steps, whole.window_s)
    assert trace.skipped["steps in which nothing ran"] == 1


@pytest.mark.parametrize(
    "name",
    [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>",
        "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 2>",
        "void (anonymous namespace)::one_shot_all_reduce_kernel<float, 16, 8>",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>",
        "void deep_ep::intranode::dispatch<8, 768, 8192>",
        "nvshmemi_transfer_amo_nonfetch",
    ],
)
def test_kernels_that_communicate_are_no_computation(name: str) -> None:
    document = gpu_trace()
    events = document["traceEvents"]
    assert isinstance(events, list)
    for event in events:
        if event.get("cat") == "kernel" and event["name"] == "gemm":
            event["name"] = name
    communication = KINDS.index("communication")
    activities = read_kineto(source(document)).activities
    communicating = {activities.names[number] for number in activities.name[activities.kind == communication]}
    assert any(name.startswith(shown.rstrip("…. ")[:40]) for shown in communicating)


def test_a_config_that_says_nothing_is_refused() -> None:
    with pytest.raises(ImportedFileError, match="sets nothing that a run file has"):
        read_deepspeed(
            source({"zero_optimization": {"stage": "auto"}, "bf16": {"enabled": "auto"}, "train_batch_size": "auto"})
        )


def test_wrong_targets_and_options_are_refused(tmp_path: Path) -> None:
    log = write(tmp_path / "log.txt", nccl_text())
    with pytest.raises(ImportedFileError, match=r"goes into PROFILE.json"):
        ps.import_file(log, into=tmp_path / "run.toml")
    with pytest.raises(ImportedFileError, match=r"--steps does not apply"):
        ps.import_file(log, steps=3)
    with pytest.raises(ImportedFileError, match="of no kind"):
        ps.import_file(write(tmp_path / "x", "hello"))
    with pytest.raises(ImportedFileError, match="is empty"):
        ps.import_file(write(tmp_path / "y", ""))
    with pytest.raises(ImportedFileError, match="cannot read"):
        ps.import_file(tmp_path / "no")


@pytest.mark.parametrize("cut", [3, 12, 500, -1])
def test_a_damaged_archive_is_refused(tmp_path: Path, cut: int) -> None:
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(json.dumps(gpu_trace()).encode())[:cut])
    with pytest.raises(ImportedFileError, match="damaged gzip"):
        read_source(tmp_path / "t.json.gz")


def test_an_archive_that_grows_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parsim.formats.source.MOST_BYTES", 2**21)
    assert MOST_BYTES > 2**21
    (tmp_path / "bomb.json.gz").write_bytes(gzip.compress(b"[" * 2**24))
    with pytest.raises(ImportedFileError, match="holds more than 2 MiB"):
        ps.import_file(tmp_path / "bomb.json.gz")


def test_the_command_prints_one_document_or_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = partial(status_of, monkeypatch, "import")

    log = write(tmp_path / "log.txt", nccl_text())
    assert command(str(log), "--into", str(tmp_path / "p.json"), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "nccl-tests"
    assert document["found"]["groups"][0]["points"] == 22
    assert command(str(write(tmp_path / "evil", "\x1b[2J evil"))) == 1
    assert "of no kind that parsim imports" in capsys.readouterr().err
