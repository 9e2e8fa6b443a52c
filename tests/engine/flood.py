"""What a flood of long prompts does to other clients' streams, with and without `isolation`: `python -m
tests.engine.flood`.

Two real vLLM servers for CPU hold four honest clients with many short calls open each, one light client with one call
at a time, and one client that keeps long, uncached prompts open. While an engine prefills a long prompt it has fewer
tokens per second for its streams. Slots are free, so that nobody waits in the router.

The first measurement is without a router, with and without the flood; it shows that the flood makes a difference. Then
two routers take turns in front of the same engines, one with `--dlpm-home.isolation 0` and one with the default. The
table has medians over the turns, and the second router's figures as a multiple of the first one's in the same round,
which depends less on a busy machine than seconds do. Service is computed input plus twice the output, as it arrives; a
fair share is an equal part of the service of the five clients that ask for all they can get.

The model is tiny: only with many streams is the ratio of its prefill cost to its decode cost about that of a GPU.
Prompts are token ids, and an event holds several tokens, to leave both cores to the engines. Needs the engine
environment (`make test-engine`); takes about four minutes.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

import aiohttp
import orjson

from .environment import is_complete
from .fleet import Engine, Load, Router, VllmEngine, make_model, running, running_routers
from .processes import wait_until
from .wire import COMPLETIONS, WORKER_KEY, Json

FLAGS = (
    "--max-num-seqs=256",
    "--num-gpu-blocks-override=14000",
    "--max-num-batched-tokens=8192",  # vLLM's own on a GPU of 80 GB
    "--stream-interval=10",
)
ROUTER_FLAGS = ("--trusted-header=x-client",)
WARM_UP_SECONDS = 6.0
DRAIN_SECONDS = 60.0
OUTPUT_WEIGHT = 2
HONEST = 4


@dataclass(frozen=True, slots=True)
class Asker:
    """A client that keeps a number of calls open."""

    name: str
    calls: int
    input: int
    """Tokens, as is the next."""
    output: int
    think: float = 0.0
    """Seconds between an answer and the next call."""


@dataclass(slots=True)
class Served:
    """The service of one client after the warm-up."""

    service: float = 0.0
    first_token: list[float] = field(default_factory=list)
    """Seconds to the first token of each call."""
    decoding: float = 0.0
    """Seconds in which its streams produced the tokens of the next field."""
    tokens: int = 0

    @property
    def per_token(self) -> float:
        """Seconds per token."""
        return self.decoding / self.tokens if self.tokens else 0.0


Turn = dict[str, Served]
"""By client."""


async def ask(session: aiohttp.ClientSession, url: str, asker: Asker, served: Served, counted_from: float) -> None:
    """Make one call and read it to its end; counts from `counted_from` on."""
    prompt = [random.randrange(300, 4000) for _ in range(asker.input)]
    body: Json = {"model": "tiny", "prompt": prompt, "max_tokens": asker.output, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    headers = {"content-type": "application/json", "authorization": f"Bearer {WORKER_KEY}", "x-client": asker.name}
    sent = last = time.monotonic()
    tokens = 0
    async with session.post(url + COMPLETIONS, data=orjson.dumps(body), headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            now = time.monotonic()
            more = int(orjson.loads(line[6:])["usage"]["completion_tokens"]) - tokens
            if now >= counted_from:
                served.service += OUTPUT_WEIGHT * more + (0 if tokens else asker.input)
                if tokens:
                    served.decoding += now - max(last, counted_from)
                    served.tokens += more
                else:
                    served.first_token.append(now - sent)
            tokens, last = tokens + more, now


async def keep_asking(
    session: aiohttp.ClientSession, url: str, asker: Asker, served: Served, counted_from: float
) -> None:
    while True:
        await ask(session, url, asker, served, counted_from)
        await asyncio.sleep(asker.think)


async def load(urls: Sequence[str], askers: Sequence[Asker], seconds: float) -> Turn:
    """Run all clients at once, with calls to these URLs in turn; calls open at the end are abandoned."""
    turn = {asker.name: Served() for asker in askers}
    began = time.monotonic()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        loops = [
            asyncio.create_task(
                keep_asking(session, urls[number % len(urls)], asker, turn[asker.name], began + WARM_UP_SECONDS)
            )
            for asker in askers
            for number in range(asker.calls)
        ]
        done, _ = await asyncio.wait(loops, timeout=WARM_UP_SECONDS + seconds, return_when=asyncio.FIRST_COMPLETED)
        for each in loops:
            each.cancel()
        await asyncio.wait(loops)
    for each in done:
        each.result()  # a task that has ended has failed
    return turn


@dataclass(frozen=True, slots=True)
class Shown:
    """The figures of one turn."""

    fair: float
    """Service of the honest clients as a share of their fair share, the mean."""
    least: float
    """The same of the client that got least."""
    per_token: float
    """Seconds between two tokens of the honest clients."""
    light: float
    """Median seconds to the light client's first token."""
    total: float
    """Service of all clients per second."""

    @classmethod
    def of(cls, turn: Turn, askers: Sequence[Asker], seconds: float) -> "Shown":
        """`seconds`: length of the measured time."""
        honest = [turn[asker.name] for asker in askers if asker.name.startswith("honest")]
        total = sum(served.service for served in turn.values())
        greedy = len(turn) - 1  # all but the light client
        shares = [served.service * greedy / total for served in honest]
        waits = turn["light"].first_token
        return cls(
            fmean(shares),
            min(shares),
            fmean(served.per_token for served in honest),
            median(waits) if waits else seconds,
            total / seconds,
        )


COLUMNS = (
    ("share", "fair", 1.0, "of its fair share, each honest client"),
    ("least", "least", 1.0, "... the least of them"),
    ("ms/token", "per_token", 1e3, "between two tokens of the honest"),
    ("light ms", "light", 1e3, "the light client's median time to first token"),
    ("units/s", "total", 1.0, "service of all"),
)
"""Title, member of `Shown`, factor, meaning."""


def row(name: str, shown: Sequence[Shown]) -> str:
    """Format medians."""
    middle = [median(getattr(each, member) for each in shown) * factor for _, member, factor, _ in COLUMNS]
    return f"{name:28}" + "".join(f"{value:>12.{0 if value > 100 else 2}f}" for value in middle)


def ratios(ours: Sequence[Shown], theirs: Sequence[Shown]) -> str:
    """Format medians of the ratios in each round."""
    cells = []
    for _, member, _, _ in COLUMNS:
        each = [getattr(one, member) / getattr(other, member) for one, other in zip(ours, theirs, strict=True)]
        cells.append(f"{median(each):>12.2f}")
    return f"{'isolated / not':28}" + "".join(cells)


class Measurement:
    """Turns with the same engines."""

    def __init__(self, pair: Sequence[Engine], seconds: float) -> None:
        self._pair = pair
        self._seconds = seconds

    def turn(self, urls: Sequence[str], askers: Sequence[Asker]) -> Shown:
        """Run one turn, which begins and ends with idle engines."""
        turn = asyncio.run(load(urls, askers, self._seconds))
        idle = Load(0, 0)
        wait_until(lambda: all(each.load() == idle for each in self._pair), DRAIN_SECONDS, "the engines are idle")
        return Shown.of(turn, askers, self._seconds)


def measure(pair: Sequence[Engine], folder: Path, askers: Sequence[Asker], turns: int, seconds: float) -> None:
    """Measure and print the table."""
    direct = [engine.url for engine in pair]
    measurement = Measurement(pair, seconds)
    print(f"{'':28}" + "".join(f"{title:>12}" for title, *_ in COLUMNS))
    alone = [asker for asker in askers if asker.name != "flood"]
    print(row("no flood, no router", [measurement.turn(direct, alone)]), flush=True)
    print(row("flood, no router", [measurement.turn(direct, askers)]), flush=True)
    both = (
        Router("router without isolation", pair, ("--dlpm-home.isolation=0", *ROUTER_FLAGS), folder / "without"),
        Router("router", pair, ROUTER_FLAGS, folder / "with"),
    )
    with running_routers(both):
        shown: list[list[Shown]] = [[], []]
        for _ in range(turns):
            for router, each in zip(both, shown, strict=True):
                each.append(measurement.turn([router.url], askers))
                print(row(f"  {router.name}", each[-1:]), flush=True)
    print(row("flood, isolation 0", shown[0]))
    print(row("flood, default", shown[1]))
    print(ratios(shown[1], shown[0]))
    print("; ".join(f"{title}: {meaning}" for title, _, _, meaning in COLUMNS))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.flood", description=__doc__)
    parser.add_argument("--turns", type=int, default=3, help="of each router (default: 3)")
    parser.add_argument("--seconds", type=float, default=20.0, help="counted in each turn (default: 20)")
    parser.add_argument("--long", type=int, default=16, help="long prompts that are open (default: 16)")
    parser.add_argument("--chats", type=int, default=24, help="calls that each honest client has open (default: 24)")
    parser.add_argument("--input", type=int, default=300, help="tokens of these prompts (default: 300)")
    parser.add_argument("--output", type=int, default=150, help="tokens of these answers (default: 150)")
    given = parser.parse_args()
    assert is_complete(), "there is no engine environment; `make test-engine` makes it"
    honest = [Asker(f"honest {number}", given.chats, given.input, given.output) for number in range(HONEST)]
    askers = [Asker("flood", given.long, 8000, 16), *honest, Asker("light", 1, 100, 20, think=0.2)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pair = [VllmEngine(name, make_model(), folder / name, FLAGS) for name in ("first", "second")]
        with running(pair):
            measure(pair, folder, askers, given.turns, given.seconds)


if __name__ == "__main__":
    main()
