"""Take the pictures of the live page and of `d2lpm top` that the documents show, into the folder named.

The load is the same each time: one heavy client beside light ones, and a thousand others that call now and then.
"""

import sys
import time
from pathlib import Path
from typing import Final

import httpx
from PIL import Image
from playwright.sync_api import Browser, expect
from pydantic import TypeAdapter
from rich.console import Console

from router.cli.screen import Screen
from router.telemetry.report import FairnessReport
from tests.page.browser import PHONE, chromium, opened
from tests.page.stand import HEAVY, LIGHT, SMALL, load, populate, running

LOADED_SECONDS: Final = 65.0
"""Until the charts, which show the last minute, are full."""
WAIT_MS: Final = 60_000
FRAMES_MS: Final = 4000
"""Until a page that has opened shows some frames of its own."""
WINDOW: Final = (1440, 1140)
COLOURS: Final = 255
"""Of a picture, so that its file is small."""
TOP_COLUMNS, TOP_LINES = 130, 34
FRAME: Final = "<style>body { margin: 0 } svg { display: block; width: 1300px }</style>"


def main() -> None:
    """Take all pictures."""
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    with chromium() as browser, running(*SMALL, workers=2) as stand:
        populate(stand.url)
        with load(stand.url, HEAVY, f"{LIGHT},rate=3"):
            time.sleep(LOADED_SECONDS)
            report = TypeAdapter(FairnessReport).validate_json(
                httpx.get(f"{stand.url}/fairness", timeout=WAIT_MS / 1000).content
            )
            for name, dark in (("page", False), ("page-dark", True)):
                take_page(browser, stand.url, folder / f"{name}.png", dark=dark)
            take_request(browser, stand.url, folder / "request.png")
            take_phone(browser, stand.url, folder / "phone.png")
        take_top(browser, report, folder / "top.png")
    for file in folder.glob("*.png"):
        shrink(file)


def shrink(file: Path) -> None:
    """Write a picture with fewer colours."""
    with Image.open(file) as picture:
        picture.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            file, optimize=True
        )


def take_page(browser: Browser, url: str, file: Path, *, dark: bool) -> None:
    """Take the page as a large window shows it."""
    with opened(browser, url, WINDOW, dark=dark) as (page, _):
        page.select_option("#span", "120")
        expect(page.locator("#decisions li").nth(8)).to_be_visible(timeout=WAIT_MS)
        expect(page.locator("#heat tbody tr")).to_have_count(20)
        page.wait_for_timeout(FRAMES_MS)
        page.screenshot(path=file)


def take_request(browser: Browser, url: str, file: Path) -> None:
    """Take the time line of a request that has waited."""
    with opened(browser, url) as (page, _):
        waited = page.locator("#decisions li", has_text="passed over").or_(page.locator("#decisions li")).first
        expect(waited).to_be_visible(timeout=WAIT_MS)
        page.evaluate("hash => { location.hash = hash }", waited.locator("small a").get_attribute("href"))
        expect(page.locator("#details-body .timeline")).to_contain_text("Finished", timeout=WAIT_MS)
        page.locator("#details").screenshot(path=file)


def take_phone(browser: Browser, url: str, file: Path) -> None:
    """Take the first screens of the page on a phone."""
    with opened(browser, url, (PHONE[0], 2 * PHONE[1])) as (page, _):
        expect(page.locator("#decisions li").nth(5)).to_be_visible(timeout=WAIT_MS)
        page.wait_for_timeout(FRAMES_MS)
        page.screenshot(path=file)


def take_top(browser: Browser, report: FairnessReport, file: Path) -> None:
    """Take what `d2lpm top` shows in a terminal of this size."""
    with open("/dev/null", "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=TOP_COLUMNS, height=TOP_LINES, file=nowhere, force_terminal=True)
        screen = Screen("http://127.0.0.1:8000")
        screen.show(report)
        console.print(screen.render(TOP_LINES))
    drawing = console.export_svg(title="d2lpm top")
    page = browser.new_page(viewport={"width": 1300, "height": 800})
    page.set_content(FRAME + drawing.replace("Fira Code, monospace", "monospace"))
    page.locator("svg").screenshot(path=file)


if __name__ == "__main__":
    main()
