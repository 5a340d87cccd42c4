"""A page of parsim in a real browser, with everything that goes wrong in it noted. Needs Chromium and playwright."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium")


@dataclass(kw_only=True)
class Visit:
    """Attributes: expect: of playwright. problems: console messages, errors and dialogs. requests: what was fetched."""

    browser: Any
    expect: Any
    width: int
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def tab(self, url: str) -> Any:
        """A new page that has told that it is drawn."""
        page = self.browser.new_page(viewport={"width": self.width, "height": 900})
        page.on("console", lambda message: self.problems.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", lambda dialog: self.problems.append(f"dialog {dialog.message}"))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(url)
        page.wait_for_selector("body[data-ready]", state="attached")
        return page


@contextlib.contextmanager
def visiting(width: int) -> Iterator[Visit]:
    """A browser whose windows are so wide."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with playwright.sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield Visit(browser=browser, expect=playwright.expect, width=width)
        browser.close()
