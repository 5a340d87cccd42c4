"""Bad input from a user: one message that names the key, the value and the fix; exit 1; nothing started, nothing half-written.

A row of a table is an edit of a run file (or of a scenario, a profile or a plan) and parts of what it says, never the sentence.
`tests/golden/messages.txt` shows whole messages, one of each kind.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import parsim as ps
from parsim.app.config import load_config, parse_config
from parsim.app.config_text import RUN_OPTIONS
from parsim.app.sections import MOST_DEVICES, MOST_NODES, MOST_SAMPLES, MOST_STEP_TOKENS, MOST_TRAINED, REFUSED, TrainingSection
from parsim.cli import main
from parsim.commands import run as run_command
from parsim.engines.scenario import check_places, load_scenario, parse_scenario
from parsim.errors import LONGEST_MESSAGE, ConfigError, ScenarioError
from parsim.files import DEEPEST, LARGEST_BYTES, LARGEST_TOML_BYTES, MOST_DIGITS
from parsim.formats import recipe
from parsim.formats.recipe import MOST_YAML_NODES
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.catalogue.names import MOST_TOKENS
from parsim.model.load import load_model
from parsim.model.spec import MOST_LAYERS, ModelSpec
from parsim.plans.plan import MOST_MICROBATCHES

GOLDEN = Path(__file__).parents[1] / "golden" / "messages.txt"

# --- edits of a run file that are refused as soon as it is read ----------------------------------------------------------

RUN_TOML = """
[model]
name = "mlp"
[cluster]
profile = "dgx1-v100-32gb"
devices = 4
[training]
global_batch = 64
"""

CUSTOM = ("plan.strategy=custom", "plan.mesh.dp=4")
READ = ("plan.strategy=x/plan.json",)
PLACED = ("plan.strategy=custom", "plan.mesh.tp=4")

COMPOSER, MEGATRON = "software.framework=composer", "software.framework=megatron"

EDITS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    # names
    (("training.optimzer=adam",), ("training.optimzer", "'adam'", "did you mean optimizer")),
    (("trainning.seed=1",), ("trainning", "did you mean training")),
    (("plan.mesh.px=3",), ("plan.mesh.px", "did you mean")),
    (("training.optimizer=adma",), ("training.optimizer", "'adma'", "did you mean adam")),
    (("training.optimizer=AdamX",), ("training.optimizer", "'AdamX'")),
    (("training.precision=fp9",), ("training.precision", "'fp9'", "fp8")),
    (("training.precision=NVFP4",), ("training.precision", "'NVFP4'", 'set precision = "nvfp4"')),
    (("training.precision=MXFP4",), ("training.precision", "'MXFP4'", 'set precision = "nvfp4"')),
    (("training.precision=fp4",), ("training.precision", "'fp4'", 'set precision = "nvfp4"')),
    (("training.dataset=imagenet",), ("training.dataset", "'imagenet'", "digits")),
    (("model.granularity=blocks",), ("model.granularity", "'blocks'", "did you mean block")),
    (("plan.strategy=adaptve",), ("plan.strategy", "'adaptve'", "did you mean adaptive")),
    (("plan.strategy=fsdp",), ("plan.strategy", "'fsdp'", 'strategy = "dp" and zero_stage = 3')),
    (("plan.strategy=FSDP2",), ("plan.strategy", "'FSDP2'", 'strategy = "dp" and zero_stage = 3')),
    (("plan.strategy=zero2",), ("plan.strategy", "'zero2'", 'strategy = "dp" and zero_stage = 2')),
    (("plan.strategy=ddp",), ("plan.strategy", "'ddp'", 'strategy = "dp"')),
    (("plan.strategy=tensor",), ("plan.strategy", "'tensor'", 'strategy = "adaptive" and mesh = { tp = 4 }')),
    (("plan.recompute=ful",), ("plan.recompute", "'ful'", "did you mean full", "list of component names")),
    (("plan.recompute=selectiv",), ("plan.recompute", "'selectiv'", "selective:NAME")),
    (("plan.pipeline_order=1f1c", *CUSTOM), ("plan.pipeline_order", "'1f1c'", "1f1b")),
    (("plan.mesh.dp_shard=4",), ("plan.mesh.dp_shard", "HSDP is plan.zero_stage")),
    (("plan.dp_replicate=2",), ("plan.dp_replicate", "HSDP is plan.zero_stage")),
    (("training.checkpoint_every=5",), ("training.checkpoint_every", "--checkpoint-every to `parsim run`")),
    (("plan.cpu_offload=true",), ("plan.cpu_offload", "plan.optimizer_offload = true")),
    (("plan.offload_param=true",), ("plan.offload_param", "parameters is not supported")),
    (("model.name=a\x1b[31mred",), ("model.name", "a\\x1b[31mred", "control characters")),
    (("model.name=bell\x07",), ("model.name", "bell\\x07", "control characters")),
    (("model.name=c1\x9b2J",), ("model.name", "c1\\x9b2J", "control characters")),
    # kinds of values and their ranges
    (("training.global_batch=many",), ("training.global_batch", "'many'", "whole number", "for example global_batch = ")),
    (("training.global_batch=1.5",), ("training.global_batch", "1.5", "whole number")),
    (("training.global_batch=true",), ("training.global_batch", "True", "whole number")),
    (("training.global_batch=0",), ("training.global_batch", "= 0", ">= 1")),
    ((f"training.global_batch={10**20}",), ("training.global_batch", str(10**20), "<= 1000000000")),
    (("training.learning_rate=-1",), ("training.learning_rate", "-1", "> 0")),
    (("training.learning_rate=nan",), ("training.learning_rate", "nan", "must be")),
    (("training.tokens=1e300",), ("training.tokens", "1e+300", "<= 1e+18")),
    (("training.samples=1e300",), ("training.samples", "1e+300", "<= 1e+18")),
    (("model.name=3",), ("model.name", "3", "text in quotes")),
    (("model.args.layers=[1, 2]",), ("model.args.layers", "[1, 2]", "text, finite numbers, true or false")),
    (("model.input_shape=3",), ("model.input_shape", "3", "a list", "for example input_shape = ")),
    (("model.input_shape=[3, 0]",), ("model.input_shape.1", "= 0", ">= 1")),
    (("cluster.devices=all",), ("cluster.devices", "'all'", "a number of devices from 1 to 1048576 or a list")),
    (("cluster.devices=[0, 'a']",), ("cluster.devices",)),
    (("cluster.devices=[0, 0]",), ("cluster.devices", "[0, 0]", "every device once")),
    (("cluster.devices=[]",), ("cluster.devices", "[]", "at least one")),
    (("cluster.devices.x=3",), ("cluster.devices.x", "is not a table")),
    (("cluster.nodes=1000000",), ("cluster.nodes", "1000000", "<= 65536", "for example nodes = 2")),
    ((f"cluster.devices={10**20}",), ("cluster.devices", str(10**20), "from 1 to 1048576")),
    (("plan.mesh.tp=1000000000000000",), ("plan.mesh.tp", "<= 1000000000000")),
    (("training.optimizer={ name = 'sgd' }",), ("training.optimizer", "text in quotes")),
    (("cluster.cards_per_node=1000000000",), ("cluster.cards_per_node", "1000000000", "<= 1024")),
    (("cluster.host_link_bytes_per_s=0",), ("cluster.host_link_bytes_per_s", "= 0", "> 0")),
    (("plan.zero_stage=4",), ("plan.zero_stage", "= 4", "0, 1", "2", "3")),
    (("plan.zero_stage=all",), ("plan.zero_stage", "'all'", '0, 1, 2, 3 or "auto"')),
    (("plan.microbatches=1000000",), ("plan.microbatches", "1000000", "<= 10000")),
    (("plan.chunks=1000000",), ("plan.chunks", "1000000", "<= 10000")),
    (("plan.dp_shard=0",), ("plan.dp_shard", "= 0", ">= 1", "for example dp_shard = 8")),
    (("plan.optimizer_offload=1",), ("plan.optimizer_offload", "= 1", "true or false")),
    (("plan.activation_offload=3",), ("plan.activation_offload", "= 3", "true, false or a list of component names")),
    (("plan.placements={ head = 1 }",), ("plan.placements.head", "= 1", "text in quotes", "for example placements = ")),
    (("plan.placements={ head = 'shard:column' }", *PLACED), ("plan.placements.'head'", "'shard:column'", "shard:RULE/WAYS")),
    (("plan.pin={ head = 'place' }",), ("plan.pin.'head'", "'place'", "cannot read placement")),
    (("plan.forbid={ head = ['replicat'] }",), ("plan.forbid.'head'", "'replicat'", "did you mean replicate")),
    (("plan.forbid={ head = 'batch' }",), ("plan.forbid.head", "'batch'", "a list", "for example forbid = ")),
    (("training.shards=labels",), ("training.shards", "'labels'", "did you mean label_sorted")),
    (("training.shards=dirichlet:0",), ("training.shards", "dirichlet:0", "concentration must be > 0")),
    (("training.shards=iid:3",), ("training.shards", "iid takes no number")),
    (("training.shards=[700, 0]",), ("training.shards", "a replica without samples")),
    # what does not go together
    (("training.master_weights=true",), ("training.master_weights", "bf16")),
    (("training.state_dtype=int4",), ("training.state_dtype", "'int4'", "fp8")),
    (("training.gradient_dtype=fp32",), ("training.gradient_dtype", "half precision", "drop gradient_dtype")),
    (("training.tune=dora",), ("training.tune", "'dora'", "lora")),
    (("training.tune=lora:rank=8",), ("training.tune.rank", "known: alpha", "r, targets")),
    (("training.tune=lora:r",), ("training.tune", "'r'", "key=value")),
    (("training.tune=head:r=8",), ("training.tune", "method = 'head' has none", "set lora")),
    (("training.weight_dtype=fp8",), ("training.weight_dtype", "precision = ", "drop weight_dtype")),
    (("training.dtype=float64", "training.precision=bf16"), ("training.dtype", "'float64'", "training.precision", "'bf16'")),
    (("cluster.nodes=2",), ("cluster.nodes", "2", "needs cluster.network", "for example network = ")),
    (("plan.zero_stage=1", *READ), ("plan.zero_stage", "the plan is read from", "drop zero_stage")),
    (("plan.recompute=full", *READ), ("plan.recompute", "the plan is read from", "drop recompute")),
    (("plan.bucket_bytes=3", *READ), ("plan.bucket_bytes = 3", "the plan is read from", "drop bucket_bytes")),
    (("plan.placements={ head = 'batch' }",), ("plan.placements", "strategy = ")),
    (("plan.pin={ head = 'place:0' }", *PLACED), ("plan.pin", "'custom'", 'strategy = "adaptive"')),
    (("plan.strategy=custom",), ('plan.strategy = "custom"', "needs plan.mesh")),
    (("plan.mesh.tp=3",), ("tp (3)", "devices (4)", "2 or 4", "devices = 6")),
    (("plan.strategy=custom", "plan.mesh.pp=3"), ("pp (3) * dp (1) * tp (1) = 3", "devices (4)", "devices = 3")),
    (("plan.mesh.etp=2",), ("unknown key plan.mesh.etp", "over the ranks of mesh.tp", "set mesh.tp = 1")),
    (("plan.mesh.pp=2", COMPOSER), ("plan.mesh.pp = 2", "software.framework = 'composer'", "have dp alone", "drop one")),
    (("plan.zero_stage=1", COMPOSER), ("plan.zero_stage = 1", "'composer'", "0 or 2 or 3 alone", "drop one")),
    (("software.dispatcher=deepep", COMPOSER), ("software.dispatcher = 'deepep'", "'composer'", "share experts", "drop one")),
    (("software.compiled=true", COMPOSER), ("software.compiled = true", "'composer'", "drop compiled")),
    (("plan.mesh.pp=2", "plan.stage_layers=[1]"), ("plan.stage_layers has 1 stages", "2 x 1", "as many numbers")),
    (("plan.pipeline_order=gpipe", MEGATRON), ("plan.pipeline_order = 'gpipe'", "'megatron'", "1f1b, interleaved alone")),
    (("plan.tensor_backward_overlap=true", MEGATRON), ("tensor_backward_overlap", "'megatron'", "plan.tensor_overlap = false")),
    (("plan.tensor_overlap=true", "plan.sequence_parallel=false"), ("tensor_overlap", "sequence_parallel = false", "drop one")),
    (("plan.gather_ahead=true", "plan.zero_stage=3"), ("plan.gather_ahead", "zero_stage = 1", "zero_stage = 3")),
    (("plan.backward_prefetch=false", "plan.zero_stage=1"), ("plan.backward_prefetch", "zero_stage = 3", "zero_stage = 1")),
    # how an edit is written
    (("seed=3",), ("--set 'seed=3'", "section.key=value")),
    (("training.seed",), ("--set 'training.seed'", "section.key=value")),
    (("training..seed=1",), ("--set 'training..seed=1'", "section.key=value")),
]

TABLES: list[tuple[str, tuple[str, ...]]] = [
    ("[training.groups.critic]\nparameters = []", ("training.groups.critic.parameters",)),
    ('[training.groups.critic]\noptimizer = "adam"', ("training.groups.critic.parameters",)),
    ('[training.groups.critic]\nparameters = ["a"]\noptimizer = "adma"', ("did you mean adam",)),
    ('[training.groups.critic]\nparameters = ["a"]\nlr = 1.0', ("training.groups.critic.lr",)),
    ('[training.groups."a b"]\nparameters = ["a"]', ("training.groups",)),
    ('[training.groups.a]\nparameters = ["a"]\noptimizer_args = { weight_decay = 1.0 }', ("weight_decay of the group",)),
    ('[training.schedule]\nname = "CosineAnealingLR"', ("did you mean CosineAnnealingLR",)),
    ('[training.schedule]\nname = "StepLR"\nstep = 3', ("StepLR", "'step'", "did you mean step_size")),
    ('[training.schedule]\nname = "StepLR"', ("StepLR", "needs step_size", "gamma")),
    ("[training.schedule]\nwarmup = -1", ("training.schedule.warmup", "-1", ">= 0")),
    ('no_weight_decay = ["bias"]', ("set weight_decay too",)),
    ("optimizer_args = { weight_decay = 0.1 }", ("training.weight_decay",)),
    ('"global.batch" = 3', ("unknown key training.global.batch",)),
    ('[plan]\nsynchronisation = "averag/8"', ("average",)),
    ('[plan.synchronisation]\nkind = "average"\nperiod_steps = 0', ("plan.synchronisation.period_steps", "= 0", ">= 1")),
    ('[plan.synchronisation]\nkind = "average"\nperod = 1', ("plan.synchronisation", "period_steps")),
    ('[plan.synchronisation]\nkind = "average"\nparticipation = 2.0', ("plan.synchronisation", "at most 1")),
    ('[plan]\nstrategy = "dp"\nmesh = { dp = 4 }\nsynchronisation = { kind = "gossip", graph = "alone" }', ("not connected",)),
    ('[plan.synchronisation]\nkind = "gossip"\ngraph = { name = "ada", rounds = "five", epochs = 3 }', ("rounds = 'five'",)),
    ('[plan.synchronisation]\nkind = "gossip"\ngraph = { name = "ada", rounds = 5, epochs = 2.5 }', ("epochs = '2.5'",)),
    (
        '[plan.synchronisation]\nkind = "gossip"\ngraph = { name = "ada", kind = "closed_loop", rounds = 5, epochs = 3 }',
        ("a target for the consensus distance", "no epochs"),
    ),
    (
        '[plan]\nstrategy = "dp"\nmesh = { dp = 4 }\n'
        'synchronisation = { kind = "gossip", graph = { name = "ada", kind = "closed_loop", rounds = 5 } }',
        ("closed_loop needs a target > 0",),
    ),
    ('[plan.synchronisation]\nkind = "gossip"\ngraph = { name = "lattice", neighbors = 2 }', ("no setting 'neighbors'",)),
    (
        '[plan]\nstrategy = "dp"\nmesh = { dp = 2 }\nsynchronisation = { kind = "average", weights = [0.5, 0.4] }',
        ("sum to 1",),
    ),
    ('[plan]\nstrategy = "dp"\nzero_stage = 2\nsynchronisation = { kind = "average" }', ("zero_stage",)),
    ('[plan]\nstrategy = "dp"\nsynchronisation = { kind = "stale" }', ("strategy 'dp'",)),
    ('[plan]\nstrategy = "dp"\nsynchronisation = "average/8 schedule=fdg"', ("strategy 'dp'", "hp")),
    *(
        (text, (f"torch's {name} {why}",))
        for name, why in REFUSED.items()
        for text in (f'optimizer = "{name}"', f'[training.groups.head]\nparameters = ["head.*"]\noptimizer = "{name}"')
    ),
]


def assert_says(text: str, parts: tuple[str, ...]) -> None:
    absent = [part for part in parts if part not in text]
    assert not absent, f"{absent} not in: {text}"


@pytest.mark.parametrize(("edits", "parts"), EDITS, ids=lambda value: value[0] if isinstance(value[0], str) else "")
def test_an_edit_of_a_run_file(edits: tuple[str, ...], parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(RUN_TOML, edits)
    assert_says(str(refused.value), parts)


@pytest.mark.parametrize(("text", "parts"), TABLES)
def test_a_table_of_a_run_file(text: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(RUN_TOML + text + "\n")
    assert_says(str(refused.value), parts)


def test_several_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config("[model]\nnam = 'x'\n")
    assert_says(str(refused.value), ("model.name is missing", "model.nam", "cluster is missing"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    for content, parts in (
        (None, ("no run file", "broken.toml")),
        (b"[model\n", ("broken.toml is not TOML", "line 1")),
        (b"\xff\xfe\x00", ("UTF-8",)),
    ):
        if content is not None:
            broken.write_bytes(content)
        with pytest.raises(ConfigError) as refused:
            load_config(broken)
        assert_says(str(refused.value), parts)
    with pytest.raises(ConfigError, match="cannot read run file"):
        load_config(tmp_path)


def test_code_inside_nested_tables_counts_as_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARSIM_ALLOW_CODE", raising=False)
    with pytest.raises(ConfigError, match=r"training.schedule.name = 'elsewhere:ROW' runs code"):
        parse_config(RUN_TOML + '[training.schedule]\nname = "elsewhere:ROW"', folder=tmp_path)


def test_keys_that_are_options_of_run_are() -> None:
    assert set(RUN_OPTIONS) <= set(inspect.signature(run_command.run).parameters)


# --- questions by value, without a file ------------------------------------------------------------------------------------

LLAMA, MIXTRAL, GPT3 = ("llama3-8b", "8xh100-sxm"), ("mixtral-8x7b", "8xh100-sxm"), ("gpt3-1.3b", "8xa100-sxm-80gb")
STAGES = {"plan.strategy": "custom", "plan.mesh": {"pp": 2, "dp": 2, "tp": 2}, "plan.microbatches": 4}
QUESTIONS: dict[tuple[str, str], list[tuple[dict[str, Any], str]]] = {
    LLAMA: [
        ({"plan.mesh": {"tp": 8}, "model.args.heads": 4, "model.args.kv_heads": 4}, r"tp = 8 must divide the heads \(4\).*: 4"),
        ({"plan.mesh": {"tp": 8}, "model.args.ffn": 100}, r"tp = 8 must divide the inside of the MLP \(100\).*: 5 or 10$"),
        ({"plan.mesh": {"tp": 8}, "model.args.seq": 1001}, r"tp = 8 must divide the tokens of a sample \(1,001\).*: 7 or 11$"),
        ({"plan.mesh": {"pp": 8}, "model.args.layers": 4}, r"8 stages, and llama3-8b has 4 layers; .*chunks <= 4"),
        ({"plan.mesh": {"cp": 3}, "model.args.seq": 1000}, r"cp = 3 must divide the tokens of a sample \(1,000\).*: 2 or 4"),
        ({"plan.microbatches": 3}, r"global_batch \(8\) must be divisible by plan.microbatches \(3\); .* divide it: 2 or 4$"),
        ({"plan.mesh": {"dp": 2, "tp": 4, "ep": 4}}, r"ep \(4\) must divide dp \(2\) \* cp \(1\) = 2: .*that does: 2$"),
        ({"plan.mesh": {"tp": 4, "ep": 4}}, r"ep \(4\) must divide devices \(8\) / .* = 2, .*that do: 2$"),
        ({"plan.strategy": "custom", "plan.mesh": {"pp": 8}, "plan.scatter_gather": True}, "mesh with pp > 1 and tp > 1; drop"),
        ({"plan.strategy": "custom", "plan.mesh": {"dp": 8}, "plan.blocking_transfers": True}, "mesh with pp > 1; drop it"),
        ({"plan.tensor_overlap": True, "plan.mesh": {"tp": 1}}, r"plan.tensor_overlap = true belongs to .* tp > 1; drop it"),
        ({"plan.mesh": {"tp": 3}}, r"must divide the (devices|heads).*the nearest that do: "),
        ({"plan.mesh": {"dp": 8}, "training.global_batch": 12}, r"must be divisible by .*; the nearest that is: "),
    ],
    MIXTRAL: [
        ({"software.delay_weight_gradients": True}, "set software.expert_overlap = true, or drop delay_weight_gradients"),
        ({"software.expert_overlap": True, "plan.recompute": "full"}, 'set recompute = "selective"'),
        (
            {"software.framework": "megatron", "software.expert_overlap": True, **STAGES},
            "has 2 stages, 1 per rank|has 2 stages",
        ),
        ({"plan.routing_skew": 0.2, "plan.capacity_factor": 1.5}, "changes nothing; drop one of them"),
        ({"plan.routing_skew": -0.2}, "routing_skew"),
        ({"software.dispatcher": "nccl"}, "dispatcher"),
    ],
    GPT3: [
        ({"plan.zero_stage": 3, "software.framework": "ddp"}, r"zero_stage = 3 and .* 'ddp', which has zero_stage 0 alone"),
        (
            {"plan.zero_stage": 1, "software.framework": "megatron", "software.year": 2020},
            r"plan.zero_stage = 1 and .* 'megatron' in 2020, which has zero_stage 0 alone",
        ),
        ({"software.dispatcher": "deepep", **STAGES}, "about a mixture of experts, and gpt3"),
        ({"software.framework": "megatrn"}, "software.framework.*did you mean megatron"),
        ({"software.year": 2021}, "no framework is named.*software.framework"),
        ({"software.compiled": True}, "no framework is named.*software.framework"),
        ({"software.framework": "megatron", "software.year": 21}, "software.year.*21"),
        ({"software.framework": "megatron", "software.attention": "slow"}, "software.attention.*slow"),
        ({"software.framwork": "megatron"}, "software.framwork.*framework"),
        ({"software.channels_last": True}, "software.channels_last"),
    ],
    ("resnet50", "1xa100-sxm-80gb"): [
        ({"software.framework": "megatron"}, "software.framework.*resnet50.*drop it"),
        ({"software.attention": "flash"}, "software.attention"),
    ],
    ("vit_b_16", "1xa100-sxm-80gb"): [({"software.framework": "megatron"}, "software.framework")],
    ("gpt", "1xa100-sxm-80gb"): [({"software.channels_last": True}, "software.channels_last")],
    **{
        ("llama3-8b", cluster): [({}, said)]
        for cluster, said in (
            ("2xa3-highgpu-8g", "TCPX"),
            ("2xgpu_8x_h100_sxm5", "infiniband-400g"),
            ("p5.48xlrge", "did you mean p5.48xlarge"),
            ("v5p-8", "TPUs of Google are not covered"),
            ("8xv6e", "TPUs of Google are not covered"),
            ("trn2.48xlarge", "Trainium"),
            ("8xgaudi3", "Gaudi"),
            ("m3-max", "Apple"),
            ("Standard_ND128isr_NDR_GB200_v6", "72xgb200"),
        )
    },
}


@pytest.mark.parametrize(
    ("question", "settings", "message"), [(question, *row) for question, rows in QUESTIONS.items() for row in rows]
)
def test_a_question(question: tuple[str, str], settings: dict[str, Any], message: str) -> None:
    model, cluster = question
    given = {"training.global_batch": 8, **settings}
    batch = given.pop("training.global_batch")
    with pytest.raises(ps.ParsimError, match=message):
        ps.plan(model, cluster=cluster, global_batch=batch, settings=given)


# --- scenarios -----------------------------------------------------------------------------------------------------------

SCENARIOS: list[tuple[str, tuple[str, ...]]] = [
    ("[[stragler]]\nrank = 1", ("stragler", "did you mean stragglers")),
    ("[[stragglers]]\nrank = 1\nfaktor = 2.0", ("stragglers.0.faktor", "2.0", "did you mean factor")),
    ("[[stragglers]]\nrank = 1\nfactor = -2.0", ("stragglers.0.factor", "-2.0", "greater than 0")),
    ("[[stragglers]]\nrank = 1\nfactor = nan", ("stragglers.0.factor", "nan", "must be")),
    ("[[stragglers]]\nrank = 1", ("stragglers.0.factor is missing", "add it")),
    ("[[stragglers]]\nrank = 1\nfactor = 2.0\nfrom_s = 5.0\nuntil_s = 5.0", ("until_s (5)", "after from_s (5)")),
    ("[[links]]\nbandwidth_factor = -0.5", ("links.0.bandwidth_factor", "-0.5", "greater than or equal to 0")),
    ('[jitter]\ndistribution = "lognorm"', ("jitter.distribution", "'lognorm'", "did you mean lognormal")),
    ('[jitter]\ndistribution = "uniform"\ncompute_sigma = 0.8', ("below 0", "sigma <= 0.577")),
    ("[failures]\nat = [{ at_s = 3.0 }]", ("one rank or of one node", "one of the two keys")),
    ("[checkpoints]\ninterval_s = 10.0", ("write_s", "write_bytes_per_s")),
    ("[device]\nidle_w = 100.0", ("busy_w (0)", "idle_w (100)")),
    ("[run]\nepochs = 1\nsamples_per_epoch = 0", ("run.samples_per_epoch", "= 0", "greater than or equal to 1")),
    ("seed = ", ("is not TOML",)),
    # places that the plan and the machine do not have
    ("[[stragglers]]\nrank = 8\nfactor = 2.0", ("stragglers.0", "no rank 8", "0 to 7")),
    ('[[links]]\nbetween = ["gpu0", "gpx3"]\nbandwidth_factor = 0.5', ("'gpx3'", "did you mean gpu3")),
    ('[[links]]\nbetween = ["gpu0", "gpu5"]\nbandwidth_factor = 0.5', ("gpu0 and gpu5", "connected to gpu1")),
    ("[failures]\nat = [{ at_s = 3.0, node = 4 }]", ("no node 4", "node 0")),
    ("[failures]\nat = [{ at_s = 3.0, rank = 9 }]", ("failures.at.0", "no rank 9")),
]


@pytest.mark.parametrize(("text", "parts"), SCENARIOS)
def test_a_scenario(text: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ScenarioError) as refused:
        check_places(parse_scenario(text), 8, cluster_from_profile(load_profile("dgx1-v100-32gb"), 8))
    assert_says(str(refused.value), parts)
    with pytest.raises(ScenarioError, match="no scenario file"):
        load_scenario(tmp_path / "none.toml")


# --- by the command line: what shows only when models, profiles and plans are loaded ---------------------------------------

Refused = Callable[..., str]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Call `parsim ARGS` in a folder with RUN.toml: exit status, and all of stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "RUN.toml").write_text(RUN_TOML)

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["parsim", *arguments])
        status = 0
        try:
            main()
        except SystemExit as ending:
            status = int(ending.code or 0)
        captured = capsys.readouterr()
        return status, captured.out if status == 0 else f"{captured.out}\0{captured.err}"

    return call


@pytest.fixture
def refused(cli: Callable[..., tuple[int, str]], tmp_path: Path) -> Refused:
    """A call that must exit 1 with one message, nothing on stdout, and no file that was not there. Gives the message."""

    def call(*arguments: str, tracebacks: int = 0) -> str:
        before = {path for path in tmp_path.rglob("*") if "__pycache__" not in str(path)}
        status, printed = cli(*arguments)
        stdout, _, stderr = printed.partition("\0")
        assert (status, stdout) == (1, ""), printed
        _, start, message = stderr.partition("parsim: ")
        assert start, stderr
        assert "parsim: " not in message
        assert stderr.count("Traceback") == tracebacks
        assert "\x1b" not in stderr
        assert {path for path in tmp_path.rglob("*") if "__pycache__" not in str(path)} == before
        return message

    return call


def plan(refused: Refused, *changes: str, tracebacks: int = 0) -> str:
    return refused("plan", "RUN.toml", *(f"--set={change}" for change in changes), tracebacks=tracebacks)


def edited_profile(edit: Callable[[dict[str, Any]], object]) -> str:
    """broken.json: a shipped profile after an edit."""
    document = json.loads(files("hardware_profiles").joinpath("dgx1-v100-32gb.json").read_text("utf-8"))
    edit(document)
    Path("broken.json").write_text(json.dumps(document))
    return "cluster.profile=broken.json"


def put(*path: str, value: Any) -> Callable[[dict[str, Any]], object]:
    """An edit: another value at a path of keys."""

    def edit(document: dict[str, Any]) -> None:
        table = document
        for key in path[:-1]:
            table = table[key]
        table[path[-1]] = value

    return edit


def without_costs(document: dict[str, Any]) -> None:
    """No operator fit, and no peak: nothing is known about computing on these devices."""
    document["compute"].update(components=[], operator_fits=[], operator_points=[], optimizers=[])
    for entry in document["device_types"].values():
        entry["peak_flop_per_s"] = {}


V100, NVLINK = ("device_types", "V100-SXM2"), ("link_kinds", "nvlink")
NODES = ("cluster.devices=8", "cluster.network=infiniband-100g")

ABSENT: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("model.name=mpl",), ("'mpl'", "did you mean mlp")),
    (("model.args.widht=3",), ("'widht'", "did you mean width")),
    (("cluster.profile=dgx1-v100-32g",), ("'dgx1-v100-32g'", "did you mean dgx1-v100-32gb")),
    (("cluster.profile=absent.json",), ("no profile file", "absent.json", "parsim calibrate")),
    (("cluster.instance=p5.48xlarge",), ("p5.48xlarge sets cluster.profile", "drop one")),
    (("cluster.devices=9",), ("8 devices", "9", "1 to 8")),
    (("cluster.devices=[0, 8]",), ("no device 8", "[0, 1, 2, 3, 4, 5, 6, 7]")),
    (("plan.strategy=absent/plan.json",), ("no plan file", "absent/plan.json", "parsim plan")),
    (("cluster.nodes=60000", *NODES), ("nodes = 60,000", "480,000 devices", "nodes <= 16,384")),
    ((*CUSTOM, "plan.chunks=2"), ("plan.chunks", "2", "interleaved")),
    (("plan.strategy=dp", "plan.mesh.dp=4", "training.global_batch=30"), ("global_batch (30)", "dp (4)", "32")),
    ((*CUSTOM, "plan.microbatches=3"), ("global_batch (64)", "plan.microbatches (3)", "2 or 4")),
    ((*CUSTOM, "plan.microbatches=32"), ("global_batch (64)", "dp (4)", "microbatches (32)", "128")),
    (("plan.optimizer_offload=true", "plan.strategy=dp"), ("cluster.host_memory_bandwidth_bytes_per_s",)),
    (("plan.sequence_parallel=false",), ("transformer by name (llama3-8b)",)),
    (("model.args.num_classes=-5",), ("num_classes of mlp", ">= 1", "-5")),
    (("model.args.depth=1000000000",), ("depth of mlp", "<= 4096", "1000000000")),
    (("model.name=resnet50", "model.args.num_classes=0"), ("num_classes of resnet50", ">= 1", "0")),
    (("model.name=gpt_small", "model.args.layers=-1"), ("layers of gpt_small", ">= 1", "-1")),
    (("model.name=gpt_small", "model.args.layers=100000"), ("layers of gpt_small", "<= 4096", "100000")),
    (("model.name=gpt_small", "model.args.dropout=1.5"), ("dropout of gpt_small", ">= 0 and < 1", "1.5")),
    (("model.name=llama3-8b", "model.args.layers=1000000"), ("layers of llama3-8b", "<= 4096", "1000000")),
]

PROFILES: list[tuple[Callable[[dict[str, Any]], object], tuple[str, ...]]] = [
    (lambda document: document.pop("devices"), ("broken.json is broken", "devices")),
    (put("devcies", value=1), ("broken.json is broken", "devcies")),
    (lambda document: document["devices"][0].update(type="v200"), ("broken.json is broken", "v200")),
    (put("name", value="a\x1b[31mred"), ("name", "a\\x1b[31mred", "control characters")),
    (put(*V100, "peak_flop_per_s", "fp32", "value", value=0), ("V100-SXM2", "fp32 = 0", ">= 1e+06", "leave fp32 out")),
    (put(*V100, "peak_flop_per_s", "fp32", "value", value=15.7), ("TFLOP/s meant", "1.57e+13")),
    (put(*V100, "memory_bytes", "value", value=32), ("memory_bytes = 32", ">= 65536", "GiB meant", "3.43597e+10")),
    (put(*NVLINK, "bandwidth_bytes_per_s", "value", value=25), ("nvlink", "= 25 bytes/s", "GB/s meant", "2.5e+10")),
    (put(*NVLINK, "latency_s", "value", value=3), ("latency_s = 3 s", "<= 1", "us meant", "3e-06")),
    (without_costs, (load_model(ModelSpec(name="mlp")).components[0].name, "calibrate")),
]


@pytest.mark.parametrize(("edits", "parts"), ABSENT, ids=lambda value: value[0])
def test_what_does_not_exist_or_divide(refused: Refused, edits: tuple[str, ...], parts: tuple[str, ...]) -> None:
    assert_says(plan(refused, *edits), parts)


@pytest.mark.parametrize(
    "command", [("simulate",), ("simulate", "--engine", "dynamic", "--out", "kept"), ("plan", "--out", "p.json")]
)
def test_every_command_that_reads_a_run_file_refuses_alike(refused: Refused, command: tuple[str, ...]) -> None:
    for edits, parts in (EDITS[0], ABSENT[0], ABSENT[4], ABSENT[6]):
        words = (command[0], "RUN.toml", *command[1:], *(f"--set={edit}" for edit in edits))
        assert_says(refused(*words), parts)


@pytest.mark.parametrize(("edit", "parts"), PROFILES, ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_a_broken_profile(refused: Refused, edit: Callable[[dict[str, Any]], object], parts: tuple[str, ...]) -> None:
    assert_says(plan(refused, edited_profile(edit)), parts)


def test_a_network_card_of_100_bytes_per_second(refused: Refused) -> None:
    document = json.loads(files("hardware_profiles").joinpath("networks", "infiniband-100g.json").read_text("utf-8"))
    document["card"]["bandwidth_bytes_per_s"]["value"] = 100
    Path("net.json").write_text(json.dumps(document))
    message = plan(refused, "cluster.nodes=2", "cluster.devices=8", "cluster.network=net.json")
    assert_says(message, ("net.json is broken", "card", "100 bytes/s", "GB/s meant"))


def test_a_mesh_without_a_number_of_devices_is_that_of_the_whole_profile(refused: Refused) -> None:
    Path("RUN.toml").write_text(RUN_TOML.replace("devices = 4\n", ""))
    assert_says(plan(refused, "plan.strategy=custom", "plan.mesh.pp=3"), ("= 3", "devices (8)"))


NESTED = "[" * 10_000 + "]" * 10_000


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("cluster.profile=deep.json", NESTED),
        ("model.name=deep.json", '{"components": ' + NESTED + "}"),
        ("plan.strategy=deep.json", '{"stages": ' + NESTED + "}"),
        ("plan.strategy=deep.json", "[" * 900 + "]" * 900),
    ],
)
def test_json_nested_10000_deep(refused: Refused, key: str, text: str) -> None:
    Path("deep.json").write_text(text)
    assert_says(plan(refused, key), ("deep.json is n", "nested more than 100 levels deep"))


def test_files_that_are_not_what_their_names_say(refused: Refused) -> None:
    Path("deep.toml").write_text(f"[model]\nname = {NESTED}\n")
    Path("cut.json").write_text('{"schema_version": 1, "name": "x"')
    deep = ("deep.toml is not TOML", "nested more than 100 levels")
    for arguments, parts in (
        (("plan", "deep.toml"), deep),
        (("simulate", "RUN.toml", "--set", "plan.strategy=dp", "--engine", "dynamic", "--scenario", "deep.toml"), deep),
        (("plan", "RUN.toml", "--set", "cluster.profile=cut.json"), ("cut.json is not JSON",)),
        (("cost", "cut.json", "--model", "mlp", "--batch", "4"), ("cut.json is not JSON",)),
        (("plan", "a\x1b[31m.toml"), ("no run file a\\x1b[31m.toml",)),
        (("report", "."), ("is not a run folder",)),
    ):
        assert_says(refused(*arguments), parts)


PLANS: list[tuple[Callable[[dict[str, Any]], object], tuple[str, ...]]] = [
    (lambda plan: plan.pop("mesh"), ("is not a plan", "'mesh'")),
    (lambda plan: plan.update(schema_version=99), ("schema_version", "99")),
    (lambda plan: plan["stages"][0]["components"].__setitem__(0, "layers.99"), ("component 'layers.99'",)),
    (lambda plan: plan["stages"].pop(), ("pp=4", "3 stages")),
    (lambda plan: plan.update(global_batch=128), ("global_batch 128", "64")),
    (lambda plan: plan.update(pipeline_order="1f1c"), ("1f1c", "1f1b")),
]


def test_a_broken_plan_file(cli: Callable[..., tuple[int, str]], refused: Refused) -> None:
    status, printed = cli("plan", "RUN.toml", "--set", "plan.strategy=custom", "--set", "plan.mesh.pp=4", "--json")
    assert status == 0
    text = json.dumps(json.loads(printed)["chosen"]["plan"])
    for edit, parts in PLANS:
        document = json.loads(text)
        edit(document)
        Path("plan.json").write_text(json.dumps(document))
        assert_says(refused("simulate", "RUN.toml", "--set", "plan.strategy=./plan.json"), parts)
    Path("plan.json").write_text(text[:100])
    assert_says(refused("simulate", "RUN.toml", "--set", "plan.strategy=./plan.json"), ("plan.json is not a plan",))


def test_a_saved_model_that_is_broken_or_given_arguments(refused: Refused, tmp_path: Path) -> None:
    model = load_model(ModelSpec(name="mlp"))
    model.save(tmp_path / "mine.json")
    assert_says(plan(refused, "model.name=mine.json", "model.args.width=3"), ("mine.json", "finished Model", "drop"))
    document = json.loads(model.to_json())
    document["components"][0].pop("outputs")
    (tmp_path / "mine.json").write_text(json.dumps(document))
    assert_says(plan(refused, "model.name=mine.json"), ("mine.json is not a model",))


def test_a_plan_that_does_not_fit_is_a_result_and_only_run_refuses_it(
    cli: Callable[..., tuple[int, str]], refused: Refused
) -> None:
    def edit(document: dict[str, Any]) -> None:
        for entry in document["device_types"].values():
            entry["memory_bytes"]["value"] = 1e6

    tiny = edited_profile(edit)
    status, printed = cli("simulate", "RUN.toml", "--set", tiny, "--json")
    assert status == 0
    assert json.loads(printed)["fits"] is False
    assert any("largest line" in warning for warning in json.loads(printed)["warnings"])
    assert_says(refused("plan", "RUN.toml", "--set", tiny, "--out", "p.json"), ("no plan fits", "p.json is not written"))
    message = refused("run", "RUN.toml", "--set", tiny, "--nproc", "4", "--out", "kept")
    assert_says(message, ("cannot fit", "rank ", "at p95", "977 KiB", "largest line", "more devices or microbatches"))


CALLS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("cost", "dgx1-v100-32gb", "--collective", "all_redcue", "--size-bytes", "8"), ("'all_redcue'", "all_reduce")),
    (("cost", "dgx1-v100-32gb", "--collective", "all_reduce", "--size-bytes", "8", "--ranks", "0,9"), ("rank 9", "0 to 7")),
    (
        ("cost", "dgx1-v100-32gb", "--collective", "all_reduce", "--size-bytes", "8", "--ranks", "0;1"),
        ("'0;1'", "whole numbers"),
    ),
    (("cost", "dgx1-v100-32gb", "--collective", "all_reduce", "--size-bytes", "-8"), ("--size-bytes -8", ">= 0")),
    (("cost", "dgx1-v100-32gb", "--model", "mlp", "--batch", "0"), ("--batch 0", ">= 1")),
    (("cost", "dgx1-v100-32gb", "--model", "mlp", "--batch", str(10**20)), (str(10**20), "<= 1000000000")),
    (("cost", "dgx1-v100-32gb", "--model", "mlp", "--batch", "4", "--arg", "width"), ("'width'", "key=value")),
    (("cost", "dgx1-v100-32gb", "--model", "gpt_small", "--batch", "32", "--ways", "7"), ("--ways 7", "at least 2", "divide")),
    (("cost", "dgx1-v100-32gb", "--model", "gpt_small", "--batch", "32", "--ways", "1"), ("--ways 1", "at least 2", "divide")),
    (("run", "RUN.toml", "--set", "plan.strategy=dp", "--nproc", "5", "--out", "kept"), ("--nproc 5", "(4", "--nproc 4")),
    (("simulate", "RUN.toml", "--set", "plan.strategy=dp", "--out", "full"), ("full", "not empty")),
    (("plan", "RUN.toml", "--set", "plan.strategy=dp", "--out", "full/note.txt/plan.json"), ("note.txt",)),
    (("calibrate", "--refit", "p.json"), ("p.raw.json.gz", "calibrate")),
    (("calibrate", "--model", "mlp", "--out", "p.json", "--resume"), ("nothing to resume", "drop --resume")),
]


@pytest.mark.parametrize(("arguments", "parts"), CALLS, ids=lambda value: " ".join(value))
def test_a_call(refused: Refused, arguments: tuple[str, ...], parts: tuple[str, ...]) -> None:
    Path("full").mkdir()
    Path("full/note.txt").write_text("precious")
    assert_says(refused(*arguments), parts)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("plan",),
        ("pln", "RUN.toml"),
        ("plan", "RUN.toml", "--tpo", "3"),
        ("cost", "dgx1-v100-32gb"),
        ("calibrate", "--out", "p.json"),
        ("calibrate", "--model", "mlp"),
        ("calibrate", "--model", "mlp", "--out", "p.json", "--resume", "--restart"),
        ("calibrate", "--refit", "p.json", "--out", "q.json"),
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_2(cli: Callable[..., tuple[int, str]], arguments: tuple[str, ...], tmp_path: Path) -> None:
    status, printed = cli(*arguments)
    assert status == 2
    assert "Usage" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["RUN.toml"]


# --- code of the user ------------------------------------------------------------------------------------------------------

CODE = """
import torch
from torch import nn

def make(width=4):
    return inner(width)
def inner(width):
    if width < 8:
        raise ValueError("my own fault\\x1b[31m")
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
def tall():
    return None + 1

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, t):
        return self.layer(x) + t[:, None]

class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.time = nn.Linear(4, 3), nn.Embedding(50, 3)

    def forward(self, x, t):
        return self.layer(x) + self.time(t)

def wrong_classes(output, target):
    return nn.functional.cross_entropy(output, target)
"""


@pytest.fixture
def own_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_code.py").write_text(CODE)
    (tmp_path / "raising_module.py").write_text("def make():\n    pass\nraise RuntimeError('at import')\n")
    for name in ("own_code", "raising_module"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("own_code")
def test_a_factory_that_raises_shows_its_own_traceback_once(refused: Refused) -> None:
    message = plan(refused, "model.name=own_code:make", "model.input_shape=[4]", tracebacks=1)
    assert_says(message, ("own_code:make", "raised ValueError", "fix own_code", "in make", "in inner"))
    assert "spec.py" not in message, "no frame of parsim"
    assert message.rstrip().endswith("ValueError: my own fault\\x1b[31m")
    assert "raised TypeError" in plan(refused, "model.name=own_code:tall", "model.input_shape=[4]", tracebacks=1)
    refusal = plan(refused, "model.name=own_code:make", "model.args.depth=3", "model.input_shape=[4]")
    assert "refuses its arguments {'depth': 3}" in refusal
    message = plan(refused, "model.name=raising_module:make", "model.input_shape=[4]", tracebacks=1)
    assert_says(message, ("importing raising_module", "raised RuntimeError"))
    assert "importlib" not in message


X, T = "x = { shape = [4] }", "t = { shape = [] }"

INPUTS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (('model.inputs={ x = { shape = [4], dtype = "flaot32" } }',), ("input x", "'flaot32'", "did")),
    (("model.inputs={ x = { shape = [-4] } }",), ("shape", ">= 1", "[-4]")),
    (("model.inputs={ x = { shape = [1000000000, 1000000000] } }",), ("8,589,934,592 numbers per sample",)),
    (("model.inputs={ x = { shpae = [4] } }",), ("'shpae'", "did you mean shape")),
    (("model.inputs={ x = 4 }",), ("input x", "a table with a shape", "4")),
    (("model.inputs={ x = { shape = [4], high = 3 } }",), ("high and low are for integers",)),
    (("model.inputs={ x = { shape = [4], constant = true } }",), ("constant",)),
    ((f"model.inputs={{ {X}, time = {{ shape = [] }} }}",), ("'time'", "x, t")),
    ((f"model.inputs={{ {X} }}",), ("needs 't'",)),
    ((f'model.inputs={{ {X}, t = {{ shape = [], dtype = "int64" }} }}',), ("range", "give")),
    ((f"model.inputs={{ {X}, {T} }}", "model.input_shape=[4]"), ("drop input_shape",)),
    ((f"model.inputs={{ {X}, {T} }}", "model.classes_dim=0"), ("classes_dim belongs to a loss",)),
    ((f"model.inputs={{ {X}, {T} }}", "model.output=logits"), ("'logits'",)),
]


@pytest.mark.usefixtures("own_code")
@pytest.mark.parametrize(("edits", "parts"), INPUTS, ids=lambda value: value[0])
def test_inputs_that_cannot_be(refused: Refused, edits: tuple[str, ...], parts: tuple[str, ...]) -> None:
    assert_says(plan(refused, "model.name=own_code:Net", *edits), parts)


@pytest.mark.usefixtures("own_code")
@pytest.mark.parametrize("command", ["plan", "run"])
def test_declared_integers_beyond_a_table(refused: Refused, command: str) -> None:
    """Both commands end before a process starts: `run` with the same words as `plan`."""
    inputs = "--set=model.inputs={ x = { shape = [4] }, t = { shape = [], dtype = 'int64', high = %d } }"
    given = (command, "RUN.toml", "--set=model.name=own_code:Table", "--set=training.dataset=synthetic")
    assert_says(refused(*given, inputs % 1000), ("input t", "0 to 999", "module time", "50 entries", "give t high = 50"))
    own = ("--set=model.loss=own_code:wrong_classes", "--set=model.target={ shape = [], dtype = 'int64', high = 7 }")
    assert_says(refused(*given, inputs % 50, *own), ("input target", "0 to 6", "classes of a loss, 3"))


# --- the golden page -------------------------------------------------------------------------------------------------------


def messages() -> str:
    """Whole messages, each below the edit that it answers: every fourth row of the tables that need no files."""
    told = []
    for edits, _ in EDITS[::4]:
        with pytest.raises(ConfigError) as refused:
            parse_config(RUN_TOML, edits)
        told.append(f"--set {' --set '.join(edits)}\n    {refused.value}\n")
    for text, _ in TABLES[:24:4]:
        with pytest.raises(ConfigError) as refused:
            parse_config(RUN_TOML + text + "\n")
        told.append(f"{text}\n    {refused.value}\n")
    for text, _ in SCENARIOS[:13:4]:
        with pytest.raises(ScenarioError) as told_by:
            parse_scenario(text)
        told.append(f"{text}\n    {told_by.value}\n")
    return "\n".join(told).replace(str(Path.cwd()), ".")


def test_the_table_of_limits_is_the_code() -> None:
    """docs/run-file.md: what is refused at once."""
    table = Path("docs/run-file.md").read_text().partition("## Limits")[2]
    told = {name.strip(): int(most) for name, most in re.findall(r"^\| (.*) \| (\d+) \|$", table, re.MULTILINE)}
    (count,) = (entry.le for entry in TrainingSection.model_fields["epochs"].metadata if hasattr(entry, "le"))
    (workers,) = (entry.le for entry in TrainingSection.model_fields["workers"].metadata if hasattr(entry, "le"))
    batch = (MOST_SAMPLES, MOST_STEP_TOKENS, MOST_MICROBATCHES)
    own = (MOST_LAYERS, MOST_TOKENS, MOST_DEVICES, MOST_NODES, *batch, workers, MOST_TRAINED, count)
    files = (MOST_DIGITS, DEEPEST, LARGEST_BYTES, LARGEST_TOML_BYTES, MOST_YAML_NODES, LONGEST_MESSAGE)
    assert tuple(told.values()) == (*own, *files)
    assert LARGEST_TOML_BYTES == recipe.LARGEST_BYTES


def test_the_golden_page_of_messages() -> None:
    """Written anew by `python -m tests.unit.test_bad_input`."""
    assert messages() == GOLDEN.read_text(encoding="utf-8")


if __name__ == "__main__":
    GOLDEN.write_text(messages(), encoding="utf-8")
