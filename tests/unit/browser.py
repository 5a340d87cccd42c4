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
PATIENCE_MS = 120_000
"""A busy machine takes its time to load 5 MB of a page."""
HEIGHTS = {390: 844, 1280: 900, 2560: 1440}
"""Of the first screen, by its width."""
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium")


PROBLEMS_OF_ACCESS = """() => {
  const parts = (colour) => colour.match(/[0-9.]+/g).map(Number);
  const channel = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const light = (rgb) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, place) => sum + weight * channel(rgb[place] / 255), 0);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parts(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, style = getComputedStyle(element);
    const said = walker.currentNode.textContent.trim();
    if (!said || !element.getClientRects().length || element.closest(".main-svg, script, style, noscript, .skip")) continue;
    const [a, b] = [light(parts(style.color)), light(ground(element))].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found.push(`contrast ${ratio.toFixed(2)}: ${said.slice(0, 40)}`);
  }
  for (const text of document.querySelectorAll(".xtick text, .ytick text, .g-xtitle text, .g-ytitle text, .annotation-text")) {
    const ratios = [light(parts(getComputedStyle(text).fill)), light(ground(text.closest(".plot")))].sort((x, y) => y - x);
    if ((ratios[0] + 0.05) / (ratios[1] + 0.05) < 4.5) found.push(`contrast of ${text.textContent}`);
  }
  for (const control of document.querySelectorAll("button, input, select, summary, a[href]")) {
    const label = control.labels && control.labels.length ? control.labels[0].textContent : control.getAttribute("aria-label");
    if (!(label || control.textContent).trim()) found.push(`no name: ${control.outerHTML.slice(0, 60)}`);
    if (control.tabIndex < 0) found.push(`not reached by Tab: ${control.outerHTML.slice(0, 60)}`);
  }
  if (document.querySelector(".plot:not([aria-label])")) found.push("a plot without a name");
  if (document.querySelectorAll("h1").length !== 1) found.push("not one h1");
  if (!document.documentElement.lang) found.push("no language");
  return found;
}"""
"""WCAG AA contrast of every visible text and axis, names of all controls and plots, and whether Tab reaches them."""


@dataclass(kw_only=True)
class Visit:
    """Attributes: expect: of playwright. problems: console messages, errors and dialogs. requests: what was fetched."""

    browser: Any
    expect: Any
    width: int
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def tab(self, url: str, scheme: str = "light") -> Any:
        """A new page that has told that it is drawn; the system prefers the colour scheme."""
        page = self.browser.new_page(viewport={"width": self.width, "height": HEIGHTS[self.width]}, color_scheme=scheme)
        page.set_default_timeout(PATIENCE_MS)
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
