"""The pictures of the README and of the tutorials, as the report and the explorer draw them.

    make demo
    .venv/bin/python docs/pictures/make.py parsim-demo/report.html
    .venv/bin/python docs/pictures/make.py nvlink/explorer.html --curve nvlink
    .venv/bin/python docs/pictures/make.py measured/report.html --model nets:Reader --strategy adaptive --name measured
    .venv/bin/python docs/pictures/make.py tagger/report.html --model nets:Tagger --strategy dp --name own-module

The first writes predicted-and-measured.png beside this file: one plan of the demo, predicted and measured. The second writes
nvlink.png: the scaling curve of a sweep. The third and fourth write the last pictures of two
tutorials. Needs Chromium (`apt-get install chromium`).
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).with_name("predicted-and-measured.png")
WIDTH, HEIGHT, PIXELS_PER_POINT, MARGIN = 1000, 900, 1.5, 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("report", type=Path, help="report.html of `parsim demo`, or explorer.html")
    parser.add_argument("--model", default="vit_small", help="of the demo's trained models")
    parser.add_argument("--strategy", default="mp", help="of the plans that were trained")
    parser.add_argument("--name", default=PICTURE.stem, help="of the picture")
    parser.add_argument("--curve", metavar="NAME", help="of an explorer page instead: its scaling curve, as NAME.png")
    asked = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        parser.error("no Chromium found: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=PIXELS_PER_POINT)
        page.goto(asked.report.resolve().as_uri())
        if asked.curve is not None:
            page.locator("body[data-ready]").wait_for(state="attached")
            page.locator("section.card.wide").screenshot(path=PICTURE.with_name(f"{asked.curve}.png"))
            browser.close()
            return
        section = page.locator("section", has=page.locator("h2", has_text=f"{asked.model} on"))
        run = section.locator("details:not(.inner)", has=page.locator("summary", has_text=f"{asked.strategy} · ")).last
        if run.get_attribute("open") is None:
            run.locator("summary").first.click()
        timeline = run.locator(".js-plotly-plot").first
        timeline.wait_for()
        page.wait_for_timeout(1000)
        top, figure = run.bounding_box(), timeline.bounding_box()
        if top is None or figure is None:
            parser.error(f"the report draws no timeline of {asked.strategy} for {asked.model}")
        page.screenshot(
            path=PICTURE.with_name(f"{asked.name}.png"),
            full_page=True,
            clip={
                "x": figure["x"] - MARGIN,
                "y": top["y"] + MARGIN + page.evaluate("window.scrollY"),
                "width": figure["width"] + 2 * MARGIN,
                "height": figure["y"] + figure["height"] - top["y"] - 2 * MARGIN,
            },
        )
        browser.close()


if __name__ == "__main__":
    main()
