"""`parsim export`: what every format keeps of a plan, says that it leaves out, and refuses."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from parsim.app.foreign import export_folder, import_file
from parsim.app.functions import simulate
from parsim.app.run_folder import RunFolder
from parsim.errors import ConfigError
from parsim.formats.configs import read_recipe
from parsim.formats.exports import written_formats
from parsim.formats.kineto import read_kineto
from parsim.formats.ledger import ledger_of
from parsim.formats.recipe import written_out
from parsim.formats.source import read_source
from parsim.model.catalogue.names import sequence_of, shape_of
from tests.commands import status_of

SMALL = ["model.args.layers=4", "model.args.hidden=256", "model.args.heads=8", "model.args.vocab=1024", "model.args.seq=128"]
CUT = [*SMALL, "plan.strategy=hp", "plan.mesh={pp=2,dp=2,tp=2}", "plan.pipeline_order=1f1b", "plan.chunks=1"]
CUT += ["plan.microbatches=4", "plan.zero_stage=1", "plan.recompute=none"]
"""A question of which the search is short."""
Answers = Callable[[str, str, int, Sequence[str]], Path]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Folders as `parsim simulate --out` leaves them, without the pages; each question is asked once."""
    known: dict[str, Path] = {}

    def ask(model: str, cluster: str, batch: int, overrides: Sequence[str]) -> Path:
        key = repr((model, cluster, batch, tuple(overrides)))
        if key not in known:
            found = simulate(model, cluster=cluster, global_batch=batch, overrides=list(overrides))
            known[key] = tmp_path_factory.mktemp("answer")
            RunFolder(known[key]).write_question(found)
        return known[key]

    return ask


def test_an_unknown_format_is_refused_with_near_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"format 'safetensor' is unknown; did you mean safetensors\?"):
        export_folder(tmp_path, format="safetensor")


@pytest.mark.parametrize("format", written_formats())
def test_a_folder_without_a_run_is_refused(tmp_path: Path, format: str) -> None:
    with pytest.raises(ConfigError, match="is not a run folder"):
        export_folder(tmp_path, format=format)


def test_a_checkpoint_belongs_to_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--checkpoint best does not apply to a DeepSpeed JSON.*state_dict, safetensors"):
        export_folder(tmp_path, format="deepspeed", checkpoint="best")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("precision", "optimizer"), [("bf16", "adamw_fused"), ("fp32", "adam"), ("amp_bf16", "sgd_momentum")])
def test_deepspeed_reads_back_to_the_keys_of_the_plan(
    answers: Answers, tmp_path: Path, zero: int, precision: str, optimizer: str
) -> None:
    keys = [
        *SMALL,
        "plan.strategy=dp",
        f"plan.zero_stage={zero}",
        "plan.microbatches=2",
        "plan.recompute=none",
        "plan.mesh.dp=8",
    ]
    keys += [f"training.precision={precision}", f"training.optimizer={optimizer}", "training.learning_rate=0.002"]
    folder = answers("transformer", "8xh100-sxm", 64, keys)
    plan = RunFolder(folder).read_config() and json.loads((folder / "plan.json").read_text())
    done = export_folder(folder, format="deepspeed", out=tmp_path / "ds.json")
    read = import_file(tmp_path / "ds.json").to_dict()
    assert read["found"]["keys"] == {
        "plan.strategy": "dp",
        "plan.zero_stage": zero,
        "plan.microbatches": 2,
        "plan.bucket_bytes": plan["bucket_bytes"],
        "training.global_batch": 64,
        "training.precision": precision,
        "training.optimizer": optimizer,
        "training.learning_rate": 0.002,
    }
    assert read["found"]["data_parallel_ranks"] == done.found["ranks"] == 8
    assert not [text for text in read["warnings"] if "not known" in text]
    assert ("plan.bucket_bytes" in done.left_out) == (zero == 0)


def test_deepspeed_refuses_what_it_cannot_express(answers: Answers) -> None:
    cut = answers("transformer", "8xh100-sxm", 32, CUT)
    with pytest.raises(ConfigError, match=r"the plan has a pipeline \(pp = 2.*megatron or torchtitan"):
        export_folder(cut, format="deepspeed")
    assert not (cut / "ds_config.json").exists()


def test_deepspeed_has_no_sharding_groups(answers: Answers) -> None:
    keys = [*SMALL, "plan.strategy=dp", "plan.mesh={dp=8}", "plan.zero_stage=2", "plan.dp_shard=4", "plan.recompute=none"]
    with pytest.raises(ConfigError, match=r"divides states over all 8 replicas, and the plan over groups of 4"):
        export_folder(answers("transformer", "8xh100-sxm", 32, keys), format="deepspeed")


def test_deepspeed_says_what_belongs_into_the_script(answers: Answers) -> None:
    keys = [*SMALL, "plan.strategy=dp", "plan.zero_stage=2", "plan.recompute=full"]
    keys += ["training.precision=bf16", "training.master_weights=false"]
    done = export_folder(answers("transformer", "8xh100-sxm", 32, keys), format="deepspeed")
    assert "torch.utils.checkpoint around embed" in done.left_out["plan.recompute"]
    assert "4 bytes per parameter more" in done.left_out["training.master_weights"]
    assert any(line.startswith("Left out: plan.recompute: ") for line in done.lines())
    assert done.to_dict()["left_out"] == dict(done.left_out)


def asked_again(file: Path, folder: Path) -> tuple[dict[str, object], dict[str, Any]]:
    """Keys that the reader takes from a file for the devices of the plan, and the plan."""
    plan = json.loads((folder / "plan.json").read_text())
    axes = plan["mesh"]
    return read_recipe(file).settings(axes["pp"] * axes["dp"] * axes["tp"] * axes.get("cp", 1)), plan


ONE_ORDER = ("plan.pipeline_order=1f1b", "plan.chunks=1")
"""So that the search is short."""
MESHES = [
    ("plan.strategy=dp", "plan.mesh={dp=8}", "plan.zero_stage=3"),
    ("plan.strategy=dp", "plan.mesh={dp=8}", "plan.zero_stage=0"),
    ("plan.strategy=dp", "plan.mesh={dp=8}", "plan.zero_stage=2", "plan.dp_shard=4"),
    ("plan.strategy=hp", "plan.mesh={pp=2,dp=2,tp=2}", "plan.zero_stage=1", *ONE_ORDER),
    ("plan.strategy=mp", "plan.mesh={pp=1,dp=1,tp=8}", "plan.zero_stage=0"),
]


@pytest.mark.parametrize("mesh", MESHES, ids=lambda keys: keys[1].removeprefix("plan.mesh="))
@pytest.mark.parametrize("recompute", ["none", '["h.*"]'])
@pytest.mark.parametrize(("format", "model"), [("megatron", "transformer"), ("torchtitan", "llama3-8b")])
def test_frameworks_files_read_back_to_the_same_question(
    answers: Answers, tmp_path: Path, format: str, model: str, mesh: tuple[str, ...], recompute: str
) -> None:
    sizes = SMALL if model == "transformer" else []
    keys = [*sizes, *mesh, "plan.microbatches=4", f"plan.recompute={recompute}", "training.precision=bf16"]
    if model != "transformer" and recompute != "none":
        pytest.skip("the same code as for the smaller model")  # a search of 32 layers takes longer
    folder = answers(model, "8xh100-sxm", 64, keys)
    file = tmp_path / ("run.sh" if format == "megatron" else "run.toml")
    done = export_folder(folder, format=format, out=file)
    found, plan = asked_again(file, folder)
    groups = found.get("plan.dp_shard")
    whole_groups = None if found["plan.zero_stage"] == 0 else found["plan.mesh"]["dp"]  # type: ignore[index]
    assert groups == (4 if "plan.dp_shard=4" in mesh else whole_groups)
    own = {"dp_shard": 4} if groups == 4 and whole_groups == 8 else {}
    axes = {axis: size for axis, size in found["plan.mesh"].items() if size > 1 or axis in plan["mesh"]}  # type: ignore[attr-defined]
    assert dict(axes, **own) == plan["mesh"]
    assert found["plan.zero_stage"] == plan["zero_stage"]
    assert found["plan.microbatches"] == plan["microbatches"] == 4
    assert found["plan.recompute"] == ("none" if recompute == "none" else ["h.*"])
    assert (found["training.global_batch"], found["training.precision"]) == (64, "bf16")
    recipe, args = read_recipe(file), dict(RunFolder(folder).read_config().model.args)
    seq = sequence_of(model, args)
    assert sequence_of(recipe.model, recipe.args) == seq
    assert written_out(shape_of(recipe.model, recipe.args), seq) == written_out(shape_of(model, args), seq)
    assert not recipe.unknown
    assert not {"plan.mesh", "plan.zero_stage", "plan.microbatches", "training.precision"} & set(done.left_out)


@pytest.mark.parametrize(
    ("optimizer", "decay"), [("adamw_fused", 0.01), ("adam_fused", 0.0), ("adamw_fused", 0.2), ("sgd_momentum", 0.0)]
)
def test_a_file_trains_with_the_numbers_that_parsim_would_train_with(
    answers: Answers, tmp_path: Path, optimizer: str, decay: float
) -> None:
    """torchtitan 0.2.2, DeepSpeed 0.19: FusedAdam of DeepSpeed has no weight decay by default, torchtitan one of 0.1 and a
    beta2 of 0.95. The files say torch's numbers where the question gives none."""
    keys = [*SMALL, *MESHES[0], "plan.microbatches=4", "plan.recompute=none", "training.precision=bf16"]
    keys += [f"training.optimizer={optimizer}", *(["training.weight_decay=0.2"] if decay == 0.2 else [])]
    folder = answers("transformer", "8xh100-sxm", 64, keys)
    export_folder(folder, format="deepspeed", out=tmp_path / "ds.json")
    numbers = json.loads((tmp_path / "ds.json").read_text())["optimizer"]["params"]
    assert numbers["weight_decay"] == decay
    if optimizer != "adam_fused":
        export_folder(folder, format="megatron", out=tmp_path / "run.sh")
        assert f"--weight-decay {decay!r}" in (tmp_path / "run.sh").read_text()
    if optimizer != "sgd_momentum":
        named = [key for key in keys if key not in SMALL]
        done = export_folder(answers("llama3-8b", "8xh100-sxm", 64, named), format="torchtitan", out=tmp_path / "run.toml")
        assert "raises the learning rate over 200 steps" in done.left_out["training.schedule"]
        numbers = tomllib.loads((tmp_path / "run.toml").read_text())["optimizer"]
        assert (numbers["weight_decay"], numbers["beta1"], numbers["beta2"], numbers["eps"]) == (decay, 0.9, 0.999, 1e-8)


def test_files_of_torchtitan_name_their_release_and_have_its_keys(answers: Answers, tmp_path: Path) -> None:
    """Where torchtitan 0.2 is installed, its own dataclasses know every table and key that is written."""
    named = ["plan.strategy=dp", "plan.zero_stage=3", "plan.recompute=none"]
    done = export_folder(answers("llama3-8b", "8xh100-sxm", 64, named), format="torchtitan", out=tmp_path / "run.toml")
    assert "torchtitan 0.2 file" in done.summary
    assert "read no TOML" in done.left_out["release"]
    release = pytest.importorskip("torchtitan.config.job_config")
    types = get_type_hints(release.JobConfig)
    for table, keys in tomllib.loads((tmp_path / "run.toml").read_text()).items():
        assert set(keys) <= {field.name for field in fields(types[table])}


def test_a_pipeline_order_is_kept_by_torchtitan(answers: Answers, tmp_path: Path) -> None:
    keys = ["plan.strategy=hp", "plan.mesh={pp=2,dp=4,tp=1}", "plan.pipeline_order=gpipe", "plan.recompute=none"]
    keys += ["plan.zero_stage=1", "plan.microbatches=4", "plan.chunks=1", "training.precision=bf16"]
    folder = answers("llama3-8b", "8xh100-sxm", 32, keys)
    export_folder(folder, format="torchtitan", out=tmp_path / "run.toml")
    found, _ = asked_again(tmp_path / "run.toml", folder)
    assert (found["plan.pipeline_order"], found["plan.chunks"]) == ("gpipe", 1)
    document = tomllib.loads((tmp_path / "run.toml").read_text())
    assert document["parallelism"]["pipeline_parallel_schedule"] == "GPipe"
    with pytest.raises(ConfigError, match="Megatron-LM has the pipeline orders 1f1b and interleaved"):
        export_folder(folder, format="megatron")


def test_dualpipe_v_is_kept_and_switches_of_a_plan_by_hand_are_named(answers: Answers, tmp_path: Path) -> None:
    keys = [
        "plan.strategy=custom",
        "plan.mesh={pp=2,dp=4}",
        "plan.pipeline_order=dualpipe-v",
        "plan.chunks=2",
        "plan.zero_stage=1",
    ]
    keys += ["plan.gather_ahead=true", "plan.sequence_parallel=false", "plan.microbatches=4", "model.args.document_tokens=1024"]
    folder = answers("llama3-8b", "8xh100-sxm", 32, keys)
    done = export_folder(folder, format="torchtitan", out=tmp_path / "run.toml")
    document = tomllib.loads((tmp_path / "run.toml").read_text())
    assert document["parallelism"]["pipeline_parallel_schedule"] == "DualPipeV"
    assert {"plan.gather_ahead", "model.args.document_tokens"} <= set(done.left_out)


def by_hand(answers: Answers, model: str, *keys: str, microbatches: int = 4, order: str = "1f1b", chunks: int = 1) -> Path:
    """A plan on a pipeline of 4, whose stages follow from the costs and not from a search."""
    pipeline = ["plan.strategy=custom", "plan.mesh={pp=4,dp=2}", f"plan.pipeline_order={order}", f"plan.chunks={chunks}"]
    keys = (*pipeline, f"plan.microbatches={microbatches}", "plan.recompute=none", "training.precision=bf16", *keys)
    return answers(model, "8xh100-sxm", 2 * microbatches, keys)


@pytest.mark.parametrize(("order", "chunks", "stages"), [("1f1b", 1, 4), ("dualpipe-v", 2, 8)])
def test_what_torch_refuses_at_the_start_is_not_exported(
    answers: Answers, tmp_path: Path, order: str, chunks: int, stages: int
) -> None:
    """torch 2.13: Schedule1F1B and ScheduleDualPipeV raise ValueError at the start for fewer microbatches than stages.
    parsim's own executor runs such a plan."""
    folder = by_hand(answers, "qwen3-0.6b", microbatches=3, order=order, chunks=chunks)
    with pytest.raises(ConfigError, match=f"does not start with 3 microbatches.* pp = 4 x {chunks} = {stages}"):
        export_folder(folder, format="torchtitan", out=tmp_path / "run.toml")
    assert not (tmp_path / "run.toml").exists()


def test_stages_of_a_plan_are_those_of_the_files(answers: Answers, tmp_path: Path) -> None:
    """torchtitan 0.2.2, Megatron-Core 0.16: torchtitan counts embedding and head as layers, Megatron-LM cuts evenly: the
    files say which layers a stage has."""
    folder = by_hand(answers, "qwen3-0.6b")
    stages = json.loads((folder / "plan.json").read_text())["stages"]
    counts = [len({name.split(".")[1] for name in stage["components"] if name.startswith("h.")}) for stage in stages]
    done = export_folder(folder, format="torchtitan", out=tmp_path / "run.toml")
    parts = tomllib.loads((tmp_path / "run.toml").read_text())["parallelism"]["module_fqns_per_model_part"]
    assert [sum(name.startswith("layers.") for name in part) for part in parts] == counts
    assert (parts[0][0], parts[-1][-2:], sum(counts)) == ("tok_embeddings", ["norm", "output"], 28)
    assert "plan.stages" not in done.left_out
    assert read_recipe(tmp_path / "run.toml").stage_layers == tuple(counts)
    done = export_folder(folder, format="megatron", out=tmp_path / "run.sh")
    assert "plan.stages" not in done.left_out
    layout = "|".join(f"t*{count}" for count in counts)
    assert (f"--pipeline-model-parallel-layout 'E{layout}L'" in (tmp_path / "run.sh").read_text()) == (len(set(counts)) > 1)


@pytest.mark.parametrize(("order", "chunks"), [("interleaved", 3), ("zero-bubble", 4), ("zero-bubble", 1)])
def test_torchtitan_takes_any_number_of_stages_per_rank(answers: Answers, tmp_path: Path, order: str, chunks: int) -> None:
    """torchtitan 0.2.2: two stages per rank are only its default. Stages that a file lists may be any multiple of the ranks
    (pipeline_llm)."""
    folder = by_hand(answers, "qwen3-0.6b", order=order, chunks=chunks)
    export_folder(folder, format="torchtitan", out=tmp_path / "run.toml")
    recipe = read_recipe(tmp_path / "run.toml")
    assert (recipe.order, recipe.chunks, len(recipe.stage_layers)) == (order, chunks, 4 * chunks)


def test_frameworks_refuse_other_models(answers: Answers) -> None:
    folder = answers("resnet_small", "8xh100-sxm", 64, ["plan.strategy=dp"])
    for format in ("megatron", "torchtitan"):
        with pytest.raises(ConfigError, match=r"describes a transformer by its sizes, and model.name = 'resnet_small'"):
            export_folder(folder, format=format)


def test_torchtitan_has_no_zero_1_without_a_pipeline(answers: Answers) -> None:
    keys = ["plan.strategy=dp", "plan.zero_stage=1", "plan.recompute=full", "training.precision=bf16"]
    folder = answers("llama3-8b", "8xh100-sxm", 8, [*keys, "model.args.seq=1024"])
    with pytest.raises(ConfigError, match=r"the plan divides the state alone \(ZeRO 1\); plan with"):
        export_folder(folder, format="torchtitan")


def test_a_vocabulary_is_not_padded_where_the_step_allows(answers: Answers, tmp_path: Path) -> None:
    keys = [*SMALL[:3], "model.args.vocab=1000", "model.args.seq=128", "plan.strategy=mp", "plan.mesh={pp=1,dp=1,tp=4}"]
    keys += ["plan.recompute=none", "cluster.devices=4", "training.precision=bf16"]
    folder = answers("transformer", "8xh100-sxm", 32, keys)
    export_folder(folder, format="megatron", out=tmp_path / "run.sh")
    assert "--make-vocab-size-divisible-by 2" in (tmp_path / "run.sh").read_text()
    assert read_recipe(tmp_path / "run.sh").args["vocab"] == 1000


def test_a_chrome_trace_of_a_planned_answer(answers: Answers, tmp_path: Path) -> None:
    folder = answers("transformer", "8xh100-sxm", 32, CUT)
    done = export_folder(folder, format="chrome", out=tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    spans = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == done.found["spans"]
    assert {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"} <= set(spans[0])
    assert all(event["dur"] >= 0 for event in spans)


def test_the_command_and_python_write_the_same(
    answers: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = answers("transformer", "8xh100-sxm", 32, CUT)
    by_command = tmp_path / "command.sh"
    words = ("export", str(folder), "--format", "megatron", "--out", str(by_command), "--json")
    assert status_of(monkeypatch, *words) == 0
    told = json.loads(capsys.readouterr().out)
    assert "model, data and length of the training" in told["left_out"]
    prediction = simulate("transformer", cluster="8xh100-sxm", global_batch=32, overrides=CUT)
    done = prediction.export("megatron", out=tmp_path / "python.sh")
    assert done.to_dict() == told | {"file": str(tmp_path / "python.sh"), "launch": "bash python.sh"}
    assert (tmp_path / "python.sh").read_text() == by_command.read_text()


def test_stages_that_begin_inside_a_layer_are_cut_between_layers(answers: Answers, tmp_path: Path) -> None:
    folder = answers("transformer", "8xh100-sxm", 32, CUT)
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    plan = json.loads((moved / "plan.json").read_text())
    first, second = plan["stages"]
    while second["components"][0].endswith("norm1"):  # with which a layer begins
        for key in ("components", "placements"):
            if first.get(key):
                second[key].insert(0, first[key].pop())
    (moved / "plan.json").write_text(json.dumps(plan))
    done = export_folder(moved, format="megatron", out=tmp_path / "a.sh")
    assert done.left_out["plan.stages"].startswith("Megatron-LM cuts between layers, here into 2 + 2; ")


def test_traces_of_every_rank_say_what_the_breakdown_says(tmp_path: Path) -> None:
    """As torch.profiler's, read by the reader of these: step, computation and exposed communication of each rank."""
    keys = ["plan.strategy=custom", "plan.mesh={pp=2,dp=2}", "plan.microbatches=2", "plan.zero_stage=1", "plan.recompute=none"]
    prediction = simulate("llama3-8b", cluster="4xh100-sxm", global_batch=8, overrides=[*SMALL, *keys])
    prediction.export("hta", out=tmp_path / "traces")
    parts = prediction.breakdown()
    for rank in range(4):
        trace = read_kineto(read_source(tmp_path / "traces" / f"rank{rank}.json"))
        ledger = ledger_of(trace, None)
        assert (trace.rank, trace.world_size, trace.device) == (rank, 4, "h100-sxm")
        assert ledger.compute_s == pytest.approx(parts["compute_s"][rank], rel=1e-3)
        assert ledger.exposed_communication_s == pytest.approx(parts["exposed_communication_s"][rank], rel=0.01, abs=1e-5)
