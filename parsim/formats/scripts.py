"""Scripts of shells and of Python, read and never run.

Of a shell script variables, arrays, continued lines and branches are followed, in an environment that is empty. What a command
would print (`$(hostname)`) stays unknown; of branches that hang on it all are read, and a variable to which they give several
values is unknown. Of Python what is assigned to names, and what calls are given as literals, are read.
"""

from __future__ import annotations

import ast
import json
import operator
import re
import shlex
from collections.abc import Callable, Container, Mapping
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Any

from parsim.errors import ConfigError
from parsim.formats.recipe import FileKeys, Recipe, plain_value
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


# Shells.


UNKNOWN = "?"
MOST_LETTERS = 100_000
"""Longest variable, and longest line with its variables replaced."""
_ASSIGN = re.compile(r"^(?:export\s+|local\s+|declare\s+(?:-\S+\s+)?|readonly\s+)?([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
_DEFAULT = re.compile(r""": +["']?\$\{(\w+):?=([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}["']?""")
"""`: "${TP:=4}"`, which gives a variable a value where it has none."""
_SLURM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
}
"""Variables that Slurm sets by the options of a job."""
_SLURM_OTHERS = {"N": "nodes", "n": "ntasks", "gres": "gpus-per-node"}
_DIRECTIVE = re.compile(r"^#SBATCH\s+--?([\w-]+)[= \t]*(?:gpu:)?(?:[A-Za-z][\w.-]*:)?(\d+)\b", re.MULTILINE)
_SHELL_OPERATORS: Operators = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def words_of(text: str) -> list[str]:
    """The words of all statements of a script, or of a plain list of options, with their variables.

    Raises: ConfigError: a variable that grows beyond all bounds.
    """
    variables = _of_slurm(text)
    words: list[str] = []
    branches = _Branches()
    for line in _statements(text):
        if not (statement := branches.step(line, variables)):
            continue
        if default := _DEFAULT.fullmatch(statement):
            statement = f"{default[1]}=${{{default[1]}:-{default[2]}}}"
        for _ in range(MOST_NESTED):
            if (assignment := _ASSIGN.match(statement)) is None or (end := _word_end(assignment[3])) == len(assignment[3]):
                break
            variables[assignment[1]] = expanded(assignment[3][:end], variables).strip("\"'")
            statement = assignment[3][end:].lstrip("&|; \t\n")  # a command behind its environment, or another assignment
        if assignment is None:
            words += _words(expanded(statement, variables))
            continue
        name, adds, value = assignment[1], bool(assignment[2]), assignment[3].strip()
        if value.startswith("("):
            value = " ".join(value[1:].rstrip().removesuffix(")").splitlines())
        elif len(value) > 1 and value[0] in "\"'" and value[-1] == value[0]:
            value = value[1:-1].replace("\n", " ")
        new = expanded(value, variables)
        new = f"{variables.get(name, '')} {new}".strip() if adds else new
        if branches.live is None and not adds:  # several values, by what the file does not say: none is known
            new = new if variables.get(name, new) == new else UNKNOWN
        if len(new) > MOST_LETTERS:
            raise ConfigError(
                f"the variable {name} of the script has more than {MOST_LETTERS:,} letters; write its options out"
            )
        variables[name] = new
    if not any(word.startswith("--") for word in words):  # it gives options to a script that sources it
        words += [word for value in variables.values() if "--" in value for word in _words(value)]
    return words


def _of_slurm(text: str) -> dict[str, str]:
    """What Slurm sets by the directives of a script."""
    given = {_SLURM_OTHERS.get(name, name): count for name, count in _DIRECTIVE.findall(text)}
    variables = {variable: given[name] for name, row in _SLURM.items() if name in given for variable in row}
    if "nodes" in given and "ntasks-per-node" in given:
        variables.setdefault("SLURM_NTASKS", str(int(given["nodes"]) * int(given["ntasks-per-node"])))
    return variables


def _word_end(text: str) -> int:
    """Where the first word of a shell's text ends: at a blank outside of quotes and brackets."""
    quote, depth = "", 0
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'`":
            quote = letter
        elif letter in "({":
            depth += 1
        elif letter in ")}":
            depth -= 1
        elif letter.isspace() and depth <= 0:
            return place
    return len(text)


def options_of(text: str, short: Container[str] = ()) -> dict[str, list[str]]:
    """Every `--option` of a script with the words that follow it; where it is given twice, the last counts.

    short: letters of options with one dash.

    Raises: ConfigError: as `words_of`.
    """
    options: dict[str, list[str]] = {}
    current: list[str] = []
    for word in words_of(text):
        if word[:1] == "-" and word[1:] in short:
            current = options[word[1:]] = []
        elif re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            current = options[name.replace("_", "-")] = [value] if equals else []
        else:
            current.append(word)
    return options


LISTS = ("target_modules", "lora_target")
"""How options end behind which each word counts."""
_WORD = re.compile(r"[\w.,\[\]'\"-]+")


def option_values(text: str, names: Mapping[str, str] | None = None, hanging: Container[str] = ()) -> dict[str, Any]:
    """Options of a script by name, with underscores: the first word behind each as a table would hold it, True without one;
    all words of `LISTS`.

    Args: names: what options are called here whose own names are others, one-letter ones too (`-b`). hanging: names of options
        that stay, as text with UNKNOWN, where the script computes their value; others are left out.
    Raises: ConfigError: as `words_of`.
    """
    names = names or {}
    options = options_of(text, short=frozenset(name for name in names if len(name) == 1))
    given = {key.replace("-", "_"): words[0] if words else "" for key, words in options.items()}
    lists = {key.replace("-", "_"): takewhile(_WORD.fullmatch, words) for key, words in options.items()}
    given |= {key: " ".join(words) for key, words in lists.items() if key.endswith(LISTS)}
    named = {names.get(key, key): word for key, word in given.items()}
    return {key: plain_value(word) if word else True for key, word in named.items() if UNKNOWN not in word or key in hanging}


def note_hanging(keys: FileKeys, recipe: Recipe, hanging: Mapping[str, str]) -> None:
    """Name in `missing` each option whose value the script computes, by the key of `hanging` that supplies it."""
    for key in keys.values.keys() & hanging.keys():
        if UNKNOWN in str(keys.values[key]):
            del keys.values[key]
            recipe.missing[hanging[key]] = f"{key} hangs on what the script computes"


_OVERRIDE = re.compile(r"(?:\+\+|[+~])?([A-Za-z_][\w.]*)=(.*)", re.DOTALL)


def overrides_of(text: str) -> dict[str, Any]:
    """Every `key=value` among the words of a script, as Hydra and OmegaConf take them. Raises ConfigError as `words_of`."""
    found = (_OVERRIDE.fullmatch(word) for word in words_of(text))
    return {match[1]: plain_value(match[2]) for match in found if match is not None and UNKNOWN not in match[2]}


MOST_NESTED = 50
LONGEST_TEST = 2_000
"""Letters of a line that can begin or end a branch."""


class _Branches:
    """Which of the branches around a statement runs, where nothing runs: yes, no, or None for what the file does not decide."""

    def __init__(self) -> None:
        self.lives: list[bool | None] = []
        self.decided: list[bool | None] = []
        """Whether an earlier branch of the same `if` ran."""
        self.subjects: list[str | None] = []
        """Of a `case`; None for an `if`."""

    @property
    def live(self) -> bool | None:
        return False if False in self.lives else None if None in self.lives else True

    def step(self, line: str, variables: dict[str, str]) -> str:
        """What of a line is a statement that may run; "": nothing."""
        if len(line) > LONGEST_TEST:  # options, and no test
            return "" if self.live is False else line
        if form := re.match(r"(el)?if\b\s*(.*)$", line, re.DOTALL):
            if not form[1]:
                self._open(None)
            self._branch(_condition(form[2], variables))
            return ""
        if form := re.match(r"case\s+(.*?)\s+in\b\s*(.*)$", line, re.DOTALL):
            self._open(_word(form[1], variables))
            self.lives[-1] = False
            return self.step(form[2], variables) if form[2] else ""
        if form := re.match(r"(?:then|else|do)\b\s*(.*)$", line, re.DOTALL):
            if line.startswith("else"):
                self._branch(True)
            return self.step(form[1], variables) if form[1] else ""
        if form := re.match(r"(?:while|until|for|select)\b\s*(.*)$", line, re.DOTALL):
            self._open(None)
            self._branch(_OVER_ARGUMENTS.search(form[1]) is None)  # there are none
            return ""
        if re.match(r"(fi|esac|done)\b", line):
            if self.lives:
                for stack in (self.lives, self.decided, self.subjects):
                    stack.pop()
            return ""
        if self.subjects and (subject := self.subjects[-1]) is not None and (form := _PATTERN.match(line)):
            texts = [_word(text, variables) for text in form[1].split("|")]
            known = UNKNOWN not in subject
            self._branch(any(fnmatchcase(subject, text.strip()) for text in texts) if known else None)
            line = form[2]
        return "" if self.live is False else line

    def _open(self, subject: str | None) -> None:
        if len(self.lives) >= MOST_NESTED:
            raise ConfigError(f"branches of the script are nested deeper than {MOST_NESTED}; write its options out")
        self.lives.append(False)
        self.decided.append(False)
        self.subjects.append(subject)

    def _branch(self, condition: bool | None) -> None:
        """The next branch: it runs if its condition holds and no earlier one did."""
        if not self.lives:
            return
        before = self.decided[-1]
        self.lives[-1] = False if before or condition is False else True if before is False and condition else None
        self.decided[-1] = True if before or (before is False and condition) else None if condition is not False else before


_OVER_ARGUMENTS = re.compile(r"\$#|\$\{#\}|\bgetopts\b|\$[1@*]|\$\{[1@*]|^\w+$")
"""Of a loop over the arguments of the script."""
_PATTERN = re.compile(r"^\(?([^()\s][^()]*)\)\s*(.*)$", re.DOTALL)


def _word(text: str, variables: dict[str, str]) -> str:
    """A word with its variables; one that nobody set is empty, as in an empty environment."""
    text = re.sub(
        r"\$\{(\w+)\}|\$([A-Za-z_]\w*)",
        lambda m: variables.get(m[1] or m[2], "") if not (m[1] or m[2]).isdigit() else UNKNOWN,
        text,
    )
    return expanded(text, variables).strip().replace('"', "").replace("'", "")


def _condition(text: str, variables: dict[str, str]) -> bool | None:
    text = re.sub(r"\bthen\b.*$", "", text, flags=re.DOTALL).strip()
    for word, rule in (("||", any), ("&&", all)):
        if word in text:
            parts = [_condition(part, variables) for part in text.split(word)]
            known = rule(part for part in parts if part is not None)
            return None if None in parts and known is (rule is all) else known
    form = re.fullmatch(r"(?:\[\[?|test\b)\s*(.*?)\s*(?:\]\]?)?", text, re.DOTALL)
    if form is None:
        return None
    body = form[1]
    if body.startswith("! "):
        inner = _condition(f"[ {body[2:]} ]", variables)
        return None if inner is None else not inner
    if unary := re.fullmatch(r"-([zn])\s+(.*)", body, re.DOTALL):
        word = _word(unary[2], variables)
        return None if UNKNOWN in word else (not word) == (unary[1] == "z")
    if binary := re.fullmatch(r"(.*?)\s*(==|!=|=|-eq|-ne|-gt|-ge|-lt|-le)\s*(.*)", body, re.DOTALL):
        left, right = (_word(binary[place], variables) for place in (1, 3))
        if UNKNOWN in left + right:
            return None
        if binary[2] in ("=", "==", "!="):
            return fnmatchcase(left, right) == (binary[2] != "!=")
        if re.fullmatch(r"-?\d+", left) and re.fullmatch(r"-?\d+", right):
            return _NUMBER_TESTS[binary[2]](int(left), int(right))
    return None


_NUMBER_TESTS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}


def _statements(text: str) -> list[str]:
    """The lines of a script, continued lines, quotes and brackets joined, comments left out."""
    lines: list[str] = []
    current: list[str] = []
    quote, depth, place = "", 0, 0
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
            lines.append("".join(current).strip())
            current = []
        else:
            current.append(letter)
        place += 1
    lines.append("".join(current).strip())
    return [line for line in lines if line]


def expanded(text: str, variables: dict[str, str]) -> str:
    """A text with its variables and arithmetic replaced; what is not known becomes `?`."""
    for _ in range(8):
        before = text
        text = re.sub(r"\$\{(\w+)(?:\[[@*]\])?(?::?[-=]([^{}]*))?\}", lambda m: _value(m[1], m[2], variables), text)
        text = re.sub(r"\$\(\s*expr ([^()$]*)\)", lambda m: _computed(m[1].replace("\\*", "*"), variables), text)
        text = re.sub(r"\$\(\(([^()$]*(?:\([^()$]*\)[^()$]*)*)\)\)", lambda m: _computed(m[1], variables), text)
        text = re.sub(r"\$([A-Za-z_]\w*)", lambda m: _value(m[1], None, variables), text)
        if text == before or len(text) > MOST_LETTERS:
            break
    if len(text) > MOST_LETTERS:
        raise ConfigError(
            f"a line of the script has more than {MOST_LETTERS:,} letters with its variables; write its options out"
        )
    return re.sub(r"\$\([^()]*\)|`[^`]*`|\$\{[^{}]*\}|\$[\d@*#]", UNKNOWN, text)


def _value(name: str, default: str | None, variables: dict[str, str]) -> str:
    value = variables.get(name)
    if value is None or (value in ("", UNKNOWN) and default is not None):
        return UNKNOWN if default is None else default.strip("\"'")
    return value


def _computed(text: str, variables: dict[str, str]) -> str:
    with_values = re.sub(r"[A-Za-z_]\w*", lambda m: variables.get(m[0], UNKNOWN), text)
    try:
        value = _whole(ast.parse(with_values.strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        return UNKNOWN
    return UNKNOWN if value is None else str(value)


def _whole(node: ast.expr) -> int | None:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            positive = _whole(inner)
            return None if positive is None else -positive
        case ast.BinOp():
            whole: int | None = arithmetic(node, _SHELL_OPERATORS, _whole)
            return whole
    return None


def _words(statement: str) -> list[str]:
    try:
        return [part for word in shlex.split(statement) for part in (word.split() if "--" in word else [word])]
    except ValueError:  # an open quote: the words as they stand
        return statement.split()
