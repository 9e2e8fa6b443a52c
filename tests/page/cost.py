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
LEAST_FRAMES: Final = 0.5
"""Frames per reader and second, at the median, below which a busy machine was measured, and not the page."""
BLOCK_BYTES: Final = 65536
SETTLE_SECONDS: Final = 1.0
"""Between a change of readers and the measurement, so that a phase holds nothing of the one before."""


def main() -> int:
    """Run the measurement. Returns 0 if the readers cost no more than they may, 1 if more, 2 if it is not valid."""
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
    """Print the processor time per second in each phase. Returns as `main` does."""
    print(
        f"processor time of the router in s per s, without readers and with {readers}; frames and KiB per reader and s"
    )
    differences, received = [], []
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
        received.append(frames)
        print(f"{without:.3f}  {with_readers:.3f}  {differences[-1]:+.3f}   {frames:.2f} frames, {size:.0f} KiB")
    if median(received) < LEAST_FRAMES:
        print("not valid: readers got too few frames, as the machine is busy")
        return 2
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
    with contextlib.suppress(OSError, http.client.HTTPException, AttributeError):
        connection.request("GET", "/ui/events")
        answer = connection.getresponse()
        assert answer.status == 200, answer.status
        while block := answer.read1(BLOCK_BYTES):
            blocks.append(block)


if __name__ == "__main__":
    raise SystemExit(main())
