"""Hook of mkdocs: pages beside docs/ join the site, and links mean on the site what they mean in the repository.

README.md is the first page. What a page links to outside docs/ comes along, pages and files, under its path in the repository.
A link to a folder leads to its README, or becomes its name.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs/"
HOME = {"README.md": "index.md"}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCED = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add every file that a page of the site leads to."""
    waiting = ["README.md", *(DOCS + file.src_uri for file in files.documentation_pages())]
    seen = set(waiting)
    while waiting:
        name = waiting.pop()
        uri = site_uri(name)
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
        if not name.endswith(".md"):
            continue
        for target in targets(name, (ROOT / name).read_text("utf-8")):
            if target not in seen:
                seen.add(target)
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as the site has them."""
    del config
    return rewritten(markdown, repository_name(page.file.src_uri), files)


def site_uri(name: str) -> str:
    """Where a file of the repository lies on the site."""
    return HOME.get(name, name.removeprefix(DOCS))


def repository_name(uri: str) -> str:
    """The other way round."""
    back = {there: name for name, there in HOME.items()}
    return back.get(uri, uri if (ROOT / uri).is_file() and not (ROOT / DOCS / uri).is_file() else DOCS + uri)


def led_to(name: str, link: str) -> str:
    """The file of the repository that a link of another one means; "" for an address, an anchor, or what is not there."""
    path = link.partition("#")[0]
    if not path or re.match(r"[a-z]+:", path):
        return ""
    found = os.path.normpath(PurePosixPath(name).parent / path)
    if (ROOT / found).is_dir():
        found = f"{found}/README.md"
    return found if not found.startswith("..") and (ROOT / found).is_file() else ""


def targets(name: str, text: str) -> set[str]:
    """Files that a page links to."""
    return {found for match in LINK.finditer(FENCED.sub("", text)) if (found := led_to(name, match[3]))}


def rewritten(text: str, name: str, files: Files) -> str:
    def replaced(match: re.Match[str]) -> str:
        mark, label, link = match.groups()
        if re.match(r"[a-z]+:|#", link):
            return match[0]
        found, anchor = led_to(name, link), link.partition("#")[2]
        if not found or files.get_file_from_path(site_uri(found)) is None:
            return label
        way = os.path.relpath(site_uri(found), PurePosixPath(site_uri(name)).parent)
        return f"{mark}[{label}]({way}{f'#{anchor}' if anchor else ''})"

    parts = FENCED.split(text)
    return "".join(part if number % 2 else LINK.sub(replaced, part) for number, part in enumerate(parts))
