"""A fake engine on a real socket whose answers a test controls byte for byte.

The engine answers polls itself, like an idle vLLM. Every other request waits in `calls` for the test.
"""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

TIMEOUT_S = 120.0
"""Seconds after which a wait fails the test instead of blocking it forever."""
VLLM_METRICS = b"""\
vllm:num_requests_running{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="6251"} 1.0
"""
VOCABULARY_PROBE = b'"logit_bias":{"-1":'
DONE = b"data: [DONE]\n\n"


def event(fields: Mapping[str, object]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


def chunk(content: str, finish: str | None = None, **more: object) -> bytes:
    """A chat chunk of one choice."""
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
    return event({"id": "c", "object": "chat.completion.chunk", "choices": [choice], **more})


def usage_chunk(prompt: int, completion: int, cached: int = 0) -> bytes:
    """The last chunk before [DONE], which an engine sends if usage was asked for."""
    counts = usage(prompt, completion, cached)
    return event({"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": counts})


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, object]:
    """An OpenAI usage object."""
    total = prompt + completion
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
    return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}


@dataclass(slots=True)
class Call:
    """A request to the engine, and the connection to answer it on."""

    method: str
    path: str
    headers: dict[str, str]
    """Headers by lower-case name."""
    body: bytes
    connection: "Connection" = field(repr=False)

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)

    async def raw(self, data: bytes) -> None:
        """Send exactly these bytes. Blocks while the other side does not read."""
        self.connection.writer.write(data)
        await self.connection.writer.drain()

    async def begin(self, status: int = 200, content_type: str = "text/event-stream; charset=utf-8") -> None:
        """Send the status line and headers of a chunked answer."""
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ntransfer-encoding: chunked\r\n\r\n"
        await self.raw(head.encode())

    async def write(self, block: bytes) -> None:
        """Send one block of a chunked answer."""
        await self.raw(b"%x\r\n%b\r\n" % (len(block), block))

    async def end(self) -> None:
        """End a chunked answer."""
        await self.raw(b"0\r\n\r\n")

    async def stream(self, *blocks: bytes) -> None:
        """Send a complete chunked answer."""
        await self.begin()
        for block in blocks:
            await self.write(block)
        await self.end()

    async def respond(self, status: int, body: bytes, *headers: str, content_type: str = "application/json") -> None:
        """Send a complete answer with a content length."""
        lines = [f"HTTP/1.1 {status} X", f"content-type: {content_type}", f"content-length: {len(body)}", *headers]
        await self.raw("\r\n".join([*lines, "", ""]).encode() + body)

    async def answer(self, text: str = "yes", prompt: int = 10, completion: int = 1) -> None:
        """Send the default answer to a chat, streamed if the call asked for it."""
        if self.json.get("stream"):
            await self.stream(chunk(text), chunk("", "stop"), usage_chunk(prompt, completion), DONE)
            return
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        body = {"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage(prompt, completion)}
        await self.respond(200, json.dumps(body).encode())

    async def wait_closed(self) -> None:
        """Wait until the other side has closed the connection."""
        async with asyncio.timeout(TIMEOUT_S):
            await self.connection.closed.wait()

    def reset(self) -> None:
        """Drop the connection as a killed process does, with RST."""
        raw = self.connection.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.writer.transport.abort()


class Connection:
    """One connection to the engine, read continuously so that its close is detected."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.closed = asyncio.Event()
        self._reader = reader
        self._read = b""

    async def requests(self) -> AsyncIterator[Call]:
        """Yield the requests as they arrive, until the other side closes."""
        try:
            while True:
                head = await self._until(b"\r\n\r\n")
                request, *lines = head.decode("latin-1").split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                method, path, _ = request.split(" ")
                yield Call(method, path, headers, await self._take(int(headers.get("content-length", "0"))), self)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed.set()
            self.writer.close()

    async def _until(self, mark: bytes) -> bytes:
        while mark not in self._read:
            await self._wait_for_data()
        found, self._read = self._read.split(mark, 1)
        return found

    async def _take(self, size: int) -> bytes:
        while len(self._read) < size:
            await self._wait_for_data()
        taken, self._read = self._read[:size], self._read[size:]
        return taken

    async def _wait_for_data(self) -> None:
        data = await self._reader.read(1 << 16)
        if not data:
            raise asyncio.IncompleteReadError(self._read, None)
        self._read += data


class AcceptedConnection(asyncio.StreamReaderProtocol):
    """A connection from the moment in which the event loop accepts it, which may be some turns before it is served."""

    def __init__(self, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
        super().__init__(asyncio.StreamReader(), serve)
        self.lost = asyncio.Event()
        self._aborted = False
        self._made: asyncio.BaseTransport | None = None

    def abort(self) -> None:
        """Close the connection without sending what is unsent, now or as soon as it is made."""
        self._aborted = True
        if isinstance(self._made, asyncio.WriteTransport):
            self._made.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        super().connection_made(transport)
        self._made = transport
        if self._aborted:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        super().connection_lost(exc)
        self.lost.set()


class ScriptedEngine:
    """A fake engine. `poll_answers` maps the paths of polls to status and body; a test may change it at any time."""

    def __init__(self, models: Sequence[str], send_buffer: int | None, host: str = "127.0.0.1", port: int = 0) -> None:
        self.calls: asyncio.Queue[Call] = asyncio.Queue()
        self.polls: list[Call] = []
        """The requests received on the paths in `poll_answers`."""
        self.forwards_vocabulary_probes = False
        """Whether the probe for the vocabulary size goes to `calls` instead of being answered."""
        self.ignores_polls = False
        """Whether polls get no answer."""
        self.poll_answers: dict[str, tuple[int, bytes]] = {}
        self.serve(*models)
        self.poll_answers["/health"] = (200, b"")
        self.poll_answers["/metrics"] = (200, VLLM_METRICS)
        self.poll_answers["/version"] = (200, b'{"version":"0.32.0"}')
        self.poll_answers["/kv_event_sources"] = (200, b"{}")
        self.host = host
        self.port = port
        self._send_buffer = send_buffer
        self._server: asyncio.Server | None = None
        self._place: socket.socket | None = None
        """Keeps the port for this engine while it does not listen: connections are refused, and no one else gets it."""
        self._connections: set[AcceptedConnection] = set()

    @property
    def url(self) -> str:
        """The URL that the engine listens on."""
        return f"http://{self.host}:{self.port}"

    def serve(self, *models: str) -> None:
        """Change the list of models."""
        cards = [{"id": model, "object": "model", "owned_by": "vllm"} for model in models]
        self.poll_answers["/v1/models"] = (200, json.dumps({"object": "list", "data": cards}).encode())

    async def call(self) -> Call:
        """Wait for the next request that is not a poll."""
        async with asyncio.timeout(TIMEOUT_S):
            return await self.calls.get()

    async def start(self) -> Self:
        """Start to listen; after `stop`, on the same port as before."""
        if self._place is None:
            self._place = socket.socket()
            self._place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._place.bind((self.host, self.port))
            self.port = self._place.getsockname()[1]
        self._server = await asyncio.get_running_loop().create_server(self._accept, self.host, self.port)
        return self

    async def stop(self) -> None:
        """Close every connection and stop listening, as when the process ends."""
        assert self._server is not None
        for listening in self._server.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        # One turn, in which what was accepted becomes a connection: a server that is closed before loses the socket.
        await asyncio.sleep(0)
        self._server.close()
        for connection in self._connections:
            connection.abort()
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*(connection.lost.wait() for connection in self._connections))
        self._connections.clear()

    async def close(self) -> None:
        """Stop for good."""
        await self.stop()
        if self._place is not None:
            self._place.close()

    def _accept(self) -> AcceptedConnection:
        self._connections = {connection for connection in self._connections if not connection.lost.is_set()}
        connection = AcceptedConnection(self._serve)
        self._connections.add(connection)
        return connection

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._send_buffer is not None:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer)
        connection = Connection(reader, writer)
        try:
            async for call in connection.requests():
                if call.path in self.poll_answers and self.ignores_polls:
                    continue
                if VOCABULARY_PROBE in call.body and self.forwards_vocabulary_probes:
                    self.calls.put_nowait(call)
                elif VOCABULARY_PROBE in call.body and call.path not in self.poll_answers:
                    await call.respond(400, b"{}")  # this probe for the vocabulary size is a poll, too
                elif call.path in self.poll_answers:
                    self.polls.append(call)
                    status, body = self.poll_answers[call.path]
                    await call.respond(status, body)
                else:
                    self.calls.put_nowait(call)
        except ConnectionError:
            pass  # the connection was closed while a poll was answered


@asynccontextmanager
async def scripted_engine(
    *models: str, send_buffer: int | None = None, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[ScriptedEngine]:
    """Run an engine, with the model `m` by default. `send_buffer`: bytes of send buffer per connection."""
    engine = await ScriptedEngine(models or ("m",), send_buffer, host, port).start()
    try:
        yield engine
    finally:
        await engine.close()


async def either(engines: Sequence[ScriptedEngine]) -> tuple[Call, int]:
    """Wait for the next call to any of these engines. Returns it and the number of the engine."""
    waits = [asyncio.ensure_future(engine.call()) for engine in engines]
    done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in pending:
        wait.cancel()
    first = done.pop()
    return first.result(), waits.index(first)


async def called_first(*engines: ScriptedEngine) -> tuple[Call, ScriptedEngine, ScriptedEngine]:
    """Wait for the next call to either of two engines, and return it with the engine that got it and the other one.

    Round robin begins with the one whose polls were answered first, which may be either.
    """
    call, number = await either(engines)
    return call, engines[number], engines[1 - number]
