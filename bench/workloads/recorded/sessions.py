"""Recorded sessions of coding agents as a workload: each call follows the previous answer after a tool's time.

A file has one session per line: `tool_tokens` and `system_tokens`, with which its prompts begin, and `requests`. Each
request is a list: seconds since the beginning, input tokens, output tokens, leading blocks of 64 tokens that the prompt
shares with the previous one, seconds that the call took, seconds between the previous answer and this call (null if
unknown), and why the answer ended ("tool_use", "end_turn"). An answer without tokens, because it was interrupted, has
one token here. Prompts are seeded random tokens of these lengths; sessions with equal tools and system prompt begin
alike.

Every third session of a file is kept aside (`part=aside`): what is tuned on the others is judged on these.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from bench.workloads.parts.arrivals import poisson
from bench.workloads.parts.prompts import EMPTY, Prompt, Text, random_tokens
from bench.workloads.parts.spec import changed, split
from bench.workloads.parts.traffic import Call, Client, Draw, Ending, Outcome, closed_loop
from bench.workloads.recorded.traces import READERS, Trace, TraceError, parse_trace, split_trace
from router.runtime.mistakes import unknown

KIND: Final = "sessions"
BLOCK_TOKENS: Final = 64
PARTS: Final = ("all", "tuning", "aside")
SHORT_INPUT: Final = (300, 1500)
"""Bounds of the prompts of one-shot calls, in tokens."""
SHORT_OUTPUT: Final = 100
LIGHT: Final = "light"
ONE_SHOT: Final = "one-shot"
"""What the names of such clients begin with."""
ENDS_TURN: Final = {"end_turn": True, "tool_use": False}


class Turn(NamedTuple):
    """One call of a session; lengths in tokens."""

    input: int
    output: int
    shared: int
    """How much of the previous prompt is at its beginning, in whole blocks."""
    pause: float
    """Seconds since the previous answer."""
    ends_turn: bool | None = None
    """Whether its answer ends the agent's turn; None if the recording does not say."""


class Recorded(NamedTuple):
    """A session."""

    tools: int
    """Tokens of the tools' descriptions."""
    system: int
    """Tokens of the system prompt."""
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class SessionPlay:
    """How sessions are replayed. Raises ValueError if a value is invalid."""

    client_count: int = 12
    concurrency: int = 3
    """Open sessions per client; when one is over, the client begins a random other one."""
    longest: int = 60_000
    """Most tokens of a prompt; a session ends before the first longer one."""
    patience: float = 30.0
    """Most seconds of a pause: people leave sessions for hours."""
    stream: bool = True
    working_set: int = 0
    """Tokens of the contexts of all open sessions: as many are open as have this much on average. 0: as `concurrency`
    says."""
    light: int = 0
    """Clients beside the others that have one open session each."""
    heavy: int = 0
    """Open sessions of the first client; 0: as many as the others."""
    one_shots: float = 0.0
    """Calls per second of a further client that share nothing and belong to no session."""
    labels: bool = True
    """Whether calls say which session they belong to."""
    alike: bool = False
    """Whether all sessions begin with the same tools and system prompt."""
    part: str = "all"
    """Which sessions of the file are played: all, tuning (two of three) or aside (the others)."""

    def __post_init__(self) -> None:
        if self.part not in PARTS:
            raise ValueError(unknown("part", self.part, PARTS))
        if min(self.working_set, self.light, self.heavy, self.one_shots) < 0:
            raise ValueError("a working set, and numbers and rates of clients, are not negative")
        if min(self.client_count, self.concurrency, self.longest) < 1 or self.patience < 0:
            raise ValueError("sessions need a client, one open session, room for a prompt, and no negative patience")


@dataclass(frozen=True, slots=True)
class Sessions:
    """The sessions of a file as a workload."""

    sessions: tuple[Recorded, ...]
    play: SessionPlay = SessionPlay()

    def clients(self, seed: int) -> Sequence[Client]:
        """Return the clients. Raises ValueError if no session begins with a prompt that is short enough."""
        play = self.play
        short = [session for session in self.played() if session.turns[0].input <= play.longest]
        if not short:
            raise ValueError(f"no session begins with a prompt of up to {play.longest} tokens")
        beginnings = {each[:2]: _beginning(each, seed) for each in short}
        if play.alike:
            longest = max(beginnings.values(), key=lambda text: len(text.tokens))
            beginnings = {each: Text(longest.tokens[: sum(each)]) for each in beginnings}
        clients = [
            Client(name, closed_loop(self._draw(name, short, beginnings, Random(f"{seed} {number}")), open_sessions))
            for number, (name, open_sessions) in enumerate(self._open_sessions(short), 1)
        ]
        if play.one_shots:
            clients.append(Client(ONE_SHOT, self._one_shots(Random(f"{seed} one-shots"))))
        return clients

    def played(self) -> Sequence[Recorded]:
        """Return the sessions of the part that is played."""
        if self.play.part == "all":
            return self.sessions
        aside = self.play.part == "aside"
        return [session for number, session in enumerate(self.sessions, 1) if (number % 3 == 0) is aside]

    def _open_sessions(self, short: Sequence[Recorded]) -> Sequence[tuple[str, int]]:
        """Return the name of each client and the number of its open sessions."""
        play = self.play
        counts = [play.concurrency] * play.client_count
        if play.working_set:
            inputs = [turn.input for session in short for turn in self._short_turns(session)]
            total = round(play.working_set * len(inputs) / sum(inputs)) - play.light
            counts = [max(1, (total + number) // play.client_count) for number in range(play.client_count)]
        if play.heavy:
            counts[0] = play.heavy
        usual = [(f"c{number}", open_sessions) for number, open_sessions in enumerate(counts, 1)]
        return usual + [(f"{LIGHT}{number}", 1) for number in range(1, play.light + 1)]

    def _short_turns(self, session: Recorded) -> Iterator[Turn]:
        return takewhile(lambda turn: turn.input <= self.play.longest, session.turns)

    def _one_shots(self, random: Random) -> Iterator[Call]:
        for at in poisson(random, self.play.one_shots):
            size = random.randint(*SHORT_INPUT)
            prompt = Prompt(EMPTY, random_tokens(random, size))
            yield Call(at, prompt, SHORT_OUTPUT, SHORT_OUTPUT, self.play.stream, fresh_tokens=size)

    def _draw(
        self, client: str, short: Sequence[Recorded], beginnings: dict[tuple[int, int], Text], random: Random
    ) -> Draw:
        numbers = count(1)

        def draw(at: float) -> Sequence[Call]:
            own = Random(random.getrandbits(64))
            session = own.choice(short)
            turns = self._short_turns(session)
            label = f"{client} session {next(numbers)}" if self.play.labels else None
            return [self._call(own, label, at, Prompt(beginnings[session[:2]], ()), next(turns), turns)]

        return draw

    def _call(
        self, random: Random, label: str | None, at: float, before: Prompt, turn: Turn, later: Iterator[Turn]
    ) -> Call:
        """Return the call of a turn, whose prompt continues `before`, cut to the turn's length."""
        prompt = _continued(before, turn.input, random)

        def answered(_: Call, ending: Ending) -> Iterable[Call]:
            following = next(later, None)
            if following is None or ending.outcome is not Outcome.DONE:
                return []
            history = _kept(prompt, ending.answer, following.shared)
            at = ending.at + min(following.pause, self.play.patience)
            return [self._call(random, label, at, history, following, later)]

        return Call(
            at,
            prompt,
            turn.output,
            turn.output,
            self.play.stream,
            session=label,
            ends_turn=turn.ends_turn,
            fresh_tokens=max(0, turn.input - len(before)),
            then=answered,
        )


def parse_recorded(text: str) -> Trace | Sessions:
    """Read `sessions,parameter=value,...:PATH`, with the parameters of `SessionPlay`, or what `parse_trace` reads.

    Raises TraceError if the file cannot be read, ValueError for any other mistake.
    """
    kind, assignments, path = split_trace(text)
    if kind not in (*READERS, KIND):
        raise ValueError(unknown("trace", kind, (*READERS, KIND)))
    if kind != KIND:
        return parse_trace(text)
    play = changed(SessionPlay(), dict(map(split, assignments)))
    return Sessions(read_sessions(path), play)


def read_sessions(path: Path) -> tuple[Recorded, ...]:
    """Return the sessions of a file that have a call. Raises TraceError."""
    try:
        with path.open(encoding="utf-8") as lines:
            read = tuple(_read(path, number, line) for number, line in enumerate(lines, 1) if line.strip())
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path} is no text") from None
    if not any(session.turns for session in read):
        raise TraceError(f"{path} holds no request")
    return tuple(session for session in read if session.turns)


def _read(path: Path, number: int, line: str) -> Recorded:
    try:
        read = json.loads(line)
        turns = tuple(_turn(request) for request in read["requests"])
        return Recorded(int(read["tool_tokens"]), int(read["system_tokens"]), turns)
    except KeyError as error:
        raise TraceError(f"{path}, line {number}: there is no {error}") from None
    except (ValueError, TypeError, IndexError) as error:
        raise TraceError(f"{path}, line {number}: {error}") from None


def _turn(request: Sequence[float | None]) -> Turn:
    _, size, output, blocks, _, pause = request[:6]
    reason = request[6] if len(request) > 6 else None
    if not size or size < 1:
        raise ValueError(f"{request!r} has no input")
    return Turn(
        int(size),
        max(1, int(output or 0)),
        int(blocks or 0) * BLOCK_TOKENS,
        max(0.0, pause or 0.0),
        ENDS_TURN.get(str(reason)),
    )


def _beginning(session: Recorded, seed: int) -> Text:
    return Text(random_tokens(Random(f"{seed} {session.tools} {session.system}"), session.tools + session.system))


def _kept(prompt: Prompt, answer: tuple[int, ...], shared: int) -> Prompt:
    """Return what the next prompt begins with: this one and its answer, unless the client cut it before its last
    block.
    """
    if shared > len(prompt) - BLOCK_TOKENS:
        return prompt.followed_by(answer)
    return Prompt(EMPTY, prompt.tokens[:shared])


def _continued(before: Prompt, size: int, random: Random) -> Prompt:
    """Return a prompt of `size` tokens: `before` and new ones, or only the beginning of `before`."""
    if len(before) > size:
        return Prompt(EMPTY, before.tokens[:size])
    return before.followed_by(random_tokens(random, size - len(before)))
