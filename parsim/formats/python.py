"""Scripts in Python, parsed and never run: what is assigned to names, and what calls are given as literals."""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Mapping
from typing import Any

from parsim.errors import ConfigError
from parsim.formats.source import SourceFile
from parsim.units import printable

LARGEST = 10**15
Operators = Mapping[type[ast.operator], Callable[[Any, Any], Any]]
OPERATORS: Operators = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


class Script(ast.NodeVisitor):
    """A script, walked in the order of the file.

    Attributes: constants: literals by the name that they were last given to. calls: the path of each called name
        ("llm.pretrain"), with its literal arguments by keyword and by place, and the keywords whose value the script computes.
    """

    def __init__(self) -> None:
        self.constants: dict[str, Any] = {}
        self.calls: list[tuple[str, dict[str | int, Any], set[str]]] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        plain = [*node.args.posonlyargs, *node.args.args]
        pairs = [*zip(plain[len(plain) - len(node.args.defaults) :], node.args.defaults, strict=True)]
        pairs += [(name, value) for name, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if value]
        for argument, value in pairs:
            self.constants.setdefault(argument.arg, self.value(value))
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.constants[target.id] = self.value(node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        given: dict[str | int, Any] = {}
        computed: set[str] = set()
        for place, argument in enumerate(node.args):
            given[place] = self.value(argument)
        for keyword in node.keywords:
            if keyword.arg is None:
                continue
            value = self.value(keyword.value)
            if value is None and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is None):
                computed.add(keyword.arg)
            else:
                given[keyword.arg] = value
        self.calls.append((path_of(node.func), given, computed))
        self.generic_visit(node)

    def value(self, node: ast.expr) -> Any:
        """A literal, its arithmetic, a name that one was given to, or the last word of `torch.bfloat16`; None: another one."""
        match node:
            case ast.Name():
                return self.constants.get(node.id)
            case ast.Attribute() if path_of(node).startswith("torch."):
                return node.attr
            case ast.BinOp():
                return arithmetic(node, OPERATORS, self.value)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, MemoryError, RecursionError):
            return None


def arithmetic(node: ast.expr, operators: Operators, value_of: Callable[[ast.expr], Any]) -> Any:
    """The value of an expression of these operators. None: a part is no number, is beyond LARGEST, or divides by 0.

    Args: value_of: values of what has no operator of these.
    """
    if not isinstance(node, ast.BinOp):
        return value_of(node)
    parts = [arithmetic(part, operators, value_of) for part in (node.left, node.right)]
    if type(node.op) not in operators or not all(isinstance(part, int | float) and abs(part) <= LARGEST for part in parts):
        return None
    try:
        return operators[type(node.op)](*parts)
    except ZeroDivisionError:
        return None


def path_of(node: ast.expr) -> str:
    """ "a.b.c" of an attribute; "" for another expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([*([node.id] if isinstance(node, ast.Name) else []), *reversed(parts)])


def code_of(source: SourceFile) -> str:
    """The text of a script; of a notebook the lines of its cells of code that are Python.

    Raises: ConfigError: a notebook that is none.
    """
    if source.path.suffix != ".ipynb":
        return source.text
    try:
        cells = json.loads(source.text)["cells"]
        texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError("it is no Jupyter notebook: a list of cells is missing, or it was cut off") from error
    lines = [line for text in texts if not text.lstrip().startswith("%%") for line in text.splitlines()]
    return "\n".join(line for line in lines if not line.lstrip().startswith(("!", "%")))


def walk(source: SourceFile, script: Script) -> Script:
    """Let `script` visit a file. Raises ConfigError: it is no Python."""
    try:
        script.visit(ast.parse(code_of(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"it is no Python that can be read: {printable(str(error))[:200]}") from error
    return script
