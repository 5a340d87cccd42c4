"""explorer.html: a sweep as one self-contained page, with plotly.js inside and a policy that forbids every request.

All texts of the user are data: the script sets them as text, and escapes them where plotly would read markup.
"""

from __future__ import annotations

import html
import importlib.resources
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from parsim.files import finite, write_text_atomically
from parsim.report.explorer.columns import ExplorerData, document_of

LARGEST_BYTES = 6_000_000
"""Of the page; plotly.js alone has 4.8 MB."""


def write_explorer_page(data: ExplorerData, path: Path) -> Path:
    """Write the page, atomically. Returns its path.

    Args:
        data: of the sweep. path: of the page.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, explorer_html(data))
    return path


def explorer_html(data: ExplorerData) -> str:
    """The whole page, at most `LARGEST_BYTES`, and it says what it leaves out.

    With too many points it has the timelines of every second, third, ... or of none; then it shows every second, third, ...

    Args:
        data: of the sweep.
    """
    script = get_plotlyjs().replace("</script", "<\\/script")
    every, sketched = 1, 1
    while True:
        page = _page(data.title, document_of(data, every, sketched), script)
        if len(page.encode()) <= LARGEST_BYTES:
            return page
        if sketched:
            sketched = 2 * sketched if sketched < min(64, len(data.rows)) else 0
        else:
            every += max(1, every // 2)


def _page(title: str, document: Mapping[str, Any], plotly_js: str) -> str:
    text = json.dumps(finite(document), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    text = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{html.escape(title)}</title><style>{_file('explorer.css')}</style></head>\n"
        f"<body>{_file('explorer.html')}"
        f'<script type="application/json" id="sweep">{text}</script>\n'
        f"<script>{plotly_js}</script>\n<script>{_file('figures.js')}</script>\n<script>{_file('explorer.js')}</script>\n"
        "</body></html>\n"
    )


def _file(name: str) -> str:
    return importlib.resources.files("parsim.report.explorer").joinpath(name).read_text("utf-8")
