"""Peers of a router whose cost is measured: a worker whose answers are made beforehand, and a client.

Each is a process of its own that costs little, so that both cores of a small machine suffice: python -m
bench.lab.micro.canned_peers worker GAP_MS CHUNKS, or client PORT STREAMS SECONDS CHUNKS.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any, Final, NamedTuple

PEERS: Final = (sys.executable, "-m", "bench.lab.micro.canned_peers")
CHUNKS: Final = 16
"""Of an answer, unless another number is asked for."""
WORKERS: Final = 4
MODEL: Final = "m"
WARM_UP_SECONDS: Final = 2.0
GROUPS: Final = 32
"""Prefixes of the prompts."""
PREFIX_WORDS: Final = 800
HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
END: Final = b"0\r\n\r\n"
LENGTH: Final = b"content-length:"


class Driven(NamedTuple):
    """What a client did while it was measured."""

    calls: int
    cpu_seconds: float
    """That the router used."""
    median_ms: float
    """What the median call took."""


@contextmanager
def canned_workers(gap_ms: float, chunks: int = CHUNKS) -> Iterator[Sequence[int]]:
    """Run workers that send a chunk every `gap_ms` milliseconds, or all at once if that is 0; yield their ports."""
    with ExitStack() as stack:
        ports = []
        for _ in range(WORKERS):
            command = [*PEERS, "worker", str(gap_ms), str(chunks)]
            worker = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0)
            )
            assert worker.stdout is not None
            ports.append(int(worker.stdout.readline()))
        yield ports


def drive(port: int, streams: int, seconds: float, cpu_seconds: Callable[[], float], chunks: int = CHUNKS) -> Driven:
    """Keep this many chats open at a router, and measure for some seconds after a warm-up.

    `cpu_seconds`: returns what the router has used; called when the measurement begins and when it is over. Raises
    ValueError if no chat was answered.
    """
    command = [*PEERS, "client", str(port), str(streams), str(seconds), str(chunks)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        client.stdout.readline()
        before = cpu_seconds()
        calls, _, median_ms = client.stdout.readline().partition(" ")
        used = cpu_seconds() - before
    if not calls.isdigit() or not int(calls):
        raise ValueError("no chat was answered")
    return Driven(int(calls), used, float(median_ms))


def main(role: str, *arguments: str) -> None:
    """Run one peer."""
    if role == "worker":
        gap_ms, chunks = arguments
        asyncio.run(_serve(float(gap_ms) / 1000, _answer(int(chunks))))
    else:
        port, streams, seconds, chunks = arguments
        asyncio.run(_drive(int(port), int(streams), float(seconds), int(chunks)))


async def _serve(gap: float, answer: Sequence[bytes]) -> None:
    """Serve until standard input is closed. `gap`: seconds between two chunks; 0 to send all at once."""
    server = await asyncio.get_running_loop().create_server(lambda: _Worker(gap, answer), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


class _Worker(asyncio.Protocol):
    """A connection of the router to the worker."""

    def __init__(self, gap: float, answer: Sequence[bytes]) -> None:
        self._gap = gap
        self._answer = answer
        self._received = b""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, complete, body = self._received.partition(b"\r\n\r\n")
        if not complete:
            return
        lower = head.lower()
        length = int(lower.partition(LENGTH)[2].partition(b"\r")[0] or 0)
        if len(body) < length:
            return
        self._received = b""
        if head.startswith(b"GET"):
            self._transport.write(PAGES.get(head.split(b" ")[1], _page("{}")))
        elif self._gap:
            self._send_chunk(0)
        else:
            self._transport.write(HEAD + b"".join(self._answer))

    def _send_chunk(self, number: int) -> None:
        self._transport.write(self._answer[number] if number else HEAD + self._answer[0])
        if number + 1 < len(self._answer) and not self._transport.is_closing():
            asyncio.get_running_loop().call_later(self._gap, self._send_chunk, number + 1)


def _page(text: str) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text.encode())


def _event(fields: dict[str, Any] | None) -> bytes:
    data = b"data: %b\n\n" % (b"[DONE]" if fields is None else json.dumps(fields).encode())
    return b"%x\r\n%b\r\n" % (len(data), data)


def _answer(chunks: int) -> Sequence[bytes]:
    """Return what vLLM sends for a streamed chat that asks for usage in every chunk."""
    last = {**_DESCRIPTION, "choices": [], "usage": _usage(chunks)}
    return [*[_event(_chunk(number, chunks)) for number in range(chunks)], _event(last) + _event(None) + END]


def _chunk(number: int, chunks: int) -> dict[str, Any]:
    reason = "stop" if number == chunks - 1 else None
    choice = {"index": 0, "delta": {"content": f" tok{number}"}, "logprobs": None, "finish_reason": reason}
    return {**_DESCRIPTION, "choices": [choice], "usage": _usage(number + 1)}


def _usage(output: int) -> dict[str, Any]:
    return {"prompt_tokens": 500, "total_tokens": 500 + output, "completion_tokens": output}


_DESCRIPTION: Final = {"id": "chatcmpl-x", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
PAGES: Final = {
    b"/v1/models": _page('{"object": "list", "data": [{"id": "m", "max_model_len": 131072}]}'),
    b"/version": _page('{"version": "0.32.0"}'),
    b"/metrics": _page('vllm:num_requests_running{engine="0",model_name="m"} 0.0\n'),
}


async def _drive(port: int, streams: int, seconds: float, chunks: int) -> None:
    """Keep this many chats open; print a line when the measurement begins, and how many ended when it is over, with
    the milliseconds that the median one took.
    """
    took = list[float]()
    clients = [asyncio.create_task(_chat_on(port, number, streams, chunks, took)) for number in range(streams)]
    await asyncio.sleep(WARM_UP_SECONDS)
    before = len(took)
    print("measuring", flush=True)
    await asyncio.sleep(seconds)
    measured = took[before:]
    print(len(measured), 1000 * median(measured or [0.0]), flush=True)
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)


async def _chat_on(port: int, number: int, step: int, chunks: int, took: list[float]) -> None:
    """Send one chat after another over one connection. Appends the seconds of each."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while True:
            request = _request(number % GROUPS, number, chunks)
            sent = time.perf_counter()
            writer.write(request)
            await reader.readuntil(b"data: [DONE]\n\n\r\n" + END)
            took.append(time.perf_counter() - sent)
            number += step
    finally:
        writer.close()


def _request(group: int, question: int, chunks: int) -> bytes:
    prefix = " ".join([f"w{(group * 7919 + word * 104729) % 1000}" for word in range(PREFIX_WORDS)])
    messages = [{"role": "system", "content": prefix}, {"role": "user", "content": f"question {question}"}]
    body = json.dumps({"model": MODEL, "stream": True, "max_tokens": chunks, "messages": messages}).encode()
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        f"Authorization: Bearer sk-{group % 8}",
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


if __name__ == "__main__":
    main(*sys.argv[1:])
