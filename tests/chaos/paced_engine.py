"""A server that answers like a vLLM, at a steady pace and little cost: `python -m tests.chaos.paced_engine --port 0`.

Each event of a stream carries the stream's name, its number and the time at which it was sent. A call's prompt is the
name, and `max_tokens` the number of events. One timer serves all streams, in groups that take turns.
"""

import argparse
import asyncio
import re
import sys
import time
from typing import Final, cast

import httptools
import uvloop

from tests.attacks.worker import POLLED, block, whole

GROUPS: Final = 10
"""Groups of streams whose events are sent at different times."""
STREAMING: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PROMPT: Final = re.compile(rb'"prompt": ?"(\w+)"')
TOKENS: Final = re.compile(rb'"max_tokens": ?(\d+)')
PROMPT_TOKENS: Final = 4
"""What each call is said to have."""


class Engine:
    """All streams; one group after the other gets its next event."""

    def __init__(self, pace: float) -> None:
        """`pace`: events per second of one stream."""
        self._groups: list[set[Connection]] = [set() for _ in range(GROUPS)]
        self._step = 1 / pace / GROUPS
        self._joined = 0

    def join(self, connection: "Connection") -> None:
        """Begin a stream."""
        self._groups[self._joined % GROUPS].add(connection)
        self._joined += 1

    def leave(self, connection: "Connection") -> None:
        """End a stream."""
        for group in self._groups:
            group.discard(connection)

    async def run(self) -> None:
        """Send events for ever. A late turn is not made up for by quicker ones."""
        loop, turn = asyncio.get_running_loop(), 0
        due = loop.time()
        while True:
            for connection in list(self._groups[turn % GROUPS]):
                connection.send_next()
            turn += 1
            due = max(due + self._step, loop.time())
            await asyncio.sleep(due - loop.time())


class Connection(asyncio.Protocol):
    """Answers calls one after the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Create the parser."""
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)
        self._url = self._body = b""

    def data_received(self, data: bytes) -> None:
        """Feed the parser; abort the connection on invalid HTTP."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def connection_lost(self, _: Exception | None) -> None:
        """Stop an answer whose client has disconnected."""
        self._engine.leave(self)

    def on_message_begin(self) -> None:
        """Forget the call before. Called by the parser, as are the other methods with `on_`."""
        self._url = self._body = b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        name, tokens = PROMPT.search(self._body), TOKENS.search(self._body)
        if name is None or tokens is None:
            self._transport.write(whole(POLLED.get(self._url, b"{}")))
            return
        self._name, self._tokens, self._sent = name[1], int(tokens[1]), 0
        self._with_usage = b'"continuous_usage_stats"' in self._body
        self._transport.write(STREAMING)
        self._engine.join(self)

    def send_next(self) -> None:
        """Send the next event, and the end after the last one."""
        self._sent += 1
        last = self._sent == self._tokens
        data = event(self._name, self._sent, time.monotonic_ns(), last=last, usage=self._with_usage)
        if last:
            self._engine.leave(self)
            self._transport.write(block(data + b"data: [DONE]\n\n") + b"0\r\n\r\n")
        else:
            self._transport.write(block(data))


def event(name: bytes, number: int, sent: int, *, last: bool, usage: bool) -> bytes:
    """Return an event of a streamed completion. `sent`: nanoseconds of the monotonic clock."""
    text = b" %b.%d.%d" % (name, number, sent)
    reason = b'"length"' if last else b"null"
    counts = b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (
        *(PROMPT_TOKENS, number),
        PROMPT_TOKENS + number,
    )
    return b'data: {"id":"c","object":"text_completion","created":1,"model":"m","choices":[%b]%b}\n\n' % (
        b'{"index":0,"text":"%b","logprobs":null,"finish_reason":%b}' % (text, reason),
        b',"usage":%b' % counts if usage else b"",
    )


async def serve(port: int, pace: float) -> None:
    """Serve until standard input is closed."""
    engine = Engine(pace)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(engine), "127.0.0.1", port, backlog=4096)
    host, port = server.sockets[0].getsockname()
    print(f"workers: vllm m on http://{host}:{port}", flush=True)
    sending = asyncio.create_task(engine.run())
    await asyncio.to_thread(sys.stdin.read)
    sending.cancel()
    server.close()


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.paced_engine", description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--pace", type=float, default=10.0, help="events per second of each stream")
    options = parser.parse_args()
    uvloop.run(serve(options.port, options.pace))


if __name__ == "__main__":
    main()
