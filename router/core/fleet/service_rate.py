"""How fast one worker is, measured from its answers.

An engine's steps are not visible. But every running stream gains one token per step, so that the tokens gained, divided
by the streams that ran, are the steps; and what starts at one moment was computed since the previous start.

`FleetRates` compares the rates of all workers.
"""

from collections.abc import Collection
from typing import Final, NamedTuple

from router.core.model.request import WorkerId

FIRST_SECONDS_PER_TOKEN: Final = 1e-4
"""Prefill, before anything was learned: between the values of 7B models on an A100 and on an A6000."""
LEAST_TOKENS: Final = 256
"""Starts at one moment with fewer tokens show the fixed cost of a step, not the cost of its tokens."""
SLOWER: Final = 1.04
"""Factor on the learned prefill time after a slower observation: one request that waited for something else moves it
little."""
FASTER: Final = 0.94
"""The same after a faster one. So the time settles where two fifths of the observations are faster."""
FIRST_LESSONS: Final = 8
"""During this many first observations a faster one is adopted at once: the first start may include
an engine's warm-up.
"""
FIRST_SECONDS_PER_OUTPUT_TOKEN: Final = 0.05
"""Of one answer, before anything was learned: a slow engine, so that no client is charged too much."""
LEAST_OUTPUT_TOKENS: Final = 2.0
"""Output tokens needed before their rate is learned."""
DELAY_FACTOR: Final = 2.0
"""A start that took this many times the prefill time surely waited for something else."""
BURST: Final = 0.25
"""Starts belong to one step if they come within this share of the step's time."""
UNSURE: Final = 1.25
"""Factor on the known work's time that an engine may have needed, before a longer time shows additional work."""
TURNOVER_HALF_LIFE: Final = 2.0
"""Seconds of work after which observations of turnover count half."""
SERVICE_HALF_LIFE: Final = 10.0
"""Seconds of work after which observations of service count half."""
LEAST_SECONDS: Final = 1.0
"""Seconds of work before averages are returned."""
DECODE_HALF_LIFE: Final = 5.0
"""Seconds without prefill after which observations of pure decode count half."""
LEAST_STEP_TOKENS: Final = 160
"""A step reads all weights, however few tokens it computes: for 7B models on A10G, A100, A6000 and H100 that takes as
long as 147 to 430 tokens of prefill.
"""
SPEED_TOLERANCE: Final = 1.25
"""Workers whose service rates differ by at most this factor are equally fast: rates also differ with what is served."""


class Turnover(NamedTuple):
    """What an engine starts in one of its steps."""

    requests: float = 0.0
    tokens: float = 0.0
    """Uncached input tokens; these and the requests are averages."""
    burst_tokens: int = 0
    """Uncached input tokens of the latest step, without its first request, which may have taken several steps."""


class Burst:
    """Requests whose first tokens came at one moment, and what the engine may have computed until then."""

    __slots__ = ("end", "since", "tokens", "unseen", "waiting")

    def __init__(self, since: float, end: float, tokens: int, unseen: int) -> None:
        self.since = since
        """Nothing of them was computed before this time: others were, or they had not been sent or had no place in the
        batch.
        """
        self.end = end
        """Time of their last first token."""
        self.tokens = tokens
        """Their uncached input: predicted, or as the engine reports if it does."""
        self.unseen = unseen
        """Uncached input of others whose start did not show and that were computed in the same time, at least in
        part.
        """
        self.waiting = 0
        """Uncached input of others that may have been computed in part in the same time and still waited at the end."""


class ServiceRate:
    """Measured prefill, turnover and service of one worker."""

    def __init__(self) -> None:
        self.now = 0.0
        """The time until which is accounted for. Set from outside while the worker is idle, as that decays nothing."""
        self.seconds_per_token = FIRST_SECONDS_PER_TOKEN
        """Prefill time per uncached input token, as learned so far."""
        self._lessons = 0
        self.last_start_delayed = False
        """Whether the last start had waited for more than prefill: for a place in the batch, or for
        room in the cache.
        """
        # The latest burst of starts: when its computation began, its first and its last start, and its tokens.
        self._begin = self._first = self._last = 0.0
        self._tokens = self._first_tokens = 0
        self._had_place = False
        self._burst = Burst(0.0, 0.0, 0, 0)
        self._unseen = 0
        """Uncached input computed since the latest burst by requests that never showed their start."""
        self.freed = 0.0
        """When a request last ended: another one without a place in the batch may have it from then on."""
        self.seconds_per_output_token = FIRST_SECONDS_PER_OUTPUT_TOKEN
        """Time between tokens of one answer, measured on streams, and on other answers at their end."""
        # These decay with TURNOVER_HALF_LIFE.
        self._answer_seconds = self._answer_tokens = 0.0
        self._seconds = self._stream_seconds = self._gained = 0.0
        self._starts = self._start_tokens = self._bursts = 0.0
        # These decay with DECODE_HALF_LIFE.
        self._decode_stream_seconds = self._decode_gained = 0.0
        self._decodes_alone = False
        # These decay with SERVICE_HALF_LIFE.
        self._busy = self._served = self._full = self._full_served = self._ended_tokens = 0.0

    def prefill_seconds(self, tokens: float) -> float:
        """Return the seconds that the worker needs for this many uncached input tokens when nothing else waits."""
        return tokens * self.seconds_per_token

    @property
    def rate(self) -> float | None:
        """Cost units per second served while the worker was full; positive, None before that was seen."""
        return self._full_served / self._full if self._full >= LEAST_SECONDS and self._full_served > 0.0 else None

    @property
    def least_rate(self) -> float | None:
        """Cost units per second served while the worker had any work: a lower bound of what it can serve."""
        return self._served / self._busy if self._busy >= LEAST_SECONDS and self._served > 0.0 else None

    @property
    def streams(self) -> float:
        """Mean number of streams that ran recently; at least 1."""
        return max(1.0, self._stream_seconds / self._seconds) if self._seconds > 0.0 else 1.0

    @property
    def step_seconds(self) -> float:
        """Recent time between two tokens of a stream; 0 before that was seen."""
        return self._stream_seconds / self._gained if self._gained > 1.0 else 0.0

    @property
    def decode_seconds(self) -> float:
        """Time between two tokens of a stream while nothing is prefilled; the smallest possible before that was seen.

        Underestimating it is safe: a refill is then held back too long (`refill_hold`), until the prefill is over and
        the true value is seen.
        """
        least = self.prefill_seconds(LEAST_STEP_TOKENS)
        if self._decode_stream_seconds < LEAST_SECONDS or self._decode_gained < LEAST_OUTPUT_TOKENS:
            return least
        return max(least, self._decode_stream_seconds / self._decode_gained)

    @property
    def turnover(self) -> Turnover:
        """Recent turnover; empty before the worker worked for a while.

        If answers have only one token, no steps show. Then a burst counts as a step, and of its tokens only those that
        came with its first request are known to belong to one step.
        """
        burst = self._tokens - self._first_tokens
        if self._seconds < LEAST_SECONDS:
            return Turnover(burst_tokens=burst)
        if self._gained <= self._starts:
            return Turnover(self._starts / max(1.0, self._bursts), 0.0, burst)
        steps = max(1.0, self._gained / self.streams)
        return Turnover(self._starts / steps, self._start_tokens / steps, burst)

    def advance(self, now: float, *, streams: int, full: bool, seen_answers: int = 0, prefills: bool = True) -> None:
        """Account for the time until `now`, in which `streams` ran and the worker was busy, and `full` or not.

        `seen_answers`: how many answers streamed, so that each of their tokens was seen. `prefills`: whether the worker
        may have prefilled anything.
        """
        seconds, self.now = now - self.now, now
        if seconds <= 0.0:
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
        """Add service in cost units, and the tokens that the streams gained."""
        self._gained += tokens
        if self._decodes_alone:
            self._decode_gained += tokens
        self._served += cost
        if full:
            self._full_served += cost

    def add_output(self, tokens: float, seconds: float = 0.0) -> None:
        """Add output tokens of answers. `seconds`: their time, summed over the answers, if not counted by `advance`."""
        self._answer_seconds += seconds
        self._answer_tokens += tokens
        if self._answer_tokens >= LEAST_OUTPUT_TOKENS and self._answer_seconds >= LEAST_SECONDS:
            self.seconds_per_output_token = self._answer_seconds / self._answer_tokens

    def add_engine_output(self, tokens: float, seconds: float) -> None:
        """Add output tokens by the engine's own count, and their time summed over the answers that ran.

        This is less precise than tokens that were seen, and used only if there were none recently.
        """
        if self._answer_tokens < LEAST_OUTPUT_TOKENS <= tokens and seconds > 0.0:
            self.seconds_per_output_token = seconds / tokens

    def count_start(self, tokens: int) -> None:
        """Count a request that started, or is believed to have, with its uncached input tokens."""
        self._starts += 1.0
        self._gained -= 1.0  # prefill, not a decode step, produced its first token
        self._start_tokens += tokens

    def observe_start(self, now: float, dispatched: float, tokens: int, *, had_place: bool, waiting: int = 0) -> Burst:
        """Record a request's first token and return its burst, which may still grow.

        `had_place`: whether the batch had a place for it when it was dispatched, so that it waited only for prefill.
        `waiting`: uncached input of other requests that the engine may have computed in part by now.
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
            burst.since = max(burst.since, self.freed)
        burst.waiting = waiting
        return burst

    def add_unseen_prefill(self, tokens: int) -> None:
        """Add the uncached input of a request that is believed to be computed, at least in part, and whose start was
        not seen.
        """
        self._unseen += tokens

    def unexplained_tokens(self, burst: Burst) -> int:
        """Return the input tokens that the engine had time to compute until a burst, beyond everything that it is known
        to have computed.

        The time excludes one step, which was under way when the first of them came, and a step's fixed cost. Known work
        is assumed to have taken a little longer than the learned prefill time, which is that of fast starts. Returns 0
        as long as prefill was not measured.
        """
        if not self._lessons:
            return 0
        seconds = burst.end - burst.since - self.step_seconds
        known = LEAST_TOKENS + UNSURE * (burst.tokens + burst.unseen + burst.waiting)
        return max(0, int(seconds / self.seconds_per_token - known))

    def observe_unseen_end(self, tokens: int) -> None:
        """Record the end of a request that never showed its start: all that ended in a time was computed in at most
        that time.
        """
        self._ended_tokens += tokens
        if LEAST_SECONDS <= self._busy < self._ended_tokens * self.seconds_per_token:
            self.seconds_per_token = max(self.seconds_per_token * FASTER, self._busy / self._ended_tokens)

    def _burst_seconds(self) -> float:
        """Return the time of the latest burst's step: since the previous start, at most the time between two tokens."""
        seconds = self._first - self._begin
        return min(seconds, self.step_seconds or seconds)

    def _learn(self) -> None:
        """Update the prefill time by the latest burst.

        A faster observation always counts; a slower one only if the burst is known to have waited for nothing but
        prefill.
        """
        seconds = self._last - self._begin
        if self._tokens < LEAST_TOKENS or seconds <= 0.0:
            return
        seen = seconds / self._tokens
        self.last_start_delayed = self._lessons > 0 and seen > DELAY_FACTOR * self.seconds_per_token
        if not self._lessons and not self._had_place:
            return
        self._lessons += 1
        if self._lessons == 1 or (self._lessons <= FIRST_LESSONS and seen < self.seconds_per_token):
            self.seconds_per_token = seen
        elif seen < self.seconds_per_token:
            self.seconds_per_token *= FASTER
        elif self._had_place:
            self.seconds_per_token *= SLOWER


class FleetRates:
    """Rates by worker, in cost units per second; see `ServiceRate`. Sums over the fleet are single calls."""

    def __init__(self) -> None:
        self._measured: dict[WorkerId, ServiceRate] = {}
        self.outdated: Final[dict[WorkerId, None]] = {}
        """The workers whose measured rates may have changed since they were last asked for; workers add themselves."""
        self._full: dict[WorkerId, float | None] = {}
        """While full; None before that was seen."""
        self._known: dict[WorkerId, float | None] = {}
        """While full, else at least; None before either was seen."""
        self._mean: float | None = None
        """The mean of the rates that count for `speed`; None if none does or one changed since."""
        self._mean_of_full = 0.0

    def add(self, worker: WorkerId, measured: ServiceRate) -> None:
        """Follow a worker from now on."""
        self._measured[worker] = measured
        self.set(worker, None, None)

    def set(self, worker: WorkerId, full: float | None, least: float | None) -> None:
        """Set a worker's rate while full and its least rate; None if not known. New workers come last."""
        known = full or least
        if worker not in self._full or full != self._full[worker] or known != self._known[worker]:
            self._full[worker], self._known[worker] = full, known
            self._mean = None

    def remove(self, worker: WorkerId) -> None:
        """Forget a worker."""
        self._measured.pop(worker, None)
        self.outdated.pop(worker, None)
        self._full.pop(worker, None)
        self._known.pop(worker, None)
        self._mean = None

    def together(self, workers: Collection[WorkerId]) -> float | None:
        """Return the cost units per second that these workers serve together when full; None before any was seen full.

        Workers not seen full count as the mean of the others.
        """
        self._update()
        rates = [*filter(None, map(self._known.__getitem__, workers))]
        return sum(rates) * len(workers) / len(rates) if rates else None

    def speed(self, worker: WorkerId) -> float:
        """Return a worker's rate divided by the mean of the known rates; 1 if it is close to 1 or not known.

        A rate is known for a worker that was seen full, and for one that serves more than the mean of these even so: a
        worker with little to do serves little, however fast it is.
        """
        self._update()
        mean, rate = self._mean, self._known[worker]
        if mean is None:
            mean = self._mean = self._compute_mean()
        if not mean or rate is None or (self._full[worker] is None and rate <= self._mean_of_full):
            return 1.0
        speed = rate / mean
        return 1.0 if 1 / SPEED_TOLERANCE < speed < SPEED_TOLERANCE else speed

    def _update(self) -> None:
        """Take over what was measured of the outdated workers."""
        if self.outdated:
            for worker in self.outdated:
                measured = self._measured[worker]
                self.set(worker, measured.rate, measured.least_rate)
            self.outdated.clear()

    def _compute_mean(self) -> float:
        """Return the mean of the rates that count; 0 if none was seen full."""
        full = [*filter(None, self._full.values())]
        if not full:
            return 0.0
        self._mean_of_full = sum(full) / len(full)
        least = [rate for worker, rate in self._known.items() if rate is not None and self._full[worker] is None]
        rates = [*full, *[rate for rate in least if rate > self._mean_of_full]]
        return sum(rates) / len(rates)
