"""The kinds of files that can be imported, what each becomes, and how a file is recognised."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from parsim.errors import ImportedFileError, near_matches
from parsim.files import parse_json
from parsim.importers.deepspeed_config import is_deepspeed
from parsim.importers.lstopo_xml import is_lstopo
from parsim.importers.nsys_sqlite import is_nsys
from parsim.importers.source_file import SourceFile
from parsim.importers.topo_matrix import is_topo_matrix

Becomes = Literal["profile", "run", "timeline"]

SUFFIXES: Mapping[Becomes, tuple[str, str]] = {
    "profile": (".json", "PROFILE.json"),
    "run": (".toml", "RUN.toml"),
    "timeline": (".json.gz", "TIMELINE.json.gz"),
}
"""How the target's name ends, and an example."""

_SNIFFED = 2_000_000
_NCCL_ROW = re.compile(r"^.{0,200}?\d+\s+\d+\s+(?:half|float|double|bfloat16|u?int\d+|f8e\w+)\s+\S", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileKind:
    """One kind. recognises: whether a file is one, from its content. what: for people."""

    becomes: Becomes
    what: str
    recognises: Callable[[SourceFile], bool]


def _begins(source: SourceFile, *starts: str) -> bool:
    return source.data[:4096].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(tuple(start.encode() for start in starts))


def _is_nccl(source: SourceFile) -> bool:
    if _begins(source, "{"):
        return b'"results"' in source.data and b'"bus_bw"' in source.data
    return bool(_NCCL_ROW.search(source.text[:_SNIFFED]))


def _is_deepspeed(source: SourceFile) -> bool:
    if not _begins(source, "{") or len(source.data) > _SNIFFED:
        return False
    try:
        return is_deepspeed(parse_json(source.text))
    except (json.JSONDecodeError, ValueError):
        return False


KINDS: Mapping[str, FileKind] = {
    "nsys": FileKind(becomes="timeline", what="an SQLite export of Nsight Systems", recognises=is_nsys),
    "lstopo": FileKind(becomes="profile", what="the output of lstopo --of xml", recognises=is_lstopo),
    "kineto": FileKind(
        becomes="timeline",
        what="a trace of torch.profiler, .json or .json.gz",
        recognises=lambda source: _begins(source, "{", "[") and b'"traceEvents"' in source.data,
    ),
    "nccl-tests": FileKind(becomes="profile", what="the output of nccl-tests, text or JSON", recognises=_is_nccl),
    "topo": FileKind(
        becomes="profile",
        what="the output of nvidia-smi topo -m",
        recognises=lambda source: is_topo_matrix(source.text[:_SNIFFED]),
    ),
    "deepspeed": FileKind(becomes="run", what="a DeepSpeed JSON config", recognises=_is_deepspeed),
}
"""By the name that --kind takes, in the order in which they are tried."""


def kind_of(source: SourceFile, given: str | None) -> str:
    """The kind of a file: as given, or by its content.

    Args:
        source: the file. given: a key of KINDS (None: find out).

    Raises:
        ImportedFileError: an unknown kind, or a file that is none.
    """
    if given is not None:
        if given not in KINDS:
            raise ImportedFileError(f"kind = {given!r}{near_matches(given, KINDS)}; known: {', '.join(KINDS)}")
        return given
    for name, kind in KINDS.items():
        if kind.recognises(source):
            return name
    known = "; ".join(f"{name}: {kind.what}" for name, kind in KINDS.items())
    raise ImportedFileError(
        f"{source.path} is of no kind that parsim knows ({known}); name it with --kind if it is one of them"
    )
