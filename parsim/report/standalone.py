"""The frame of a page that opens offline: its style, its data, plotly.js and its scripts stand in it once."""

from __future__ import annotations

import html
import importlib.resources

from parsim.errors import require

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
"""Forbids every request."""


def asset(name: str) -> str:
    """A file of `parsim/report/assets`."""
    return importlib.resources.files("parsim.report").joinpath("assets", name).read_text("utf-8")


def standalone_page(title: str, *, body: str, data: tuple[str, str], script: str) -> str:
    """A whole HTML page in the look of all pages (page.css, page.js).

    Args:
        title: a text, which is escaped. body: HTML. data: id of the element that the script reads, and its JSON without "<".
        script: name of the page's own asset.
    """
    require("plotly", "a page with figures")
    from plotly.offline import get_plotlyjs

    plotly_js = get_plotlyjs().replace("</script", "<\\/script")
    code = "".join(f"<script>{text}</script>\n" for text in (plotly_js, asset("page.js"), asset(script)))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{html.escape(title)}</title><style>{asset('page.css')}</style></head>\n"
        f'<body>{body}<script type="application/json" id="{data[0]}">{data[1]}</script>\n{code}</body></html>\n'
    )
