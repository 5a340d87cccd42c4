"""The folder of a launch: readable by its user alone, and gone when the launch is, even if its process was killed.

A launcher that is killed cannot remove its folder. So every folder is locked by the process that made it, and the next
launch removes those whose lock is free.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from parsim.files import lock

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
        with locked(folder / LOCK):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold the lock of a file, made if need be; False inside unless this process holds it. The kernel frees it at its end.

    Raises:
        OSError: the file cannot be made.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield lock(handle, sure=True)
    finally:
        os.close(handle)


@contextlib.contextmanager
def sole_user(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder; False inside if another process holds it. The kernel frees it at this one's end."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield lock(handle)
    finally:
        os.close(handle)


def _remove_abandoned() -> None:
    """Folders of this user whose launcher was killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if found.st_uid != os.getuid() or not folder.is_dir() or folder.is_symlink():
                continue
            if time.time() - found.st_mtime < _NEW_S and not (folder / LOCK).exists():
                continue
            with locked(folder / LOCK) as is_free:
                if is_free:
                    shutil.rmtree(folder, ignore_errors=True)
