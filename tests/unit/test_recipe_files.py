"""Config files of more frameworks: what each says, what it lacks until --set gives it, and what is refused.

The texts are our own, in the layout of the tools' public files.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from pathlib import Path

import pytest

from parsim.app.question import question_of
from parsim.errors import ConfigError
from parsim.formats.recipe import FileKeys, Recipe, by_weight, read_recipe, yaml_table
from parsim.formats.source import SourceFile
from tools.reader_matrix import PAGE, differences, page, samples

FILES = Path(__file__).parents[1] / "frameworks"
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
        ("a.json", '{"train_batch_size": 8, "zero_optimization": {"stage": 2}}', "parsim import .*--kind deepspeed"),
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
