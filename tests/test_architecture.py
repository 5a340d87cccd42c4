"""The shape of the house: what may import what, and what must not stand in a file."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "parsim").rglob("*.py")) + sorted((ROOT / "calibration").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# From the ground up; a module imports from its own layer and the ones before it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("units", "errors", "files", "typed", "registry", "arrays", "garbage", "remembered", "jit"),
    ("collectives",),
    ("work", "timeline"),
    ("model",),
    ("hardware",),
    ("costs",),
    ("algorithms",),
    ("plans",),
    ("graph",),
    ("engines",),
    ("analyze",),
    ("predict",),
    ("schedule",),
    ("data",),
    ("execute",),
    ("virtual",),
    ("report",),
    ("formats",),
    ("workflow",),
    ("commands",),
    ("cli", "__main__"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
HEAVY = ("torch", "cvxpy", "plotly", "simpy", "numba", "pandas", "transformers", "sklearn")
TORCH_FREE = (
    "parsim.app.config",
    "parsim.cli",
    "parsim.model.model",
    "parsim.model.spec",
    "parsim.model.load",
    "parsim.hardware.cluster",
    "parsim.plans.plan",
    "parsim.program.taskgraph",
    "parsim.search.search",
    "parsim.predict.evaluate",
    "parsim.app.functions",
    "parsim.app.ask",
    "parsim.app.train",
)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything of parsim or calibration that a file imports, at any depth of nesting."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: write the full name instead of a relative import"
            module = node.module or ""
            yield node.lineno, module
            if module in ("parsim", "calibration"):
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def layer_of(path: Path) -> str:
    parts = path.relative_to(ROOT / "parsim").parts
    return parts[0].removesuffix(".py")


def test_imports_point_only_up_the_list() -> None:
    wrong: list[str] = []
    for path in SOURCES:
        inside = path.is_relative_to(ROOT / "parsim")
        own = layer_of(path) if inside else ""
        if inside and own != "__init__" and own not in LEVEL:
            wrong.append(f"{relative(path)} belongs to no layer; add it to LAYERS where its imports allow")
            continue
        for line, module in imported_modules(path):
            package, _, rest = module.partition(".")
            if inside and package == "calibration" and own not in ("workflow", "commands"):
                wrong.append(f"{relative(path)}:{line}: calibration imports parsim, never the reverse")
            if own == "__init__":  # the public names, resolved when used
                continue
            if inside and package == "parsim" and rest and rest != "__version__" and LEVEL[rest.split(".")[0]] > LEVEL[own]:
                wrong.append(f"{relative(path)}:{line} imports {module}, which lies further down the list")
    assert not wrong, "\n".join(wrong)


def test_calibration_is_imported_only_when_used() -> None:
    wrong = [
        f"{relative(path)}:{node.lineno}"
        for path in SOURCES
        if path.is_relative_to(ROOT / "parsim")
        for node in tree(path).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        if name.split(".")[0] == "calibration"
    ]
    assert not wrong, "\n".join(wrong)


def test_experiments_and_benchmarks_import_no_command() -> None:
    """What they share with the commands is in `parsim.workflow`."""
    folders = ("experiments", "benchmarks", "calibration", "examples")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert files
    wrong = [
        f"{relative(path)}:{line} imports {module}"
        for path in files
        for line, module in imported_modules(path)
        if module == "parsim.cli" or module.split(".")[:2] == ["parsim", "commands"]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_cycle_between_modules() -> None:
    """Imports at module level only: those inside functions run later."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES}
    edges: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in tree(path).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                targets = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                edges[name].update(target for target in targets if target in modules and target != name)
    TopologicalSorter(edges).prepare()  # raises CycleError with the modules of a cycle


def loaded_by(statement: str) -> set[str]:
    """Top-level packages in sys.modules of a fresh interpreter after `statement`."""
    code = f"{statement}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT, timeout=60)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_import_parsim_is_light() -> None:
    assert loaded_by("import parsim").isdisjoint(HEAVY)


def test_cli_starts_light() -> None:
    assert loaded_by("import parsim.cli").isdisjoint(HEAVY)


def test_planning_needs_no_torch() -> None:
    present = [name for name in TORCH_FREE if (ROOT / name.replace(".", "/")).with_suffix(".py").is_file()]
    assert loaded_by("import " + ", ".join(present)).isdisjoint({"torch", "transformers"})


def exported_names(module: ast.Module) -> list[str] | None:
    for node in module.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            names = ast.literal_eval(node.value)
            return list(names)
    return None


def place_in_all(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, each by name: the order that ruff keeps (RUF022)."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name)


def test_all_is_sorted_and_complete() -> None:
    wrong: list[str] = []
    for path in SOURCES:
        module = tree(path)
        exported = exported_names(module)
        if exported is None:
            continue
        if exported != sorted(exported, key=place_in_all):
            wrong.append(f"{relative(path)}: sort __all__ (ruff check --fix does)")
        own = {node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        if absent := set(exported) - own - bound_names(module):
            wrong.append(f"{relative(path)}: __all__ names what is not there: {sorted(absent)}")
        if forgotten := {name for name in own if not name.startswith("_")} - set(exported):
            wrong.append(f"{relative(path)}: __all__ leaves out {sorted(forgotten)}")
    assert not wrong, "\n".join(wrong)


def bound_names(module: ast.Module) -> set[str]:
    """Names that assignments and imports at module level make."""
    names: set[str] = set()
    conditional = (inner for node in module.body if isinstance(node, ast.If) for inner in node.body)
    for node in (*module.body, *conditional):
        match node:
            case ast.Assign():
                names.update(target.id for target in node.targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.ImportFrom() | ast.Import():
                names.update(alias.asname or alias.name for alias in node.names)
    return names


def named_types(path: Path) -> Iterator[str]:
    """Public classes and type aliases at module level: names in CapWords. Private ones (_Name) are of their own file alone."""
    for node in tree(path).body:
        match node:
            case ast.ClassDef(name=name):
                names = [name]
            case ast.Assign(targets=[ast.Name(id=name)]):
                names = [name]
            case _:
                names = []
        yield from (name for name in names if re.fullmatch(r"[A-Z]\w*[a-z]\w*", name))


def test_no_two_types_of_one_name() -> None:
    """A reader who searches for a class finds one. What several files need is imported, not defined again."""
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for name in named_types(path):
            places.setdefault(name, []).append(relative(path))
    wrong = [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]
    assert not wrong, "rename all but one, or import it:\n" + "\n".join(wrong)


def test_names_say_what_a_thing_is() -> None:
    vague = re.compile(r"utils?|helpers?|managers?|handlers?|misc|common", re.IGNORECASE)
    wrong = [f"{relative(path)}: name the file after its subject" for path in SOURCES if vague.fullmatch(path.stem)]
    wrong += [
        f"{relative(path)}:{node.lineno} {node.name}"
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef) and re.search(r"(Manager|Helper|Handler|Utils?)$", node.name)
    ]
    assert not wrong, "\n".join(wrong)


def swallows(handler: ast.ExceptHandler) -> bool:
    """An except clause whose whole body is `pass` or `...`."""
    return all(
        isinstance(statement, ast.Pass)
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and statement.value.value is ...)
        for statement in handler.body
    )


def test_nothing_is_left_unfinished() -> None:
    wrong: list[str] = []
    for path in SOURCES:
        if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", path.read_text()):
            wrong.append(f"{relative(path)}: finish it or open an issue")
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                wrong.append(f"{relative(path)}:{node.lineno}: say which exception")
            if isinstance(node, ast.ExceptHandler) and swallows(node):
                wrong.append(f"{relative(path)}:{node.lineno}: an error is swallowed; say what it means")
            if isinstance(node, ast.Name) and node.id == "NotImplementedError":
                wrong.append(f"{relative(path)}:{node.lineno}: no stubs")
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is() -> None:
    wrong = [relative(path) for path in SOURCES if path.name != "__init__.py" and not ast.get_docstring(tree(path))]
    assert not wrong, f"no docstring: {', '.join(wrong)}"


def tracked_files() -> list[Path]:
    """What git tracks or would add; outside a repository, the sources and tests."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=30)
    if run.returncode != 0:
        return SOURCES + TESTS
    return [ROOT / line for line in run.stdout.splitlines() if (ROOT / line).is_file()]


def test_no_file_names_a_place_on_one_machine() -> None:
    """Absolute paths into somebody's home, work or temporary folder work on one machine only."""
    place = re.compile(r"(?<![\w./])/(?:home|root|work|Users|tmp|opt|mnt)/[\w.-]+")
    wrong: list[str] = []
    for path in tracked_files():
        data = path.read_bytes()
        if len(data) > 5_000_000 or b"\0" in data[:1000]:
            continue
        for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), start=1):
            if match := place.search(line):
                wrong.append(f"{relative(path)}:{number}: {match[0]}")
    assert not wrong, "\n".join(wrong[:20])
