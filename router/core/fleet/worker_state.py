"""One worker as the core knows it: what is in flight there, how fast it is, and what its window says."""

from collections.abc import Container, Mapping
from dataclasses import replace
from math import inf

from router.core.fleet.engine_limits import EngineReport
from router.core.fleet.engine_work import EngineWork
from router.core.fleet.health import DEFAULT_RULES, Backoff, Health, HealthRules
from router.core.fleet.in_flight import InFlight, InFlightTable
from router.core.fleet.kv_forecast import KvPeakForecast
from router.core.fleet.service_rate import ServiceRate
from router.core.fleet.window import Window
from router.core.model.events import WorkReport
from router.core.model.load import Load
from router.core.model.request import RequestId, Worker, WorkerId

HASTE = 0.7
"""Prefill is taken to need this share of its learned time, where a guess that is too late would leave the engine idle,
and one that is too early only lets a little more wait there."""
SLACK = 3.0
"""Times the prefill of what has not started, for which a worker may say nothing at all."""
OUTPUT_MEMORY = 0.97
"""What a past answer's length still weighs after one more: about the last thirty count."""


class WorkerState:
    """One worker and what runs there. One that left stays until the last of its requests has ended."""

    def __init__(
        self,
        worker: Worker,
        window: Window,
        deadlines: dict[WorkerId, float],
        rules: HealthRules = DEFAULT_RULES,
    ) -> None:
        """`deadlines`: of all workers; this one keeps its own there, while it has one."""
        self.worker = worker
        self.window = window
        self.health = Health(rules)
        self.pace = ServiceRate()
        self.work = EngineWork()
        self.left = False
        self.silent = False
        """Whether it has said nothing for so long that nothing is sent to it until it does."""
        self.load = Load()
        """What the window looks at, as of the last change here."""
        self.has_room = True
        """Whether any request could go now, however small."""
        self._deadlines = deadlines
        self._flights = InFlightTable()
        self._forecast = KvPeakForecast()
        self._pauses = Backoff()
        self._silence = rules.silence
        self._quiet_since = 0.0
        """When it was heard last, or got something to do after that."""
        self._due = inf
        """When time alone changes the load."""
        self._most_kv_tokens = 0
        self._served = 0.0
        self._gained = 0
        """Cost units and output tokens since the last change."""
        self._seen_gained = 0
        """Of these tokens, those that were seen as they came, without the first of each answer."""
        self._output = 0.0
        """A decaying sum over answers that ended, of their lengths."""
        self._now = 0.0

    @property
    def running(self) -> Mapping[RequestId, InFlight]:
        """The requests in flight."""
        return self._flights.requests

    @property
    def waiting(self) -> Container[RequestId]:
        """Of these, those that wait for their first token, as far as is seen or guessed."""
        return self._flights.waiting

    def turn_of_next(self, now: float) -> float:
        """When the engine is expected to begin with a request that is sent now."""
        if self._flights.waiting:
            return now + self.pace.prefill_seconds(self._flights.unstarted_tokens)
        return now + self.pace.step_seconds if self._flights.requests else now

    def admits(self, uncached_tokens: int) -> bool:
        """Whether a request with that much uncached input may go now."""
        return self._open and self.window.admits(self.load, uncached_tokens)

    @property
    def _open(self) -> bool:
        """Whether anything may go, as far as the worker's health tells."""
        return not self.silent and self._now >= self._pauses.until and self.health.trusted

    def look_again(self, now: float) -> None:
        """Take in that its health is another."""
        self._pass(now)
        self._changed()

    def heard(self, now: float) -> None:
        """It said something, whatever it was: the first token of a call, more tokens, an end, an answer to a poll."""
        self._quiet_since = now
        if self.silent:
            self.silent = False
            self.look_again(now)

    def turned_away(self, now: float) -> None:
        """The engine had no room for a request, which is removed by now."""
        self.heard(now)
        self._pass(now)
        self._pauses.begin(now)
        self.window.turned_away(self.load)
        self._changed()

    def succeeded(self, request: RequestId, now: float) -> None:
        """The engine has begun to answer it, or has answered it in one piece."""
        self.heard(now)
        self.health.succeeded(request)
        self._pauses.served()

    def add(
        self,
        request: RequestId,
        uncached_tokens: int,
        output: float,
        now: float,
        *,
        streamed: bool,
        most_output: float = inf,
        answers: int = 1,
    ) -> None:
        """Count a dispatched request, of which so many output tokens are foreseen, and at most so many may come."""
        self._pass(now)
        if not self._flights:
            self._quiet_since = now
        telling = not self.window.full(self.load)
        flight = self._flights.add(request, uncached_tokens, now, streamed=streamed, telling=telling, answers=answers)
        if not streamed:
            prefill = self.pace.prefill_seconds(self._flights.unstarted_tokens)
            self._flights.guess_at(request, now + HASTE * prefill)
            if telling:
                flight.decoding_since = now + prefill
        self._forecast.put(request, uncached_tokens, output, most_output)
        self.health.sent(request)
        self._changed()

    def start(self, request: RequestId, now: float, *, seen: bool) -> None:
        """It waits no more. `seen`: because its first token is here, which says more than that it is over."""
        flight = self._flights.requests[request]
        if seen:
            self.succeeded(request, now)
            self._pass(now)
            self._seen_gained -= 0 if flight.shown else flight.answers  # the first ones, which come of prefill
            self._flights.show(flight)
        if flight.started:
            return
        self._pass(now)
        if seen:
            for earlier in self._flights.guesses(before=flight.number):
                self._flights.requests[earlier].decoding_since = min(
                    self._flights.requests[earlier].decoding_since, now
                )
                self._start(earlier, guessed=True)
            flight.burst = self.pace.started(
                now, flight.dispatched, flight.uncached_tokens, telling=flight.telling, waiting=self._beside(flight)
            )
        self._start(request, guessed=False)
        self._changed()

    def _beside(self, flight: InFlight) -> int:
        """Uncached input of others of which the engine may have computed a part by the time of this one's start.

        In order of arrival it begins with them in the last step alone, with what is left of that.
        """
        others = self._flights.unstarted_tokens - flight.uncached_tokens
        most = None if self.worker.reorders else self.worker.batch_tokens
        return others if most is None else min(others, most)

    def least_computed(self, request: RequestId, input_tokens: int) -> int:
        """How much of a request's `input_tokens` was computed, as far as the time of its first token says.

        At least what was predicted not to be cached. It is that alone where no first token was seen, or where the time
        until then is explained: the engine computed others before or beside it, or may have; it had no place for it
        (then the time counts from the latest end of another request); or it just took a step. An engine that counts
        what it computes has the last word: no more is claimed than it counted and nobody was charged for. What is
        claimed here explains the time for those that started with it, so that they pay for it once.
        """
        flight = self._flights.requests[request]
        burst = flight.burst
        if burst is None:
            return flight.uncached_tokens
        beyond = self.work.claim_input(min(input_tokens - flight.uncached_tokens, self.pace.unexplained_tokens(burst)))
        burst.tokens += beyond
        return flight.uncached_tokens + beyond

    def told_computed(self, request: RequestId, tokens: int) -> None:
        """The engine says how much of a request's input it computed, which may explain how long others took."""
        flight = self._flights.requests[request]
        if flight.burst is not None:
            flight.burst.tokens += tokens - flight.uncached_tokens

    def serve(self, request: RequestId, cost: float, output_tokens: int) -> None:
        """A started request was served so much, in cost units; of that, so many are new output tokens."""
        flight = self._flights.requests[request]
        flight.output += output_tokens
        self._served += cost
        self._gained += output_tokens
        if flight.shown:
            self._seen_gained += output_tokens

    def output_by_pace(self, request: RequestId, now: float) -> int:
        """How many output tokens a whole answer should have by now, as long as nobody sees them.

        As many as answers that are seen gain at this worker in the time since its prefill should have been over. While
        it has no place in the engine's batch, as far as is known, it gains none.
        """
        flight = self._flights.requests[request]
        seconds = now - flight.decoding_since
        if flight.streamed or not flight.started or seconds < 0.0:
            return 0
        limits = self.window.limits
        at_once = flight.answers if limits is None else max(1, min(flight.answers, limits.requests))
        return flight.answers + int(at_once * seconds / self.pace.seconds_per_output_token)

    def answered(self, request: RequestId, output_tokens: int, now: float) -> None:
        """The engine says how long an answer is that came whole, which shows its pace."""
        flight = self._flights.requests[request]
        seconds = now - flight.decoding_since
        if not flight.shown and not flight.streamed and seconds > 0.0 and output_tokens > flight.answers:
            self._pass(now)
            self.pace.produced(output_tokens - flight.answers, seconds * flight.answers)

    def remove(self, request: RequestId, now: float, *, computed: bool) -> None:
        """It ended. `computed`: at least in part, and not turned away."""
        self._pass(now)
        flight = self._flights.remove(request, now)
        self._forecast.remove(request)
        self.health.ended(request)
        self.pace.freed(now)
        if flight.started and (placed := self._flights.give_place()) is not None and not placed.streamed:
            placed.decoding_since = now + self.pace.prefill_seconds(placed.uncached_tokens)
        if computed and not flight.streamed:
            self.pace.ended(flight.uncached_tokens)
        if flight.output:
            self._output = self._output * OUTPUT_MEMORY + flight.output
        self._changed()

    def told(self, kv_tokens: int) -> None:
        """The engine said how much its KV cache holds."""
        self.worker = replace(self.worker, kv_tokens=kv_tokens)
        self.window.told(kv_tokens)
        self._changed()

    def report(
        self, running: int, waiting: int, places: int | None, now: float, work: WorkReport | None = None
    ) -> None:
        """The engine said how many requests it has and, where it tells, how many it runs at most, and what it computed.

        Of what it has not been seen to start, the latest have no place yet, as many as wait there by its word.
        """
        self._pass(now)
        for number, flight in enumerate(self._flights.unseen()):
            if number < waiting:
                flight.decoding_since = max(flight.decoding_since, now)
            elif flight.decoding_since == inf:
                flight.decoding_since = now
        alone = running + waiting <= len(self._flights.requests)
        self.work.reported(work, self._flights.unstarted_tokens, now, alone=alone)
        if (produced := self.work.produced(running, now)) is not None:
            self.pace.counted(*produced)
        self._changed()
        flights, load = self._flights, self.load
        report = EngineReport(
            running,
            waiting,
            load.requests,
            load.unstarted,
            flights.unstarted_since(now - self.pace.step_seconds),
            load.guessed,
            flights.kv_tokens,
            self._most_kv_tokens,
            places,
        )
        self.window.reported(load, report)
        self._most_kv_tokens = flights.kv_tokens
        self._changed()

    def unreported(self, now: float) -> None:
        """The engine answered, and did not say how many requests it has."""
        self.window.unreported()
        self.look_again(now)

    def advance(self, now: float) -> None:
        """Take in that the deadline is over."""
        self.silent = self.silent or self._silent_at() <= now
        if self._due <= now:
            self._pass(now)
            for request in self._flights.guesses(until=now):
                self._start(request, guessed=True)
        self._changed()

    def _start(self, request: RequestId, *, guessed: bool) -> None:
        flight = self._flights.start(request, self._now, guessed=guessed)
        if flight.burst is None:
            self.pace.computed_unseen(flight.uncached_tokens)
        self._most_kv_tokens = max(self._most_kv_tokens, self._flights.kv_tokens)
        self.pace.took(flight.uncached_tokens)
        self._forecast.begin(request)
        self.window.started(self.pace.turnover)

    def _pass(self, now: float) -> None:
        """Account for the time until now, before anything changes."""
        self._now = now
        flights, pace, full = self._flights, self.pace, not self.has_room
        running = len(flights.requests)
        streams = running - len(flights.waiting)
        shown, prefills = flights.shown_answers, bool(flights.waiting)
        pace.advance(now, streams=streams, busy=running > 0, full=full, shown=shown, prefills=prefills)
        if self._seen_gained:
            pace.produced(self._seen_gained)
            self._seen_gained = 0
        if self._served or self._gained:
            flights.kv_tokens += self._gained
            self._most_kv_tokens = max(self._most_kv_tokens, flights.kv_tokens)
            self._forecast.advance(max(0, self._gained) / pace.streams)
            pace.served(self._served, self._gained, full=full)
            self._served, self._gained = 0.0, 0

    def _changed(self) -> None:
        """Look at the load anew."""
        flights, window = self._flights, self.window
        unstarted = len(flights.waiting)
        ahead, low_at = self._under_way() if unstarted and not self.pace.held_up else (flights.unstarted_tokens, inf)
        growth = self._output * (1 - OUTPUT_MEMORY)
        self.load = load = Load(
            len(flights.requests),
            unstarted,
            flights.unstarted_tokens,
            ahead,
            flights.guessed,
            self._forecast.peak(growth, window.kv_limit),
        )
        self.has_room = self._open and window.admits(load, 1)
        resumes = self._pauses.until if self._now < self._pauses.until else inf
        self._due = min(flights.next_guess, low_at, resumes)
        deadline = min(self._due, self._silent_at())
        if deadline < inf:
            self._deadlines[self.worker.id] = deadline
        else:
            self._deadlines.pop(self.worker.id, None)

    def _silent_at(self) -> float:
        """When it will have said nothing for too long; infinite while nothing runs there, and once it has.

        One that says nothing while it computes a long prompt is not taken for one that hangs, by its own pace.
        """
        if self.silent or not self._silence or not self._flights.requests:
            return inf
        return self._quiet_since + max(self._silence, SLACK * self.pace.prefill_seconds(self._flights.unstarted_tokens))

    def _under_way(self) -> tuple[float, float]:
        """What is left to compute of the unstarted tokens, and when no more is than the window calls little.

        No more than the first request is under way; the time is infinite if only a start can bring it about.
        """
        flights, pace = self._flights, self.pace
        first = flights.first_tokens
        done = (self._now - flights.since) / pace.prefill_seconds(HASTE)
        ahead = flights.unstarted_tokens - min(done, first)
        excess = flights.unstarted_tokens - self.window.low_tokens
        if 0 < excess <= first:
            time = flights.since + pace.prefill_seconds(HASTE * (excess + 1))
            if time > self._now:
                return ahead, time
        return ahead, inf
