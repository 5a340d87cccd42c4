"""Config files of training frameworks: what each says, what it lacks until --set gives it, and what is refused."""

from __future__ import annotations

import contextlib
import json
import re
import time
from pathlib import Path

import pytest

import parsim
from parsim.app.question import question_of
from parsim.errors import ConfigError
from parsim.formats.configs import is_framework_file, read_recipe
from parsim.formats.megatron import read_script
from parsim.formats.recipe import FileKeys, Recipe, by_weight, yaml_table
from parsim.formats.scripts import expanded, options_of
from parsim.formats.source import SourceFile, read_source
from parsim.formats.torchtitan import read_toml
from tools.reader_matrix import PAGE, differences, page, samples

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
    assert settings["plan.mesh"] == {"pp": 2, "dp": 2, "tp": 4, "cp": 1, "ep": 1}
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
    assert recipe.settings(8)["plan.mesh"] == {"pp": 1, "dp": 4, "tp": 2, "cp": 1, "ep": 1}
    assert recipe.zero == 1
    assert recipe.training["precision"] == "bf16"
    assert (recipe.args["gated"], recipe.args["norm"], recipe.args["tied"]) == (True, "rms", False)
    assert recipe.unknown == []
    assert "--recompute-granularity" in recipe.left_out


def test_a_file_of_torchtitan() -> None:
    recipe = read_recipe(FILES / "torchtitan.toml")
    settings = recipe.settings(8)
    assert recipe.model == "llama3-8b"
    assert settings["plan.mesh"] == {"pp": 1, "dp": 8, "tp": 1, "cp": 1, "ep": 1}
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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (': "${TP:=4}"\nrun --tp $TP', "4"),
        ("TP=2\n: ${TP:=4}\nrun --tp $TP", "2"),
        ("#SBATCH --nodes=32\n#SBATCH --gres=gpu:a100:4\nrun --tp $SLURM_GPUS_ON_NODE", "4"),
        ("#SBATCH -N 32\nrun --tp ${SLURM_NNODES}", "32"),
        ("#SBATCH --nodes 4\n#SBATCH --ntasks-per-node=8\nrun --tp $SLURM_NTASKS", "32"),
        ("TP=2\nwhile [[ $# -gt 0 ]]; do case $1 in\n --tp) TP=$2; shift;;\n esac; done\nrun --tp $TP", "2"),
        ("TP=2\nwhile getopts t: key\ndo\n TP=$OPTARG\ndone\nrun --tp $TP", "2"),
        ("for size in 1 2; do\nTP=8\ndone\nrun --tp $TP", "8"),
        ("if [ -z $X ]; then\nTP=1\nelse TP=2\nfi\nrun --tp $TP", "1"),
    ],
)
def test_what_a_script_has_without_arguments_in_a_job_of_slurm(text: str, value: str) -> None:
    assert options_of(text)["tp"] == [value]


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


def test_latent_attention_without_sizes_has_those_of_megatron() -> None:
    """Source: megatron/core/transformer/transformer_config.py, MLATransformerConfig."""
    args = read_script(SIZES + "--bf16 --multi-latent-attention --q-lora-rank 1536").args
    assert {key: args[key] for key in ("query_rank", "key_rank", "rope_dim", "head_dim")} == {
        "query_rank": 1536,
        "key_rank": 512,
        "rope_dim": 64,
        "head_dim": 128,
    }


def test_precisions_of_megatron_say_what_they_are_taken_as() -> None:
    assert read_script(SIZES + "--fp16").left_out["--fp16"].startswith("taken as amp_fp16")
    recipe = read_script(SIZES + "--fp4-format e2m1 --fp4-recipe nvfp4 --bf16 --reset-attention-mask")
    assert recipe.training["precision"] == "nvfp4"
    assert recipe.settings(8)["model.args"]["fp8_casts"] is True  # type: ignore[index]
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


@pytest.mark.parametrize(
    ("options", "vocab", "why"),
    [
        ("--num-layers 28 --hidden-size 3584 --num-attention-heads 28 --ffn-hidden-size 18944", 152064, "models of these"),
        ("--num-layers 3 --hidden-size 64 --num-attention-heads 2 --tokenizer-type Llama3Tokenizer", 128256, "such tokenizers"),
        ("--num-layers 3 --hidden-size 64 --num-attention-heads 2", 0, ""),
    ],
)
def test_a_vocabulary_that_a_file_has_is_that_of_the_tokenizer_or_of_the_sizes(options: str, vocab: int, why: str) -> None:
    recipe = read_script(f"pretrain_gpt.py --seq-length 128 --swiglu {options}")
    assert recipe.args.get("vocab", 0) == -(-vocab // 128) * 128
    assert why in recipe.left_out.get("--vocab-size", "")
    assert ("model.args.vocab" in recipe.missing) is not bool(vocab)


def test_stages_have_the_layers_that_are_set_beside_the_file() -> None:
    question = question_of(
        FILES / "automodel_lora.yaml", cluster="8xh100-sxm", settings={"model.args.layers": 16}, overrides=()
    )
    assert question.plan.stage_layers == (2,) * 8


def test_what_options_of_megatron_do_not_size_is_refused_or_told() -> None:
    for option, said in (("--hybrid-override-pattern M-M*", "state spaces"), ("--rollout-batch-size 32", "rollouts")):
        with pytest.raises(ConfigError, match=said):
            read_script(SIZES + option)
    recipe = read_script(SIZES + "--context-parallel-size 8 --ulysses-degree-in-cp 4 --transformer-impl local --use-flash-attn")
    assert recipe.cp == 8
    assert "--ulysses-degree-in-cp" in recipe.left_out
    assert "kernels" not in recipe.args


def test_context_and_expert_axes_of_megatron() -> None:
    recipe = read_script(SIZES + "--context-parallel-size 2 --tensor-model-parallel-size 2")
    assert recipe.settings(8)["plan.mesh"] == {"pp": 1, "dp": 2, "tp": 2, "cp": 2, "ep": 1}
    recipe = read_script(SIZES + "--num-experts 8 --expert-model-parallel-size 4")
    assert recipe.settings(8)["plan.mesh"] == {"pp": 1, "dp": 8, "tp": 1, "cp": 1, "ep": 4}


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


@pytest.mark.parametrize(
    ("name", "flavor", "model"),
    [
        ("simple_fsdp.llama3", "8B", "llama3-8b"),
        ("llama3", "8B_flex", "llama3-8b"),
        ("deepseek_v3", "kimi_k2", "kimi-k2"),
        ("qwen3", "debugmodel", "transformer"),
    ],
)
def test_variants_of_a_model_of_torchtitan_have_its_sizes(name: str, flavor: str, model: str) -> None:
    assert titan(model={"name": name, "flavor": flavor}).model == model


def test_optimizers_and_blocks_that_torchtitan_names_are_told() -> None:
    recipe = titan(optimizer={"name": "Muon"})
    assert "Muon is not modelled" in recipe.left_out["optimizer.name"]
    model = {"name": "qwen3", "flavor": "8B", "converters": ["quantize.linear.mx"]}
    assert titan(model=model).training["precision"] == "fp8"
    assert "Muon" in str(read_script(SIZES.replace("--num", "--optimizer Muon --num", 1)).left_out["--optimizer"])


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
    keys = FileKeys("a tool", {"data_parallel_dim": 2})
    with pytest.raises(ConfigError, match="data_parallel_dim = 2 is a degree of parallelism"):
        keys.sort(Recipe(framework="a tool"), left_out={}, ignored=re.compile("seed"))
    for degree in (4, -1):  # -1 is all ranks that are left
        with pytest.raises(ConfigError, match=rf"spectral_parallel_degree = {degree} is a degree of parallelism that"):
            titan(parallelism={"spectral_parallel_degree": degree})
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
    with pytest.raises(ConfigError, match=r"vocabulary follows from a tokenizer.*; complete the file, or give --set"):
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


def test_a_file_of_neox_that_is_json_is_none_of_deepspeed(tmp_path: Path) -> None:
    """Its keys are also DeepSpeed's: `zero_optimization`, `train_micro_batch_size_per_gpu`."""
    path = tmp_path / "neox.yml"
    path.write_text(json.dumps(yaml_table(read_source(FILES / "neox_20b.yml")), indent=1))
    assert read_recipe(path).settings(96) == read_recipe(FILES / "neox_20b.yml").settings(96)


CARDS = """
BASE_LLAMA3_8B_CONFIG = WorkloadBaseConfig(num_gpus=8, global_batch_size=128)
LLAMA3_8B_PRETRAIN_CONFIG_H100_BF16 = replace(BASE_LLAMA3_8B_CONFIG, context_parallel_size=2)
"""


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("LLAMA3_8B_PRETRAIN_CONFIG_B200_BF16 = LLAMA3_8B_PRETRAIN_CONFIG_H100_BF16", "holds 2 settings"),
        ("LLAMA3_8B_PRETRAIN_CONFIG_H100_BF16 = replace(BASE_LLAMA3_8B_CONFIG, peft='lora')", "--tune lora:r=N"),
    ],
)
def test_a_table_of_megatron_bridge_has_one_setting(more: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cards.py"
    path.write_text(CARDS)
    recipe = read_recipe(path)
    assert (recipe.model, recipe.cp, recipe.processes, recipe.training["precision"]) == ("llama3-8b", 2, 8, "bf16")
    path.write_text(CARDS + more)
    with pytest.raises(ConfigError, match=message):
        read_recipe(path)


def test_nemo_names_a_vocabulary_that_is_not_of_its_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "nemo.yaml"
    text = (FILES / "nemo_gpt.yaml").read_text()
    path.write_text(re.sub(r"\bvocab_size: \d+", "override_vocab_size: 256000", text))
    assert read_recipe(path).args["vocab"] == 256000


def test_a_file_of_nanotron(tmp_path: Path) -> None:
    recipe = nanotron(tmp_path, engine="afab")
    settings = recipe.settings(8)
    assert recipe.framework == "nanotron"
    assert settings["plan.mesh"] == {"pp": 2, "dp": 2, "tp": 2, "cp": 1, "ep": 1}
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
        ("a.sh", f"{BASE} --make-vocab-size-divisible-by 0", "--make-vocab-size-divisible-by = 0 must be"),
        ("a.sh", f"{BASE} --tensor-model-parallel-size 0", "--tensor-model-parallel-size = 0 must be"),
        ("a.sh", f"{BASE} --num-experts 4 --moe-layer-freq 0", "--moe-layer-freq = 0 must be"),
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


# Config files of more frameworks: what each says, what it lacks until --set gives it, and what is refused. The texts are
# our own, in the layout of the tools' public files.

EXPECTED = json.loads((FILES / "expected.json").read_text())
"""What each of the files there says; tools/reader_matrix.py counts how many are read so."""
MODEL_ARGS = (FILES / "megatron_model_args.yaml").read_text()
BRIDGE = (FILES / "bridge_dump.yaml").read_text()
BRIDGE_OVERRIDES = (FILES / "bridge_overrides.yaml").read_text()
PRIMUS = (FILES / "primus_megatron.yaml").read_text()
MAXTEXT = (FILES / "maxtext.yml").read_text()
ARGUMENTS = (FILES / "arguments.json").read_text()
FACTORY = (FILES / "llama_factory.yaml").read_text()
ACCELERATE = (FILES / "accelerate_fsdp.yaml").read_text()
AXOLOTL = (FILES / "axolotl.yaml").read_text()
TORCHTUNE = (FILES / "torchtune.yaml").read_text()
LIGHTNING = (FILES / "lightning.yaml").read_text()
FOUNDRY = (FILES / "llmfoundry_mpt_7b.yaml").read_text()
SWIFT = (FILES / "swift_full.sh").read_text()
RECIPE = (FILES / "nemo2_recipe.py").read_text()
NEMO = (FILES / "nemo_llama_7b.yaml").read_text()
LITGPT = (FILES / "litgpt.yaml").read_text()


def read(folder: Path, name: str, text: str) -> Recipe:
    (folder / name).write_text(text)
    return read_recipe(folder / name)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_files_of_frameworks(name: str) -> None:
    """Each says what expected.json has, or is refused as it has it: with what to add or to ask instead."""
    if why := EXPECTED[name].get("refused"):
        with pytest.raises(ConfigError, match=re.escape(why)):
            read_recipe(FILES / name)
        return
    assert differences(read_recipe(FILES / name), EXPECTED[name]) == {}


def test_precisions_and_lengths_of_files(tmp_path: Path) -> None:
    """bf16 under autocast keeps 4-byte weights; a dump of Bridge contradicts itself in the length of a sample."""
    assert read(tmp_path, "a.json", ARGUMENTS).training["precision"] == "amp_bf16"
    assert read(tmp_path, "b.yaml", LITGPT).training["precision"] == "bf16"
    bridge = read(tmp_path, "c.yaml", BRIDGE)
    assert bridge.args["seq"] == 4096
    assert "4096 was taken" in bridge.left_out["model.seq_length"]
    assert "bf16" in read(tmp_path, "d.yaml", PRIMUS).left_out["--bf16"]
    assert read(tmp_path, "e.yaml", MODEL_ARGS).args["vocab"] == 50432  # GPT-2's 50,257, padded for tp 2


LAUNCHED = "--model_name_or_path meta-llama/Llama-2-7b-hf --per_device_train_batch_size 4 --max_seq_length 2048"


def test_the_yaml_of_accelerate_is_read_with_what_it_starts(tmp_path: Path) -> None:
    """The YAML is named by the script, comes with the script's file of arguments, or lies beside the script."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "fsdp.yaml").write_text(ACCELERATE)
    named = read(tmp_path, "a.sh", f"accelerate launch --config_file configs/fsdp.yaml train.py {LAUNCHED} --bf16")
    assert (named.zero, named.recompute, named.processes, named.training["precision"]) == (3, "full", 16, "amp_bf16")
    assert (named.model, named.local_batch, named.missing) == ("llama2-7b", 4, {})
    (tmp_path / "sft.yaml").write_text("model_name_or_path: Qwen/Qwen3-8B\nper_device_train_batch_size: 2\nmax_length: 1024\n")
    launch = "accelerate launch --config_file configs/fsdp.yaml scripts/sft.py sft.yaml --per_device_train_batch_size=8"
    recipe = read(tmp_path, "b.sh", launch)
    assert (recipe.model, recipe.micro_batch, recipe.args["seq"], recipe.zero) == ("qwen3-8b", 8, 1024, 3)
    assert recipe.training["precision"] == "amp_bf16"  # of the launcher, as the arguments say none
    gone = read(tmp_path, "c.sh", f"accelerate launch --config_file gone.yaml train.py {LAUNCHED}")
    assert "is not there" in gone.left_out["config_file"]


def test_the_yaml_of_accelerate_beside_a_training_is_taken_and_told(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(ACCELERATE)
    script = read(
        tmp_path, "train.py", 'TrainingArguments(per_device_train_batch_size=4)\nAutoModel.from_pretrained("gpt2-medium")'
    )
    assert script.zero == 3
    assert "move it away" in script.left_out["config_file"]
    whole = read_recipe(tmp_path / "fsdp.yaml")
    assert (whole.micro_batch, whole.zero) == (4, 3)
    assert "train.py lies beside it" in whole.left_out["arguments"]
    assert read(tmp_path, "a.sh", f"torchrun --nproc_per_node 8 train.py {LAUNCHED}").zero == 0  # which reads no such file
    assert read_recipe(tmp_path / "train.py").zero == 0  # which of two trainings it starts is not known
    (tmp_path / "a.sh").unlink()
    (tmp_path / "other.yaml").write_text(ACCELERATE)
    assert read_recipe(tmp_path / "train.py").zero == 0  # nor which of two is used


def test_contradictions_of_the_launcher_are_named_and_the_arguments_count(tmp_path: Path) -> None:
    accelerate = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\n"
        "deepspeed_config:\n  zero_stage: 3\n  gradient_accumulation_steps: 4\n"
    )
    (tmp_path / "ds.yaml").write_text(accelerate)
    options = f"{LAUNCHED} --fp16 --gradient_accumulation_steps 2 --fsdp shard_grad_op"
    recipe = read(tmp_path, "a.sh", f"accelerate launch --config_file ds.yaml train.py {options}")
    assert (recipe.training["precision"], recipe.zero, recipe.local_batch) == ("amp_fp16", 2, 8)
    told = {key: why for key, why in recipe.left_out.items() if key.startswith("ds.yaml: ")}
    assert told.keys() == {"ds.yaml: mixed_precision", "ds.yaml: ZeRO stage", "ds.yaml: gradient_accumulation_steps"}
    assert all("was taken" in why for why in told.values())
    plain = read(
        tmp_path, "b.sh", f"accelerate launch --config_file ds.yaml train.py {LAUNCHED} --bf16 --gradient_accumulation_steps 4"
    )
    assert not any("was taken" in why for why in plain.left_out.values())
    assert (plain.zero, plain.software["framework"]) == (3, "deepspeed")


@pytest.mark.parametrize(
    ("name", "text", "lacks", "given"),
    [
        ("a.yaml", ACCELERATE, "model.name=NAME --set training.global_batch=N", ("model.name=llama3-8b",)),
        ("a.yaml", BRIDGE_OVERRIDES, "model.name=NAME", ("model.name=llama3-8b",)),
        ("a.yaml", LIGHTNING, "model.name=NAME", ("model.name=gpt2",)),
    ],
)
def test_what_a_file_lacks_is_named_and_can_be_set(
    tmp_path: Path, name: str, text: str, lacks: str, given: tuple[str, ...]
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=lacks):
        question_of(tmp_path / name, cluster="16xh100-sxm", overrides=['cluster.network="infiniband-400g"'])
    question = question_of(
        tmp_path / name, cluster="16xh100-sxm", global_batch=128, overrides=['cluster.network="infiniband-400g"', *given]
    )
    assert question.model.name == given[0].partition("=")[2]
    assert question.training.global_batch == 128


def test_sizes_of_a_script_that_lacks_them_can_be_set(tmp_path: Path) -> None:
    script = "torchrun pretrain_gpt.py --hidden-size 4096 --num-layers $1 --num-attention-heads 32 --seq-length 2048 --bf16"
    path = tmp_path / "a.sh"
    path.write_text(script)
    with pytest.raises(ConfigError, match=r"--num-layers depends on a value that the file lacks.*model\.args\.layers=N"):
        question_of(path, cluster="8xh100-sxm", global_batch=64)
    question = question_of(
        path, cluster="8xh100-sxm", global_batch=64, overrides=["model.args.layers=32", "model.args.vocab=32000"]
    )
    assert dict(question.model.args)["layers"] == 32
    path.write_text(f"{script.replace('$1', '32')} --vocab-size 32000 --tensor-model-parallel-size ${{2}}")
    with pytest.raises(ConfigError, match=r"--tensor-model-parallel-size depends.*plan\.mesh\.tp=N"):
        question_of(path, cluster="8xh100-sxm", global_batch=64)
    question = question_of(path, cluster="8xh100-sxm", global_batch=64, overrides=["plan.mesh.tp=2"])
    assert question.plan.mesh is not None
    assert (question.plan.mesh.tp, question.plan.mesh.dp) == (2, 4)


def branches(size: str, tp: int) -> str:
    """The script of tests/frameworks for another size and another division."""
    text = (FILES / "megatron_branches.sh").read_text(encoding="utf-8")
    return text.replace("SIZE=13B\nTP=2\n", f"SIZE={size}\nTP={tp}\n")


@pytest.mark.parametrize(
    ("size", "tp", "sizes", "sequence"),
    [("7B", 2, (32, 4096, 32), True), ("13B", 1, (40, 5120, 40), False)],
)
def test_the_branch_that_runs_counts(tmp_path: Path, size: str, tp: int, sizes: tuple[int, ...], sequence: bool) -> None:
    """Not the last of all, whose sizes are another model's."""
    recipe = read(tmp_path, "a.sh", branches(size, tp))
    assert tuple(recipe.args[key] for key in ("layers", "hidden", "heads")) == sizes
    assert recipe.args["sequence_parallel"] is sequence
    assert recipe.chunks == 1


def test_branches_that_the_file_does_not_decide_leave_sizes_unknown(tmp_path: Path) -> None:
    text = branches("$(cat size)", 1)
    recipe = read(tmp_path, "a.sh", text)
    assert "depends on a value" in recipe.missing["model.args.layers"]
    same = text.replace("LAYERS=40", "LAYERS=32")
    assert read(tmp_path, "b.sh", same).args["layers"] == 32  # all branches agree


ALONE = AXOLOTL.replace("tensor_parallel_size: 2\n", "")
NF4 = {"base": "nf4", "double_quantisation": True}


@pytest.mark.parametrize(
    ("text", "tune", "precision"),
    [
        (
            FACTORY.replace("type: full", "type: lora\nlora_rank: 4\nlora_target: all\nquantization_bit: 4"),
            {"method": "lora", "r": 4, "targets": ["all"], **NF4},
            "bf16",
        ),
        (
            ALONE.replace(
                "adapter:", "adapter: qlora\nload_in_4bit: true\nlora_r: 32\nlora_alpha: 16\nlora_target_linear: true"
            ),
            {"method": "qlora", "r": 32, "alpha": 16.0, "targets": ["all"], **NF4},
            "bf16",
        ),
        (
            ALONE.replace(
                "adapter:", "adapter: lora\nload_in_8bit: true\nlora_target_modules: [q_proj, v_proj]\nlora_dropout: 0.05"
            ),
            {"method": "lora", "r": 8, "dropout": 0.05, "targets": ["q_proj", "v_proj"], "base": "int8"},
            "bf16",
        ),
        (
            TORCHTUNE.replace(
                ".llama3_1_8b}",
                ".qlora_llama3_1_8b, lora_attn_modules: [q_proj, output_proj], apply_lora_to_mlp: True, lora_rank: 64}",
            ),
            {"method": "qlora", "r": 64, "targets": ["q_proj", "output_proj", "mlp"]},
            "bf16",
        ),
        (
            LITGPT + "lora_r: 16\nlora_mlp: true\nquantize: bnb.nf4-dq\n",
            {"method": "lora", "r": 16, "targets": ["q_proj", "v_proj", "mlp"], **NF4},
            "bf16",
        ),
    ],
)
def test_adapters_of_files(tmp_path: Path, text: str, tune: dict[str, object], precision: str) -> None:
    """With 16-bit weights beside trained ones in fp32, or in 16 bits with a copy in fp32."""
    recipe = read(tmp_path, "a.yaml", text)
    assert recipe.training["tune"] == tune
    assert recipe.training["precision"] == precision
    assert not [key for key in recipe.unknown if "lora" in key or "quant" in key]
    question = question_of(tmp_path / "a.yaml", cluster="8xh100-sxm", global_batch=64)
    assert question.training.tune is not None
    assert question.training.tune.rank == tune["r"]


def test_16_bit_floats_of_adapters_are_taken_as_wide_ones(tmp_path: Path) -> None:
    recipe = read(tmp_path, "a.yaml", FACTORY.replace("type: full", "type: lora").replace("bf16: true", "fp16: true"))
    assert recipe.training["precision"] == "bf16"
    assert "fp16" in recipe.left_out


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("/cache/models--meta-llama--Llama-3.2-1B/snapshots/4e20de36", "llama3.2-1b"),
        ("/data/Qwen2-1___5B-Instruct", "qwen2-1.5b"),
    ],
)
def test_names_of_folders_are_those_of_models(tmp_path: Path, name: str, model: str) -> None:
    start = "deepspeed train.py --per_device_train_batch_size 1"
    assert read(tmp_path, "a.sh", f"{start} --model_name_or_path {name}").model == model
    assert read(tmp_path, "b.sh", start).missing["model.name"] == "no model_name_or_path is in the file"


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NousResearch/Hermes-2-Pro-Mistral-7B", "mistral-7b"),
        ("./out/qwen2-7b-my-run", "qwen2-7b"),
        ("meta-llama/Llama-3.2-11B-Vision-Instruct", ""),
        ("my-gpt2-model", ""),
        ("lmms-lab/llava-llama3-8b", ""),
        ("llama3-8bit", ""),
    ],
)
def test_a_name_around_that_of_a_model_is_taken_as_it_and_told(name: str, model: str) -> None:
    recipe = Recipe(framework="any")
    recipe.name_model("base_model", name)
    assert recipe.model == model
    assert ("base_model" in recipe.left_out) is bool(model)
    assert ("model.name" in recipe.missing) is not bool(model)


@pytest.mark.parametrize(("more", "stage_layers"), [("", [8, 8, 8, 8]), ('"virtual_pp_degree": 3, ', None)])
def test_stages_are_even_where_nobody_says_otherwise(tmp_path: Path, more: str, stage_layers: object) -> None:
    """Cut by cost, they would be another plan than that of the file, and each question about it a search."""
    text = '"model_name_or_path": "llama-7b", "pipeline_parallel_degree": 4, "per_device_train_batch_size": 1'
    recipe = read(tmp_path, "a.json", f'{{{more}"gradient_accumulation_steps": 8, {text}}}')
    assert recipe.settings(8).get("plan.stage_layers") == stage_layers


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", FACTORY.replace("type: full", "type: freeze"), "not those of LoRA"),
        ("a.yaml", AXOLOTL.replace("adapter:", "adapter: llama-adapter"), "not those of LoRA"),
        ("a.yaml", TORCHTUNE.replace(".llama3_1_8b", ".dora_llama3_1_8b"), "not those of LoRA"),
        ("a.yaml", LITGPT + "adapter: true\n", "not those of LoRA"),
        ("a.yaml", AXOLOTL.replace("adapter:", "adapter: lora\nlora_alpha: high"), "must be a number"),
        ("a.yaml", AXOLOTL + "ulysses_sequence_parallel_size: 4\n", "ulysses.* is a degree of parallelism"),
        ("a.yaml", MODEL_ARGS + "  --hierarchical-tensor-parallel-size: 2\n", "degree of parallelism"),
        ("a.yaml", ACCELERATE.replace("FSDP\n", "XLA\n"), "no training on GPUs"),
        ("a.yaml", MAXTEXT.replace("batch_size: 2", "batch_size: 0.25"), "no whole number of samples"),
        ("a.yaml", "ConfigContainer: {}\nperf_matrix: {h100: {num_gpus_64: {bf16: {tp: 4}}}}\n", "h100 num_gpus_64 bf16"),
        ("a.yaml", "model: {a: 1}\n", "of no kind that parsim knows"),
        ("a.yaml", MODEL_ARGS.replace("--num-layers: 12", "--num-layers: .inf"), "must be a whole number"),
        (
            "a.yaml",
            AXOLOTL.replace("tensor_parallel_size: 2", "tensor_parallel_size: 0"),
            "tp = 0 of the file must be at least 1",
        ),
        ("a.yaml", MAXTEXT.replace("batch_size: 2", "batch_size: many"), "no whole number of samples"),
        ("a.yaml", PRIMUS[: PRIMUS.index("overrides:")] + "overrides: [1]\n", "must be tables of keys"),
        ("a.yaml", FACTORY.replace("ds_z3_config", "mine"), r"DeepSpeed config .*mine\.json is not beside it"),
        ("a.yaml", FACTORY + "stage: ppo\n", "stage = ppo trains by rollouts"),
        ("a.yaml", FOUNDRY.replace("amp_bf16", "amp_fp4"), "precision = 'amp_fp4' must be one of"),
        ("a.yaml", FOUNDRY.replace("attn_config:", "ffn_config: {ffn_type: mb_dmoe}\n  attn_config:"), "mixture of experts"),
        (
            "a.yaml",
            FOUNDRY.replace("d_model: 4096", "d_model: ${size}"),
            r"d_model = '\$\{size\}' must be a whole",
        ),
        ("a.sh", "torchrun --nproc_per_node 8 mine.py --batch 4", "program of its own.*parsim plan MODEL --on MACHINE"),
        ("a.sh", SWIFT.replace("full", "longlora"), "not those of LoRA"),
        ("a.sh", "axolotl train mine.yml --micro-batch-size 2", "names mine.yml, which is not there"),
        ("a.json", '{"train_batch_size": 8, "zero_optimization": {"stage": 2}}', "model is in the training script"),
        ("a.yaml", "per_device_train_batch_size: 1\nmodel_name_or_path: gpt2\nmax_prompt_length: 8", "second model"),
        ("a.py", RECIPE.replace("num_nodes=nodes", "(num_nodes"), "no Python that can be read"),
    ],
)
def test_files_that_are_refused_say_why(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        question_of(tmp_path / name, cluster="8xh100-sxm", global_batch=64)


def test_a_deepspeed_config_beside_the_arguments_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(
        '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": true}, '
        '"train_micro_batch_size_per_gpu": "auto"}'
    )
    recipe = read(tmp_path, "a.yaml", FACTORY.replace("examples/deepspeed/ds_z3_config", "mine"))
    assert (recipe.zero, recipe.optimizer_offload, recipe.software["framework"]) == (2, True, "deepspeed")
    assert recipe.training["precision"] == "bf16"


@pytest.mark.parametrize(
    ("name", "tp", "pp", "framework"), [("axolotl.yaml", 2, 1, "hf-trainer"), ("paddlenlp.json", 2, 4, None)]
)
def test_axes_are_planned_whether_their_framework_was_measured_or_not(
    name: str, tp: int, pp: int, framework: str | None
) -> None:
    """Accelerate has tensor parallelism beside FSDP, and no pipelines."""
    question = question_of(FILES / name, cluster="8xh100-sxm")
    assert question.plan.mesh is not None
    assert (question.plan.mesh.tp, question.plan.mesh.pp, question.software.framework) == (tp, pp, framework)
    recipe = read_recipe(FILES / name)
    assert recipe.settings(8).get("software.framework") == framework
    assert framework is not None or "above 1 are not known" in recipe.left_out["software.framework"]


def test_what_fp8_and_the_optimizer_of_nemo_are_is_read_where_it_stands(tmp_path: Path) -> None:
    """A format of fp8 counts where fp8 is on; `name` of the optimizer is not the one of the run."""
    off, on = read(tmp_path, "a.yaml", NEMO), read(tmp_path, "b.yaml", NEMO.replace("fp8: False", "fp8: True"))
    assert (off.training["precision"], on.training["precision"]) == ("bf16", "fp8")
    assert (off.zero, read(tmp_path, "c.yaml", NEMO.replace("distributed_fused_adam", "fused_adam")).zero) == (1, 0)


def test_values_that_name_others_are_those(tmp_path: Path) -> None:
    """As OmegaConf takes them: from the root, or from the same table; a circle stays a text."""
    text = "a: {b: '${.c}', c: '${d.e}', f: '${f}'}\nd: {e: 7, g: '${h}'}\nh: '${d.g}'\n"
    document = yaml_table(SourceFile(tmp_path / "a.yaml", text.encode()))
    assert document["a"]["b"] == document["a"]["c"] == document["d"]["e"] == 7
    assert isinstance(document["h"], str)


def test_a_command_behind_its_environment_is_read(tmp_path: Path) -> None:
    script = "OMP_NUM_THREADS=1 TP=2 torchrun pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 "
    recipe = read(tmp_path, "a.sh", script + "--seq-length 32 --vocab-size 512 --micro-batch-size $(expr 16 / 4)")
    assert (recipe.args["layers"], recipe.micro_batch, recipe.missing) == (4, 4, {})


def test_a_script_of_nemo_counts_more_than_the_file_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "llama.yaml").write_text(NEMO)
    script = "python megatron_gpt_pretraining.py --config-name=llama model.tensor_model_parallel_size=8 "
    recipe = read(tmp_path, "a.sh", script + "++model.micro_batch_size=1")
    assert (recipe.tp, recipe.pp, recipe.micro_batch, recipe.args["layers"]) == (8, 2, 1, 32)
    assert (
        "absent.yaml, which is not beside" in read(tmp_path, "b.sh", script.replace("=llama", "=absent")).missing["model.name"]
    )


def test_what_a_script_computes_is_missing(tmp_path: Path) -> None:
    recipe = read(tmp_path, "a.sh", SWIFT.replace("$(expr 16 / $nproc_per_node)", "$(cat steps)"))
    assert "gradient_accumulation_steps hangs on" in recipe.missing["training.global_batch"]
    text = RECIPE.replace("global_batch_size = 256", "global_batch_size = 256 * count()").replace("seq_length = 8192", "x = 1")
    recipe = read(tmp_path, "b.py", text)
    assert "what the script computes" in recipe.missing["training.global_batch"]
    assert "the recipe llama3_8b of NeMo 2" in recipe.missing["model.args.seq"]


def test_unknown_keys_are_listed_by_weight() -> None:
    assert by_weight(["note", "ring_attention_parallel", "author", "my_batch"]) == [
        "my_batch",
        "ring_attention_parallel",
        "author",
        "note",
    ]
    keys = FileKeys("tool", {"a": {"b": 2, "c": None}})
    assert keys.values == {"a.b": 2}
    assert keys.number("a.x", "a.b") == 2
    with pytest.raises(ConfigError, match=r"a\.x is missing"):
        keys.number("a.x")


TOML = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 4096
[parallelism]
tensor_parallel_degree = 2
"""


def test_scripts_that_start_torchtitan_are_read_by_their_file_or_preset(tmp_path: Path) -> None:
    """Presets of 0.3 are Python, which is not run: what they set is missing until it is given."""
    (tmp_path / "llama.toml").write_text(TOML)
    script = 'CONFIG=${CONFIG:-"./train_configs/llama.toml"}\ntorchrun -m torchtitan.train --job.config_file $CONFIG '
    recipe = read(tmp_path, "a.sh", script + "--parallelism.pipeline_parallel_degree 2 --training.local_batch_size 4")
    assert (recipe.model, recipe.tp, recipe.pp, recipe.local_batch) == ("llama3-8b", 2, 2, 4)
    preset = "torchrun -m torchtitan.train --module deepseek_v3 --config deepseek_v3_16b "
    recipe = read(tmp_path, "b.sh", preset)
    assert recipe.model == "deepseek-v2-lite"
    assert set(recipe.missing) == {"model.args.seq", "training.global_batch", "plan.mesh.tp", "plan.mesh.pp"}
    full = "--training.seq_len 4096 --training.local_batch_size 4 --parallelism.tensor_parallel_degree 1 "
    recipe = read(tmp_path, "c.sh", preset + full + "--parallelism.pipeline_parallel_degree=1")
    assert (recipe.missing, recipe.micro_batch) == ({}, 4)
    with pytest.raises(ConfigError, match=r"absent\.toml is not beside the script"):
        read(tmp_path, "d.sh", "torchrun -m torchtitan.train --job.config_file absent.toml")


REGISTRY = """
from . import model_registry

def llama3_8b() -> Trainer.Config:
    model_spec = model_registry("8B")
    return Trainer.Config(
        model_spec=model_spec,
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(local_batch_size=1, seq_len=8192, steps=1000),
        parallelism=ParallelismConfig(tensor_parallel_degree=2, data_parallel_shard_degree=-1),
        activation_checkpoint=SelectiveAC.Config(),
    )

def llama3_8b_float8() -> Trainer.Config:
    config = llama3_8b()
    config.model_spec = model_registry("8B", converters=[Float8LinearConverter.Config()])
    config.training.seq_len = 4096
    config.activation_checkpoint = FullAC.Config()
    return config
"""
"""In the layout of torchtitan 0.3.0."""


def test_presets_of_an_installed_torchtitan_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its registry is parsed and not run: nothing of it can be imported here."""
    folder = tmp_path / "site" / "torchtitan" / "models" / "llama3"
    folder.mkdir(parents=True)
    (tmp_path / "site" / "torchtitan" / "__init__.py").write_text("raise RuntimeError")
    (folder / "config_registry.py").write_text(REGISTRY)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    script = "torchrun -m torchtitan.train --module llama3 --config llama3_8b"
    recipe = read(tmp_path, "a.sh", script)
    assert (recipe.model, recipe.tp, recipe.micro_batch, recipe.recompute) == ("llama3-8b", 2, 1, "selective")
    assert (recipe.args["seq"], recipe.training["precision"], recipe.missing) == (8192, "bf16", {})
    recipe = read(tmp_path, "b.sh", script + "_float8 --parallelism.tensor_parallel_degree 4")
    assert (recipe.tp, recipe.recompute, recipe.args["seq"], recipe.training["precision"]) == (4, "full", 4096, "fp8")
    assert "is in the preset" in read(tmp_path, "c.sh", script + "_own").missing["plan.mesh.tp"]


def test_the_matrix_of_readers_is_that_of_the_readers() -> None:
    """`python tools/reader_matrix.py` writes it."""
    all_files, right = samples()
    assert right == all_files
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.sh", "case " + " " * 500_000),
        ("a.sh", "if [ 1 ]; then\n" * 30_000),
        ("a.sh", " \n" * 300_000),
        ("a.yaml", "\n" * 900_000),
        ("a.yaml", "modules:\n" * 100_000),
        ("a.yaml", "model_name: x\n" * 60_000),
        ("a.sh", "A=1 " * 200_000),
        ("a.sh", "MaxText/ " * 100_000),
        ("a.py", "x.y_pretrain_config(" * 50_000),
    ],
)
def test_files_of_a_megabyte_take_no_longer_than_their_length(tmp_path: Path, name: str, text: str) -> None:
    """Patterns that go back over what they read took minutes."""
    begin = time.process_time()
    with contextlib.suppress(ConfigError):
        read(tmp_path, name, text)
    assert time.process_time() - begin < 5.0


def test_the_crop_of_images_is_the_input(tmp_path: Path) -> None:
    question = question_of(FILES / "images_torchvision.sh", cluster="32xa100-sxm-80gb")
    assert question.model.input_shape == (3, 176, 176)
    assert question.training.global_batch == 32 * 128
    shared = question_of(FILES / "images_example.sh", cluster="8xa100-sxm-80gb")
    assert (shared.training.global_batch, shared.plan.microbatches) == (1024, 1)  # -b is of all GPUs of a node


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("block_size = 10 ** 9999999\n", "block_size"),
        ("n_layer = 12\nx = (\n", "no Python that can be read"),
        ("batch_size = 'many'\nblock_size = 8\n", "batch_size = 'many' must be a whole number"),
        ("block_size = 64\ndtype = 'int8'\n", "dtype = 'int8' must be one of"),
        ("import numpy as np\n", "of no kind that parsim knows"),
    ],
)
def test_scripts_in_python_are_parsed_and_never_run(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "config.py"
    path.write_text(text)
    if "9999999" in text:  # no power is computed: the key is then nanoGPT's own
        assert read_recipe(path).args["seq"] == 1024
        return
    with pytest.raises(ConfigError, match=re.escape(says)):
        question_of(path, cluster="8xh100-sxm", global_batch=64)


def test_a_notebook_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    path.write_text((FILES / "trainer_notebook.ipynb").read_text()[:-20])
    with pytest.raises(ConfigError, match="no Jupyter notebook"):
        read_recipe(path)


@pytest.mark.parametrize(
    ("loaded", "beside", "precision", "master"),
    [
        ("torch_dtype=torch.bfloat16", "bf16=True", "bf16", False),
        ("torch_dtype=torch.bfloat16", "", "bf16", False),
        ("", "bf16=True", "amp_bf16", None),
        ("", "bf16=is_bf16_supported()", "amp_bf16", None),
        ("torch_dtype='bfloat16'", "bf16=True, fsdp='full_shard'", "bf16", None),
        ("", "", "fp32", None),
    ],
)
def test_precision_follows_how_weights_are_loaded(
    tmp_path: Path, loaded: str, beside: str, precision: str, master: bool | None
) -> None:
    """Weights that are loaded in 16 bits are trained so, without copies in fp32, unless FSDP keeps them."""
    text = f"model = AutoModelForCausalLM.from_pretrained('gpt2', {loaded})\nargs = TrainingArguments('out', {beside})\n"
    recipe = read(tmp_path, "a.py", text)
    assert recipe.training["precision"] == precision
    assert recipe.training.get("master_weights") is master


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        ("torchrun train.py --model resnet50 -b $BATCH --amp", "batch_size hangs on what the script computes"),
        ("deepspeed --module openrlhf.cli.train_sft --pretrain llama3-8b --train_batch_size $1", "train_batch_size hangs on"),
        (
            "deepspeed --module openrlhf.cli.train_sft --pretrain llama3-8b --micro_train_batch_size $1",
            r"micro_train_batch_size hangs on.*--set plan\.microbatches=N",
        ),
    ],
)
def test_a_batch_that_a_script_computes_is_no_default(tmp_path: Path, text: str, lacks: str) -> None:
    path = tmp_path / "a.sh"
    path.write_text(text)
    with pytest.raises(ConfigError, match=lacks):
        question_of(path, cluster="8xh100-sxm")
    question = question_of(path, cluster="8xh100-sxm", global_batch=512, overrides=["plan.microbatches=2"])
    assert (question.training.global_batch, question.plan.microbatches) == (512, 2)


@pytest.mark.parametrize(("devices", "told"), [(16, False), (8, True)])
def test_a_cluster_of_another_size_than_the_file_starts_is_told(devices: int, told: bool) -> None:
    recipe = read_recipe(FILES / "torchtune_run.sh")
    assert recipe.settings(devices)["training.global_batch"] == devices // 4 * 16
    assert ("the batch, which the file gives per device," in recipe.left_out.get("processes", "")) == told


def test_a_key_of_a_command_counts_where_the_file_has_no_such_table(tmp_path: Path) -> None:
    """The file has no table `tokenizer`."""
    (tmp_path / "tune.yaml").write_text(
        "model: {_component_: torchtune.models.llama3_1.llama3_1_8b}\n"
        "optimizer: {_component_: torch.optim.AdamW}\n"
        "dataset: {_component_: torchtune.datasets.alpaca_dataset}\n"
        "batch_size: 2\n"
    )
    script = tmp_path / "run.sh"
    script.write_text("tune run --nproc_per_node 8 full_finetune_distributed --config tune.yaml tokenizer.max_seq_len=1024\n")
    assert read_recipe(script).args["seq"] == 1024
