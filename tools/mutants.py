"""Small breaks of parsim, one at a time: which of the tests that should notice each does.

    python -m tools.mutants [--only WORD] [--from N --to M] [--missing]    break a copy, run the named tests, keep what is found
    python -m tools.mutants --check    fail where the table or the results are not those of the code

`mutants.txt` is the table. An entry names a file, the text that is replaced (-), what replaces it (+), and the tests that
should notice (?). The text occurs once in the file. Where a break is known to change nothing that a test can see, `!` says why.
First the named tests must pass on the unbroken copy. Only the copy under `runs/mutants` is ever broken.

`mutants.json` keeps per break the first test that failed, and the commit that was broken.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE, RESULTS = ROOT / "tools" / "mutants.txt", ROOT / "tools" / "mutants.json"
WORK = ROOT / "runs" / "mutants"

LIMIT_CPU_S = 60
"""Of the tests of one break."""

LOG = "last.log"
"""Beside the copy: what the last run of tests printed."""

LEAST_NOTICED = 0.95
"""Share of the breaks that tests have to notice."""

FAILED, SURVIVED, NOTHING_RUN = 1, 0, (4, 5)
"""Exit statuses of pytest: a test failed; all passed; a name is wrong, or no test was collected."""

OWN = ("parsim", "calibration", "experiments", "hardware_profiles", "tests", "tools")
"""Packages of the copy."""

MARKS = {"-": "old", "+": "new", "?": "tests", "!": "why"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One break.

    Attributes:
        path: of the file. old: text that occurs once in it. new: in its place. tests: arguments of pytest.
        why: no test can notice it; "" where one should.
    """

    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str = ""

    @property
    def name(self) -> str:
        return f"{self.path}: {self.old} => {self.new}"

    def broken(self, text: str) -> str:
        """The text of the file with the break. Raises ValueError unless the text that is replaced occurs once."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"{self.path} has {self.old!r} {count} times, and a break replaces text that occurs once: correct it"
            )
        return text.replace(self.old, self.new)


def mutants_of(text: str) -> list[Mutant]:
    """The entries of a table, which empty lines divide; lines of several breaks of one text are joined."""
    found = []
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if line and not line.startswith("#")]
        if not lines:
            continue
        parts: dict[str, list[str]] = {name: [] for name in MARKS.values()}
        for line in lines[1:]:
            parts[MARKS[line[0]]].append(line[2:])
        old, new, why = ("\n".join(parts[name]) for name in ("old", "new", "why"))
        found.append(Mutant(path=lines[0], old=old, new=new, tests=tuple(shlex.split(" ".join(parts["tests"]))), why=why))
    return found


# --- a copy, and one run of tests in it -------------------------------------------------------------------------------


def copy_of_the_tree(place: Path) -> Path:
    """All files that git tracks; those whose content is there already stay, and with them what was compiled of them."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    for name in names:
        source, target = ROOT / name, place / name
        if not target.is_file() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    for path in [path for path in place.rglob("*.py") if str(path.relative_to(place)) not in set(names)]:
        path.unlink()
    return place


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Attributes: status: of pytest; minus a signal that ended it. failed: the first test that failed. cpu_s: of all."""

    status: int
    failed: str
    cpu_s: float


def preload(tree: Path) -> None:
    """Import what tests need from the copy, once for the runs of all breaks, each of which is a fork of this process."""
    os.chdir(tree)
    for name in [name for name in sys.modules if name.partition(".")[0] in OWN]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(path for path in sys.path if path and Path(path).resolve() != ROOT)]
    os.environ["PYTHONPATH"] = str(tree)
    os.environ["NUMBA_CACHE_DIR"] = str(tree.parent / "numba")
    for name in ("hypothesis", "pytest", "scipy.optimize", "torch"):
        importlib.import_module(name)
    for path in sorted((tree / "parsim").rglob("*.py")):
        if path.name not in ("__main__.py", "__init__.py"):
            importlib.import_module(".".join(path.relative_to(tree).with_suffix("").parts))


def rewire(path: Path, text: str) -> bool:
    """Give the functions of an imported file the code that another text of as many lines has; whether any has changed."""
    new: dict[tuple[str, int], CodeType] = {}

    def note(code: CodeType) -> None:
        new[code.co_qualname, code.co_firstlineno] = code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                note(constant)

    note(compile(text, str(path), "exec"))
    changed = False
    for function in gc.get_objects():
        if isinstance(function, FunctionType) and function.__code__.co_filename == str(path):
            code = new.get((function.__code__.co_qualname, function.__code__.co_firstlineno))
            if code is not None and code != function.__code__:
                function.__code__, changed = code, True
    return changed


def run_tests(tree: Path, tests: Sequence[str], *, broken: Path | None = None, limit_s: int = LIMIT_CPU_S) -> Verdict:
    """Run tests in a copy, in a process of their own, up to the first that fails. broken: the file that was changed after the
    others were imported."""
    read, write = os.pipe()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    child = os.fork()
    if child == 0:
        os.close(read)
        _run_here(tree, tests, broken=broken, limit_s=limit_s, answer=write)
    os.close(write)
    with os.fdopen(read) as answer:
        failed = answer.read()
    _, status = os.waitpid(child, 0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Verdict(status=os.waitstatus_to_exitcode(status), failed=failed, cpu_s=round(cpu_s, 1))


def _run_here(tree: Path, tests: Sequence[str], *, broken: Path | None, limit_s: int, answer: int) -> None:
    """Become the process of one run of tests; never returns."""
    import pytest

    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
    os.set_inheritable(answer, False)
    with (tree.parent / LOG).open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(tree)
    if broken is not None:
        _take_over(broken)
    status = pytest.main(
        ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=0", *tests], plugins=[_FirstFailure(answer)]
    )
    sys.stdout.flush()
    os._exit(int(status))


def _take_over(broken: Path) -> None:
    """Change what is imported of a file, or import all anew: a cache of compiled loops knows the file of each loop alone."""
    text = broken.read_text(encoding="utf-8")
    if "@njit" in text:
        config: Any = importlib.import_module("numba").config
        config.DISABLE_JIT, os.environ["NUMBA_DISABLE_JIT"] = True, "1"
    elif rewire(broken, text):
        return
    for name in [name for name in sys.modules if name.partition(".")[0] in OWN]:
        del sys.modules[name]


class _FirstFailure:
    """Tells the first test, or file of tests, that fails."""

    def __init__(self, answer: int) -> None:
        self._answer, self._told = answer, False

    def _tell(self, report: Any) -> None:
        if report.failed and not self._told:
            self._told = True
            os.write(self._answer, report.nodeid.encode())

    pytest_runtest_logreport = _tell
    pytest_collectreport = _tell


# --- all breaks -------------------------------------------------------------------------------------------------------


def outcomes(tree: Path, mutants: Sequence[Mutant]) -> Iterator[tuple[Mutant, Verdict]]:
    """Break the copy, run the tests, mend the copy, one after another. Raises ValueError: an entry names no test, or a text is
    not in its file."""
    for mutant in mutants:
        path = tree / mutant.path
        text, stat = path.read_text(encoding="utf-8"), path.stat()
        try:
            path.write_text(mutant.broken(text), encoding="utf-8")
            verdict = run_tests(tree, mutant.tests, broken=path)
        finally:
            path.write_text(text, encoding="utf-8")
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        if verdict.status in NOTHING_RUN:
            raise ValueError(f"{mutant.name}: {' '.join(mutant.tests)} are no tests; correct {TABLE}")
        yield mutant, verdict


def check_unbroken(tree: Path, mutants: Sequence[Mutant]) -> None:
    """Raises ValueError where a named test fails without any break."""
    tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    verdict = run_tests(tree, tests, limit_s=LIMIT_CPU_S * len(tests))
    if verdict.status != SURVIVED:
        raise ValueError(f"without any break {verdict.failed or verdict.status} fails; see {tree.parent / LOG}")


def noticed_by(verdict: Verdict) -> str:
    """The first test that failed; "" where all passed, or none failed until the limit."""
    if verdict.status == SURVIVED or verdict.status < 0:
        return ""
    return verdict.failed or f"pytest ended with {verdict.status}"


def recorded() -> dict[str, dict[str, Any]]:
    """What is known of each break, by name."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else []
    return {row["break"]: row for row in rows}


def keep(mutants: Sequence[Mutant], rows: dict[str, dict[str, Any]]) -> None:
    """Write the rows of the table's breaks, in its order, one a line."""
    lines = [json.dumps(rows[mutant.name]) for mutant in mutants if mutant.name in rows]
    RESULTS.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def faults(mutants: Sequence[Mutant], rows: dict[str, dict[str, Any]]) -> list[str]:
    """What is wrong with the table or its results, as lines."""
    found = []
    for mutant in mutants:
        try:
            mutant.broken((ROOT / mutant.path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            found.append(str(error))
        found += [f"{test}: no such tests" for test in mutant.tests if not (ROOT / test.partition("::")[0]).is_file()]
        row = rows.get(mutant.name)
        if row is None:
            found.append(f"{mutant.name}: not tried yet")
        elif not row["noticed_by"] and not mutant.why:
            found.append(f"{mutant.name}: no test notices; mend a test, or say why with a line that begins with !")
    noticed = sum(bool(rows[mutant.name]["noticed_by"]) for mutant in mutants if mutant.name in rows)
    if noticed < LEAST_NOTICED * len(mutants):
        found.append(f"{noticed} of {len(mutants)} breaks are noticed, fewer than {LEAST_NOTICED:.0%}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="breaks whose file or text contains this")
    parser.add_argument("--from", type=int, default=1, dest="first", help="number of the first break of the table")
    parser.add_argument("--to", type=int, default=None, dest="last", help="number of the last one")
    parser.add_argument("--missing", action="store_true", help="only breaks that were not tried yet, or not noticed")
    parser.add_argument("--unbroken", action="store_true", help="only whether the named tests pass without any break")
    parser.add_argument("--broken-only", action="store_true", help="without that: it was seen before")
    parser.add_argument("--check", action="store_true", help="run nothing: is all of the table found, and noticed?")
    options = parser.parse_args()
    table = mutants_of(TABLE.read_text(encoding="utf-8"))
    rows = recorded()
    if not options.check:
        chosen = [mutant for mutant in table[options.first - 1 : options.last] if options.only in mutant.name]
        if options.missing:
            chosen = [mutant for mutant in chosen if not rows.get(mutant.name, {}).get("noticed_by")]
        head = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        tree = copy_of_the_tree(WORK / "tree")
        preload(tree)
        if not options.broken_only:
            check_unbroken(tree, chosen)
        for mutant, verdict in outcomes(tree, chosen) if not options.unbroken else ():
            test = noticed_by(verdict)
            print(f"{verdict.cpu_s:5.1f} s  {test or 'SURVIVED'}  <-  {mutant.name}", flush=True)
            rows[mutant.name] = {
                "break": mutant.name,
                "noticed_by": test,
                "cpu_s": verdict.cpu_s,
                "commit": head.stdout.strip(),
            }
            keep(table, rows)
    wrong = faults(table, rows)
    print(*wrong, sep="\n")
    noticed = sum(bool(row["noticed_by"]) for row in rows.values())
    print(f"{len(table)} breaks, {noticed} of {len(rows)} that were tried noticed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
