"""Measure what readers of the live page cost the router: its processor time with ten beside none, alternating.

Prints a line for each pair of phases, and the medians.
"""

import argparse
import contextlib
import http.client
import threading
import time
from collections.abc import Iterator
from statistics import median
from typing import Final
from urllib.parse import urlsplit

from tests.page.stand import LIGHT, Stand, load, populate, running

MOST_SECONDS: Final = 0.05
"""What ten readers may cost, in seconds of processor time per second."""
BLOCK_BYTES: Final = 65536
SETTLE_SECONDS: Final = 1.0
"""Between a change of readers and the measurement, so that a phase holds nothing of the one before."""


def main() -> int:
    """Run the measurement. Returns 0 if the readers cost no more than they may, otherwise 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.page.cost", description=__doc__)
    parser.add_argument("--readers", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of one phase")
    parser.add_argument("--processes", default="1", help="as for `d2lpm serve`")
    given = parser.parse_args()
    with running("--processes", given.processes, workers=2) as stand:
        populate(stand.url)
        with load(stand.url, f"{LIGHT},rate=30"):
            time.sleep(5.0)
            return measure(stand, given.readers, given.pairs, given.seconds)


def measure(stand: Stand, readers: int, pairs: int, seconds: float) -> int:
    """Print the processor time per second in each phase. Returns 0 if the difference is allowed, otherwise 1."""
    print(
        f"processor time of the router in s per s, without readers and with {readers}; frames and KiB per reader and s"
    )
    differences = []
    for _ in range(pairs):
        without = per_second(stand, seconds)
        with reading(stand.url, readers) as counts:
            time.sleep(SETTLE_SECONDS)
            counts.clear()
            with_readers = per_second(stand, seconds)
            frames = sum(block.count(b"data: ") for block in counts) / readers / seconds
            size = sum(map(len, counts)) / readers / seconds / 1024
        time.sleep(SETTLE_SECONDS)
        differences.append(with_readers - without)
        print(f"{without:.3f}  {with_readers:.3f}  {differences[-1]:+.3f}   {frames:.2f} frames, {size:.0f} KiB")
    print(f"median difference: {median(differences):+.3f} s per s; allowed: {MOST_SECONDS}")
    return 0 if median(differences) <= MOST_SECONDS else 1


def per_second(stand: Stand, seconds: float) -> float:
    """Return the processor time of the router per second, over so many seconds."""
    began, spent = time.monotonic(), stand.cpu_seconds()
    time.sleep(seconds)
    return (stand.cpu_seconds() - spent) / (time.monotonic() - began)


@contextlib.contextmanager
def reading(url: str, readers: int) -> Iterator[list[bytes]]:
    """Read the stream of the page so many times at once. Yields the blocks received."""
    blocks: list[bytes] = []
    address = urlsplit(url).netloc
    connections = [http.client.HTTPConnection(address, timeout=30.0) for _ in range(readers)]
    threads = [threading.Thread(target=_read, args=(connection, blocks)) for connection in connections]
    for thread in threads:
        thread.start()
    try:
        yield blocks
    finally:
        for connection in connections:
            if connection.sock is not None:
                connection.sock.shutdown(2)
        for thread in threads:
            thread.join()
        for connection in connections:
            connection.close()


def _read(connection: http.client.HTTPConnection, blocks: list[bytes]) -> None:
    connection.request("GET", "/ui/events")
    answer = connection.getresponse()
    assert answer.status == 200, answer.status
    with contextlib.suppress(OSError, http.client.HTTPException, AttributeError):
        while block := answer.read1(BLOCK_BYTES):
            blocks.append(block)


if __name__ == "__main__":
    raise SystemExit(main())
