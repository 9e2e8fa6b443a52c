"""Counts the tokens that an engine has evicted from its cache since its start, as the engine itself reports."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from threading import Thread

import msgpack
import zmq

from ..wire import WORKER_KEY, get

QUIET_MS = 1000
"""All events have come once there is none for this time after the last call."""


def evicted_by_metric(url: str) -> int:
    """Return SGLang's counter of evicted tokens."""
    text = get(f"{url}/metrics", WORKER_KEY).body.decode()
    found = re.search(r"^sglang:evicted_tokens_total(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
    return 0 if found is None else int(float(found[1]))


@contextmanager
def removed_blocks(port: int) -> Iterator[Callable[[], int]]:
    """Follow an engine's KV events. Yields a function that waits for the last of them and counts the removed blocks."""
    messages: list[tuple[int, bytes]] = []
    with zmq.Context() as context, context.socket(zmq.SUB) as socket, context.socket(zmq.PAIR) as end:
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(f"tcp://127.0.0.1:{port}")
        end.bind("inproc://end")
        thread = Thread(target=_collect, args=(context, socket, messages))
        thread.start()
        try:
            yield lambda: _finish(end, thread, messages)
        finally:
            if thread.is_alive():
                end.send(b"")
                thread.join()


def _collect(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], into: list[tuple[int, bytes]]) -> None:
    """Collect events until a message asks to end, and then until none comes for `QUIET_MS`."""
    with context.socket(zmq.PAIR) as stop:
        stop.connect("inproc://end")
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(stop, zmq.POLLIN)
        timeout = None
        while ready := dict(poller.poll(timeout)):
            if stop in ready:
                stop.recv()
                timeout = QUIET_MS
            if socket in ready:
                *_, number, payload = socket.recv_multipart()
                into.append((int.from_bytes(number, "big"), payload))


def _finish(end: zmq.Socket[bytes], thread: Thread, messages: list[tuple[int, bytes]]) -> int:
    """Stop collecting, and return the count of removed blocks. Raises RuntimeError if a message was lost."""
    end.send(b"")
    thread.join()
    if any(after != before + 1 for (before, _), (after, _) in pairwise(messages)):
        raise RuntimeError("KV events were lost")
    return sum(_removed(payload) for _, payload in messages)


def _removed(payload: bytes) -> int:
    _, events, *_ = msgpack.unpackb(payload)
    return sum(len(event["block_hashes"]) for event in events if event["type"] == "BlockRemoved")
