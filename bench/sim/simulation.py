"""Simulate the router's core with emulated engines in virtual time, in place of clients, gateway and network.

The scheduler gets the same events as from the gateway of a live router, and at the same times: `Started` with the first
token, `Progressed` for all streams at once every `progress_seconds`, `Finished` with the engine's usage and the hashes
of prompt and answer. Equal scenarios give equal records, and nothing sleeps.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from random import Random
from typing import Final, Protocol, assert_never, get_args

from bench.report.records import Result
from bench.sim.agenda import Agenda
from bench.sim.block_events import BlockEvents
from bench.sim.cells import Cells
from bench.sim.emulated_group import EmulatedGroup, EmulatedRank
from bench.sim.emulated_worker import EmulatedWorker
from bench.sim.in_flight_call import InFlightCall, request_of
from bench.sim.recorder import SimulationRecorder
from bench.sim.scenario import MODEL, Scenario, WorkerSpec
from bench.workloads.parts.prompts import BLOCK_HASHER
from bench.workloads.parts.traffic import Call, Client, Ending, Outcome
from router.core.model.commands import Command, Dispatch, Reject, WakeAt
from router.core.model.events import (
    Arrived,
    CacheReport,
    Cancelled,
    Event,
    Failed,
    Finished,
    Progressed,
    Started,
    Ticked,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
)
from router.core.model.request import BarrierId, ClientId, GroupId, Request, RequestId, SessionId, Worker, WorkerId
from router.core.policies.context import Parameters
from router.core.policies.registry import POLICIES
from router.core.predict.output_length import TrueOutputs
from router.core.scheduler import Scheduler
from workers.engine.engine import Engine
from workers.engine.model import Dialect, QueueFull, RequestTooLarge
from workers.engine.model import Request as EngineRequest

UNSEEN: Final = 1 << 31
"""The first of the token ids that no workload uses."""
ANY_ENGINE: Final = frozenset(get_args(Dialect))
DRAIN_FACTOR: Final = 20
"""A simulation may take up to this many times its length to drain."""


class Observer(Protocol):
    """Receives every event and its commands; changes nothing."""

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Called after the scheduler has handled `event` and returned `commands`."""


class Simulation:
    """One run of one scenario."""

    def __init__(self, scenario: Scenario, observers: Sequence[Observer] = ()) -> None:
        self.scenario = scenario
        self.cells = Cells(scenario) if scenario.cells else None
        self.scheduler = self._new_scheduler() if self.cells is None else self.cells.placement
        """The one scheduler; with cells, the one that places requests on them."""
        self._deciding = self.cells or self.scheduler
        self.workers: dict[WorkerId, EmulatedWorker] = {}
        """All workers that joined, including those that left."""
        self.groups: dict[str, EmulatedGroup] = {}
        """The ranks in step among them, by barrier."""
        self._block_sizes: set[int] = set()
        """The block sizes (tokens) of the workers whose KV events are followed."""
        self._reported_capacity: dict[WorkerId, int | None] = {}
        """The capacity (tokens) that each worker's metrics report, None if they do not."""
        self._observers = observers
        self._agenda = Agenda()
        self._flights: dict[RequestId, InFlightCall] = {}
        self._streams: dict[RequestId, InFlightCall] = {}
        self._true_outputs: dict[RequestId, int] = {}
        """The length of every call's answer, for policies that are told the truth."""
        self._numbers = count(1)
        self._unseen_tokens = count(UNSEEN)
        self._reporting_progress = False
        self._timer = 0
        self._pending_follow_ups = 0
        """Scheduled calls of programs that have begun."""
        clients = scenario.workload.clients(scenario.seed)
        self._recorder = SimulationRecorder(
            self.scheduler, self.workers, self.groups, {c.name: c.weight for c in clients}, self.cells
        )
        self._set_up(clients)

    def _new_scheduler(self) -> Scheduler:
        scenario = self.scenario
        policy = POLICIES[scenario.policy]
        return Scheduler(
            policy if scenario.gate is None else scenario.gate(policy),
            scenario.settings,
            Parameters(*scenario.parameters, TrueOutputs(self._true_output)),
            Random(scenario.seed),
            self._cached_at_workers if scenario.oracle else None,
        )

    def run(self) -> Result:
        """Run the simulation. Call once."""
        scenario, agenda = self.scenario, self._agenda
        agenda.run(until=scenario.warmup)
        self._recorder.begin(agenda.now)
        agenda.run(until=scenario.seconds)
        self._recorder.end(agenda.now)
        if scenario.drain:
            agenda.run(scenario.seconds * DRAIN_FACTOR, going=self._is_busy)
        for flight in list(self._flights.values()):
            self._recorder.record(flight, Outcome.UNFINISHED, agenda.now)
        return self._recorder.result()

    def _cached_at_workers(self, request: Request) -> Mapping[WorkerId, int]:
        """Return the tokens of a request that each engine would find in its cache if it began with it now."""
        prompt = self._flights[request.id].call.prompt.tokens
        found = {}
        for name, worker in self.workers.items():
            worker.catch_up()
            found[name] = worker.engine.cached_prefix_tokens(prompt)
        return {name: tokens for name, tokens in found.items() if tokens}

    def _true_output(self, request: Request) -> int:
        """Return how many tokens the answer to a request has in the end."""
        return self._true_outputs[request.id]

    def _is_busy(self) -> bool:
        """True if a call has not ended, or an engine has not yet received the cancellation of one that has."""
        if self._flights or self._pending_follow_ups:
            return True
        return any(worker.engine.has_work for worker in self.workers.values())

    def _set_up(self, clients: Sequence[Client]) -> None:
        for number, spec in enumerate(self.scenario.workers, 1):
            worker = WorkerId(f"w{number}")
            self._agenda.at(spec.joins, partial(self._join, worker, number, spec))
            if spec.leaves < self.scenario.seconds:
                self._agenda.at(spec.leaves, partial(self._leave, worker, spec))
        self._poll(0)
        for client in clients:
            self._schedule_next(client, iter(client.calls))

    def _feed(self, event: Event) -> None:
        now = self._agenda.now
        commands = self._deciding.handle(event, now)
        for observer in self._observers:
            observer.observe(now, event, commands)
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Dispatch(request):
                flight = self._flights[request]
                flight.dispatched(command, self._agenda.now)
                self._after_latency(partial(self._submit, flight))
            case Reject(request):
                self._end(self._flights[request], Outcome.REJECTED)
            case WakeAt(time):
                self._timer += 1
                self._agenda.at(time, partial(self._tick, self._timer))
            case _:
                assert_never(command)

    def _after_latency(self, action: partial[None]) -> None:
        """Schedule `action` for when a message sent now reaches the engine, or the router."""
        self._agenda.at(self._agenda.now + self.scenario.latency, action)

    def _tick(self, timer: int) -> None:
        if timer == self._timer:
            self._feed(Ticked())

    def _schedule_next(self, client: Client, calls: Iterator[Call]) -> None:
        call = next(calls, None)
        if call is not None and call.at < self.scenario.seconds:
            self._agenda.at(call.at, partial(self._arrive_and_schedule_next, client, call, calls))

    def _arrive_and_schedule_next(self, client: Client, call: Call, calls: Iterator[Call]) -> None:
        self._schedule_next(client, calls)
        self._arrive(client, call)

    def _continue(self, client: Client, call: Call) -> None:
        """Make the next call of a program, even after the end of the simulation if it drains."""
        self._pending_follow_ups -= 1
        self._arrive(client, call, late=self.scenario.drain)

    def _arrive(self, client: Client, call: Call, *, late: bool = False) -> None:
        """Make a call. `late`: whether to do so even after the end of the simulation."""
        now = self._agenda.now
        if now >= self.scenario.seconds and not late:
            return
        name = RequestId(f"r{next(self._numbers)}")
        request = Request(
            name,
            ClientId(client.name),
            call.model or MODEL,
            (call.prompt.key,),
            call.output_limit,
            call.streamed,
            weight=client.weight,
            blocks=(call.prompt.block_key(self._block_sizes),) if self._block_sizes else (),
            group=None if client.group is None else GroupId(client.group),
            answers=call.answers,
            computed_anew_by=ANY_ENGINE if call.computed_anew else frozenset(),
            session=None if call.session is None else SessionId(call.session),
        )
        flight = self._flights[name] = InFlightCall(client, call, request, now)
        self._true_outputs[name] = call.output_tokens
        self._recorder.arrived(flight)
        if call.cancel_after is not None:
            self._agenda.at(now + call.cancel_after, partial(self._cancel, flight))
        self._feed(Arrived(request))

    def _submit(self, flight: InFlightCall) -> None:
        """Submit the call to the engine, which it has just reached."""
        if flight.ended or flight.worker is None:
            return
        call = flight.call
        prompt, worker = call.prompt.tokens, self.workers[flight.worker]
        if call.computed_anew:
            prompt = (next(self._unseen_tokens), *prompt[1:])  # no engine has it in its cache
        length = call.output_tokens if call.leaves_after is None else min(call.output_tokens, call.leaves_after)
        try:
            for sample, (name, progress) in enumerate(flight.parts.items(), call.sample):
                worker.submit(EngineRequest(name, prompt, length, ignore_eos=True, sample=sample), progress)
        except (QueueFull, RequestTooLarge):
            self._abort(flight.worker, flight)
            self._after_latency(partial(self._refused, flight))

    def _refused(self, flight: InFlightCall) -> None:
        if not flight.ended:
            self._settle(flight, Failed(flight.request.id, accepted=False), Outcome.FAILED)

    def _deliver(self, name: str, last: bool) -> None:
        """Handle a request's first or last token, which has just reached the router."""
        flight = self._flights.get(request_of(name))
        if flight is None:
            return
        flight.unended -= last
        if last and flight.unended:
            return
        leaves_after = flight.call.leaves_after
        if last and leaves_after is not None and leaves_after < flight.call.output_tokens:
            self._give_up(flight)
        elif last:
            usage = flight.usage(self._agenda.now)
            self._settle(
                flight, Finished(flight.request.id, usage, flight.answers(), flight.call.ends_turn), Outcome.DONE
            )
        elif flight.call.streamed and flight.started is None:
            self._start(flight)

    def _start(self, flight: InFlightCall) -> None:
        flight.started = self._agenda.now
        self._streams[flight.request.id] = flight
        if not self._reporting_progress:
            self._reporting_progress = True
            self._schedule_progress_report()
        self._feed(Started(flight.request.id))

    def _schedule_progress_report(self) -> None:
        self._agenda.at(self._agenda.now + self.scenario.progress_seconds, self._report_progress)

    def _report_progress(self) -> None:
        """Report the tokens of every stream to the scheduler."""
        self._reporting_progress = bool(self._streams)
        if self._reporting_progress:
            self._schedule_progress_report()
        now = self._agenda.now
        progressed = {}
        for name, flight in self._streams.items():
            tokens = flight.output_seen(now)
            if tokens != flight.charged:
                flight.charged = progressed[name] = tokens
        if progressed:
            self._feed(Progressed(progressed))
            self._recorder.sample_gaps()

    def _cancel(self, flight: InFlightCall) -> None:
        """Cancel a call because its client left. The engine is notified a latency later."""
        if flight.ended:
            return
        if flight.worker is not None:
            self._after_latency(partial(self._abort, flight.worker, flight))
        usage = flight.usage(self._agenda.now) if flight.started is not None else None
        self._settle(flight, Cancelled(flight.request.id, usage), Outcome.CANCELLED)

    def _give_up(self, flight: InFlightCall) -> None:
        """Cancel a call of which the engine has generated as much as its client lets it.

        In streams the engine reports cached tokens only at the end, as vLLM does.
        """
        usage = None
        if flight.started is not None:
            usage = replace(flight.usage(self._agenda.now), cached_tokens=None)
        self._settle(flight, Cancelled(flight.request.id, usage), Outcome.CANCELLED)

    def _abort(self, worker: WorkerId, flight: InFlightCall) -> None:
        for part in flight.parts:
            self.workers[worker].abort(part)

    def _settle(self, flight: InFlightCall, ending: Finished | Failed | Cancelled, outcome: Outcome) -> None:
        self._streams.pop(flight.request.id, None)
        self._end(flight, outcome)
        self._feed(ending)

    def _end(self, flight: InFlightCall, outcome: Outcome) -> None:
        """Remove a call that has ended and schedule the calls that follow from it."""
        now = self._agenda.now
        del self._flights[flight.request.id]
        flight.ended = True
        self._recorder.record(flight, outcome, now)
        if flight.call.then is not None:
            answer = flight.answer if outcome is Outcome.DONE else ()
            for call in flight.call.then(flight.call, Ending(outcome, now, answer)):
                goes_on = call.program is not None and call.program == flight.call.program
                self._pending_follow_ups += goes_on
                self._agenda.at(call.at, partial(self._continue if goes_on else self._arrive, flight.client, call))

    def _join(self, worker: WorkerId, place: int, spec: WorkerSpec) -> None:
        scenario = self.scenario
        engine = spec.engine(scenario.seed)
        events = BlockEvents(worker, engine, BLOCK_HASHER) if scenario.kv_events else None
        emulated = self.workers[worker] = self._emulate(place, spec, engine, events)
        self._reported_capacity[worker] = engine.capacity if spec.reports_capacity else None
        config = engine.config
        batch = config.max_batched_tokens if spec.dialect == "sglang" else None  # vLLM does not report it
        facts = Worker(
            worker,
            frozenset({MODEL, *spec.adapters}),
            reorders=spec.order == "lpm",
            engine=spec.dialect,
            batch_tokens=batch,
            rank=emulated.rank,
            barrier=None if spec.barrier is None else BarrierId(spec.barrier),
        )
        self._feed(WorkerJoined(facts))
        if events is not None:
            self._block_sizes.add(config.block_size)
            self._feed(events.followed)
        self._report(worker)

    def _emulate(self, place: int, spec: WorkerSpec, engine: Engine, events: BlockEvents | None) -> EmulatedWorker:
        """Return a worker for this engine, which has joined its group if it is a rank."""
        scenario, publish = self.scenario, None if events is None else partial(self._published, events)
        parts = (engine, place, self._agenda, scenario.latency, self._deliver)
        if spec.barrier is None:
            return EmulatedWorker(*parts, jumps=scenario.jumps and events is None, publish=publish)
        rank = EmulatedRank(*parts, jumps=scenario.jumps and events is None, publish=publish)
        self.groups.setdefault(spec.barrier, EmulatedGroup(self._agenda, place)).join(rank)
        return rank

    def _published(self, events: BlockEvents) -> partial[None] | None:
        change = events.after_step()
        return None if change is None else partial(self._feed, change)

    def _leave(self, worker: WorkerId, spec: WorkerSpec) -> None:
        self._feed(WorkerLeft(worker))
        if spec.crashes:
            for flight in [flight for flight in self._flights.values() if flight.worker == worker]:
                self._abort(worker, flight)
                usage = flight.usage(self._agenda.now) if flight.started is not None else None
                self._settle(flight, Failed(flight.request.id, accepted=True, usage=usage), Outcome.FAILED)

    def _poll(self, number: int) -> None:
        """Report every worker's metrics to the scheduler."""
        self._agenda.at((number + 1) * self.scenario.poll_seconds, partial(self._poll, number + 1))
        for worker in self.workers:
            self._report(worker)
        self._recorder.sample_gaps()
        self._recorder.sample_service(self._agenda.now)

    def _report(self, worker: WorkerId) -> None:
        emulated = self.workers[worker]
        emulated.catch_up()
        engine, counters = emulated.engine, emulated.engine.counters
        evicted = counters.evicted_tokens if engine.config.dialect == "sglang" else None  # vLLM does not count them
        cache = CacheReport(
            block_tokens=engine.config.block_size,
            computed_tokens=counters.prompt_tokens,
            hit_tokens=counters.prefix_hits,
            evicted_tokens=evicted,
        )
        self._feed(WorkerReported(worker, engine.running, engine.waiting, self._reported_capacity[worker], cache))
