"""One worker as the core knows it: what is in flight there, how fast it is, and what its window admits."""

from collections.abc import Collection
from dataclasses import replace
from math import inf
from typing import Final

from router.core.fleet.engine_work import EngineWork
from router.core.fleet.health import DEFAULT_RULES, Backoff, Health, HealthRules, SilenceTimeout
from router.core.fleet.in_flight import EARLY_PREFILL_SHARE, InFlight, InFlightTable
from router.core.fleet.service_rate import ServiceRate
from router.core.fleet.window import EngineReport, Window
from router.core.fleet.worker_index import WorkerIndex
from router.core.model.cost import Tokens
from router.core.model.events import WorkReport
from router.core.model.load import Load
from router.core.model.request import Worker
from router.core.predict.output_length import WorkerMean

SILENCE_PREFILLS: Final = 3.0
"""A worker may be silent for this many times the prefill time of its unstarted requests."""


class WorkerState:
    """One worker and what runs there. A worker that left is kept until the last of its requests has ended."""

    def __init__(
        self,
        worker: Worker,
        window: Window,
        index: WorkerIndex,
        rules: HealthRules = DEFAULT_RULES,
        joined: int = 0,
    ) -> None:
        """`index`: of all workers. This worker keeps its own entries up to date. `joined`: rises with each worker."""
        self.worker = worker
        self.joined = joined
        self.window = window
        self.health = Health(rules)
        self.service_rate = ServiceRate()
        self.work = EngineWork()
        self.mean_output = WorkerMean()
        self.left = False
        self.silent = False
        """Whether the worker was silent for so long that it gets no requests until it shows a sign of life."""
        self.load = Load()
        """The load that the window looks at, as of the last change."""
        self.paused = False
        """Whether a prefill worker waits until what it hands over can be decoded."""
        self.has_room = True
        """Whether any request could go now, however small."""
        self._charged_extend = self._charged_cached = self._charged_output = 0
        """Served tokens that clients were charged for since the worker joined."""
        self._window_room, self._is_full = inf, False
        """What the window says of the load, see `Window.room` and `Window.full`."""
        self._index = index
        index.set_load(worker.id, 0, has_room=True)
        self.in_flight: Final = InFlightTable()
        self._backoff = Backoff()
        self._silence_seconds = rules.silence
        self.silence_timeout = SilenceTimeout(rules.answers)
        self._last_alive = 0.0
        """When the worker last showed a sign of life, or became busy after that."""
        self.last_sign = -inf
        """When one of its calls last began or went on, or was answered by an error; -inf before that."""
        self._load_deadline = inf
        """When time alone changes the load."""
        self._most_kv_tokens = 0
        self._unaccounted_cost = 0.0
        self._unaccounted_tokens = 0
        """Cost units and output tokens since the last change."""
        self._unaccounted_seen_tokens = 0
        """Those of the output tokens that were seen as they came, without the first of each answer."""
        self._now = 0.0

    @property
    def running(self) -> Collection[InFlight]:
        """The requests in flight."""
        return self.in_flight.requests

    @property
    def charged(self) -> Tokens:
        """Served tokens that clients were charged for since the worker joined."""
        return Tokens(self._charged_extend, self._charged_cached, self._charged_output)

    @property
    def context_tokens(self) -> int:
        """The whole contexts of all requests in flight: prompts, cached or not, and output; what has not started counts
        as if it had. A decode step reads as many tokens from the KV cache.
        """
        return self.in_flight.context_tokens

    @property
    def free_places(self) -> float:
        """How many more requests the window's limit allows in flight; infinite without a limit."""
        limits = self.window.limits
        return inf if limits is None else max(0, limits.requests - self.load.requests)

    def expected_prefill_start(self, now: float) -> float:
        """Return when the engine is expected to begin to compute a request that is sent now."""
        if self.in_flight.waiting:
            return now + self.service_rate.prefill_seconds(self.in_flight.unstarted_tokens)
        return now + self.service_rate.step_seconds if self.in_flight.requests else now

    def admits(self, uncached_tokens: int) -> bool:
        """Return whether a request with this many uncached input tokens may go now."""
        return uncached_tokens <= self.room

    @property
    def room(self) -> float:
        """The most uncached input tokens with which a request may go now, as `Window.room` says."""
        return self._window_room if self._open else -1.0

    @property
    def _open(self) -> bool:
        """Whether the worker's health permits any request."""
        return not (self.silent or self.paused) and self._now >= self._backoff.until and self.health.trusted

    def set_paused(self, now: float, *, paused: bool) -> None:
        """Stop the dispatch of prompts to a prefill worker, or let it go on."""
        if paused is not self.paused:
            self.paused = paused
            self.refresh(now)

    @property
    def free_slots(self) -> float:
        """How many more requests of mean size fit both the places and the KV cache of the engine; infinite without
        limits.
        """
        load = self.load
        if not self.has_room:
            return 0.0
        if not load.requests or self.window.kv_limit == inf:
            return self.free_places
        return min(self.free_places, (self.window.kv_limit - load.kv_peak) * load.requests / max(1.0, load.kv_peak))

    def refresh(self, now: float) -> None:
        """Update the load after a change of the worker's health."""
        self._account_until(now)
        self._refresh_load()

    def mark_alive(self, now: float) -> None:
        """Record a sign of life in a call: a first token, more tokens, the end of a request, or an error."""
        self.last_sign = now
        self.mark_answering(now)

    def mark_answering(self, now: float) -> None:
        """Record any sign of life, such as an answer to a poll."""
        self._last_alive = now
        if self.silent:
            self.silent = False
            self.refresh(now)

    def on_overload(self, now: float) -> None:
        """Back off, because the engine refused a request for lack of room. The request must be removed already."""
        self.mark_alive(now)
        self._account_until(now)
        self._backoff.begin(now)
        self.window.on_overload(self.load)
        self._refresh_load()

    def succeeded(self, flight: InFlight, now: float) -> None:
        """Record that the engine began to answer a request, or answered it in one piece."""
        self.mark_alive(now)
        if self.health.trust is not None or self.health.outcomes:
            self.health.on_success(flight)
        if self._backoff.until:
            self._backoff.reset()

    def add(
        self,
        uncached_tokens: int,
        output: float,
        now: float,
        *,
        streamed: bool,
        most_output: float = inf,
        answers: int = 1,
        cached_tokens: int = 0,
        fetched_tokens: int = 0,
    ) -> InFlight:
        """Add a dispatched request. `output`: predicted output tokens. `most_output`: their maximum.

        `cached_tokens`: input tokens that the worker need not compute; `fetched_tokens`: those that it fetches from a
        prefill worker.
        """
        self._account_until(now)
        if not self.in_flight.requests:
            self._last_alive = now
        had_place = not self._is_full
        flight = self.in_flight.add(
            uncached_tokens,
            now,
            streamed=streamed,
            had_place=had_place,
            answers=answers,
            cached_tokens=cached_tokens,
            fetched_tokens=fetched_tokens,
            output=output,
            most_output=most_output,
        )
        if not streamed:
            prefill = self.service_rate.prefill_seconds(self.in_flight.unstarted_tokens)
            self.in_flight.guess_at(flight, now + EARLY_PREFILL_SHARE * prefill)
            if had_place:
                flight.decoding_since = now + prefill
        if self.health.trust is not None:
            self.health.on_dispatch(flight)
        self._refresh_load()
        return flight

    def start(self, flight: InFlight, now: float, *, seen: bool) -> None:
        """Mark a request as started. `seen`: whether its first token was seen; if not, the start is only inferred."""
        if flight.started and not seen:
            return
        if seen:
            self.succeeded(flight, now)
        self._account_until(now)
        if flight in self.in_flight.aside:
            flight.started, flight.guessed = True, not seen
            if seen:
                self.in_flight.mark_first_token(flight, now)
            return
        if seen and not flight.first_token_seen:
            # Prefill, not decode steps, produced the first token of each answer.
            self._unaccounted_seen_tokens -= flight.answers
            self.silence_timeout.on_first_token(now - flight.dispatched)
            self.in_flight.mark_first_token(flight, now)
        if flight.started:
            return
        if seen:
            for earlier in self.in_flight.guesses(before=flight.number):
                earlier.decoding_since = min(earlier.decoding_since, now)
                self._start(earlier, guessed=True)
        self._start(flight, guessed=False, seen=seen)
        self._refresh_load()

    def resume_start(self, flight: InFlight, now: float, *, seen: bool) -> None:
        """Mark as started a request that has started in an earlier run, which teaches nothing of the worker's pace."""
        self._account_until(now)
        if seen:
            self.in_flight.mark_first_token(flight, now)
        if flight in self.in_flight.aside:
            flight.started = True
        elif not flight.started:
            self._start(flight, guessed=False)
        self._refresh_load()

    def resume_output(self, flight: InFlight, output_tokens: int) -> None:
        """Add output tokens that an earlier run has seen."""
        self.in_flight.count_output(flight, output_tokens)
        flight.earlier_output += output_tokens
        if flight not in self.in_flight.aside:
            self.in_flight.kv_tokens += output_tokens

    def min_computed_tokens(self, flight: InFlight, input_tokens: int) -> int:
        """Return how many of a request's `input_tokens` were computed at least, judging by the time of its first token.

        This is at least the input predicted not to be cached. It is exactly that if no first token was seen, or if the
        time until then is explained: the engine computed others before or beside it, or may have; it had no place for
        the request (then the time counts from the latest end of another request); or it just took one step. If the
        engine counts what it computes, no more is claimed than it counted without a charge. Tokens claimed here explain
        the time of the other requests of the burst, so that the time is paid for once.
        """
        burst = flight.burst
        if burst is None:
            return flight.uncached_tokens
        beyond = self.work.claim_input(
            min(input_tokens - flight.uncached_tokens, self.service_rate.unexplained_tokens(burst))
        )
        burst.tokens += beyond
        return flight.uncached_tokens + beyond

    def serve(self, flight: InFlight, before: Tokens, after: Tokens, cost: float) -> None:
        """Add service of a started request: what its bill was before and is now, and the change in cost units."""
        output_tokens = after.output - before.output
        self._charged_extend += after.extend - before.extend
        self._charged_cached += after.cached - before.cached
        self._charged_output += output_tokens
        flight.output += output_tokens
        if flight in self.in_flight.aside:
            return
        self.in_flight.context_tokens += output_tokens
        self._unaccounted_cost += cost
        self._unaccounted_tokens += output_tokens
        if flight.first_token_seen:
            self._unaccounted_seen_tokens += output_tokens

    def estimated_output(self, flight: InFlight, now: float) -> int:
        """Estimate the output tokens so far of an answer without streaming.

        It is as many tokens as answers that are seen gain at this worker in the time since its prefill should have been
        over; none while the request has no place in the engine's batch, as far as known.
        """
        seconds = now - flight.decoding_since
        if flight.streamed or not flight.started or seconds < 0.0:
            return 0
        limits = self.window.limits
        at_once = flight.answers if limits is None else max(1, min(flight.answers, limits.requests))
        return flight.answers + int(at_once * seconds / self.service_rate.seconds_per_output_token)

    def on_complete_answer(self, flight: InFlight, output_tokens: int | None, now: float, *, just_now: bool) -> None:
        """Learn from an answer that is complete: the output rate if it was not streamed, or else how long the worker
        pauses between tokens.

        `output_tokens`: by the engine's count; None if it reported none. `just_now`: whether it has just ended, and not
        in an earlier run.
        """
        self.succeeded(flight, now)
        if flight.first_token_seen:
            if just_now:
                tokens = flight.output if output_tokens is None else output_tokens
                self.silence_timeout.on_tokens(now - flight.first_token_at, tokens - flight.earlier_output)
        elif not flight.streamed and output_tokens is not None and output_tokens > flight.answers:
            seconds = now - flight.decoding_since
            if seconds > 0.0:
                self._account_until(now)
                self.service_rate.add_output(output_tokens - flight.answers, seconds * flight.answers)

    def remove(self, flight: InFlight, now: float, *, computed: bool, input_tokens: int | None = None) -> None:
        """Remove a request that ended. `computed`: whether the engine computed any of it, instead of refusing it.

        `input_tokens`: how much of its input the engine reports as computed, which may explain how long others took;
        None if it does not say.
        """
        self._account_until(now)
        if input_tokens is not None and flight.burst is not None:
            flight.burst.tokens += input_tokens - flight.uncached_tokens
        self.service_rate.freed = now
        self.in_flight.remove(flight, now)
        if flight.started and (placed := self.in_flight.next_placeless()) is not None and not placed.streamed:
            placed.decoding_since = now + self.service_rate.prefill_seconds(placed.uncached_tokens)
        if self.health.trust is not None:
            self.health.on_end(flight)
        if computed and not flight.streamed:
            self.service_rate.observe_unseen_end(flight.uncached_tokens)
        self._refresh_load()

    def set_aside(self, flight: InFlight, now: float) -> None:
        """Leave a request in flight out of all counts, as nobody reports on it. If its outcome was to show whether the
        worker is well, it shows nothing any more. Does nothing if it is left out already.
        """
        if flight in self.in_flight.requests:
            self._account_until(now)
            self.in_flight.set_aside(flight, now)
            self.health.on_end(flight)
            self._refresh_load()

    def bring_back(self, flight: InFlight, now: float) -> None:
        """Count a request again that was set aside; does nothing if it was not."""
        in_flight = self.in_flight
        if flight in in_flight.aside:
            self._account_until(now)
            if not in_flight.requests:
                self._last_alive = now
            in_flight.bring_back(flight, now)
            if not (flight.started or flight.streamed):
                prefill = self.service_rate.prefill_seconds(in_flight.unstarted_tokens)
                in_flight.guess_at(flight, now + EARLY_PREFILL_SHARE * prefill)
            self._refresh_load()

    def set_kv_capacity(self, kv_tokens: int) -> None:
        """Set the capacity of the KV cache in tokens, as the engine reported it."""
        self.worker = replace(self.worker, kv_tokens=kv_tokens)
        self.window.set_kv_capacity(kv_tokens)
        self._refresh_load()

    def on_report(
        self, running: int, waiting: int, places: int | None, now: float, work: WorkReport | None = None
    ) -> None:
        """Record the engine's load and, if it reports them, its maximum of running requests and its work counters.

        Of the requests without a seen first token, the latest ones have no place in the batch, as many as the engine
        reports waiting.
        """
        self._account_until(now)
        for number, flight in enumerate(self.in_flight.without_first_token()):
            if number < waiting:
                flight.decoding_since = max(flight.decoding_since, now)
            elif flight.decoding_since == inf:
                flight.decoding_since = now
        alone = running + waiting <= len(self.in_flight.requests)
        self.work.on_report(work, self.charged, self.in_flight.unstarted_tokens, now, alone=alone)
        if (produced := self.work.output_since_report(running, now)) is not None:
            self.service_rate.add_engine_output(*produced)
        self._refresh_load()
        in_flight, load = self.in_flight, self.load
        report = EngineReport(
            running,
            waiting,
            load.requests,
            load.unstarted,
            in_flight.unstarted_since(now - self.service_rate.step_seconds),
            load.guessed,
            in_flight.kv_tokens,
            self._most_kv_tokens,
            places,
        )
        self.window.on_report(load, report)
        self._most_kv_tokens = in_flight.kv_tokens
        self._refresh_load()

    def on_empty_report(self, now: float) -> None:
        """Record that the engine answered a poll without reporting its load."""
        self.window.on_empty_report()
        self.refresh(now)

    def advance(self, now: float) -> None:
        """Apply what changes by time alone, when the deadline is over."""
        self.silent = self.silent or self._silent_at() <= now
        if self._load_deadline <= now:
            self._account_until(now)
            for flight in self.in_flight.guesses(until=now):
                self._start(flight, guessed=True)
        self._refresh_load()

    def _start(self, flight: InFlight, *, guessed: bool, seen: bool = False) -> None:
        """Mark a request as started. `seen`: whether its first token was seen just now."""
        self.in_flight.start(flight, self._now, guessed=guessed)
        self._most_kv_tokens = max(self._most_kv_tokens, self.in_flight.kv_tokens)
        tokens, rate = flight.uncached_tokens, self.service_rate
        if not seen:
            rate.add_unseen_prefill(tokens)
        else:
            if self._unaccounted_seen_tokens:
                rate.add_output(self._unaccounted_seen_tokens)
                self._unaccounted_seen_tokens = 0
            # Input of others that may have been computed with its own. An engine that serves in order of arrival begins
            # with others only in the last step.
            beside, in_one_step = self.in_flight.unstarted_tokens, self.worker.batch_tokens
            if in_one_step is not None and not self.worker.reorders:
                beside = min(beside, in_one_step)
            flight.burst = rate.observe_start(
                self._now, flight.dispatched, tokens, had_place=flight.had_place, waiting=beside
            )
        rate.count_start(tokens)
        self.window.on_start(rate.turnover)

    def _account_until(self, now: float) -> None:
        """Account for the time until now, before anything changes."""
        self._now = now
        self._index.rates.outdated[self.worker.id] = None
        in_flight, service_rate, full = self.in_flight, self.service_rate, not self.has_room
        if running := len(in_flight.requests):
            streams = running - len(in_flight.waiting)
            seen_answers, prefills = in_flight.seen_answers, bool(in_flight.waiting)
            service_rate.advance(now, streams=streams, full=full, seen_answers=seen_answers, prefills=prefills)
        else:
            service_rate.now = now
        if self._unaccounted_seen_tokens:
            service_rate.add_output(self._unaccounted_seen_tokens)
            self._unaccounted_seen_tokens = 0
        if self._unaccounted_cost or self._unaccounted_tokens:
            steps = max(0, self._unaccounted_tokens) / service_rate.streams
            service_rate.add_service(self._unaccounted_cost, self._unaccounted_tokens, full=full)
            in_flight.kv_tokens += self._unaccounted_tokens
            self._most_kv_tokens = max(self._most_kv_tokens, in_flight.kv_tokens)
            in_flight.kv_forecast.advance(steps)
            self._unaccounted_cost, self._unaccounted_tokens = 0.0, 0

    def _refresh_load(self) -> None:
        """Recompute the load, the room and the deadline."""
        window, service_rate, index, worker = self.window, self.service_rate, self._index, self.worker.id
        is_open, silent_at = self._open, self._silent_at()
        per_token = None if service_rate.last_start_delayed else service_rate.seconds_per_token
        load, changes_at = self.in_flight.load(
            self._now, per_token, window.low_tokens, self.mean_output.mean, window.kv_limit
        )
        room = window.room(load)
        has_room = is_open and room >= 1
        deadline = changes_at if self._now >= self._backoff.until else min(changes_at, self._backoff.until)
        self.load, self._window_room, self._is_full = load, room, window.full(load)
        self.has_room, self._load_deadline = has_room, deadline
        index.set_load(worker, load.requests, has_room=has_room)
        index.set_deadline(worker, min(deadline, silent_at))

    def _silent_at(self) -> float:
        """Return when the worker will have been silent for too long; infinite if it is idle, or silent already.

        A worker that computes a long prompt in silence is not taken to hang, judging by its own prefill time.
        """
        if self.silent or not self._silence_seconds or not self.in_flight.requests:
            return inf
        prefill = self.in_flight.unstarted_tokens * self.service_rate.seconds_per_token
        return self._last_alive + max(self._silence_seconds, SILENCE_PREFILLS * prefill)
