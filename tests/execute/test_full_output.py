"""A rank whose output cannot be written still ends by itself, with its record; and tells why where there is no room for one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from parsim.errors import RankLostError
from parsim.execute.processes.group import MOST_SAID, error_path, read_error
from parsim.execute.processes.launch import launch
from parsim.execute.processes.output import ROOM_BYTES, LastWords, create_last_words, read_last_words

FULL = Path("/dev/full")
RANK = """
from parsim.execute.processes.group import worker_main

def run(path):
    raise ValueError("a fault of the rank")

worker_main(run)
"""


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full, whose writes fail as on a full disk")
def test_a_rank_whose_output_is_full_ends_with_status_1_and_its_record(tmp_path: Path) -> None:
    with FULL.open("w") as full:
        done = subprocess.run([sys.executable, "-c", RANK, str(tmp_path / "job.json")], stdout=full, stderr=full, check=False)
    assert done.returncode == 1
    found = read_error(error_path(tmp_path, 0))
    assert found is not None
    assert found.message == "a fault of the rank"


FULL_RANK = """
import os, resource
from pathlib import Path
from parsim.execute.processes.group import worker_main

def run(path):
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        Path(path).with_name("more").write_text("no room")

worker_main(run)
"""


@pytest.mark.xdist_group("launch")
def test_a_rank_that_can_write_no_file_tells_the_launcher_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its output nor its record can be written, as on a full disk."""
    (tmp_path / "full_rank.py").write_text(FULL_RANK)
    (tmp_path / "job.json").write_text("{}")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RankLostError) as caught:
        launch(tmp_path / "job.json", 2, module="full_rank")
    assert str(caught.value).startswith("rank 1 of 2 failed: OSError: [Errno 27] File too large")
    assert "(its traceback could not be written)" in str(caught.value)
    assert not error_path(tmp_path, 1).exists()


def test_last_words_are_those_of_their_rank(tmp_path: Path) -> None:
    path = tmp_path / "words"
    create_last_words(path, 3)
    first, last = LastWords(path, 0), LastWords(path, 2)
    assert first.say("a" * 100)
    assert first.say("better \U0001f600")
    assert last.say("\U0001f600" * MOST_SAID)
    assert not last.say("x" * ROOM_BYTES)
    assert read_last_words(path, 0) == "better \U0001f600"
    assert read_last_words(path, 1) == ""
    assert read_last_words(path, 2) == "\U0001f600" * MOST_SAID
    assert read_last_words(tmp_path / "nowhere", 0) == ""
    assert not LastWords().say("nobody listens")
