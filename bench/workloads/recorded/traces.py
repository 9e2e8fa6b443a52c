"""Public request traces as workloads, read from a path; the project contains none.

    arena      the VTC paper's 27 clients, converted: arrival_s, client, prompt_tokens, output_tokens
    servegen   one of ServeGen's mixes, drawn from its published rates and lengths: the same columns
    azure      AzurePublicDataset 2023, times and lengths: TIMESTAMP, ContextTokens, GeneratedTokens
    mooncake   Mooncake's release for FAST 2025: timestamp (ms), input_length, output_length, hash_ids

The last has one object per line, the others are tables with these columns. A trace has no text: prompts are seeded
random tokens of its lengths, all different, except that equal `hash_ids` of Mooncake are equal blocks.
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from bench.workloads.parts.arrivals import poisson
from bench.workloads.parts.lengths import zipf
from bench.workloads.parts.prompts import EMPTY, Prompt, random_tokens
from bench.workloads.parts.spec import changed, split
from bench.workloads.parts.traffic import Call, Client
from router.runtime.mistakes import unknown

BLOCK_TOKENS: Final = 512
"""Tokens behind one of Mooncake's hashes; the last hash of a prompt may stand for fewer."""


class TraceError(ValueError):
    """A trace cannot be read; the text names the file, the place in it, and the reason."""


class Traced(NamedTuple):
    """One request of a trace."""

    at: float
    """Seconds since the first request."""
    input: int
    """Tokens of the prompt."""
    output: int
    """Tokens of the answer."""
    client: int | None = None
    blocks: tuple[int, ...] = ()
    """Ids of its blocks of 512 tokens; empty if the prompt shares nothing."""


@dataclass(frozen=True, slots=True)
class Playback:
    """How a trace is replayed. Raises ValueError if a value is invalid."""

    speed: float = 1.0
    """How many times faster than recorded."""
    client_count: int | None = None
    """Number of clients among which the requests are distributed; None for the trace's own clients, or one.

    If the trace names no clients, at random, with the requests of a conversation together; else by the client's number
    modulo this one.
    """
    rate: float | None = None
    """Requests per second, in place of the trace's times: a Poisson process, with the requests in random order."""
    popularity: float = 0.0
    """Zipf exponent of the clients' random shares of the requests."""
    stream: bool = True

    def __post_init__(self) -> None:
        if self.speed <= 0 or (self.client_count is not None and self.client_count < 1):
            raise ValueError("a trace's speed and client_count are positive")
        if self.rate is not None and (self.rate <= 0 or self.speed != 1.0):
            raise ValueError("a trace's rate is positive, and takes the place of its speed")


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a trace as a workload; clients are named after their numbers, `c0` and so on."""

    requests: tuple[Traced, ...]
    """In order of time."""
    play: Playback = Playback()

    def clients(self, seed: int) -> Sequence[Client]:
        dealt = list(self._dealt(seed))
        numbers: dict[int, list[tuple[float, int]]] = {}
        for at, number in self._in_time(seed):
            numbers.setdefault(dealt[number], []).append((at, number))
        return [Client(f"c{client}", self._calls(numbers[client], seed)) for client in sorted(numbers)]

    def _in_time(self, seed: int) -> Iterable[tuple[float, int]]:
        """Return each request's time and number, in order of time."""
        if self.play.rate is None:
            return [(request.at / self.play.speed, number) for number, request in enumerate(self.requests)]
        order = list(range(len(self.requests)))
        random = Random(f"{seed} order")
        random.shuffle(order)
        return zip(poisson(random, self.play.rate), order, strict=False)

    def _dealt(self, seed: int) -> Iterable[int]:
        """Return the client of each request."""
        count = self.play.client_count
        if any(request.client is None for request in self.requests):
            return self._by_chance(zipf(count or 1, self.play.popularity), Random(f"{seed} clients"))
        own = [request.client or 0 for request in self.requests]
        return own if count is None else [client % count for client in own]

    def _by_chance(self, shares: Sequence[float], random: Random) -> Iterable[int]:
        """Choose clients at random; requests that begin with the same two blocks are one conversation and stay
        together.
        """
        whose: dict[tuple[int, ...], int] = {}
        for number, request in enumerate(self.requests):
            conversation = request.blocks[:2] or (-1, number)
            if conversation not in whose:
                whose[conversation] = random.choices(range(len(shares)), shares)[0]
            yield whose[conversation]

    def _calls(self, numbers: Iterable[tuple[float, int]], seed: int) -> Iterator[Call]:
        for at, number in numbers:
            request = self.requests[number]
            prompt = Prompt(EMPTY, _prompt(request, number, seed))
            yield Call(at, prompt, request.output, request.output, self.play.stream)


def parse_trace(text: str) -> Trace:
    """Read `KIND:PATH` or `KIND,parameter=value,...:PATH`; the parameters are those of `Playback`.

    Raises TraceError if the file cannot be read, ValueError for any other mistake.
    """
    kind, assignments, path = split_trace(text)
    if kind not in READERS:
        raise ValueError(unknown("trace", kind, READERS))
    play = changed(Playback(), dict(map(split, assignments)))
    return Trace(read_trace(kind, path), play)


def split_trace(text: str) -> tuple[str, Sequence[str], Path]:
    """Return kind, assignments and path of `KIND,parameter=value,...:PATH`. Raises ValueError if there is no path."""
    head, colon, path = text.partition(":")
    kind, *assignments = head.split(",")
    if not colon or not path:
        raise ValueError(f"{text!r} is not KIND:PATH")
    return kind, assignments, Path(path)


def read_trace(kind: str, path: Path) -> tuple[Traced, ...]:
    """Return the requests of a file, in order of time, the first at 0. Raises TraceError."""
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            requests = sorted(READERS[kind](path, lines), key=lambda request: request.at)
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path} is no text") from None
    except csv.Error as error:
        raise TraceError(f"{path}: {error}") from None
    if not requests:
        raise TraceError(f"{path} holds no request")
    return tuple(request._replace(at=request.at - requests[0].at) for request in requests)


def _prompt(request: Traced, number: int, seed: int) -> tuple[int, ...]:
    if not request.blocks:
        return random_tokens(Random(f"{seed} {number}"), request.input)
    tokens: list[int] = []
    for block in request.blocks:
        tokens += random_tokens(Random(f"{seed} block {block}"), BLOCK_TOKENS)
    return tuple(tokens[: request.input])


Row = Mapping[str, object]


def _arena(row: Row) -> Traced:
    return Traced(_seconds(row["arrival_s"]), _count(row["prompt_tokens"]), _count(row["output_tokens"]), _client(row))


def _azure(row: Row) -> Traced:
    at = datetime.fromisoformat(str(row["TIMESTAMP"]))
    return Traced(
        (at - datetime(2000, 1, 1)).total_seconds(), _count(row["ContextTokens"]), _count(row["GeneratedTokens"])
    )


def _mooncake(row: Row) -> Traced:
    blocks, tokens = row["hash_ids"], _count(row["input_length"])
    if not isinstance(blocks, list) or len(blocks) != -(-tokens // BLOCK_TOKENS):
        raise ValueError(f"hash_ids are no list of one for each {BLOCK_TOKENS} tokens")
    at = _seconds(row["timestamp"]) / 1000
    return Traced(at, tokens, _count(row["output_length"]), blocks=tuple(map(int, blocks)))


def _seconds(value: object) -> float:
    seconds = float(str(value))
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{value!r} is no time")
    return seconds


def _count(value: object) -> int:
    count = int(str(value))
    if count < 1:
        raise ValueError(f"{value!r} is no number of tokens")
    return count


def _client(row: Row) -> int:
    return int(str(row["client"]))


def _table(of: Callable[[Row], Traced]) -> Callable[[Path, Iterable[str]], Iterator[Traced]]:
    """Return a reader of comma-separated values below a header line."""

    def read(path: Path, lines: Iterable[str]) -> Iterator[Traced]:
        reader = csv.DictReader(lines)
        return (_checked(path, reader.line_num, of, row) for row in reader)

    return read


def _json_lines(of: Callable[[Row], Traced]) -> Callable[[Path, Iterable[str]], Iterator[Traced]]:
    """Return a reader of one JSON object per line."""

    def read(path: Path, lines: Iterable[str]) -> Iterator[Traced]:
        return (_checked(path, number, of, line) for number, line in enumerate(lines, 1) if line.strip())

    return read


def _checked(path: Path, number: int, of: Callable[[Row], Traced], row: Row | str) -> Traced:
    try:
        read = json.loads(row) if isinstance(row, str) else row
        if not isinstance(read, dict):
            raise TypeError("it is no object")
        return of(read)
    except KeyError as error:
        raise TraceError(f"{path}, line {number}: there is no {error}") from None
    except json.JSONDecodeError:
        raise TraceError(f"{path}, line {number}: it is no JSON") from None
    except (ValueError, TypeError) as error:
        raise TraceError(f"{path}, line {number}: {error}") from None


READERS: Final[Mapping[str, Callable[[Path, Iterable[str]], Iterator[Traced]]]] = {
    "arena": _table(_arena),
    "azure": _table(_azure),
    "mooncake": _json_lines(_mooncake),
    "servegen": _table(_arena),
}
"""The reader of each kind of trace."""
