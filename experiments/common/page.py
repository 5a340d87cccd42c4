"""RESULTS.md, and what stands between marks in every experiment's README, from the committed results."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.common.catalogue import CATALOGUE, FOLDER, Experiment, Part, every_part, recorded
from experiments.common.claims import VERDICTS, Claim, Judge, counts, unchecked
from experiments.common.markdown import replaced, table

PAGE = FOLDER / "RESULTS.md"
SITE_PAGE = FOLDER.parent / "docs" / "results.md"
"""The same page in the documentation."""
REFUTED_BY = "**What would refute it**"
NOT_RECORDED = "not recorded"
QUICK_COMPARES = "a small version compares nothing"


def judge_of(experiment: Experiment, part: Part) -> Judge | None:
    """The judge of a part: in `JUDGES` of its experiment's judge.py; None where it has none."""
    if not (experiment.folder / "judge.py").is_file():
        return None
    judge: Judge | None = importlib.import_module(f"experiments.{experiment.name}.judge").JUDGES.get(part.name)
    return judge


def results_of(part: Part) -> dict[str, Any] | None:
    """What is committed, None where nothing is. Results from before runs were recorded say less of their run."""
    document = recorded(part.name)
    if document is None:
        return None
    if not isinstance(document.get("run"), dict):
        document["run"] = {}
    for key in ("machine", "date", "seed"):
        if isinstance(document.get(key), (str, int)):
            document["run"].setdefault(key, document[key])
    return document


def claims_of(judge: Judge | None, document: dict[str, Any] | None) -> list[Claim]:
    """The claims of a part with their verdicts; without a document, and of a small version, nothing is compared."""
    if judge is None:
        return []
    claims = judge.claims({} if document is None else document)
    if document is None:
        return unchecked(claims, "no results are committed")
    return unchecked(claims, QUICK_COMPARES) if document["run"].get("quick") else claims


def finding_of(experiment: Experiment, part: Part | None = None) -> str:
    """The opening paragraph of an experiment's README, or of a part's section in it: one or two sentences."""
    text = (experiment.folder / "README.md").read_text(encoding="utf-8")
    if part is not None and len(experiment.parts) > 1:
        text = re.split(rf"^## {part.name}\n", text, flags=re.MULTILINE)[1]
    else:
        text = text.split("\n", 1)[1]
    paragraphs = [part.strip() for part in re.sub(r"<!-- .*? -->", "", text).split("\n\n") if part.strip()]
    return " ".join(paragraphs[0].split())


def claims_table(claims: Sequence[Claim]) -> str:
    """Markdown; failed claims stay in, marked."""
    marked = ((each.text, each.verdict if each.verdict == "met" else f"**{each.verdict}**", each.found) for each in claims)
    return table(("claim", "verdict", "found"), marked)


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


def pages_anew() -> dict[Path, str]:
    """Every page that is made from committed results, wholly or between marks: READMEs, pages that quote them, RESULTS.md."""
    pages = {PAGE: page(), SITE_PAGE: site_page()}
    for experiment, part in every_part():
        path = experiment.folder / "README.md"
        text = pages.get(path, path.read_text(encoding="utf-8"))
        judge, document = judge_of(experiment, part), results_of(part)
        if judge is None:
            continue
        sections = {f"claims of {part.name}": _claims_text(judge, document)}
        if document is not None:
            sections |= {} if judge.tables is None else judge.tables(document)
            sections |= {} if judge.finding is None else {f"finding of {part.name}": judge.finding(document)}
        for name, made in sections.items():
            begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
            if text.count(begin) != 1 or text.count(end) != 1:
                raise ValueError(f"{path} has not the marks of {name!r} once")
            text = replaced(text, begin, end, made)
        pages[path] = text
    return pages | quoting_pages()


def quoting_pages() -> dict[Path, str]:
    """Pages outside the experiments' folders with the rows that judges give them.

    A row that begins as one of these is replaced; one that is new stands first in the table whose head the judge names.
    """
    pages: dict[Path, str] = {}
    for experiment, part in every_part():
        document, judge = results_of(part), judge_of(experiment, part)
        if judge is None or judge.page_rows is None or document is None or document["run"].get("quick"):
            continue
        for name, rows in judge.page_rows(document).items():
            path = FOLDER.parent / name
            text = pages.get(path, path.read_text(encoding="utf-8"))
            for begins, row in rows.items():
                text = _with_row(text, begins, row, judge.after)
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


def _claims_text(judge: Judge, document: dict[str, Any] | None) -> str:
    told = "no results are committed." if document is None else f"{run_line(document['run'])}."
    return f"{claims_table(claims_of(judge, document))}\n\n{told[0].upper()}{told[1:]}"


def page() -> str:
    """RESULTS.md."""
    rows: list[tuple[str, ...]] = []
    sections = []
    total: Counter[str] = Counter()
    for experiment in CATALOGUE:
        sections += ["", f"## {experiment.name}", "", _relinked(finding_of(experiment), experiment.name)]
        for part in experiment.parts:
            document = results_of(part)
            claims = claims_of(judge_of(experiment, part), document)
            numbers = counts(claims)
            total.update(numbers)
            cells = (str(numbers.get(verdict, "")) for verdict in VERDICTS)
            anchor = f"#{part.name}" if len(experiment.parts) > 1 else ""
            rows.append((f"[{part.name}]({experiment.name}/README.md{anchor})", part.question, *cells))
            if len(experiment.parts) > 1:
                sections += ["", f"### {part.name}", "", _relinked(finding_of(experiment, part), experiment.name)]
            sections += ["", claims_table(claims)] if claims else []
            if document is not None:
                sections += ["", f"*{run_line(document['run'])}*"]
            else:
                why = f": {part.why}" if part.why else ""
                sections += ["", f"*No results are committed{why}. The figures of its README are as printed at that time.*"]
    rows.append(("all", "", *(str(total[verdict]) for verdict in VERDICTS)))
    head = [
        "# Results of all experiments",
        "",
        "This page is made by `python experiments/results.py` from the results that are committed; nothing on it is written by",
        "hand. A verdict is worked out from an experiment's `results.json` by its `judge.py`. A claim that fails stays in,",
        'marked. "Not checked" says that nothing was compared, and why. Seeds are fixed in advance, and further ones change no',
        "verdict. A command or a commit is that of the day of the run: files may have moved since.",
        "",
        table(("experiment", "question", *VERDICTS), rows),
    ]
    return "\n".join([*head, *sections]) + "\n"


def site_page() -> str:
    """The page as the documentation shows it: its links begin one folder higher."""
    return re.sub(r"\]\((?!http|#)([^)]+)\)", r"](../experiments/\1)", page())


def _relinked(text: str, folder: str) -> str:
    """Links from a README, as seen from the folder above."""
    return re.sub(r"\]\((?!http)#", rf"]({folder}/README.md#", re.sub(r"\]\((?!http|#)([^)]+)\)", rf"]({folder}/\1)", text))


def quick_page(parts: Sequence[tuple[Experiment, Part]], outcomes: dict[str, str], taken_s: float) -> str:
    """What a check that all runs prints, with what became of each part by name: no claim is compared."""
    lines = [
        (part.name, outcomes[part.name], f"{len(claims_of(judge_of(experiment, part), None))} not checked")
        for experiment, part in parts
    ]
    made = table(("experiment", "small version", "claims"), lines)
    return "\n".join([made, "", f"{taken_s:.0f} s. Nothing was compared, and nothing is kept."])
