"""What a rank says when it ends, in memory that it shares with the launcher: told even where no file can be written.

The launcher makes the room before it starts the ranks, on the disk of its temporary folder. A rank maps it when it begins.
So on a full disk, or under a limit of file sizes, neither a file nor a byte has to be added.

Leaves out: ranks that somebody's own torchrun starts. They have their error record alone.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path

WORDS_VARIABLE = "PARSIM_LAST_WORDS"
_LENGTH = struct.Struct("<I")
ROOM_BYTES = 8192
"""Of each rank."""


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
    """The room of this process."""
    path = environment.get(WORDS_VARIABLE)
    return LastWords(Path(path), int(environment.get("RANK", 0))) if path else LastWords()


def create_last_words(path: Path, nproc: int) -> None:
    """The room of `nproc` ranks, whose bytes are written and not left as a hole."""
    path.write_bytes(bytes(nproc * ROOM_BYTES))


def read_last_words(path: Path, rank: int) -> str:
    """What a rank has said; "" where it said nothing."""
    try:
        content = path.read_bytes()[rank * ROOM_BYTES : (rank + 1) * ROOM_BYTES]
        (length,) = _LENGTH.unpack_from(content)
        return content[_LENGTH.size : _LENGTH.size + length].decode()
    except (OSError, struct.error, UnicodeDecodeError):
        return ""
