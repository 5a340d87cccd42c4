"""What parsim writes for frameworks, read by the frameworks themselves, and their own rules."""

from __future__ import annotations

import itertools
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from parsim.app.functions import simulate
from parsim.errors import ConfigError
from parsim.formats.configs import read_recipe
from parsim.formats.recipe import Recipe
from parsim.formats.torchtitan import preset_tables, read_toml
from parsim.plans.pipeline import pipeline_actions
from parsim.plans.stages import with_ends
from parsim.work import Phase

pytestmark = pytest.mark.real

TYRO = """
    tyro==0.9.35 docstring-parser==0.17.0 shtab==1.8.0 typeguard==4.4.4 rich==14.2.0 typing-extensions==4.15.0
    markdown-it-py==4.0.0 mdurl==0.1.2 pygments==2.19.2 tokenizers==0.22.1
"""
TORCHTITAN = f"torchtitan==0.2.2 {TYRO}"
TORCHTITAN_3 = f"""
    torchtitan==0.3.0 {TYRO} torchao==0.18.0 spmd_types==0.2.3 einops==0.8.1 torch_checkpointing==0.1.1 torchdata==0.11.0
"""
MEGATRON = "megatron-core==0.16.1 packaging==25.0"
DEEPSPEED = """
    hjson==3.1.0 ninja==1.13.0 psutil==7.2.1 py-cpuinfo==9.0.0 pydantic==2.12.5 pydantic-core==2.41.5 annotated-types==0.7.0
    typing-inspection==0.4.2 typing-extensions==4.15.0 tqdm==4.67.1 msgpack==1.1.2 einops==0.8.1 packaging==25.0
"""
ACCELERATE = """
    accelerate==1.15.0 pyyaml==6.0.3 safetensors==0.7.0 huggingface-hub==0.36.0 requests==2.32.5 filelock==3.20.0
    fsspec==2025.10.0 certifi==2025.11.12 urllib3==2.5.0 idna==3.11 charset-normalizer==3.4.4
"""
HTA = """
    HolisticTraceAnalysis==0.5.0 pandas==3.1.1 plotly==7.1.0 networkx==3.6.1 python-dateutil==2.9.0.post0 six==1.17.0
    narwhals==2.28.0 packaging==25.0 pyyaml==6.0.3 psutil==7.2.1 tzdata==2025.3
"""
"""Each test's packages, with what they import."""


def by_hand(*keys: str, microbatches: int = 4, mesh: str = "{pp=4,dp=2}", clip: float | None = 0.5) -> Any:
    """A plan of the user's own: no search."""
    every = ["plan.strategy=custom", f"plan.mesh={mesh}", f"plan.microbatches={microbatches}", "plan.recompute=none"]
    every += ["training.precision=bf16", "training.weight_decay=0.03", *keys, *([f"training.clip_norm={clip}"] if clip else [])]
    return simulate("qwen3-0.6b", cluster="8xh100-sxm", global_batch=8 * microbatches, overrides=every)


PIPELINE = ("plan.pipeline_order=1f1b", "plan.chunks=1")

READ_BY_TORCHTITAN = """
import dataclasses, json, sys
from unittest.mock import MagicMock
sys.modules["torchtitan.models.moe.kernels"] = MagicMock()  # imports triton, which no CPU build of torch brings
from torchtitan.config import ConfigManager
config = ConfigManager().parse_args(["--job.config_file", sys.argv[1]])
print(json.dumps(dataclasses.asdict(config), default=str))
"""


def test_torchtitan_reads_what_is_written_and_means_the_same(run_script: Any, tmp_path: Path) -> None:
    """torchtitan 0.2.2: it is the last release that reads TOML. Degrees, batch, clipping, decay, recomputation and stages
    mean the same."""
    prediction = by_hand(*PIPELINE)
    prediction.export("torchtitan", out=tmp_path / "run.toml")
    read = run_script(READ_BY_TORCHTITAN, tmp_path / "run.toml", packages=TORCHTITAN)
    written = tomllib.loads((tmp_path / "run.toml").read_text())
    for table in ("parallelism", "training", "optimizer", "model", "compile"):
        for key, value in written[table].items():
            assert read[table][key] == (pytest.approx(value) if isinstance(value, float) else value), f"{table}.{key}"
    assert (read["training"]["max_norm"], read["optimizer"]["weight_decay"]) == (0.5, 0.03)
    assert read["training"]["global_batch_size"] == prediction.plan.global_batch
    parallel = read["parallelism"]
    assert (parallel["pipeline_parallel_degree"], parallel["data_parallel_replicate_degree"]) == (4, 2)
    assert read["activation_checkpoint"]["mode"] == "none"


SPLIT_BY_TORCHTITAN = """
import ast, importlib.util, json, sys
from pathlib import Path
file = Path(importlib.util.find_spec("torchtitan").submodule_search_locations[0], "distributed", "pipeline_parallel.py")
tree = ast.parse(file.read_text())
name = "generate_llm_fqn_per_model_part"
space = {}
exec(ast.unparse(next(node for node in tree.body if getattr(node, "name", "") == name)), space)
found = []
for stages, layers, first, last in json.loads(sys.argv[1]):
    try:
        parts = space[name](stages, layers, first, last)
        found.append([sum(entry.startswith("layers.") for entry in part) for part in parts])
    except ValueError:
        found.append(None)
print(json.dumps(found))
"""


def test_torchtitan_cuts_layers_as_said(run_script: Any) -> None:
    """torchtitan 0.2.2: 32 layers on 4 stages are 8 + 9 + 8 + 7."""
    asked = list(itertools.product((2, 3, 4, 8, 16, 34, 40), (7, 28, 32, 61), (0, 1, 2), (0, 1, 2)))
    found = run_script(SPLIT_BY_TORCHTITAN, json.dumps(asked), packages=TORCHTITAN)
    assert found[asked.index((4, 32, 1, 1))] == [8, 9, 8, 7]
    for (stages, layers, first, last), counts in zip(asked, found, strict=True):
        assert with_ends(layers, stages, first, last) == counts


READ_BY_MEGATRON = """
import json, sys
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
layout, pp, layers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
read = PipelineParallelLayerLayout(layout, pp)
read.validate_layer_layout(layers, None)
chunks = read.virtual_pipeline_model_parallel_size
print(json.dumps([read.layout[rank][chunk].count(LayerType.decoder) for chunk in range(chunks) for rank in range(pp)]))
"""


@pytest.mark.parametrize(("keys", "stages"), [(PIPELINE, 4), (("plan.pipeline_order=interleaved", "plan.chunks=2"), 8)])
def test_megatron_reads_the_layout_that_is_written(run_script: Any, tmp_path: Path, keys: tuple[str, ...], stages: int) -> None:
    """Megatron-Core 0.16: a layout such as 'Et*8|t*9|t*8|t*3L' counts stages in the order of the model, chunk after chunk."""
    prediction = by_hand(*keys)
    prediction.export("megatron", out=tmp_path / "run.sh")
    text = (tmp_path / "run.sh").read_text()
    counts = [len({name.split(".")[1] for name in s.components if name.startswith("h.")}) for s in prediction.plan.stages]
    assert len(counts) == stages
    if len(set(counts)) == 1:
        assert "--pipeline-model-parallel-layout" not in text
        return
    layout = text.split("--pipeline-model-parallel-layout '")[1].split("'")[0]
    assert run_script(READ_BY_MEGATRON, layout, 4, 28, packages=MEGATRON) == counts
    assert read_recipe(tmp_path / "run.sh").chunks == stages // 4


CONFIGURED_BY_MEGATRON = """
import ast, dataclasses, json, shlex, sys
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

words = shlex.split(open(sys.argv[1]).read().replace(chr(92) + chr(10), " "), comments=True)
given, names = {}, [place for place, word in enumerate(words) if word.startswith("--")]
for place in names:
    value = words[place + 1] if place + 1 < len(words) and not words[place + 1].startswith(("--", "$")) else "True"
    try:
        value = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        pass  # a word
    given[words[place][2:].replace("-", "_")] = value
given["add_bias_linear"] = not given.pop("disable_bias_linear", False)  # arguments with names of their own
given["gated_linear_unit"] = given.pop("swiglu", False)
given["virtual_pipeline_model_parallel_size"] = given.pop("num_virtual_stages_per_pipeline_rank", None)
given.pop("attention_backend", None)  # an enumeration there
given["pipeline_dtype"] = torch.bfloat16  # Megatron-LM sets it from --bf16
read = {}
for kind in (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig):
    fields = {field.name for field in dataclasses.fields(kind)}
    made = kind(**{name: value for name, value in given.items() if name in fields})
    read |= {name: getattr(made, name) for name in given if name in fields}
print(json.dumps(read, default=str))
"""


def test_megatron_makes_its_configs_of_what_is_written(run_script: Any, tmp_path: Path) -> None:
    """Megatron-Core 0.16: its config classes take the options by their own names and check them. They mean the same degrees,
    sizes, stages per rank, clipping, decay and overlap."""
    prediction = by_hand("plan.pipeline_order=interleaved", "plan.chunks=7", mesh="{pp=4,dp=2}")
    prediction.export("megatron", out=tmp_path / "run.sh")
    read = run_script(CONFIGURED_BY_MEGATRON, tmp_path / "run.sh", packages=MEGATRON)
    degrees = [read[f"{name}_model_parallel_size"] for name in ("tensor", "pipeline", "virtual_pipeline")]
    assert degrees == [1, 4, 7]
    sizes = [read[name] for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")]
    assert sizes == [28, 1024, 3072, 16, 8]
    assert (read["gated_linear_unit"], read["add_bias_linear"], read["normalization"]) == (True, False, "RMSNorm")
    assert (read["clip_grad"], read["weight_decay"], read["optimizer"], read["bf16"]) == (0.5, 0.03, "adam", True)
    assert read["overlap_grad_reduce"]


ORDER_OF_MEGATRON = """
import json, sys
from types import SimpleNamespace
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

class Group:
    def __init__(self, size, rank): self._size, self._rank = size, rank
    def size(self): return self._size
    def rank(self): return self._rank

found = []
for ranks, microbatches, chunks in json.loads(sys.argv[1]):
    table = get_schedule_table(microbatches, chunks, ranks)
    back = [(number, chunks - 1 - chunk) for number, chunk in table]
    every = []
    for rank in range(ranks):
        where = SimpleNamespace(pp_group=Group(ranks, rank), virtual_pipeline_model_parallel_size=chunks)
        total, _, warm_up, rest = get_pp_rank_microbatches(microbatches, chunks, ranks, p2p_communicator=where)
        forward = [f"{chunk * ranks + rank}F{number}" for number, chunk in table]
        backward = [f"{chunk * ranks + rank}B{number}" for number, chunk in back]
        order = forward[:warm_up]
        for place in range(rest):
            order += [forward[warm_up + place], backward[place]]
        every.append(order + backward[rest:])
    found.append(every)
print(json.dumps(found))
"""


def test_the_interleaved_order_is_megatrons(run_script: Any) -> None:
    """Megatron-Core 0.16: its schedule table and warm-up, run one forward and one backward in turn, are torch's interleaved
    order where pp divides the microbatches."""
    asked = [(2, 4, 2), (4, 8, 2), (4, 16, 4), (8, 32, 3), (3, 9, 2), (4, 4, 2)]
    found = run_script(ORDER_OF_MEGATRON, json.dumps(asked), packages=MEGATRON)
    for (ranks, microbatches, chunks), theirs in zip(asked, found, strict=True):
        ours = [pipeline_actions("interleaved", rank, ranks, microbatches, chunks) for rank in range(ranks)]
        assert [list(map(str, own)) for own in ours] == theirs
        assert all(action.phase in (Phase.FORWARD, Phase.BACKWARD) for own in ours for action in own)


REFUSED_BY_MEGATRON = """
import json, sys
from types import SimpleNamespace
import torch
from megatron.core.pipeline_parallel import schedules

class Group:
    def __init__(self, size): self._size = size
    def size(self): return self._size
    def rank(self): return 0

class Passed(Exception): pass

def passed(model):
    calls.append(model)
    if len(calls) == 2:  # once before the checks, once behind them
        raise Passed

zeros = torch.zeros
torch.zeros = lambda *sizes, device=None, **switches: zeros(*sizes, **switches)  # a counter on the GPU, before the checks
schedules.get_model_type = passed
schedules.clear_embedding_activation_buffer = lambda *a: None
NONE = '''overlap_p2p_comm timers no_sync_func grad_sync_func param_sync_func sequence_parallel finalize_model_grads_func
    deallocate_pipeline_outputs overlap_moe_expert_parallel_comm'''.split()
found = []
for ranks, microbatches, size in json.loads(sys.argv[1]):
    calls = []
    config = SimpleNamespace(**dict.fromkeys(NONE), batch_p2p_comm=True, microbatch_group_size_per_vp_stage=size, hidden_size=8)
    model = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
    schedules.get_model_config = lambda m: config
    where = SimpleNamespace(pp_group=Group(ranks), virtual_pipeline_model_parallel_size=2, config=config)
    groups = SimpleNamespace(tp=Group(1), cp=Group(1), embd=None, pos_embd=None, pp=Group(ranks), dp_cp=Group(1))
    try:
        schedules.forward_backward_pipelining_with_interleaving(
            forward_step_func=None, data_iterator=[None, None], model=model, num_microbatches=microbatches, seq_length=8,
            micro_batch_size=1, p2p_communicator=where, pg_collection=groups)
    except Passed:
        found.append(True)
    except (ValueError, RuntimeError) as error:
        found.append(False)
print(json.dumps(found))
"""


def test_rounds_that_megatron_refuses_are_those_of_the_rule(run_script: Any) -> None:
    """Megatron-Core 0.16: forward_backward_pipelining_with_interleaving refuses a rest of a round below pp, and rounds below
    pp."""
    asked = list(itertools.product((2, 3, 4), range(1, 14), (2, 3, 4, 6)))
    found = run_script(REFUSED_BY_MEGATRON, json.dumps(asked), packages=MEGATRON)
    assert len(set(found)) == 2
    for (ranks, microbatches, size), taken in zip(asked, found, strict=True):
        recipe = Recipe(framework="Megatron-LM", pp=ranks, chunks=2, rounds_of=size, training={"global_batch": microbatches})
        if taken and size >= ranks:
            assert recipe.settings(ranks)["plan.microbatches"] == microbatches
        elif size >= ranks:
            with pytest.raises(ConfigError):
                recipe.settings(ranks)


READ_BY_DEEPSPEED = """
import json, os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
from unittest import mock
import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
import deepspeed.comm as dist
ranks = int(sys.argv[2])
with mock.patch.object(dist, "is_initialized", lambda: True), mock.patch.object(dist, "get_world_size", lambda *a: ranks), \\
     mock.patch.object(dist, "get_rank", lambda *a: 0):
    read = DeepSpeedConfig(sys.argv[1])
zero = read.zero_config
print(json.dumps({
    "version": deepspeed.__version__, "batch": read.train_batch_size, "micro": read.train_micro_batch_size_per_gpu,
    "steps": read.gradient_accumulation_steps, "clip": read.gradient_clipping, "stage": zero.stage,
    "overlap": zero.overlap_comm, "bucket": zero.reduce_bucket_size, "bf16": read.bfloat16_config.enabled,
    "decay": read.optimizer_params["weight_decay"],
}))
"""


@pytest.mark.parametrize(("version", "clip"), [("0.19.2", 0.5), ("0.19.2", None), ("0.19.8", 0.5), ("0.19.8", None)])
def test_deepspeed_reads_what_is_written_and_means_the_same(
    run_script: Any, tmp_path: Path, version: str, clip: float | None
) -> None:
    """DeepSpeed 0.19: an absent gradient_clipping is 0.0 in 0.19.2 and 1.0 from 0.19.3 on; what is written says it, and means
    the same in 0.19.2 and 0.19.8."""
    prediction = by_hand("plan.zero_stage=2", mesh="{dp=8}", clip=clip)
    prediction.export("deepspeed", out=tmp_path / "ds.json")
    read = run_script(READ_BY_DEEPSPEED, tmp_path / "ds.json", 8, packages=f"deepspeed=={version} {DEEPSPEED}")
    plan = prediction.plan
    assert read["version"] == version
    assert (read["batch"], read["micro"], read["steps"]) == (plan.global_batch, plan.microbatch_samples, plan.microbatches)
    assert (read["clip"], read["stage"], read["overlap"], read["bf16"], read["decay"]) == (clip or 0.0, 2, True, True, 0.03)
    assert read["bucket"] == plan.bucket_bytes // 2


READ_BY_ACCELERATE = """
import json, sys
from accelerate.utils.deepspeed import HfDeepSpeedConfig
read = HfDeepSpeedConfig(sys.argv[1])
print(json.dumps({"stage": read._stage, "offload": read.is_offload(), "clip": read.get_value("gradient_clipping"),
    "steps": read.get_value("gradient_accumulation_steps"), "batch": read.get_value("train_batch_size"),
    "bf16": read.is_true("bf16.enabled"), "lr": read.get_value("optimizer.params.lr")}))
"""


def test_accelerate_reads_what_is_written_for_deepspeed(run_script: Any, tmp_path: Path) -> None:
    """accelerate 1.15: values that are "auto" in a DeepSpeed config are filled in. What is written leaves none."""
    prediction = by_hand("plan.zero_stage=3", mesh="{dp=8}")
    prediction.export("deepspeed", out=tmp_path / "ds.json")
    read = run_script(READ_BY_ACCELERATE, tmp_path / "ds.json", packages=ACCELERATE + DEEPSPEED)
    plan = prediction.plan
    assert read == {
        "stage": 3,
        "offload": False,
        "clip": 0.5,
        "steps": plan.microbatches,
        "batch": plan.global_batch,
        "bf16": True,
        "lr": prediction.question.training.learning_rate or 1e-3,
    }
    assert "auto" not in (tmp_path / "ds.json").read_text()


READ_BY_HTA = """
import contextlib, json, sys
with contextlib.redirect_stdout(sys.stderr):
    from hta.trace_analysis import TraceAnalysis
    analysis = TraceAnalysis(trace_dir=sys.argv[1])
    table = analysis.get_temporal_breakdown(visualize=False)
print(json.dumps(table.to_dict("list")))
"""


def test_holistic_trace_analysis_opens_what_is_written(run_script: Any, tmp_path: Path) -> None:
    """HolisticTraceAnalysis 0.5: a rank computes as long as the prediction says; its times are whole microseconds."""
    prediction = by_hand(*PIPELINE)
    prediction.export("hta", out=tmp_path / "traces")
    read = run_script(READ_BY_HTA, tmp_path / "traces", packages=HTA)
    parts = prediction.breakdown()
    assert read["rank"] == list(range(8))
    for rank, computed in zip(read["rank"], read["compute_time(us)"], strict=True):
        assert computed * 1e-6 == pytest.approx(parts["compute_s"][rank], rel=0.01)


PRESETS_OF_TORCHTITAN = """
import importlib, json, sys
from unittest.mock import MagicMock
# kernels of triton, which no CPU build of torch brings; the others read rows and write curves, which no preset does
absent = ("torchtitan.distributed.minimal_async_ep.kernels", "datasets", "datasets.distributed", "torch.utils.tensorboard")
for name in absent:
    sys.modules[name] = MagicMock()
import torchtitan.components.quantization.float8
torchtitan.components.quantization.float8.has_cuda_capability = lambda *version: True  # what it would find on an H100
found = {}
for module, name in json.loads(sys.argv[1]):
    config = getattr(importlib.import_module(f"torchtitan.models.{module}.config_registry"), name)()
    found[name] = {
        "seq": config.training.seq_len, "micro": config.training.local_batch_size,
        "tp": config.parallelism.tensor_parallel_degree, "pp": config.parallelism.pipeline_parallel_degree,
        "ep": config.parallelism.expert_parallel_degree, "again": type(config.activation_checkpoint).__qualname__,
    }
print(json.dumps(found))
"""
PRESETS = [("llama3", "llama3_8b"), ("llama3", "llama3_70b"), ("llama3", "llama3_405b"), ("qwen3", "qwen3_14b")]
PRESETS += [("deepseek_v3", "deepseek_v3_16b"), ("deepseek_v3", "deepseek_v3_671b"), ("qwen3", "qwen3_30b_a3b")]


def test_presets_of_torchtitan_are_read_as_they_are(run_script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan 0.3.0: the registry, parsed and not run, says what its functions return."""
    found = run_script(PRESETS_OF_TORCHTITAN, json.dumps(PRESETS), packages=TORCHTITAN_3)
    folder = run_script("import json, sys; print(json.dumps(sys.path[1]))", packages=TORCHTITAN_3)
    monkeypatch.syspath_prepend(folder)
    for module, name in PRESETS:
        tables = preset_tables(module, name)
        assert tables is not None
        recipe = read_toml(tables)
        again = {"FullAC.Config": "full", "SelectiveAC.Config": "selective"}.get(found[name]["again"], "none")
        said = {"seq": recipe.args["seq"], "micro": recipe.micro_batch, "tp": recipe.tp, "pp": recipe.pp, "ep": recipe.ep}
        assert said == {key: value for key, value in found[name].items() if key != "again"}
        assert recipe.recompute == again
