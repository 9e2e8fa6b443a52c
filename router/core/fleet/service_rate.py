"""How fast one worker is, as far as its answers show.

The steps of an engine are not seen. But every stream that runs gains one token in each, so that the tokens gained over
the streams that ran are the steps; and what starts at one moment was computed since the start before it.
"""

from dataclasses import dataclass
from typing import NamedTuple

FIRST_SECONDS_PER_TOKEN = 1e-4
"""Of prefill, before anything was learned: between what 7B models need on an A100 and on an A6000."""
LEAST_TOKENS = 256
"""What starts at one moment with fewer tokens shows the fixed cost of a step, not the cost of its tokens."""
SLOWER, FASTER = 1.04, 0.94
"""Steps of the learned prefill time, so that it settles where two fifths of what is seen are faster, and no request
that waited for something else moves it far."""
FIRST_LESSONS = 8
"""So many times what was faster is believed at once: the first start may have waited for an engine that warmed up."""
FIRST_SECONDS_PER_OUTPUT_TOKEN = 0.05
"""Of one answer, before anything was learned: a slow engine, so that nobody is charged too much."""
LEAST_OUTPUT_TOKENS = 2.0
"""Of output, before its pace is learned from them."""
DELAY_FACTOR = 2.0
"""How many times longer than prefill makes it clear that something else was waited for."""
BURST = 0.25
"""Starts are of one step if they come within this share of the time that it took."""
UNSURE = 1.25
"""How many times longer than by its pace an engine may have needed for what is known, before that shows anything."""
TURNOVER_HALF_LIFE = 2.0
SERVICE_HALF_LIFE = 10.0
"""Seconds of work after which what was seen counts half."""
LEAST_SECONDS = 1.0
"""Of work, before averages are told."""
DECODE_HALF_LIFE = 5.0
"""Seconds without prefill after which what was seen of them counts half."""
LEAST_STEP_TOKENS = 160
"""A step reads all weights, however few tokens it computes: with models of 7B on A10G, A100, A6000 and H100 that takes
as long as 147 to 430 tokens of prefill."""


class Turnover(NamedTuple):
    """What an engine starts in one of its steps."""

    requests: float = 0.0
    tokens: float = 0.0
    """Uncached input; this and the requests are averages."""
    burst_tokens: int = 0
    """Uncached input seen to start in the latest step, without its first request, which may have taken several."""


@dataclass(slots=True)
class Burst:
    """Requests whose first tokens came at one moment, and what the engine may have computed until then."""

    since: float
    """No part of them was computed before: others were, or they had not been sent, or had no place in the batch."""
    end: float
    """Their last first token."""
    tokens: int
    """Uncached input of them: predicted, or by the engine's word where there is one."""
    unseen: int
    """That of others that were computed in the same time, or in part, and whose start did not show."""
    waiting: int = 0
    """That of others which may have been computed in part in the same time, and still waited at the end."""


class ServiceRate:
    """One worker's prefill, turnover and service, measured."""

    def __init__(self) -> None:
        self._now = 0.0
        self._seconds_per_token = FIRST_SECONDS_PER_TOKEN
        self._lessons = 0
        self.last_start_delayed = False
        """Whether what started last had waited for more than prefill: for a place in the batch, or in the cache."""
        # The latest burst of starts: since when it was computed, its first start and its last, its tokens.
        self._begin = self._first = self._last = 0.0
        self._tokens = self._first_tokens = 0
        self._had_place = False
        self._burst = Burst(0.0, 0.0, 0, 0)
        self._unseen = 0
        """Uncached input that was computed since the latest burst and never showed."""
        self._freed = 0.0
        """When a request ended last, and left its place to another."""
        self.seconds_per_output_token = FIRST_SECONDS_PER_OUTPUT_TOKEN
        """What one answer waits for its next token, by those that show it: streams, and whole answers at their end."""
        # Wearing away by TURNOVER_HALF_LIFE.
        self._answer_seconds = self._answer_tokens = 0.0
        self._seconds = self._stream_seconds = self._gained = 0.0
        self._starts = self._start_tokens = self._bursts = 0.0
        # Wearing away by SERVICE_HALF_LIFE.
        # Wearing away by DECODE_HALF_LIFE.
        self._decode_stream_seconds = self._decode_gained = 0.0
        self._decodes_alone = False
        self._busy = self._served = self._full = self._full_served = self._ended_tokens = 0.0

    def prefill_seconds(self, tokens: float) -> float:
        """How long the worker takes over so many uncached input tokens, when nothing else waits."""
        return tokens * self._seconds_per_token

    @property
    def rate(self) -> float | None:
        """Cost units served in a second during which it had no room for more; positive, None before that was seen."""
        return self._full_served / self._full if self._full >= LEAST_SECONDS and self._full_served > 0.0 else None

    @property
    def least_rate(self) -> float | None:
        """Cost units served in a second during which it had any work: it can do that, and may be able to do more."""
        return self._served / self._busy if self._busy >= LEAST_SECONDS and self._served > 0.0 else None

    @property
    def streams(self) -> float:
        """How many ran at a time of late; at least 1."""
        return max(1.0, self._stream_seconds / self._seconds) if self._seconds > 0.0 else 1.0

    @property
    def step_seconds(self) -> float:
        """What a stream waits for its next token, of late; 0 before that was seen."""
        return self._stream_seconds / self._gained if self._gained > 1.0 else 0.0

    @property
    def decode_seconds(self) -> float:
        """What a stream waits for its next token while nothing is prefilled; before that was seen, the least it can be.

        To take it for too little is the safe side: a refill is held back too long then (`isolation.py`), until what is
        prefilled is at its end and the truth is seen.
        """
        least = self.prefill_seconds(LEAST_STEP_TOKENS)
        if self._decode_stream_seconds < LEAST_SECONDS or self._decode_gained < LEAST_OUTPUT_TOKENS:
            return least
        return max(least, self._decode_stream_seconds / self._decode_gained)

    @property
    def turnover(self) -> Turnover:
        """Of late; nothing before it worked for a while.

        Where answers are of one token no steps show: then a burst is a step, and of its tokens only those are known to
        be of one step that came with its first request.
        """
        burst = self._tokens - self._first_tokens
        if self._seconds < LEAST_SECONDS:
            return Turnover(burst_tokens=burst)
        if self._gained <= self._starts:
            return Turnover(self._starts / max(1.0, self._bursts), 0.0, burst)
        steps = max(1.0, self._gained / self.streams)
        return Turnover(self._starts / steps, self._start_tokens / steps, burst)

    def advance(
        self, now: float, *, streams: int, busy: bool, full: bool, seen_answers: int = 0, prefills: bool = True
    ) -> None:
        """Until now so many streams ran, and it had work, and no room for more, or not. Rest wears nothing away.

        `shown`: how many answers streamed, so that each of their tokens was seen. `prefills`: whether it may have
        prefilled anything.
        """
        seconds, self._now = now - self._now, now
        if not busy or seconds <= 0.0:
            return
        self._decodes_alone = streams > 0 and not prefills
        left = 0.5 ** (seconds / TURNOVER_HALF_LIFE)
        self._seconds = self._seconds * left + seconds
        self._stream_seconds = self._stream_seconds * left + seconds * streams
        self._answer_seconds = self._answer_seconds * left + seconds * seen_answers
        self._answer_tokens *= left
        self._gained *= left
        self._starts *= left
        self._start_tokens *= left
        self._bursts *= left
        if self._decodes_alone:
            left = 0.5 ** (seconds / DECODE_HALF_LIFE)
            self._decode_stream_seconds = self._decode_stream_seconds * left + seconds * streams
            self._decode_gained *= left
        left = 0.5 ** (seconds / SERVICE_HALF_LIFE)
        self._busy = self._busy * left + seconds
        self._served *= left
        self._ended_tokens *= left
        if full:
            self._full = self._full * left + seconds
            self._full_served *= left

    def add_service(self, cost: float, tokens: int, *, full: bool) -> None:
        """It served so much, in cost units; its streams gained so many tokens."""
        self._gained += tokens
        if self._decodes_alone:
            self._decode_gained += tokens
        self._served += cost
        if full:
            self._full_served += cost

    def add_output(self, tokens: float, seconds: float = 0.0) -> None:
        """Answers gained so many tokens; in so many seconds, added up over them, where they did not show it before."""
        self._answer_seconds += seconds
        self._answer_tokens += tokens
        if self._answer_tokens >= LEAST_OUTPUT_TOKENS and self._answer_seconds >= LEAST_SECONDS:
            self.seconds_per_output_token = self._answer_seconds / self._answer_tokens

    def add_engine_output(self, tokens: float, seconds: float) -> None:
        """The engine counted so many output tokens, in so many seconds, added up over the answers that ran.

        That tells less than answers that are seen, and counts where there are none of late.
        """
        if self._answer_tokens < LEAST_OUTPUT_TOKENS <= tokens:
            self.seconds_per_output_token = seconds / tokens

    def count_start(self, tokens: int) -> None:
        """A request of so many uncached input tokens started, or is believed to have."""
        self._starts += 1.0
        self._gained -= 1.0  # its first token, which comes of prefill
        self._start_tokens += tokens

    def observe_start(self, now: float, dispatched: float, tokens: int, *, had_place: bool, waiting: int = 0) -> Burst:
        """A request's first token is here; returns those that it came with, which may become more.

        `had_place`: whether there was a place for it when it was dispatched, so that it waited for prefill alone.
        `waiting`: uncached input of others that the engine may have computed in part by now.
        """
        if now - self._first > BURST * self._burst_seconds():
            self._learn()
            self._begin, self._first = max(self._last, dispatched), now
            self._tokens, self._first_tokens, self._had_place = 0, tokens, True
            self._bursts += 1.0
            self._burst = Burst(self._begin, now, 0, self._unseen)
            self._unseen = 0
        burst = self._burst
        self._last = burst.end = now
        self._tokens += tokens
        burst.tokens += tokens
        self._had_place &= had_place
        if not had_place:
            burst.since = max(burst.since, self._freed)
        burst.waiting = waiting
        return burst

    def add_unseen_prefill(self, tokens: int) -> None:
        """A request of so much uncached input is believed to be computed, or was in part; its start was not seen."""
        self._unseen += tokens

    def on_place_freed(self, now: float) -> None:
        """A request ended: one that had no place in the batch may have one from now on."""
        self._freed = now

    def unexplained_tokens(self, burst: Burst) -> int:
        """Input that the engine had the time to compute until a burst, beyond all that it is known to have computed.

        Left out of the time is one step, which was under way when the first of them came, and what a step takes for few
        tokens; what is known is taken to have needed a little longer than by the pace, which is that of fast ones.
        0 as long as prefill was not measured.
        """
        if not self._lessons:
            return 0
        seconds = burst.end - burst.since - self.step_seconds
        known = LEAST_TOKENS + UNSURE * (burst.tokens + burst.unseen + burst.waiting)
        return max(0, int(seconds / self._seconds_per_token - known))

    def observe_unseen_end(self, tokens: int) -> None:
        """A call that never showed its start ended: whatever ended in a while was computed in no more time."""
        self._ended_tokens += tokens
        if LEAST_SECONDS <= self._busy < self._ended_tokens * self._seconds_per_token:
            self._seconds_per_token = max(self._seconds_per_token * FASTER, self._busy / self._ended_tokens)

    def _burst_seconds(self) -> float:
        """What the step of the latest burst took: since the start before, but no more than from token to token."""
        seconds = self._first - self._begin
        return min(seconds, self.step_seconds or seconds)

    def _learn(self) -> None:
        """Move by what the latest burst took. That something was faster shows always; that it was slower, if it is
        known to have waited for nothing else.
        """
        seconds = self._last - self._begin
        if self._tokens < LEAST_TOKENS or seconds <= 0.0:
            return
        seen = seconds / self._tokens
        self.last_start_delayed = self._lessons > 0 and seen > DELAY_FACTOR * self._seconds_per_token
        if not self._lessons and not self._had_place:
            return
        self._lessons += 1
        if self._lessons == 1 or (self._lessons <= FIRST_LESSONS and seen < self._seconds_per_token):
            self._seconds_per_token = seen
        elif seen < self._seconds_per_token:
            self._seconds_per_token *= FASTER
        elif self._had_place:
            self._seconds_per_token *= SLOWER
