"""The tutorials, as their reader follows them: files and commands of a page, in order, in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
