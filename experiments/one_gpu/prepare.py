"""Everything that a machine with a GPU and without a network lacks, as wheels in .whl/, and the three commands to run there.

    make gpu [MINUTES=15]
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

FIRST_S, SECOND_S, THIRD_S = 300, 160, 80
"""Of the three commands, wheels included: nine minutes of the machine, each useful without the others."""

SMOKE_S, CHECKS_S, TESTS_S = 60, 95, 20
"""Of the first command, its smoke test; of the second, the checks of weights and the tests that need a GPU."""

START_S, BETWEEN_S = 240, 30
"""Of the whole time: for a machine to start, and for files that travel, and people who look at them, with each command."""

CALL_S, MARGIN_S, LEAST_CALL_S = 600, 25, 180
"""Most seconds of one command; what stays free at the end of the programme in it, since a command that is killed loses its last
case; and what a further command is worth making for."""

KILL_S, FLOOR_S = 5, 5
"""From a request to end until it is forced; and the least that anything is given."""

INSTALL = (
    "SITE=$(mktemp -d) && python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target $SITE .whl/*.whl"
    " && export PYTHONPATH=$PWD:$SITE PYTHONUNBUFFERED=1"
)
KEPT = "experiments/one_gpu/measured"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0, help="of the machine, starts and waits included")
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


def further_calls(minutes: float) -> list[int]:
    """Seconds of the commands that more than fifteen minutes leave room for: whole ones, and what is left if it is worth one.

    Raises ValueError for too few minutes for the three.
    """
    three_s = FIRST_S + SECOND_S + THIRD_S + START_S + 3 * BETWEEN_S
    if 60 * minutes < three_s:
        raise ValueError(
            f"{minutes:g} minutes are too few for the three commands; give --minutes {math.ceil(three_s / 60)} or more"
        )
    whole, rest_s = divmod(int(60 * minutes) - three_s, CALL_S + BETWEEN_S)
    return [CALL_S] * whole + ([rest_s - BETWEEN_S] if rest_s >= LEAST_CALL_S + BETWEEN_S else [])


def begun() -> str:
    """How every command begins: its clock, and the wheels, which are part of its time."""
    return f"SECONDS=0; left() {{ echo $(($1 - SECONDS > {FLOOR_S} ? $1 - SECONDS : {FLOOR_S})); }}; {INSTALL}"


def within(seconds: int) -> str:
    """Ends what follows so many seconds after its command began."""
    return f"timeout -k {KILL_S} $(left {seconds - KILL_S})"


def programme(seconds: int, where: str = "") -> str:
    """The cases that have no row yet, until so many seconds after the command began. `where`: further arguments of run.py."""
    return (
        f"set -o pipefail; {within(seconds)} python3 experiments/one_gpu/run.py{where} --budget $(left {seconds - MARGIN_S})"
        f" --out $OUT --done {KEPT}/rows.jsonl 2>&1 | tee $OUT/log"
    )


def predicted_and_measured(seconds: int = FIRST_S, where: str = "", smoke: str = "") -> str:
    """The smoke test, then a calibration, predictions of held-out steps, frozen, and those steps."""
    smoked = f"{within(SMOKE_S)} python3 experiments/one_gpu/smoke.py{smoke} --out $OUT"
    return f"{begun()} && {smoked} && {{ {programme(seconds, where)}; }}"


def checked(seconds: int = SECOND_S, where: str = "", checks: str = "") -> str:
    """Weights after training on ranks that share the GPU, the tests that need one, and the next cases: memory by line."""
    weights = (
        f"{within(CHECKS_S)} python3 experiments/one_gpu/correct.py{checks} --budget $(left {CHECKS_S - 2 * KILL_S}) --out $OUT"
    )
    tests = f"{within(CHECKS_S + TESTS_S)} python3 -m pytest -q -p no:cacheprovider -n 0 -m gpu tests"
    return f"{begun()} && {{ {weights}; {tests}; {programme(seconds, where)}; }}"


def went_on(seconds: int = THIRD_S, where: str = "") -> str:
    """Cases from where the command before left off: operators and copies, then variants of steps and the second precision."""
    return f"{begun()} && {{ {programme(seconds, where)}; }}"


def commands(minutes: float) -> list[str]:
    """What to run there, for people to copy."""
    more = further_calls(minutes)
    lines = [
        "",
        "Each runs in the root of this tree, copied there with .whl/, which git ignores: name it if files of git alone travel.",
        f"After each, copy rows.jsonl from $OUT to {KEPT}/ in the tree: the next one goes on from there.",
        "",
        f"1. At most {FIRST_S} s: a smoke test; a calibration of ResNet-50 and a GPT; predictions, frozen; held-out steps.",
        f"   {predicted_and_measured()}",
        "",
        f"2. At most {SECOND_S} s: weights of ranks that share the GPU, the tests that need one, memory by line.",
        f"   {checked()}",
        "",
        f"3. At most {THIRD_S} s: operators and copies.",
        f"   {went_on()}",
    ]
    for seconds in dict.fromkeys(more):
        lines += ["", f"Then {more.count(seconds)} more of at most {seconds} s: what is left.", f"   {went_on(seconds)}"]
    return [*lines, "", f"Afterwards, anywhere: python experiments/one_gpu/run.py --analyse {KEPT}"]


if __name__ == "__main__":
    sys.exit(main())
