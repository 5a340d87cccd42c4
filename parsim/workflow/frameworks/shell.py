"""The options that a shell script hands to a program: variables, arrays and continued lines are followed, nothing is run.

Branches are all read, in the order in which they stand; what a command would print (`$(hostname)`) stays unknown.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable

UNKNOWN = "?"
_ASSIGN = re.compile(r"^(?:export\s+|local\s+|declare\s+(?:-\S+\s+)?|readonly\s+)?([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def options_of(text: str) -> dict[str, list[str]]:
    """Every `--option` with the words that follow it; where it is given twice, the last counts.

    Args:
        text: of a script, or a plain list of options.
    """
    variables: dict[str, str] = {}
    words: list[str] = []
    for statement in statements(text):
        found = _ASSIGN.match(statement)
        if found is None:
            words += _words(expanded(statement, variables))
            continue
        name, adds, value = found[1], bool(found[2]), found[3].strip()
        if value.startswith("("):
            value = value[1:].rstrip().removesuffix(")")
            new = expanded(" ".join(line for line in value.splitlines()), variables)
        else:
            new = expanded(_unquoted(value), variables)
        variables[name] = f"{variables.get(name, '')} {new}".strip() if adds else new
    return _by_option(words)


def _by_option(words: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            current = [value] if equals else []
            found[name.replace("_", "-")] = current
        elif current is not None:
            current.append(word)
    return found


def statements(text: str) -> list[str]:
    """The lines of a script, continued lines, quotes and brackets joined, comments left out."""
    found: list[str] = []
    current, quote, depth, place = "", "", 0, 0
    text = re.sub(r"\\[ \t]*\n", " ", text)
    while place < len(text):
        letter = text[place]
        if quote:
            quote = "" if letter == quote and text[place - 1] != "\\" else quote
        elif letter in "\"'":
            quote = letter
        elif letter == "#" and (not current or current[-1].isspace() or current[-1] == "("):
            end = text.find("\n", place)
            place = len(text) if end < 0 else end
            continue
        elif letter in "({":
            depth += 1
        elif letter in ")}":
            depth = max(0, depth - 1)
        if letter in "\n;" and not quote and not depth:
            found.append(current.strip())
            current = ""
        else:
            current += letter
        place += 1
    found.append(current.strip())
    return [statement for statement in found if statement]


def expanded(text: str, variables: dict[str, str]) -> str:
    """A text with its variables and arithmetic replaced; what is not known becomes `?`."""
    for _ in range(8):
        before = text
        text = re.sub(r"\$\{(\w+)(?:\[[@*]\])?(?::?[-=]([^{}]*))?\}", lambda m: _value(m[1], m[2], variables), text)
        text = re.sub(r"\$\(\(([^()$]*(?:\([^()$]*\)[^()$]*)*)\)\)", lambda m: _arithmetic(m[1], variables), text)
        text = re.sub(r"\$([A-Za-z_]\w*)", lambda m: _value(m[1], None, variables), text)
        if text == before:
            break
    return re.sub(r"\$\([^()]*\)|`[^`]*`|\$\{[^{}]*\}|\$[\d@*#]", UNKNOWN, text)


def _value(name: str, default: str | None, variables: dict[str, str]) -> str:
    value = variables.get(name)
    if value is None or (value in ("", UNKNOWN) and default is not None):
        return UNKNOWN if default is None else default.strip("\"'")
    return value


def _arithmetic(text: str, variables: dict[str, str]) -> str:
    named = re.sub(r"[A-Za-z_]\w*", lambda m: variables.get(m[0], UNKNOWN), text)
    try:
        return str(_number(ast.parse(named.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return UNKNOWN


def _number(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_number(inner)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_number(left), _number(right))
    raise ValueError("no whole number")


def _unquoted(value: str) -> str:
    if len(value) > 1 and value[0] in "\"'" and value[-1] == value[0]:
        return value[1:-1].replace("\n", " ")
    return value


def _words(statement: str) -> list[str]:
    try:
        return [part for word in shlex.split(statement) for part in (word.split() if "--" in word else [word])]
    except ValueError:  # an open quote: the words as they stand
        return statement.split()
