"""Config files of more frameworks: what each says, what it lacks until --set gives it, and what is refused.

The texts are our own, in the layout of the tools' public files.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from parsim.app.question import question_of
from parsim.errors import ConfigError
from parsim.formats.recipe import FileKeys, Recipe, by_weight, read_recipe

MODEL_ARGS = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512
  --num-attention-heads: 8
  --micro-batch-size: 2
  --global-batch-size: 128
  --seq-length: 1024
  --tensor-model-parallel-size: 2
  --pipeline-model-parallel-size: 2
  --vocab-file: ${DATA_PATH}/bpe/vocab.json
  --tokenizer-type: GPT2BPETokenizer
  --bf16: true
"""
BRIDGE = """
_target_: megatron.bridge.training.config.ConfigContainer
dataset: {seq_length: 4096}
ddp: {use_distributed_optimizer: true, use_megatron_fsdp: false}
mixed_precision: {bf16: true, fp8: null}
model:
  add_bias_linear: false
  context_parallel_size: 2
  ffn_hidden_size: 14336
  gated_linear_unit: true
  hidden_size: 4096
  normalization: RMSNorm
  num_attention_heads: 32
  num_layers: 32
  num_query_groups: 8
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  tensor_model_parallel_size: 2
  vocab_size: 128256
  seq_length: 8192
train: {global_batch_size: 128, micro_batch_size: 1}
"""
BRIDGE_OVERRIDES = """
ConfigContainer:
  model: {tensor_model_parallel_size: 4, pipeline_model_parallel_size: 4, seq_length: 8192}
  train: {global_batch_size: 128, micro_batch_size: 1}
"""
PRIMUS = """
modules:
  pre_trainer:
    framework: megatron
    model: llama3_8B.yaml
    overrides:
      micro_batch_size: ${PRIMUS_MBS:2}
      global_batch_size: 128
      seq_length: 4096
      tensor_model_parallel_size: 2
      enable_primus_turbo: true
"""
PRIMUS_TITAN = """
modules:
  pre_trainer:
    framework: torchtitan
    model: llama3.1_8B.yaml
    overrides:
      training: {local_batch_size: 2, seq_len: 8192}
      parallelism: {tensor_parallel_degree: 2}
      activation_checkpoint: {mode: full}
"""
PRIMUS_MAXTEXT = """
modules:
  pre_trainer:
    framework: maxtext
    model: llama3_70B.yaml
    overrides:
      dcn_data_parallelism: -1
      ici_fsdp_parallelism: 8
      max_target_length: 8192
      per_device_batch_size: 7
      remat_policy: full
"""
MAXTEXT = """
model_name: "llama3.1-8b"
ici_fsdp_parallelism: -1
ici_tensor_parallelism: 2
remat_policy: minimal
max_target_length: 4096
per_device_batch_size: 2
"""
ARGUMENTS = """{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "bf16": true,
 "gradient_checkpointing": true, "model_name_or_path": "meta-llama/Llama-3.1-8B", "max_seq_length": 4096,
 "optim": "adamw_torch_fused", "fsdp": "full_shard auto_wrap", "learning_rate": 1e-5}"""
FACTORY = """
model_name_or_path: Qwen/Qwen2.5-7B-Instruct
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
bf16: true
"""
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_sharding_strategy: FULL_SHARD, fsdp_activation_checkpointing: true}
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""
AXOLOTL = """
base_model: NousResearch/Meta-Llama-3-8B
sequence_len: 8192
micro_batch_size: 1
gradient_accumulation_steps: 8
optimizer: adamw_torch_fused
bf16: auto
gradient_checkpointing: true
tensor_parallel_size: 2
fsdp_version: 2
fsdp_config: {reshard_after_forward: false}
adapter:
"""
TORCHTUNE = """
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 4096}
model: {_component_: torchtune.models.llama3_1.llama3_1_8b}
batch_size: 2
gradient_accumulation_steps: 4
optimizer: {_component_: torch.optim.AdamW, fused: True, lr: 2e-5}
enable_activation_checkpointing: True
dtype: bf16
compile: True
tensor_parallel_dim: 2
"""
LIGHTNING = """
trainer: {accelerator: gpu, devices: 8, num_nodes: 2, strategy: fsdp, precision: bf16-mixed, accumulate_grad_batches: 4}
model: {class_path: my.Module}
data: {class_path: my.Data, init_args: {batch_size: 2}}
"""
LITGPT = """
model_name: Llama-3-8B
precision: bf16-true
devices: 8
train:
  global_batch_size: 512
  micro_batch_size: 4
  max_seq_length: 2048
"""
LIGHTNING_PRETTY = LIGHTNING.replace("trainer: {accelerator: gpu, ", "trainer:\n  accelerator: gpu\n  ").replace(
    "devices: 8, num_nodes: 2, strategy: fsdp, precision: bf16-mixed, accumulate_grad_batches: 4}",
    "devices: 8\n  num_nodes: 2\n  strategy: fsdp\n  precision: bf16-mixed\n  accumulate_grad_batches: 4",
)


def read(folder: Path, name: str, text: str) -> Recipe:
    (folder / name).write_text(text)
    return read_recipe(folder / name)


@pytest.mark.parametrize(
    ("name", "text", "framework", "model", "said"),
    [
        ("a.yaml", MODEL_ARGS, "Megatron-LM", "transformer", {"tp": 2, "pp": 2, "micro_batch": 2}),
        ("a.yaml", BRIDGE, "Megatron-Bridge", "transformer", {"tp": 2, "cp": 2, "zero": 1}),
        ("a.yaml", PRIMUS, "Primus (Megatron-LM)", "llama3-8b", {"tp": 2, "micro_batch": 2}),
        ("a.yaml", PRIMUS_TITAN, "Primus (torchtitan)", "llama3.1_8B", {"tp": 2, "zero": 3, "recompute": "full"}),
        ("a.yaml", PRIMUS_MAXTEXT, "Primus (MaxText)", "llama3-70b", {"micro_batch": 7, "zero": 3, "recompute": "full"}),
        ("a.yml", MAXTEXT, "MaxText", "llama3-8b", {"tp": 2, "micro_batch": 4, "zero": 3, "recompute": "selective"}),
        ("a.json", ARGUMENTS, "Hugging Face Trainer", "llama3-8b", {"local_batch": 16, "zero": 3, "recompute": "full"}),
        ("a.yaml", FACTORY, "Hugging Face Trainer", "qwen2-7b", {"local_batch": 2, "zero": 3, "recompute": "none"}),
        ("a.yaml", ACCELERATE, "Accelerate", "", {"zero": 3, "processes": 16, "recompute": "full"}),
        ("a.yaml", AXOLOTL, "axolotl", "llama3-8b", {"tp": 2, "local_batch": 8, "zero": 2, "recompute": "full"}),
        ("a.yaml", TORCHTUNE, "torchtune", "llama3-8b", {"tp": 2, "local_batch": 8, "zero": 3, "recompute": "full"}),
        ("a.yaml", LIGHTNING_PRETTY, "Lightning", "", {"processes": 16, "local_batch": 8, "zero": 3}),
        ("a.yaml", LITGPT, "LitGPT", "llama3-8b", {"micro_batch": 4, "processes": 8, "zero": 3}),
    ],
)
def test_files_of_frameworks(tmp_path: Path, name: str, text: str, framework: str, model: str, said: dict[str, object]) -> None:
    recipe = read(tmp_path, name, text)
    assert (recipe.framework, recipe.model) == (framework, model)
    assert {key: getattr(recipe, key) for key in said} == said


def test_precisions_and_lengths_of_files(tmp_path: Path) -> None:
    """bf16 under autocast keeps 4-byte weights; a dump of Bridge contradicts itself in the length of a sample."""
    assert read(tmp_path, "a.json", ARGUMENTS).training["precision"] == "amp_bf16"
    assert read(tmp_path, "b.yaml", LITGPT).training["precision"] == "bf16"
    bridge = read(tmp_path, "c.yaml", BRIDGE)
    assert bridge.args["seq"] == 4096
    assert "4096 was taken" in bridge.left_out["model.seq_length"]
    assert "bf16" in read(tmp_path, "d.yaml", PRIMUS).left_out["--bf16"]
    assert read(tmp_path, "e.yaml", MODEL_ARGS).args["vocab"] == 50432  # GPT-2's 50,257, padded for tp 2


@pytest.mark.parametrize(
    ("name", "text", "lacks", "given"),
    [
        ("a.yaml", ACCELERATE, "model.name=NAME --set training.global_batch=N", ("model.name=llama3-8b",)),
        ("a.yaml", BRIDGE_OVERRIDES, "model.name=NAME", ("model.name=llama3-8b",)),
        ("a.yaml", LIGHTNING_PRETTY, "model.name=NAME", ("model.name=gpt2",)),
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


BRANCHES = """
SIZE={size}
TP={tp}
if [ -z ${{VP}} ]; then vp=""; else vp="--num-layers-per-virtual-pipeline-stage ${{VP}}"; fi
if [[ $SIZE == 7B ]]; then
  LAYERS=32; HIDDEN=4096
elif [ "$SIZE" = 13B ] ; then
  LAYERS=40
  HIDDEN=5120
else
  echo "unknown size"; exit 1
fi
case $SIZE in
  7B|8B) HEADS=32 ;;
  *)
    HEADS=40 ;;
esac
if [ $TP -gt 1 ] && [ $SIZE != 70B ]; then sp="--sequence-parallel"; fi
torchrun pretrain.py --num-layers $LAYERS --hidden-size $HIDDEN --num-attention-heads $HEADS --vocab-size 32000 \\
  --seq-length 2048 --tensor-model-parallel-size $TP $sp $vp --bf16
"""


@pytest.mark.parametrize(
    ("size", "tp", "sizes", "sequence"),
    [("7B", 2, (32, 4096, 32), True), ("13B", 1, (40, 5120, 40), False)],
)
def test_the_branch_that_runs_counts(tmp_path: Path, size: str, tp: int, sizes: tuple[int, ...], sequence: bool) -> None:
    """Not the last of all, whose sizes are another model's."""
    recipe = read(tmp_path, "a.sh", BRANCHES.format(size=size, tp=tp))
    assert tuple(recipe.args[key] for key in ("layers", "hidden", "heads")) == sizes
    assert recipe.args["sequence_parallel"] is sequence
    assert recipe.chunks == 1


def test_branches_that_the_file_does_not_decide_leave_sizes_unknown(tmp_path: Path) -> None:
    text = BRANCHES.format(size="$(cat size)", tp=1)
    recipe = read(tmp_path, "a.sh", text)
    assert "depends on a value" in recipe.missing["model.args.layers"]
    same = text.replace("LAYERS=40", "LAYERS=32")
    assert read(tmp_path, "b.sh", same).args["layers"] == 32  # all branches agree


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", FACTORY.replace("type: full", "type: lora"), "trains adapters"),
        ("a.yaml", AXOLOTL.replace("adapter:", "adapter: qlora"), "trains adapters"),
        ("a.yaml", TORCHTUNE.replace(".llama3_1_8b", ".lora_llama3_1_8b"), "trains adapters"),
        ("a.yaml", AXOLOTL + "ulysses_sequence_parallel_size: 4\n", "ulysses.* is a degree of parallelism"),
        ("a.yaml", MODEL_ARGS + "  --hierarchical-tensor-parallel-size: 2\n", "degree of parallelism"),
        ("a.yaml", ACCELERATE.replace("FSDP\n", "XLA\n"), "no training on GPUs"),
        ("a.yaml", MAXTEXT.replace("batch_size: 2", "batch_size: 0.25"), "no whole number of samples"),
        ("a.yaml", "ConfigContainer: {}\nperf_matrix: {h100: {num_gpus_64: {bf16: {tp: 4}}}}\n", "h100 num_gpus_64 bf16"),
        ("a.yaml", "model: {a: 1}\n", "of no kind that parsim knows"),
        ("a.yaml", FACTORY.replace("ds_z3_config", "mine"), r"DeepSpeed config .*mine\.json is not beside it"),
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
