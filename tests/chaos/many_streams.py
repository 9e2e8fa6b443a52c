"""`python -m tests.chaos.many_streams`: many paced streams at once through several fronts (`serve --processes`).

Each event says of which stream it is, its number in it and when the engine sent it, so a lost, repeated or strayed
one shows. Some streams go to the engine directly at the same time: their delay is that of engine and client alone.
The exit code is 0 if each stream was complete, held nothing of another, and was charged exactly.
"""

import argparse
import asyncio
import os
import re
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from signal import SIGTERM
from tempfile import mkdtemp
from typing import Final, cast

import aiohttp
import httptools
import uvloop

from .leftovers import at_rest
from .processes import Server, cpu_ticks, get_json, holds, is_ready, router, router_processes, until
from .violations import exit_code

EVENT: Final = re.compile(rb'"text": ?" (\w+)\.(\d+)\.(\d+)"')
DONE: Final = b"data: [DONE]\n\n"
HUNG_SECONDS: Final = 300.0
"""Seconds beyond the length of the streams after which they count as hung."""
TOO_MANY: Final = 429
RETRY_SECONDS: Final = 1.0
OPENED_PER_SECOND: Final = 200
SPARE_DESCRIPTORS: Final = 200
STANDBY: Final = "standby"
TICK: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Plan:
    """The load."""

    streams: int = 2000
    pace: float = 10.0
    """Events per second of each stream."""
    seconds: float = 30.0
    """How long each stream lasts."""
    direct: int = 100
    """Streams that go to the engine directly, besides the others."""
    fronts: int = 2

    @property
    def events(self) -> int:
        """Events of each stream."""
        return max(1, round(self.pace * self.seconds))


@dataclass(slots=True)
class Stream:
    """What one client has received."""

    name: bytes
    events: int
    """How many there must be."""
    delays: list[int] = field(default_factory=list)
    """Nanoseconds from the engine to the client, of each event."""
    faults: list[str] = field(default_factory=list)
    status: int = 0
    sent: tuple[int, int] = (0, 0)
    """When the engine sent the first and the last event, in nanoseconds."""
    unread: bytes = b""
    refusals: int = 0
    """How often the call was refused before it was accepted."""

    def take(self, data: bytes, now: int) -> None:
        """Read a block of the body. `now`: when it came, in nanoseconds."""
        *events, self.unread = (self.unread + data).split(b"\n\n")
        for event in events:
            found = EVENT.search(event)
            if found is None:
                if event != DONE.strip():
                    self.faults.append(f"an unknown event: {event[:200]!r}")
                continue
            name, number, sent = found[1], int(found[2]), int(found[3])
            if (name, number) != (self.name, len(self.delays) + 1):
                self.faults.append(f"event {number} of {name.decode()} in place of {len(self.delays) + 1}")
            self.delays.append(now - sent)
            self.sent = (self.sent[0] or sent, sent)

    def refuse(self) -> None:
        """Note that the call was refused, as by a router whose scheduler lags: it has lost nothing."""
        self.refusals += 1
        self.status, self.unread = 0, b""
        self.faults.clear()

    @property
    def objections(self) -> list[str]:
        """Describe what is wrong with the stream once it has ended."""
        found = list(self.faults[:3])
        if self.status != 200:
            found.append(f"status {self.status}")
        elif len(self.delays) != self.events or self.unread:
            found.append(f"{len(self.delays)} of {self.events} events")
        return [f"{self.name.decode()}: {each}" for each in found]


class StreamClient(asyncio.Protocol):
    """A connection with one call."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the call."""
        self._transport = cast(asyncio.Transport, transport)
        body = b'{"model":"m","prompt":"%b","max_tokens":%d,"stream":true,"ignore_eos":true}' % (
            *(self.stream.name, self.stream.events),
        )
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self._transport.write(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))

    def data_received(self, data: bytes) -> None:
        """Read a block."""
        self._now = time.monotonic_ns()
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        """Note that the stream has ended, however it did."""
        if not self.ended.done():
            self.stream.faults.append(f"the connection was closed: {error}")
            self.ended.set_result(None)

    def on_headers_complete(self) -> None:
        """Take the status. Called by the parser, as are the other methods with `on_`."""
        self.stream.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.stream.take(body, self._now)

    def on_message_complete(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
        self._transport.close()


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run."""

    plan: Plan
    routed: Sequence[Stream]
    direct: Sequence[Stream]
    charged: int
    """Output tokens that the router charged."""
    calls: Mapping[str, int]
    """Streams of each front while all ran."""
    cpu_seconds: Mapping[str, float]
    """CPU time of each process of the router, meanwhile, the standby aside."""
    left: Sequence[str]
    code: int | None

    @property
    def objections(self) -> list[str]:
        """Describe every violation; none depends on the speed of the machine."""
        found = [each for stream in (*self.routed, *self.direct) for each in stream.objections]
        if (wanted := len(self.routed) * self.plan.events) != self.charged:
            found.append(f"{self.charged} output tokens were charged, not {wanted}")
        found += self.left
        if self.code != 0:
            found.append(f"the router ended with code {self.code}")
        return found


async def run(plan: Plan, directory: Path) -> Result:
    """Run all streams. `directory`: for the router's log."""
    flags = ("--processes", str(plan.fronts + 1), "--window", "off", "--log-level", "warning")
    engine = Server("tests.chaos.paced_engine", "--pace", str(plan.pace))
    looks = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
    async with looks as http:
        await engine.start()
        proxy = router(directory / "log", [engine.url], *flags)
        try:
            await proxy.start()
            await until(partial(holds, http, proxy, is_ready))
            before = cpu_seconds(proxy.pid)
            playing = asyncio.create_task(play(plan, proxy.port, engine.port))
            calls = await all_under_way(http, proxy, plan, playing)
            routed, direct = await playing
            used = {name: seconds - before.get(name, 0.0) for name, seconds in cpu_seconds(proxy.pid).items()}
            left = await at_rest(http, proxy.url, [engine.url])
            report = await get_json(http, f"{proxy.url}/fairness")
        finally:
            code = await proxy.end(SIGTERM)
            await engine.end()
    charged = sum(each["service"]["output"] for each in report["clients"].values())
    return Result(plan, routed, direct, charged, calls, used, left, code)


async def play(plan: Plan, port: int, engine_port: int) -> tuple[list[Stream], list[Stream]]:
    """Run all streams at once, most of them by the router and some directly. Returns both."""
    calls = list[asyncio.Task[None]]()
    share = max(1, plan.streams // plan.direct) if plan.direct else plan.streams + 1
    routed, direct = list[Stream](), list[Stream]()
    for number in range(plan.streams):
        routed.append(Stream(b"routed%d" % number, plan.events))
        begun = [(routed[-1], port)]
        if number % share == 0 and len(direct) < plan.direct:
            direct.append(Stream(b"direct%d" % number, plan.events))
            begun.append((direct[-1], engine_port))
        calls += [asyncio.create_task(ask(stream, where)) for stream, where in begun]
        await asyncio.sleep(1 / OPENED_PER_SECOND)
    _, hung = await asyncio.wait(calls, timeout=plan.seconds + HUNG_SECONDS)
    for call in hung:
        call.cancel()
    return routed, direct


async def ask(stream: Stream, port: int) -> None:
    """Receive a stream to its end, however that is. A call that is refused for now is made again."""
    while True:
        _, client = await asyncio.get_running_loop().create_connection(partial(StreamClient, stream), "127.0.0.1", port)
        await client.ended
        if stream.status != TOO_MANY or stream.delays:
            return
        stream.refuse()
        await asyncio.sleep(RETRY_SECONDS)


async def all_under_way(
    http: aiohttp.ClientSession, proxy: Server, plan: Plan, playing: "asyncio.Task[object]"
) -> dict[str, int]:
    """Wait until all streams run. Returns the calls of each front then: the most that were seen, if not all ran."""
    most = dict[str, int]()
    while sum(most.values()) < plan.streams and not playing.done():
        await asyncio.sleep(0.5)
        async with http.get(f"{proxy.url}/metrics") as response:
            found = re.findall(r'd2lpm_process_calls{process="(front-\d+)"} (\S+)', await response.text())
        now = {name: int(float(value)) for name, value in found}
        most = max(most, now, key=lambda each: sum(each.values()))
    return most


def cpu_seconds(pid: int) -> dict[str, float]:
    """Return the CPU time that each process of a router has used."""
    found = dict[str, float]()
    for name, process in router_processes(pid).items():
        if name == STANDBY:  # it imports at first, and then waits
            continue
        found[name] = cpu_ticks(process) / TICK
    return found


def quantile(values: Sequence[int], share: float) -> float:
    """Return a quantile of nanoseconds, in milliseconds; not a number if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / 1e6 if ordered else float("nan")


def pace_of(streams: Sequence[Stream]) -> float:
    """Return the events per second with which the engine sent the mean stream."""
    spans = [(len(each.delays) - 1) / (each.sent[1] - each.sent[0]) * 1e9 for each in streams if len(each.delays) > 1]
    return sum(spans) / len(spans) if spans else float("nan")


def table(result: Result) -> str:
    """Return the results as a table."""
    received = sum(len(stream.delays) for stream in result.routed)
    rows: list[tuple[str, object]] = [
        ("streams, and directly", f"{len(result.routed)}, {len(result.direct)}"),
        ("complete", sum(not stream.objections for stream in result.routed)),
        ("calls refused for now, and made again", sum(stream.refusals for stream in result.routed)),
        ("events of each", result.plan.events),
        ("events a second of each, as sent", f"{pace_of(result.routed):.2f}"),
        ("events a second of all, as sent", f"{pace_of(result.routed) * len(result.routed):.0f}"),
        ("streams of each front", ", ".join(f"{name} {count}" for name, count in result.calls.items())),
        ("output tokens charged", result.charged),
    ]
    for name, streams in (("router", result.routed), ("direct", result.direct)):
        delays = [delay for stream in streams for delay in stream.delays]
        figures = [f"{quantile(delays, share):.1f}" for share in (0.5, 0.99, 1.0)]
        rows.append((f"ms to the client, {name}: p50, p99, most", ", ".join(figures)))
    for name, seconds in result.cpu_seconds.items():
        rows.append((f"CPU µs per event, {name}", f"{seconds / max(1, received) * 1e6:.1f}"))
    return "\n".join(f"{name:42} {value}" for name, value in rows)


def main() -> int:
    """Run, print the results, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.many_streams", description=__doc__)
    for name, help_text in (
        ("streams", "at once"),
        ("pace", "events per second of each"),
        ("seconds", "that each lasts"),
        ("direct", "streams that go to the engine directly"),
        ("fronts", "of the router"),
    ):
        default = getattr(Plan(), name)
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{help_text} ({default})")
    plan = Plan(**vars(parser.parse_args()))
    _allow_files(plan.streams + plan.direct + SPARE_DESCRIPTORS)
    directory = Path(mkdtemp(prefix="many-streams-"))
    result = uvloop.run(run(plan, directory))
    print(table(result))
    return exit_code(result.objections, directory, "The router's log is")


def _allow_files(count: int) -> None:
    """Allow so many open files, as far as the system lets this process and the engine, which inherits the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))


if __name__ == "__main__":
    sys.exit(main())
