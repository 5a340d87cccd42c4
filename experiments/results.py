"""All experiments by one command: run them, keep their results, judge their claims and write RESULTS.md.

    python experiments/results.py [--only A,B] [--data DIR] [--limit S]   run each as a whole, keep results.json, write the page
    python experiments/results.py --quick [--only A,B]                    run small versions (five minutes): does all run?
    python experiments/results.py --page                                  run nothing: the page from what is committed
    python experiments/results.py --check                                 fail where the page or a README says something else

What is committed is what a whole run gave, on the machine and at the commit that stand beside it. A small version compares
nothing: its claims are "not checked", and nothing of it is kept. DIR holds published tables that are not in the repository.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.common.catalogue import DATA, ROOT, Experiment, Part, chosen, record, recorded
from experiments.common.page import pages_anew, quick_page
from experiments.common.running import PROGRESS_LOG, ExperimentError, documented
from parsim.files import write_text_atomically

QUICK_LIMIT_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small versions: a check that all runs, not a result")
    parser.add_argument("--page", action="store_true", help="write the page from what is committed; run nothing")
    parser.add_argument("--check", action="store_true", help="compare the page with what is committed; write nothing")
    parser.add_argument("--only", default="", help="names of experiments or of parts, with commas between")
    parser.add_argument("--data", type=Path, help="folder with v100/ and large/, the published tables")
    parser.add_argument("--limit", type=float, help="seconds for one part")
    parser.add_argument("--arguments", default="", help="in place of the usual ones; with one part in --only")
    options = parser.parse_args()
    try:
        parts = chosen(options.only)
    except ValueError as error:
        parser.error(str(error))
    if options.arguments and len(parts) != 1:
        parser.error("--arguments are for one part; name it with --only")
    if options.check:
        return check()
    if options.quick:
        return quick(parts, options.limit or QUICK_LIMIT_S)
    failed = [] if options.page else whole(parts, options.data, shlex.split(options.arguments), options.limit)
    for path, text in pages_anew().items():
        write_text_atomically(path, text)
    return 1 if failed else 0


def check() -> int:
    """Whether the pages say what the results say."""
    pages = pages_anew()
    old = [path for path, text in pages.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in old:
        print(f"{path.relative_to(ROOT)} differs from what is committed; run python experiments/results.py --page")
    return 1 if old else 0


def whole(
    parts: Sequence[tuple[Experiment, Part]], data: Path | None, arguments: Sequence[str], limit_s: float | None
) -> list[str]:
    """Run parts of experiments, keep what they give, and return the names of those that failed. data: folder of published
    tables. arguments: in place of the usual ones."""
    failed = []
    for experiment, part in parts:
        usual = arguments or part.whole
        if usual is None or (data is None and any(DATA in word for word in usual)):
            print(f"{part.name}: not run; {part.why}", file=sys.stderr)
            continue
        words = [word.replace(DATA, str(data)) for word in usual]
        out = ROOT / "runs" / part.name
        print(f"{part.name} ... (progress: {out / PROGRESS_LOG})", file=sys.stderr, flush=True)
        try:
            document = documented(experiment.script(part), words, quick="--quick" in words, out=out, limit_s=limit_s)
        except ExperimentError as error:
            print(error, file=sys.stderr)
            failed.append(part.name)
            continue
        run = document["run"]
        if data is not None:
            run["command"] = run["command"].replace(str(data), "DIR")
        record(part.name, (recorded(part.name) or {}) | {"run": run} if part.writes else document)
        print(f"{part.name}: {run['wall_s']:.0f} s, {run['cpu_s']:.0f} CPU-s", file=sys.stderr, flush=True)
    return failed


def quick(parts: Sequence[tuple[Experiment, Part]], limit_s: float) -> int:
    """Run small versions and print what ran. Nothing is compared, and nothing is kept."""
    began, outcomes, failed = time.perf_counter(), {}, 0
    for experiment, part in parts:
        if part.quick is None:
            outcomes[part.name] = f"no small version: {part.why}"
            continue
        print(f"{part.name} ...", file=sys.stderr, flush=True)
        out = ROOT / "runs" / "quick" / part.name
        try:
            run = documented(experiment.script(part), part.quick, quick=True, out=out, limit_s=limit_s)["run"]
        except ExperimentError as error:
            outcomes[part.name] = f"FAILED: {error}"
            failed += 1
        else:
            outcomes[part.name] = f"ran in {run['wall_s']:.0f} s ({run['cpu_s']:.0f} CPU-s)"
    print(quick_page(parts, outcomes, time.perf_counter() - began))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
