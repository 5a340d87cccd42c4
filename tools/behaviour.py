"""Writes docs/behaviour.md: what real packages do that parsim relies on or protects from, out of the headings of tests.

    python -m tools.behaviour           # writes the page; tests/unit/test_behaviour.py says if it is out of date

A row is a test whose docstring begins with a package and its release, as in "torch 2.13: MAX keeps ...", or a script of
findings/, by its line in findings/README.md.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "behaviour.md"
HEADING = re.compile(r"([A-Za-z-]+ \d+\.\d[\d.]*(?:, [A-Za-z-]+(?: \d+\.\d[\d.]*)?)*): (.*)")
TOOLS = ("numpy", "setuptools", "wheel")
"""Pinned by scripts beside what they are about."""
MOST_PLACES = 3


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Behaviour:
    """Attributes: package: what behaves so, with its release. text: one or two sentences. places: modules of parsim. test: that
    runs it, as a path from the root, with its name."""

    package: str
    text: str
    places: tuple[str, ...]
    test: str


def behaviours() -> list[Behaviour]:
    """Every row, by package."""
    return sorted([*_of_tests(), *_of_findings()], key=lambda row: (row.package.lower(), row.text))


def _of_tests() -> Iterator[Behaviour]:
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        imported = _imported(tree)
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        for name, node in functions.items():
            heading = HEADING.fullmatch(" ".join((ast.get_docstring(node) or "").split()))
            if heading is None or not name.startswith("test_"):
                continue
            first = heading[2].split()[0]
            yield Behaviour(
                package=heading[1],
                text=heading[2][0].upper() + heading[2][1:] if first.isalpha() and first.islower() else heading[2],
                places=tuple(sorted(_used(node, functions, imported)))[:MOST_PLACES],
                test=f"{file.relative_to(ROOT)}::{name}",
            )


def _imported(tree: ast.Module) -> dict[str, str]:
    """Names of a file that come from parsim, with their modules."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("parsim"):
            found |= {alias.asname or alias.name: str(node.module) for alias in node.names}
    return found


def _used(node: ast.FunctionDef, functions: dict[str, ast.FunctionDef], imported: dict[str, str]) -> set[str]:
    """Modules of parsim that a test uses, itself or by functions of its file."""
    seen, open_nodes, modules = set[str](), [node], set[str]()
    while open_nodes:
        current = open_nodes.pop()
        seen.add(current.name)
        names = {child.id for child in ast.walk(current) if isinstance(child, ast.Name)}
        names |= {child.arg for child in ast.walk(current) if isinstance(child, ast.arg)}
        modules |= {imported[name] for name in names & imported.keys() if imported[name] != "parsim.errors"}
        open_nodes += [functions[name] for name in names & functions.keys() if name not in seen]
    return modules


def _of_findings() -> Iterator[Behaviour]:
    readme = (ROOT / "findings" / "README.md").read_text(encoding="utf-8")
    for name, package, text in re.findall(r"^\| \[(\w+)\]\(\w+\.sh\) \| ([^:|]+): (.*) \|$", readme, re.MULTILINE):
        script = (ROOT / "findings" / f"{name}.sh").read_text(encoding="utf-8")
        every = dict(re.findall(r"([\w-]+)==(\d[\w.]*)", script))
        pinned = [every.get(package) or next(version for tool, version in every.items() if tool not in TOOLS)]
        looped = re.findall(r"for version in ([\d. ]+);", script)
        yield Behaviour(
            package=f"{package} {', '.join(looped[0].split()) if looped else pinned[0]}",
            text=text[0].upper() + text[1:],
            places=(),
            test=f"findings/{name}.sh",
        )


def page() -> str:
    """The text of docs/behaviour.md."""
    rows = behaviours()
    lines = [
        "# What real packages do",
        "",
        f"{len(rows)} behaviours that parsim relies on or protects from. Each row is run by the test or the script that it",
        "names. Tests of `tests/real/` run the real package in an environment of its own (`make real`). Scripts of `findings/`",
        "run it without parsim. All others run at every change; where one runs parsim alone, it holds what parsim does about",
        "the behaviour. The table is generated from their headings (`python -m tools.behaviour`). The third column names",
        "modules that take the behaviour into account.",
        "",
        "| package | behaviour | in parsim | run by |",
        "|---|---|---|---|",
    ]
    for row in rows:
        text = row.text.replace("|", "\\|").rstrip(".")
        places = ", ".join(f"`{place.removeprefix('parsim.')}`" for place in row.places)
        lines.append(f"| {row.package} | {text} | {places} | `{row.test}` |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
