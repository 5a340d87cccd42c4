"""What is wrong with a key of a run file, in words: the rule, the value, the fix."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, get_args, get_origin

from pydantic_core import ErrorDetails

from parsim.errors import near_matches
from parsim.workflow.cluster_section import ConfigSection

_RULES = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be text in quotes",
    "bool_type": "must be true or false",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "dict_type": "must be a table",
    "tuple_type": "must be a list",
    "finite_number": "must be finite",
    "string_too_short": "must not be empty",
}


def explained(problem: ErrorDetails, sections: type[ConfigSection]) -> str:
    """One wrong key: its path, its value, the rule and the fix.

    Args:
        problem: as pydantic reports it. sections: the model of the whole file.
    """
    location = key_parts(problem)
    path = ".".join(location)
    table_key = ".".join(location[:2])
    kind, value, context = problem["type"], problem["input"], problem.get("ctx", {})
    if kind == "described":
        return f"{path}: {context['rule']}"
    if kind == "extra_forbidden":
        known = _section_at(sections, location[:-1]).model_fields
        if location[-1] in NOT_BUILT:
            return f"unknown key {path} (= {_short(value)}): {NOT_BUILT[location[-1]]}"
        return f"unknown key {path} (= {_short(value)}){near_matches(location[-1], known)}"
    if kind == "missing":
        example = EXAMPLES.get(path, "")
        place = f"under [{'.'.join(location[:-1])}]" if len(location) > 1 else "to the file"
        return f"{path} is missing; add {example or path} {place}"
    if kind == "literal_error" and table_key not in _UNION_RULES:
        allowed = _choices(sections, location)
        near = near_matches(value, allowed) if isinstance(value, str) else ""
        listing = "" if near.startswith("; known") else f" (known: {', '.join(allowed)})"
        return f"{path} = {_short(value)} is unknown{near}{listing}"
    if kind == "unknown_row":
        rule = str(context["rule"])
        return f"{path} = {_short(value)}{' ' if rule.startswith('is unknown') else ': '}{rule}"
    if table_key in _UNION_RULES:
        rule = _UNION_RULES[table_key]
    elif kind in _BOUNDS:
        sign, bound = _BOUNDS[kind]
        rule = f"must be {sign} {context[bound]}"
    else:
        rule = _RULES.get(kind, problem["msg"])
    example = EXAMPLES.get(table_key, "")
    return f"{path} = {_short(value)}: {rule}" + (f"; for example {example}" if example else "")


_GROUPS = (
    "HSDP is plan.zero_stage = 1, 2 or 3 with plan.dp_shard, over how many of the mesh.dp replicas states are divided; "
    "they are kept dp / dp_shard times"
)
_OFFLOAD = "say what lies in the host's memory: plan.optimizer_offload = true, or plan.activation_offload = true or a list"
RUN_OPTIONS = ("adaptive", "checkpoint_every", "elastic", "max_restarts", "nproc", "resume", "timeout")
"""Options of `parsim run`, which no run file holds."""

NOT_BUILT = {
    **{name: f"give --{name.replace('_', '-')} to `parsim run`" for name in RUN_OPTIONS},
    **dict.fromkeys(("dp_shard", "dp_replicate", "hsdp"), _GROUPS),
    **dict.fromkeys(("offload", "cpu_offload", "enable_cpu_offload", "offload_optimizer", "cpu_offloading"), _OFFLOAD),
    "offload_param": "offload of parameters is not supported: they stay on the device; plan.optimizer_offload moves the state",
}
"""Keys of other libraries that no plan has, or not there, and what comes nearest."""

_BOUNDS = {
    "greater_than_equal": (">=", "ge"),
    "greater_than": (">", "gt"),
    "less_than_equal": ("<=", "le"),
    "less_than": ("<", "lt"),
}

_UNION_RULES = {
    "cluster.devices": "must be a number of devices >= 1 or a list of device numbers",
    "plan.activation_offload": "must be true, false or a list of component names",
    "plan.zero_stage": 'must be 0, 1, 2, 3 or "auto"',
    "model.args": "must hold text, finite numbers, true or false",
}

EXAMPLES = {
    "model": "the table [model] with name",
    "cluster": "the table [cluster] with profile or gpu",
    "training": "the table [training] with global_batch",
    "model.name": 'name = "resnet50"',
    "model.args": "args = { num_classes = 100 }",
    "model.input_shape": "input_shape = [3, 224, 224]",
    "model.inputs": 'inputs = { x = { shape = [3, 32, 32] }, t = { shape = [], dtype = "int64", high = 1000 } }',
    "model.output": 'output = "logits"',
    "model.classes_dim": "classes_dim = 0",
    "model.control_flow": 'control_flow = "example"',
    "model.target": 'target = { shape = [32, 32], dtype = "int64", high = 5 }',
    "cluster.profile": 'profile = "dgx1-v100-32gb"',
    "cluster.gpu": 'gpu = "h100-sxm"',
    "cluster.group": '[[cluster.group]] with gpu = "h100-sxm" and nodes = 2',
    "cluster.gpus_per_node": "gpus_per_node = 8",
    "cluster.link": 'link = "nvswitch-4"',
    "cluster.cards_per_node": "cards_per_node = 8",
    "cluster.devices": "devices = 8 or devices = [0, 1, 2, 3]",
    "cluster.nodes": "nodes = 2",
    "cluster.network": 'network = "infiniband-100g"',
    "training.global_batch": "global_batch = 256",
    "training.learning_rate": "learning_rate = 0.05",
    "training.epochs": "epochs = 10",
    "training.steps": "steps = 100",
    "training.master_weights": "master_weights = true",
    "training.seed": "seed = 0",
    "plan.strategy": 'strategy = "adaptive"',
    "plan.mesh": "mesh = { pp = 2, dp = 2, tp = 1 }",
    "plan.dp_shard": "dp_shard = 8",
    "plan.microbatches": "microbatches = 8",
    "plan.pipeline_order": 'pipeline_order = "1f1b"',
    "plan.chunks": "chunks = 2",
    "plan.bucket_bytes": "bucket_bytes = 26214400",
    "plan.context_exchange": 'context_exchange = "all_gather"',
    "plan.capacity_factor": "capacity_factor = 1.25",
    "plan.fit_probability": "fit_probability = 0.95",
    "plan.zero_stage": 'zero_stage = "auto" or zero_stage = 1',
    "plan.activation_offload": 'activation_offload = true or activation_offload = ["h.*"]',
    "plan.placements": 'placements = { "layers.*" = "shard:heads+row/2", "*" = "batch" }',
    "plan.pin": 'pin = { "head" = "place:0" }',
    "plan.forbid": 'forbid = { "layers.*" = ["replicate", "shard"] }',
}


def key_parts(problem: ErrorDetails) -> list[str]:
    """`[cluster, devices, 1]`, without the names of union members that pydantic puts between."""
    tag = re.compile(r"(constrained-)?(int|float|str|bool)|(tuple|literal)\[.*")
    return [str(part) for part in problem["loc"] if not (isinstance(part, str) and tag.fullmatch(part))]


def _section_at(sections: type[ConfigSection], location: Sequence[str]) -> type[ConfigSection]:
    """The table a path leads to. A field may be a list or a dict of tables (`training.groups.NAME`)."""
    found, is_name = sections, False
    for key in location:
        if is_name or key.isdigit():  # the place in a list of tables (`cluster.group`)
            is_name = False
            continue
        annotation = found.model_fields[key].annotation
        (found,) = _tables_in(annotation)
        is_name = get_origin(annotation) is dict
    return found


def _tables_in(annotation: object) -> list[type[ConfigSection]]:
    """The tables that a field may hold: itself, or the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, ConfigSection):
        return [annotation]
    return [table for member in get_args(annotation) for table in _tables_in(member)]


def _choices(sections: type[ConfigSection], location: Sequence[str]) -> tuple[str, ...]:
    annotation = _section_at(sections, location[:-1]).model_fields[location[-1]].annotation
    literal = next((part for part in get_args(annotation) if get_origin(part) is Literal), annotation)
    return get_args(literal)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
