"""`python -m tests.chaos.pause`: a stopped process (SIGSTOP), like a virtual machine that is migrated.

A stopped router loses nothing: what its workers and clients sent meanwhile lies in its sockets, and is read before any
timeout is applied. A stopped worker is silent: its streams continue at another worker, and it is used again once it
answers.
"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import rmtree
from signal import SIGCONT, SIGSTOP
from tempfile import mkdtemp
from typing import Final, Literal, NamedTuple

import aiohttp
import orjson
import uvloop

from workers.engine.tokenizer import decode, encode

from .asks import COMPLETIONS, MODEL, answer
from .processes import Server, get_json, router, signal_all, until, worker

UNREAD: Final = "a call of which half was sent before the pause"
SHORT_CALLS: Final = 10
"""Number of calls made while a worker is stopped."""
HARDWARE: Final = ("--hardware", "a100-mistral-7b")


@dataclass(frozen=True, slots=True)
class Plan:
    """Which process is stopped, for how long, and which calls are in flight then."""

    stopped: Literal["router", "worker"]
    seconds: float = 40.0
    streams: int = 12
    tokens: int = 3000
    """Tokens of each answer, which must last longer than the pause."""
    speed: float = 1.0
    """Speed of the emulated hardware."""
    flags: tuple[str, ...] = ()
    """The router's flags."""


class Seen(NamedTuple):
    """The result of a pause."""

    complete: int
    """Streams with the complete answer, byte for byte as an undisturbed worker gives it."""
    wrong: Sequence[str]
    """How each other stream, or the half-sent call, ended."""
    given_up: int
    """Times that the router took a call away from a worker."""
    elsewhere: int
    """Calls that another worker answered, of those made once the router knew that a worker is silent."""
    back: bool
    """True if the stopped worker was used again."""


async def pause(plan: Plan, directory: Path) -> Seen:
    """Start the processes and the streams, stop one process for a while, and read the streams to their end."""
    made = [worker("vllm", *HARDWARE, "--speed", str(plan.speed)) for _ in range(2 if plan.stopped == "worker" else 1)]
    timeout = aiohttp.ClientTimeout(total=None)
    try:
        await asyncio.gather(*(each.start() for each in made))
        flags = () if plan.stopped == "worker" else ("--continuation", "off", "--tries", "1")
        proxy = router(directory / "log", [each.url for each in made], "--policy", "rr+fcfs", *flags, *plan.flags)
        made.append(proxy)
        await proxy.start()
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
            return await _seen(plan, http, proxy, proxy if plan.stopped == "router" else made[0])
    finally:
        await asyncio.gather(*(each.end() for each in made))


async def _seen(plan: Plan, http: aiohttp.ClientSession, proxy: Server, stopped: Server) -> Seen:
    begun = [asyncio.Event() for _ in range(plan.streams)]
    streams = [asyncio.create_task(_stream(http, proxy, plan, n, begun[n])) for n in range(plan.streams)]
    half = await HalfCall.begin(proxy) if stopped is proxy else None
    await asyncio.gather(*(each.wait() for each in begun))
    send = stopped.signal if half is None else partial(signal_all, proxy)
    send(SIGSTOP)
    try:
        meanwhile = 0
        over = asyncio.create_task(asyncio.sleep(plan.seconds))
        if half is None:
            meanwhile = await _calls_meanwhile(http, proxy, stopped)
        else:
            await half.go_on()
        await over
    finally:
        send(SIGCONT)
    ends = [*await asyncio.gather(*streams), None if half is None else await half.end()]
    wrong = [report for report in ends if report is not None]
    complete = plan.streams - sum(UNREAD not in report for report in wrong)
    back = await _is_used(http, proxy, stopped) if stopped is not proxy else True
    return Seen(complete, wrong, await _given_up(http, proxy), meanwhile, back)


async def _stream(
    http: aiohttp.ClientSession, proxy: Server, plan: Plan, number: int, begun: asyncio.Event
) -> str | None:
    """Read a stream to its end; return what is wrong with it, or None. Sets `begun` at its first token."""
    prompt = f"Stream {number} of those that a pause must not break."
    body = {"model": MODEL, "prompt": prompt, "max_tokens": plan.tokens, "ignore_eos": True, "stream": True}
    text, done = [], False
    try:
        async with http.post(f"{proxy.url}{COMPLETIONS}", json=body) as response:
            if response.status != 200:
                return f"stream {number}: status {response.status}"
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    done = True
                    continue
                chunk = orjson.loads(line[6:])
                if "error" in chunk:
                    return f"stream {number}: {chunk['error']}"
                text += [choice["text"] for choice in chunk["choices"]]
                begun.set()
    except aiohttp.ClientError as error:
        return f"stream {number}: {error!r}"
    finally:
        begun.set()
    expected = decode(answer(encode(prompt), plan.tokens, True, 0))
    if not done or "".join(text) != expected:
        return f"stream {number}: {len(''.join(text))} of {len(expected)} characters, done: {done}"
    return None


class HalfCall:
    """A call whose body is sent in two parts, with the pause between them."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rest: bytes) -> None:
        self._reader = reader
        self._writer = writer
        self._rest = rest

    @classmethod
    async def begin(cls, proxy: Server) -> "HalfCall":
        """Connect, and send the head with half of the body."""
        body = orjson.dumps({"model": MODEL, "prompt": "One half, and the other half", "max_tokens": 8})
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        head = (
            f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
        )
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:10])
        await writer.drain()
        return cls(reader, writer, body[10:])

    async def go_on(self) -> None:
        """Send the other half."""
        self._writer.write(self._rest)
        await self._writer.drain()

    async def end(self) -> str | None:
        """Return what is wrong with its answer, or None."""
        answered = await self._reader.read()
        self._writer.close()
        return None if answered.startswith(b"HTTP/1.1 200") else f"{UNREAD}: {answered[:200]!r}"


async def _calls_meanwhile(http: aiohttp.ClientSession, proxy: Server, stopped: Server) -> int:
    """Return how many calls another worker answers once the router knows that this one is silent.

    On a busy machine it can find out by failed calls or polls first: then the breaker is open, or the worker away.
    """
    name, answered = _name(stopped), 0

    async def is_left() -> bool:
        report = await get_json(http, f"{proxy.url}/fairness")
        return report["workers"][name]["breaker"] not in ("closed", "half-open")

    await until(is_left)
    for number in range(SHORT_CALLS):
        body = {"model": MODEL, "prompt": f"Meanwhile {number}", "max_tokens": 4}
        async with http.post(f"{proxy.url}{COMPLETIONS}", json=body) as response:
            answered += response.status == 200 and response.headers["x-d2lpm-worker"] != name
    return answered


def _name(each: Server) -> str:
    return each.url.removeprefix("http://")


async def _is_used(http: aiohttp.ClientSession, proxy: Server, stopped: Server) -> bool:
    """Make calls until the worker that was stopped answers. Raises TimeoutError if it never does."""

    async def answered_there() -> bool:
        body = {"model": MODEL, "prompt": "Once more", "max_tokens": 4}
        async with http.post(f"{proxy.url}{COMPLETIONS}", json=body) as response:
            return response.headers.get("x-d2lpm-worker") == _name(stopped)

    await until(answered_there)
    return True


async def _given_up(http: aiohttp.ClientSession, proxy: Server) -> int:
    """Return how many tries the workers have failed."""
    async with http.get(f"{proxy.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("d2lpm_lost_tries_total{"))


def objections(plan: Plan, seen: Seen) -> list[str]:
    """Describe every violation; empty if there is none."""
    found = list(seen.wrong)
    if seen.complete < plan.streams:
        found.append(f"{seen.complete} of {plan.streams} streams are complete")
    if plan.stopped == "router" and seen.given_up:
        found.append(f"{seen.given_up} calls were taken away from a worker that went on all the time")
    if plan.stopped == "worker" and (seen.elsewhere < SHORT_CALLS or not seen.given_up):
        found.append(f"{seen.elsewhere} of {SHORT_CALLS} calls went elsewhere while the worker stood still")
    return found


def main() -> int:
    """Stop the router, then a worker; return the exit code."""
    failed = False
    for stopped in ("router", "worker"):
        plan = Plan(stopped)
        directory = Path(mkdtemp(prefix="chaos-pause-"))
        seen = uvloop.run(pause(plan, directory))
        print(f"{stopped} paused for {plan.seconds:g} s: {seen.complete} of {plan.streams} streams complete,", end=" ")
        print(f"{seen.given_up} calls taken from a worker, {seen.elsewhere} answered meanwhile")
        found = objections(plan, seen)
        for line in found:
            print(f"violation: {line}")
        if found:
            print(f"The router's log is in {directory}.")
            failed = True
        else:
            rmtree(directory)
    print("There are violations." if failed else "No violation was found.")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
