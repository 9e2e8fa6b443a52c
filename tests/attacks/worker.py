"""A server that answers like a vLLM, at a steady pace and little cost: `python -m tests.attacks.worker`.

It looks only at the first bytes of a call: `max_tokens` is the number of tokens, `stream` sends them one by one, and
`logprobs` makes them long. It serves as the router's worker, and as the plain sink that gets the same attacks.
"""

import asyncio
import json
import re
import sys
from typing import Final, cast

import httptools
import uvloop

SECONDS_PER_TOKEN: Final = 0.02
LONG_BYTES: Final = 16 * 1024
"""Bytes of a token with its log probabilities."""
METRICS: Final = b"""\
vllm:num_requests_running{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="62510"} 1.0
"""
POLLED: Final = {
    b"/health": b"",
    b"/metrics": METRICS,
    b"/version": b'{"version":"0.32.0"}',
    b"/kv_event_sources": b"{}",
    b"/v1/models": b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"vllm"}]}',
}
LOOKED_AT: Final = 400
"""Bytes of a body that are kept."""
TOKENS: Final = re.compile(rb'"max_tokens": ?(\d+)')
ENTRY: Final = b'{"token":"x","logprob":-0.12345678,"bytes":[120],"top_logprobs":[]},'
JUNK: Final = ENTRY * (LONG_BYTES // len(ENTRY))


class Connection(asyncio.Protocol):
    """Answers calls one after the other."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Create the parser."""
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body = b""
        self._writable = asyncio.Event()
        self._writable.set()
        self._answering: asyncio.Task[None] | None = None

    def data_received(self, data: bytes) -> None:
        """Feed the parser; abort the connection on invalid HTTP."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def connection_lost(self, _: Exception | None) -> None:
        """Stop an answer whose client has disconnected."""
        if self._answering is not None:
            self._answering.cancel()

    def pause_writing(self) -> None:
        """Pause: the client does not read."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Resume: the client reads again."""
        self._writable.set()

    def on_message_begin(self) -> None:
        """Begin a call."""
        self._url = self._body = b""

    def on_url(self, url: bytes) -> None:
        """Take in a part of the path."""
        self._url += url

    def on_body(self, body: bytes) -> None:
        """Take in a part of the body, up to what is looked at."""
        if len(self._body) < LOOKED_AT:
            self._body += body[:LOOKED_AT]

    def on_message_complete(self) -> None:
        """Answer the call."""
        if self._url in POLLED:
            self._transport.write(whole(POLLED[self._url]))
        else:
            self._answering = asyncio.ensure_future(self._answer(self._body))

    async def _answer(self, body: bytes) -> None:
        found = TOKENS.search(body)
        tokens, is_long = int(found[1]) if found else 1, b'"logprobs"' in body
        if b'"stream"' in body:
            await self._stream(tokens, is_long)
        elif is_long:
            await self._send_long(tokens)
        else:
            self._transport.write(whole(answer(tokens)))

    async def _stream(self, tokens: int, is_long: bool) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        event = chunk("word ", JUNK if is_long else b"")
        for _ in range(tokens):
            await self._writable.wait()
            self._transport.write(block(event))
            if not is_long:
                await asyncio.sleep(SECONDS_PER_TOKEN)
        end = chunk("", b"", "stop") + b'data: {"choices":[],"usage":%b}\n\ndata: [DONE]\n\n' % usage(tokens)
        self._transport.write(block(end) + b"0\r\n\r\n")

    async def _send_long(self, tokens: int) -> None:
        before, after = answer(tokens).split(b'"logprobs":null')
        before, after = before + b'"logprobs":{"content":[', ENTRY[:-1] + b"]}" + after
        length = len(before) + tokens * len(JUNK) + len(after)
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % length + before
        )
        for _ in range(tokens):
            await self._writable.wait()
            self._transport.write(JUNK)
        self._transport.write(after)


def whole(body: bytes) -> bytes:
    """Return an answer with a content length."""
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def block(data: bytes) -> bytes:
    """Return one block of a chunked answer."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def usage(tokens: int) -> bytes:
    """Return the usage of a call."""
    return b'{"prompt_tokens":10,"completion_tokens":%d,"total_tokens":%d}' % (tokens, 10 + tokens)


def chunk(content: str, junk: bytes, finish: str | None = None) -> bytes:
    """Return an event of a streamed chat, with this text in its log probabilities."""
    choice = b'{"index":0,"delta":{"content":%b},"logprobs":{"content":[%b]},"finish_reason":%b}' % (
        json.dumps(content).encode(),
        junk[:-1],
        json.dumps(finish).encode(),
    )
    return b'data: {"id":"c","object":"chat.completion.chunk","choices":[%b]}\n\n' % choice


def answer(tokens: int) -> bytes:
    """Return a whole chat."""
    choice = b'{"index":0,"message":{"role":"assistant","content":"word"},"logprobs":null,"finish_reason":"stop"}'
    return b'{"id":"c","object":"chat.completion","choices":[%b],"usage":%b}' % (choice, usage(tokens))


async def serve() -> None:
    """Listen until standard input ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Connection, "127.0.0.1", 0, backlog=2048)
    port = server.sockets[0].getsockname()[1]
    print(f"listening on http://127.0.0.1:{port}", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(serve())
