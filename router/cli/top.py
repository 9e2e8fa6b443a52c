"""The command `d2lpm top`: clients and workers of a running router in a terminal."""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import httpx
from pydantic import TypeAdapter, ValidationError

from router.errors import ConfigError
from router.telemetry.report import FairnessReport

if TYPE_CHECKING:
    from router.cli.screen import Screen

TIMEOUT_SECONDS: Final = 10.0
KEY_VARIABLE: Final = "D2LPM_ADMIN_KEY"
NO_EXTRA: Final = "`d2lpm top` draws with rich, which is not installed: pip install 'd2lpm-router[top]'"
NO_TERMINAL: Final = "`d2lpm top` needs a terminal; --once prints one frame anywhere"
PRINTED_WIDTH: Final = 150
"""Columns of a frame that goes to a file or another program."""
_REPORT: Final = TypeAdapter(FairnessReport)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `top`."""
    parser.epilog = f"Sends the operator's key if {KEY_VARIABLE} is set."
    parser.add_argument("url", metavar="URL", help="address of the router, for example http://127.0.0.1:8000")
    parser.add_argument("--once", action="store_true", help="print one frame, with every client, and exit")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="seconds between two frames (default: 1)"
    )
    parser.set_defaults(run=run)


def run(options: Mapping[str, object]) -> int:
    """Show the router until `q` is pressed. Raises ConfigError without rich, a terminal or an answer."""
    try:
        from router.cli.screen import Screen, print_frame  # noqa: PLC0415 - needs an optional extra
    except ImportError:
        raise ConfigError(NO_EXTRA) from None
    url, interval = str(options["url"]).rstrip("/"), options["interval"]
    assert isinstance(interval, float)
    if options["once"]:
        print_frame(asyncio.run(_read_once(url)), url, None if sys.stdout.isatty() else PRINTED_WIDTH)
        return 0
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(NO_TERMINAL)
    asyncio.run(_follow(url, max(0.1, interval), Screen(url)))
    return 0


async def _follow(url: str, seconds: float, screen: "Screen") -> None:
    """Read a report every `seconds`, and paint after each and after each key, until `q`."""
    from router.cli.keyboard import keys  # noqa: PLC0415 - Windows has no terminal of this kind
    from router.cli.screen import painting  # noqa: PLC0415

    with painting(screen) as paint, keys(_painting_after(screen.press, paint)):
        async with _client(url) as http:
            while not screen.closed.is_set():
                try:
                    screen.show(await _read(http))
                except ConfigError as error:
                    screen.show_error(str(error))
                paint()
                await _wait(screen.closed, seconds)


def _painting_after(press: Callable[[str], None], paint: Callable[[], None]) -> Callable[[str], None]:
    """Return what handles a key and paints what it has changed."""

    def handle(key: str) -> None:
        press(key)
        paint()

    return handle


async def _wait(closed: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await closed.wait()
    except TimeoutError:
        pass


async def _read_once(url: str) -> FairnessReport:
    async with _client(url) as http:
        return await _read(http)


def _client(url: str) -> httpx.AsyncClient:
    key = os.environ.get(KEY_VARIABLE)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        return httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_SECONDS)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{url}: {error}") from None


async def _read(http: httpx.AsyncClient) -> FairnessReport:
    """Raises ConfigError if there is no answer, or none of a router."""
    try:
        answer = await http.get("/fairness")
    except (httpx.TransportError, httpx.UnsupportedProtocol) as error:
        raise ConfigError(f"{http.base_url} does not answer: {error or type(error).__name__}") from None
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise ConfigError(f"{http.base_url} asks for the operator's key: set {KEY_VARIABLE}")
    if answer.status_code == httpx.codes.NOT_FOUND:
        raise ConfigError(
            f"{http.base_url} has no /fairness: name the port of --admin-port, or start it with --admin-key"
        )
    if answer.status_code != httpx.codes.OK:
        raise ConfigError(f"{http.base_url}/fairness answered {answer.status_code}")
    try:
        return _REPORT.validate_json(answer.content)
    except ValidationError:
        raise ConfigError(f"{http.base_url} is not this router, or is another version of it") from None
