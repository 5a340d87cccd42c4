"""The pictures of the README and of the tutorials, by the `.plot` of the results; and pictures of pages, by Chromium.

    make demo
    .venv/bin/python docs/pictures/make.py run parsim-demo/vit_small --run mp --to predicted-and-measured.png
    .venv/bin/python docs/pictures/make.py run measured --to measured.png
    .venv/bin/parsim explore nvlink --plot docs/pictures/nvlink.png
    .venv/bin/parsim report parsim-demo/vit_small
    .venv/bin/python docs/pictures/make.py pages parsim-demo/vit_small/report.html nvlink/explorer.html

`pages` writes the first screen of each page at 390, 1,280 and 2,560 pixels, the middle one also in dark, in few colours. It
needs Chromium (`apt-get install chromium`).
"""

from __future__ import annotations

import argparse
import io
import shutil
from dataclasses import replace
from pathlib import Path

from parsim.app.ask import ask_again
from parsim.app.measured import compared
from parsim.app.run_folder import RunFolder
from parsim.execute.job import Job
from parsim.predict.evaluate import evaluate

HERE = Path(__file__).parent
SCREENS = ((390, 844, "light"), (1280, 900, "light"), (1280, 900, "dark"), (2560, 1440, "light"))
COLOURS = 128


def draw_run(path: Path, name: str, picture: str) -> None:
    """One step of a run of a folder, predicted above and measured below."""
    folder = RunFolder(path)
    asked, runs = ask_again(folder), Job.load(folder.job).runs
    run = next(run for run in runs if run.name == (name or runs[0].name))
    prediction = replace(asked, evaluation=evaluate(asked.problem, run.plan, fold=False))
    compared(folder, prediction, run.name).plot(HERE / picture)


def photograph(pages: list[Path]) -> None:
    """The first screens of pages, as PAGE-WIDTH[-dark].png."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("no Chromium found: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for page in pages:
            tab = browser.new_page()
            tab.set_default_timeout(300_000)
            tab.goto(page.resolve().as_uri())
            tab.locator("body[data-ready]").wait_for(state="attached")
            for width, height, scheme in SCREENS:
                tab.emulate_media(color_scheme=scheme)
                tab.set_viewport_size({"width": width, "height": height})
                tab.wait_for_timeout(2500)  # the figures are drawn anew
                seen = Image.open(io.BytesIO(tab.screenshot())).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
                suffix = "-dark" if scheme == "dark" else ""
                seen.save(HERE / f"{page.stem}-{width}{suffix}.png", optimize=True)
            tab.close()
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help=str(draw_run.__doc__))
    run.add_argument("folder", type=Path)
    run.add_argument("--run", default="", help="of several plans that ran in the folder, this one")
    run.add_argument("--to", required=True, help="name of the picture")
    pages = commands.add_parser("pages", help=str(photograph.__doc__))
    pages.add_argument("pages", type=Path, nargs="+")
    asked = parser.parse_args()
    if asked.command == "run":
        draw_run(asked.folder, asked.run, asked.to)
    else:
        photograph(asked.pages)


if __name__ == "__main__":
    main()
