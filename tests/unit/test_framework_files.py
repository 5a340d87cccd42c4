"""Files of Megatron-LM, NeMo and torchtitan, read as they are: sizes, mesh, batch, precision, and keys that are not known."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import parsim
from parsim.errors import ConfigError
from parsim.formats.megatron import expanded, options_of, read_script
from parsim.formats.recipe import Recipe, is_framework_file, read_recipe, yaml_table
from parsim.formats.source import SourceFile
from parsim.formats.torchtitan import read_toml

FILES = Path(__file__).parents[1] / "frameworks"
SIZES = "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --vocab-size 1000 "


def titan(**tables: dict[str, object]) -> Recipe:
    """A file of torchtitan with these tables beside those of a small training of Llama 3 8B."""
    document = {"model": {"name": "llama3", "flavor": "8B"}, "training": {"local_batch_size": 1, "seq_len": 128}}
    return read_toml(document | tables)


def test_a_shell_script_is_followed() -> None:
    recipe = read_recipe(FILES / "pretrain_llama.sh")
    settings = recipe.settings(16)
    assert recipe.processes == 16
    assert settings["plan.mesh"] == {"pp": 2, "dp": 2, "tp": 4}
    assert settings["training.global_batch"] == 32
    assert settings["plan.microbatches"] == 8
    assert (settings["plan.zero_stage"], settings["plan.recompute"]) == (1, ["h.*"])
    args = dict(recipe.args)
    assert (args["layers"], args["hidden"], args["heads"], args["kv_heads"], args["ffn"]) == (8, 1024, 16, 8, 2816)
    assert (args["gated"], args["norm"], args["bias"], args["tied"], args["rotary"]) == (True, "rms", False, False, True)
    assert args["vocab"] == 32256  # a multiple of 128 * tp
    assert recipe.unknown == ["--brand-new-thing"]
    assert (settings["plan.tensor_overlap"], settings["plan.gather_ahead"]) == (True, False)
    assert settings["software.framework"] == "megatron"
    assert {"--lr", "--save", "--log-interval", "--master-addr"} <= set(recipe.ignored)


def test_a_yaml_file_of_nemo() -> None:
    pytest.importorskip("yaml")
    recipe = read_recipe(FILES / "nemo_gpt.yaml")
    assert recipe.framework.startswith("NeMo")
    assert recipe.settings(8)["plan.mesh"] == {"pp": 1, "dp": 4, "tp": 2}
    assert recipe.zero == 1
    assert recipe.training["precision"] == "bf16"
    assert (recipe.args["gated"], recipe.args["norm"], recipe.args["tied"]) == (True, "rms", False)
    assert recipe.unknown == []
    assert "--recompute-granularity" in recipe.left_out


def test_a_file_of_torchtitan() -> None:
    recipe = read_recipe(FILES / "torchtitan.toml")
    settings = recipe.settings(8)
    assert recipe.model == "llama3-8b"
    assert settings["plan.mesh"] == {"pp": 1, "dp": 8, "tp": 1}
    assert (settings["plan.zero_stage"], settings["training.global_batch"]) == (3, 8)
    assert settings["plan.recompute"] == ["h.*"]
    assert recipe.unknown == ["training.a_new_switch"]


@pytest.mark.parametrize(
    ("degrees", "states"),
    [
        ({"data_parallel_replicate_degree": 2}, (3, 4)),
        ({"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 4}, (3, 4)),
        ({"data_parallel_replicate_degree": 8, "data_parallel_shard_degree": 1}, (0, None)),
        ({"data_parallel_replicate_degree": 1}, (3, 8)),
        ({"data_parallel_shard_degree": -1}, (3, 8)),
        ({}, (3, 8)),
        ({"data_parallel_replicate_degree": 8}, (0, None)),
        ({"data_parallel_replicate_degree": 2, "fsdp_reshard_after_forward": "never"}, (2, 4)),
    ],
)
def test_torchtitan_shards_within_groups(degrees: dict[str, object], states: tuple[int, int | None]) -> None:
    recipe = titan(parallelism=degrees)
    settings = recipe.settings(8)
    assert (settings["plan.zero_stage"], settings.get("plan.dp_shard")) == states
    assert not {key for key in recipe.left_out if "data_parallel" in key}


def test_torchtitan_keeps_states_as_often_as_divides_the_replicas() -> None:
    with pytest.raises(ConfigError, match=r"keeps states 3 times, which must divide the 8 replicas; the nearest that do: 2"):
        titan(parallelism={"data_parallel_replicate_degree": 3}).settings(8)


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        ("--num-distributed-optimizer-instances 2 --use-distributed-optimizer", (1, 4)),
        ("--num-distributed-optimizer-instances 2", (0, None)),
        ("--use-distributed-optimizer", (1, 8)),  # left out, the search would try groups of a node
    ],
)
def test_megatron_has_several_instances_of_the_optimizer(optimizer: str, states: tuple[int, int | None]) -> None:
    recipe = read_script(f"torchrun pretrain_gpt.py {SIZES} {optimizer}")
    settings = recipe.settings(8)
    assert (settings["plan.zero_stage"], settings.get("plan.dp_shard")) == states


@pytest.mark.parametrize(("converters", "told"), [(["float8"], True), ([], False)])
def test_gathering_in_8_bits_is_left_out_where_torchtitan_trains_in_8_bits(converters: list[str], told: bool) -> None:
    model = {"name": "llama3", "flavor": "8B", "converters": converters}
    recipe = titan(model=model, float8={"enable_fsdp_float8_all_gather": True, "recipe_name": "rowwise"})
    assert ("float8.enable_fsdp_float8_all_gather" in recipe.left_out) == told
    assert ("float8.enable_fsdp_float8_all_gather" in recipe.ignored) != told


@pytest.mark.parametrize(("option", "again"), [("2", [f"h.{layer}" for layer in range(1, 32, 2)]), ("op", "selective")])
def test_what_torchtitan_recomputes_selectively(option: str, again: object) -> None:
    """torchtitan 0.2.2: selective recomputation runs every second layer again, or by operator."""
    recipe = titan(activation_checkpoint={"mode": "selective", "selective_ac_option": option})
    assert recipe.settings(2)["plan.recompute"] == again
    left_out = recipe.left_out.get("activation_checkpoint.selective_ac_option", "")
    assert ("every second product" in left_out) == (option == "op")


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("A=4\ncmd --x $A", "x", ["4"]),
        ("A=${B:-7}; cmd --x ${A}", "x", ["7"]),
        ("A=2\nB=$((A * 3 + 1))\ncmd --x $B", "x", ["7"]),
        ('ARGS="--x 1 \\\n --y 2"\ncmd $ARGS', "y", ["2"]),
        ("ARGS=(--x 1 # why\n --y)\nARGS+=(--z 3)\ncmd ${ARGS[@]}", "z", ["3"]),
        ("cmd --x=5 --flag", "x", ["5"]),
        ("# cmd --x 1\ncmd --x 2", "x", ["2"]),
        ("cmd --x $(date)", "x", ["?"]),
        ("cmd --some_thing 3", "some-thing", ["3"]),
    ],
)
def test_options_of_scripts(text: str, key: str, value: list[str]) -> None:
    assert options_of(text)[key] == value


def test_nothing_of_a_script_runs(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    assert expanded(f"$(touch {trace})", {}) == "?"
    options_of(f"touch {trace}\n__import__('os').system('touch {trace}')\nA=$((__import__('os')))")
    assert not trace.exists()


def test_what_grows_without_bounds_is_refused(tmp_path: Path) -> None:
    doubling = "A=--x\n" + "".join('A="$A $A"\n' for _ in range(40)) + "cmd $A"
    with pytest.raises(ConfigError, match="write its options out"):
        options_of(doubling)
    pytest.importorskip("yaml")
    bomb = tmp_path / "bomb.yaml"
    lines = ["tensor_model_parallel_size: 1", "a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {{" + ", ".join(f"k{k}: *a{n - 1}" for k in range(9)) + "}" for n in range(1, 9)]
    bomb.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"aliases .* stand for more than 100,000 values"):
        read_recipe(bomb)


@pytest.mark.parametrize(
    ("extra", "recompute", "zero", "precision"),
    [
        ("--bf16", "none", 0, "bf16"),
        ("--fp16 --recompute-granularity full --recompute-method block", "full", 0, "amp_fp16"),
        ("--bf16 --attention-backend unfused --recompute-granularity selective", "selective", 0, "bf16"),
        ("--bf16 --fp8-format hybrid --use-distributed-optimizer", "none", 1, "fp8"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "none", 2, "fp32"),
    ],
)
def test_options_of_megatron(extra: str, recompute: str, zero: int, precision: str) -> None:
    recipe = read_script(SIZES + extra)
    assert (recipe.recompute, recipe.zero, recipe.training["precision"]) == (recompute, zero, precision)
    assert recipe.unknown == []


def test_recomputed_modules_and_layers_of_megatron() -> None:
    recipe = read_script(SIZES + "--bf16 --recompute-granularity selective --recompute-modules core_attn mla_up_proj")
    assert (recipe.recompute, recipe.args["recompute_modules"]) == ("selective", "core_attn mla_up_proj")
    assert recipe.settings(recipe.tp * recipe.pp)["plan.recompute"] == "selective"
    assert recipe.left_out == {}
    unmodelled = read_script(SIZES + "--bf16 --recompute-granularity selective --recompute-modules moe")
    assert unmodelled.recompute == "none"
    assert {"--recompute-granularity", "--recompute-modules"} <= set(unmodelled.left_out)
    blocks = read_script(SIZES + "--bf16 --recompute-granularity full --recompute-method block --recompute-num-layers 1")
    blocks.args["layers"], blocks.pp, blocks.tp, blocks.chunks = 8, 2, 1, 2
    assert blocks.settings(2)["plan.recompute"] == ["h.0.*", "h.2.*", "h.4.*", "h.6.*"]
    assert blocks.left_out == {}


def test_the_loss_of_transformer_engine_is_taken() -> None:
    assert read_script(SIZES + "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te").args["loss"] == "fused"
    assert "loss" not in read_script(SIZES + "--cross-entropy-loss-fusion").args


def test_offload_of_megatron_is_taken_where_it_means_the_same() -> None:
    recipe = read_script(SIZES + "--bf16 --optimizer-cpu-offload --cpu-offloading-num-layers 2")
    found = recipe.settings(recipe.tp * recipe.pp)
    assert found["plan.optimizer_offload"] is True
    assert found["plan.activation_offload"] in (["h.0", "h.1"], ["h.0.*", "h.1.*"])
    assert not {"--optimizer-cpu-offload", "--cpu-offloading-num-layers"} & set(recipe.left_out)
    part = read_script(SIZES + "--bf16 --optimizer-cpu-offload --optimizer-offload-fraction 0.5")
    assert not part.optimizer_offload
    assert {"--optimizer-cpu-offload", "--optimizer-offload-fraction"} <= set(part.left_out)


def test_precisions_of_megatron_say_what_they_are_taken_as() -> None:
    assert read_script(SIZES + "--fp16").left_out["--fp16"].startswith("taken as amp_fp16")
    recipe = read_script(SIZES + "--fp4-format e2m1 --fp4-recipe nvfp4 --bf16 --reset-attention-mask")
    assert (recipe.training["precision"], recipe.args["fp8_casts"]) == ("nvfp4", True)
    assert list(recipe.left_out) == ["--reset-attention-mask"]
    assert recipe.unknown == []


def test_dualpipe_v_of_torchtitan_is_its_own_order() -> None:
    recipe = pipelined(8, {"pipeline_parallel_schedule": "DualPipeV"})
    assert (recipe.order, recipe.chunks) == ("dualpipe-v", 2)
    assert "parallelism.pipeline_parallel_schedule" not in recipe.left_out


def pipelined(local_batch: int, keys: dict[str, object], model: dict[str, object] | None = None) -> Recipe:
    """Llama 3 8B, of 32 layers, or another model on 4 stages with microbatches of one sample."""
    training: dict[str, object] = {"local_batch_size": local_batch, "seq_len": 128}
    model = model or {"name": "llama3", "flavor": "8B"}
    return titan(model=model, training=training, parallelism={"pipeline_parallel_degree": 4} | keys)


@pytest.mark.parametrize(
    ("schedule", "least"), [("1F1B", 4), ("DualPipeV", 8), ("GPipe", 1), ("ZBVZeroBubble", 1), ("Interleaved1F1B", 1)]
)
def test_a_pipeline_that_torch_refuses_at_the_start_is_refused(schedule: str, least: int) -> None:
    """torch 2.13: Schedule1F1B and ScheduleDualPipeV take no fewer microbatches than stages, the others any number."""
    assert pipelined(least, {"pipeline_parallel_schedule": schedule}).local_batch == least
    if least > 1:
        with pytest.raises(ConfigError, match=f"does not start with {least - 1} microbatches.*as many microbatches as stages"):
            pipelined(least - 1, {"pipeline_parallel_schedule": schedule})


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "InterleavedZeroBubble"])
def test_rounds_that_torch_refuses_are_refused(schedule: str) -> None:
    """torch 2.13: interleaved schedules refuse microbatches that make no rounds of equal size, and torchtitan a batch that is
    no multiple of the microbatch."""
    with pytest.raises(ConfigError, match=r"microbatches \(11\) in 2 equal rounds on pp = 4; use 8 or 12 microbatches"):
        pipelined(11, {"pipeline_parallel_schedule": schedule})
    with pytest.raises(ConfigError, match=r"local_batch_size = 9 must be divisible by pipeline_parallel_microbatch_size = 2"):
        pipelined(9, {"pipeline_parallel_microbatch_size": 2})


@pytest.mark.parametrize(
    ("keys", "layers", "chunks"),
    [
        ({}, (8, 9, 8, 7), 1),
        ({"pipeline_parallel_schedule": "Interleaved1F1B"}, (4, 5, 4, 4, 4, 4, 4, 3), 2),
        ({"pipeline_parallel_first_stage_less_layers": 0, "pipeline_parallel_last_stage_less_layers": 0}, (8, 8, 8, 8), 1),
        (
            {"pipeline_parallel_schedule": "Interleaved1F1B", "pipeline_parallel_layers_per_stage": 3},
            (2, *[3] * 9, 2, 1),
            3,
        ),
    ],
)
def test_stages_of_torchtitan_count_the_embedding_and_the_head(
    keys: dict[str, object], layers: tuple[int, ...], chunks: int
) -> None:
    """torchtitan 0.2.2: the embedding and the head count as a layer each, unless the file says otherwise
    (generate_llm_fqn_per_model_part). With 3 layers per stage 34 layers make 12 stages, 3 per rank."""
    recipe = pipelined(8, keys)
    assert recipe.chunks == chunks
    assert recipe.stage_layers == layers
    assert ("plan.stage_layers" in recipe.settings(4)) == ("pipeline_parallel_first_stage_less_layers" in keys)


def test_stages_that_torchtitan_cannot_make_are_refused() -> None:
    """torchtitan 0.2.2: stages that the ranks do not divide, and an embedding that counts for more than a stage, are refused
    at the start."""
    with pytest.raises(ConfigError, match="layers_per_stage = 5 makes 7 stages of 32 layers"):
        pipelined(8, {"pipeline_parallel_layers_per_stage": 5})
    with pytest.raises(ConfigError, match="cannot cut 32 layers into 4 stages: each has 12, and the embedding counts as 16"):
        pipelined(8, {"pipeline_parallel_first_stage_less_layers": 16})
    parts = [["tok_embeddings", "layers.0"], ["layers.1"], ["layers.2"], ["norm", "output"]]
    with pytest.raises(ConfigError, match="4 parts with 3 layers, and the model 32"):
        pipelined(8, {"module_fqns_per_model_part": parts})


@pytest.mark.parametrize(("batch", "taken"), [(4, True), (6, False), (8, True), (3, False)])
def test_rounds_that_megatron_refuses_are_refused(batch: int, taken: bool) -> None:
    """Megatron-Core 0.16: an interleaved pipeline runs rounds of pp microbatches and refuses a rest of fewer
    (forward_backward_pipelining_with_interleaving)."""
    pipeline = "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 1 "
    recipe = read_script(SIZES.replace("layers 4", "layers 8") + pipeline + f"--global-batch-size {batch}")
    if taken:
        assert recipe.settings(4)["plan.microbatches"] == batch
    else:
        with pytest.raises(ConfigError, match=f"in rounds of 4 microbatches, .* {batch} per replica are refused"):
            recipe.settings(4)


def test_layers_that_megatron_refuses_to_cut_are_refused() -> None:
    """Megatron-Core 0.16: layers must divide by the stages, unless a layout says what each stage has
    (get_num_layers_to_build)."""
    pipeline = "--pipeline-model-parallel-size 3 "
    with pytest.raises(ConfigError, match="4 layers must be divisible by pp 3 x 1 stages"):
        read_script(SIZES + pipeline)
    recipe = read_script(SIZES + pipeline + "--pipeline-model-parallel-layout 'Et|(t|)*3L|'")
    assert (recipe.chunks, recipe.stage_layers) == (2, (1, 1, 1, 1, 0, 0))


@pytest.mark.parametrize(
    ("layers", "options", "stages"),
    [
        (8, "", (2, 2, 2, 2)),
        (8, "--num-virtual-stages-per-pipeline-rank 2", (1,) * 8),
        (7, "--account-for-loss-in-pipeline-split", (2, 2, 2, 1)),
        (6, "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", (1, 2, 2, 1)),
        (9, "--decoder-first-pipeline-num-layers 3", (3, 2, 2, 2)),
        (8, "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 1", (3, 2, 2, 1)),
        (
            12,
            "--decoder-first-pipeline-num-layers 6 --num-virtual-stages-per-pipeline-rank 2",
            (3, 1, 1, 1, 3, 1, 1, 1),
        ),
        (9, "--pipeline-model-parallel-layout 'Et*3|(tt|)*2t*2L'", (3, 2, 2, 2)),
    ],
)
def test_stages_of_megatron_are_those_that_its_options_count_out(layers: int, options: str, stages: tuple[int, ...]) -> None:
    """Megatron-Core 0.16, get_num_layers_to_build and PipelineParallelLayerLayout; layers are dealt chunk after chunk."""
    recipe = read_script(SIZES.replace("layers 4", f"layers {layers}") + f"--pipeline-model-parallel-size 4 {options}")
    assert recipe.stage_layers == stages


@pytest.mark.parametrize("options", ["--decoder-first-pipeline-num-layers 7", "--account-for-loss-in-pipeline-split"])
def test_ends_that_leave_an_uneven_rest_are_refused(options: str) -> None:
    with pytest.raises(ConfigError, match="8 layers must be divisible by pp 4 x 1 stages per rank"):
        read_script(SIZES.replace("layers 4", "layers 8") + f"--pipeline-model-parallel-size 4 {options}")


OVERLAPPED = "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer "
EXPERTS = "--num-experts 8 --expert-model-parallel-size 2 --moe-token-dispatcher-type {} "


@pytest.mark.parametrize(
    ("extra", "plan", "software"),
    [
        ("", {}, {}),
        (OVERLAPPED, {"tensor_overlap": False, "gather_ahead": False}, {}),
        (OVERLAPPED + "--tp-comm-overlap --overlap-param-gather", {"tensor_overlap": True, "gather_ahead": True}, {}),
        ("--tensor-model-parallel-size 2 --tp-comm-overlap", {"tensor_overlap": False}, {}),
        (EXPERTS.format("alltoall"), {}, {"dispatcher": "all_to_all"}),
        (EXPERTS.format("flex") + "--moe-flex-dispatcher-backend hybridep", {}, {"dispatcher": "hybridep"}),
        (
            EXPERTS.format("flex") + "--overlap-moe-expert-parallel-comm --delay-wgrad-compute --moe-permute-fusion",
            {},
            {"dispatcher": "deepep", "expert_overlap": True, "delay_weight_gradients": True, "fused_permutation": True},
        ),
        ("--overlap-moe-expert-parallel-comm", {}, {}),
    ],
)
def test_what_megatron_overlaps_is_what_the_plan_and_the_software_do(
    extra: str, plan: dict[str, object], software: dict[str, object]
) -> None:
    recipe = read_script(SIZES + extra)
    assert recipe.plan_keys == plan
    assert recipe.software == {"framework": "megatron", **software}
    assert not recipe.unknown
    assert not [key for key in recipe.left_out if "overlap" in key or "dispatcher" in key]


@pytest.mark.parametrize(("value", "plan"), [("true", True), ("false", False), (None, None)])
def test_a_recipe_of_megatron_bridge_overlaps_unless_it_says_otherwise(
    tmp_path: Path, value: str | None, plan: bool | None
) -> None:
    pytest.importorskip("yaml")
    text = (FILES / "bridge_dump.yaml").read_text()
    text = re.sub(r"(?m)^.*tp_comm_overlap.*\n", "", text).rstrip() + "\n"
    text = re.sub(r"tensor_model_parallel_size: *\d+", "tensor_model_parallel_size: 2\n  sequence_parallel: true", text)
    file = tmp_path / "bridge.yaml"
    file.write_text(text + ("" if value is None else f"comm_overlap:\n  tp_comm_overlap: {value}\n"))
    recipe = read_recipe(file)
    assert recipe.software["framework"] == "megatron-bridge"
    assert recipe.plan_keys.get("tensor_overlap") == plan


def test_collectives_of_tensor_parallelism_in_torchtitan_run_beside_products_if_it_is_compiled() -> None:
    keys = {"tensor_parallel_degree": 2, "enable_async_tensor_parallel": True}
    compiled = titan(parallelism=keys, compile={"enable": True})
    assert (compiled.plan_keys, compiled.software) == ({"tensor_overlap": True}, {"framework": "torchtitan", "compiled": True})
    eager = titan(parallelism=keys)
    assert (eager.plan_keys, eager.software["compiled"]) == ({}, False)
    assert "parallelism.enable_async_tensor_parallel" in eager.left_out


def test_experts_of_megatron() -> None:
    recipe = read_script(SIZES + "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 96 --moe-layer-freq ([0]*1+[1]*3)")
    args = recipe.args
    assert (args["experts"], args["active"], args["expert_ffn"], args["dense_layers"]) == (8, 2, 96, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SIZES.replace("256", "wide"), "--hidden-size = 'wide' must be a whole number"),
        (
            SIZES + "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
            "4 layers must be divisible by pp 2 x 3",
        ),
    ],
)
def test_scripts_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_script(text)


def test_sizes_that_a_script_lacks_are_named() -> None:
    """They may be set beside the file, so that the reader does not give up."""
    assert read_script(SIZES.replace("--num-layers 4 ", "")).missing == {"model.args.layers": "--num-layers is missing; add it"}
    missing = read_script(SIZES.replace("256", "$HIDDEN")).missing
    assert "depends on a value that the file lacks" in missing["model.args.hidden"]


def test_context_and_expert_axes_of_megatron() -> None:
    recipe = read_script(SIZES + "--context-parallel-size 2 --tensor-model-parallel-size 2")
    assert recipe.settings(8)["plan.mesh"] == {"pp": 1, "dp": 2, "tp": 2, "cp": 2}
    recipe = read_script(SIZES + "--num-experts 8 --expert-model-parallel-size 4")
    assert recipe.settings(8)["plan.mesh"] == {"pp": 1, "dp": 8, "tp": 1, "ep": 4}


@pytest.mark.parametrize(
    ("extra", "devices", "message"),
    [
        (
            "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2",
            6,
            r"= 8 must divide the devices \(6\); ask for 8$",
        ),
        ("--tensor-model-parallel-size 8", 12, r"= 8 must divide the devices \(12\); ask for 8 or 16"),
        (
            "--tensor-model-parallel-size 8 --global-batch-size 10 --micro-batch-size 4",
            8,
            "must be divisible by 1 replicas x micro-batch 4 = 4; the nearest that is: 8",
        ),
    ],
)
def test_devices_and_batch_must_divide(extra: str, devices: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_script(SIZES + extra).settings(devices)


def test_torchtitan_models_that_are_not_known() -> None:
    recipe = titan(model={"name": "llama3", "flavor": "71B"})
    assert recipe.model == ""
    assert "flavor = '71B' is not known; did you mean" in recipe.missing["model.name"]


def test_a_run_file_is_no_file_of_torchtitan(tmp_path: Path) -> None:
    path = tmp_path / "RUN.toml"
    path.write_text('[model]\nname = "mlp"\n[cluster]\nprofile = "dgx1-v100-32gb"\n[training]\nglobal_batch = 8\n')
    assert not is_framework_file(path)
    assert not is_framework_file(path.rename(tmp_path / "question.txt"))
    (tmp_path / "options.txt").write_text(SIZES)
    assert is_framework_file(tmp_path / "options.txt")
    assert is_framework_file(FILES / "torchtitan.toml")


def test_a_file_is_planned_as_it_is() -> None:
    answer = parsim.plan(
        str(FILES / "torchtitan.toml"),
        cluster="2xh100-sxm",
        args=None,
        settings={"model.args.layers": 2, "model.args.seq": 256},
    )
    assert answer.prediction.plan.mesh.dp == 2
    assert answer.to_dict()["config_file"]["unknown"] == ["training.a_new_switch"]
    assert any("unknown, may matter: training.a_new_switch" in line for line in answer.lines())
    with pytest.raises(ConfigError, match=r"does not say on which GPUs; add --gpus 16xh100-sxm"):
        parsim.plan(str(FILES / "pretrain_llama.sh"))


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"training": {"tensor_parallel_degree": 4}}, {"tensor_parallel_degree": 4}),
        ({"experimental": {"pipeline_parallel_degree": 2}}, {"pipeline_parallel_degree": 2}),
        ({"experimental": {"context_parallel_degree": 2}}, {"context_parallel_degree": 2}),
        (
            {"training": {"data_parallel_degree": 4, "tensor_parallel_degree": 2}},
            {"data_parallel_shard_degree": 4, "tensor_parallel_degree": 2},
        ),
        ({"training": {"data_parallel_replicate_degree": 2}}, {"data_parallel_replicate_degree": 2}),
    ],
)
def test_degrees_of_older_releases_of_torchtitan_are_those_of_newer_ones(
    older: dict[str, dict[str, object]], newer: dict[str, object]
) -> None:
    """torchtitan 0.2.2: degrees moved from [training] and [experimental] to [parallelism]; both spellings are one
    question."""
    small: dict[str, object] = {"local_batch_size": 2, "seq_len": 128}
    tables = older | {"training": small | older.get("training", {})}
    assert titan(**tables).settings(8) == titan(training=small, parallelism=newer).settings(8)


def test_degrees_that_are_not_known_or_contradict_one_another_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"spectral_parallel_degree = 4 is a degree of parallelism that"):
        titan(parallelism={"spectral_parallel_degree": 4})
    with pytest.raises(ConfigError, match=r"parallelism.tensor_parallel_degree is both"):
        titan(parallelism={"tensor_parallel_degree": 4}, experimental={"tensor_parallel_degree": 8})
    with pytest.raises(ConfigError, match="expert_tensor_parallel_degree = 4 is neither 1 nor"):
        titan(parallelism={"expert_tensor_parallel_degree": 4, "tensor_parallel_degree": 2})
    assert titan(parallelism={"expert_tensor_parallel_degree": 1}).unknown == []


def test_small_experts_of_torchtitan_are_known() -> None:
    assert titan(model={"name": "deepseek_v3", "flavor": "16B"}).model == "deepseek-v2-lite"
    assert titan(model={"name": "qwen3", "flavor": "0.6B"}).model == "qwen3-0.6b"


def test_dashes_of_a_table_of_options_are_read_over(tmp_path: Path) -> None:
    """As the YAML files of Megatron-LM's own tests have them."""
    pytest.importorskip("yaml")
    words = SIZES.split()
    options = [f"  {name}: {value}" for name, value in zip(words[::2], words[1::2], strict=True)]
    path = tmp_path / "model_config.yaml"
    path.write_text("\n".join(["ENV_VARS:", "  SOMETHING: 1", "MODEL_ARGS:", *options, "  --swiglu: true", "  --bf16: true"]))
    recipe = read_recipe(path)
    same = read_script(f"{SIZES} --swiglu --bf16")
    assert (recipe.args, recipe.training) == (same.args, same.training)


def test_what_a_file_lacks_can_be_set_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "pretrain.sh"
    path.write_text(
        "torchrun --nproc_per_node 1 pretrain_gpt.py " + SIZES.replace("--vocab-size 1000", "--tokenizer-model $FILE")
    )
    asked = {"cluster": "1xh100-sxm", "global_batch": 8}
    with pytest.raises(ConfigError, match=r"vocabulary follows from a tokenizer.* or give --set model.args.vocab=N"):
        parsim.plan(str(path), **asked)  # type: ignore[arg-type]
    answer = parsim.plan(str(path), overrides=["model.args.vocab=1000"], **asked)  # type: ignore[arg-type]
    assert answer.to_dict()["config_file"]["framework"] == "Megatron-LM"


NANOTRON = """
general:
  run: x
model:
  dtype: bfloat16
  make_vocab_size_divisible_by: 64
  model_config:
    {family}: true
    hidden_size: 256
    intermediate_size: 512
    num_attention_heads: 8
    num_hidden_layers: 4
    num_key_value_heads: 2
    tie_word_embeddings: true
    vocab_size: 1000
optimizer:
  zero_stage: 1
parallelism:
  dp: 2
  pp: 2
  pp_engine: {engine}
  tp: 2
  tp_mode: ALL_REDUCE
  {more}
tokens:
  batch_accumulation_per_replica: 4
  micro_batch_size: 2
  sequence_length: 128
"""


def nanotron(tmp_path: Path, family: str = "is_llama_config", engine: str = "1f1b", more: str = "") -> Recipe:
    pytest.importorskip("yaml")
    path = tmp_path / "config.yaml"
    path.write_text(NANOTRON.format(family=family, engine=engine, more=more))
    return read_recipe(path)


def test_a_file_of_nanotron(tmp_path: Path) -> None:
    recipe = nanotron(tmp_path, engine="afab")
    settings = recipe.settings(8)
    assert recipe.framework == "nanotron"
    assert settings["plan.mesh"] == {"pp": 2, "dp": 2, "tp": 2}
    assert (settings["training.global_batch"], settings["plan.microbatches"]) == (16, 4)
    assert (settings["plan.zero_stage"], settings["plan.pipeline_order"]) == (1, "gpipe")
    args = recipe.args
    assert (args["layers"], args["hidden"], args["heads"], args["kv_heads"], args["ffn"]) == (4, 256, 8, 2, 512)
    assert (args["vocab"], args["tied"], args["sequence_parallel"], args["seq"]) == (1024, True, False, 128)
    assert (recipe.unknown, recipe.training["precision"]) == ([], "bf16")
    assert nanotron(tmp_path, family="is_qwen2_config").args["qkv_bias"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"family": "is_starcoder2_config"}, "must have one of is_llama_config"),
        ({"engine": "zbv"}, "pp_engine must be one of 1f1b"),
        ({"more": "domino: 2"}, "parallelism.domino = 2 is a degree of parallelism that parsim does not know"),
    ],
)
def test_files_of_nanotron_that_are_refused(tmp_path: Path, given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        nanotron(tmp_path, **given)


BASE = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --vocab-size 100 "


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.sh", f"{BASE} --num-layers inf", "--num-layers = 'inf' must be a whole number from 0"),
        ("a.sh", f"{BASE} --hidden-size nan", "--hidden-size = 'nan' must be a whole number from 0"),
        ("a.sh", f"{BASE} --make-vocab-size-divisible-by 0", "--make-vocab-size-divisible-by = '0' must be"),
        ("a.sh", f"{BASE} --tensor-model-parallel-size 0", "--tensor-model-parallel-size = '0' must be"),
        ("a.sh", f"{BASE} --num-experts 4 --moe-layer-freq 0", "--moe-layer-freq = '0' must be"),
        ("a.sh", f"{BASE} --num-experts 4 --moe-layer-freq [0]*{'9' * 5000}", "must be a whole number from 0"),
        ("a.sh", f"{BASE} --seq-length {'9' * 5000}", "must be a whole number from 0"),
        ("t.toml", '[model]\nname="llama3"\nflavor="8B"\n[parallelism]\ntensor_parallel_degree=0', "degree = 0 must be"),
        ("t.toml", '[model]\nname="llama3"\nflavor="8B"\n[parallelism]\ndata_parallel_shard_degree=0', "degree = 0 must be"),
    ],
)
def test_counts_that_cannot_be_are_refused_in_a_short_message(tmp_path: Path, name: str, text: str, said: str) -> None:
    pytest.importorskip("yaml")
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_recipe(tmp_path / name)
    assert len(str(caught.value)) <= 600


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: &m {itself: *m}", "aliases .* stand for more than 100,000 values"),
        ("b: &b {k: 1}\n" + "".join(f"b{n}: &b{n} {{<<: [{', '.join(['*b'] * 9)}]}}\n" for n in range(9)), ""),
        ("a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)), "aliases"),
        ("num_layers: " + "[" * 3000 + "]" * 3000, "not YAML that can be read"),
        ("a: " + "9" * 5000, "not YAML that can be read"),
    ],
)
def test_yaml_is_bounded_before_it_is_built(text: str, said: str) -> None:
    pytest.importorskip("yaml")
    source = SourceFile(Path("a.yaml"), text.encode())
    if not said:
        assert len(yaml_table(source)) == 10
        return
    with pytest.raises(ConfigError, match=said):
        yaml_table(source)
