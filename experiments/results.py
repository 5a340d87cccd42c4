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
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.common.catalogue import DATA, ROOT, Experiment, chosen
from experiments.common.page import PAGE, SITE_PAGE, made_anew, page, quick_page, site_page
from experiments.common.running import PROGRESS_LOG, ExperimentError, documented
from parsim.files import write_text_atomically

QUICK_LIMIT_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small versions: a check that all runs, not a result")
    parser.add_argument("--page", action="store_true", help="write the page from what is committed; run nothing")
    parser.add_argument("--check", action="store_true", help="compare the page with what is committed; write nothing")
    parser.add_argument("--only", default="", help="names with commas between")
    parser.add_argument("--data", type=Path, help="folder with v100/ and large/, the published tables")
    parser.add_argument("--limit", type=float, help="seconds for one experiment")
    parser.add_argument("--arguments", default="", help="of run.py, in place of the usual ones; with one name in --only")
    asked = parser.parse_args()
    try:
        some = chosen(asked.only)
    except ValueError as error:
        parser.error(str(error))
    if asked.arguments and len(some) != 1:
        parser.error("--arguments are for one experiment; name it with --only")
    if asked.check:
        return check()
    if asked.quick:
        return quick(some, asked.limit or QUICK_LIMIT_S)
    failed = [] if asked.page else whole(some, asked.data, shlex.split(asked.arguments), asked.limit)
    for path, text in made_anew().items():
        write_text_atomically(path, text)
    write_text_atomically(PAGE, page())
    write_text_atomically(SITE_PAGE, site_page())
    return 1 if failed else 0


def check() -> int:
    """Whether the pages say what the results say."""
    wanted = {**made_anew(), PAGE: page(), SITE_PAGE: site_page()}
    old = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in old:
        print(f"{path.relative_to(ROOT)} differs from what is committed; run python experiments/results.py --page")
    return 1 if old else 0


def whole(some: Sequence[Experiment], data: Path | None, arguments: Sequence[str], limit_s: float | None) -> list[str]:
    """Run experiments and keep what they give.

    Args:
        some: to run. data: folder of published tables. arguments: in place of the usual ones. limit_s: for each.

    Returns:
        The names of those that failed.
    """
    failed = []
    for each in some:
        usual = arguments or each.whole
        if usual is None or (data is None and any(DATA in word for word in usual)):
            print(f"{each.name}: not run; {each.why}", file=sys.stderr)
            continue
        words = [word.replace(DATA, str(data)) for word in usual]
        out = ROOT / "runs" / each.name
        print(f"{each.name} ... (progress: {out / PROGRESS_LOG})", file=sys.stderr, flush=True)
        try:
            found = documented(each.name, words, quick="--quick" in words, out=out, limit_s=limit_s)
        except ExperimentError as error:
            print(f"{each.name}: {error}", file=sys.stderr)
            failed.append(each.name)
            continue
        if data is not None:
            found["run"]["command"] = found["run"]["command"].replace(str(data), "DIR")
        if each.writes:
            found = json.loads(each.results.read_text(encoding="utf-8")) | {"run": found["run"]}
        write_text_atomically(each.results, lines_of(found))
        print(f"{each.name}: {found['run']['wall_s']:.0f} s, {found['run']['cpu_s']:.0f} CPU-s", file=sys.stderr, flush=True)
    return failed


def lines_of(document: dict[str, object]) -> str:
    """JSON with a line per row of a table, so that changes can be read."""
    parts = []
    for key, value in document.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ",\n".join(json.dumps(row) for row in value)
            parts.append(f"{json.dumps(key)}: [\n{rows}\n]")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def quick(some: Sequence[Experiment], limit_s: float) -> int:
    """Run small versions and print what ran. Nothing is compared, and nothing is kept."""
    began, outcomes, failed = time.perf_counter(), {}, 0
    for each in some:
        if each.quick is None:
            outcomes[each.name] = f"no small version: {each.why}"
            continue
        print(f"{each.name} ...", file=sys.stderr, flush=True)
        try:
            found = documented(each.name, each.quick, quick=True, out=ROOT / "runs" / "quick" / each.name, limit_s=limit_s)
        except ExperimentError as error:
            outcomes[each.name] = f"FAILED: {error}"
            failed += 1
        else:
            outcomes[each.name] = f"ran in {found['run']['wall_s']:.0f} s ({found['run']['cpu_s']:.0f} CPU-s)"
    print(quick_page(some, outcomes, time.perf_counter() - began))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
