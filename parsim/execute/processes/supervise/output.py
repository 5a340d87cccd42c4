"""What the ranks of an attempt write to stdout and stderr: into files, read by the launcher as they grow."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from parsim.execute.processes.supervise.last_words import read_last_words

_FRAME = re.compile(r'File "(?P<path>.*)", line (?P<line>\d+) in (?P<function>.*)')


@dataclass(slots=True, kw_only=True)
class RankOutput:
    """The files below `folder` (RANK/stdout.log, RANK/stderr.log), and how far they were relayed."""

    folder: Path
    on_line: Callable[[str], None] | None
    read_bytes: dict[Path, int] = field(default_factory=dict)

    def paths(self, rank: int) -> tuple[Path, Path]:
        """Of stdout and stderr of a rank."""
        return self.folder / str(rank) / "stdout.log", self.folder / str(rank) / "stderr.log"

    @property
    def words(self) -> Path:
        """The file of all ranks' last words."""
        return self.folder / "last-words"

    def last_words(self, rank: int) -> str:
        """What the rank said when it failed; "" if nothing."""
        return read_last_words(self.words, rank)

    def relay(self) -> None:
        """Hand over the complete lines that are new."""
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
        """The last line this rank wrote to stderr, else to stdout; "" if it wrote nothing."""
        return next((line for path in reversed(self.paths(rank)) if (line := _last_line(path))), "")

    def line_with(self, rank: int, text: str) -> str:
        """The first line of this rank that has the text; "" if none has."""
        lines = (line.strip() for path in reversed(self.paths(rank)) for line in _lines(path))
        return next((line for line in lines if text in line), "")

    def innermost_frame(self, rank: int) -> str:
        """Where the rank's main thread was when faulthandler last wrote a traceback: `model.py:12 in forward`; "" if never."""
        try:
            text = self.paths(rank)[1].read_text(errors="replace")
        except OSError:
            return ""
        start = max(text.rfind("Current thread"), text.rfind("Thread 0x"), 0)
        found = _FRAME.search(text, start)
        return f"{Path(found['path']).name}:{found['line']} in {found['function']}" if found else ""


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _last_line(path: Path) -> str:
    """The last line of a file that is not blank, or the one that names a crash of the interpreter; "" without one."""
    lines = [line.strip() for line in _lines(path) if line.strip()]
    crash = [line for line in lines if line.startswith("Fatal Python error:")]
    return crash[-1] if crash else lines[-1] if lines else ""
