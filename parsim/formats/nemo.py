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
from parsim.formats.recipe import Recipe
from parsim.formats.source import FileFormat, SourceFile
from parsim.units import printable

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


class _Reader(ast.NodeVisitor):
    """Collects the recipe, the arguments of its call, and what is assigned to its parts, in the order of the file."""

    def __init__(self) -> None:
        self.constants: dict[str, Any] = {}
        self.name = ""
        self.keys: dict[str, Any] = {}
        self.unknown: list[str] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        plain = [*node.args.posonlyargs, *node.args.args]
        pairs = [*zip(plain[len(plain) - len(node.args.defaults) :], node.args.defaults, strict=True)]
        pairs += [(name, value) for name, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if value]
        for argument, value in pairs:
            self.constants.setdefault(argument.arg, self._value(value))
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            path = _path(target)
            if isinstance(target, ast.Name):
                self.constants[target.id] = self._value(node.value)
            elif "." in path:
                self._note(path.partition(".")[2], node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        path = _path(node.func)
        if (form := RECIPE.fullmatch(path)) is not None:
            self.name = form[1] or form[2]
            for keyword in node.keywords:
                if keyword.arg is not None:
                    self._note(keyword.arg, keyword.value)
        self.generic_visit(node)

    def _note(self, path: str, node: ast.expr) -> None:
        head, _, last = path.rpartition(".")
        last = RENAMED.get(last, last)
        value = self._value(node)
        if value is None and not (isinstance(node, ast.Constant) and node.value is None):
            self.unknown.append(last)
        elif isinstance(value, bool | int | float | str):
            self.keys = {key: old for key, old in self.keys.items() if key.rpartition(".")[2] != last}
            self.keys[f"{head}.{last}" if head else last] = value

    def _value(self, node: ast.expr) -> Any:
        """A literal, or a name that a literal was given to; None: another expression."""
        if isinstance(node, ast.Name):
            return self.constants.get(node.id)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, MemoryError, RecursionError):
            return None


def _path(node: ast.expr) -> str:
    """ "a.b.c" of an attribute; "" for another expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([*([node.id] if isinstance(node, ast.Name) else []), *reversed(parts)])


def read_nemo(source: SourceFile) -> Recipe:
    """A script that takes a recipe. Raises ConfigError: it is no Python, or takes none."""
    try:
        tree = ast.parse(source.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"it is no Python that can be read: {printable(str(error))[:200]}") from error
    reader = _Reader()
    reader.visit(tree)
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
