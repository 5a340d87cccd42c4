"""Files of others are read within bounds; files of ours are written whole or not at all."""

from __future__ import annotations

import errno
import gzip
import json
import math
import os
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from parsim import files
from parsim.app.run_folder import new_folder
from parsim.errors import PlanError
from parsim.files import (
    finite,
    make_private,
    parse_json,
    parse_toml,
    read_regular,
    reading,
    unpacked,
    write_atomically,
    write_json_atomically,
    write_problem,
    write_text_atomically,
)
from parsim.records import check_types


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        "[Infinity]",
        "1e999",
        "-1e9999",
        "9" * 26,
        "[" * 101 + "]" * 101,
        "[" * 10**5,
        '"\\ud800"',
        b"\xff",
        b'"\xed\xa0\x80"',
        "",
    ],
)
def test_what_json_has_no_words_for_is_refused(text: str | bytes) -> None:
    with pytest.raises(json.JSONDecodeError):
        parse_json(text)


def test_what_looks_like_it_is_read() -> None:
    assert parse_json('{"sha": "e123", "long": "99999999999999999999999999999", "small": 1e-300, "pair": "\\ud83d\\ude00"}')
    assert math.isnan(parse_json("NaN", allow_nan=True))


@pytest.mark.parametrize("text", ["a = " + "9" * 26, "a = " + "9" * 5000, "a = " + "[" * 5000, "a = 1\na = 2"])
def test_toml_within_the_same_bounds(text: str) -> None:
    with pytest.raises(tomllib.TOMLDecodeError):
        parse_toml(text)
    with pytest.raises(tomllib.TOMLDecodeError, match="characters"):
        parse_toml("#" * (2**20 + 1))


def test_only_regular_files_of_bounded_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        read_regular(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        read_regular(Path("/dev/zero"))
    (tmp_path / "large").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="100 bytes, more than the 99"):
        read_regular(tmp_path / "large", 99)
    with pytest.raises(OSError, match="directory"):
        read_regular(tmp_path)


def test_a_small_archive_does_not_unpack_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST_BYTES", 10_000)
    assert unpacked(gzip.compress(b"x" * 10_000)) == b"x" * 10_000
    with pytest.raises(ValueError, match="unpacks to more"):
        unpacked(gzip.compress(b"x" * 10_001))


def test_whatever_goes_wrong_while_reading_is_one_message() -> None:
    for wrong in (lambda: {}["a"], lambda: [][3], lambda: 1 / 0, lambda: int("x"), lambda: None.a):  # type: ignore[attr-defined]
        with (
            pytest.raises(PlanError, match=r"^it is not a plan: .*; plan again$"),
            reading("it is not a plan", PlanError, "plan again"),
        ):
            wrong()
    with pytest.raises(KeyboardInterrupt), reading("", PlanError, ""):
        raise KeyboardInterrupt


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "result"
    path.write_bytes(b"old")

    def fail(file: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left on device") as caught:
        write_atomically(path, fail, force=True)
    assert caught.value.filename == str(path), "whoever reports it can name the file"
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original: Callable[..., Any] = Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode="r", **more: original(Path("/dev/full"), mode, **more))
    with pytest.raises(OSError, match="No space left") as caught:
        write_text_atomically(tmp_path / "config.toml", "x" * 10**6)
    assert caught.value.filename == str(tmp_path / "config.toml")


def test_json_is_written_without_words_that_json_has_not(tmp_path: Path) -> None:
    write_json_atomically(tmp_path / "a.json", {"loss": [1.0, float("nan"), -math.inf], "b": (1, True, None)})
    assert json.loads((tmp_path / "a.json").read_text()) == {"loss": [1.0, None, None], "b": [1, True, None]}
    assert finite({1: float("inf")}) == {"1": None}


@dataclass(frozen=True)
class Inner:
    name: str
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outer:
    number: float
    inner: Inner
    kind: Literal["a", "b"] = "a"
    table: Mapping[str, int] | None = None


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (Outer(1, Inner("x", (1, 2)), "b", {"a": 1}), ""),
        (Outer(1.5, Inner("x")), ""),
        (Outer(float("nan"), Inner("x")), r"outer\.number: expected a finite number, got nan"),
        (Outer(True, Inner("x")), r"outer\.number: expected a finite number, got True"),
        (Outer(2**63, Inner("x")), r"outer\.number: expected a whole number"),
        (Outer(1, Inner("x", (1, "2"))), r"outer\.inner\.sizes\.1: expected a whole number, got '2'"),  # type: ignore[arg-type]
        (Outer(1, "x"), r"outer\.inner: expected a Inner, got 'x'"),  # type: ignore[arg-type]
        (Outer(1, Inner("x"), "c"), r"outer\.kind: expected one of 'a', 'b', got 'c'"),  # type: ignore[arg-type]
        (Outer(1, Inner("x"), "a", {"a": None}), r"outer\.table\.a: expected a whole number"),  # type: ignore[dict-item]
    ],
)
def test_records_hold_what_their_annotations_say(record: Outer, said: str) -> None:
    if not said:
        check_types(record, "outer")
        return
    with pytest.raises(ValueError, match=said):
        check_types(record, "outer")


def test_a_file_is_locked_by_one_process_and_a_file_system_without_locks_holds_nobody_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Lustre that is mounted without locks refuses them: no calibration could begin there, as if another one were running."""
    path = tmp_path / "file"
    with path.open("w") as one, path.open("w") as other:
        assert files.lock(one.fileno())
        assert not files.lock(other.fileno())
        assert not files.lock(other.fileno(), sure=True)

    def refused(handle: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", refused)
    with path.open("w") as one, path.open("w") as other:
        assert files.lock(one.fileno())
        assert files.lock(other.fileno(), waits=True)
        assert not files.lock(one.fileno(), sure=True), "what another process may use is not removed"
    alone = pytest.importorskip("calibration.rounds.turns").alone  # needs torch
    profile = tmp_path / "mine.json"
    with alone(profile), alone(profile):
        pass


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "the disk is full: make room"),
        (errno.EDQUOT, "your quota of the disk is used up"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EROFS, "it may not be written (Read-only file system): make it writable"),
        (errno.EACCES, "it may not be written (Permission denied): make it writable"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_why_a_file_could_not_be_written_follows_from_the_error_number(tmp_path: Path, number: int, said: str) -> None:
    error = OSError(number, os.strerror(number))
    assert said in write_problem(error, tmp_path)
    wrapped = RuntimeError("PytorchStreamWriter failed writing file")
    wrapped.__context__ = error  # as C++ leaves it
    assert said in write_problem(wrapped, tmp_path)


def test_a_folder_that_was_moved_is_no_full_disk(tmp_path: Path) -> None:
    moved = tmp_path / "run"
    with pytest.raises(OSError, match="No such file") as caught:
        write_text_atomically(moved / "a", "b")
    assert "was moved or removed" in write_problem(caught.value, moved)


def test_a_run_folder_is_for_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_private(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    (tmp_path / "shared").mkdir(0o755)
    make_private(tmp_path / "shared")
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o755
    assert stat.S_IMODE(new_folder(None, "mlp").path.stat().st_mode) == 0o700
