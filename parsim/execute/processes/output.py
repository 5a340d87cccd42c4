"""What a launcher and its ranks have between them: their processes, the launch's folder, last words, output, progress.

So that no process outlives its launch, three mechanisms each cover one case. Every rank leads a session of its own, and its
children may lead others. The kernel kills a process when its parent dies (`die_with_parent`). The end of a launch kills all
descendants, found through /proc. It also kills all processes with the launch's mark in their environment, which finds those
whose parent is already gone. Leaves out: without /proc (macOS) only the first net and process groups remain.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import re
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parsim.files import lock

MARK_VARIABLE = "PARSIM_LAUNCH"
PARENT_VARIABLE = "PARSIM_PARENT"
_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5


def die_with_parent(parent: int) -> None:
    """Have this process killed (SIGKILL) as soon as process `parent` ends; at once if it has ended already. Must be called in a
    child whose parent started it from its main thread: the kernel's signal follows the thread."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        os._exit(1)

    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=watch, daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def descendants(roots: Collection[int]) -> set[int]:
    """All living processes below `roots` (without them)."""
    children: dict[int, list[int]] = {}
    for pid, parent in _living().items():
        children.setdefault(parent, []).append(pid)
    below: set[int] = set()
    frontier = list(roots)
    while frontier:
        for child in children.get(frontier.pop(), ()):
            if child not in below:
                below.add(child)
                frontier.append(child)
    return below


def marked(mark: str) -> set[int]:
    """All living processes that were started with PARSIM_LAUNCH=mark in their environment, without this one."""
    variable = f"{MARK_VARIABLE}={mark}".encode()
    return {pid for pid in _living() if variable in _variables(pid)} - {os.getpid()}


def rank_processes(root: int) -> dict[int, int]:
    """The processes of ranks below `root`, by rank. Of what a rank has started itself, and what has its variables, none."""
    parents = _living()
    ranks = {}
    for pid in descendants([root]):
        number = next((variable[5:] for variable in _variables(pid) if variable.startswith(b"RANK=")), b"")
        if number.isdigit():
            ranks[pid] = int(number)
    return {rank: pid for pid, rank in ranks.items() if ranks.get(parents.get(pid, 0)) != rank}


def _variables(pid: int) -> list[bytes]:
    """What a process was started with, NAME=VALUE each; nothing if it has just ended, or belongs to somebody else."""
    with contextlib.suppress(OSError):
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    return []


def _living() -> dict[int, int]:
    """Process number to parent, without zombies."""
    parents: dict[int, int] = {}
    if not _PROC.is_dir():
        return parents
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in ("Z", "X"):
                    parents[int(folder.name)] = int(parent)
    return parents


def kill_launch(roots: Collection[int], mark: str, within_s: float = 10.0) -> set[int]:
    """SIGKILL the processes `roots`, their groups, their descendants and everything marked; return what is still alive after
    that. Every root must be a child of this process that leads its own process group; the caller reaps it."""
    deadline = time.monotonic() + within_s
    while True:
        targets = descendants(roots) | marked(mark)
        for root in roots:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(root, signal.SIGKILL)
        for pid in targets:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not targets or time.monotonic() > deadline:
            return targets
        time.sleep(0.02)


def signal_name(number: int) -> str:
    """`SIGKILL`; "signal 40" for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# The folder of a launch: readable by its user alone, and gone when the launch is. A launcher that is killed cannot remove it.
# So every folder is locked by the process that made it, and the next launch removes those whose lock is free.


PREFIX = "parsim-launch-"
LOCK = "lock"
_NEW_S = 60.0
"""A folder as young as this may not have its lock yet."""


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder of mode 0700 below the system's temporary folder, removed at the end."""
    _remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with sole_user(folder / LOCK, make=True):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def sole_user(path: Path, *, make: bool = False) -> Iterator[bool]:
    """Hold the lock of a folder, or of a file (made if need be); False inside if another process holds it. The kernel frees it
    at this one's end. Of a file that is made: False inside unless this process surely holds it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC if make else os.O_RDONLY, 0o600)
    try:
        yield lock(handle, sure=make)
    finally:
        os.close(handle)


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if status.st_uid != os.getuid() or not folder.is_dir() or folder.is_symlink():
                continue
            if time.time() - status.st_mtime < _NEW_S and not (folder / LOCK).exists():
                continue
            with sole_user(folder / LOCK, make=True) as is_free:
                if is_free:
                    shutil.rmtree(folder, ignore_errors=True)


# What a rank says when it ends, in memory that it shares with the launcher: told even where no file can be written.
#
# The launcher makes the room before it starts the ranks, on the disk of its temporary folder. A rank maps it when it begins. So
# on a full disk, or under a limit of file sizes, neither a file nor a byte has to be added.
#
# Leaves out: ranks that somebody's own torchrun starts. They have their error record alone.


WORDS_VARIABLE = "PARSIM_LAST_WORDS"
_LENGTH = struct.Struct("<I")
ROOM_BYTES = 8192
"""For each rank."""


class LastWords:
    """A rank's own room. Without a launcher, nothing is kept."""

    def __init__(self, path: Path | None = None, rank: int = 0) -> None:
        self._map: mmap.mmap | None = None
        self._at = rank * ROOM_BYTES
        if path is not None:
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)

    def say(self, text: str) -> bool:
        """Leave the text, which replaces an earlier one; False where there is no room for it."""
        content = text.encode(errors="replace")
        if self._map is None or len(content) > ROOM_BYTES - _LENGTH.size:
            return False
        begin = self._at + _LENGTH.size
        _LENGTH.pack_into(self._map, self._at, 0)
        self._map[begin : begin + len(content)] = content
        _LENGTH.pack_into(self._map, self._at, len(content))  # last: a rank that is killed on the way has said nothing
        return True


def last_words(environment: Mapping[str, str] = os.environ) -> LastWords:
    path = environment.get(WORDS_VARIABLE)
    return LastWords(Path(path), int(environment.get("RANK", 0))) if path else LastWords()


def create_last_words(path: Path, nproc: int) -> None:
    path.write_bytes(bytes(nproc * ROOM_BYTES))


def read_last_words(path: Path, rank: int) -> str:
    try:
        content = path.read_bytes()[rank * ROOM_BYTES : (rank + 1) * ROOM_BYTES]
        (length,) = _LENGTH.unpack_from(content)
        return content[_LENGTH.size : _LENGTH.size + length].decode()
    except (OSError, struct.error, UnicodeDecodeError):
        return ""


# Every rank's stdout and stderr, each a file in the launch's folder.


_FRAME = re.compile(r'File "(?P<path>.*)", line (?P<line>\d+) in (?P<function>.*)')


@dataclass(slots=True, kw_only=True)
class RankOutput:
    """The files below `folder` (RANK/stdout.log, RANK/stderr.log), and how far they were relayed."""

    folder: Path
    on_line: Callable[[str], None] | None
    read_bytes: dict[Path, int] = field(default_factory=dict)

    def paths(self, rank: int) -> tuple[Path, Path]:
        return self.folder / str(rank) / "stdout.log", self.folder / str(rank) / "stderr.log"

    @property
    def words(self) -> Path:
        return self.folder / "last-words"

    def last_words(self, rank: int) -> str:
        return read_last_words(self.words, rank)

    def relay(self) -> None:
        if self.on_line is None:
            return
        for path in sorted(self.folder.glob("*/std*.log")):
            with path.open("rb") as file:
                start = self.read_bytes.get(path, 0)
                file.seek(start)
                complete, newline, _ = file.read().rpartition(b"\n")
            self.read_bytes[path] = start + len(complete) + len(newline)
            if newline:
                for line in complete.decode(errors="replace").split("\n"):
                    self.on_line(line)

    def last_line(self, rank: int) -> str:
        """The last line that is not blank, of stderr, else of stdout, or the one that names a crash of the interpreter; "" if
        the rank wrote nothing."""
        for path in reversed(self.paths(rank)):
            lines = [line.strip() for line in _text(path).splitlines() if line.strip()]
            crashes = [line for line in lines if line.startswith("Fatal Python error:")]
            if lines:
                return (crashes or lines)[-1]
        return ""

    def line_with(self, rank: int, text: str) -> str:
        """The first line of this rank that has the text; "" if none has."""
        lines = (line.strip() for path in reversed(self.paths(rank)) for line in _text(path).splitlines())
        return next((line for line in lines if text in line), "")

    def innermost_frame(self, rank: int) -> str:
        """Where the rank's main thread was when faulthandler last wrote a traceback: `model.py:12 in forward`; "" if never."""
        text = _text(self.paths(rank)[1])
        start = max(text.rfind("Current thread"), text.rfind("Thread 0x"), 0)
        frame = _FRAME.search(text, start)
        return f"{Path(frame['path']).name}:{frame['line']} in {frame['function']}" if frame else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# How a rank tells its parent how far it is: one line of stdout, marked, that carries one JSON value.
#
# Whatever else a rank prints (warnings of libraries, its own errors) is not marked, so it is never taken for progress.


MARK = "parsim-progress "

WARNING = "warning"
"""The name under which a rank tells a warning."""

Progress = str | Mapping[str, Any]
"""A text, or named values such as {"step": "3/10", "loss": "1.23"}."""


def write_progress(progress: Progress) -> None:
    print(progress_line(progress), flush=True)


def progress_line(progress: Progress) -> str:
    return MARK + json.dumps(progress)


def read_progress_line(line: str) -> Progress | None:
    """What a rank wrote with `write_progress`; None for any other line. Raises ValueError: a marked line without JSON."""
    progress: Progress | None = json.loads(line.removeprefix(MARK)) if line.startswith(MARK) else None
    return progress


def progress_text(progress: Progress) -> str:
    """Progress for people: "step 3/10, loss 1.23"."""
    if isinstance(progress, str):
        return progress
    return ", ".join(f"{name} {value}" for name, value in progress.items())


def relayed(on_text: Callable[[str], None], on_warning: Callable[[str], None] | None = None) -> Callable[[str], None]:
    """For the `on_line` of `launch`: hands the text of every line of progress to `on_text`, and drops all other lines.
    `on_warning` receives every warning once, whichever ranks gave it; left out: warnings are progress."""
    warned: set[str] = set()

    def on_line(line: str) -> None:
        progress = read_progress_line(line)
        if progress is None:
            return
        if on_warning is None or not isinstance(progress, Mapping) or WARNING not in progress:
            on_text(progress_text(progress))
        elif (text := str(progress[WARNING])) not in warned:
            warned.add(text)
            on_warning(text)

    return on_line
