"""Draw the trace of a streamed call whose first worker dies during its answer, as a collector got it over OTLP.

A router and two emulated workers run as processes. A first call brings the prompt into the cache of one worker; that
worker dies after the first chunk of the second call, and the other one generates the rest.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Final

import httpx

from bench.demo.load import MODEL, DemoError
from bench.demo.processes import fleet
from bench.lab.picture.received_spans import ReceivedSpan, spans_in, trace_of_call
from bench.lab.picture.trace_drawing import drawing

WORKERS: Final = 2
REQUEST: Final = "retried"
"""The id of the call that is drawn."""
PROMPT: Final = " ".join(map(str, range(400)))
OUTPUT_TOKENS: Final = 24
CHAT: Final = "/v1/chat/completions"
WAIT_SECONDS: Final = 60.0
"""After which what has not come will not come."""


class Collector:
    """What has been sent to a collector."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.url = ""

    def trace(self) -> Sequence[ReceivedSpan]:
        """Wait for the trace of the call. Raises DemoError if it does not come."""
        end = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < end:
            if found := trace_of_call(self.spans, REQUEST):
                return found
            time.sleep(0.01)
        raise DemoError("no trace came")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=1, help="processes of the router (default: %(default)s)")


def run(options: argparse.Namespace) -> None:
    try:
        with collecting() as collector:
            to = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "10"}
            flags = ("--otel", "--processes", str(options.processes))
            with fleet(WORKERS, (), flags, to) as url:
                make_calls(url)
                print(drawing(collector.trace()))
    except (DemoError, httpx.HTTPError, OSError) as error:
        sys.exit(f"trace: error: {error}")


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector at a free port of loopback."""
    collector = Collector()

    class Take(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/traces":
                collector.spans += spans_in(body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Take) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}"
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield collector
        finally:
            server.shutdown()


def make_calls(url: str) -> None:
    """Make the two calls. Raises DemoError."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "ignore_eos": True}
    with httpx.Client(base_url=url, timeout=WAIT_SECONDS, trust_env=False) as http:
        end = time.monotonic() + WAIT_SECONDS
        while http.get("/ready").json().get("workers") != WORKERS:
            if time.monotonic() > end:
                raise DemoError("the workers do not join")
            time.sleep(0.01)
        first = http.post(CHAT, json={**body, "max_tokens": 1}).raise_for_status()
        worker = first.headers["x-d2lpm-worker"]
        http.post(f"http://{worker}/emulated/faults", json={"die_in_stream": 1}).raise_for_status()
        again = {**body, "stream": True, "max_tokens": OUTPUT_TOKENS}
        http.post(CHAT, json=again, headers={"x-request-id": REQUEST}).raise_for_status()
