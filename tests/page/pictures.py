"""Take the pictures of the live page and of `d2lpm top` that the documents show, into the folder named.

The load is the same each time. The page shows one heavy client beside light ones, and a thousand others that call now
and then; the terminal shows the teams of a company, with different weights, which ask for more than there is.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import httpx
import yaml
from PIL import Image
from playwright.sync_api import Browser, expect
from pydantic import TypeAdapter
from rich.console import Console

from router.cli.screen import Screen
from router.telemetry.report import FairnessReport
from tests.alerts.callers import Body, Callers, completion
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
TOP_COLUMNS, TOP_LINES = 130, 24
TEAMS: Final = {
    "search": (4.0, 16),
    "support": (3.0, 12),
    "coding": (2.0, 24),
    "mobile": (2.0, 6),
    "reports": (1.0, 10),
    "batch": (1.0, 40),
    "trial": (0.5, 8),
    "night-shift": (0.5, 2),
}
"""The weight of each team, and the calls that it keeps open."""
FRAME: Final = "<style>body { margin: 0 } svg { display: block; width: 1300px }</style>"


def main() -> None:
    """Take all pictures."""
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    with chromium() as browser, running(*SMALL, workers=2) as stand:
        populate(stand.url)
        with load(stand.url, HEAVY, f"{LIGHT},rate=3"):
            time.sleep(LOADED_SECONDS)
            for name, dark in (("page", False), ("page-dark", True)):
                take_page(browser, stand.url, folder / f"{name}.png", dark=dark)
            take_request(browser, stand.url, folder / "request.png")
            take_phone(browser, stand.url, folder / "phone.png")
    with chromium() as browser, busy_teams() as url:
        time.sleep(LOADED_SECONDS)
        take_top(browser, url, folder / "top.png")
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


@contextmanager
def busy_teams() -> Iterator[str]:
    """Run a router that all teams call. Yields its URL."""
    clients = {
        name: {"key": f"sha256:{sha256(name.encode()).hexdigest()}", "weight": weight}
        for name, (weight, _) in TEAMS.items()
    }
    with TemporaryDirectory() as folder:
        file = Path(folder) / "clients.yaml"
        file.write_text(yaml.safe_dump({"clients": clients}), "utf-8")
        with running("--clients", str(file), *SMALL, workers=2, identity=["key"]) as stand, Callers() as callers:
            for name, (_, count) in TEAMS.items():
                beginning = (
                    f"You are the assistant of the team {name}. Answer briefly, and say what you do not know. " * 40
                )
                callers.keep(stand.url, name, count, partial(_question, beginning))
            yield stand.url


def _question(beginning: str, number: int, turn: int) -> Body:
    """A call that shares its beginning with the others of its team."""
    return completion(f"{beginning}{number} asks for the {turn}. time: {'what follows? ' * 40}", 120)


def take_top(browser: Browser, url: str, file: Path) -> None:
    """Take what `d2lpm top` shows in a terminal of this size."""
    answer = httpx.get(f"{url}/fairness", timeout=WAIT_MS / 1000)
    report = TypeAdapter(FairnessReport).validate_json(answer.content)
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
