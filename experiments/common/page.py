"""RESULTS.md, and the table of claims of every experiment's README, from the committed results."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from experiments.common.catalogue import CATALOGUE, FOLDER, Experiment
from experiments.common.claims import VERDICTS, Claim, counts, unchecked
from experiments.common.markdown import replaced, table

PAGE = FOLDER / "RESULTS.md"
SITE_PAGE = FOLDER.parent / "docs" / "results.md"
"""The same page in the documentation."""
REFUTED_BY = "**What would refute it**"
NOT_RECORDED = "not recorded"
QUICK_COMPARES = "a small version compares nothing"


def judge_of(each: Experiment) -> ModuleType | None:
    """The experiment's `judge.py`, read under a name of its own; None where it has none."""
    path = each.folder / "judge.py"
    if not path.is_file():
        return None
    name = f"experiments.{each.name}.judge"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def results_of(each: Experiment) -> dict[str, Any] | None:
    """What is committed, None where nothing is. Results from before runs were recorded say less of their run."""
    if not each.results.is_file():
        return None
    found: dict[str, Any] = json.loads(each.results.read_text(encoding="utf-8"))
    if not isinstance(found.get("run"), dict):
        found["run"] = {}
    for key in ("machine", "date", "seed"):
        if isinstance(found.get(key), (str, int)):
            found["run"].setdefault(key, found[key])
    return found


def claims_of(each: Experiment, document: dict[str, Any] | None) -> list[Claim]:
    """The claims of an experiment with their verdicts.

    Args:
        each: the experiment. document: its results; None where there are none. Those of a small version compare nothing.
    """
    judge = judge_of(each)
    if judge is None:
        return []
    found: list[Claim] = judge.claims({} if document is None else document)
    if document is None:
        return unchecked(found, "no results are committed")
    if document["run"].get("quick"):
        return unchecked(found, QUICK_COMPARES)
    return found


def finding_of(each: Experiment) -> str:
    """The opening of its README: the paragraph below the title."""
    text = re.sub(r"<!-- finding: .*? -->\n?", "", (each.folder / "README.md").read_text(encoding="utf-8"))
    paragraphs = [part.strip() for part in text.split("\n\n")[1:] if part.strip() and not part.startswith("<!--")]
    return " ".join(paragraphs[0].split())


def claims_table(claims: Sequence[Claim]) -> str:
    """Markdown; failed claims stay in, marked."""
    return table(("claim", "verdict", "found"), ((each.text, _marked(each.verdict), each.found) for each in claims))


def _marked(verdict: str) -> str:
    return verdict if verdict == "met" else f"**{verdict}**"


def run_line(run: dict[str, Any]) -> str:
    """With what the results were made. What an older run did not record is said so."""
    seconds = run.get("wall_s")
    took = NOT_RECORDED if seconds is None else f"{seconds:,.0f} s ({run['cpu_s']:,.0f} CPU-s, load {run['load']} at its begin)"
    parts = {
        "command": f"`{run['command']}`" if "command" in run else NOT_RECORDED,
        "machine": run.get("machine", run.get("processor", NOT_RECORDED)),
        "date": run.get("date", NOT_RECORDED),
        "commit": run.get("commit") or NOT_RECORDED,
        "seeds": _seeds(run),
        "run time": took,
    }
    return "; ".join(f"{name}: {value}" for name, value in parts.items())


def _seeds(run: dict[str, Any]) -> str:
    if "seed" in run:
        return str(run["seed"])
    words = str(run.get("command", "")).split()
    named = [f"{word} {value}" for word, value in pairwise(words) if word in ("--seed", "--seeds")]
    return ", ".join(named) or ("as run.py has them" if words else NOT_RECORDED)


def made_anew() -> dict[Path, str]:
    """READMEs with their finding, table of claims and other tables, where they have the marks for them; and the pages that
    quote rows of them."""
    pages: dict[Path, str] = _quoting_pages()
    for each in CATALOGUE:
        path = each.folder / "README.md"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        document = results_of(each)
        made = _between(text, "claims", lambda each=each, document=document: _claims_text(each, document))
        made = _between(made, "tables", lambda each=each, document=document: _tables_text(each, document))
        for name, table_text in _named_tables(each, document).items():
            made = _between(made, name, lambda table_text=table_text: table_text)
        finding = getattr(judge_of(each), "finding", None)
        if finding is not None and document is not None:
            made = _between(made, "finding", lambda finding=finding, document=document: str(finding(document)))
        if made != text or "<!-- claims: begin -->" in text:
            pages[path] = made
    return pages


def _quoting_pages() -> dict[Path, str]:
    """Pages outside the experiments' folders with the rows that judges give them: `page_rows` of a judge that has it.

    It maps a page to rows by what they begin with. A row that begins so is replaced; one that is new stands first in the table
    whose head `AFTER` names.
    """
    pages: dict[Path, str] = {}
    for each in CATALOGUE:
        document = results_of(each)
        rows_of = getattr(judge_of(each), "page_rows", None)
        if rows_of is None or document is None or document["run"].get("quick"):
            continue
        for name, rows in rows_of(document).items():
            path = FOLDER.parent / name
            text = pages.get(path, path.read_text(encoding="utf-8"))
            for begins, row in rows.items():
                text = _with_row(text, begins, row, getattr(judge_of(each), "AFTER", ""))
            pages[path] = text
    return pages


def _with_row(text: str, begins: str, row: str, after: str) -> str:
    """A page with one row of a table replaced, or put in below the rule of the table with the head `after`."""
    lines = text.split("\n")
    there = [number for number, line in enumerate(lines) if line.startswith(begins)]
    if there:
        lines[there[0]] = row
    elif after in lines:
        lines.insert(lines.index(after) + 2, row)
    else:
        raise ValueError(f"no row begins with {begins!r}, and no table has the head {after!r}")
    return "\n".join(lines)


def _between(text: str, name: str, made: Callable[[], str]) -> str:
    """The text with something else between its marks, if it has them."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if begin not in text:
        return text
    return replaced(text, begin, end, made())


def _claims_text(each: Experiment, document: dict[str, Any] | None) -> str:
    told = "no results are committed." if document is None else f"{run_line(document['run'])}."
    return f"{claims_table(claims_of(each, document))}\n\n{told[0].upper()}{told[1:]}"


def _tables_text(each: Experiment, document: dict[str, Any] | None) -> str:
    judge = judge_of(each)
    if document is None or judge is None:
        return "No results are committed."
    return str(judge.tables(document))


def _named_tables(each: Experiment, document: dict[str, Any] | None) -> dict[str, str]:
    """Tables that stand apart in a README, by the name in their marks: `named_tables` of a judge that has it."""
    made = getattr(judge_of(each), "named_tables", None)
    return {} if document is None or made is None else dict(made(document))


def page() -> str:
    """RESULTS.md."""
    rows: list[tuple[str, ...]] = []
    sections = []
    total: Counter[str] = Counter()
    for each in CATALOGUE:
        document = results_of(each)
        claims = claims_of(each, document)
        numbers = counts(claims)
        total.update(numbers)
        cells = (str(numbers.get(verdict, "")) for verdict in VERDICTS)
        rows.append((f"[{each.name}]({each.name}/README.md)", each.question, *cells))
        sections.append(_section(each, document, claims))
    rows.append(("all", "", *(str(total[verdict]) for verdict in VERDICTS)))
    head = [
        "# Results of all experiments",
        "",
        "This page is made by `python experiments/results.py` from the results that are committed; nothing on it is written by",
        "hand. A verdict is worked out from an experiment's `results.json` by its `judge.py`. A claim that fails stays in,",
        'marked. "Not checked" says that nothing was compared, and why. Seeds are fixed in advance, and further ones change no',
        "verdict.",
        "",
        table(("experiment", "question", *VERDICTS), rows),
    ]
    return "\n".join(["\n".join(head), *sections]) + "\n"


def site_page() -> str:
    """The page as the documentation shows it: its links begin one folder higher."""
    return re.sub(r"\]\((?!http|#)([^)]+)\)", r"](../experiments/\1)", page())


def _section(each: Experiment, document: dict[str, Any] | None, claims: Sequence[Claim]) -> str:
    lines = ["", f"## {each.name}", "", _relinked(finding_of(each), each.name)]
    if claims:
        lines += ["", claims_table(claims)]
    if document is not None:
        lines += ["", f"*{run_line(document['run'])}*"]
    else:
        reason = f": {each.why}" if each.why else ""
        lines += ["", f"*No results are committed{reason}. The figures of its README are as printed at that time.*"]
    return "\n".join(lines)


def _relinked(text: str, folder: str) -> str:
    """Links from a README, as seen from the folder above."""
    return re.sub(r"\]\((?!http|#)([^)]+)\)", rf"]({folder}/\1)", text)


def quick_page(some: Sequence[Experiment], outcomes: dict[str, str], taken_s: float) -> str:
    """What a check that all runs prints: no claim is compared.

    Args:
        some: the experiments. outcomes: by name, what became of each. taken_s: by all.
    """
    lines = [
        (each.name, outcomes[each.name], f"{len(unchecked(claims_of(each, None), QUICK_COMPARES))} not checked")
        for each in some
    ]
    made = table(("experiment", "small version", "claims"), lines)
    return "\n".join([made, "", f"{taken_s:.0f} s. Nothing was compared, and nothing is kept."])
