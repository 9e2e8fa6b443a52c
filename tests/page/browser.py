"""Chromium without a window, and a page that notes what should never happen."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, sync_playwright

FLAGS: Final = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
TIMEOUT_MS: Final = 60_000
"""Of every wait for the page: a busy machine must not fail a test."""
DESKTOP: Final = (1440, 1000)
PHONE: Final = (390, 844)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run the browser, with a new profile. Raises RuntimeError if there is none."""
    named = os.environ.get("CHROMIUM", "chromium")
    path = shutil.which(named)
    if path is None:
        raise RuntimeError(f"there is no {named} here; Debian and Ubuntu have it: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS])
        try:
            yield browser
        finally:
            browser.close()


class Faults:
    """What a page did that it should never do: errors in its console, and calls to other hosts."""

    def __init__(self, page: Page, url: str) -> None:
        self._host = urlsplit(url).netloc
        self.found: list[str] = []
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.found.append(f"error: {error}"))
        page.on("request", self._on_request)
        page.on("dialog", lambda dialog: self.found.append(f"dialog: {dialog.message}"))

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.found.append(f"console: {message.text}")

    def _on_request(self, request: Any) -> None:
        if urlsplit(request.url).netloc != self._host:
            self.found.append(f"request: {request.url}")


@contextmanager
def opened(
    browser: Browser, url: str, size: tuple[int, int] = DESKTOP, *, dark: bool = False, path: str = "/ui"
) -> Iterator[tuple[Page, Faults]]:
    """Open the live page of a router in a window of its own."""
    scheme = "dark" if dark else "light"
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    try:
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        faults = Faults(page, url)
        page.goto(url + path)
        yield page, faults
    finally:
        context.close()
