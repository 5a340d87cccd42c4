"""Everything that a machine with a GPU and without a network lacks, as wheels in .whl/, and the three commands to run there.

    make gpu [MINUTES=30]
    python experiments/one_gpu/prepare.py [--minutes N] [--lacks NAME,NAME,...] [--also NAME,...]
        [--python 3.12] [--limit-mib 64] [--out .whl]

Downloads the versions that requirements.lock pins, without their dependencies: what is named is what travels. The default is
what the programme needs beyond an image with torch, numpy, pandas, scipy, numba, networkx, joblib, rich and typer. The tree and
the wheels together must stay below the limit.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LACKS = ("simpy", "pydantic", "pydantic_core", "annotated-types", "typing-inspection", "plotly")
GLIBC_MINORS = (28, 27, 17, 12, 5)
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS), "manylinux2014_x86_64", "manylinux1_x86_64")
MIB = 2**20

SMOKE_S, CORRECTNESS_S, START_S, BETWEEN_S = 120, 240, 60, 10
"""Of the whole time: for the first and, at least, the last command; for a machine to start and to take the files; and for files
that travel with each command."""

CALL_S, MARGIN_S, LEAST_CALL_S = 600, 60, 180
"""Most seconds of one command; what stays free at its end, since a command that is killed loses its last case; and what a call
is worth making for."""

TESTS_S, KILL_S, FLOOR_S = 60, 5, 5
"""Of the last command, what its tests get; from a request to end until it is forced; and the least that anything is given."""

INSTALL = (
    "SITE=$(mktemp -d) && python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target $SITE .whl/*.whl"
    " && export PYTHONPATH=$PWD:$SITE PYTHONUNBUFFERED=1"
)
KEPT = "experiments/one_gpu/measured"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="of the machine, all three commands together")
    parser.add_argument("--lacks", default=",".join(LACKS), help="packages that it lacks")
    parser.add_argument(
        "--also", default="", help="packages that it has in another version, e.g. a numpy that its numba refuses"
    )
    parser.add_argument("--python", default="3.12", help="its version")
    parser.add_argument("--limit-mib", type=float, default=64.0, help="of the tree and the wheels together")
    parser.add_argument("--out", type=Path, default=ROOT / ".whl")
    asked = parser.parse_args()
    pins = pinned([name for name in f"{asked.lacks},{asked.also}".split(",") if name], (ROOT / "requirements.lock").read_text())
    missing = [name for name, version in pins.items() if version is None]
    if missing:
        print(f"error: requirements.lock pins no {', '.join(missing)}; name packages as it does", file=sys.stderr)
        return 1
    asked.out.mkdir(parents=True, exist_ok=True)
    for wheel in asked.out.glob("*.whl"):
        wheel.unlink()  # two versions of one package would stop the whole installation
    command = download_command([f"{name}=={version}" for name, version in pins.items()], asked.python, asked.out)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"error: pip cannot download the wheels:\n{done.stderr.strip()}", file=sys.stderr)
        return 1
    wheels = sorted(asked.out.glob("*.whl"))
    for wheel in wheels:
        print(f"{wheel.stat().st_size / MIB:8.2f} MiB  {wheel.name}")
    tree, carried = tree_bytes(), sum(wheel.stat().st_size for wheel in wheels)
    together = f"{(carried + tree) / MIB:.2f} of {asked.limit_mib:g} MiB"
    print(f"{carried / MIB:8.2f} MiB of wheels, {tree / MIB:.2f} MiB of tree, together {together}")
    if carried + tree > asked.limit_mib * MIB:
        print("error: more than the limit; name fewer packages with --lacks", file=sys.stderr)
        return 1
    try:
        print("\n".join(commands(asked.minutes)))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def pinned(names: Sequence[str], lock: str) -> dict[str, str | None]:
    """The version of each package in the lock; None: it is not there."""
    versions = {normal(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", lock, re.MULTILINE)}
    return {name: versions.get(normal(name)) for name in names}


def normal(name: str) -> str:
    """The name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def download_command(requirements: Sequence[str], python: str, out: Path) -> list[str]:
    platforms = [part for platform in PLATFORMS for part in ("--platform", platform)]
    kind = ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    return [sys.executable, "-m", "pip", "download", "--quiet", *kind, "--dest", str(out), *requirements]


def tree_bytes() -> int:
    """Of every file that git tracks or does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
    )
    paths = [ROOT / name.decode() for name in listed.stdout.split(b"\0") if name]
    return sum(path.stat().st_size for path in paths if path.is_file())


def shares_of(minutes: float) -> tuple[list[int], int]:
    """Seconds of every call of the programme: whole ones, and one of what is left if it is worth one; and of the last command,
    which else takes what is left.

    Raises ValueError for too few minutes.
    """
    others_s = SMOKE_S + CORRECTNESS_S + START_S + 2 * BETWEEN_S
    whole, rest_s = divmod(max(0, int(60 * minutes) - others_s), CALL_S + BETWEEN_S)
    budgets = [CALL_S - MARGIN_S] * whole
    if rest_s >= LEAST_CALL_S + BETWEEN_S:
        budgets.append(min(CALL_S, rest_s - BETWEEN_S) - MARGIN_S)
        rest_s = 0
    if not budgets:
        least = math.ceil((LEAST_CALL_S + BETWEEN_S + others_s) / 60)
        raise ValueError(f"{minutes:g} minutes are too few for the three commands; give --minutes {least} or more")
    return budgets, min(CALL_S, CORRECTNESS_S + rest_s)


def begun() -> str:
    """How every command begins: its clock, and the wheels, which are part of its time."""
    return f"SECONDS=0; left() {{ echo $(($1 - SECONDS > {FLOOR_S} ? $1 - SECONDS : {FLOOR_S})); }}; {INSTALL}"


def within(seconds: int) -> str:
    """Ends what follows so many seconds after its command began."""
    return f"timeout -k {KILL_S} $(left {seconds - KILL_S})"


def smoke() -> str:
    return f"{begun()} && {within(SMOKE_S)} python3 experiments/one_gpu/smoke.py --out $OUT"


def programme(budget: int) -> str:
    """Args: budget: seconds from the beginning of the command, wheels included."""
    return (
        f"{begun()} && set -o pipefail && {within(budget + MARGIN_S)} python3 experiments/one_gpu/run.py"
        f" --budget $(left {budget}) --out $OUT --done {KEPT}/rows.jsonl 2>&1 | tee $OUT/log"
    )


def correctness(seconds: int) -> str:
    """The checks, and in what is left the tests that need a GPU."""
    checks_s, tests = seconds - TESTS_S, "python3 -m pytest -q -p no:cacheprovider -n 0"
    return (
        f"{begun()} && {within(checks_s)} python3 experiments/one_gpu/correct.py --budget $(left {checks_s - 2 * KILL_S})"
        f" --out $OUT; {within(seconds)} {tests} -m gpu tests/gpu; {within(seconds)} {tests} tests/unit/test_cuda_operators.py"
    )


def commands(minutes: float) -> list[str]:
    """What to run there, for people to copy."""
    budgets, correctness_s = shares_of(minutes)
    lines = [
        "",
        "Each runs in the root of this tree, copied there with .whl/, which git ignores: name it if files of git alone travel.",
        "",
        f"1. Smoke, at most {SMOKE_S} s: does everything import, does the GPU do what the programme asks of it?",
        f"   {smoke()}",
        "",
        f"2. The programme, {len(budgets)} call(s); each ends within {MARGIN_S} s of its budget.",
        f"   After each call copy rows.jsonl from $OUT to {KEPT}/ in the tree: the next call goes on from there.",
    ]
    for budget in dict.fromkeys(budgets):
        lines += [f"   {budgets.count(budget)} call(s) with a budget of {budget} s:", f"   {programme(budget)}"]
    return [
        *lines,
        "",
        f"3. Correctness, at most {correctness_s} s:",
        f"   {correctness(correctness_s)}",
        "",
        f"Afterwards, anywhere: python experiments/one_gpu/run.py --analyse {KEPT}",
    ]


if __name__ == "__main__":
    sys.exit(main())
