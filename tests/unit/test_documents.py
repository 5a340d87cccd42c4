"""README and docs: what they show runs, what they name exists."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

from parsim.app.config import parse_config
from parsim.cli import build
from parsim.engines.scenario import Scenario, parse_scenario

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "examples" / "README.md"]
PAGES += [*sorted(ROOT.glob("hardware_profiles/*.md")), *sorted(ROOT.glob("experiments/**/README.md"))]
HAND_WRITTEN = [page for page in PAGES if page.parent.name != "experiments"]
GOLDEN = ROOT / "tests" / "golden" / "answer.txt"
REST = {"model.name": "mlp", "cluster.profile": "dgx1-v100-32gb", "training.global_batch": "64"}
"""What a part of a run file may leave to the rest of it."""
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


# --- commands ----------------------------------------------------------------------------------------------------------


def commands(text: str) -> Iterator[str]:
    """`parsim ...`, in blocks (indented or fenced) and in running text."""
    fenced = re.compile(r"```.*?```", re.DOTALL)
    blocks = "\n".join([*fenced.findall(text), *re.findall(r"^    .*$", text, re.MULTILINE)])
    yield from re.findall(r"^(?:    |\$ )?((?:\.venv/bin/)?parsim [a-z].*)$", blocks, re.MULTILINE)
    yield from (found.replace("\n", " ") for found in re.findall(r"`(parsim [a-z][^`]*)`", fenced.sub("", text)))


def words_of(command: str) -> list[str]:
    """Without the comment behind it, and without `...` for what is left open."""
    told = re.split(r"\s{2,}|\s#\s", command)[0]
    return [word for word in shlex.split(told)[1:] if word != "..."]


ALL_COMMANDS = sorted({(name_of(page), command) for page in PAGES for command in commands(page.read_text(encoding="utf-8"))})


def test_the_pages_show_commands() -> None:
    assert len(ALL_COMMANDS) > 60


@pytest.mark.parametrize(("page", "command"), ALL_COMMANDS)
def test_commands_have_options_that_exist(page: str, command: str) -> None:
    """Parsed by the command line's own parser and not run. A text may leave out what a command requires."""
    command_line: Any = typer.main.get_command(build())
    words = words_of(command)
    while hasattr(command_line, "commands") and words and not words[0].startswith("-"):
        name = words.pop(0)
        assert name in command_line.commands, f"{page}: {command}: no command {name}"
        command_line = command_line.commands[name]
    try:
        command_line.make_context("parsim", [*words])
        problem = ""
    except USAGE_ERROR as error:
        # `parsim plan --certify` in running text names an option, not a whole question
        in_part = "Missing" in type(error).__name__ or (len(words) == 1 and "requires an argument" in str(error))
        problem = "" if in_part else str(error)
    assert not problem, f"{page}: {command}: {problem}"


BROUGHT = {
    r"\.\.\.|\b(?<!/)[A-Z]{3,}[A-Z_]*\b": "a name that stands for the reader's own file or folder",
    r"nccl|gather\.txt|-nodes\.txt|topo\.txt|machine\.xml|my-machine|our-network|mine\.json": "a file of another tool",
    r"trace\.json|report\.sqlite|ds_config": "a file of another tool",
    r"my_extensions|nets:|segmentation": "code that the page describes",
    r"runs/": "a folder of an earlier sweep",
    r"^(\.venv/bin/)?parsim (run|calibrate|validate|demo|doctor)\b": "measures or trains on this machine",
}
"""What the reader brings to a command, by a pattern of it. All others are run."""


def complete(page: Path) -> list[str]:
    """The commands of a page of docs/ that run as they stand, in its order; `parsim cost --explain` names an option."""
    found = commands(page.read_text(encoding="utf-8"))
    needs = re.compile("|".join(BROUGHT))
    whole = [command for command in dict.fromkeys(found) if not re.fullmatch(r"\S* [a-z]+( --[-a-z]+)?", command)]
    return [command for command in whole if not needs.search(command)]


RUNNABLE = {page: complete(page) for page in PAGES if page.parent.name == "docs" and not page.stem.startswith("tutorial")}
"""Those of the tutorials are run by tests/unit/test_documents.py."""
ASKED = [
    (page, command) for page, every in RUNNABLE.items() for command in every if words_of(command)[0] in ("plan", "simulate")
]


class ReachedSearch(Exception):
    """A question was understood, and its model and machine were loaded."""


def test_pages_show_commands_that_run() -> None:
    assert len(ASKED) >= 8
    assert sum(map(len, RUNNABLE.values())) >= 14
    assert all(any(re.search(need, command) for _, command in ALL_COMMANDS) for need in BROUGHT)


@pytest.mark.parametrize(("page", "command"), ASKED, ids=lambda value: value if isinstance(value, str) else value.stem)
def test_printed_questions_are_understood(page: Path, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As printed, up to the search: what is missing or contradicts itself is an error before it."""

    def reached(*_: object, **__: object) -> None:
        raise ReachedSearch

    monkeypatch.setattr("parsim.app.ask.search_plans", reached)
    monkeypatch.setattr("parsim.app.ask.fixed_plan", reached)
    words = words_of(command)
    if "--out" in words:
        words[words.index("--out") + 1] = str(tmp_path / "out")
    monkeypatch.chdir(ROOT)
    with pytest.raises(ReachedSearch):
        typer.main.get_command(build())(words, standalone_mode=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, every in RUNNABLE.items() if every], ids=lambda page: page.stem)
def test_printed_commands_run(page: Path, tmp_path: Path) -> None:
    """In the order of the page, in one folder, from which the repository's own files can be reached."""
    for name in ("tests", "examples", "hardware_profiles"):
        (tmp_path / name).symlink_to(ROOT / name)
    for command in RUNNABLE[page]:
        words = [sys.executable, "-m", "parsim", *words_of(command)]
        done = subprocess.run(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stderr}"


# --- links -------------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Of the headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        leads = (page.parent / path).resolve() if path else page
        assert leads.exists(), f"{name_of(page)} links to {target}"
        assert not anchor or leads.suffix != ".md" or anchor in anchors(leads), f"{name_of(page)} links to {target}"


# --- run files and scenarios -------------------------------------------------------------------------------------------

TOML = [
    pytest.param(page, block, id=f"{name_of(page)}-{number}")
    for page in HAND_WRITTEN
    for number, block in enumerate(re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
]


@pytest.mark.parametrize(("page", "block"), TOML)
def test_files_have_keys_that_exist(page: Path, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a run file are checked with a model, a cluster and a batch of their own beside them."""
    given: dict[str, Any] = tomllib.loads(block)
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    beside = re.findall(r"```python\n(# nets.py\n.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "nets.py").write_text("".join(beside), encoding="utf-8")
    if not {"model", "cluster", "training", "plan", "software"} & set(given):
        assert isinstance(parse_scenario(block), Scenario)
        return
    missing = {key: value for key, value in REST.items() if key.partition(".")[2] not in given.get(key.partition(".")[0], {})}
    if "cluster" in given:
        missing.pop("cluster.profile", None)
    config = parse_config(block, [f"{key}={value}" for key, value in missing.items()], folder=tmp_path, calls_model=False)
    assert set(given) <= config.model_fields_set


# --- Python ------------------------------------------------------------------------------------------------------------


def test_the_first_question_of_the_readme_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """The block runs, and the text below it is the beginning of what it prints, with the first lines wrapped."""
    document = Sybil(parsers=[PythonCodeBlockParser()], pattern="README.md").parse(ROOT / "README.md")
    first, *others = document.examples()
    first.evaluate()
    printed = capsys.readouterr().out
    assert printed.startswith(GOLDEN.read_text(encoding="utf-8"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"```text\n(.*?)\.\.\.\n```", readme, re.DOTALL)[0]
    assert " ".join(printed.split()).startswith(" ".join(shown.split()))
    cells = re.findall(r"`(mb=[^`]*|[\d.]+% of [\d.]+%)`", readme)
    assert len(cells) == 2, "the cells that are explained below it"
    assert all(cell in shown for cell in cells)
    assert len(others) == 1, "the other one trains: tests/execute/test_api_run.py"


def test_every_target_that_make_lists_is_there_once() -> None:
    """What `make help` prints, and what .PHONY declares, are targets of one recipe each."""
    text = (ROOT / "Makefile").read_text()
    listed = re.findall(r"^#   make (\S+)", text, re.MULTILINE)
    declared = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)[0].split()
    targets = [name for line in re.findall(r"^([a-z][a-z -]*):(?!=)", text, re.MULTILINE) for name in line.split()]
    assert len(listed) > 10
    assert sorted(targets) == sorted(set(targets)) == sorted(declared)
    assert set(listed) <= set(targets)


# The tutorials, as their reader follows them: files and commands of a page, in order, in an empty folder.

TUTORIALS = sorted(ROOT.glob("docs/tutorial-*.md"))


def followed(page: Path, folder: Path) -> list[str]:
    """Write the page's files, run its commands, and return what they printed."""
    text = page.read_text(encoding="utf-8")
    for name, content in re.findall(r"```(?:python|toml)\n# (\S+\.(?:py|toml))\n(.*?)```", text, re.DOTALL):
        (folder / name).write_text(content, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = []
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line)
            if words[0] == "parsim":
                words.insert(0, "python")
                words.insert(1, "-m")
            words = [sys.executable if word == "python" else word for word in words]
            done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{line}\n{done.stderr}"
            printed.append(done.stdout)
    return printed


def test_there_are_tutorials_and_their_pictures_exist() -> None:
    assert len(TUTORIALS) >= 3
    for page in TUTORIALS:
        for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / picture).is_file(), f"{page.name} shows {picture}"
        assert page.read_text(encoding="utf-8").splitlines()[-1].startswith("!["), f"{page.name} does not end in a picture"


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_prints_what_it_says(page: Path, tmp_path: Path) -> None:
    """Every command runs; what the page quotes of the first answer (`> ...`) is what it prints."""
    printed = " ".join(followed(page, tmp_path)[0].split())
    quoted = [line.removeprefix("> ") for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("> ")]
    for sentence in filter(None, re.split(r"; | \.\.\. ", " ".join(quoted))):
        assert sentence in printed


# The scripts of `examples/`: all are listed, and all run.

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))

PRINTS = {
    "hugging_face.py": "tokens/s; fits with probability",
    "kueue.py": '"kueue.x-k8s.io/queue-name": "gpus"',
    "large_models.py": (EXAMPLES.parent / "docs" / "large-models.md").read_text(encoding="utf-8"),
    "own_module.py": "optimizer_state",
    "run_and_compare.py": "loss:",
    "skypilot.py": "8 x H100: ",
    "watch_training.py": "measured",
    "what_if.py": "ms disturbed",
    "which_cluster.py": "samples/s per GPU",
    "which_plan.py": "Where the",
}


def test_the_readme_lists_every_script_and_the_tests_run_it() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    assert sorted(PRINTS) == SCRIPTS
    assert [name for name in SCRIPTS if f"`{name}`" not in listed] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_prints_its_answer(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the torch extra")
    if name == "hugging_face.py":
        pytest.importorskip("transformers", reason="needs the hf extra")
    environment = {**os.environ, "PARSIM_HOME": str(tmp_path / "home"), "PARSIM_MODEL_CACHE": "off"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=900, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert PRINTS[name] in done.stdout
