"""NeMo 2 and Megatron-Bridge: scripts in Python that take a recipe by name and change it. They are read and not run.

What the recipe itself sets is in its package: what the script does not set is named as missing. Names are those of
nemo.collections.llm and of megatron.bridge.recipes.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from parsim.errors import ConfigError
from parsim.formats.megatron import BRIDGE, read_yaml
from parsim.formats.python import Script, path_of, walk
from parsim.formats.recipe import Recipe
from parsim.formats.source import FileFormat, SourceFile

NEMO2 = "NeMo 2"
MARK = re.compile(r"\b\w+\.(pretrain|finetune)_recipe\(|\b\w+_(pretrain|finetune|sft)_config\(")
"""Of a script that takes a recipe of NeMo 2, or of Megatron-Bridge."""
RECIPE = re.compile(r"(?:.*\.)?(\w+)\.(?:pretrain|finetune)_recipe|(?:.*\.)?(\w+)_(?:pretrain|finetune|sft)_config")
RENAMED = {"num_gpus_per_node": "devices", "sequence_length": "seq_length", "max_length": "seq_length"}
NEEDED = (
    ("tensor_model_parallel_size", "plan.mesh.tp"),
    ("pipeline_model_parallel_size", "plan.mesh.pp"),
    ("context_parallel_size", "plan.mesh.cp"),
    ("global_batch_size", "training.global_batch"),
    ("seq_length", "model.args.seq"),
)
"""What a recipe sets, and the key that supplies it."""


class _Reader(Script):
    """Collects the recipe, the arguments of its call, and what is assigned to its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.name = ""
        self.keys: dict[str, Any] = {}
        self.unknown: list[str] = []

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            path = path_of(target)
            if not isinstance(target, ast.Name) and "." in path:
                self._note(path.partition(".")[2], node.value)
        super().visit_Assign(node)

    def visit_Call(self, node: ast.Call) -> None:
        if (form := RECIPE.fullmatch(path_of(node.func))) is not None:
            self.name = form[1] or form[2]
            for keyword in node.keywords:
                if keyword.arg is not None:
                    self._note(keyword.arg, keyword.value)
        super().visit_Call(node)

    def _note(self, path: str, node: ast.expr) -> None:
        head, _, last = path.rpartition(".")
        last = RENAMED.get(last, last)
        value = self.value(node)
        if value is None and not (isinstance(node, ast.Constant) and node.value is None):
            self.unknown.append(last)
        elif isinstance(value, bool | int | float | str):
            self.keys = {key: old for key, old in self.keys.items() if key.rpartition(".")[2] != last}
            self.keys[f"{head}.{last}" if head else last] = value


def read_nemo(source: SourceFile) -> Recipe:
    """A script that takes a recipe. Raises ConfigError: it is no Python, or takes none."""
    reader = _Reader()
    walk(source, reader)
    if not reader.name:
        raise ConfigError("it takes no recipe such as llm.llama3_8b.pretrain_recipe(...) or llama3_8b_pretrain_config(...)")
    bridge = bool(re.search(r"\bmegatron\.bridge\b", source.text))
    framework = BRIDGE if bridge else NEMO2
    name = re.sub(r"^(llama|qwen|phi)(\d)(\d)(?=_)", r"\1\2.\3", re.sub(r"_performance.*|_\d+k$", "", reader.name))
    recipe = read_yaml({**reader.keys, **({"dist": {}} if bridge else {"trainer.accelerator": "gpu"})}, name.replace("_", "-"))
    recipe.framework = framework
    set_keys = {key.rpartition(".")[2] for key in reader.keys}
    for own, key in NEEDED:
        if own not in set_keys:
            where = "what the script computes" if own in reader.unknown else f"the recipe {reader.name} of {framework}"
            recipe.missing[key] = f"{own} hangs on {where}, which is Python and not run"
    if "use_distributed_optimizer" not in set_keys:  # all recipes of both have it
        recipe.zero = 1
    if "micro_batch_size" not in set_keys:
        recipe.left_out["micro_batch_size"] = f"it is in the recipe {reader.name}: one sample is taken"
    return recipe


FORMATS = {
    "nemo": FileFormat(
        layouts="recipes of NeMo 2 and of Megatron-Bridge, by the name of the recipe and what the script sets",
        refuses="what the recipe sets and the script does not, until --set",
        what="a script in Python that takes a recipe of NeMo 2 or Megatron-Bridge",
        tool=NEMO2,
        reads="recipe",
        sniff=lambda source: source.path.suffix == ".py" and bool(MARK.search(source.text)),
        read=read_nemo,
    )
}
