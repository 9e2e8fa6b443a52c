"""Draw the panels of the dashboard: a router with two emulated workers, light clients, and a heavy one that comes late.

The processes and the kind of load are the demo's; the figures are read from the router's `/metrics`.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import uvloop

from bench.demo.figures import HEAVY
from bench.demo.load import Clients, DemoError
from bench.demo.processes import fleet
from bench.demo.trial import play_clients
from bench.lab.picture.panels import draw
from bench.lab.picture.scrapes import Scrape
from bench.workloads.heavy_light import HeavyAndLight

WORKERS: Final = 2
SLOTS: Final = 4
"""Most requests in one batch of a worker."""
LOAD: Final = HeavyAndLight(in_flight=32, prefixes=4, prefix=1500, heavy_input=300, heavy_output=100)
"""Smaller than the demo's, because this runs in real time."""
SCRAPE_SECONDS: Final = 1.0
ALONE: Final = 0.25
"""Share of the time in which the light clients are alone."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=60, help="real seconds to record (default: %(default)s)")
    parser.add_argument("--policy", default="dlpm_home", help="policy of the router (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts, lengths and pauses")
    parser.add_argument("--out", type=Path, default=Path("dashboard.png"), help="file to write (default: %(default)s)")


def run(options: argparse.Namespace) -> None:
    if not 0 < options.seconds < 1e6:
        sys.exit("picture: error: --seconds must be positive")
    worker_flags = ("--max-running", str(SLOTS), "--seed", str(options.seed))
    try:
        with fleet(WORKERS, worker_flags, ("--policy", options.policy)) as url:
            scrapes = uvloop.run(watch(url, options.seconds, options.seed))
        draw(
            scrapes,
            f"{options.policy}: {LOAD.lights} light clients, a heavy one from {heavy(options):g} s",
            options.out,
        )
    except (DemoError, OSError) as error:
        sys.exit(f"picture: error: {error}")


def heavy(options: argparse.Namespace) -> float:
    """Return when the heavy client starts, in seconds since the beginning."""
    return ALONE * float(options.seconds)


async def watch(url: str, seconds: float, seed: int) -> Sequence[Scrape]:
    """Play the load for `seconds` and read the metrics meanwhile. Raises DemoError."""
    clients = Clients(url, 1.0)
    scrapes: list[Scrape] = []

    async def scrape() -> None:
        while True:
            scrapes.append(Scrape.parsed(clients.now, await clients.read("/metrics")))
            await asyncio.sleep(SCRAPE_SECONDS)

    begins = {HEAVY: ALONE * seconds}
    await play_clients(clients, LOAD.clients(seed), begins, seconds, scrape)
    return scrapes
