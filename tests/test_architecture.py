"""The shape of the house: what may import what, that nothing is out of reach, and what must not stand in a file."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "parsim").rglob("*.py")) + sorted((ROOT / "calibration").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

ROOMS: tuple[tuple[str, ...], ...] = (
    ("units", "errors", "files", "registry", "records", "numeric", "jit", "private", "work", "timeline"),
    ("hardware",),
    ("model",),
    ("plans",),
    ("program",),
    ("costs",),
    ("engines",),
    ("predict",),
    ("search",),
    ("data",),
    ("execute",),
    ("relaxed",),
    ("report",),
    ("formats",),
    ("app",),
    ("commands",),
    ("cli", "__main__"),
)
"""From the ground up (docs/design.md): a module imports from its own room and the ones before it."""
LEVEL = {name: level for level, names in enumerate(ROOMS) for name in names}
HEAVY = frozenset(
    ("torch", "transformers", "sklearn", "safetensors", "tensorboard", "cvxpy", "simpy", "numba", "scipy", "pandas")
) | frozenset(("plotly", "matplotlib", "rich", "yaml", "IPython", "joblib", "dask", "distributed", "optuna", "SALib"))
HEAVY |= frozenset(("highspy", "pyarrow", "lightning", "mcp", "mlflow", "trackio", "wandb"))
"""Packages that take long to load or are extras: only these, and modules that load them, are imported inside functions."""
LIGHT_START = frozenset(("torch", "cvxpy", "plotly", "matplotlib", "simpy", "numba", "pandas", "transformers", "sklearn"))
"""What `import parsim` and `parsim --help` must not load."""
TORCH_FREE = (
    "parsim.app.config",
    "parsim.app.functions",
    "parsim.cli",
    "parsim.hardware.cluster",
    "parsim.model.load",
    "parsim.model.model",
    "parsim.plans.plan",
    "parsim.predict.evaluate",
    "parsim.program.taskgraph",
    "parsim.search.search",
)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def dotted(path: Path) -> str:
    """`parsim.plans.plan` of parsim/plans/plan.py, `parsim.plans` of its `__init__`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES: Mapping[str, Path] = {dotted(path): path for path in SOURCES}


@dataclass(frozen=True, kw_only=True)
class Edge:
    """An import: where it stands, what it means, whether it runs when the module is loaded, and whether it may fail."""

    line: int
    target: str
    in_function: bool = False
    for_types: bool = False
    optional: bool = False


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def may_fail(node: ast.AST) -> bool:
    """A try statement that goes on without what it imports: `fcntl`, which not every system has."""
    return isinstance(node, ast.Try) and any("Import" in ast.unparse(entry.type) for entry in node.handlers if entry.type)


@cache
def imports(path: Path) -> tuple[Edge, ...]:
    """All imports of a file, in functions and under TYPE_CHECKING too. `from a import b` means a.b if that is a module."""

    def walk(node: ast.AST, in_function: bool, for_types: bool, optional: bool) -> Iterator[Edge]:
        for child in ast.iter_child_nodes(node):
            names: list[str] = []
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{relative(path)}:{child.lineno}: write the full name instead of a relative import"
                module = child.module or ""
                names = [inner if (inner := f"{module}.{alias.name}") in MODULES else module for alias in child.names]
            for name in dict.fromkeys(names):
                yield Edge(line=child.lineno, target=name, in_function=in_function, for_types=for_types, optional=optional)
            nested = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, in_function or nested, for_types or is_for_types(child), optional or may_fail(child))

    return tuple(walk(tree(path), False, False, False))


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "parsim").parts[0].removesuffix(".py")


def test_rooms_import_only_rooms_above() -> None:
    wrong: list[str] = []
    for path in SOURCES:
        if not path.is_relative_to(ROOT / "parsim") or room_of(path) == "__init__":  # the public names, resolved when used
            continue
        room = room_of(path)
        if room not in LEVEL:
            wrong.append(f"{relative(path)} is in no room; add it to ROOMS where its imports allow")
            continue
        for edge in imports(path):
            package, _, rest = edge.target.partition(".")
            if package == "calibration" and room not in ("app", "commands"):
                wrong.append(f"{relative(path)}:{edge.line}: calibration imports parsim, and only app and commands use it")
            if package == "parsim" and rest and LEVEL.get(rest.split(".")[0], 99) > LEVEL[room]:
                wrong.append(f"{relative(path)}:{edge.line} imports {edge.target}, which is a room below")
    assert not wrong, "\n".join(wrong)


def edges_between_modules() -> dict[str, set[str]]:
    """Module -> the modules that it imports anywhere; none for the public face, which resolves its names when they are used."""
    return {
        name: {edge.target for edge in imports(path) if edge.target in MODULES and edge.target != name}
        if name != "parsim"
        else set()
        for name, path in MODULES.items()
    }


def test_no_circle_between_modules() -> None:
    """Imports inside functions and under TYPE_CHECKING count: a circle says that two modules are one subject."""
    circle: list[str] = []
    try:
        TopologicalSorter(edges_between_modules()).prepare()
    except CycleError as error:
        circle = error.args[1]
    assert not circle, f"a circle, each imported by the next: {', '.join(circle)}"


def loads_heavy() -> frozenset[str]:
    """Modules whose loading loads a heavy package, by themselves or by what they import at module level."""
    heavy = {
        name
        for name, path in MODULES.items()
        if any(edge.target.split(".")[0] in HEAVY for edge in imports(path) if not edge.in_function and not edge.for_types)
    }
    while True:
        more = {
            name
            for name, path in MODULES.items()
            if name not in heavy
            and any(edge.target in heavy for edge in imports(path) if not edge.in_function and not edge.for_types)
        }
        if not more:
            return frozenset(heavy)
        heavy |= more


def test_only_what_is_heavy_is_imported_inside_functions() -> None:
    """Calibration counts as heavy: it is imported when something is measured."""
    heavy = loads_heavy()
    wrong = [
        f"{relative(path)}:{edge.line} imports {edge.target}: import it at the head of the file"
        for path in SOURCES
        if room_of_any(path) not in ("__init__", "__main__")  # names on demand; handlers of signals before all else
        for edge in imports(path)
        if edge.in_function
        and not edge.optional
        and edge.target.split(".")[0] not in {*HEAVY, "calibration"}
        and edge.target not in heavy
    ]
    assert not wrong, "\n".join(wrong)


def room_of_any(path: Path) -> str:
    return room_of(path) if path.is_relative_to(ROOT / "parsim") else path.relative_to(ROOT).parts[0]


def test_every_module_is_within_reach() -> None:
    """From a command, a public name, a worker that a command starts by name, or a row of a registry."""
    named = re.compile(r"\b(?:parsim|calibration)(?:\.\w+)+")
    edges = edges_between_modules()
    edges["parsim"] = {edge.target for edge in imports(MODULES["parsim"])}
    for name, path in MODULES.items():
        docstrings = {id(node.value) for node in ast.walk(tree(path)) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                edges[name] |= {word for word in named.findall(node.value) if word in MODULES and word != name}
            if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):  # f"parsim.formats.{name}"
                package = str(node.values[0].value)
                edges[name] |= {module for module in MODULES if named.match(package) and module.startswith(package)}
        for package in (name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)):
            edges[name] |= {package} & MODULES.keys()  # loading a module loads the packages around it
    reached = set()
    waiting = ["parsim", "parsim.__main__", "parsim.cli", "calibration.__main__"]
    while waiting:
        name = waiting.pop()
        if name in MODULES and name not in reached:
            reached.add(name)
            waiting += edges[name] if name != "parsim" else [*edges[name], "parsim.cli"]
    wrong = [name for name in MODULES if name not in reached and MODULES[name].read_text(encoding="utf-8").strip()]
    assert not wrong, f"no command, public name, worker or row leads to {', '.join(wrong)}"


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
    """What they share with the commands is in `parsim.app`."""
    folders = ("experiments", "benchmarks", "calibration", "examples")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert files
    wrong = [
        f"{relative(path)}:{edge.line} imports {edge.target}"
        for path in files
        for edge in imports(path)
        if edge.target == "parsim.cli" or edge.target.split(".")[:2] == ["parsim", "commands"]
    ]
    assert not wrong, "\n".join(wrong)


def loaded_by(statement: str) -> set[str]:
    """Top-level packages in sys.modules of a fresh interpreter after `statement`."""
    code = f"{statement}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT, timeout=60)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_import_parsim_is_light() -> None:
    assert loaded_by("import parsim").isdisjoint(LIGHT_START)


def test_cli_starts_light() -> None:
    assert loaded_by("import parsim.cli").isdisjoint(LIGHT_START)


def test_planning_needs_no_torch() -> None:
    assert loaded_by("import " + ", ".join(TORCH_FREE)).isdisjoint({"torch", "transformers"})


def loaded_with(module: str) -> set[str]:
    """All that is imported when a module is loaded, by itself or by what it imports."""
    loaded, waiting = {module}, [module]
    while waiting:
        for edge in imports(MODULES[waiting.pop()]):
            if not edge.in_function and not edge.for_types and edge.target not in loaded:
                loaded.add(edge.target)
                waiting += [edge.target] if edge.target in MODULES else []
    return loaded


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [("parsim.app.functions", ("scipy",)), ("parsim.execute.worker", ("scipy", "simpy", "numba", "parsim.search"))],
)
def test_only_what_is_needed_is_loaded(module: str, unwanted: tuple[str, ...]) -> None:
    """Solvers are for the few questions that solve something; a rank searches only where training may change its plan."""
    wrong = sorted(name for name in loaded_with(module) if name.startswith(unwanted))
    assert not wrong, f"loading {module} loads {', '.join(wrong)}"


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
